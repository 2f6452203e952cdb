"""The dropped copy of an adapter's input, for paths whose products cannot make the mask themselves.

    x_MK = dropped(x_MK, seg, dropout)            # every slot's own rows: kept and divided by 1 - p, or 0; on the CPU dropped_rows_ref

Masks are those of kernels.lora.dropout, so every path drops the same elements. It costs a read and a write of x a site; the packed kernels
drop while they read and write nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.lora.dropout import Dropout, dropped_ref, keep_tile
from kernels.lora.segments import Segments

__all__ = ["dropped", "dropped_rows_ref"]

_ROWS, _COLUMNS = 16, 128


def _check(x_MD: torch.Tensor, seg: Segments, dropout: Dropout) -> None:
    if x_MD.ndim != 2 or x_MD.device != seg.offsets.device:
        raise ValueError(f"x is [M, D] on the segments' device, got {tuple(x_MD.shape)} on {x_MD.device} for {seg.offsets.device}; make them there")
    dropout.check(seg)


def dropped_rows_ref(x_MD: torch.Tensor, seg: Segments, dropout: Dropout) -> torch.Tensor:
    """A new tensor in x's dtype, one slot after another."""
    _check(x_MD, seg, dropout)
    return torch.cat([dropped_ref(x_MD[rows], dropout, slot) for slot, (rows, _) in enumerate(seg.bounds())])


@triton.jit(do_not_specialize=["site"])
def dropped_kernel(x_ptr, out_ptr, offsets_ptr, p_ptr, seed_ptr, step_ptr, site, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """grid (row tiles x column tiles, S), columns fastest; x and out [M, D]."""
    slot, columns = tl.program_id(1), tl.cdiv(D, COLUMNS)
    first, end = tl.load(offsets_ptr + slot), tl.load(offsets_ptr + slot + 1)
    row0, d0 = tl.program_id(0) // columns * ROWS, tl.program_id(0) % columns * COLUMNS
    if first + row0 < end:
        row, d = row0 + tl.arange(0, ROWS), d0 + tl.arange(0, COLUMNS)
        place = (first + row).to(tl.int64)[:, None] * D + d[None, :]
        there = (first + row < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
        keep = keep_tile(row, d0, slot, p_ptr, seed_ptr, step_ptr, site, COLUMNS)
        x = tl.div_rn(tl.where(keep, x, 0.0), tl.zeros((ROWS, COLUMNS), tl.float32) + (1.0 - tl.load(p_ptr + slot)))
        tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=there)


@on_gpu("dropped")
def dropped(x_MD: torch.Tensor, seg: Segments, dropout: Dropout) -> torch.Tensor:
    """`dropped_rows_ref` on a GPU: equal numbers. Raises ValueError where x, segments and dropout do not fit."""
    _check(x_MD, seg, dropout)
    x = x_MD.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(seg.most_rows, _ROWS) * triton.cdiv(x.shape[1], _COLUMNS), seg.slots)
        dropped_kernel[grid](x, out, seg.offsets, dropout.p_S, dropout.seed_S, dropout.step_S, dropout.site, x.shape[1], ROWS=_ROWS, COLUMNS=_COLUMNS)
    return out
