"""Findings of the claims about live makespans and searches.

    makespan_live(view, gpus=1)     # Finding | None
"""

from __future__ import annotations

import math
from dataclasses import replace

from studies.plora.report.findings import by_process, missing, ratio
from suite.claims import Finding, Row, View


def makespan_live(view: View, gpus: int) -> Finding | None:
    """Wall clock of one captured adapter after another over that of packs with refill; captures are inside both."""
    rows = [r for r in view.rows(measure="makespan_live") if r.metrics.get("gpus") == gpus]
    f = ratio(rows, by_process(rows, lambda r: math.log(r.metrics["makespan_speedup"])))
    if f is None:
        return None
    absent = sum(c.measure.endswith(":makespan_live") and c.needs.ranks == gpus and c.point not in {r.point for r in view.rows_} for c in view.plan_cells)
    return replace(f, missing=absent, note=f"{_same(view)}; finished scores, packed less alone: {_difference(rows)}")


def _same(view: View) -> str:
    rows = view.rows(measure="same_adapters")
    shares = [r.metrics["equal_share"] for r in rows if "equal_share" in r.metrics]
    return f"{min(shares):.0%} of the adapters tried in deterministic mode have the same bits packed and alone" if shares else "sameness of bits was not tried"


def _difference(rows: list[Row]) -> str:
    found = [r.record("more") for r in rows if "more.json" in r.files]
    found = [m for m in found if "score_difference" in m]
    return f"{found[0]['score_difference']:+.4f} ({found[0]['score_difference_low']:+.4f} to {found[0]['score_difference_high']:+.4f})" if found else "not compared"


def missing_searches(view: View) -> int:
    return missing(view, "live")
