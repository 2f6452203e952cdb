"""What a decoder of many adapters computes with: on the CPU one slot after another in float32, on a GPU all slots at once.

    ops = operators_for(device, path="triton", deterministic=True)
    x_MK = ops.norm(h_MK, w_K, eps, frame)
    y_MN = ops.linear(x_MK, frozen, (a, b), frame, site=3)      # base and adapters; gradients of A and B are added to their buffers

Legend: M rows of all slots (sequences x tokens), B sequences, T tokens, H query heads, G key heads, D head_dim. A `Frame` says how rows are shared
out. On the CPU no operation sees two slots (attention: two sequences), so a slot's numbers are bit for bit those that it has alone: BLAS chooses
its blocks by the number of rows, and vector loops end with another exponential. That is the reference; it is not fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.exact.rope import rope_tables
from kernels.lora.attention import causal_attention_ref
from kernels.lora.paths import PATHS, Path
from kernels.lora.segments import Segments
from studies.models.config import LlamaConfig
from studies.plora.engine.base import Base, Frozen
from studies.plora.engine.sites import Factor

__all__ = ["Frame", "Operators", "SlotBySlot", "frame_of", "operators_for"]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """How the rows of one pass are shared out. seg: by slot; bounds: the same on the host. cos_TD, sin_TD: float32, D = head_dim / 2.

    streams: p_S, seed_S and step_S of kernels.lora.dropout.Dropout, or None where no slot drops anything.
    """

    seg: Segments
    bounds: tuple[slice, ...]
    tokens: int
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def sequences(self) -> int:
        return self.bounds[-1].stop // self.tokens

    def answer_bounds(self, answers: int) -> tuple[slice, ...]:
        """Of rows that hold `answers` places a sequence."""
        return tuple(slice(b.start // self.tokens * answers, b.stop // self.tokens * answers) for b in self.bounds)


def frame_of(config: LlamaConfig, seg: Segments, tokens: int, streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> Frame:
    cos, sin = (t.to(seg.offsets.device) for t in rope_tables(tokens=tokens, head_dim=config.head_dim, base=config.rope_base))
    return Frame(seg=seg, bounds=tuple(rows for rows, _ in seg.bounds()), tokens=tokens, cos_TD=cos, sin_TD=sin, streams=streams)


class Operators(Protocol):
    def norm(self, h_MK: torch.Tensor, w_K: torch.Tensor, eps: float, bounds: tuple[slice, ...]) -> torch.Tensor:
        """RMSNorm of every row, in h's type. No gradient of w."""

    def linear(self, x_MK: torch.Tensor, frozen: Frozen, factors: tuple[Factor, Factor], frame: Frame, site: int) -> torch.Tensor:
        """y = x w^T + bias + scale (x A^T) B^T of the row's own adapter."""

    def attention(self, q_MN: torch.Tensor, k_MN: torch.Tensor, v_MN: torch.Tensor, lengths_B: torch.Tensor, config: LlamaConfig, frame: Frame) -> torch.Tensor:
        """RoPE and causal attention of every sequence within its own tokens -> [M, H D]."""

    def swiglu(self, gate_MF: torch.Tensor, up_MF: torch.Tensor, bounds: tuple[slice, ...]) -> torch.Tensor:
        """silu(gate) * up."""

    def head(self, x_AK: torch.Tensor, head_VK: torch.Tensor, targets_A: torch.Tensor, bounds: tuple[slice, ...], *, learn: bool, choices_C: torch.Tensor | None) -> Answers:
        """Losses of answer tokens, and what is asked beside."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """loss_A: float32, -log p of each target, 0 where there is none (-1). dx_AK: the gradient of their sum, or None. chosen_A: int64, which of the choices
    has the highest logit, or None."""  # fmt: skip

    loss_A: torch.Tensor
    dx_AK: torch.Tensor | None
    chosen_A: torch.Tensor | None


def operators_for(base: Base, *, path: str, deterministic: bool) -> Operators:
    """Raises ValueError for a path that there is not, or that cannot be deterministic on a GPU."""
    if path not in (*PATHS, "triton"):
        raise ValueError(f"a path is one of {sorted({*PATHS, 'triton'})}, got {path!r}; choose one")
    return SlotBySlot("looped" if path == "triton" else path)


class SlotBySlot:
    """The reference: `Operators` on any device, one slot after another."""

    def __init__(self, path: str = "looped") -> None:
        self.path = PATHS[path]

    def norm(self, h_MK, w_K, eps, bounds):
        def one(h):
            wide = h.float()
            return (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * w_K).to(h.dtype)

        return _by_slot(one, bounds, h_MK)

    def linear(self, x_MK, frozen, factors, frame, site):
        return PackedLinear.apply(x_MK, frozen, *factors, frame, site, self.path)

    def attention(self, q_MN, k_MN, v_MN, lengths_B, config, frame):
        q, k, v = (x.view(frame.sequences, frame.tokens, -1, config.head_dim) for x in (q_MN, k_MN, v_MN))
        q, k = (turned(x, frame.cos_TD, frame.sin_TD) for x in (q, k))
        return causal_attention_ref(q, k, v, lengths_B).reshape(len(q_MN), -1)

    def swiglu(self, gate_MF, up_MF, bounds):
        return _by_slot(lambda gate, up: F.silu(gate) * up, bounds, gate_MF, up_MF)

    def head(self, x_AK, head_VK, targets_A, bounds, *, learn, choices_C):
        found = [_head(x_AK[b], head_VK, targets_A[b], learn=learn, choices_C=choices_C) for b in bounds]
        joined = (None if part[0] is None else torch.cat(part) for part in zip(*found, strict=True))
        return Answers(**dict(zip(("loss_A", "dx_AK", "chosen_A"), joined, strict=True)))

    def sums(self, values_A: torch.Tensor, bounds: tuple[slice, ...]) -> torch.Tensor:
        """float32 [S]: each slot's own, in an order that is its own."""
        return torch.stack([values_A[b].sum() for b in bounds])


def _by_slot(f: Callable[..., torch.Tensor], bounds: tuple[slice, ...], *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([f(*(t[b] for t in tensors)) for b in bounds])


def turned(x_BTHD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """RoPE in half-split order, in float32, then x's type."""
    low, high = x_BTHD.float().chunk(2, dim=3)
    cos, sin = cos_TD[None, :, None], sin_TD[None, :, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=3).to(x_BTHD.dtype)


def _head(x_AK, head_VK, targets_A, *, learn, choices_C):
    logits_AV = (x_AK @ head_VK.T).float()
    there, at = targets_A >= 0, targets_A.clamp(min=0)[:, None]
    loss = (logits_AV.logsumexp(1) - logits_AV.gather(1, at)[:, 0]).masked_fill(~there, 0.0)
    chosen = None if choices_C is None else logits_AV[:, choices_C].argmax(1)
    if not learn:
        return loss, None, chosen
    gradient = logits_AV.softmax(1).scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32)).masked_fill(~there[:, None], 0.0)
    return loss, gradient.to(x_AK.dtype) @ head_VK, chosen


class PackedLinear(torch.autograd.Function):
    """y of base and adapters; saves x and s alone. Gradients of A and B are added to their buffers, backward gives dx."""

    @staticmethod
    def forward(ctx, x, frozen: Frozen, a: Factor, b: Factor, frame: Frame, site: int, path: Path):
        from kernels.lora.dropout import Dropout

        dropout = None if frame.streams is None else Dropout(p_S=frame.streams[0], seed_S=frame.streams[1], step_S=frame.streams[2], site=site + 1)
        y = _by_slot(lambda rows: F.linear(rows, frozen.w_NK, frozen.bias_N), frame.bounds, x)
        s = path.shrink(x, a.compute, frame.seg, dropout=dropout)
        path.expand(y, s, b.compute, frame.seg)
        ctx.save_for_backward(x, s)
        ctx.rest = frozen, a, b, frame, dropout, path
        return y

    @staticmethod
    def backward(ctx, dy):
        (x, s), (frozen, a, b, frame, dropout, path) = ctx.saved_tensors, ctx.rest
        dy = dy.contiguous()
        ds = path.grad_s(dy, b.compute, frame.seg)
        path.grad_b(s, dy, frame.seg, b.grad)
        path.grad_a(ds, x, frame.seg, a.grad, dropout=dropout)
        dx = _by_slot(lambda rows: rows @ frozen.w_NK, frame.bounds, dy)
        path.grad_x(dx, ds, a.compute, frame.seg, dropout=dropout)
        return dx, None, None, None, None, None, None
