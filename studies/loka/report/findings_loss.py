"""Findings of the claims about log-loss: pairs of training runs (tost.py), and predicted against measured changes of single products.

    quality_tost(view)          # Finding | None

A change is relative: (arm - bf16) / bf16 of one seed. Equivalence is TOST's: the 90% interval lies wholly within the margin. A claim's value is
the size of the mean change, its interval that of the mean, folded at 0, so "at most 0.02%" stands exactly where TOST says EQUIVALENT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np

from studies.loka.learning.tost import MARGIN, neutrality, relative_changes
from studies.loka.presets import ALL_MODS
from studies.loka.report.findings import missing
from suite.claims import Finding, Row, View
from suite.stats import Equivalence, mean_interval

RESAMPLES, SEED = 500, 0


def runs(view: View, **where) -> dict[str, list[Row]]:
    """arm -> its training runs."""
    out: dict[str, list[Row]] = {}
    for row in view.rows(measure="quality", where=where):
        out.setdefault(row.params["arm"], []).append(row)
    return out


def by_seed(rows: Sequence[Row]) -> dict[int, float]:
    """seed -> log-loss; NaN for a run that diverged."""
    return {r.seed: r.metrics.get("log_loss", math.nan) for r in rows}


def neutral(view: View, arm: str, **where) -> Finding | None:
    """|change| of an arm with its interval; a pilot that is short, or a planted-bad arm that passes, makes it undecided."""
    found = runs(view, **where)
    if arm not in found or "bf16" not in found:
        return None
    losses = {name: by_seed(rows) for name, rows in found.items()}
    verdict = neutrality(losses[arm], losses["bf16"], perturbed=losses.get("bf16-perturbed", {}), planted_bad=losses.get("planted-bad", {}))
    changes = [c for c in relative_changes(losses[arm], losses["bf16"]).values() if math.isfinite(c)]
    if len(changes) < 2:
        return None
    rows = [r for name in (arm, "bf16", "bf16-perturbed", "planted-bad") for r in found.get(name, [])]
    undecided = verdict.verdict is Equivalence.UNDECIDED
    return folded(changes, rows, missing(view, "quality", where) + undecided, f"{arm}: {verdict.why}")


def folded(changes: Sequence[float], rows: Sequence[Row], absent: int, note: str) -> Finding:
    """The mean's size; the interval at a confidence c is the (2c - 1) one of the mean, as two one-sided tests read it."""

    def at(confidence: float) -> tuple[float, float]:
        i = mean_interval(changes, max(2 * confidence - 1, 1e-9))
        ends = sorted((abs(i.low), abs(i.high)))
        return (0.0 if i.low <= 0 <= i.high else ends[0]), ends[1]

    low, high = at(0.95)
    mean = float(np.mean(changes))
    return Finding(value=abs(mean), low=low, high=high, n=len(changes), rows=rows, missing=absent, interval_at=at, note=f"{note}; mean change {mean:+.3%}")


quality_tost = partial(neutral, arm="ours", size="0.53", mods="", data="planted")
quality_small = partial(neutral, arm="ours", size="small", mods="", data="planted")


def worse(view: View, arm: str, **where) -> Finding | None:
    """The relative change of an arm against bf16, signed."""
    found = runs(view, **where)
    if arm not in found or "bf16" not in found:
        return None
    changes = [c for c in relative_changes(by_seed(found[arm]), by_seed(found["bf16"])).values() if math.isfinite(c)]
    return signed(changes, [*found[arm], *found["bf16"]], missing(view, "quality", where))


def signed(changes: Sequence[float], rows: Sequence[Row], absent: int) -> Finding | None:
    if len(changes) < 2:
        return None

    def at(confidence: float) -> tuple[float, float]:
        i = mean_interval(changes, confidence)
        return i.low, i.high

    low, high = at(0.95)
    return Finding(value=float(np.mean(changes)), low=low, high=high, n=len(changes), rows=rows, missing=absent, interval_at=at)


naive_fp8_loss = partial(worse, arm="naive", size="0.53", mods="", data="planted")
naive_small = partial(worse, arm="naive", size="small", mods="", data="planted")


def mods_quality(view: View) -> Finding | None:
    """All three Mods against none, in bf16; the note says what each combination does."""
    rows = view.rows(measure="quality", where={"arm": "bf16", "size": "small", "data": "planted"})
    rows = [r for r in rows if r.kind == "measured"]  # the ablation at size is the GPU's
    of = {mods: by_seed([r for r in rows if r.params["mods"] == mods]) for mods in {r.params["mods"] for r in rows}}
    if ALL_MODS not in of or "" not in of:
        return None
    change = {m: list(relative_changes(of[m], of[""]).values()) for m in of if m}
    told = ", ".join(f"{m} {np.mean(c):+.2%}" for m, c in sorted(change.items()) if c)
    return folded(change[ALL_MODS], rows, missing(view, "quality", {"arm": "bf16"}), told) if len(change[ALL_MODS]) >= 2 else None


def real_log_change(view: View) -> Finding | None:
    """|change| on MovieLens-1M by rowwise forward products, the one log with rows enough; its interval is over users."""
    rows = view.rows(measure="real_change", where={"data": "movielens-1m", "recipe": "rowwise"})
    if not rows:
        return None
    more = rows[0].record("more")
    error = (more["loss_high"] - more["loss_low"]) / (2 * NormalDist().inv_cdf(0.975))

    def at(confidence: float) -> tuple[float, float]:
        half = error * NormalDist().inv_cdf(max(confidence, 0.5 + 1e-9))
        low, high = more["loss_change"] - half, more["loss_change"] + half
        ends = sorted((abs(low), abs(high)))
        return (0.0 if low <= 0 <= high else ends[0]), ends[1]

    low, high = at(0.95)
    return Finding(value=abs(more["loss_change"]), low=low, high=high, n=int(more["rows"]), rows=rows[:1], interval_at=at,
                   note=f"mean change {more['loss_change']:+.4%}; these rows show {more['detectable']:.4%} with 80% power")  # fmt: skip


# ---- predicted against measured changes ----------------------------------------------------------------------------------------

Points = Sequence[Mapping]


def points_of(row: Row) -> list[dict]:
    """The flips whose measured change is clear of its own error."""
    return [p for p in row.record("points") if not p["excluded"]]


def rank(points: Points, predicted: str = "error") -> float:
    """Spearman's rank correlation; NaN where either has one value only."""
    from scipy.stats import rankdata

    ranks = [rankdata([p[key] for p in points]) for key in (predicted, "measured")]
    return float(np.corrcoef(*ranks)[0, 1]) if min(map(np.ptp, ranks)) > 0 else math.nan


def slope(points: Points) -> float:
    """Of ln measured on ln predicted, least squares over the points above 0."""
    above = [(math.log(p["error"]), math.log(p["measured"])) for p in points if p["measured"] > 0 and p["error"] > 0]
    return float(np.polyfit(*zip(*above, strict=True), 1)[0]) if len({x for x, _ in above}) > 1 else math.nan


def prediction(view: View, statistic: Callable[[Points], float]) -> Finding | None:
    """A statistic of all clear points of all flips, its interval by resampling sites: recipes of one site stay together."""
    rows = view.rows(measure="flips")
    points = [{**p, "site": f"{r.bundle_id} {p['site']}"} for r in rows for p in points_of(r)]
    sites = [[p for p in points if p["site"] == s] for s in sorted({p["site"] for p in points})]
    if len(sites) < 3:
        return None
    rng = np.random.default_rng(SEED)
    drawn = [statistic([p for i in rng.integers(len(sites), size=len(sites)) for p in sites[i]]) for _ in range(RESAMPLES)]
    drawn = np.array([d for d in drawn if math.isfinite(d)])

    def at(confidence: float) -> tuple[float, float]:
        tail = 50 * (1 - confidence)
        low, high = (float(x) for x in np.percentile(drawn, [tail, 100 - tail]))
        return min(low, value), max(high, value)

    value = statistic(points)
    low, high = at(0.95)
    excluded = sum(len(r.record("points")) for r in rows) - len(points)
    return Finding(value=value, low=low, high=high, n=len(points), rows=rows, missing=missing(view, "flips"), interval_at=at,
                   note=f"{len(points)} flips at {len(sites)} sites, {excluded} within two standard errors of 0 left out")  # fmt: skip


loss_prediction = partial(prediction, statistic=rank)
price_beats_noise = partial(prediction, statistic=lambda points: rank(points) - rank(points, "noise_to_signal"))
loss_prediction_slope = partial(prediction, statistic=lambda points: max(s, 1 / s) if (s := slope(points)) > 0 else math.nan)
assert MARGIN == 0.0002, "the claims' target is TOST's margin"
