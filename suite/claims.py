"""Claims: sentences with a target, judged on the rows of a snapshot.

    verdicts = judge_all(study, view)           # one Judged per claim, Holm over the study
    view.rows(where={"impl": "fma"}, device="H200")

A claim's `test` sees a View: for each point and device model the newest OK row with today's code
digest, else the newest older one, marked stale. It returns a Finding (a value with its interval), or
None where no run exists. The verdict is decided here, in one place, never by the study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.bundle import load_arrays, load_record
from suite.measure import weakest


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the tracker: a bundle's numbers, and where its payload lies."""

    study: str
    point: str
    key: str
    bundle_id: str
    run_id: str
    label: str
    measure: str
    params: Mapping[str, Any]
    seed: int
    replicate: int
    metrics: Mapping[str, float]
    facts: Mapping[str, str]
    kind: str
    status: str
    device: str  # the device model: GPU name for a cuda cell, CPU name else
    machine: str  # fingerprint digest, first 12 hex digits
    environment: Mapping[str, Any]
    commit: str
    dirty: bool
    code: str
    origin: str  # here, ingested, published
    started_at: str
    path: Path  # the bundle's folder
    files: Mapping[str, str]  # payload name -> sha256
    stale: bool = False

    def arrays(self) -> dict:
        return load_arrays(self.path)

    def record(self, name: str) -> Any:
        return load_record(self.path, name)


@dataclass(frozen=True, kw_only=True)
class View:
    """Rows that a study's claims and figures may use, one per (point, device model, machine kind)."""

    study: str
    rows_: tuple[Row, ...]
    planned: Mapping[str, str]  # point -> plan state of this invocation (DONE, FAILED, UNAVAILABLE, ...)
    plan_cells: tuple = ()  # the planned Cells, in order

    def rows(self, *, where: Mapping[str, Any] | None = None, device: str | None = None, measure: str | None = None) -> list[Row]:
        """OK rows whose params hold `where`, whose device model contains `device`, whose measure ends in `measure`."""
        out = []
        for row in self.rows_:
            if where and any(row.params.get(k) != v for k, v in where.items()):
                continue
            if device is not None and device not in row.device:
                continue
            if measure is not None and not row.measure.endswith(f":{measure}"):
                continue
            out.append(row)
        return out


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim's value with its 95% interval, and the rows behind it.

    `interval_at(confidence)` gives the interval again at another level (Holm). Exact counts (every
    element compared) have low == value == high. `missing` counts planned points without an OK row.
    """

    value: float
    low: float
    high: float
    n: int
    rows: Sequence[Row]
    missing: int = 0
    note: str = ""
    interval_at: Callable[[float], tuple[float, float]] | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence with a target. `bar` is ours and is reported apart from the verdict."""

    id: str
    statement: str
    target: float | None
    bar: float | None
    unit: str = ""
    direction: str = "higher"  # "higher" or "lower" is better
    margin: float = 0.05
    device: str = "H200"  # reference device model (substring); "" for any
    smallest_n: int = 1
    source: str = ""  # where the target is from
    command: str = ""
    test: Callable[[View], Finding | None]

    def __post_init__(self) -> None:
        if self.direction not in ("higher", "lower"):
            raise ValueError(f"a claim's direction is 'higher' or 'lower', got {self.direction!r}")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One object of `suite claims --json`."""

    study: str
    id: str
    statement: str
    target: float | None
    bar: float | None
    bar_met: bool | None
    value: float | None
    low: float | None
    high: float | None
    unit: str
    n: int
    kind: str
    machine: str
    commit: str
    stale: bool
    verdict: str
    command: str
    others: tuple[str, ...] = ()  # other device models with rows for it
    note: str = ""
    run_ids: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "others": list(self.others), "run_ids": list(self.run_ids)}


def kind_of(rows: Sequence[Row]) -> str:
    return weakest([r.kind for r in rows]) if rows else "measured"
