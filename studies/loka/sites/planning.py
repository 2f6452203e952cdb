"""Planning without prices: for any model, the fastest recipe of each product whose rows stay clear of a threshold in dB.

    found = plan(readings, speedups={("a:linear", "forward", "rowwise-fast"): 1.3, ...})
    dispatch.after(step=..., readings=judged(found, readings, speedups))       # the same judgement while the model trains

A recipe is taken where the lower 95% bound of its tail, the 1st percentile of the rows' predicted SQNR, is at the product's threshold or above
(studies.loka.measures.safety_map derives them), and the lower 95% bound of its measured speed-up above 1. A product with fewer than 299 rows has no
1st percentile: the lowest quantile is read that its rows support, and of fewer than 6 rows the SQNR of all together. Heads stay in
bf16: a logit needs 32 dB, which a product in E4M3 does not have. Without `speedups` nothing is known of time: the plan then says what is safe, and its
`made_by` says that.

Where a model's loss is a log-loss, pricing in nats decides better: studies.loka.pricing.price with studies.loka.pricing.allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kernels.fp8.recipes import gemm
from studies.loka.measures.safety_map import GRADIENT_DB, INNER_DB
from studies.loka.probing.predict import FEWEST_ROWS, MAX_DB, Prediction, predict
from studies.loka.probing.readings import Readings
from studies.loka.site import Plan, Site
from studies.loka.sites.dispatch import Reading
from suite.stats import Interval

__all__ = ["PREFERRED", "THRESHOLDS_DB", "judged", "plan", "speedups_from", "tail"]

Speedups = Mapping[tuple[str, str, str], float]  # (site, pass, recipe) -> lower 95% bound of bf16's time over its own, quantising included
PREFERRED = ("rowwise-fast", "rowwise", "rowwise-p2", "tensorwise-fast", "tensorwise", "blockwise", "blockwise-both", "rowwise-grad", "tensorwise-grad")
THRESHOLDS_DB = {"forward": INNER_DB, "dgrad": GRADIENT_DB, "wgrad": GRADIENT_DB}
SUPPORT = 0.01 * FEWEST_ROWS * (1 + 1e-9)  # rows below a quantile that its lower bound takes; more than that by rounding


def plan(readings: Readings, *, speedups: Speedups | None = None, model: str = "") -> Plan:
    """For each site and pass the recipe with the largest speed-up among those that are safe; without `speedups`, the first of PREFERRED."""
    chosen: dict[str, dict[str, str]] = {}
    for name, reading in readings.sites.items():
        for which in reading.passes if not reading.site.head else ():
            for recipe in _candidates(name, which, speedups):
                if tail(predict(reading, which, gemm(recipe))).low >= THRESHOLDS_DB[which]:
                    chosen.setdefault(name, {})[which] = recipe
                    break
    rule = "safe by predicted rows, fastest by measured speed-up" if speedups is not None else "safe by predicted rows; nothing is known of time"
    return Plan(recipes=chosen, model=model, made_by=rule)


def judged(plan: Plan, readings: Readings, speedups: Speedups) -> list[Reading]:
    """What Dispatch reads, of the products of a plan that the readings tell of and that were timed."""
    found = []
    for site, passes in plan.recipes.items():
        reading = readings.sites.get(site)
        for which, recipe in passes.items() if reading is not None else ():
            if which in reading.passes and (site, which, recipe) in speedups:
                db = tail(predict(reading, which, gemm(recipe)))
                found.append(Reading(site=site, which=which, recipe=recipe, sqnr_low_db=db.low, sqnr_high_db=db.high, speedup_low=speedups[site, which, recipe]))
    return found


def speedups_from(sites: Iterable[Site], times: Iterable[Mapping[str, object]]) -> dict[tuple[str, str, str], float]:
    """`speedups` of a model's sites from the record "times" of studies.loka.measures.site_times, which has a line for each size, recipe and backend: the
    faster backend's. Sizes are those of a batch, so the sites must be traced with that batch; what was not timed is left out."""
    lines = list(times)
    found: dict[tuple[str, str, str], float] = {}
    for s in sites:
        for x in lines:
            if (x["batch"], x["m"], x["n"], x["k"]) == (s.batch, s.m, s.n, s.k) and x["which"] in s.passes:
                key = (s.name, x["which"], x["recipe"])
                found[key] = max(found.get(key, 0.0), math.exp(x["log_speedup_low"]))
    return found


def tail(prediction: Prediction) -> Interval:
    """The 1st percentile over rows in dB with its 95% bounds; the lowest quantile that fewer rows support; of a handful, all of them together."""
    q = max(0.01, SUPPORT / prediction.rows)
    if q <= 0.5:
        return prediction.quantile(q)
    together = min(-10.0 * math.log10(max(prediction.noise_share, 1e-300)), MAX_DB)
    return Interval(low=together, value=together, high=together, n=prediction.rows)


def _candidates(site: str, which: str, speedups: Speedups | None) -> list[str]:
    if speedups is None:
        return list(PREFERRED)
    timed = {recipe: low for (s, w, recipe), low in speedups.items() if (s, w) == (site, which) and low > 1.0 and gemm(recipe).is_fp8}
    return sorted(timed, key=timed.get, reverse=True)
