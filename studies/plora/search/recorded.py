"""A pack whose adapters were trained before: it replays their recorded curves, with measured times. Kind: replayed.

    curves = read_curves(ctx.input_record("grid", "curves"))
    pack = RecordedPack(curves, shape, StepTimes(micro_step_s={(16, 1, 64): 0.011}, evaluate_s={16: 0.9}))
    driver = Driver(run, pack, ...)                            # as over the engine's pack

A curve is what the engine's pack said of one adapter when it was trained: tokens seen, score and loss at each look. Between two looks the score
is a straight line between theirs; before the first it is the first. An adapter sees `tokens_a_sequence` (mean real ones of its curve)
for each sequence that it passes. It trains nothing and invents no adapter: one that was not recorded is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.plora.adapter import AdapterConfig, Evaluation, PackShape, Progress
from studies.plora.search.space import Levels, Space

__all__ = ["Curve", "RecordedPack", "StepTimes", "read_curves", "space_of"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One recorded adapter. tokens: rising, the last one at or after its budget; test_score: of the finished adapter."""

    adapter: AdapterConfig
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    losses: tuple[float, ...]
    tokens_a_sequence: float
    test_score: float

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.scores) == len(self.losses) > 0 or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"a curve has one score and one loss for each of its rising tokens, got {self.tokens=} with {len(self.scores)} and {len(self.losses)}; record it again")
        if self.tokens[-1] < self.adapter.budget_tokens or not self.tokens_a_sequence > 0:
            raise ValueError(f"a curve reaches its budget, got {self.tokens[-1]=} {self.adapter.budget_tokens=} {self.tokens_a_sequence=}; record it to its end")

    def at(self, tokens_seen: int) -> Evaluation:
        return Evaluation(tokens_seen=tokens_seen, score=float(np.interp(tokens_seen, self.tokens, self.scores)), loss=float(np.interp(tokens_seen, self.tokens, self.losses)))


def read_curves(record: Sequence[Mapping[str, Any]]) -> dict[AdapterConfig, Curve]:
    """By adapter (its seed included) from their JSON: fields of Curve, `null` where a number was not finite."""
    curves = {}
    for entry in record:
        numbers = {name: tuple(float("nan") if x is None else float(x) for x in entry[name]) for name in ("scores", "losses")}
        curve = Curve(adapter=AdapterConfig.from_json(entry["adapter"]), tokens=tuple(entry["tokens"]), **numbers, tokens_a_sequence=entry["tokens_a_sequence"],
                      test_score=float("nan") if entry["test_score"] is None else entry["test_score"])  # fmt: skip
        curves[curve.adapter] = curve
    return curves


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured seconds: of a micro-step by (live adapters, rows a slot, rank of the widest slot), of one packed evaluation by live adapters.

    A pack with a number of live adapters that was not timed takes the time of the next larger one that was: not less than its own.
    """

    micro_step_s: Mapping[tuple[int, int, int], float]
    evaluate_s: Mapping[int, float]

    def __post_init__(self) -> None:
        for name, table in (("micro_step_s", self.micro_step_s), ("evaluate_s", self.evaluate_s)):
            if not table or not min(table.values()) > 0:
                raise ValueError(f"times are positive seconds, at least one, got {name}={dict(table)}; measure them")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepTimes:
        """From the record "times" of studies.plora.measures.grid.pack_times."""
        return cls(micro_step_s={(k, rows, rank): s for k, rows, rank, s in record["micro_step_s"]}, evaluate_s=dict(map(tuple, record["evaluate_s"])))

    def micro_step(self, live: int, rows: int, rank: int) -> float:
        return self.micro_step_s[self._timed(live, rows, rank), rows, rank]

    def evaluate(self, live: int) -> float:
        return self.evaluate_s[min(k for k in self.evaluate_s if k >= live)]

    def check(self, shape: PackShape) -> None:
        """Raises ValueError where packs of the shape were not timed."""
        rows, rank = _rows(shape), _rank(shape)
        self._timed(len(shape.slots), rows, rank)
        if max(self.evaluate_s) < len(shape.slots):
            raise ValueError(f"the evaluation of a full pack was timed, got {len(shape.slots)} slots and times of {sorted(self.evaluate_s)} adapters; time it")

    def _timed(self, live: int, rows: int, rank: int) -> int:
        timed = [k for k, r, c in self.micro_step_s if (r, c) == (rows, rank) and k >= live]
        if not timed:
            raise ValueError(f"a full pack of the same rows and rank was timed, got {live} adapters, {rows=}, {rank=} and times of {sorted(self.micro_step_s)}; time it")
        return min(timed)


def _rows(shape: PackShape) -> int:
    return max(slot.rows for slot in shape.slots)


def _rank(shape: PackShape) -> int:
    return max(slot.rank for slot in shape.slots)


class RecordedPack:
    """adapter.Pack over recorded curves."""

    def __init__(self, curves: Mapping[AdapterConfig, Curve], shape: PackShape, times: StepTimes):
        times.check(shape)
        self.shape, self.curves, self.times = shape, curves, times
        self._slots: dict[int, tuple[AdapterConfig, int]] = {}  # adapter, sequences passed

    def admit(self, slot: int, adapter: AdapterConfig) -> None:
        if slot in self._slots or not 0 <= slot < len(self.shape.slots):
            raise ValueError(f"an adapter starts in an empty slot, got {slot=} with {sorted(self._slots)} taken of {len(self.shape.slots)}; release it first")
        if adapter.rank > self.shape.slots[slot].rank:
            raise ValueError(f"a slot holds ranks up to its own, got {adapter.rank=} for {self.shape.slots[slot]}; take a wider slot")
        if adapter not in self.curves:
            raise ValueError(f"a recorded pack replays what was recorded, got {adapter} beside {len(self.curves)} others; take the recorded grid for the search's space")
        self._slots[slot] = (adapter, 0)

    def release(self, slot: int) -> Curve:
        """Empty the slot; returns the adapter's curve in the place of its weights."""
        return self.curves[self._slots.pop(slot)[0]]

    def advance(self, micro_steps: int) -> float:
        spent_s = 0.0
        for _ in range(micro_steps):
            training = [slot for slot, p in self.live().items() if not p.done]
            if not training:
                break
            spent_s += self.times.micro_step(len(self._slots), _rows(self.shape), _rank(self.shape))  # a finished adapter idles in its slot: the pack is as large
            for slot in training:
                adapter, passed = self._slots[slot]
                self._slots[slot] = (adapter, passed + self.shape.slots[slot].rows)
        return spent_s

    def live(self) -> dict[int, Progress]:
        return {slot: self._progress(adapter, passed) for slot, (adapter, passed) in sorted(self._slots.items())}

    def _progress(self, adapter: AdapterConfig, passed: int) -> Progress:
        curve = self.curves[adapter]
        seen = min(int(passed * curve.tokens_a_sequence), curve.tokens[-1])
        steps = passed // adapter.batch
        return Progress(adapter=adapter, tokens_seen=seen, optimizer_steps=steps, loss=curve.at(seen).loss if steps else float("nan"))

    def evaluate(self) -> tuple[dict[int, Evaluation], float]:
        if not self._slots:
            return {}, 0.0
        return {slot: self.curves[p.adapter].at(p.tokens_seen) for slot, p in self.live().items()}, self.times.evaluate(len(self._slots))

    def state(self) -> dict[str, Any]:
        return {"slots": {str(slot): {"adapter": adapter.to_json(), "passed": passed} for slot, (adapter, passed) in self._slots.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._slots = {int(slot): (AdapterConfig.from_json(s["adapter"]), s["passed"]) for slot, s in state["slots"].items()}


def space_of(curves: Mapping[AdapterConfig, Curve]) -> Space:
    """The recorded configurations as a space: every value of every axis in its order. Raises ValueError where they are no full grid."""
    axes = {
        "learning_rate": {a.learning_rate for a in curves}, "rank": {a.rank for a in curves},
        "batch": {a.batch for a in curves}, "alpha_ratio": {a.scale for a in curves},
    }  # fmt: skip
    seeds = len({a.seed for a in curves})
    if math.prod(map(len, axes.values())) * seeds != len(curves) or len({a.budget_tokens for a in curves}) != 1:
        raise ValueError(f"a recorded grid has every combination of its values under every seed and one budget, got {len(curves)} curves of {[len(v) for v in axes.values()]} values, {seeds} seeds; record the rest")
    return Space(axes={name: Levels(values=tuple(sorted(values))) for name, values in axes.items()})
