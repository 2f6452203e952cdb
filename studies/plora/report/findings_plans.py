"""Findings of the claims about cost models, planners, makespans and exactness.

    cost_model_mape(view)       # Finding | None

Numbers that no interval belongs to (the worst of all cases, a schedule's length) are exact: low == value == high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from studies.plora.report.findings import counted, exact, missing
from suite.claims import Finding, Row, View

RESAMPLES, SEED = 4000, 0


def cost_model_mape(view: View) -> Finding | None:
    """Of the model with the largest error. Its interval is a bootstrap over held-out compositions, given at 95% alone."""
    rows = [r for r in view.rows(measure="cost_model") if "mape" in r.metrics and r.kind == "measured"]
    if not rows:
        return None
    worst = max(rows, key=lambda r: r.metrics["mape"])
    errors = [abs(line["error"]) for line in worst.record("residuals") if line["part"] == "holdout"]
    at = bootstrapped(errors)
    low, high = at(0.95)
    return Finding(value=worst.metrics["mape"], low=low, high=high, n=len(errors), rows=rows, missing=missing(view, "cost_model"), interval_at=at, note=f"the worst of {len(rows)} models")


def bootstrapped(errors: Sequence[float]) -> Callable[[float], tuple[float, float]]:
    """confidence -> the interval of their mean, by resampling compositions once (percentiles)."""
    import numpy as np

    values = np.array(errors)
    means = values[np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)

    def at(confidence: float) -> tuple[float, float]:
        low, high = (float(x) for x in np.percentile(means, [50 * (1 - confidence), 50 * (1 + confidence)]))
        return min(low, float(values.mean())), max(high, float(values.mean()))

    return at


def planner_regret(view: View) -> Finding | None:
    """The worst case of the exact planner, on times that were measured."""
    rows = [r for r in view.rows(measure="regret") if r.kind != "simulated"]
    if not rows:
        return None
    worst = max(r.metrics.get("planner_regret", float("inf")) for r in rows)
    cases = {(r.bundle_id, line["case"]): line["plans"] for r in rows for line in r.record("planners")}
    return exact(worst, rows, missing(view, "regret"), len(cases), f"the worst of {len(cases)} cases of at least {min(cases.values())} plans each")


def largest_k(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="largest") if "largest_k_gap" in r.metrics]
    if not rows:
        return None
    return exact(max(r.metrics["largest_k_gap"] for r in rows), rows, missing(view, "largest"), len(rows), "the largest gap over models and memory limits")


def makespan_paper(view: View) -> Finding | None:
    """The smaller gain of the two kinds of rows, over eager jobs of one adapter."""
    rows = [r for r in view.rows(measure="makespan") if "makespan_over_eager" in r.metrics]
    if not rows:
        return None
    worst = min(rows, key=lambda r: r.metrics["makespan_over_eager"])
    graphed = ", ".join(f"{r.params['tokens']} tokens: {r.metrics['makespan_over_graphed']:.2f}x over captured jobs of one adapter (B1)" for r in rows if "makespan_over_graphed" in r.metrics)
    return exact(worst.metrics["makespan_over_eager"], rows, missing(view, "makespan"), len(rows), graphed)


def held(view: View, *measures: str) -> Finding | None:
    """Cells of these measures that hold in every case: each reports the share that does."""
    rows = [r for m in measures for r in view.rows(measure=m)]
    holds = [1.0 in (r.metrics.get("equal_share"), r.metrics.get("isolated_share")) for r in rows]
    return counted(rows, holds, sum(missing(view, m) for m in measures), f"{sum(holds)} of {len(holds)} cells hold in every case")


def exactness(view: View) -> Finding | None:
    found = held(view, "packed_equals_separate", "same_adapters")
    return found and replace(found, note=f"{found.note}; {_noise(view.rows(measure='noise_floor'))}")


def _noise(rows: list[Row]) -> str:
    ratios = [r.metrics["noise_ratio"] for r in rows if "noise_ratio" in r.metrics]
    return f"without deterministic mode packed and separate differ by at most {max(ratios):.2f} of what another padding changes" if ratios else "the noise floor was not measured"


def isolation(view: View) -> Finding | None:
    return held(view, "isolation")
