"""A Llama or Qwen2 decoder over the rows of all slots, every linear with its slot's adapter.

    h_MK = hidden(base, factors, ops, ids_BT, lengths_B, frame)             # residual stream after the last layer
    answers = answer_rows(h_MK, places_BA)                                # the rows that predict an answer token

Only answers get logits: the last norm and the head run on those rows. There is no cache: each pass reads whole sequences.
"""

from __future__ import annotations

import torch

from studies.plora.adapter import MODULES
from studies.plora.engine.base import Base
from studies.plora.engine.operators import Frame, Operators
from studies.plora.engine.sites import Factor

__all__ = ["answer_rows", "hidden"]

Q, K, V, O, GATE, UP, DOWN = MODULES


def hidden(
    base: Base, factors: tuple[tuple[Factor, Factor], ...], ops: Operators, ids_BT: torch.Tensor, lengths_B: torch.Tensor, frame: Frame
) -> torch.Tensor:
    """h_MK. With gradients enabled, its backward adds to the gradients of all factors."""
    config, bounds, eps = base.config, frame.bounds, base.config.rms_eps
    h = base.embed_VK[ids_BT.flatten()].requires_grad_(torch.is_grad_enabled())  # a leaf: nothing below it learns
    for i, layer in enumerate(base.layers):
        at = {module: i * len(MODULES) + m for m, module in enumerate(MODULES)}

        def linear(x: torch.Tensor, module: str, layer=layer, at=at) -> torch.Tensor:
            return ops.linear(x, layer.linears[module], factors[at[module]], frame, at[module])

        x = ops.norm(h, layer.input_norm_K, eps, bounds)
        o = ops.attention(linear(x, Q), linear(x, K), linear(x, V), lengths_B, config, frame)
        h = h + linear(o, O)
        x = ops.norm(h, layer.post_norm_K, eps, bounds)
        h = h + linear(ops.swiglu(linear(x, GATE), linear(x, UP), bounds), DOWN)
    return h


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
