"""What a cell reports to the tracker: the metrics that the study declares, at most forty; the other numbers stay in its bundle, in the record "more".

    flips = kept(pricing_cells.flips, "rank_correlation", "slope", "points")        # same arguments, same result but for the metrics

A metric is a column of the tracker, so only numbers that claims and tables of many runs read are one. Numbers that are not finite are none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from suite.measure import Result

__all__ = ["kept"]


def kept(measure: Callable[..., Result], *names: str) -> Callable[..., Result]:
    """`measure` with only these metrics, where they are finite."""

    @functools.wraps(measure)
    def cell(*args, **params) -> Result:
        result = measure(*args, **params)
        metrics = {name: value for name, value in result.metrics.items() if name in names and math.isfinite(value)}
        more = {name: value if math.isfinite(value) else None for name, value in result.metrics.items() if name not in metrics}
        return replace(result, metrics=metrics, records={**result.records, **({"more": more} if more else {})})

    return cell
