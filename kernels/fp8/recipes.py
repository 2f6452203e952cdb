"""Recipes: in which precision one matrix product runs, and which recipes there are.

    gemm("rowwise")                             # a product's recipe by name
    RECIPES["rowwise-hp-wgrad"].wgrad.name      # "bf16": a layer's three products have one each

Every product here is out_RS = a_RC b_SC^T: both operands have the contracted axis C last. A linear layer y_MN = x_MK w_NK^T has three:

    forward  y_MN  = x_MK  w_NK^T          a = x     b = w       R = M  S = N  C = K
    dgrad    dx_MK = dy_MN w_NK            a = dy    b = w^T     R = M  S = K  C = N
    wgrad    dw_NK = dy_MN^T x_MK          a = dy^T  b = x^T     R = N  S = K  C = M

A granularity says how many numbers share a scale: `tensor` all of them, `row` the C numbers of a row, `block` 128 in a row (1 x 128), and
`square` 128 x 128. Recipes say nothing about speed, and whether a device can run one is asked elsewhere (kernels.fp8.gemm.unsupported).
Adding a recipe is adding one entry in `GEMMS`, and in `RECIPES` if layers can use it as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan is read and listed without torch
    from kernels.fp8 import formats

__all__ = ["GEMMS", "GRANULARITIES", "PASSES", "RECIPES", "GemmRecipe", "OperandRecipe", "Recipe", "gemm"]

FORMATS = ("e4m3", "e5m2")
GRANULARITIES = ("tensor", "row", "block", "square")
PASSES = ("forward", "dgrad", "wgrad")
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class OperandRecipe:
    """How one operand of a product is quantised."""

    fmt: str  # "e4m3" or "e5m2"
    granularity: str
    power_of_two: bool = False  # scales rounded to the next power of two, so that scaling rounds nothing

    def __post_init__(self) -> None:
        if self.fmt not in FORMATS:
            raise ValueError(f"a format is one of {FORMATS}, got {self.fmt=}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"a granularity is one of {GRANULARITIES}, got {self.granularity=}")

    @property
    def format(self) -> formats.Format:
        from kernels.fp8 import formats

        return formats.BY_NAME[self.fmt]


@dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """One product. `a` and `b` are None for products in `dtype` without quantising: "bf16", "tf32" or "fp32"."""

    name: str
    a: OperandRecipe | None = None
    b: OperandRecipe | None = None
    dtype: str = "fp8"
    fast_accum: bool = False  # Hopper's tensor cores add with about 14 bits along the whole of C; without, partial sums are promoted to fp32

    def __post_init__(self) -> None:
        if (self.dtype == "fp8") != (self.a is not None and self.b is not None):
            raise ValueError(f"an fp8 product quantises both operands and any other none, got {self.dtype=} {self.a=} {self.b=}")
        if self.a and self.b and self.a.fmt == self.b.fmt == "e5m2":
            raise ValueError("no tensor core multiplies e5m2 by e5m2; choose e4m3 for one operand")

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "fp8"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A linear layer's three products."""

    name: str
    forward: GemmRecipe
    dgrad: GemmRecipe
    wgrad: GemmRecipe

    def of(self, which: str) -> GemmRecipe:
        """The product of a pass of PASSES."""
        if which not in PASSES:
            raise ValueError(f"a pass is one of {PASSES}, got {which!r}")
        return getattr(self, which)


def _fp8(name: str, a: str, b: str, granularity: str, *, b_granularity: str = "", power_of_two: bool = False, fast_accum: bool = False) -> GemmRecipe:
    return GemmRecipe(
        name=name, fast_accum=fast_accum, a=OperandRecipe(fmt=a, granularity=granularity, power_of_two=power_of_two),
        b=OperandRecipe(fmt=b, granularity=b_granularity or granularity, power_of_two=power_of_two),
    )  # fmt: skip


GEMMS = {
    g.name: g
    for g in (
        GemmRecipe(name="fp32", dtype="fp32"),
        GemmRecipe(name="tf32", dtype="tf32"),
        GemmRecipe(name="bf16", dtype="bf16"),
        _fp8("tensorwise", "e4m3", "e4m3", "tensor"),
        _fp8("tensorwise-fast", "e4m3", "e4m3", "tensor", fast_accum=True),
        _fp8("tensorwise-grad", "e5m2", "e4m3", "tensor"),  # a gradient by a weight or an activation, as torchao pairs them
        _fp8("rowwise", "e4m3", "e4m3", "row"),
        _fp8("rowwise-fast", "e4m3", "e4m3", "row", fast_accum=True),
        _fp8("rowwise-p2", "e4m3", "e4m3", "row", power_of_two=True),
        _fp8("rowwise-grad", "e5m2", "e4m3", "row"),
        _fp8("blockwise", "e4m3", "e4m3", "block", b_granularity="square"),  # 1 x 128 by 128 x 128, as DeepSeek-V3 trains
        _fp8("blockwise-both", "e4m3", "e4m3", "block"),  # 1 x 128 by 1 x 128, its weight gradients
        _fp8("e5m2-tensorwise", "e5m2", "e4m3", "tensor"),  # activations in e5m2: too coarse on purpose, the planted-bad arm
    )
}


def gemm(name: str) -> GemmRecipe:
    """The product's recipe of that name. Raises ValueError with the names there are."""
    if name not in GEMMS:
        raise ValueError(f"a product's recipe is one of {sorted(GEMMS)}, got {name!r}")
    return GEMMS[name]


def _layer(name: str, forward: str, dgrad: str, wgrad: str) -> Recipe:
    return Recipe(name=name, forward=gemm(forward), dgrad=gemm(dgrad), wgrad=gemm(wgrad))


RECIPES = {
    r.name: r
    for r in (
        _layer("fp32", "fp32", "fp32", "fp32"),
        _layer("tf32", "tf32", "tf32", "tf32"),
        _layer("bf16", "bf16", "bf16", "bf16"),
        _layer("tensorwise", "tensorwise-fast", "tensorwise-grad", "tensorwise-grad"),
        _layer("rowwise", "rowwise-fast", "rowwise-p2", "rowwise-p2"),
        _layer("rowwise-hp-wgrad", "rowwise-fast", "rowwise-p2", "bf16"),
        _layer("rowwise-precise", "rowwise", "rowwise", "rowwise"),
        _layer("blockwise", "blockwise", "blockwise", "blockwise-both"),
        _layer("forward-only", "rowwise-fast", "bf16", "bf16"),
        _layer("planted-bad", "e5m2-tensorwise", "tensorwise-grad", "tensorwise-grad"),
    )
}
