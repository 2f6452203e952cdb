"""What the determinism study computes: named operators with fixed operands, the same on every machine.

    ops = load_operators(ctx.input_arrays("capture"))
    ops["layers.14.mlp.down_proj"].x_MK.shape          # (64, 1536)

Two sources: linear layers of SmolLM2 with real weights and activations captured from prompts, and
ragged shapes from the integer Philox, which meet the edges of the canonical order (K not a multiple of
8, a short last chunk, one row). Legend: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact.philox import philox_uniform

MAX_ROWS = 64
# (M, N, K, activation dtype, weight dtype). K: odd, below a span, one chunk, a short last chunk, many chunks.
RAGGED = (
    (7, 33, 13, torch.bfloat16, torch.bfloat16),
    (16, 65, 100, torch.bfloat16, torch.bfloat16),
    (1, 5, 250, torch.bfloat16, torch.bfloat16),
    (16, 129, 2056, torch.bfloat16, torch.bfloat16),
    (64, 40, 4104, torch.bfloat16, torch.bfloat16),
    (5, 96, 1000, torch.float16, torch.float16),
    (6, 48, 300, torch.float32, torch.bfloat16),
)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """y_MN = x_MK w_NK^T for one layer or ragged shape."""

    name: str
    x_MK: torch.Tensor
    w_NK: torch.Tensor

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("layers.")


def to_bits(x: torch.Tensor) -> np.ndarray:
    """bfloat16 as uint16: numpy has no bfloat16 and bundles hold no pickle."""
    return x.contiguous().view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)


def ragged_operators(seed: int = 0) -> list[Operator]:
    """Operands from the integer Philox: equal on every machine, unlike torch.rand across GPU models."""
    out = []
    for i, (m, n, k, x_dtype, w_dtype) in enumerate(RAGGED):
        x_MK = philox_uniform((m, k), 2 * i + 1000 * seed, x_dtype)
        w_NK = philox_uniform((n, k), 2 * i + 1 + 1000 * seed, w_dtype)
        out.append(Operator(name=f"ragged.{m}x{n}x{k}.{str(x_dtype).removeprefix('torch.')}", x_MK=x_MK, w_NK=w_NK))
    return out


def load_operators(captured: Mapping[str, np.ndarray], layers: tuple[str, ...] = ()) -> dict[str, Operator]:
    """Operators by name, in a fixed order: captured layers (arrays `x.<name>`, `w.<name>`), then ragged shapes."""
    names = sorted(n.removeprefix("w.") for n in captured if n.startswith("w."))
    ops = [Operator(name=n, x_MK=from_bits(captured[f"x.{n}"]), w_NK=from_bits(captured[f"w.{n}"])) for n in names if not layers or n in layers]
    return {op.name: op for op in [*ops, *ragged_operators()]}
