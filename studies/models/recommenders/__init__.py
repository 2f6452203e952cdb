"""Recommenders at the sizes of the literature, with LoKA's Mods as switches, and a small size of each for CPUs.

    from studies.models.recommenders import LOKA_MODS, MODELS
    model = MODELS["wukong"](LOKA_MODS, "small", seed=1)
    logit_B = model(*model.example(batch=8, seed=0))
    model.flops_per_example                                    # of a forward pass, products only

Each is a plain module from dense and already embedded features to one logit an example, symbolically traceable by torch.fx. Adding a model is one
file and one entry in `MODELS`. Nothing here knows of FP8, and nobody trained these weights.
"""

from studies.models.recommenders.dlrm import DLRM_MODS, DLRM_SIZES, dlrm_v2
from studies.models.recommenders.hstu import HSTU_MODS, HSTU_SIZES, hstu_block
from studies.models.recommenders.inputs import Embeddings, embeddings, example_inputs, power_law_ids
from studies.models.recommenders.mods import LOKA_MODS, BlockNorm, Mods
from studies.models.recommenders.rankmixer import RANKMIXER_SIZES, rankmixer_100m
from studies.models.recommenders.wukong import WUKONG_SIZES, wukong

__all__ = [
    "LOKA_MODS", "MODELS", "PUBLISHED", "SIZES", "BlockNorm", "Embeddings", "Mods", "dlrm_v2", "embeddings", "example_inputs", "hstu_block",
    "power_law_ids", "rankmixer_100m", "wukong",
]  # fmt: skip

MODELS = {"dlrm_v2": dlrm_v2, "wukong": wukong, "hstu": hstu_block, "rankmixer": rankmixer_100m}  # name -> builder(mods, size, *, seed, device)
SIZES = {"dlrm_v2": tuple(DLRM_SIZES), "wukong": tuple(WUKONG_SIZES), "hstu": tuple(HSTU_SIZES), "rankmixer": tuple(RANKMIXER_SIZES)}
PUBLISHED = {"dlrm_v2": DLRM_MODS, "wukong": Mods(), "hstu": HSTU_MODS, "rankmixer": Mods()}
