"""Recommenders at the sizes of the literature, with LoKA's Mods as switches, and a small size of each for CPUs.

    from studies.models.recommenders import LOKA_MODS, MODELS
    model = MODELS["wukong"](LOKA_MODS, "small", seed=1)
    logit_B = model(*model.example(batch=8, seed=0))
    model.flops_per_example                                    # of a forward pass, products only

Each is a plain module from dense and already embedded features to one logit an example, symbolically traceable by torch.fx. Nothing here knows of
FP8, and nobody trained these weights.
"""

_EXPORTS = {
    "BlockNorm": "studies.models.recommenders.mods",
    "Embeddings": "studies.models.recommenders.inputs",
    "LOKA_MODS": "studies.models.recommenders.mods",
    "MODELS": "studies.models.recommenders.catalogue",
    "Mods": "studies.models.recommenders.mods",
    "PUBLISHED": "studies.models.recommenders.catalogue",
    "SIZES": "studies.models.recommenders.catalogue",
    "dlrm_v2": "studies.models.recommenders.dlrm",
    "embeddings": "studies.models.recommenders.inputs",
    "example_inputs": "studies.models.recommenders.inputs",
    "hstu_block": "studies.models.recommenders.hstu",
    "power_law_ids": "studies.models.recommenders.inputs",
    "rankmixer_100m": "studies.models.recommenders.rankmixer",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
