"""Emulation: what a product of a recipe gives, exactly, on any device: quantised operands, then a product whose additions are named.

    product_ref(a_RC, b_SC, gemm("rowwise"))                               # of FP8 operands, summed in float64: the error of the operands alone
    product_ref(a_RC, b_SC, gemm("rowwise-fast"), accumulate="hopper")     # and of Hopper's accumulator beside it

R, S, C as in kernels.fp8.recipes; axes in front are a batch. FP8 operands are those of every device, bit for bit (kernels.fp8.quantise). Sums:

    float64  of exactly dequantised operands: products are exact, and sums round at 2^-53
    float32  of operands dequantised in float32, by torch: what training on a CPU uses, for it is one matmul
    hopper   the accumulator of Hopper's FP8 tensor cores, modelled: 32 products at a time are added exactly to the accumulator, which then
             keeps 14 significant bits, towards zero (e8m13). A recipe with fast_accum runs so along the whole of C; without it partial sums
             of 128 are added up in float32, and block scales are applied to those.

The model is that of "FP22" in pytorch/pytorch#147971 and of arXiv 2512.07004, less one detail: hardware also cuts each of the 32 products at
the largest one's exponent before adding. It holds for FP8; other recipes have no such accumulator.
TF32 keeps 10 mantissa bits. Tensor cores read the upper 19 bits of a float32 and ignore the rest (truncation), while libraries round first with
cvt.rna (nearest, ties away from zero), as CUTLASS does; `round_tf32` is the latter.
"""

from __future__ import annotations

import torch

from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import BLOCK, GemmRecipe
from kernels.fp8.scaling import expand_scale

__all__ = ["ACCUMULATIONS", "multiply_ref", "product_ref", "round_tf32", "truncate"]

ACCUMULATIONS = ("float64", "float32", "hopper")
STEP = 32  # products that a tensor core adds at once: one k-step of an FP8 wgmma
ACCUMULATOR_BITS = 14
_FLOAT64_BITS = 53


def product_ref(a_RC: torch.Tensor, b_SC: torch.Tensor, recipe: GemmRecipe, *, accumulate: str = "float64") -> torch.Tensor:
    """a [..., R, C] times b [..., S, C] transposed in `recipe` -> [..., R, S], float64 with accumulate="float64", else float32.

    Raises ValueError for an unknown accumulation, for operands whose C differ, and for "hopper" where the recipe is not FP8.
    """
    _check(a_RC, b_SC, recipe, accumulate)
    if recipe.is_fp8:
        return multiply_ref(quantise_ref(a_RC, recipe.a), quantise_ref(b_SC, recipe.b), recipe, accumulate=accumulate)
    a, b = (_rounded(x, recipe.dtype).to(getattr(torch, accumulate)) for x in (a_RC, b_SC))
    return a @ b.mT


def multiply_ref(a: Quantised, b: Quantised, recipe: GemmRecipe, *, accumulate: str = "float64") -> torch.Tensor:
    """The product of operands that are quantised already; `product_ref` says the rest."""
    _check(a.data_RC, b.data_RC, recipe, accumulate)
    if accumulate == "hopper":
        return _hopper(a, b, recipe.fast_accum)
    a_RC, b_SC = (_dequantised(x, getattr(torch, accumulate)) for x in (a, b))
    return a_RC @ b_SC.mT


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with 10 mantissa bits, to nearest, ties away from zero; infinities and NaN stay."""
    bits = x.float().contiguous().view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x.float())


def truncate(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 with `bits` significant bits, towards zero."""
    return (x.view(torch.int64) & -(1 << (_FLOAT64_BITS - bits))).view(torch.float64)


def _check(a_RC: torch.Tensor, b_SC: torch.Tensor, recipe: GemmRecipe, accumulate: str) -> None:
    if accumulate not in ACCUMULATIONS:
        raise ValueError(f"an accumulation is one of {ACCUMULATIONS}, got {accumulate=}")
    if accumulate == "hopper" and not recipe.is_fp8:
        raise ValueError(f"Hopper's short accumulator is that of fp8 products, got recipe {recipe.name!r}; accumulate in float32 or float64")
    if a_RC.ndim < 2 or b_SC.ndim < 2 or a_RC.shape[-1] != b_SC.shape[-1]:
        raise ValueError(f"operands are [..., R, C] and [..., S, C], got {tuple(a_RC.shape)} and {tuple(b_SC.shape)}; both have the contracted axis last")


def _rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """An operand as a product in fp32, tf32 or bf16 reads it. fp32 takes float64 as it is."""
    if dtype == "fp32":
        return x
    return round_tf32(x) if dtype == "tf32" else x.to(torch.bfloat16)


def _dequantised(x: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Exact in float64: 4 significant bits times 24."""
    return x.data_RC.to(dtype) * expand_scale(x.scale, tuple(x.data_RC.shape), x.operand.granularity).to(dtype)


def _hopper(a: Quantised, b: Quantised, fast: bool) -> torch.Tensor:
    """Partial sums of STEP products through an accumulator of ACCUMULATOR_BITS, promoted to float32 every BLOCK unless `fast`."""
    blocked = [x.operand.granularity in ("block", "square") for x in (a, b)]
    if fast and any(blocked):
        raise ValueError("scales that change every 128 of C need partial sums there, so fast accumulation along the whole of C cannot be; choose a recipe without")
    a_RC, b_SC = a.data_RC.double(), b.data_RC.double()
    total = accumulator = (a_RC[..., :0] @ b_SC[..., :0].mT).float().double()
    c = a_RC.shape[-1]
    for start in range(0, c, STEP):
        accumulator = truncate(accumulator + a_RC[..., start : start + STEP] @ b_SC[..., start : start + STEP].mT, ACCUMULATOR_BITS)
        end = start + STEP
        if end >= c or (not fast and end % BLOCK == 0):
            total = (total + _scaled(accumulator, a, b, blocked, start // BLOCK)).float().double()
            accumulator = torch.zeros_like(accumulator)
    return _scaled(total, a, b, [not x for x in blocked], 0).float()


def _scaled(out_RS: torch.Tensor, a: Quantised, b: Quantised, which: list[bool], block: int) -> torch.Tensor:
    """out_RS times the scales of the operands that `which` names, a float32 rounding each; block scales are those of the 128 of C at `block`."""
    if which[0]:
        out_RS = (out_RS * _column(a, block)).float().double()
    if which[1]:
        scale = _column(b, block)
        out_RS = (out_RS * (scale.mT if scale.ndim else scale)).float().double()
    return out_RS


def _column(x: Quantised, block: int) -> torch.Tensor:
    """Scales of an operand's rows at the 128 of C that `block` counts: float64 [..., R, 1], or [] of a tensor."""
    scale, granularity = x.scale.double(), x.operand.granularity
    if granularity in ("block", "square"):
        scale = scale[..., block : block + 1]
    return scale.repeat_interleave(BLOCK, -2)[..., : x.data_RC.shape[-2], :] if granularity == "square" else scale
