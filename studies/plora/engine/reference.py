"""The reference `Operators`, for the CPU: one slot after another, and in attention one sequence after another.

    ops = SlotBySlot()                                         # path="padded" and others: adapters' products of that path

No operation but the adapters' own sees two slots, so with the path "looped" a slot's numbers are bit for bit those that it has alone. Packed ones would
not be: BLAS chooses its blocks by the number of rows, and the end of a vector loop has another exponential than its middle. It is not fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.lora.answers import answer_losses_ref, slot_sums_ref
from kernels.lora.attention import causal_attention_ref
from kernels.lora.paths import path_named
from kernels.lora.pointwise import add_norm_ref, swiglu_ref, turn_ref
from kernels.lora.segments import alone
from studies.plora.engine.operators import Bounds, Frame
from studies.plora.engine.products import by_path, linears

__all__ = ["SlotBySlot"]


class SlotBySlot:
    def __init__(self, path: str = "looped") -> None:
        self.products = by_path(path_named(path), linear=_linear, add_dgrad=_add_dgrad)

    def add_norm(self, h_MK, delta_MK, w_K, eps, bounds):
        if delta_MK is None:
            return h_MK, _by_slot(lambda h: add_norm_ref(h, None, w_K, eps=eps)[1], bounds, h_MK)
        h_MK = h_MK + delta_MK
        return h_MK, _by_slot(lambda h: add_norm_ref(h, None, w_K, eps=eps)[1], bounds, h_MK)

    def linears(self, x_MK, sites, frame):
        return linears(x_MK, sites, frame, self.products)

    def attention(self, q_MN, k_MN, v_MN, lengths_B, config, frame):
        shape = (frame.sequences, frame.tokens, -1, config.head_dim)
        q, k = turn_ref(q_MN, k_MN, frame.cos_TD, frame.sin_TD)
        return causal_attention_ref(q.view(shape), k.view(shape), v_MN.view(shape), lengths_B).reshape(len(q_MN), -1)

    def swiglu(self, gate_MF, up_MF, bounds):
        return _by_slot(swiglu_ref, bounds, gate_MF, up_MF)

    def answers(self, x_AK, head_VK, targets_A, bounds, *, learn=True, choices_C=None):
        found = [answer_losses_ref(alone(x_AK[b]), head_VK, targets_A[b], learn=learn, choices_C=choices_C) for b in bounds]
        return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True))

    def sums(self, values_A, frame, answers):
        return slot_sums_ref(values_A, frame.seg.offsets, tokens=frame.tokens, answers=answers)


def _by_slot(f: Callable[..., torch.Tensor], bounds: Bounds, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([f(*(alone(t[b]) for t in tensors)) for b in bounds])


def _linear(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, frame: Frame) -> torch.Tensor:
    return _by_slot(lambda x: F.linear(x, w_NK, bias_N), frame.bounds, x_MK)


def _add_dgrad(dx_MK: torch.Tensor | None, dy_MN: torch.Tensor, w_NK: torch.Tensor, frame: Frame) -> torch.Tensor:
    new = _by_slot(lambda dy: dy @ w_NK, frame.bounds, dy_MN)
    return new if dx_MK is None else dx_MK + new
