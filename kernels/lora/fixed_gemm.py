"""Products with a frozen weight in which a row's bits do not depend on how many rows there are, forward and to the input.

    y_MN = fixed_linear(x_MK, w_NK, bias_N)          # y = x w^T + bias
    dx_MK = fixed_dgrad(dy_MN, w_NK)                 # dx = dy w

cuBLAS chooses tiles and splits of the sum by M, so the base's output for one adapter changes with who else is in the pack. Here one program
owns a tile of outputs and walks the whole sum in ascending steps; tile sizes follow from the weight's shape and dtype alone, there is no
split and no atomic, and rows of a tile never meet; one compiled kernel serves every M. So packed rows equal separate rows, bit for bit, on one GPU model with one compiler.

Legend: M rows, K inputs, N outputs. bf16 (or fp16) operands with float32 sums, one rounding; float32 operands with fused multiply-adds in
float32 (no TF32), which is slow and for comparing. Operands enter by the bulk copy engine (TMA), which fills what lies outside with zeros; a
row length that 16 bytes do not divide is copied to one that they do. `_ref` is float64 with one rounding. It has no gradient of its own:
kernels.lora.autograd takes the pair (`fixed_linear`, `fixed_dgrad`) as its base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.device import on_gpu

__all__ = ["GemmTiles", "fixed_dgrad", "fixed_dgrad_ref", "fixed_linear", "fixed_linear_ref", "tiles_of"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BYTES = 16  # what the copy engine needs of addresses and strides
_NARROW = 1024  # outputs up to which narrower tiles keep more of the GPU busy


@dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """rows x columns outputs a program, `step` terms of the sum at a time."""

    rows: int
    columns: int
    step: int
    group: int
    warps: int
    stages: int


def tiles_of(columns: int, dtype: torch.dtype) -> GemmTiles:
    """By the number of outputs of a row, never by the number of rows."""
    if dtype == torch.float32:
        return GemmTiles(rows=64, columns=64, step=16, group=8, warps=8, stages=2)
    return GemmTiles(rows=128, columns=64 if columns <= _NARROW else 128, step=64, group=8, warps=8, stages=4)


# ---- reference -----------------------------------------------------------------------------------------------------------------


def _check(a: torch.Tensor, w_NK: torch.Tensor, bias: torch.Tensor | None, inner: int) -> None:
    if a.ndim != 2 or w_NK.ndim != 2 or a.shape[1] != w_NK.shape[inner] or 0 in w_NK.shape:
        raise ValueError(f"operands are x [M, K] (or dy [M, N]) and w [N, K], N and K above 0, got {tuple(a.shape)} and {tuple(w_NK.shape)}; flatten leading axes")
    if a.dtype != w_NK.dtype or a.dtype not in (*_FLOATS, torch.float64):
        raise ValueError(f"operands have one dtype of bf16, fp16 and fp32, got {a.dtype} and {w_NK.dtype}; cast one")
    if bias is not None and bias.shape != (w_NK.shape[0],):
        raise ValueError(f"a bias is [N], got {tuple(bias.shape)} for N = {w_NK.shape[0]}; pass one number an output")


def fixed_linear_ref(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN in float64 on any device, rounded once to x's dtype. Raises ValueError where shapes or dtypes do not fit."""
    _check(x_MK, w_NK, bias_N, 1)
    y = x_MK.double() @ w_NK.double().T
    return (y if bias_N is None else y + bias_N.double()).to(x_MK.dtype)


def fixed_dgrad_ref(dy_MN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """dx_MK in float64 on any device, rounded once to dy's dtype. Raises ValueError where shapes or dtypes do not fit."""
    _check(dy_MN, w_NK, None, 0)
    return (dy_MN.double() @ w_NK.double()).to(dy_MN.dtype)


# ---- kernel --------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a_desc, b_desc, bias_ptr, out_ptr, M, S, C,
    ALONG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, S] = a [M, C] times b: [S, C] where ALONG (the sum runs along b's rows), else [C, S]. grid (tiles,), GROUP rows of tiles at a time."""
    tiles_m, tiles_s = tl.cdiv(M, ROWS), tl.cdiv(S, COLUMNS)
    tile = tl.program_id(0)
    first = (tile // (GROUP * tiles_s)) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_s)
    m0, s0 = (first + inside % high) * ROWS, (inside // high) * COLUMNS
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in tl.range(0, C, STEP, num_stages=STAGES):
        a = a_desc.load([m0, c])
        if ALONG:
            acc = tl.dot(a, b_desc.load([s0, c]).T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b_desc.load([c, s0]), acc, input_precision="ieee")
    row, column = m0 + tl.arange(0, ROWS), s0 + tl.arange(0, COLUMNS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < S, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * S + column[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (column < S)[None, :])


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


def _operand(x: torch.Tensor) -> torch.Tensor:
    """x at an address and with a row length that the copy engine takes; columns that are added are zeros."""
    each = _BYTES // x.element_size()
    if short := -x.shape[1] % each:
        x = torch.nn.functional.pad(x, (0, short))
    if x.stride(1) != 1 or x.stride(0) % each or x.stride(0) < x.shape[1] or x.data_ptr() % _BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _launch(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *, along: bool) -> torch.Tensor:
    if a.dtype == torch.float64:
        raise ValueError("the kernels take bf16, fp16 and fp32, got float64; call the reference")
    (m, c), s = a.shape, w.shape[0] if along else w.shape[1]
    out = torch.empty((m, s), dtype=a.dtype, device=a.device)
    if m == 0:
        return out
    plan = tiles_of(s, a.dtype)
    block = [plan.columns, plan.step] if along else [plan.step, plan.columns]
    gemm_kernel[(triton.cdiv(m, plan.rows) * triton.cdiv(s, plan.columns),)](
        TensorDescriptor.from_tensor(_operand(a), [plan.rows, plan.step]), TensorDescriptor.from_tensor(_operand(w), block), bias, out, m, s, c,
        ALONG=along, ROWS=plan.rows, COLUMNS=plan.columns, STEP=plan.step, GROUP=plan.group, STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    return out


@on_gpu("fixed_linear")
def fixed_linear(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN = x w^T + bias in x's dtype (bf16, fp16, fp32); the bias is added in float32. Raises ValueError where shapes or dtypes do not fit."""
    _check(x_MK, w_NK, bias_N, 1)
    return _launch(x_MK, w_NK, bias_N, along=True)


@on_gpu("fixed_dgrad")
def fixed_dgrad(dy_MN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """dx_MK = dy w in dy's dtype. Raises ValueError where shapes or dtypes do not fit."""
    _check(dy_MN, w_NK, None, 0)
    return _launch(dy_MN, w_NK, None, along=False)
