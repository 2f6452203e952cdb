"""Dropout of an adapter's input that depends on the adapter alone: not on the slot it sits in, on its neighbours, or on the device.

    dropout = Dropout(p_S=p, seed_S=seed, step_S=step, site=17)      # one entry a slot, on the device; site: a number of (layer, module)
    s_MR = shrink(x_MK, a_TK, seg, dropout=dropout)                   # and the same `dropout` to grad_a and grad_x

Element (row, column) of a slot's own rows is kept where a word of Philox4x32-10 (kernels.exact.philox) is at least p * 2^32: word column % 4
of counter (column // 4, row in the segment, step, site) under the adapter's 64-bit seed as key. What is kept is divided by 1 - p: in float32, on the
sum. Masks are never stored; backward makes them again. A step is what the caller counts: two steps share no mask, two micro-steps of one batch
should not either. Everything but the site is read on the device, so a captured graph follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.exact.philox import philox_ref, philox_u32
from kernels.lora.segments import Segments

__all__ = ["Dropout", "dropped_ref", "keep_ref", "keep_tile"]

_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """p_S: float32 [S], each in [0, 1). seed_S, step_S: int64 [S]. site: 0 to 2^32 - 1."""

    p_S: torch.Tensor
    seed_S: torch.Tensor
    step_S: torch.Tensor
    site: int

    def __post_init__(self) -> None:
        kinds = (self.p_S.dtype, self.seed_S.dtype, self.step_S.dtype)
        if kinds != (torch.float32, torch.int64, torch.int64) or not self.p_S.ndim == self.seed_S.ndim == self.step_S.ndim == 1:
            raise ValueError(f"dropout has p_S float32 [S], seed_S and step_S int64 [S], got {kinds}; convert them")
        if not 0 <= self.site < 2**31:
            raise ValueError(f"a site is from 0 to 2^31 - 1, got {self.site=}; number the sites")

    def check(self, seg: Segments) -> None:
        shapes = {tuple(t.shape) for t in (self.p_S, self.seed_S, self.step_S)}
        if shapes != {(seg.slots,)} or self.p_S.device != seg.offsets.device:
            raise ValueError(f"dropout has one entry a slot, on the segments' device, got {sorted(shapes)} on {self.p_S.device} for {seg.slots} slots on {seg.offsets.device}")


@triton.jit
def keep_tile(row, col, slot, p_ptr, seed_ptr, step_ptr, site, BLOCK_D: tl.constexpr):
    """bool [rows, BLOCK_D]: which elements (row, col + 0 .. BLOCK_D - 1) of `slot` are kept. col: a multiple of 4."""
    seed = tl.load(seed_ptr + slot)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    threshold = (tl.load(p_ptr + slot) * 4294967296.0).to(tl.uint32)
    group = (col // 4 + tl.arange(0, BLOCK_D // 4)).to(tl.uint32)
    nothing = tl.zeros((row.shape[0], BLOCK_D // 4), tl.uint32)
    c0, c1 = nothing + group[None, :], nothing + row.to(tl.uint32)[:, None]
    c2, c3 = nothing + tl.load(step_ptr + slot).to(tl.uint32), nothing + site.to(tl.uint32)
    w0, w1, w2, w3 = philox_u32(c0, c1, c2, c3, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, groups, 2, 2]: word 2 i + j at (i, j)
    return tl.reshape(words, (row.shape[0], BLOCK_D)) >= threshold


def keep_ref(dropout: Dropout, slot: int, rows: int, columns: int) -> torch.Tensor:
    """bool [rows, columns] of a slot's own rows."""
    seed, step = int(dropout.seed_S[slot]) & 0xFFFFFFFFFFFFFFFF, int(dropout.step_S[slot]) & 0xFFFFFFFF
    threshold = np.uint32(float(dropout.p_S[slot]) * 2.0**32)
    counter = np.zeros((rows, -(-columns // 4), 4), dtype=np.uint32)
    counter[..., 0], counter[..., 1] = np.arange(counter.shape[1])[None, :], np.arange(rows)[:, None]
    counter[..., 2], counter[..., 3] = step, dropout.site
    words = philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(rows, 4 * counter.shape[1])[:, :columns]
    return torch.from_numpy(words >= threshold).to(dropout.p_S.device)


def dropped_ref(x_MD: torch.Tensor, dropout: Dropout | None, slot: int) -> torch.Tensor:
    """A slot's own rows of x after dropout: kept and divided by 1 - p, or 0."""
    if dropout is None or float(dropout.p_S[slot]) == 0.0:
        return x_MD
    keep = keep_ref(dropout, slot, *x_MD.shape)
    return torch.where(keep, x_MD, 0.0) / float(1 - dropout.p_S[slot])
