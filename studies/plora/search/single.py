"""One adapter at a time, each in a pack that suits it: what a search without packing does.

    pack = OneAtATime(tokens=128, rank=64, pack_of=lambda shape: EnginePack(base, shape, task))
    drive(run, pack, ...)                                       # a search with one slot

An adapter alone needs no accumulation: its pack passes a whole batch in a micro-step and has its own rank, so the baseline is not slowed down by the
shape of a pack. Packs are kept by shape, as a captured graph would be. A micro-step asked for is one sequence; a pack passes whole batches, at
least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, Progress, SlotShape

__all__ = ["OneAtATime"]


class OneAtATime:
    """adapter.Pack with one slot. most_rows: larger batches are accumulated from as many rows as divide them."""

    def __init__(self, *, tokens: int, rank: int, pack_of: Callable[[PackShape], Pack], most_rows: int = 32):
        self.shape = PackShape(tokens=tokens, slots=(SlotShape(rank=rank),))
        self._pack_of, self._most_rows = pack_of, most_rows
        self._packs: dict[SlotShape, Pack] = {}
        self._now: SlotShape | None = None

    def _take(self, adapter: AdapterConfig) -> Pack:
        rows = max(r for r in range(1, self._most_rows + 1) if adapter.batch % r == 0)
        self._now = SlotShape(rank=adapter.rank, rows=rows)
        if self._now not in self._packs:
            self._packs[self._now] = self._pack_of(PackShape(tokens=self.shape.tokens, slots=(self._now,)))
        return self._packs[self._now]

    def admit(self, slot: int, adapter: AdapterConfig) -> None:
        if slot != 0 or self._now is not None or adapter.rank > self.shape.slots[0].rank:
            raise ValueError(f"an adapter of rank up to {self.shape.slots[0].rank} starts in the one empty slot 0, got {slot=} {adapter.rank=} taken={self._now is not None}; release it first")
        self._take(adapter).admit(0, adapter)

    def release(self, slot: int) -> Any:
        weights = self._packs[self._now].release(slot)
        self._now = None
        return weights

    def advance(self, micro_steps: int) -> float:
        return 0.0 if self._now is None else self._packs[self._now].advance(max(1, micro_steps // self._now.rows))

    def live(self) -> dict[int, Progress]:
        return {} if self._now is None else self._packs[self._now].live()

    def evaluate(self) -> tuple[dict[int, Evaluation], float]:
        return ({}, 0.0) if self._now is None else self._packs[self._now].evaluate()

    def state(self) -> dict[str, Any]:
        if self._now is None:
            return {}
        return {"adapter": self.live()[0].adapter.to_json(), "pack": self._packs[self._now].state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._now = None
        if state:
            self._take(AdapterConfig.from_json(state["adapter"])).restore(state["pack"])
