"""What a decoder of many adapters computes with, as one contract; and how the rows of a pass are shared out.

    ops = operators_for(base, path="triton", deterministic=True)
    h_MK, x_MK = ops.add_norm(h_MK, delta_MK, w_K, eps, frame.bounds)
    q_MN, k_MN, v_MN = ops.linears(x_MK, (q, k, v), frame)                    # base and adapters; gradients of A and B go to their buffers

Legend: M rows of all slots (sequences x tokens), B sequences, T tokens, A answer places, H query heads, D head_dim. Implementations: `reference.SlotBySlot`
(CPU: no operation sees two slots) and `packed.AllAtOnce` (GPU: all slots in every launch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.exact.rope import rope_tables
from kernels.lora.autograd import Factor
from kernels.lora.paths import PATHS
from kernels.lora.segments import Segments
from studies.models.config import LlamaConfig
from studies.plora.engine.base import Base, Frozen

__all__ = ["Adapted", "Frame", "Operators", "operators_for"]

Bounds = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A linear of the base with its adapters. site: its number, to which dropout is keyed."""

    frozen: Frozen
    a: Factor
    b: Factor
    site: int


@dataclass(frozen=True, kw_only=True)
class Frame:
    """How the rows of one pass are shared out. seg: by slot; bounds: the same on the host. cos_TD, sin_TD: float32, D = head_dim / 2.

    streams: p_S, seed_S and step_S of kernels.lora.dropout.Dropout, or None where no slot drops anything.
    """

    seg: Segments
    bounds: Bounds
    tokens: int
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(config: LlamaConfig, seg: Segments, tokens: int, streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> Frame:
        cos, sin = (t.to(seg.offsets.device) for t in rope_tables(tokens=tokens, head_dim=config.head_dim, base=config.rope_base))
        return Frame(seg=seg, bounds=tuple(rows for rows, _ in seg.bounds()), tokens=tokens, cos_TD=cos, sin_TD=sin, streams=streams)

    @property
    def sequences(self) -> int:
        return self.bounds[-1].stop // self.tokens

    def answer_bounds(self, answers: int) -> Bounds:
        """Of rows that hold `answers` places a sequence."""
        return tuple(slice(b.start // self.tokens * answers, b.stop // self.tokens * answers) for b in self.bounds)


class Operators(Protocol):
    def add_norm(self, h_MK: torch.Tensor, delta_MK: torch.Tensor | None, w_K: torch.Tensor, eps: float, bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
        """(h + delta, RMSNorm of it), rows shared out by `bounds`."""

    def linears(self, x_MK: torch.Tensor, sites: Sequence[Adapted], frame: Frame) -> tuple[torch.Tensor, ...]:
        """y = x w^T + bias + scale (x A^T) B^T of the row's own adapter, for each of the sites that read x."""

    def attention(self, q_MN: torch.Tensor, k_MN: torch.Tensor, v_MN: torch.Tensor, lengths_B: torch.Tensor, config: LlamaConfig, frame: Frame) -> torch.Tensor:
        """RoPE and causal attention of every sequence within its own tokens -> [M, H D]."""

    def swiglu(self, gate_MF: torch.Tensor, up_MF: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """silu(gate) * up."""

    def answers(
        self, x_AK: torch.Tensor, head_VK: torch.Tensor, targets_A: torch.Tensor, bounds: Bounds, *, learn: bool = True, choices_C: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """kernels.lora.answers.answer_losses: (loss_A, the gradient of their sum, the choices that win)."""

    def sums(self, values_A: torch.Tensor, frame: Frame, answers: int) -> torch.Tensor:
        """float32 [S]: each slot's own."""


def operators_for(base: Base, *, path: str, deterministic: bool) -> Operators:
    """Raises ValueError for a path that there is not, or whose bits on a GPU depend on neighbours where they may not."""
    if path not in (*PATHS, "triton"):
        raise ValueError(f"a path is one of {sorted({*PATHS, 'triton'})}, got {path!r}; choose one")
    if base.device.type != "cuda":
        from studies.plora.engine.reference import SlotBySlot

        return SlotBySlot("looped" if path == "triton" else path)
    if deterministic and path != "triton":
        raise ValueError(f"bits that no neighbour changes come from path 'triton' on a GPU, got {path=}; choose it or deterministic=False")
    from studies.plora.engine.packed import AllAtOnce

    return AllAtOnce(path, deterministic=deterministic)
