"""Floating-point operations of a training step on a frozen base, and the peak they are held against.

    work = step_flops(config, PackShape(tokens=128, slots=(SlotShape(rank=16),) * 32), answer_tokens=32)
    mfu = work / seconds / peak_flops("NVIDIA H200")

Model FLOPs: what the arithmetic asks for, whatever an implementation does. The base has a forward pass and the gradient of its input (4 a parameter and
token, its weights are frozen), an adapter has three products each way (6 a parameter and token), attention is causal (2 T d forward and 4 T d backward
a token, layer and model width d = heads x head size), and the head is asked at answer positions alone. Padding within `tokens` is counted by the caller.
It imports no torch.
"""

from __future__ import annotations

import re

from studies.models.config import LlamaConfig
from studies.plora.adapter import PackShape
from studies.plora.planning.memory import rank_row_elements, site_sizes

__all__ = ["BASE_FLOPS", "PEAKS", "linear_elements", "peak_flops", "step_flops"]

BASE_FLOPS, ADAPTER_FLOPS, ATTENTION_FLOPS = 4, 6, 6
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 tensor cores, from the vendor's data sheets (SXM)


def linear_elements(config: LlamaConfig) -> int:
    """P: parameters of the linears of all layers."""
    return config.layers * sum(k * n for k, n in site_sizes(config).values())


def step_flops(config: LlamaConfig, shape: PackShape, *, answer_tokens: int) -> float:
    """FLOPs of one micro-step of a pack whose rows are all `tokens` long, `answer_tokens` of them answers. The optimizer's are left out."""
    rows = sum(s.rows for s in shape.slots)
    tokens = rows * shape.tokens
    base = BASE_FLOPS * tokens * linear_elements(config)
    adapters = ADAPTER_FLOPS * shape.tokens * rank_row_elements(config) * sum(s.rows * s.rank for s in shape.slots)
    attention = ATTENTION_FLOPS * tokens * shape.tokens * config.heads * config.head_dim * config.layers
    return float(base + adapters + attention + BASE_FLOPS * rows * answer_tokens * config.vocabulary * config.hidden)


def peak_flops(device: str) -> float | None:
    """FLOP/s of a device model's dense bf16 tensor cores; None for one that is not in PEAKS."""
    return next((peak for name, peak in PEAKS.items() if name in re.split(r"[^A-Za-z0-9]+", device)), None)
