"""Many LoRA fine-tunings at once on one frozen base, searched by Optuna.

    from studies import plora

    task = plora.from_pairs(rows, tokenizer, tokens=64, classes=True)
    found = plora.tune(model, task, plora.PAPER, plora.Budget(trials=64, tokens=200_000), home="out/tuning")

Works on any Llama or Qwen2 model of transformers: README.md has a complete example. Importing this is light; each name below is loaded when it is first used.
"""

_EXPORTS = {
    "AdapterConfig": "studies.plora.adapter",
    "Base": "studies.plora.engine.base",
    "Budget": "studies.plora.search.tune",
    "Choice": "studies.plora.search.space",
    "EnginePack": "studies.plora.engine.pack",
    "Float": "studies.plora.search.space",
    "Halving": "studies.plora.search.pruner",
    "Int": "studies.plora.search.space",
    "Levels": "studies.plora.search.space",
    "NO_PRUNING": "studies.plora.search.pruner",
    "PAPER": "studies.plora.search.space",
    "PackShape": "studies.plora.adapter",
    "SlotShape": "studies.plora.adapter",
    "Space": "studies.plora.search.space",
    "Strategy": "studies.plora.search.driver",
    "Task": "studies.plora.data.task",
    "drive": "studies.plora.search.driver",
    "from_pairs": "studies.plora.data.pairs",
    "load_task": "studies.plora.data.sets",
    "search_of": "studies.plora.search.driver",
    "tune": "studies.plora.search.tune",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
