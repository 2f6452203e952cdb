"""What there is to train, and what a pack of some of it looks like: sequences, micro-steps, slots.

    work = Work(adapters=paper_configurations(budget_tokens=100_000), tokens=256, real_tokens=61.5, most_rows=4)
    work.rows(0), work.micro_steps(0)              # sequences of adapter 0 that pass together, and how often
    work.shape((0, 3, 7))                          # slots of exactly these adapters' ranks, widest first

Every adapter sees its budget of real tokens, `real_tokens` a sequence on average; slots have `tokens` positions, the rest is padding. A slot
passes the largest divisor of the adapter's batch that is at most `most_rows`, so a batch is full after whole micro-steps: a batch of 1 passes
its sequences one by one, 32 pass 32 at once where allowed. Adapters of one budget differ 32 times in micro-steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.planning.time_model import canonical

__all__ = ["Work", "largest_divisor"]


def largest_divisor(batch: int, most: int) -> int:
    """The largest divisor of `batch` that is at most `most`."""
    return next(n for n in range(min(batch, most), 0, -1) if batch % n == 0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Raises ValueError for no adapters, more real tokens than positions, or no rows."""

    adapters: tuple[AdapterConfig, ...]
    tokens: int
    real_tokens: float
    most_rows: int = 1

    def __post_init__(self) -> None:
        if not self.adapters or not 0 < self.real_tokens <= self.tokens or self.most_rows < 1:
            raise ValueError(f"work has adapters, at most as many real tokens as positions, and rows, got {len(self.adapters)=} {self.real_tokens=} "
                             f"{self.tokens=} {self.most_rows=}; mend it")  # fmt: skip

    def __len__(self) -> int:
        return len(self.adapters)

    def rows(self, adapter: int) -> int:
        return largest_divisor(self.adapters[adapter].batch, self.most_rows)

    def sequences(self, adapter: int) -> int:
        return math.ceil(self.adapters[adapter].budget_tokens / self.real_tokens)

    def micro_steps(self, adapter: int) -> int:
        """Of the adapter alone, until its budget is seen."""
        return math.ceil(self.sequences(adapter) / self.rows(adapter))

    def slot(self, adapter: int) -> SlotShape:
        return SlotShape(rank=self.adapters[adapter].rank, rows=self.rows(adapter))

    def shape(self, pack: Sequence[int]) -> PackShape:
        return canonical(PackShape(tokens=self.tokens, slots=tuple(self.slot(i) for i in pack)))

    def steps(self, pack: Sequence[int]) -> int:
        """Micro-steps of a job of these adapters: slots are fixed, so one that is done idles until the last is."""
        return max(self.micro_steps(i) for i in pack)
