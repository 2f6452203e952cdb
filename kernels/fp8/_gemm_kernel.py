"""Triton kernels of the scaled product for sm_90: operands by the bulk copy engine (TMA), fp8 tensor cores, one tile of outputs a program.

    python -m kernels.fp8.bench --compile              # registers, spills and shared memory of every variant, without a GPU

Legend: out_RS = a_RC b_SC^T, both operands with C contiguous, `batch` of them stacked. A program owns BLOCK_R x BLOCK_S outputs and walks C
in steps of 128:

    outer scales (tensor, row)    acc += a b^T                      out = acc sa_r sb_s
    inner scales (block, square)  acc += (a b^T over 128) sa sb     the partial sum leaves the tensor core every 128, so this is precise, too

Hopper's fp8 accumulator keeps about 14 bits (pytorch#147971). PRECISE adds each 128-long partial sum to a float32 register; otherwise the sum
stays in the tensor core along the whole of C. Partial sums, with their inner scales, are added one step late, so that the addition runs while
the tensor core has the next step. It is written out: Triton's `max_num_imprecise_acc` compiles to additions in front of the wait for the
tensor core, which only ptxas puts right. The copy engine fills what lies outside of a tensor with zeros, which add nothing; rows of the
next matrix of a batch that a last tile reads are computed and not stored. Tiles are ordered in groups of GROUP rows of tiles, so that
neighbours in time share operands in L2. A split takes a range of C and leaves its float32 sums to `join_kernel`.
"""

import triton
import triton.language as tl

from kernels.fp8.epilogue import activate, normalise, quantise_tile
from kernels.fp8.scaling import fp8_bits

__all__ = ["gemm_kernel", "join_kernel"]

_STEP = tl.constexpr(128)


@triton.jit
def _inner_scale(ptr, first, along, rows, blocks, step, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Scales of a tile's rows at a step of C: one number where one 128 x 128 block holds the tile. ptr: of this matrix, [rows, blocks]."""
    if ROWS:
        scale = tl.load(ptr + (along // GROUP) * blocks + step, mask=along < rows, other=0.0)
    else:
        scale = tl.load(ptr + (first // GROUP) * blocks + step)
    return scale


@triton.jit
def _scaled(acc, sa, sb, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr):
    """acc times scales that are numbers or, where *_ROWS, one for each row of a or b."""
    acc = acc * (sa[:, None] if A_ROWS else sa)
    return acc * (sb[None, :] if B_ROWS else sb)


@triton.jit
def gemm_kernel(
    a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr, scale_ptr, R, S, C, c_each, eps,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, PRECISE: tl.constexpr, SPLIT: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GRANULARITY: tl.constexpr, FP8: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid (tiles, splits, batch). A_SCALE, B_SCALE: "tensor", "row", "block", "square". GRANULARITY "": out in its own type, scale_ptr None."""
    tiles_r, tiles_s = tl.cdiv(R, BLOCK_R), tl.cdiv(S, BLOCK_S)
    tile, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = (tile // (GROUP * tiles_s)) * GROUP
    high = tl.minimum(tiles_r - first, GROUP)
    inside = tile % (GROUP * tiles_s)
    r0, s0 = (first + inside % high) * BLOCK_R, (inside // high) * BLOCK_S
    row, col = r0 + tl.arange(0, BLOCK_R), s0 + tl.arange(0, BLOCK_S)

    INNER: tl.constexpr = A_SCALE == "block" or A_SCALE == "square"
    blocks = tl.cdiv(C, _STEP)
    if INNER:
        A_GROUP: tl.constexpr = 1 if A_SCALE == "block" else 128
        B_GROUP: tl.constexpr = 1 if B_SCALE == "block" else 128
        A_ROWS: tl.constexpr = A_GROUP == 1 or BLOCK_R > 128  # whether a tile has a scale a row, or one
        B_ROWS: tl.constexpr = B_GROUP == 1 or BLOCK_S > 128
        sa_ptr += batch.to(tl.int64) * tl.cdiv(R, A_GROUP) * blocks
        sb_ptr += batch.to(tl.int64) * tl.cdiv(S, B_GROUP) * blocks
        sa = tl.zeros((BLOCK_R,), tl.float32) if A_ROWS else 0.0
        sb = tl.zeros((BLOCK_S,), tl.float32) if B_ROWS else 0.0
    acc = tl.zeros((BLOCK_R, BLOCK_S), tl.float32)
    part = tl.zeros((BLOCK_R, BLOCK_S), tl.float32)  # of the step before: added while the tensor core works on the next
    begin = split * c_each
    for c in tl.range(begin, tl.minimum(begin + c_each, C), _STEP, num_stages=STAGES):
        a = a_desc.load([batch * R + r0, c])
        b = b_desc.load([batch * S + s0, c])
        if INNER:
            next_part = tl.dot(a, b.T)
            acc += _scaled(part, sa, sb, A_ROWS, B_ROWS)
            part = next_part
            sa = _inner_scale(sa_ptr, r0, row, R, blocks, c // _STEP, A_GROUP, A_ROWS)
            sb = _inner_scale(sb_ptr, s0, col, S, blocks, c // _STEP, B_GROUP, B_ROWS)
        elif PRECISE:
            next_part = tl.dot(a, b.T)
            acc += part
            part = next_part
        else:
            acc = tl.dot(a, b.T, acc)
    if INNER:
        acc += _scaled(part, sa, sb, A_ROWS, B_ROWS)
    elif PRECISE:
        acc += part

    there = (row[:, None] < R) & (col[None, :] < S)
    if SPLIT:
        at = ((split * tl.num_programs(2) + batch).to(tl.int64) * R + r0) * S + s0
        at_tile = tl.arange(0, BLOCK_R)[:, None] * S + tl.arange(0, BLOCK_S)[None, :]
        tl.store(out_ptr + at + at_tile, acc, mask=there)
    else:
        v = _finish(acc, sa_ptr, sb_ptr, bias_ptr, batch, row, col, R, S, A_SCALE, B_SCALE)
        v, _, _ = normalise(tl.where(col[None, :] < S, v, 0.0) if NORM != "none" else v, col, S - s0, eps, NORM, 256)
        v = activate(v, ACTIVATION)
        out = out_ptr + (batch.to(tl.int64) * R + r0) * S + s0 + tl.arange(0, BLOCK_R)[:, None] * S + tl.arange(0, BLOCK_S)[None, :]
        if GRANULARITY == "":
            tl.store(out, v.to(out_ptr.dtype.element_ty), mask=there)
        else:
            q, scale = quantise_tile(tl.where(there, v, 0.0), 1.0, GRANULARITY, MAX, POWER_OF_TWO)
            tl.store(out, fp8_bits(q, FP8), mask=there)
            groups = tl.cdiv(S, 128) if GRANULARITY == "block" else 1
            g = (s0 // 128 if GRANULARITY == "block" else 0) + tl.arange(0, scale.shape[1])
            at = (batch.to(tl.int64) * R + row)[:, None] * groups + g[None, :]
            tl.store(scale_ptr + at, scale, mask=(row[:, None] < R) & (g[None, :] < groups))


@triton.jit
def _finish(acc, sa_ptr, sb_ptr, bias_ptr, batch, row, col, R, S, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr):
    """Outer scales and bias; inner scales are in acc already."""
    if A_SCALE == "row":
        acc *= tl.load(sa_ptr + batch.to(tl.int64) * R + row, mask=row < R, other=0.0)[:, None]
    elif A_SCALE == "tensor":
        acc *= tl.load(sa_ptr)
    if B_SCALE == "row":
        acc *= tl.load(sb_ptr + batch.to(tl.int64) * S + col, mask=col < S, other=0.0)[None, :]
    elif B_SCALE == "tensor":
        acc *= tl.load(sb_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col < S, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def join_kernel(part_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, splits, R, S, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = scales of the sum of part_ptr [splits, batch, R, S] in ascending order, plus bias. grid (row tiles, column tiles, batch)."""
    batch = tl.program_id(2)
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row[:, None] < R) & (col[None, :] < S)
    at = (batch.to(tl.int64) * R + row)[:, None] * S + col[None, :]
    each = tl.num_programs(2).to(tl.int64) * R * S
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(splits):
        acc += tl.load(part_ptr + i * each + at, mask=there, other=0.0)
    v = _finish(acc, sa_ptr, sb_ptr, bias_ptr, batch, row, col, R, S, A_SCALE, B_SCALE)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=there)
