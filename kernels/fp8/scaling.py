"""The scale of a group of numbers that are quantised together: one rule, for references and for kernels.

    scale, r = scale_rule_ref(torch.tensor([3.0, 0.0]), E4M3)   # q = cast(x r), x ~ q scale; a group of zeros has scale 1

With amax the largest finite |x| of a group and F the format's largest number, every operation an IEEE float32 one:

    amax' = max(amax, 2^-100)                                    so that no scale and no reciprocal leaves float32's normal range
    scale = div_rn(amax', F)        r = div_rn(F, amax')         q = cast(x r)
    power of two: scale = 2^e, r = 2^-e, e the smallest with amax' <= F 2^e, from the exponent bits of amax' (never a logarithm)
    amax = 0: scale = r = 1

|x r| <= F (1 + 2^-23) for a finite x, which the cast's clamp takes back to F. NaN stays NaN (its sign bit is unspecified), infinities become
+-F; neither enters an amax. A group is all of the tensor, a row, 128 in a row, or 128 x 128 (kernels.fp8.recipes); the last block of a row
or column may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.fp8.formats import Format
from kernels.fp8.recipes import BLOCK, GRANULARITIES

__all__ = ["MIN_AMAX", "amax_ref", "expand_scale", "finite_abs", "fp8_bits", "scale_rule", "scale_rule_ref", "scale_shape"]

MIN_AMAX = 2.0**-100
_MIN_AMAX = tl.constexpr(MIN_AMAX)
# 448 = 1.75 2^8 and 57344 = 1.75 2^15: amax' <= F 2^e compares the mantissa of amax' with 1.75's
_MANTISSA_1_75 = tl.constexpr(0x600000)


def scale_shape(shape: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    """Shape of the scales of a tensor of `shape` [..., R, C]: [] | [..., R, 1] | [..., R, ceil(C/128)] | [..., ceil(R/128), ceil(C/128)]."""
    *batch, r, c = shape
    shapes = {"tensor": (), "row": (*batch, r, 1), "block": (*batch, r, -(-c // BLOCK)), "square": (*batch, -(-r // BLOCK), -(-c // BLOCK))}
    if granularity not in shapes:
        raise ValueError(f"a granularity is one of {GRANULARITIES}, got {granularity=}")
    return shapes[granularity]


def amax_ref(x_RC: torch.Tensor, granularity: str) -> torch.Tensor:
    """The largest finite |x| of every group, 0 for a group without one -> float32 of `scale_shape`. x: [..., R, C]."""
    if x_RC.numel() == 0:
        return torch.zeros(scale_shape(tuple(x_RC.shape), granularity), dtype=torch.float32, device=x_RC.device)
    x = x_RC.float()
    top = torch.maximum(_reduce(x, granularity, torch.amax), -_reduce(x, granularity, torch.amin))  # ten times faster than abs on a CPU
    if not torch.compiler.is_compiling() and top.isfinite().all():  # NaN and infinities come through both; a compiled function has no such branch
        return top
    a = x.abs()
    return _reduce(torch.where(a < float("inf"), a, 0.0), granularity, torch.amax)


def _reduce(x: torch.Tensor, granularity: str, most: Callable[..., torch.Tensor]) -> torch.Tensor:
    """amax or amin of every group; zeros fill the blocks that are cut off."""
    shape = scale_shape(tuple(x.shape), granularity)
    if granularity == "tensor":
        return most(x)
    if granularity == "row":
        return most(x, -1, keepdim=True)
    *batch, r, c = x.shape
    rows = r if granularity == "block" else shape[-2] * BLOCK
    if (rows, shape[-1] * BLOCK) != (r, c):
        x = torch.nn.functional.pad(x, (0, shape[-1] * BLOCK - c, 0, rows - r))
    x = most(x.reshape(*batch, rows, shape[-1], BLOCK), -1)
    return x if granularity == "block" else most(x.view(*batch, shape[-2], BLOCK, shape[-1]), -2)


def scale_rule_ref(amax: torch.Tensor, fmt: Format, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, r) of groups with these amax (float32, finite, >= 0), by the rule above."""
    clamped = amax.clamp(min=MIN_AMAX)
    if power_of_two:
        bits = clamped.view(torch.int32)
        e = (bits >> 23) - 127 - (_exponent_of_max(fmt) - 1) - ((bits & 0x7FFFFF) <= _MANTISSA_1_75.value).int()
        scale, r = (((127 + sign * e) << 23).view(torch.float32) for sign in (1, -1))
    else:
        top = torch.full_like(clamped, fmt.max)
        scale, r = clamped / top, top / clamped
    return torch.where(amax > 0, scale, 1.0), torch.where(amax > 0, r, 1.0)


def _exponent_of_max(fmt: Format) -> int:
    exponent = int(fmt.max).bit_length() - 1
    assert fmt.max == 1.75 * 2.0**exponent, f"the power-of-two rule compares with 1.75, got {fmt}"
    return exponent


def expand_scale(scale: torch.Tensor, shape: tuple[int, ...], granularity: str) -> torch.Tensor:
    """Scales of `scale_shape(shape)`, broadcastable against a tensor of `shape`."""
    if granularity not in ("block", "square"):
        return scale
    high = BLOCK if granularity == "square" else 1
    *batch, rows, blocks = scale.shape
    wide = scale[..., :, None, :, None].expand(*batch, rows, high, blocks, BLOCK).reshape(*batch, rows * high, blocks * BLOCK)
    return wide[..., : shape[-2], : shape[-1]]


# ---- the same rule inside kernels ----------------------------------------------------------------------------------------------


@triton.jit
def finite_abs(x):
    """|x| where it is finite, else 0: what an amax is taken of. x: float32."""
    a = tl.abs(x)
    return tl.where(a < float("inf"), a, 0.0)


@triton.jit
def scale_rule(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, r) of groups with these amax (float32 tensor): `scale_rule_ref`, bit for bit. MAX: the format's largest number."""
    clamped = tl.maximum(amax, _MIN_AMAX)
    if POWER_OF_TWO:
        TOP: tl.constexpr = 8 if MAX == 448.0 else 15
        bits = clamped.to(tl.int32, bitcast=True)
        e = (bits >> 23) - (127 + TOP - 1) - ((bits & 0x7FFFFF) <= _MANTISSA_1_75).to(tl.int32)
        scale = ((127 + e) << 23).to(tl.float32, bitcast=True)
        r = ((127 - e) << 23).to(tl.float32, bitcast=True)
    else:
        top = tl.zeros_like(clamped) + MAX
        scale, r = tl.div_rn(clamped, top), tl.div_rn(top, clamped)
    return tl.where(amax > 0, scale, 1.0), tl.where(amax > 0, r, 1.0)


@triton.jit
def fp8_bits(v, FP8: tl.constexpr):
    """`formats.cast` of v (float32), as uint8. PTX rounds to nearest even and saturates (cvt.rn.satfinite), infinities too: no clamp.

    Bytes, and no comparison that could become a NaN-propagating minimum: transposed stores of fp8 values beside those are miscompiled (triton#11111).
    """
    return v.to(FP8).to(tl.uint8, bitcast=True)
