"""What a cell reports to the tracker: the metrics that the study declares, at most forty; the other numbers stay in its bundle, in the record "more".

    fit = kept(planning.fit, "cost_model_mape", planner_regret="regret")      # same arguments, same result but for the metrics

A metric is a column of the tracker, so only numbers that claims and tables of many runs read are one. A name on the left of "=" is the declared one
of the measure's own on the right. Numbers that are not finite are none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from suite.measure import Result

__all__ = ["kept"]


def kept(measure: Callable[..., Result], *names: str, **renamed: str) -> Callable[..., Result]:
    """`measure` with only these metrics, where they are finite."""
    own = {name: name for name in names} | {theirs: ours for ours, theirs in renamed.items()}

    @functools.wraps(measure)
    def cell(*args, **params) -> Result:
        result = measure(*args, **params)
        metrics = {own[name]: value for name, value in result.metrics.items() if name in own and math.isfinite(value)}
        more = {name: value if math.isfinite(value) else None for name, value in result.metrics.items() if own.get(name) not in metrics}
        return replace(result, metrics=metrics, records={**result.records, **({"more": more} if more else {})})

    cell.declared = tuple(own.values())
    return cell
