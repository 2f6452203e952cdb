"""Packed LoRA backward: gradients of every adapter's A and B, and what flows on into x, for all adapters of a pack at once.

    ds_MR = grad_sb(dy_MN, s_MR, b_TN, seg, b_grad_TN)             # dy is read once: ds, and b_grad += scale s^T dy
    grad_ax(dx_MK, ds_MR, x_MK, a_TK, seg, a_grad_TK)              # dx += ds A, and a_grad += ds^T x

Legend as in kernels.lora.forward; y += scale (x A^T) B, so with g the gradients

    ds_MR = scale dy B^T        dB_TN = scale s^T dy        dA_TK = ds^T x        dx_MK += ds A

One by one they are `grad_s`, `grad_b`, `grad_a`, `grad_x`. In one launch the two products of a pass stand beside each other slot by slot, so that
the second of those that read dy finds it in L2, and the GPU is filled by both. Gradients of A and B are float32 and are added to (one program owns
an element and adds once a call); rows of a slot without tokens are left alone. dx is the base layer's, in x's dtype, and is added to in place.
Dropout is that of the forward: dA sees the dropped x, dx what was kept.
Nothing is atomic; deterministic=True as in the forward, with the bits of the single calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.lora._tiles import narrow_tile, outer_tile, segment, wide_tile
from kernels.lora.dropout import Dropout, dropped_ref
from kernels.lora.forward import check, constants, join, narrow, parts_of, scale_of, started, streams, tiles, wide, wide_ref
from kernels.lora.schedules import Schedule, pass_for, schedule_for
from kernels.lora.segments import Segments, alone

__all__ = ["grad_a", "grad_a_ref", "grad_ax", "grad_b", "grad_b_ref", "grad_s", "grad_s_ref", "grad_sb", "grad_x", "grad_x_ref"]

Pair = tuple[Schedule, Schedule]


@on_gpu("grad_s")
def grad_s(dy_MN: torch.Tensor, b_TN: torch.Tensor, seg: Segments, *, deterministic: bool = False, schedule: Schedule | None = None) -> torch.Tensor:
    """ds_MR = scale dy B^T in dy's dtype. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("grad_s", seg, rows=dy_MN, ranks=b_TN)
    return narrow(dy_MN, b_TN, seg.scales, seg, None, schedule or schedule_for("narrow", dy_MN, seg, deterministic))


def grad_s_ref(dy_MN: torch.Tensor, b_TN: torch.Tensor, seg: Segments) -> torch.Tensor:
    ds_MR = dy_MN.new_zeros((dy_MN.shape[0], seg.widest))
    for i, (m, t) in enumerate(seg.bounds()):
        ds_MR[m, : seg.ranks[i]] = seg.scales[i].to(dy_MN.dtype) * (alone(dy_MN[m]) @ alone(b_TN[t]).mT)
    return ds_MR


@on_gpu("grad_b")
def grad_b(s_MR: torch.Tensor, dy_MN: torch.Tensor, seg: Segments, out_TN: torch.Tensor, *, deterministic: bool = False, schedule: Schedule | None = None) -> None:
    """out += scale s^T dy, float32. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("grad_b", seg, rows=dy_MN, ranks=out_TN, small=s_MR, gradient=True)
    outer(s_MR, dy_MN, out_TN, seg.scales, seg, None, schedule or schedule_for("outer", dy_MN, seg, deterministic))


def grad_b_ref(s_MR: torch.Tensor, dy_MN: torch.Tensor, seg: Segments, out_TN: torch.Tensor) -> None:
    for i, (m, t) in enumerate(seg.bounds()):
        if dy_MN[m].shape[0]:
            out_TN[t] += (seg.scales[i].to(dy_MN.dtype) * (alone(s_MR[m, : seg.ranks[i]]).mT @ alone(dy_MN[m]))).to(out_TN.dtype)


@on_gpu("grad_a")
def grad_a(ds_MR: torch.Tensor, x_MK: torch.Tensor, seg: Segments, out_TK: torch.Tensor, *, dropout: Dropout | None = None, deterministic: bool = False,
           schedule: Schedule | None = None) -> None:  # fmt: skip
    """out += ds^T dropout(x), float32. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("grad_a", seg, rows=x_MK, ranks=out_TK, small=ds_MR, dropout=dropout, gradient=True)
    outer(ds_MR, x_MK, out_TK, None, seg, dropout, schedule or schedule_for("outer", x_MK, seg, deterministic))


def grad_a_ref(ds_MR: torch.Tensor, x_MK: torch.Tensor, seg: Segments, out_TK: torch.Tensor, *, dropout: Dropout | None = None) -> None:
    for i, (m, t) in enumerate(seg.bounds()):
        if x_MK[m].shape[0]:
            out_TK[t] += (alone(ds_MR[m, : seg.ranks[i]]).mT @ dropped_ref(alone(x_MK[m]), dropout, i)).to(out_TK.dtype)


@on_gpu("grad_x")
def grad_x(dx_MK: torch.Tensor, ds_MR: torch.Tensor, a_TK: torch.Tensor, seg: Segments, *, dropout: Dropout | None = None, deterministic: bool = False,
           schedule: Schedule | None = None) -> None:  # fmt: skip
    """dx += ds A where dropout kept x, in place. Raises ValueError for shapes, dtypes or devices that do not fit."""
    check("grad_x", seg, rows=dx_MK, ranks=a_TK, small=ds_MR, dropout=dropout)
    wide(dx_MK, ds_MR, a_TK, None, seg, dropout, schedule or schedule_for("wide", dx_MK, seg, deterministic))


def grad_x_ref(dx_MK: torch.Tensor, ds_MR: torch.Tensor, a_TK: torch.Tensor, seg: Segments, *, dropout: Dropout | None = None) -> None:
    wide_ref(dx_MK, ds_MR, a_TK, None, seg, dropout)


@on_gpu("grad_sb")
def grad_sb(dy_MN: torch.Tensor, s_MR: torch.Tensor, b_TN: torch.Tensor, seg: Segments, out_TN: torch.Tensor, *, deterministic: bool = False,
            schedules: Pair | None = None) -> torch.Tensor:  # fmt: skip
    """`grad_s` and `grad_b` in one launch (and one that joins, where N is cut in parts) -> ds_MR. schedules: of narrow and outer, with as many warps."""
    check("grad_sb", seg, rows=dy_MN, ranks=b_TN, small=s_MR)
    check("grad_sb", seg, rows=dy_MN, ranks=out_TN, gradient=True)
    pair = schedules or pass_for("dy", dy_MN, seg, deterministic)
    if pair is None:
        grad_b(s_MR, dy_MN, seg, out_TN)
        return grad_s(dy_MN, b_TN, seg)
    (m, d), r, (one, two) = dy_MN.shape, seg.widest, _same_warps(pair)
    ds_MR = dy_MN.new_empty((m, r))
    if m == 0:
        return ds_MR
    each, split = parts_of(dy_MN, one)
    parts = ds_MR if split == 1 else dy_MN.new_empty((split, m, r), dtype=torch.float32)
    firsts = tiles(seg.most_rows, one.block_m) * tiles(r, one.block_r) * split
    dy_kernel[(firsts + tiles(d, two.block_d) * tiles(r, two.block_r), seg.slots)](
        dy_MN, s_MR, b_TN, parts, out_TN, seg.scales, seg.offsets, seg.rank_offsets, firsts, m, d, r, each, split,
        M1=one.block_m, D1=one.block_d, R1=one.block_r, STAGES1=one.stages, M2=two.block_m, D2=two.block_d, R2=two.block_r, STAGES2=two.stages,
        **constants(dy_MN, one, None, two),
    )  # fmt: skip
    if split > 1:
        join(parts, ds_MR)
    return ds_MR


@on_gpu("grad_ax")
def grad_ax(dx_MK: torch.Tensor | None, ds_MR: torch.Tensor, x_MK: torch.Tensor, a_TK: torch.Tensor, seg: Segments, out_TK: torch.Tensor, *,
            dropout: Dropout | None = None, deterministic: bool = False, schedules: Pair | None = None) -> None:  # fmt: skip
    """`grad_a` and `grad_x` in one launch. dx None: the first alone. schedules: of wide and outer, with as many warps."""
    pair = schedules or pass_for("x", x_MK, seg, deterministic)
    if dx_MK is None or pair is None:
        grad_a(ds_MR, x_MK, seg, out_TK, dropout=dropout, deterministic=deterministic)
        if dx_MK is not None:
            grad_x(dx_MK, ds_MR, a_TK, seg, dropout=dropout)
        return
    check("grad_ax", seg, rows=x_MK, ranks=out_TK, small=ds_MR, dropout=dropout, gradient=True)
    check("grad_ax", seg, rows=dx_MK, ranks=a_TK, small=ds_MR)
    (m, d), r, (one, two) = x_MK.shape, seg.widest, _same_warps(pair)
    if m == 0:
        return
    firsts = tiles(seg.most_rows, one.block_m) * tiles(d, one.block_d)
    x_kernel[(firsts + tiles(d, two.block_d) * tiles(r, two.block_r), seg.slots)](
        dx_MK, ds_MR, x_MK, a_TK, out_TK, seg.offsets, seg.rank_offsets, *streams(dropout), firsts, d, r,
        M1=one.block_m, D1=one.block_d, R1=one.block_r, ONE=r <= one.block_r, M2=two.block_m, D2=two.block_d, R2=two.block_r, STAGES2=two.stages,
        **constants(x_MK, one, dropout, two),
    )  # fmt: skip


def _same_warps(pair: Pair) -> Pair:
    if pair[0].warps != pair[1].warps:
        raise ValueError(f"two products of one launch have as many warps, got {pair[0].warps} and {pair[1].warps}; give both the same")
    return pair


def outer(s_MR: torch.Tensor, x_MD: torch.Tensor, g_TD: torch.Tensor, scales_S: torch.Tensor | None, seg: Segments, dropout: Dropout | None, s: Schedule) -> None:
    """Launches g += scale s^T dropout(x)."""
    (m, d), r = x_MD.shape, seg.widest
    if m == 0:
        return
    outer_kernel[(tiles(d, s.block_d) * tiles(r, s.block_r), seg.slots)](
        s_MR, x_MD, g_TD, scales_S, seg.offsets, seg.rank_offsets, *streams(dropout), d, r,
        BLOCK_M=s.block_m, BLOCK_D=s.block_d, BLOCK_R=s.block_r, STAGES=s.stages, **constants(x_MD, s, dropout),
    )  # fmt: skip


@triton.jit(do_not_specialize=["site"])
def outer_kernel(
    s_ptr, x_ptr, g_ptr, scales_ptr, offsets_ptr, rank_offsets_ptr, p_ptr, seed_ptr, step_ptr, site, D, R,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (column tiles x rank tiles, slots); rank tiles of the same columns stand beside each other."""
    started(PDL)
    slot, rank_tiles = tl.program_id(1), tl.cdiv(R, BLOCK_R)
    first, rows, t0, rank = segment(offsets_ptr, rank_offsets_ptr, slot)
    r0, d0 = tl.program_id(0) % rank_tiles * BLOCK_R, tl.program_id(0) // rank_tiles * BLOCK_D
    if (rows > 0) & (r0 < rank):
        outer_tile(
            s_ptr, x_ptr, g_ptr, scale_of(scales_ptr, slot), p_ptr, seed_ptr, step_ptr, site, slot, first, rows, t0, r0, rank, d0, D, R,
            BLOCK_M, BLOCK_D, BLOCK_R, STAGES, EVEN, DROPOUT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["firsts", "split"])
def dy_kernel(
    dy_ptr, s_ptr, b_ptr, ds_ptr, g_ptr, scales_ptr, offsets_ptr, rank_offsets_ptr, firsts, M, N, R, each, split,
    M1: tl.constexpr, D1: tl.constexpr, R1: tl.constexpr, STAGES1: tl.constexpr, M2: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr, STAGES2: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (firsts + column tiles x rank tiles, slots): a slot's programs first make ds (rows x ranks x parts of N), then its gradient of B."""
    started(PDL)
    slot, i = tl.program_id(1), tl.program_id(0)
    first, rows, t0, rank = segment(offsets_ptr, rank_offsets_ptr, slot)
    scale = tl.load(scales_ptr + slot)
    if i < firsts:
        rank_tiles = tl.cdiv(R, R1)
        r0, part, row0 = i % rank_tiles * R1, i // rank_tiles % split, i // (rank_tiles * split) * M1
        if (row0 < rows) & (r0 < rank):
            narrow_tile(
                dy_ptr, b_ptr, ds_ptr + part.to(tl.int64) * M * R, scale, None, None, None, 0, slot, first, row0, rows, t0, r0, rank,
                part * each, tl.minimum(part * each + each, N), N, R, M1, D1, R1, STAGES1, EVEN, False, PRECISION,
            )  # fmt: skip
    else:
        rank_tiles = tl.cdiv(R, R2)
        r0, d0 = (i - firsts) % rank_tiles * R2, (i - firsts) // rank_tiles * D2
        if (rows > 0) & (r0 < rank):
            outer_tile(s_ptr, dy_ptr, g_ptr, scale, None, None, None, 0, slot, first, rows, t0, r0, rank, d0, N, R, M2, D2, R2, STAGES2, EVEN, False, PRECISION)


@triton.jit(do_not_specialize=["site", "firsts"])
def x_kernel(
    dx_ptr, ds_ptr, x_ptr, a_ptr, g_ptr, offsets_ptr, rank_offsets_ptr, p_ptr, seed_ptr, step_ptr, site, firsts, K, R,
    M1: tl.constexpr, D1: tl.constexpr, R1: tl.constexpr, ONE: tl.constexpr, M2: tl.constexpr, D2: tl.constexpr, R2: tl.constexpr, STAGES2: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (firsts + column tiles x rank tiles, slots): a slot's programs first add to dx (rows x columns), then to its gradient of A."""
    started(PDL)
    slot, i = tl.program_id(1), tl.program_id(0)
    first, rows, t0, rank = segment(offsets_ptr, rank_offsets_ptr, slot)
    if i < firsts:
        columns = tl.cdiv(K, D1)
        row0, d0 = i // columns * M1, i % columns * D1
        if row0 < rows:
            wide_tile(dx_ptr, ds_ptr, a_ptr, 1.0, p_ptr, seed_ptr, step_ptr, site, slot, first, row0, rows, t0, rank, d0, K, R, M1, D1, R1, ONE, EVEN, DROPOUT, PRECISION)
    else:
        rank_tiles = tl.cdiv(R, R2)
        r0, d0 = (i - firsts) % rank_tiles * R2, (i - firsts) // rank_tiles * D2
        if (rows > 0) & (r0 < rank):
            outer_tile(
                ds_ptr, x_ptr, g_ptr, 1.0, p_ptr, seed_ptr, step_ptr, site, slot, first, rows, t0, r0, rank, d0, K, R,
                M2, D2, R2, STAGES2, EVEN, DROPOUT, PRECISION,
            )  # fmt: skip
