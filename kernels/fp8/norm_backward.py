"""Gradient of norm + activation from dy and what the forward pass saved; quantising is passed straight through.

    q, saved = norm_quantise(x_MK, "layernorm", "silu", operand, w_K, b_K, keep=True)
    dx_MK, dw_K, db_K = norm_backward(dy_MK, x_MK, saved, "layernorm", "silu", w_K, b_K)

Legend: M rows, K features; n = (x - mean) r the normalised row, t = n w + b, y = act(t), <.> the mean over the row (over the block for
blocknorm):

    dt = dy act'(t)      dn = dt w      dw = sum over M of dt n      db = sum over M of dt
    layernorm          dx = r (dn - <dn> - n <dn n>)
    rmsnorm, blocknorm dx = r (dn - n <dn n>)                        none  dx = dn
    silu' = s (1 + t (1 - s)), s = 1 / (1 + e^-t)       hardswish' = 0 up to -3, t / 3 + 1/2, 1 from 3 on

Bytes per element (bf16): 2 of dy and 2 of x read, 2 written; n is computed again instead of kept. dw and db are sums of one partial row a
program in a fixed order, so equal calls give equal bits. Float32 throughout; y is the unrounded one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.fp8.epilogue import FEATURES
from kernels.fp8.norm_quantise import Saved, check_rows, row_schedule

__all__ = ["norm_backward", "norm_backward_ref", "slope_ref"]

_PROGRAMS = 528  # that share the rows where dw and db are asked for: 4 on each of an H200's 132 SMs
Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _check(dy: torch.Tensor, x: torch.Tensor, saved: Saved | None, norm: str) -> None:
    if dy.shape != x.shape or dy.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dy is [..., M, K] like x, in bf16, fp16 or fp32, got {tuple(dy.shape)} {dy.dtype} for {tuple(x.shape)=}")
    if norm != "none" and (saved is None or saved.rstd is None or (norm == "layernorm") != (saved.mean is not None)):
        raise ValueError(f"the gradient of {norm} needs its forward pass's statistics, got {saved=}; call norm_quantise with keep=True and the same norm")


def norm_backward_ref(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, saved: Saved | None, norm: str, activation: str, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, block: int = FEATURES,
) -> Gradients:  # fmt: skip
    """`norm_backward` by the formulas above in float64, statistics computed again -> dx in x's dtype, dw and db in float32. Any device, no autograd."""
    check_rows(x_MK, norm, activation, weight, bias, eps, block)
    _check(dy_MK, x_MK, saved, norm)
    x, group = x_MK.detach().double(), block if norm == "blocknorm" else x_MK.shape[-1]
    mean = lambda v: torch.cat([g.mean(-1, keepdim=True).expand_as(g) for g in v.split(group, -1)], -1)  # noqa: E731
    centred = x - mean(x) if norm == "layernorm" else x
    r = torch.rsqrt(mean(centred.square()) + eps) if norm != "none" else torch.ones_like(x)
    n = centred * r
    t = n if weight is None else n * weight.double()
    dt = dy_MK.double() * slope_ref(t if bias is None else t + bias.double(), activation)
    dn = dt if weight is None else dt * weight.double()
    dx = dn if norm == "none" else r * (dn - (mean(dn) if norm == "layernorm" else 0.0) - n * mean(dn * n))
    total = lambda v: v.flatten(0, -2).sum(0).float()  # noqa: E731
    return dx.to(x_MK.dtype), None if weight is None else total(dt * n), None if bias is None else total(dt)


def slope_ref(t: torch.Tensor, activation: str) -> torch.Tensor:
    """act'(t) in t's dtype."""
    if activation == "silu":
        s = torch.sigmoid(t)
        return s * (1 + t * (1 - s))
    return (t / 3 + 0.5).where((t > -3) & (t < 3), (t >= 3).to(t.dtype)) if activation == "hardswish" else torch.ones_like(t)


@triton.jit
def _slope(t, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-t))
        slope = s * (1.0 + t * (1.0 - s))
    elif ACTIVATION == "hardswish":
        slope = tl.where(t <= -3.0, 0.0, tl.where(t >= 3.0, 1.0, t * (1.0 / 3.0) + 0.5))
    else:
        slope = tl.zeros_like(t) + 1.0
    return slope


@triton.jit
def norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, M, K,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i takes tiles of ROWS rows i, i + programs, ...; dw_ptr and db_ptr: [programs, K] partial sums, or None."""
    row, col = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    GROUPS: tl.constexpr = WIDTH // BLOCK if NORM == "blocknorm" else 1
    GROUP: tl.constexpr = WIDTH // GROUPS
    group = tl.arange(0, GROUPS)
    groups = tl.cdiv(K, BLOCK) if NORM == "blocknorm" else 1
    count = tl.minimum(tl.maximum(K - group * GROUP, 1), GROUP).to(tl.float32)[None, :]
    w = 1.0
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((WIDTH,), tl.float32)
    db = tl.zeros((WIDTH,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        left = M - first
        at = row[:, None] * K + col[None, :]
        inside = (row[:, None] < left) & (col[None, :] < K)
        n = tl.load(x_ptr + first * K + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy_ptr + first * K + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layernorm":
            n = tl.where(col[None, :] < K, n - tl.load(mean_ptr + first + row, mask=row < left, other=0.0)[:, None], 0.0)
        if NORM != "none":
            here = (row[:, None] < left) & (group[None, :] < groups)
            r = tl.load(rstd_ptr + first * groups + row[:, None] * groups + group[None, :], mask=here, other=0.0)
            n = tl.reshape(tl.reshape(n, (ROWS, GROUPS, GROUP)) * r[:, :, None], (ROWS, WIDTH))
        t = n * w
        if b_ptr is not None:
            t += tl.load(b_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
        d = d * _slope(t, ACTIVATION)
        if dw_ptr is not None:
            dw += tl.sum(d * n, 0)
        if db_ptr is not None:
            db += tl.sum(d, 0)
        d = d * w
        if NORM != "none":
            d3, n3 = tl.reshape(d, (ROWS, GROUPS, GROUP)), tl.reshape(n, (ROWS, GROUPS, GROUP))
            e3 = d3 - n3 * (tl.sum(d3 * n3, 2) / count)[:, :, None]
            if NORM == "layernorm":
                e3 -= (tl.sum(d3, 2) / count)[:, :, None]
            d = tl.reshape(e3 * r[:, :, None], (ROWS, WIDTH))
        tl.store(dx_ptr + first * K + at, d.to(dx_ptr.dtype.element_ty), mask=inside)
    if dw_ptr is not None:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * K + col, dw, mask=col < K)
    if db_ptr is not None:
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * K + col, db, mask=col < K)


@on_gpu("norm_backward")
def norm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, saved: Saved | None, norm: str, activation: str, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, block: int = FEATURES,
) -> Gradients:  # fmt: skip
    """(dx in x's dtype, dw and db in float32 where there is a weight and a bias) on a GPU; the forward pass's arguments and its `saved`.

    dy, x: [..., M, K], bf16, fp16 or fp32. Raises ValueError as norm_quantise does, and for statistics of another norm.
    """
    check_rows(x_MK, norm, activation, weight, bias, eps, block)
    _check(dy_MK, x_MK, saved, norm)
    x, dy, k = x_MK.detach().contiguous(), dy_MK.detach().contiguous(), x_MK.shape[-1]
    m, dx = x.numel() // k, torch.empty_like(x)
    s = row_schedule(k, m=m, at_least=block if norm == "blocknorm" else 16, per_thread=16)
    tiles = triton.cdiv(m, s.rows)
    programs = min(tiles, _PROGRAMS) if weight is not None or bias is not None else tiles
    partial = [None if v is None else torch.empty((programs, k), dtype=torch.float32, device=x.device) for v in (weight, bias)]
    if m:
        norm_backward_kernel[(programs,)](
            dy, x, *(None if v is None else v.detach().contiguous() for v in (weight, bias)),
            saved.mean if norm == "layernorm" else None, saved.rstd if norm != "none" else None, dx, *partial, m, k,
            NORM=norm, ACTIVATION=activation, ROWS=s.rows, WIDTH=s.width, BLOCK=block, num_warps=s.num_warps,
        )  # fmt: skip
    return dx, *(None if v is None else v.sum(0) for v in partial)
