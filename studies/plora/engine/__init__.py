"""The engine of packed LoRA: a frozen decoder, adapters in slots, training, evaluation, checkpoints, PEFT's format.

    from studies.plora.engine import Base, EnginePack
    pack = EnginePack(Base.smollm2(device="cuda", dtype=torch.bfloat16), shape, task)
"""

_EXPORTS = {
    "Base": "studies.plora.engine.base",
    "EnginePack": "studies.plora.engine.pack",
    "SHAPES": "studies.plora.engine.shapes",
    "export_adapter": "studies.plora.engine.peft_format",
    "import_adapter": "studies.plora.engine.peft_format",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
