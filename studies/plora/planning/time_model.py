"""How long one micro-step of a pack takes, from a few measured ones, with an error bar from others that the fit never saw.

    points = [StepTime(shape=shape, seconds=0.0123), ...]
    model = fit(points[:12])                             # seconds = max(floor, a0 + a1 N + a2 sum N_i r_i + a3 sum N_i s_i + a4 k)
    model.seconds(PackShape(tokens=512, slots=(SlotShape(rank=64, rows=4),) * 8))
    errors(model, points[12:]), mape(errors(...))

Legend: N padded tokens of a micro-step, N_i those of slot i, r_i its rank capacity, s_i the positions of a sequence, k slots. All five
coefficients are times, so none is negative (non-negative least squares), and errors count relative to what was measured. The floor is what a
step takes however small it is: the host's time of launching where nothing is captured (measured apart, then given), else the time in which
the weights are read (fitted where that foretells left-out points better). A step here is a micro-step with its share of optimizer steps, as
it was timed. The form is that of a line: waves of tiles and changes of a library's algorithm are in the error bar, not in the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from studies.plora.adapter import PackShape, SlotShape
from suite.stats import Interval, bootstrap_interval

__all__ = ["StepTable", "StepTime", "TimeModel", "canonical", "errors", "features", "fit", "mape"]

COEFFICIENTS = 5
ROUNDS = 20  # of finding out which points the line explains
FEWEST_POINTS = COEFFICIENTS + 1
AT_THE_FLOOR = 1.05  # a step of less than this many floors is said to be at it: the line explains the others


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One measured composition. peak_bytes: of torch's allocator over the step, where it was read."""

    shape: PackShape
    seconds: float
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"a step takes a finite time above 0, got {self.seconds=} of {self.shape}; leave out what failed")

    def to_json(self) -> dict[str, Any]:
        """A line of the record "step_times": tokens, slots as [rank, rows], seconds, peak_bytes."""
        slots = [[s.rank, s.rows] for s in self.shape.slots]
        return {"tokens": self.shape.tokens, "slots": slots, "seconds": self.seconds, "peak_bytes": self.peak_bytes}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> StepTime:
        """Other entries of the line are left alone."""
        shape = PackShape(tokens=line["tokens"], slots=tuple(SlotShape(rank=r, rows=n) for r, n in line["slots"]))
        return cls(shape=shape, seconds=line["seconds"], peak_bytes=line.get("peak_bytes"))


def canonical(shape: PackShape) -> PackShape:
    """The same slots, widest first: compositions that differ in order alone are one."""
    return PackShape(tokens=shape.tokens, slots=tuple(sorted(shape.slots, key=lambda s: (-s.rank, -s.rows))))


class StepTable:
    """Measured times by composition; `seconds` raises ValueError for a composition that was not measured."""

    def __init__(self, points: Iterable[StepTime]) -> None:
        self._of = {canonical(p.shape): p for p in points}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, shape: PackShape) -> bool:
        return canonical(shape) in self._of

    def seconds(self, shape: PackShape) -> float:
        return self._point(shape).seconds

    def peak_bytes(self, shape: PackShape) -> int | None:
        return self._point(shape).peak_bytes

    def _point(self, shape: PackShape) -> StepTime:
        if shape not in self:
            slots = " ".join(f"{s.rank}x{s.rows}" for s in canonical(shape).slots)
            raise ValueError(f"every composition has a measured time, got none of {shape.tokens} tokens, rank x rows {slots}; time it too")
        return self._of[canonical(shape)]


@dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Seconds of a micro-step: the larger of `floor_s` and the sum of the others, each times its feature."""

    fixed_s: float
    token_s: float
    token_rank_s: float
    token_position_s: float
    slot_s: float
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= x < math.inf for x in astuple(self)) or not max(astuple(self)) > 0:
            raise ValueError(f"a time model has times that are not negative, one of them above 0, got {self}; fit it again")

    @property
    def coefficients(self) -> np.ndarray:
        """Those of `features`, in their order."""
        return np.array([self.fixed_s, self.token_s, self.token_rank_s, self.token_position_s, self.slot_s])

    def seconds(self, shape: PackShape) -> float:
        return max(self.floor_s, float(features(shape) @ self.coefficients))


def features(shape: PackShape) -> np.ndarray:
    """[1, N, sum N_i r_i, sum N_i s_i, k] of one micro-step."""
    tokens = [s.rows * shape.tokens for s in shape.slots]
    ranks = sum(n * s.rank for n, s in zip(tokens, shape.slots, strict=True))
    return np.array([1.0, sum(tokens), ranks, sum(tokens) * shape.tokens, len(shape.slots)])


def fit(points: Sequence[StepTime], *, host_s: float | None = None) -> TimeModel:
    """The model of least squared relative error. `host_s`: the floor, where the host's time was measured; None: the mean of the fastest points, of as
    many as left-out points are foretold best with: of at least one, as nothing faster was ever seen. Raises ValueError for fewer than 6 compositions.
    """
    if len({canonical(p.shape) for p in points}) < FEWEST_POINTS:
        raise ValueError(f"a fit of {COEFFICIENTS} coefficients takes at least {FEWEST_POINTS} compositions, got {len(points)} points; time more shapes")
    if host_s is not None:
        if not 0 <= host_s < math.inf:
            raise ValueError(f"the host's time is a finite time, got {host_s=}; measure launches without waiting")
        return _line(points, host_s)
    fastest = np.sort([p.seconds for p in points])[: max(1, len(points) - FEWEST_POINTS)]
    floors = [float(np.sum(1 / fastest[:n]) / np.sum(1 / fastest[:n] ** 2)) for n in range(1, len(fastest) + 1)]  # of least squared relative error to them
    return _line(points, min(floors, key=lambda floor_s: _left_out_error(points, floor_s)))


def errors(model: TimeModel, points: Iterable[StepTime]) -> np.ndarray:
    """Predicted over measured, less 1, of each point."""
    return np.array([model.seconds(p.shape) / p.seconds - 1.0 for p in points])


def mape(relative_errors: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean absolute relative error (a fraction), its bootstrap interval over compositions."""
    return bootstrap_interval(np.abs(relative_errors), lambda x: float(np.mean(x)), rng=np.random.default_rng(seed))


def _line(points: Sequence[StepTime], floor_s: float) -> TimeModel:
    """Least squares of max(floor, line): the line over the points that it puts above the floor, from those that were measured above it, until they are the
    same; the best of all on the way.
    """
    explained, tried = [p.seconds > AT_THE_FLOOR * floor_s for p in points], []
    for _ in range(ROUNDS):
        used = [p for p, above in zip(points, explained, strict=True) if above]
        tried.append(_least_squares(used if len(used) >= COEFFICIENTS else points, floor_s))
        above = [float(features(p.shape) @ tried[-1].coefficients) > floor_s for p in points]
        if above == explained:
            break
        explained = above
    return min(tried, key=lambda model: float(np.sum(errors(model, points) ** 2)))


def _least_squares(points: Sequence[StepTime], floor_s: float) -> TimeModel:
    from scipy.optimize import nnls

    relative = np.array([features(p.shape) / p.seconds for p in points])
    scale = relative.max(axis=0)  # columns of one size: 1 beside tokens times positions
    found, _ = nnls(relative / scale, np.ones(len(points)))
    fixed, token, rank, position, slot = (float(x) for x in found / scale)
    return TimeModel(fixed_s=fixed, token_s=token, token_rank_s=rank, token_position_s=position, slot_s=slot, floor_s=floor_s)


def _left_out_error(points: Sequence[StepTime], floor_s: float) -> float:
    """Sum of squared relative errors, each of a point that its line did not see."""
    rests = [[p for p in points if p is not out] for out in points]
    return sum(float(errors(_line(rest, floor_s), [out])[0]) ** 2 for rest, out in zip(rests, points, strict=True))
