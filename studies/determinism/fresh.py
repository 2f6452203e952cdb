"""Which of several rows count: those of today's code, where there are any, and of these the ones of the machine at hand first.

    fresh(rows)             # without the stale ones, unless all are stale: numbers of two codes are never pooled
    preferred(rows)         # in the order in which a reference is chosen
"""

from __future__ import annotations

from collections.abc import Iterable

from suite.claims import Row


def fresh(rows: Iterable[Row]) -> list[Row]:
    """The rows behind one number: stale ones are left out where any is fresh."""
    rows = list(rows)
    return [r for r in rows if not r.stale] or rows


def preferred(rows: Iterable[Row]) -> list[Row]:
    """Fresh before stale, this machine's before others'; else as they came."""
    return sorted(rows, key=lambda r: (r.stale, r.origin != "here"))
