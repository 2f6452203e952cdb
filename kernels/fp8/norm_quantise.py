"""Norm, activation and quantising in one kernel: 2 bytes of x read, 1 byte written, where separate kernels move 2 + 2 + 2 + 1.

    q, saved = norm_quantise(x_MK, "layernorm", "silu", OperandRecipe(fmt="e4m3", granularity="row"), w_K, b_K, keep=True)
    q.dequantise()                                     # ~ silu(layernorm(x)); saved.y_MK is that in x's dtype, for a product in bf16

Legend: M rows, K features. The math is kernels.fp8.epilogue's; the result y is rounded to x's dtype as if it had been written, then
quantised, so `q` equals `quantise_ref(saved.y_MK, operand)` bit for bit: fusing changes no number. y itself is within a rounding of x's
dtype of the float64 reference; sums of a row are float32.

Bytes per element (x in bf16): 2 read, 1 written, and 4 a scale: 3 + 4/K by row, 3 + 4/128 by block; keep=True writes 2 more, and 4 or 8
a row or block of statistics. Floor on an H200 whose copy moves 4.19 TB/s: 8192 x 4096 in 24 us. Row-major x; the gradient is
kernels.fp8.norm_backward's. A whole row lies in one program, so K is at most 16384.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.fp8.epilogue import FEATURES, activate, activate_ref, check_norm, normalise, normalise_ref, quantise_tile
from kernels.fp8.formats import E4M3, cast
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import BLOCK, OperandRecipe
from kernels.fp8.scaling import fp8_bits, scale_shape
from kernels.fp8.schedule import H200_SMS

__all__ = ["MAX_K", "RowSchedule", "Saved", "norm_quantise", "norm_quantise_ref", "row_schedule"]

MAX_K = 16384
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Saved:
    """What backward needs beside x: y [..., K] in x's dtype; float32 mean [..., 1] (layernorm) and rstd [..., groups] (any norm), else None."""

    y_MK: torch.Tensor
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RowSchedule:
    """A program has `rows` whole rows in tiles of `width`, a power of two."""

    rows: int
    width: int
    num_warps: int


def row_schedule(k: int, *, m: int = 1 << 31, at_least: int = 16, per_thread: int = 32) -> RowSchedule:
    """4 warps with 32 numbers a thread (two or more 16-byte loads in flight each, 8 programs an SM); more warps once a row exceeds that.

    Few rows are spread over twice the SMs of an H200, as long as every thread keeps 8 numbers, one 16-byte load.
    """
    width = max(triton.next_power_of_2(k), at_least)
    num_warps = min(max(width // (32 * per_thread), 4), 16)
    rows, least = (max(num_warps * 32 * each // width, 1) for each in (per_thread, 8))
    while rows > least and m < 2 * H200_SMS * rows:
        rows //= 2
    return RowSchedule(rows=rows, width=width, num_warps=num_warps)


def check_rows(x: torch.Tensor, norm: str, activation: str, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, block: int) -> None:
    """Raises ValueError with the rule that is broken; shared with norm_backward."""
    check_norm(norm, activation, eps, block)
    if x.ndim < 2 or x.dtype not in _FLOATS or not 0 < x.shape[-1] <= MAX_K:
        raise ValueError(f"x is [..., M, K] in bf16, fp16 or fp32 with 1 <= K <= {MAX_K}, got {tuple(x.shape)=} {x.dtype}; for longer rows run norm and quantise apart")
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None and norm not in ("layernorm", "rmsnorm"):
            raise ValueError(f"layernorm and rmsnorm have a weight and a bias, got {name} with {norm=}; leave it out")
        if v is not None and (v.shape != x.shape[-1:] or v.dtype not in _FLOATS):
            raise ValueError(f"a {name} is [K] in bf16, fp16 or fp32, got {tuple(v.shape)} {v.dtype} for {x.shape[-1]=}")


def _check_operand(operand: OperandRecipe, scale: torch.Tensor | None) -> None:
    if operand.granularity == "square":
        raise ValueError("a scale of 128 x 128 spans 128 rows, and a program here has a few: quantise by row, by block, or behind the norm")
    if (operand.granularity == "tensor") != (scale is not None):
        raise ValueError(
            f"one scale for the tensor is given (delayed or static), others are found here, got {operand.granularity=} with scale={scale}; "
            "its amax would need a second read: pass scale=, or use quantise behind the norm"
        )
    if scale is not None and (scale.shape != () or scale.dtype != torch.float32):
        raise ValueError(f"a given scale is a float32 tensor of shape [], got {tuple(scale.shape)} {scale.dtype}")


def _quantise_by(y: torch.Tensor, operand: OperandRecipe, scale: torch.Tensor | None) -> Quantised:
    if scale is None:
        return quantise_ref(y, operand)
    return Quantised(cast(y.float() * (torch.ones_like(scale) / scale), operand.format), scale, operand)


def norm_quantise_ref(
    x_MK: torch.Tensor, norm: str, activation: str, operand: OperandRecipe, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, block: int = FEATURES, keep: bool = False, *, scale: torch.Tensor | None = None,
) -> tuple[Quantised, Saved | None]:  # fmt: skip
    """`norm_quantise` on any device: norm and activation in float64, one rounding to x's dtype, then `quantise_ref`."""
    check_rows(x_MK, norm, activation, weight, bias, eps, block)
    _check_operand(operand, scale)
    x = x_MK.detach()
    y = activate_ref(normalise_ref(x, norm, weight, bias, eps, block), activation).to(x.dtype)
    q = _quantise_by(y, operand, scale)
    if not keep:
        return q, None
    mean, rstd = None, None
    if norm == "layernorm":
        mean = x.double().mean(-1, keepdim=True)
    if norm != "none":
        centred = x.double() - (0 if mean is None else mean)
        blocks = centred.split(block, -1) if norm == "blocknorm" else (centred,)
        rstd = torch.cat([torch.rsqrt(b.square().mean(-1, keepdim=True) + eps) for b in blocks], -1).float()
    return q, Saved(y_MK=y, mean=None if mean is None else mean.float(), rstd=rstd)


# ---- kernel --------------------------------------------------------------------------------------------------------------------


@triton.jit
def norm_quantise_kernel(
    x_ptr, w_ptr, b_ptr, given_ptr, q_ptr, scale_ptr, y_ptr, mean_ptr, rstd_ptr, M, K, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GRANULARITY: tl.constexpr, FP8: tl.constexpr, MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS whole rows, read once into registers. w, b, given, y, mean, rstd may be None."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, col = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    rows_left = M - first
    at = row[:, None] * K + col[None, :]
    inside = (row[:, None] < rows_left) & (col[None, :] < K)
    x = tl.load(x_ptr + first * K + at, mask=inside, other=0.0).to(tl.float32)
    y, mean, r = normalise(x, col, K, eps, NORM, BLOCK)
    if w_ptr is not None:
        y *= tl.load(w_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACTIVATION).to(x_ptr.dtype.element_ty)  # rounded as if it had been written: q is what quantising y gives
    if y_ptr is not None:
        tl.store(y_ptr + first * K + at, y, mask=inside)
    if mean_ptr is not None:
        tl.store(mean_ptr + first + row, mean, mask=row < rows_left)
    if rstd_ptr is not None:
        groups = tl.cdiv(K, BLOCK) if NORM == "blocknorm" else 1
        g = tl.arange(0, r.shape[1])
        tl.store(rstd_ptr + first * groups + row[:, None] * groups + g[None, :], r, mask=(row[:, None] < rows_left) & (g[None, :] < groups))
    given = 1.0
    if given_ptr is not None:
        given = tl.load(given_ptr)
    v, scale = quantise_tile(y.to(tl.float32), given, GRANULARITY, MAX, POWER_OF_TWO)
    tl.store(q_ptr + first * K + at, fp8_bits(v, FP8), mask=inside)
    if GRANULARITY != "tensor":
        blocks = tl.cdiv(K, 128) if GRANULARITY == "block" else 1
        g = tl.arange(0, scale.shape[1])
        tl.store(scale_ptr + first * blocks + row[:, None] * blocks + g[None, :], scale, mask=(row[:, None] < rows_left) & (g[None, :] < blocks))


@on_gpu("norm_quantise")
def norm_quantise(
    x_MK: torch.Tensor, norm: str, activation: str, operand: OperandRecipe, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, block: int = FEATURES, keep: bool = False, *, scale: torch.Tensor | None = None, schedule: RowSchedule | None = None,
) -> tuple[Quantised, Saved | None]:  # fmt: skip
    """(activation(norm(x)) in FP8, what backward needs if `keep` else None), on a GPU in one launch.

    x: [..., M, K] in bf16, fp16 or fp32, row-major or copied to be. operand: by row, by 1 x 128 block, or by tensor with its `scale`, a float32
    [] that x's amax has not been checked against: larger values clamp. Raises ValueError for what these rules exclude.
    """
    check_rows(x_MK, norm, activation, weight, bias, eps, block)
    _check_operand(operand, scale)
    x, k = x_MK.detach().contiguous(), x_MK.shape[-1]
    m = x.numel() // k
    q = torch.empty(x.shape, dtype=operand.format.dtype, device=x.device)
    found = torch.empty(scale_shape(tuple(x.shape), operand.granularity), dtype=torch.float32, device=x.device) if scale is None else scale
    y, mean, rstd = None, None, None
    if keep:
        y = torch.empty_like(x)
        statistic = lambda groups: torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device)  # noqa: E731
        mean = statistic(1) if norm == "layernorm" else None
        rstd = statistic(-(-k // block) if norm == "blocknorm" else 1) if norm != "none" else None
    if m:
        at_least = max(BLOCK if operand.granularity == "block" else 16, block if norm == "blocknorm" else 16)
        s = schedule or row_schedule(k, m=m, at_least=at_least)
        norm_quantise_kernel[(triton.cdiv(m, s.rows),)](
            x, *(None if v is None else v.detach().contiguous() for v in (weight, bias)), scale, q.view(torch.uint8), found, y, mean, rstd, m, k, eps,
            NORM=norm, ACTIVATION=activation, GRANULARITY=operand.granularity, FP8=tl.float8e4nv if operand.format is E4M3 else tl.float8e5,
            MAX=operand.format.max, POWER_OF_TWO=operand.power_of_two, ROWS=s.rows, WIDTH=s.width, BLOCK=block, num_warps=s.num_warps,
        )  # fmt: skip
    return Quantised(q, found, operand), Saved(y_MK=y, mean=mean, rstd=rstd) if keep else None
