"""Findings of the claims: what the rows say, as a value with its interval. The verdict is suite.claims'.

    throughput(view, model="3b")        # Finding | None: None where no run exists

Ratios are read inside one contest, one number a process start, Student-t over processes. A product of two ratios of two contests takes them replicate by
replicate; numbers of one GPU model never mix with those of another, because a claim names its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.claims import Finding, Row, View
from suite.stats import ratio_interval

Logs = Callable[[Row], float | None]


def missing(view: View, measure: str, where: Mapping[str, Any] | None = None) -> int:
    """Planned cells of a measure, with these params, that have no OK row."""
    answered = {r.point for r in view.rows_}
    return sum(c.measure.endswith(f":{measure}") and c.point not in answered and all(c.params.get(k) == v for k, v in (where or {}).items()) for c in view.plan_cells)


def counted(rows: Sequence[Row], true: Sequence[bool], absent: int, note: str = "") -> Finding | None:
    """The share of cases that hold, every one of them looked at: an exact count."""
    if not true:
        return None
    share = sum(true) / len(true)
    return Finding(value=share, low=share, high=share, n=len(true), rows=rows, missing=absent, note=note or f"{sum(true)} of {len(true)} cases")


def exact(value: float, rows: Sequence[Row], absent: int, n: int, note: str = "") -> Finding:
    """A number with nothing drawn in it: the worst of all cases, or a schedule's length."""
    return Finding(value=value, low=value, high=value, n=n, rows=rows, missing=absent, note=note)


def metric(name: str, sign: float = 1.0) -> Logs:
    return lambda row: sign * row.metrics[name] if name in row.metrics else None


def by_process(rows: Sequence[Row], logs: Logs) -> list[float]:
    """One value a process start; a process that measured twice counts once."""
    found = {r.environment.get("process", r.bundle_id): logs(r) for r in rows}
    return [v for v in found.values() if v is not None]


def ratio(rows: Sequence[Row], values: Sequence[float], absent: int = 0, note: str = "") -> Finding | None:
    """A ratio from one ln ratio each process; None for fewer than two."""
    if len(values) < 2:
        return None

    def at(confidence: float) -> tuple[float, float]:
        i = ratio_interval(values, confidence)
        return i.low, i.high

    i = ratio_interval(values)
    return Finding(value=i.value, low=i.low, high=i.high, n=i.n, rows=rows, missing=absent, note=note, interval_at=at)


def groups(rows: Sequence[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows of one point's params, whatever their replicate: (device, params by name) -> rows."""
    out: dict[tuple, list[Row]] = {}
    for r in rows:
        out.setdefault((r.device, *(r.params.get(n) for n in names)), []).append(r)
    return out


def smallest(findings: Sequence[Finding | None]) -> Finding | None:
    """The least of findings, None where one is missing: a claim about all of them stands with its worst."""
    return min(findings, key=lambda f: f.value) if findings and all(f is not None for f in findings) else None
