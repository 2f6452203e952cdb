"""Cells on a CPU train small models: on one thread, as products of a few rows wait longer for a second thread than they take.

    grid = on_one_thread(kept(of_grid.grid, "best_score"))      # on a GPU it changes nothing

Threads change the bits of large sums; with one they are the same on every machine of one kind, however many cores it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from suite.measure import Context, Result

__all__ = ["on_one_thread"]


def on_one_thread(measure: Callable[..., Result]) -> Callable[..., Result]:
    @functools.wraps(measure)
    def cell(ctx: Context, **params) -> Result:
        before = torch.get_num_threads()
        if ctx.device == "cpu":
            torch.set_num_threads(1)
        try:
            return measure(ctx, **params)
        finally:
            torch.set_num_threads(before)

    return cell
