"""Findings of the claims about the probe: what it predicts, when it stops, what it costs, and what the paper's would have said.

    probe_prediction_error_db(view)     # Finding | None
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from studies.loka.report.findings import missing
from studies.loka.report.findings_speed import metric, ratio
from suite.claims import Finding, Row, View

PAPER_INTERVAL = 100  # steps between probed ones


def extreme(view: View, measure: str, name: str, worst=max) -> Finding | None:
    """The worst of a metric over all cells of a measure: an exact number, every one of them looked at."""
    rows = [r for r in view.rows(measure=measure) if name in r.metrics]
    if not rows:
        return None
    row = worst(rows, key=lambda r: r.metrics[name])
    value = row.metrics[name]
    return Finding(value=value, low=value, high=value, n=len(rows), rows=rows, missing=missing(view, measure), note=f"at {row.params['distribution']}" if "distribution" in row.params else "")


def probe_prediction_error_db(view: View) -> Finding | None:
    return extreme(view, "validation", "prediction_error_db")


def stops_rightly(view: View) -> Finding | None:
    return extreme(view, "stopping", "stop_error_share")


def gaussian_probe_hides_rows(view: View) -> Finding | None:
    return extreme(view, "surrogate_failures", "surrogate_gap_db", min)


def mere_unstable(view: View) -> Finding | None:
    return extreme(view, "surrogate_failures", "mere_spread", min)


def probe_overhead(view: View) -> Finding | None:
    """The share of time that the probe adds at the paper's interval."""
    where = {"every": PAPER_INTERVAL, "compiled": True}
    f = ratio(view.rows(measure="overhead", where=where), metric("log_probe_overhead"), missing(view, "overhead", where))
    return f and replace(f, value=f.value - 1, low=f.low - 1, high=f.high - 1, interval_at=lambda c: tuple(x - 1 for x in f.interval_at(c)))


def laws(rows: Sequence[Row]) -> dict[str, dict]:
    """distribution -> what is true, what the paper's probe says and what ours does."""
    return {law["distribution"]: law for r in rows for law in r.record("laws") if all(math.isfinite(law[k]) for k in ("true_p01_db", "surrogate_p01_db", "ours_p01_db"))}
