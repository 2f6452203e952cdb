"""Packs that several test files train: mixed slots and adapters, and the question whether two adapters are the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.data.task import Task
from studies.plora.engine import Base, EnginePack

TOKENS = 24


def adapter(**changes) -> AdapterConfig:
    return AdapterConfig(**{"rank": 8, "alpha": 16.0, "learning_rate": 1e-2, "batch": 4, "budget_tokens": 6000, "seed": 1, **changes})


# mixed ranks (some below their capacity), batches above, at and beside the slot's rows, own seeds, decay, schedule, clip, dropout
MIX = {
    0: adapter(rank=5, weight_decay=0.1),
    1: adapter(rank=16, batch=2, seed=2**64 - 2, learning_rate=3e-3, schedule="cosine", dropout=0.25),
    2: adapter(rank=30, batch=8, seed=3, alpha=7.0, clip=float("inf")),
    3: adapter(rank=16, batch=3, seed=4, schedule="constant", warmup=0.0, clip=0.05),
}
SLOTS = (SlotShape(rank=16, rows=2), SlotShape(rank=16), SlotShape(rank=64, rows=3), SlotShape(rank=16, rows=4))


@dataclass(frozen=True)
class Maker:
    """Makes packs on one base and task, with the same options."""

    base: Base
    task: Task
    options: tuple[tuple[str, object], ...] = ()

    def pack(self, slots=SLOTS, adapters=MIX, micro_steps: int = 0, tokens: int = TOKENS, **options) -> EnginePack:
        made = EnginePack(self.base, PackShape(tokens=tokens, slots=tuple(slots)), self.task, **{**dict(self.options), **options})
        for slot, config in adapters.items():
            made.admit(slot, config)
        if micro_steps:
            made.advance(micro_steps)
        return made

    def alone(self, slot: SlotShape, config: AdapterConfig, micro_steps: int, **options) -> EnginePack:
        return self.pack((slot,), {0: config}, micro_steps, **options)


def same(pack: EnginePack, slot: int, other: EnginePack, there: int) -> bool:
    """Weights, losses, steps and evaluation, bit for bit."""
    mine, theirs = pack.weights(slot), other.weights(there)
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[n], theirs[n]) for n in mine) and (
        pack.live()[slot] == other.live()[there] and pack.evaluate()[0][slot] == other.evaluate()[0][there]
    )  # fmt: skip
