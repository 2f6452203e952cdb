"""The tasks of `suite warm plora`: each launches what a cell launches, on one layer and on operands that nobody looks at.

    pack("cuda", model="3b", tokens=128, answer_tokens=32, slots=[[16, 1]] * 32, path="triton")

Nothing is captured, timed or kept. Kernels are found in Triton's cache by the cells, because types, constants, options and the divisibility of sizes are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from suite.measure import Context

LAYERS = 1


def pack(device: str, *, model: str, tokens: int, answer_tokens: int, slots: Sequence[Sequence[int]], path: str) -> None:
    """Cells of studies.plora.measures.throughput, saturation and step_times: one step of every adapter."""
    from studies.plora.engine.base import Base
    from studies.plora.engine.shapes import SHAPES
    from studies.plora.measures.subjects import subject_with

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    base = Base.random(replace(SHAPES[model], layers=LAYERS), seed=0, device=device, dtype=dtype)
    subject = subject_with(base, tokens=tokens, answer_tokens=answer_tokens, seed=0)
    subject.pack(PackShape(tokens=tokens, slots=tuple(SlotShape(rank=r, rows=n) for r, n in slots)), path=path, graphed=False).advance(1)


def kernels(device: str, *, which: str, d: int, tokens: int, slots: int, rank: int, paths: Sequence[str]) -> None:
    """measures.kernels:kernels: every path once on one set."""
    from studies.plora.measures.kernels import LOOPED, OURS, operands_of, program

    (operands,) = operands_of(Context(device=device), which, d, tokens, slots, rank, sets=1)
    for name in dict.fromkeys((OURS, LOOPED, *paths)):
        program(name, which)(operands)


def learning(device: str, *, model: str, task: Mapping[str, Any], tokens: int, slots: Sequence[Sequence[int]]) -> None:
    """Cells that train on a set: one step of a pack and one evaluation."""
    from studies.plora.engine.pack import EnginePack
    from studies.plora.measures.live import base_of, task_of

    whole = base_of(Context(device=device), model)
    base = replace(whole, config=replace(whole.config, layers=LAYERS), layers=whole.layers[:LAYERS])
    shape = PackShape(tokens=tokens, slots=tuple(SlotShape(rank=r, rows=n) for r, n in slots))
    made = EnginePack(base, shape, task_of(task, tokens), graphed=False)
    for i, slot in enumerate(shape.slots):
        made.admit(i, AdapterConfig(rank=slot.rank, alpha=2.0 * slot.rank, learning_rate=1e-4, batch=slot.rows, budget_tokens=10**9, seed=i))
    made.advance(1)
    made.evaluate()
