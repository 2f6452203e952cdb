"""Packed LoRA forward: s = x A^T of every adapter's own rows, and y += scale s B, in two launches for all adapters of a pack.

    s_MR = shrink(x_MK, a_TK, seg)                 # [M, R = seg.widest], x's dtype; kept for backward
    expand(y_MN, s_MR, b_TN, seg)                  # adds into the base layer's output, in place

Legend: M rows of all slots, K inputs, N outputs, T rank rows of all slots (kernels/lora/segments.py). Columns of s above a slot's capacity are not
written and never read. Operands are bf16, fp16 or fp32, contiguous, of one dtype; sums are float32 and are rounded once. Ranks of 1 to 128 may mix,
segments may be ragged or empty, any size goes; on 16-byte rows (K, N multiples of 8 in bf16) loads are 16 bytes wide.

Nothing is atomic. deterministic=True: tiles relative to each segment's start and one schedule for every pack, so a row's bits depend on its own
x and adapter alone. Otherwise K may be cut in parts, which a second launch joins in order: the same bits every time, for the same shapes.
The references are loops over slots in the operands' own dtype (float64 for tests; on a CPU they are what runs).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.device import on_gpu
from kernels.lora._tiles import narrow_tile, segment, wide_tile
from kernels.lora.dropout import Dropout, dropped_ref, keep_ref
from kernels.lora.schedules import PDL, Schedule, schedule_for
from kernels.lora.segments import Segments, alone

__all__ = ["DTYPES", "expand", "expand_ref", "shrink", "shrink_ref"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@on_gpu("shrink")
def shrink(x_MK: torch.Tensor, a_TK: torch.Tensor, seg: Segments, *, dropout: Dropout | None = None, deterministic: bool = False,
           schedule: Schedule | None = None) -> torch.Tensor:  # fmt: skip
    """s_MR = dropout(x) A^T, x's dtype. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("shrink", seg, rows=x_MK, ranks=a_TK, dropout=dropout)
    return narrow(x_MK, a_TK, None, seg, dropout, schedule or schedule_for("narrow", x_MK, seg, deterministic))


def shrink_ref(x_MK: torch.Tensor, a_TK: torch.Tensor, seg: Segments, *, dropout: Dropout | None = None) -> torch.Tensor:
    s_MR = x_MK.new_zeros((x_MK.shape[0], seg.widest))
    for i, (m, t) in enumerate(seg.bounds()):
        s_MR[m, : seg.ranks[i]] = dropped_ref(alone(x_MK[m]), dropout, i) @ alone(a_TK[t]).mT
    return s_MR


@on_gpu("expand")
def expand(y_MN: torch.Tensor, s_MR: torch.Tensor, b_TN: torch.Tensor, seg: Segments, *, deterministic: bool = False, schedule: Schedule | None = None) -> None:
    """y += scale s B, in place. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("expand", seg, rows=y_MN, ranks=b_TN, small=s_MR)
    wide(y_MN, s_MR, b_TN, seg.scales, seg, None, schedule or schedule_for("wide", y_MN, seg, deterministic))


def expand_ref(y_MN: torch.Tensor, s_MR: torch.Tensor, b_TN: torch.Tensor, seg: Segments) -> None:
    wide_ref(y_MN, s_MR, b_TN, seg.scales, seg, None)


def wide_ref(y_MD: torch.Tensor, s_MR: torch.Tensor, w_TD: torch.Tensor, scales_S: torch.Tensor | None, seg: Segments, dropout: Dropout | None) -> None:
    """y += scale dropout's mask of (s w), divided by 1 - p."""
    for i, (m, t) in enumerate(seg.bounds()):
        product = alone(s_MR[m, : seg.ranks[i]]) @ alone(w_TD[t])
        if dropout is not None and float(dropout.p_S[i]):
            product = torch.where(keep_ref(dropout, i, *product.shape), product, 0.0) / float(1 - dropout.p_S[i])
        y_MD[m] += product if scales_S is None else scales_S[i].to(product.dtype) * product


# ---- checks and launches, shared with backward -----------------------------------------------------------------------------------------


def check(op: str, seg: Segments, *, rows: torch.Tensor, ranks: torch.Tensor, small: torch.Tensor | None = None, dropout: Dropout | None = None, gradient: bool = False) -> None:
    """rows [M, D] and ranks [T, D] meet in D and the segments; small [M, R]. gradient: `ranks` is float32, else of rows' dtype."""
    if rows.ndim != 2 or ranks.shape != (seg.rank_rows, rows.shape[-1]):
        raise ValueError(f"{op} takes rows [M, D] and adapters [T, D], T = {seg.rank_rows} of these segments, got {tuple(rows.shape)} and {tuple(ranks.shape)}")
    if small is not None and small.shape != (rows.shape[0], seg.widest):
        raise ValueError(f"{op} takes s [M, R], R = {seg.widest} the largest capacity, got {tuple(small.shape)} for M = {rows.shape[0]}")
    kinds = [rows.dtype, torch.bfloat16 if small is None else small.dtype, ranks.dtype]
    if rows.dtype not in DTYPES or (small is not None and small.dtype != rows.dtype) or ranks.dtype != (torch.float32 if gradient else rows.dtype):
        raise ValueError(f"{op} takes bf16, fp16 or fp32, all alike (gradients are float32), got {kinds}; convert them, or call {op}_ref")
    if not all(t is None or t.is_contiguous() for t in (rows, ranks, small)):
        raise ValueError(f"{op} takes contiguous tensors; got strides {rows.stride()} {ranks.stride()}; call .contiguous()")
    if seg.offsets.device != rows.device:
        raise ValueError(f"{op} takes segments on its operands' device, got {seg.offsets.device} and {rows.device}; make them there")
    if dropout is not None:
        dropout.check(seg)


def constants(rows: torch.Tensor, s: Schedule, dropout: Dropout | None, second: Schedule | None = None) -> dict[str, object]:
    """Of every kernel. second: of a kernel with two products."""
    pdl = overlapped()
    even = all(rows.shape[1] % one.block_d == 0 for one in (s, second) if one)
    return dict(EVEN=even, DROPOUT=dropout is not None, PRECISION="ieee" if rows.dtype == torch.float32 else "tf32", PDL=bool(pdl), num_warps=s.warps, **pdl)


def streams(dropout: Dropout | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]:
    return (dropout.p_S, dropout.seed_S, dropout.step_S, dropout.site) if dropout else (None, None, None, 0)


def tiles(n: int, block: int) -> int:
    return -(-n // block)


def narrow(x_MD: torch.Tensor, w_TD: torch.Tensor, scales_S: torch.Tensor | None, seg: Segments, dropout: Dropout | None, s: Schedule) -> torch.Tensor:
    """Launches s_MR = scale dropout(x) w^T."""
    (m, d), r = x_MD.shape, seg.widest
    out_MR = x_MD.new_empty((m, r))
    if m == 0:
        return out_MR
    each, split = parts_of(x_MD, s)
    parts = out_MR if split == 1 else x_MD.new_empty((split, m, r), dtype=torch.float32)
    grid = (tiles(seg.most_rows, s.block_m) * tiles(r, s.block_r), split, seg.slots)
    narrow_kernel[grid](
        x_MD, w_TD, parts, scales_S, seg.offsets, seg.rank_offsets, *streams(dropout), m, d, r, each,
        BLOCK_M=s.block_m, BLOCK_D=s.block_d, BLOCK_R=s.block_r, STAGES=s.stages, **constants(x_MD, s, dropout),
    )  # fmt: skip
    if split > 1:
        join(parts, out_MR)
    return out_MR


def parts_of(x_MD: torch.Tensor, s: Schedule) -> tuple[int, int]:
    """(length of a part of D, a multiple of block_d; how many)."""
    each = tiles(tiles(x_MD.shape[1], s.split), s.block_d) * s.block_d
    return each, tiles(x_MD.shape[1], each)


def join(parts: torch.Tensor, out_MR: torch.Tensor) -> None:
    pdl = overlapped()
    join_kernel[(tiles(out_MR.numel(), 1024),)](parts, out_MR, out_MR.numel(), parts.shape[0], BLOCK=1024, PDL=bool(pdl), num_warps=4, **pdl)


def overlapped() -> dict[str, bool]:
    """Launch options of programmatic dependent launch, which the interpreter does not have."""
    return dict(launch_pdl=True) if PDL and not knobs.runtime.interpret else {}


def wide(y_MD: torch.Tensor, s_MR: torch.Tensor, w_TD: torch.Tensor, scales_S: torch.Tensor | None, seg: Segments, dropout: Dropout | None, s: Schedule) -> None:
    """Launches y += scale dropout's mask of (s w)."""
    (m, d), r = y_MD.shape, seg.widest
    if m == 0:
        return
    grid = (tiles(seg.most_rows, s.block_m) * tiles(d, s.block_d), seg.slots)
    wide_kernel[grid](
        y_MD, s_MR, w_TD, scales_S, seg.offsets, seg.rank_offsets, *streams(dropout), d, r,
        BLOCK_M=s.block_m, BLOCK_D=s.block_d, BLOCK_R=s.block_r, ONE=r <= s.block_r, **constants(y_MD, s, dropout),
    )  # fmt: skip


@triton.jit
def started(PDL: tl.constexpr):
    """Wait for what the kernel before wrote, then let the next one take its place. Every program does, or a later kernel could pass an unfinished one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def scale_of(scales_ptr, slot):
    return tl.load(scales_ptr + slot) if scales_ptr is not None else 1.0


@triton.jit(do_not_specialize=["site"])
def narrow_kernel(
    x_ptr, w_ptr, out_ptr, scales_ptr, offsets_ptr, rank_offsets_ptr, p_ptr, seed_ptr, step_ptr, site, M, D, R, each,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (row tiles x rank tiles, parts of D, slots); rank tiles of the same rows stand beside each other."""
    started(PDL)
    slot, part = tl.program_id(2), tl.program_id(1)
    first, rows, t0, rank = segment(offsets_ptr, rank_offsets_ptr, slot)
    rank_tiles = tl.cdiv(R, BLOCK_R)
    row0, r0 = tl.program_id(0) // rank_tiles * BLOCK_M, tl.program_id(0) % rank_tiles * BLOCK_R
    if (row0 < rows) & (r0 < rank):
        narrow_tile(
            x_ptr, w_ptr, out_ptr + part.to(tl.int64) * M * R, scale_of(scales_ptr, slot), p_ptr, seed_ptr, step_ptr, site, slot, first, row0, rows, t0, r0, rank,
            part * each, tl.minimum(part * each + each, D), D, R, BLOCK_M, BLOCK_D, BLOCK_R, STAGES, EVEN, DROPOUT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["split"])
def join_kernel(part_ptr, out_ptr, each, split, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = sum of the parts [split, each] in ascending order."""
    started(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(part_ptr + i, mask=i < each, other=0.0)
    for part in range(1, split):
        acc += tl.load(part_ptr + tl.cast(part, tl.int64) * each + i, mask=i < each, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < each)


@triton.jit(do_not_specialize=["site"])
def wide_kernel(
    y_ptr, s_ptr, w_ptr, scales_ptr, offsets_ptr, rank_offsets_ptr, p_ptr, seed_ptr, step_ptr, site, D, R,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (row tiles x column tiles, slots), columns fastest."""
    started(PDL)
    slot = tl.program_id(1)
    first, rows, t0, rank = segment(offsets_ptr, rank_offsets_ptr, slot)
    columns = tl.cdiv(D, BLOCK_D)
    row0, d0 = tl.program_id(0) // columns * BLOCK_M, tl.program_id(0) % columns * BLOCK_D
    if row0 < rows:
        wide_tile(
            y_ptr, s_ptr, w_ptr, scale_of(scales_ptr, slot), p_ptr, seed_ptr, step_ptr, site, slot, first, row0, rows, t0, rank, d0, D, R,
            BLOCK_M, BLOCK_D, BLOCK_R, ONE, EVEN, DROPOUT, PRECISION,
        )  # fmt: skip
