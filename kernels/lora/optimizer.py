"""AdamW for a pack of adapters: every slot its own rate, decay, clip and step, all matrices of all sites in three launches.

    state = AdamState.zeros(widths=(2048, 256, 2048, 2048), ranks=(16, 64), device="cuda", compute_dtype=torch.bfloat16)
    master_TN = state.views("master")[1]              # [T, 256]: rank rows of both slots; "compute" and "grad" lie likewise
    state.prepare({1: SlotStep(learning_rate=2e-4, step=1, divisor=37.0, clip=1.0)})      # slot 0 is not due: nothing of it changes
    adamw_step(state)                                                                   # on the CPU: adamw_step_ref(state)

Legend: S slots, T rank rows of all slots, J matrices (an A [T, K] or a B^T [T, N] of a site), each of its own width. One flat float32 buffer
for each of master, grad, m, v and one for the copies that the model computes with. For every due slot:

    g = grad / divisor;  n = |g| over all matrices of the slot;  g *= min(1, clip / (n + 1e-6))            (torch.nn.utils.clip_grad_norm_)
    m += (g - m)(1 - beta1);  v = beta2 v + (1 - beta2) g g;  p = p (1 - lr decay) - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps);  grad = 0

with c = 1 - beta^step (Loshchilov and Hutter 2019, arXiv 1711.05101, as torch.optim.AdamW orders it), then the copy is refreshed. Sums of
squares have a fixed order (lanes over rank rows, then columns, then matrices, one tree each; no atomics) that depends neither on other
slots nor on the slot's capacity: rank rows beyond the adapter's rank add +0. Apart from that sum the kernels give the bits of
`adamw_step_ref`. A graph captures `adamw_step`; `prepare` stays outside of it and only fills a small tensor. A floor for its time is
34 bytes a parameter of a due slot (bf16 copies) plus 4 for the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu

__all__ = ["BETAS", "BUFFERS", "EPS", "AdamState", "SlotStep", "adamw_step", "adamw_step_ref"]

BETAS, EPS = (0.9, 0.999), 1e-8
BUFFERS = ("master", "grad", "m", "v")  # of float32; "compute" is the fifth
_NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_
_ALIGN = 128  # elements: every matrix begins where wide loads, the copy engine and grouped_mm may begin
_SETTINGS = 6  # due, 1 - lr decay, lr / c1, sqrt(c2), clip, divisor
_TILE = 4096  # parameters a program updates
_ROWS, _COLUMNS = 4, 1024  # gradients a program squares at a time
_COMPUTE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class SlotStep:
    """One optimizer step of one slot. step: 1 for the adapter's first; divisor: answer tokens whose gradients were added; clip inf: none."""

    learning_rate: float
    step: int
    divisor: float = 1.0
    weight_decay: float = 0.0
    clip: float = math.inf

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"steps count from 1, or the bias correction is 0, got {self.step=}; pass the number of this step")
        if not (0 < self.divisor < math.inf and self.clip > 0):
            raise ValueError(f"divisor and clip are positive, got {self.divisor=} {self.clip=}; a batch without answer tokens takes no step")
        if not (0 <= self.learning_rate < math.inf and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"learning_rate and weight_decay are not negative, got {self.learning_rate=} {self.weight_decay=}; mend them")

    def settings(self) -> tuple[float, ...]:
        c1, c2 = (1.0 - beta**self.step for beta in BETAS)
        return 1.0, 1.0 - self.learning_rate * self.weight_decay, self.learning_rate / c1, math.sqrt(c2), self.clip, self.divisor


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamState:
    """Made by `AdamState.zeros`. Buffers are flat; `views` gives the matrices and `read`, `write`, `clear` one slot's numbers.

    settings: float32 [S, 6], filled by `prepare`. norms: float32 [S], gradient norm (after the divisor, before the clip) of a slot's last step.
    """

    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    master: torch.Tensor
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    compute: torch.Tensor  # the same storage as master where the model computes in float32
    settings: torch.Tensor
    norms: torch.Tensor
    factors: torch.Tensor  # float32 [S]: min(1, clip / norm) / divisor
    rank_offsets: torch.Tensor  # int32 [S + 1]
    blocks: torch.Tensor  # int64 [Q, 3]: (first element, width, first column) of what one program squares
    squares: torch.Tensor  # float32 [S, Q]
    tiles: torch.Tensor  # int64 [tiles, 3]: (first element, count, slot) of what one program updates

    @staticmethod
    def zeros(
        *, widths: Sequence[int], ranks: Sequence[int], device: torch.device | str, compute_dtype: torch.dtype = torch.float32
    ) -> AdamState:
        """widths: of the J matrices, in the order of `views`. ranks: capacities of the slots (Segments.ranks)."""
        if not widths or not ranks or min(widths) < 1 or min(ranks) < 1:
            raise ValueError(f"a state has matrices and slots of at least one column and rank row, got {widths=} {ranks=}; give all")
        if compute_dtype not in _COMPUTE:
            raise ValueError(f"a model computes in bf16, fp16 or fp32, got {compute_dtype=}; choose one")
        starts = _starts(widths, ranks)
        buffers = {name: torch.zeros(starts[-1], dtype=torch.float32, device=device) for name in BUFFERS}
        copies = buffers["master"] if compute_dtype == torch.float32 else torch.zeros(starts[-1], dtype=compute_dtype, device=device)
        blocks = [(start, width, column) for start, width in zip(starts, widths, strict=False) for column in range(0, width, _COLUMNS)]
        tiles = [
            (first + at, min(_TILE, rank * width - at), slot)
            for slot, (begin, rank) in enumerate(zip(accumulate(ranks, initial=0), ranks, strict=False))
            for first, width in ((start + begin * width, width) for start, width in zip(starts, widths, strict=False))
            for at in range(0, rank * width, _TILE)
        ]
        return AdamState(
            widths=tuple(widths), ranks=tuple(ranks), **buffers, compute=copies,
            settings=torch.zeros(len(ranks), _SETTINGS, dtype=torch.float32, device=device),
            norms=torch.zeros(len(ranks), dtype=torch.float32, device=device), factors=torch.zeros(len(ranks), dtype=torch.float32, device=device),
            rank_offsets=torch.tensor([0, *accumulate(ranks)], dtype=torch.int32, device=device),
            blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
            squares=torch.zeros(len(ranks), len(blocks), dtype=torch.float32, device=device),
            tiles=torch.tensor(tiles, dtype=torch.int64, device=device),
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.master.device

    @property
    def nbytes(self) -> int:
        """Of all buffers and tables."""
        tensors = {x.data_ptr(): x for x in self.__dict__.values() if isinstance(x, torch.Tensor)}
        return sum(x.numel() * x.element_size() for x in tensors.values())

    def views(self, name: str) -> list[torch.Tensor]:
        """The J matrices [T, width] inside "master", "compute", "grad", "m" or "v"."""
        if name not in (*BUFFERS, "compute"):
            raise ValueError(f"a buffer is one of {(*BUFFERS, 'compute')}, got {name!r}; choose one")
        flat, starts, t = getattr(self, name), _starts(self.widths, self.ranks), sum(self.ranks)
        return [flat[start : start + t * width].view(t, width) for start, width in zip(starts, self.widths, strict=False)]

    def slot_views(self, slot: int, name: str) -> list[torch.Tensor]:
        """The slot's rank rows [rank, width] of every matrix."""
        begin = sum(self.ranks[:slot])
        return [x[begin : begin + self.ranks[slot]] for x in self.views(name)]

    def read(self, slot: int, name: str) -> torch.Tensor:
        """A copy of the slot's numbers: its rank rows of every matrix, one after another, flat."""
        return torch.cat([x.reshape(-1) for x in self.slot_views(slot, name)])

    def split(self, slot: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views [rank, width] into what `read` gave and `write` takes."""
        rank = self.ranks[slot]
        if flat.shape != (rank * sum(self.widths),):
            raise ValueError(f"slot {slot} has {rank} x {sum(self.widths)} parameters, got {tuple(flat.shape)=}; pass what read gives")
        return [x.view(rank, width) for x, width in zip(flat.split([rank * w for w in self.widths]), self.widths, strict=True)]

    def write(self, slot: int, name: str, flat: torch.Tensor) -> None:
        """Set the slot's numbers in the order of `read`; with "master" its compute copies, too."""
        if name not in BUFFERS:
            raise ValueError(f"what is written is one of {BUFFERS}, got {name!r}; compute copies follow master")
        pieces = self.split(slot, flat.to(self.device))
        for target in (name, "compute") if name == "master" else (name,):
            torch._foreach_copy_(self.slot_views(slot, target), pieces)

    def clear(self, slot: int) -> None:
        """Everything of the slot is zero: ready for another adapter."""
        for name in (*BUFFERS, "compute"):
            torch._foreach_zero_(self.slot_views(slot, name))

    def prepare(self, steps: Mapping[int, SlotStep]) -> None:
        """Which slots are due in the next `adamw_step`, and how; all others are not."""
        if not all(0 <= slot < len(self.ranks) for slot in steps):
            raise ValueError(f"slots are 0 to {len(self.ranks) - 1}, got {sorted(steps)}; name slots of this state")
        rows = [steps[slot].settings() if slot in steps else (0.0,) * _SETTINGS for slot in range(len(self.ranks))]
        self.settings.copy_(torch.tensor(rows, dtype=torch.float32, device="cpu"))


def _starts(widths: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Where each matrix begins in a flat buffer, and the buffer's end."""
    return [0, *accumulate(-(-sum(ranks) * width // _ALIGN) * _ALIGN for width in widths)]


# ---- reference -----------------------------------------------------------------------------------------------------------------


def adamw_step_ref(state: AdamState) -> None:
    """`adamw_step` in place on the CPU, one float32 rounding an operation; sums of squares in float64, matrix after matrix."""
    if state.device.type != "cpu":
        raise ValueError(f"the reference runs on the CPU, got {state.device}; call adamw_step")
    for slot, (due, _, _, _, clip, divisor) in enumerate(state.settings.unbind(0)):
        if due != 0:
            total = torch.zeros((), dtype=torch.float64, device="cpu")
            for g in state.slot_views(slot, "grad"):
                total = total + g.double().square().sum()
            norm = _sqrt(total.float()) / divisor
            ratio = clip / (norm + _NORM_EPS)
            free = torch.ones_like(ratio)
            state.norms[slot] = norm
            state.factors[slot] = (free if clip == math.inf or ratio >= 1 else ratio) / divisor
            update_ref(state, slot)


def update_ref(state: AdamState, slot: int) -> None:
    """What `update_kernel` does to one due slot, with the factor that the state has: the same bits."""
    _, keep, rate, root2, _, _ = state.settings[slot]
    for p, g, m, v, copy in zip(*(state.slot_views(slot, name) for name in ("master", "grad", "m", "v", "compute")), strict=True):
        scaled = g * state.factors[slot]
        m.copy_(m + (scaled - m) * (1.0 - BETAS[0]))
        v.copy_(v * BETAS[1] + (scaled * scaled) * (1.0 - BETAS[1]))
        denominator = _sqrt(v) / root2 + EPS
        p.copy_(p * keep - rate * (m / denominator))
        copy.copy_(p)
        g.zero_()


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """numpy's square root is the hardware's, which rounds correctly; torch's on a CPU need not."""
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def squares_kernel(grad_ptr, block_ptr, rank_offset_ptr, settings_ptr, part_ptr, Q, SETTINGS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of squares of COLUMNS columns of one matrix over the rank rows of one slot. grid (Q, S)."""
    q, slot = tl.program_id(0), tl.program_id(1)
    if tl.load(settings_ptr + slot * SETTINGS) != 0.0:
        start = tl.multiple_of(tl.load(block_ptr + q * 3), 16)
        width = tl.multiple_of(tl.load(block_ptr + q * 3 + 1), ALIGN)
        column = tl.load(block_ptr + q * 3 + 2).to(tl.int32) // COLUMNS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        begin, end = tl.load(rank_offset_ptr + slot), tl.load(rank_offset_ptr + slot + 1)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            g = tl.load(grad_ptr + start + row * width + column, mask=(row < end) & (column < width), other=0.0)
            acc += g * g
        tl.store(part_ptr + slot * Q + q, tl.sum(acc))


@triton.jit
def clip_kernel(part_ptr, settings_ptr, norm_ptr, factor_ptr, Q, norm_eps, SETTINGS: tl.constexpr, BLOCK: tl.constexpr):
    """norm and min(1, clip / norm) / divisor of one slot. grid (S,)."""
    slot = tl.program_id(0)
    if tl.load(settings_ptr + slot * SETTINGS) != 0.0:
        acc = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, Q, BLOCK):
            q = first + tl.arange(0, BLOCK)
            acc += tl.load(part_ptr + slot * Q + q, mask=q < Q, other=0.0)
        clip, divisor = tl.load(settings_ptr + slot * SETTINGS + 4), tl.load(settings_ptr + slot * SETTINGS + 5)
        norm = tl.div_rn(tl.sqrt_rn(tl.sum(acc)), divisor)
        ratio = tl.div_rn(clip, norm + norm_eps)
        free = (ratio >= 1.0) | (clip == float("inf"))  # a NaN stays NaN, as in torch
        tl.store(norm_ptr + slot, norm)
        tl.store(factor_ptr + slot, tl.div_rn(tl.where(free, 1.0, ratio), divisor))


@triton.jit
def update_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, tile_ptr, settings_ptr, factor_ptr, rest1, beta2, rest2, eps,
    SETTINGS: tl.constexpr, ALIGN: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK parameters of one slot; must be compiled with enable_fp_fusion=False. grid (tiles,). COPY: compute is a buffer of its own."""
    tile = tile_ptr + tl.program_id(0).to(tl.int64) * 3
    slot = tl.load(tile + 2)
    if tl.load(settings_ptr + slot * SETTINGS) != 0.0:
        start, count = tl.multiple_of(tl.load(tile), ALIGN), tl.multiple_of(tl.load(tile + 1), ALIGN)
        keep, rate = tl.load(settings_ptr + slot * SETTINGS + 1), tl.load(settings_ptr + slot * SETTINGS + 2)
        root2, factor = tl.load(settings_ptr + slot * SETTINGS + 3), tl.load(factor_ptr + slot)
        i = tl.arange(0, BLOCK)
        inside = i < count
        p = tl.load(p_ptr + start + i, mask=inside, other=0.0)
        g = tl.load(g_ptr + start + i, mask=inside, other=0.0) * factor
        m = tl.load(m_ptr + start + i, mask=inside, other=0.0)
        v = tl.load(v_ptr + start + i, mask=inside, other=0.0)
        m = m + (g - m) * rest1
        v = v * beta2 + (g * g) * rest2
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.zeros((BLOCK,), tl.float32) + root2) + eps
        p = p * keep - rate * tl.div_rn(m, denominator)
        tl.store(p_ptr + start + i, p, mask=inside)
        tl.store(m_ptr + start + i, m, mask=inside)
        tl.store(v_ptr + start + i, v, mask=inside)
        tl.store(g_ptr + start + i, tl.zeros((BLOCK,), tl.float32), mask=inside)
        if COPY:
            tl.store(copy_ptr + start + i, p.to(copy_ptr.dtype.element_ty), mask=inside)


@on_gpu("adamw_step")
def adamw_step(state: AdamState) -> None:
    """One step of every slot that `state.prepare` named, in place: master, m, v and compute change, grad becomes zero, norms are kept.

    Three launches whatever the number of sites; nothing waits for the GPU, so a CUDA graph can hold it.
    """
    slots, blocks = state.squares.shape
    align = math.gcd(*state.widths, 16)
    squares_kernel[(blocks, slots)](
        state.grad, state.blocks, state.rank_offsets, state.settings, state.squares, blocks,
        SETTINGS=_SETTINGS, ALIGN=align, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    clip_kernel[(slots,)](state.squares, state.settings, state.norms, state.factors, blocks, _NORM_EPS, SETTINGS=_SETTINGS, BLOCK=1024, num_warps=4)
    update_kernel[(len(state.tiles),)](
        state.master, state.grad, state.m, state.v, state.compute, state.tiles, state.settings, state.factors, 1.0 - BETAS[0], BETAS[1], 1.0 - BETAS[1], EPS,
        SETTINGS=_SETTINGS, ALIGN=align, COPY=state.compute is not state.master, BLOCK=_TILE, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
