"""Rotary position embedding from tables that are the same fp32 bits on every machine.

    cos_PD, sin_PD = rope_tables(tokens=16, head_dim=64, base=1e5)
    q_BTHD = rope_ref(q_BTHD, position_BT, cos_PD, sin_PD)            # or rope(...) on a GPU

Legend: B rows, T tokens of a row, H heads, P positions in the tables, D = head_dim / 2 frequencies (the last axis of x has 2 D elements).

No libm: angles, sines and cosines come from 50 decimal digits in Python's `decimal` (integer arithmetic), rounded to fp64, then to fp32.
Only every 64th position and the first 64 are computed so; the others are their products in double-double arithmetic (about 100 bits,
IEEE additions and exact products only), and those few that lie within a fp64 ulp of a fp32 rounding boundary are done again in
`decimal`. transformers computes angles in fp32, so its tables are off by up to position * 2^-24; ours are what the formula says.
Source: RoFormer, Su et al. 2021, arXiv 2104.09864, eq. 34, in the half-split order. No scaling of frequencies, no partial heads.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.ieee import assert_subnormals_kept

__all__ = ["apply_rope", "rope", "rope_ref", "rope_tables"]

_DIGITS = 50  # a rotation loses about one unit in the last place: at least 47 digits are left in every seed
_FINE = 64  # positions between two seeds
_SPLIT = 134217729.0  # 2^27 + 1: Dekker's splitting of a float64 into two halves of 26 bits
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_Pair = tuple[np.ndarray, np.ndarray]  # double-double: the value is high + low, |low| <= ulp(high) / 2


# ---- tables --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def rope_tables(*, tokens: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_PD, sin_PD), fp32 on the CPU, of the angles p * base^(-2i/head_dim), p < tokens. Do not write into them: they are cached.

    A longer table begins with the shorter one's bits. Raises ValueError for an odd head or no tokens.
    """
    if tokens < 1 or head_dim < 2 or head_dim % 2 or not 1 < base < float("inf"):
        raise ValueError(f"need tokens >= 1, an even head_dim and a finite base > 1, got {tokens=} {head_dim=} {base=}; take them from LlamaConfig")
    with localcontext(Context(prec=_DIGITS)):
        log_base = Decimal(base).ln()
        columns = [_column((log_base * (-2 * i) / head_dim).exp(), tokens) for i in range(head_dim // 2)]
    cos_PD, sin_PD = (torch.from_numpy(np.stack([column[part] for column in columns], axis=1)) for part in (0, 1))
    return cos_PD, sin_PD


def _column(theta: Decimal, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of p * theta for p < tokens as float32: each the float64 nearest to 50 digits, rounded again."""
    cos_1, sin_1 = _cos_sin(theta)
    fine = _rotations(cos_1, sin_1, min(_FINE, tokens) + 1)
    coarse = _rotations(*fine[-1], -(-tokens // _FINE))
    (cos_c, sin_c), (cos_f, sin_f) = ([_pairs([row[part] for row in rows]) for part in (0, 1)] for rows in (coarse, fine[:_FINE]))
    cos, sin = _minus(_times(cos_c, cos_f), _times(sin_c, sin_f)), _plus(_times(sin_c, cos_f), _times(cos_c, sin_f))
    values = [part.reshape(-1)[:tokens].copy() for part in (cos, sin)]
    for part in (0, 1):
        # the 29 bits that float32 drops: at the middle, or one float64 ulp beside it, the low part could decide
        dropped = values[part].view(np.int64) & ((1 << 29) - 1)
        for p in np.flatnonzero(np.abs(dropped - (1 << 28)) <= 1):
            values[part][p] = float(_turn(coarse[p // _FINE], fine[p % _FINE])[part])
    return values[0].astype(np.float32), values[1].astype(np.float32)


def _turn(a: tuple[Decimal, Decimal], b: tuple[Decimal, Decimal]) -> tuple[Decimal, Decimal]:
    """(cos, sin) of the sum of two angles."""
    return a[0] * b[0] - a[1] * b[1], a[1] * b[0] + a[0] * b[1]


def _rotations(cos_1: Decimal, sin_1: Decimal, count: int) -> list[tuple[Decimal, Decimal]]:
    """(cos, sin) of p * angle for p < count by the addition theorem."""
    rows = [(Decimal(1), Decimal(0))]
    for _ in range(count - 1):
        rows.append(_turn(rows[-1], (cos_1, sin_1)))
    return rows


def _cos_sin(theta: Decimal) -> tuple[Decimal, Decimal]:
    """The Taylor series of both, for 0 < theta <= 1."""
    sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
    while abs(term) > Decimal(10) ** -(_DIGITS + 2):
        sums[n % 2] += term if n % 4 < 2 else -term
        n += 1
        term = term * theta / n
    return sums[0], sums[1]


def _pairs(values: list[Decimal]) -> _Pair:
    high = np.array([float(v) for v in values])
    return high, np.array([float(v - Decimal(h)) for v, h in zip(values, high.tolist(), strict=True)])


def _times(a_C: _Pair, b_F: _Pair) -> _Pair:
    """The outer product a_C b_F: Dekker's exact product of the high parts, then the two mixed products."""
    a, a_low, b, b_low = a_C[0][:, None], a_C[1][:, None], b_F[0][None, :], b_F[1][None, :]
    a_1, b_1 = a * _SPLIT - (a * _SPLIT - a), b * _SPLIT - (b * _SPLIT - b)
    a_2, b_2 = a - a_1, b - b_1
    p = a * b
    return p, (((a_1 * b_1 - p) + a_1 * b_2 + a_2 * b_1) + a_2 * b_2) + (a * b_low + a_low * b)


def _plus(a: _Pair, b: _Pair) -> np.ndarray:
    """The float64 next to a + b: TwoSum of the high parts, then all low parts."""
    s = a[0] + b[0]
    back = s - a[0]
    return s + (((a[0] - (s - back)) + (b[0] - back)) + (a[1] + b[1]))


def _minus(a: _Pair, b: _Pair) -> np.ndarray:
    return _plus(a, (-b[0], -b[1]))


# ---- the rotation --------------------------------------------------------------------------------------------------------------


def apply_rope(x_TH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates fp32 [..., T, head_dim]: (a, b) -> (a cos - b sin, b cos + a sin), each product and each sum rounded once."""
    a, b = x_TH.chunk(2, dim=-1)
    return torch.cat([a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD], dim=-1)


def _check(x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    if x.ndim != 4 or position.shape != x.shape[:2] or cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] != x.shape[3]:
        raise ValueError(f"need x [B, T, H, 2 D], positions [B, T] and two tables [P, D]; got {tuple(x.shape)=} {tuple(position.shape)=} "
                         f"{tuple(cos.shape)=} {tuple(sin.shape)=}; take the tables from rope_tables(head_dim=x.shape[3])")
    if position.dtype not in (torch.int32, torch.int64) or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"need int32 or int64 positions and float32 tables; got {position.dtype=} {cos.dtype=} {sin.dtype=}; convert them")
    if x.dtype not in _FLOATS or (out_dtype or x.dtype) not in _FLOATS:
        raise ValueError(f"x and the result are float32, bfloat16 or float16; got {x.dtype=} {out_dtype=}; convert x first")
    if not cos.shape[0]:
        raise ValueError(f"the tables need at least one position; got {tuple(cos.shape)=}; call rope_tables(tokens=...) with the longest sequence")


def rope_ref(
    x_BTHD: torch.Tensor, position_BT: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Exact oracle on the CPU: `apply_rope` with row `position_BT[b, t]` of the tables, rounded once to `out_dtype` (default x's).

    A token whose position is not in the tables (negative, or P and above) becomes NaN: a GPU cannot raise without waiting.
    """
    _check(x_BTHD, position_BT, cos_PD, sin_PD, out_dtype)
    assert_subnormals_kept()
    x, position, cos, sin = (part.detach().cpu() for part in (x_BTHD, position_BT.long(), cos_PD, sin_PD))
    known = (position >= 0) & (position < len(cos))
    row = torch.where(known, position, 0)
    y = apply_rope(x.float(), cos[row][:, :, None], sin[row][:, :, None])
    return torch.where(known[:, :, None, None], y, float("nan")).to(out_dtype or x_BTHD.dtype)


@triton.jit
def rope_kernel(
    x_ptr, position_ptr, cos_ptr, sin_ptr, y_ptr, T, H, P, stride_b, stride_t, stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_H heads of one token; y is contiguous. Must be compiled with enable_fp_fusion=False."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (d < D)
    position = tl.load(position_ptr + token).to(tl.int64)
    known = (position >= 0) & (position < P)
    row = tl.where(known, position, 0) * D
    cos = tl.load(cos_ptr + row + d, mask=d < D, other=0.0)
    sin = tl.load(sin_ptr + row + d, mask=d < D, other=0.0)
    source = x_ptr + (token // T) * stride_b + (token % T) * stride_t + h.to(tl.int64) * stride_h + d
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D, mask=inside, other=0.0).to(tl.float32)
    low, high = a * cos - b * sin, b * cos + a * sin
    target = y_ptr + (token * H + h) * (2 * D) + d
    tl.store(target, tl.where(known, low, float("nan")).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(target + D, tl.where(known, high, float("nan")).to(y_ptr.dtype.element_ty), mask=inside)


@on_gpu("rope")
def rope(
    x_BTHD: torch.Tensor, position_BT: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor, out_dtype: torch.dtype | None = None,
    *, num_warps: int = 2,
) -> torch.Tensor:  # fmt: skip
    """`rope_ref` on a GPU -> contiguous [B, T, H, 2 D]. Waits for nothing (capturable); any `num_warps` gives the same bits.

    x may be a view (the query and key heads of one fused projection): only a stride of the last axis costs a copy.
    """
    _check(x_BTHD, position_BT, cos_PD, sin_PD, out_dtype)
    x = x_BTHD if x_BTHD.stride(3) == 1 else x_BTHD.contiguous()
    batch, tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if y.numel():
        block_d = triton.next_power_of_2(dim // 2)
        block_h = max(1, min(triton.next_power_of_2(heads), 512 // block_d))
        rope_kernel[(batch * tokens, triton.cdiv(heads, block_h))](
            x, position_BT.contiguous(), cos_PD.contiguous(), sin_PD.contiguous(), y, tokens, heads, cos_PD.shape[0], *x.stride()[:3],
            D=dim // 2, BLOCK_D=block_d, BLOCK_H=block_h, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y
