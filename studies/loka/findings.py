"""Findings of the claims: what the rows say, as a value with its interval. The verdict is suite.claims'.

    row_scales_break_tensorwise(view)       # Finding | None: None where no run exists
"""

from __future__ import annotations

from collections.abc import Sequence

from suite.claims import Finding, Row, View


def planned_missing(view: View, measure: str) -> int:
    """Planned cells of a measure that have no OK row."""
    answered = {r.point for r in view.rows_}
    return sum(c.measure.endswith(f":{measure}") and c.point not in answered for c in view.plan_cells)


def counted(rows: Sequence[Row], true: Sequence[bool], missing: int, note: str = "") -> Finding | None:
    """The share of cases that hold, every one of them looked at: an exact count."""
    if not true:
        return None
    share = sum(true) / len(true)
    return Finding(value=share, low=share, high=share, n=len(true), rows=rows, missing=missing, note=note or f"{sum(true)} of {len(true)} cases")


# ---- the safety map ------------------------------------------------------------------------------------------------------------


def verdicts(row: Row) -> dict[str, str]:
    """recipe -> safe, unsafe or undecided."""
    return {r["recipe"]: r["verdict"] for r in row.record("recipes")}


def is_head(row: Row) -> bool:
    return row.params["threshold_db"] > 30


def row_scales_break_tensorwise(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="safety", where={"which": "forward", "distribution": "row-scaled"}) if not is_head(r)]
    found = [verdicts(r) for r in rows]
    holds = [v["tensorwise"] == "unsafe" and v["rowwise"] == "safe" for v in found]
    return counted(rows, holds, planned_missing(view, "safety"), f"{sum(holds)} of {len(holds)} site shapes")


def head_stays_bf16(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="safety", where={"which": "forward"}) if is_head(r)]
    holds = [r.metrics["safe_recipes"] == 0 for r in rows]
    return counted(rows, holds, planned_missing(view, "safety"))
