"""Findings of the claims about live makespans and searches.

    makespan_live(view, gpus=1)     # Finding | None
    makespan_pruned(view)           # pairs of replayed searches, equal quality asked first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from studies.plora.presets import PRUNED_TRIALS
from studies.plora.report.findings import by_process, missing, ratio
from suite.claims import Finding, Row, View
from suite.stats import Equivalence, tost

PACKED, ALONE = "packed+prune+refill", "sequential+prune"
MARGIN = 0.01  # of accuracy: one point


def makespan_live(view: View, gpus: int) -> Finding | None:
    """Wall clock of one captured adapter after another over that of packs with refill, both less what building and capturing packs took."""
    rows = [r for r in view.rows(measure="makespan_live") if r.metrics.get("gpus") == gpus]
    answered = {r.point for r in view.rows_}
    absent = sum(c.measure.endswith(":makespan_live") and c.needs.ranks == gpus and c.point not in answered for c in view.plan_cells)
    return ratio(rows, by_process(rows, lambda r: math.log(r.metrics["makespan_speedup"])), absent, f"{_same(view)}; finished scores, packed less alone: {_difference(rows)}")


def _same(view: View) -> str:
    shares = [r.metrics["equal_share"] for r in view.rows(measure="same_adapters") if "equal_share" in r.metrics]
    return f"{min(shares):.0%} of the adapters trained again in deterministic mode have the same bits packed and alone" if shares else "sameness of bits was not tried"


def _difference(rows: Sequence[Row]) -> str:
    found = [m for r in rows if "more.json" in r.files and "score_difference" in (m := r.record("more"))]
    return f"{found[0]['score_difference']:+.4f} ({found[0]['score_difference_low']:+.4f} to {found[0]['score_difference_high']:+.4f})" if found else "not compared"


def pairs(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """(packed, alone) of a metric by seed, of seeds that both have."""
    of = {arm: {r.seed: r.metrics[name] for r in rows if r.params["arm"] == arm and name in r.metrics} for arm in (PACKED, ALONE)}
    return [(of[PACKED][seed], of[ALONE][seed]) for seed in sorted(of[PACKED].keys() & of[ALONE].keys())]


def makespan_pruned(view: View) -> Finding | None:
    """Device seconds of a search of one adapter at a time over those of the packed one, same sampler, pruner and seed; undecided until quality is equal."""
    where = {"sampler": "tpe", "trials": PRUNED_TRIALS}
    rows = [r for r in view.rows(measure="replayed", where=where) if r.params["arm"] in (PACKED, ALONE)]
    absent = missing(view, "replayed", where | {"arm": PACKED}) + missing(view, "replayed", where | {"arm": ALONE})
    found = ratio(rows, [math.log(alone / packed) for packed, alone in pairs(rows, "device_s")], absent)
    differences = [packed - alone for packed, alone in pairs(rows, "test_score")]
    if found is None or len(differences) < 2:
        return None
    quality = tost(differences, MARGIN)
    said = f"test score, packed less alone {sum(differences) / len(differences):+.4f}, {quality.verdict.value} to within {MARGIN:g}"
    return replace(found, missing=absent + (quality.verdict is not Equivalence.EQUIVALENT), note=said)
