"""A Llama or Qwen2 decoder over the rows of all slots, every linear with its slot's adapter.

    h_MK = hidden(base, factors, ops, ids_BT, lengths_B, frame)             # residual stream after the last layer
    answers = answer_rows(h_MK, places_BA)                                # the rows that predict an answer token

Only answers get logits: the last norm and the head run on those rows. There is no cache: each pass reads whole sequences.
"""

from __future__ import annotations

import torch

from kernels.lora.autograd import Factor
from studies.plora.adapter import MODULES
from studies.plora.engine.base import Base, Layer
from studies.plora.engine.operators import Adapted, Frame, Operators

__all__ = ["answer_rows", "hidden"]

QKV, O, GATE_UP, DOWN = MODULES[:3], MODULES[3:4], MODULES[4:6], MODULES[6:]  # linears of one row read the same input


def hidden(
    base: Base, factors: tuple[tuple[Factor, Factor], ...], ops: Operators, ids_BT: torch.Tensor, lengths_B: torch.Tensor, frame: Frame
) -> torch.Tensor:
    """h_MK. With gradients enabled, its backward adds to the gradients of all factors."""
    config, bounds, eps = base.config, frame.bounds, base.config.rms_eps
    h, delta = base.embed_VK[ids_BT.flatten()], None
    for i, layer in enumerate(base.layers):

        def linears(x: torch.Tensor, modules: tuple[str, ...], i: int = i, layer: Layer = layer) -> tuple[torch.Tensor, ...]:
            numbers = [i * len(MODULES) + MODULES.index(m) for m in modules]
            sites = [Adapted(frozen=layer.linears[m], a=factors[n][0], b=factors[n][1], site=n) for m, n in zip(modules, numbers, strict=True)]
            return ops.linears(x, sites, frame)

        h, x = ops.add_norm(h, delta, layer.input_norm_K, eps, bounds)
        (delta,) = linears(ops.attention(*linears(x, QKV), lengths_B, config, frame), O)
        h, x = ops.add_norm(h, delta, layer.post_norm_K, eps, bounds)
        (delta,) = linears(ops.swiglu(*linears(x, GATE_UP), bounds), DOWN)
    return h + delta


def answer_rows(h_MK: torch.Tensor, places_BA: torch.Tensor) -> torch.Tensor:
    """[B A, K]: the rows of h at these positions of each sequence; zeros where a position is -1."""
    sequences = len(places_BA)
    starts = torch.arange(sequences, device=h_MK.device)[:, None] * (len(h_MK) // sequences)
    return _Rows.apply(h_MK, torch.where(places_BA >= 0, places_BA + starts, len(h_MK)).flatten())


class _Rows(torch.autograd.Function):
    """Rows by index, len(h) standing for none. An index has one owner, so backward writes and never adds: there is no order of sums."""

    @staticmethod
    def forward(ctx, h_MK, index_A):
        ctx.save_for_backward(index_A)
        ctx.rows = len(h_MK)
        return torch.where((index_A < len(h_MK))[:, None], h_MK[index_A.clamp(max=len(h_MK) - 1)], 0.0)

    @staticmethod
    def backward(ctx, dx_AK):
        (index_A,) = ctx.saved_tensors
        dh = dx_AK.new_zeros(ctx.rows + 1, dx_AK.shape[1])
        dh[index_A] = dx_AK
        return dh[: ctx.rows], None
