"""Text to tune adapters on: token ids with an answer, split into training, validation and test rows.

    from studies.plora.data import synthetic, load_task
    task = synthetic(vocabulary=512, classes=8, seed=0)                # learnable, nothing to download
    task = load_task("banking77", tokens=96)                           # real text by SmolLM2's tokenizer

`Task` and `Examples` say what an engine needs; each set has a file of its own; `tokens` turns text into ids.
"""

_EXPORTS = {
    "Examples": "studies.plora.data.task",
    "Task": "studies.plora.data.task",
    "load_task": "studies.plora.data.sets",
    "synthetic": "studies.plora.data.planted",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
