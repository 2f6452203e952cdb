"""Findings of the claims: what the rows say, as a value with its interval. The verdict is suite.claims'.

    row_scales_break_tensorwise(view)       # Finding | None: None where no run exists
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.claims import Finding, Row, View


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
    return counted(rows, holds, missing(view, "safety"), f"{sum(holds)} of {len(holds)} site shapes")


def head_stays_bf16(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="safety", where={"which": "forward"}) if is_head(r)]
    holds = [r.metrics["safe_recipes"] == 0 for r in rows]
    return counted(rows, holds, missing(view, "safety"))


def torchao_filter(view: View) -> Finding | None:
    """Layers of MLPerf's DLRM-v2 that the automatic filter converts in either recipe: an exact count."""
    rows = view.rows(measure="torchao_filter")
    if not rows:
        return None
    found = next(f for f in rows[0].record("filter") if f["model"] == "dlrm_v2 mlperf")
    n = max(found["converted"].values())
    return Finding(value=n, low=n, high=n, n=found["seen"], rows=rows[:1], note=f"of {found['seen']} nn.Linear; the model has {found['products']} products")


def hardware_matches(view: View) -> Finding | None:
    """The worst row of every product that a GPU computed, against the emulation: an exact minimum."""
    rows = [r for r in (*view.rows(measure="safety"), *view.rows(measure="captured")) if "hardware_db" in r.metrics]
    if not rows:
        return None
    worst = min(r.metrics["hardware_db"] for r in rows)
    return Finding(value=worst, low=worst, high=worst, n=len(rows), rows=rows, missing=missing(view, "safety"), note=f"the worst row of {len(rows)} cells")


def rowwise_safe_for_real(view: View) -> Finding | None:
    """Inner forward sites of the models trained here: the share that is safe with a scale a row."""
    rows = view.rows(measure="captured")
    sites = [({v["recipe"]: v["verdict"] for v in s["recipes"]}) for r in rows for s in r.record("sites") if s["which"] == "forward" and not s["head"]]
    tensorwise = sum(v["tensorwise"] == "safe" for v in sites)
    return counted(rows, [v["rowwise"] == "safe" for v in sites], missing(view, "captured"), f"{sum(v['rowwise'] == 'safe' for v in sites)} of {len(sites)} sites; tensorwise {tensorwise}")
