"""The recommenders by name: their builders, their sizes, and the Mods that they are published with. Adding one is its file and a line in each table.

    MODELS["wukong"](PUBLISHED["wukong"], SIZES["wukong"][0], seed=1, device="cpu")
"""

from __future__ import annotations

from studies.models.recommenders.dlrm import DLRM_MODS, DLRM_SIZES, dlrm_v2
from studies.models.recommenders.hstu import HSTU_MODS, HSTU_SIZES, hstu_block
from studies.models.recommenders.mods import Mods
from studies.models.recommenders.rankmixer import RANKMIXER_SIZES, rankmixer_100m
from studies.models.recommenders.wukong import WUKONG_SIZES, wukong

__all__ = ["MODELS", "PUBLISHED", "SIZES"]

MODELS = {"dlrm_v2": dlrm_v2, "wukong": wukong, "hstu": hstu_block, "rankmixer": rankmixer_100m}  # name -> builder(mods, size, *, seed, device)
SIZES = {"dlrm_v2": tuple(DLRM_SIZES), "wukong": tuple(WUKONG_SIZES), "hstu": tuple(HSTU_SIZES), "rankmixer": tuple(RANKMIXER_SIZES)}
PUBLISHED = {"dlrm_v2": DLRM_MODS, "wukong": Mods(), "hstu": HSTU_MODS, "rankmixer": Mods()}
