"""What a pack needs of a GPU's memory, counted from its shape before anything is allocated.

    need = predict(QWEN25_7B, PackShape(tokens=512, slots=(SlotShape(rank=64, rows=4),) * 8), answer_tokens=1)
    need.total, need.base, need.activations
    largest_k(QWEN25_7B, SlotShape(rank=64), tokens=512, limit_bytes=24 * GIB, answer_tokens=1)

Counted are the frozen base, the adapters' states, what every token leaves for the backward pass, the logits of answers, and a workspace. The
count is exact for the first two. The others depend on what an engine keeps: `Calibration` holds the two numbers that measured peaks correct,
`calibrate` finds them. Compared with torch's `max_memory_allocated`: the CUDA context (about half a GiB) is not in it, and a limit should leave
room for it. Evaluation needs less than training and is not counted. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from studies.models.config import LlamaConfig
from studies.plora.adapter import PackShape, SlotShape

__all__ = ["AS_COUNTED", "GIB", "Calibration", "Memory", "calibrate", "largest_k", "predict", "rank_row_elements", "site_sizes"]

GIB = 2**30
FP32 = 4  # bytes of a master weight, of a gradient and of each moment of AdamW
FEWEST_POINTS = 3


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """activations: kept and transient bytes a token over the counted ones. workspace_bytes: what no shape changes (cuBLAS has 32 MiB on Hopper)."""

    activations: float = 1.0
    workspace_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not (0 < self.activations < math.inf and self.workspace_bytes >= 0):
            raise ValueError(f"a calibration has activations > 0 and workspace_bytes >= 0, got {self.activations=} {self.workspace_bytes=}; measure again")


AS_COUNTED = Calibration()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes at the peak of a training step."""

    base: int  # frozen weights
    adapters: int  # master, gradient, both moments, compute copy
    activations: int  # kept for the backward pass
    logits: int  # of answer positions: in the compute type, their fp32 probabilities, their gradient
    workspace: int  # transients of the backward pass of one layer, and the libraries' own

    @property
    def total(self) -> int:
        return self.base + self.adapters + self.activations + self.logits + self.workspace

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.__dict__.items())
        return f"{self.total / GIB:.2f} GiB ({parts})"


def site_sizes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """(inputs K, outputs N) of the linears of one layer that carry an adapter, by the names of studies.plora.adapter.MODULES."""
    d, f, (q, k, v) = config.hidden, config.intermediate, config.qkv_rows
    return {"q_proj": (d, q), "k_proj": (d, k), "v_proj": (d, v), "o_proj": (q, d), "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def rank_row_elements(config: LlamaConfig) -> int:
    """Parameters of an adapter of rank 1 on every site: those of rank r are r times as many."""
    return config.layers * sum(k + n for k, n in site_sizes(config).values())


def predict(
    config: LlamaConfig, shape: PackShape, *, answer_tokens: int | None = None, element_bytes: int = 2, calibration: Calibration = AS_COUNTED
) -> Memory:  # fmt: skip
    """Bytes of training `shape` on `config`.

    answer_tokens: positions of a sequence that get logits (1 for classification); None for all of them.
    element_bytes: of the compute type: 2 for bf16, 4 for fp32. Raises ValueError for more answers than tokens or another size.
    """
    answers = shape.tokens if answer_tokens is None else answer_tokens
    if not 0 <= answers <= shape.tokens:
        raise ValueError(f"a sequence has at most as many answer tokens as tokens, got {answer_tokens=} {shape.tokens=}; lower it")
    if element_bytes not in (2, 4):
        raise ValueError(f"an element of the compute type has 2 or 4 bytes, got {element_bytes=}; give 2 for bf16")
    sequences = sum(s.rows for s in shape.slots)
    rows, widest = sequences * shape.tokens, max(s.rank for s in shape.slots)
    per_adapter_element = 4 * FP32 + element_bytes
    return Memory(
        base=_base_elements(config) * element_bytes,
        adapters=sum(s.rank for s in shape.slots) * rank_row_elements(config) * per_adapter_element,
        activations=round(calibration.activations * rows * config.layers * (_kept_elements(config, widest) * element_bytes + config.heads * FP32)),
        logits=sequences * answers * config.vocabulary * (2 * element_bytes + FP32),
        workspace=round(calibration.activations * rows * _transient_elements(config) * element_bytes) + calibration.workspace_bytes,
    )


def largest_k(
    config: LlamaConfig, slot: SlotShape, *, tokens: int, limit_bytes: int, answer_tokens: int | None = None, element_bytes: int = 2,
    calibration: Calibration = AS_COUNTED,
) -> int:  # fmt: skip
    """The most slots of this shape that fit `limit_bytes`; 0 where not one does."""

    def fits(k: int) -> bool:
        shape = PackShape(tokens=tokens, slots=(slot,) * k)
        return predict(config, shape, answer_tokens=answer_tokens, element_bytes=element_bytes, calibration=calibration).total <= limit_bytes

    if not fits(1):
        return 0
    fitting, too_many = 1, 2
    while fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def calibrate(
    config: LlamaConfig, measured: Sequence[tuple[PackShape, int]], *, answer_tokens: int | None = None, element_bytes: int = 2
) -> Calibration:
    """The calibration that fits peaks (shape, bytes): relative least squares, neither number negative. Raises ValueError for fewer than 3 peaks,
    or shapes that do not differ in rows.
    """
    from scipy.optimize import nnls

    if len(measured) < FEWEST_POINTS or len({sum(s.rows for s in shape.slots) * shape.tokens for shape, _ in measured}) < 2:
        raise ValueError(f"a calibration takes at least {FEWEST_POINTS} peaks of packs with different rows, got {len(measured)}; measure more shapes")
    lines, goals = [], []
    for shape, peak in measured:
        counted = predict(config, shape, answer_tokens=answer_tokens, element_bytes=element_bytes, calibration=Calibration(workspace_bytes=0))
        lines.append(np.array([counted.activations + counted.workspace, 1.0]) / peak)
        goals.append((peak - counted.base - counted.adapters - counted.logits) / peak)
    scale = np.abs(np.array(lines)).max(axis=0)  # columns of one size: bytes a token beside single bytes
    (activations, fixed), _ = nnls(np.array(lines) / scale, np.array(goals))
    return Calibration(activations=float(activations / scale[0]), workspace_bytes=round(float(fixed / scale[1])))


def _base_elements(config: LlamaConfig) -> int:
    linears = sum(k * n for k, n in site_sizes(config).values()) + (sum(config.qkv_rows) if config.qkv_bias else 0)
    embedding = config.vocabulary * config.hidden
    return config.layers * (linears + 2 * config.hidden) + config.hidden + embedding * (1 if config.tied_head else 2)


def _kept_elements(config: LlamaConfig, widest: int) -> int:
    """Of a token and layer: both residuals and their norms, q, k, v and the attention's output, gate, up and their product, s of every site. The
    attention keeps one fp32 number a head beside.
    """
    q, k, v = config.qkv_rows
    return 4 * config.hidden + 2 * q + k + v + 3 * config.intermediate + len(site_sizes(config)) * widest


def _transient_elements(config: LlamaConfig) -> int:
    """Of a token: the gradients that stand side by side in a layer's feed-forward part (of its three inner values, the norm and the residual)."""
    return 3 * config.intermediate + 3 * config.hidden
