"""The three products of packed LoRA, a tile each, as device functions: narrow, wide, outer.

Legend: M rows, D the wide axis (inputs K or outputs N), T rank rows of all slots, R columns of s; w_TD is A or B, one row a rank.

    narrow    s_MR  = scale  sum over D of x_MD w_TD         shrink (x, A), grad_s (dy, B)
    wide      y_MD += scale  sum over R of s_MR w_TD         expand (s, B), grad_x (ds, A)
    outer     g_TD += scale  sum over M of s_MR x_MD         grad_b (s, dy), grad_a (ds, x)

A tile lies in one slot: rows from `first + row0` (of `rows`), rank rows from `t0 + r0` (of `rank`). Rows and ranks that a tile has too many are read
again from the slot's last (narrow: they are not stored) or are zeros (where they are summed over): nothing of another slot is ever multiplied, so
its NaN stays its own. Sums run along one program, in one order that only the tile's sizes decide; nothing is atomic. Operands go to
the tensor cores as they are (bf16, fp16; fp32 by IEEE multiply-adds), sums are float32.
"""

import triton
import triton.language as tl

from kernels.lora.dropout import keep_tile

__all__ = ["kept_share", "narrow_tile", "outer_tile", "segment", "wide_tile"]


@triton.jit
def segment(offsets_ptr, rank_offsets_ptr, slot):
    """(first row, rows, first rank row, capacity) of a slot."""
    first, t0 = tl.load(offsets_ptr + slot), tl.load(rank_offsets_ptr + slot)
    return first, tl.load(offsets_ptr + slot + 1) - first, t0, tl.load(rank_offsets_ptr + slot + 1) - t0


@triton.jit
def kept_share(p_ptr, slot):
    """1 / (1 - p)."""
    return 1.0 / (1.0 - tl.load(p_ptr + slot))


@triton.jit
def narrow_tile(
    x_ptr, w_ptr, out_ptr, scale, p_ptr, seed_ptr, step_ptr, site, slot, first, row0, rows, t0, r0, rank, begin, end, D, R,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns begin to end of D. out_ptr: of row 0, float32 where the sum is a part. EVEN: BLOCK_D divides every range."""
    row, r, d = row0 + tl.arange(0, BLOCK_M), r0 + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x_at = x_ptr + (first + tl.minimum(row, rows - 1)).to(tl.int64)[:, None] * D + d[None, :]
    w_at = w_ptr + (t0 + tl.minimum(r, rank - 1)).to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for at in tl.range(begin, end, BLOCK_D, num_stages=STAGES):
        if EVEN:
            x, w = tl.load(x_at + at), tl.load(w_at + at)
        else:
            there = (at + d)[None, :] < end
            x, w = tl.load(x_at + at, mask=there, other=0.0), tl.load(w_at + at, mask=there, other=0.0)
        if DROPOUT:
            x = tl.where(keep_tile(row, at, slot, p_ptr, seed_ptr, step_ptr, site, BLOCK_D), x, 0.0)
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    if DROPOUT:
        scale *= kept_share(p_ptr, slot)
    out_at = out_ptr + (first + row).to(tl.int64)[:, None] * R + r[None, :]
    tl.store(out_at, (acc * scale).to(out_ptr.dtype.element_ty), mask=(row[:, None] < rows) & (r[None, :] < rank))


@triton.jit
def wide_tile(
    y_ptr, s_ptr, w_ptr, scale, p_ptr, seed_ptr, step_ptr, site, slot, first, row0, rows, t0, rank, d0, D, R,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ONE: BLOCK_R holds every capacity. y is read while the tensor core works."""
    row, r, d = row0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R), d0 + tl.arange(0, BLOCK_D)
    there = row[:, None] < rows if EVEN else (row[:, None] < rows) & (d[None, :] < D)
    y_at = y_ptr + (first + row).to(tl.int64)[:, None] * D + d[None, :]
    s_at = s_ptr + (first + row).to(tl.int64)[:, None] * R + r[None, :]
    w_at = w_ptr + (t0 + r).to(tl.int64)[:, None] * D + d[None, :]
    if ONE:
        s = tl.load(s_at, mask=(row[:, None] < rows) & (r[None, :] < rank), other=0.0)
        w = tl.load(w_at, mask=r[:, None] < rank if EVEN else (r[:, None] < rank) & (d[None, :] < D), other=0.0)
        y = tl.load(y_at, mask=there, other=0.0)
        acc = tl.dot(s, w, input_precision=PRECISION)
    else:
        y = tl.load(y_at, mask=there, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for r0 in range(0, rank, BLOCK_R):
            s = tl.load(s_at + r0, mask=(row[:, None] < rows) & (r0 + r[None, :] < rank), other=0.0)
            w = tl.load(w_at + tl.cast(r0, tl.int64) * D, mask=(r0 + r[:, None] < rank) & (d[None, :] < D), other=0.0)
            acc = tl.dot(s, w, acc, input_precision=PRECISION)
    if DROPOUT:
        acc = tl.where(keep_tile(row, d0, slot, p_ptr, seed_ptr, step_ptr, site, BLOCK_D), acc, 0.0)
        scale *= kept_share(p_ptr, slot)
    tl.store(y_at, (y.to(tl.float32) + scale * acc).to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def outer_tile(
    s_ptr, x_ptr, g_ptr, scale, p_ptr, seed_ptr, step_ptr, site, slot, first, rows, t0, r0, rank, d0, D, R,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of the slot, BLOCK_M at a time from its first."""
    m, r, d = tl.arange(0, BLOCK_M), r0 + tl.arange(0, BLOCK_R), d0 + tl.arange(0, BLOCK_D)
    s_at = s_ptr + (first + m).to(tl.int64)[:, None] * R + r[None, :]
    x_at = x_ptr + (first + m).to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for row0 in tl.range(0, rows, BLOCK_M, num_stages=STAGES):
        left = m[:, None] < rows - row0
        s = tl.load(s_at + tl.cast(row0, tl.int64) * R, mask=left & (r[None, :] < rank), other=0.0)
        x = tl.load(x_at + tl.cast(row0, tl.int64) * D, mask=left if EVEN else left & (d[None, :] < D), other=0.0)
        if DROPOUT:
            x = tl.where(keep_tile(row0 + m, d0, slot, p_ptr, seed_ptr, step_ptr, site, BLOCK_D), x, 0.0)
        acc = tl.dot(s.T, x, acc, input_precision=PRECISION)
    if DROPOUT:
        scale *= kept_share(p_ptr, slot)
    there = r[:, None] < rank if EVEN else (r[:, None] < rank) & (d[None, :] < D)
    g_at = g_ptr + (t0 + r).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(g_at, tl.load(g_at, mask=there, other=0.0) + scale * acc, mask=there)
