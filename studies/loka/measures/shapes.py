"""Shapes of the crossover map: linear layers y_MN = x_MK w_NK^T of large recommenders, M examples (or tokens), K inputs, N outputs.

    SHAPES["wukong-5.6 fmb mlp, first"]        # Shape(m=6144, k=4608, n=4096, ...)

At most 60, each with where it comes from: the sites of studies.models.recommenders at the batches that the literature trains with (a test compares),
LoKA's smallest and largest production shapes (arXiv 2605.10886, second-hand), and a square grid around the break-even.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST", "SHAPES", "Shape"]

MOST = 60


@dataclass(frozen=True, kw_only=True)
class Shape:
    m: int
    k: int
    n: int
    source: str

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 1:
            raise ValueError(f"a shape has at least one row, input and output, got {self.m=} {self.k=} {self.n=}")


def _layers(name: str, source: str, m: int, **k_n: tuple[int, int]) -> dict[str, Shape]:
    return {f"{name} {layer.replace('_', ' ')}, {m}": Shape(m=m, k=k, n=n, source=source) for layer, (k, n) in k_n.items()}


DLRM = dict(
    bottom_1=(13, 512), bottom_2=(512, 256), bottom_3=(256, 128), cross_down=(3456, 512), cross_up=(512, 3456),
    over_1=(3456, 1024), over_2=(1024, 1024), over_3=(1024, 512), head=(256, 1),
)  # fmt: skip
WUKONG_56 = dict(
    first_fmb_in=(768 * 48, 4096), fmb_in=(96 * 48, 4096), fmb_hidden=(4096, 4096), fmb_out=(4096, 7680), over_1=(15360, 4096), over_2=(4096, 2048), over_3=(2048, 1024)
)
WUKONG_125 = dict(first_fmb_in=(768 * 24, 2048), fmb_in=(64 * 24, 2048), fmb_hidden=(2048, 2048), fmb_out=(2048, 5120), over_1=(10240, 4096))
HSTU = dict(uvqk=(512, 2048), out=(1536, 512))
RANKMIXER = dict(token_up=(768, 2048), token_down=(2048, 768))  # one of its 16 tokens

SHAPES: dict[str, Shape] = {
    **_layers("dlrm-v2", "MLPerf DLRM-v2, 65536 examples on 8 GPUs", 8192, **DLRM),
    **_layers("dlrm-v2", "MLPerf DLRM-v2, 65536 examples on one GPU", 65536, cross_down=(3456, 512), cross_up=(512, 3456), over_1=(3456, 1024), over_2=(1024, 1024)),
    **_layers("wukong-5.6", "Wukong (2403.02545), LoKA's batch on an H100", 6144, **WUKONG_56),
    **_layers("wukong-1.25", "Wukong (2403.02545), LoKA's batch on an H100", 6144, **WUKONG_125),
    **_layers("wukong-1.25", "Wukong (2403.02545)", 2048, fmb_in=(64 * 24, 2048), over_1=(10240, 4096)),
    # compressions of embeddings: M is examples times 160 features
    **_layers("wukong-5.6", "Wukong's compressions, 6144 x 160 rows", 983040, lcb=(96, 48), first_lcb=(768, 48), first_residual=(768, 96)),
    **_layers("hstu", "generative-recommenders, 64 sequences of 256 tokens", 16384, **HSTU),
    **_layers("hstu", "generative-recommenders, 256 sequences of 256 tokens", 65536, **HSTU),
    **_layers("rankmixer-100m", "RankMixer (2507.15551)", 8192, **RANKMIXER),
    **_layers("loka", "LoKA's production shapes, smallest and largest", 2048, smallest=(256, 768), largest=(123200, 1024)),
    **_layers("grid", "around the break-even", 2048, n128=(128, 128), n256=(256, 256), n512=(512, 512), n1024=(1024, 1024), n2048=(2048, 2048), n4096=(4096, 4096), n8192=(8192, 8192)),
    **_layers("grid", "around the break-even", 8192, n128=(128, 128), n256=(256, 256), n512=(512, 512), n2048=(2048, 2048), n4096=(4096, 4096)),
    **_layers("grid", "LoKA's batch by its longest MLP", 6144, longest=(18432, 8192)),
}  # fmt: skip
assert len(SHAPES) <= MOST, f"one lease times at most {MOST} shapes, got {len(SHAPES)}"
