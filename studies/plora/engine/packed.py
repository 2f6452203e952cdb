"""The `Operators` of a GPU: every launch serves all slots.

    ops = AllAtOnce("triton", deterministic=True)

deterministic: the base's products by kernels.lora.fixed_gemm and attention by kernels.lora.attention, whose bits depend on a row (a sequence) alone,
and the adapters' by fixed tiles that begin with their segment. Otherwise cuBLAS multiplies, with tiles of its own choice, and from `SDPA_TOKENS` on
torch's attention runs (its backward adds by atomics); norms, RoPE, SwiGLU and losses are the same kernels in both. The other paths are the baselines
of the ladder: they exchange the adapters' products and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.lora.answers import answer_losses, slot_sums
from kernels.lora.attention import HEAD_DIMS, causal_attention
from kernels.lora.backward import grad_ax, grad_sb
from kernels.lora.fixed_gemm import fixed_dgrad, fixed_linear
from kernels.lora.forward import expand, shrink
from kernels.lora.paths import path_named
from kernels.lora.pointwise import add_norm, swiglu, turn
from studies.plora.engine.products import Products, by_path, linears

__all__ = ["SDPA_TOKENS", "AllAtOnce"]

SDPA_TOKENS = 512  # from here on torch's attention is preferred


class AllAtOnce:
    def __init__(self, path: str = "triton", *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        base = {"linear": _fixed_linear, "add_dgrad": _fixed_add_dgrad} if deterministic else {"linear": _linear, "add_dgrad": _add_dgrad}
        self.products = _kernels(deterministic, **base) if path == "triton" else by_path(path_named(path), **base)

    def add_norm(self, h_MK, delta_MK, w_K, eps, bounds):
        return add_norm(h_MK, delta_MK, w_K, eps=eps)

    def linears(self, x_MK, sites, frame):
        return linears(x_MK, sites, frame, self.products)

    def attention(self, q_MN, k_MN, v_MN, lengths_B, config, frame):
        shape = (frame.sequences, frame.tokens, -1, config.head_dim)
        q, k = turn(q_MN, k_MN, frame.cos_TD, frame.sin_TD)
        q, k, v = q.view(shape), k.view(shape), v_MN.view(shape)
        if self.deterministic or (frame.tokens < SDPA_TOKENS and config.head_dim in HEAD_DIMS):
            return causal_attention(q, k, v, lengths_B).flatten(2).flatten(0, 1)
        # padding stands at a sequence's end, where no token looks
        o_BHTD = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=config.heads != config.kv_heads)
        return o_BHTD.transpose(1, 2).reshape(len(q_MN), -1)

    def swiglu(self, gate_MF, up_MF, bounds):
        return swiglu(gate_MF, up_MF)

    def answers(self, x_AK, head_VK, targets_A, bounds, *, learn=True, choices_C=None):
        products = {"linear": fixed_linear, "dgrad": fixed_dgrad} if self.deterministic else {}
        return answer_losses(x_AK, head_VK, targets_A, learn=learn, choices_C=choices_C, **products)

    def sums(self, values_A, frame, answers):
        return slot_sums(values_A, frame.seg.offsets, tokens=frame.tokens, answers=answers)


def _kernels(deterministic: bool, **base) -> Products:
    """The packed kernels, backward in two launches a site."""

    def sb(dy, s, b, seg):
        return grad_sb(dy, s, b.compute, seg, b.grad, deterministic=deterministic)

    def ax(dx, ds, x, a, seg, dropout):
        grad_ax(dx, ds, x, a.compute, seg, a.grad, dropout=dropout, deterministic=deterministic)

    return Products(
        **base, shrink=lambda x, a, seg, dropout: shrink(x, a.compute, seg, dropout=dropout, deterministic=deterministic),
        expand=lambda y, s, b, seg: expand(y, s, b.compute, seg, deterministic=deterministic), grad_sb=sb, grad_ax=ax,
    )  # fmt: skip


def _linear(x_MK, w_NK, bias_N, frame):
    return F.linear(x_MK, w_NK, bias_N)


def _add_dgrad(dx_MK, dy_MN, w_NK, frame):
    return dy_MN @ w_NK if dx_MK is None else dx_MK.addmm_(dy_MN, w_NK)


def _fixed_linear(x_MK, w_NK, bias_N, frame):
    return fixed_linear(x_MK, w_NK, bias_N)


def _fixed_add_dgrad(dx_MK, dy_MN, w_NK, frame):
    return fixed_dgrad(dy_MN, w_NK) if dx_MK is None else dx_MK.add_(fixed_dgrad(dy_MN, w_NK))
