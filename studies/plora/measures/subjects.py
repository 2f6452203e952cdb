"""What timing cells run: bases of a model's shape with random weights, rows of known lengths, and packs whose every slot is taken.

    subject = subject_of(ctx, "0.5b", tokens=128, answer_tokens=32)
    pack = subject.pack(uniform(128, slots=32, rank=16), graphed=True)
    subject.step(pack)()                            # STEPS micro-steps, at the end of each every adapter's batch is full

Token ids are Philox numbers, so they are the same on every machine; budgets are endless. A step of `step` is what a user's training runs: forward,
backward, the optimizer's step of every adapter, and what the host plans for each; STEPS of them stand in one call, as a training asks for many at once. Weights are random because a time does not depend on them; nothing is learnt here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact.philox import philox_integers
from studies.models.config import LlamaConfig
from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.data.task import Examples, Task
from studies.plora.engine.base import Base
from studies.plora.engine.pack import EnginePack
from studies.plora.engine.shapes import SHAPES
from studies.plora.measures.flops import step_flops
from suite.measure import Context
from suite.timing import ContestResult

__all__ = ["ROWS", "STEPS", "Subject", "endless", "rows_of", "subject_of", "subject_with", "uniform"]

ROWS = 64  # of the training part; packs go round them
STEPS = 4  # micro-steps of a timed call
ENDLESS = 2**60  # tokens of a budget that no timing reaches
TIMED_RATE = 2e-5  # hours of steps leave the numbers ordinary


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A base on its device and what its packs train on; rows have `answer_tokens` at their end."""

    base: Base
    config: LlamaConfig
    task: Task
    tokens: int
    answer_tokens: int

    def pack(self, shape: PackShape, *, path: str = "triton", graphed: bool = True, memory: int | None = None) -> EnginePack:
        """Every slot is taken by an adapter of its own rank whose batch is the slot's rows. `memory`: as EnginePack's, bytes that it may take."""
        pack = EnginePack(self.base, shape, self.task, path=path, graphed=graphed, memory=memory)
        for slot, size in enumerate(shape.slots):
            pack.admit(slot, endless(size, seed=slot))
        return pack

    def step(self, pack: EnginePack) -> Callable[[], float]:
        return lambda: pack.advance(STEPS)

    def step_s(self, result: ContestResult, name: str) -> float:
        """Seconds of one micro-step of a contest's entry."""
        return result.median_s(name) / STEPS

    def flops(self, shape: PackShape) -> float:
        return step_flops(self.config, shape, answer_tokens=self.answer_tokens)


def endless(slot: SlotShape, seed: int) -> AdapterConfig:
    return AdapterConfig(rank=slot.rank, alpha=2.0 * slot.rank, learning_rate=TIMED_RATE, batch=slot.rows, budget_tokens=ENDLESS, seed=seed, schedule="constant", warmup=0.0)


def uniform(tokens: int, *, slots: int, rank: int, rows: int = 1) -> PackShape:
    return PackShape(tokens=tokens, slots=(SlotShape(rank=rank, rows=rows),) * slots)


def rows_of(lengths: Sequence[int], answers: Sequence[int], vocabulary: int, seed: int) -> Examples:
    """Rows of these lengths, the last `answers` tokens of each its answer."""
    ids = (philox_integers(int(sum(lengths)), seed, 0) % np.uint32(vocabulary)).astype(np.int32)
    cut = np.cumsum(lengths)[:-1]
    return Examples(ids=tuple(np.split(ids, cut)), answer_from=(np.asarray(lengths) - np.asarray(answers)).astype(np.int32))


def subject_of(ctx: Context, model: str, *, tokens: int, answer_tokens: int) -> Subject:
    """Raises ValueError for a model that has no shape here."""
    if model not in SHAPES:
        raise ValueError(f"a model is one of {sorted(SHAPES)}, got {model!r}; its shape stands in studies.plora.engine.shapes")
    dtype = torch.bfloat16 if ctx.device.startswith("cuda") else torch.float32
    base = Base.random(SHAPES[model], seed=ctx.seed, device=ctx.device, dtype=dtype)
    return subject_with(base, tokens=tokens, answer_tokens=answer_tokens, seed=ctx.seed)


def subject_with(base: Base, *, tokens: int, answer_tokens: int, seed: int) -> Subject:
    rows = rows_of([tokens] * ROWS, [answer_tokens] * ROWS, base.config.vocabulary, seed=seed)
    few = rows.take(np.arange(2))
    task = Task(train=rows, validation=few, test=few, name=f"rows of {tokens}", citation="Made by this project")
    return Subject(base=base, config=base.config, task=task, tokens=tokens, answer_tokens=answer_tokens)
