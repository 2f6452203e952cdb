"""What a person sees while a pack is searched: every slot with its adapter, loss and score, what was pruned and refilled, the best so far.

    with Display(axes=("rank", "learning_rate", "batch")) as display:
        drive(..., listen=display.show)

On a terminal rich draws a live table; elsewhere, and without rich, a line is printed when a trial finishes or is pruned. `summary_of` and `table_of`
are functions of a View alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from studies.plora.search.driver import View

try:
    import rich.console
    import rich.live
    import rich.table
except ImportError:  # a GPU host may have torch, triton and numpy only
    rich = None

__all__ = ["AXES", "Display", "summary_of", "table_of"]

AXES = ("rank", "alpha", "learning_rate", "batch")
BAR = 10  # characters of a bar


def summary_of(view: View) -> str:
    """One line: trials, device seconds, the best."""
    best = "none yet" if view.best is None else f"{view.best[1]:.4f} (trial {view.best[0]})"
    again = ", repeating what a kill took" if view.repeating else ""
    return (f"{view.finished} finished, {view.pruned} pruned, {len(view.live)} of {view.slots} slots live, {view.refilled} refilled, "
            f"{view.trials} of {view.budget} asked, {view.seconds:.1f} device-s, best {best}{again}")  # fmt: skip


def rows_of(view: View, axes: Sequence[str] = AXES) -> list[tuple[str, ...]]:
    """A row a slot: slot, trial, axes, share of the budget, loss of the last batch, newest score."""
    rows = []
    for slot in range(view.slots):
        if slot not in view.live:
            rows.append((str(slot), "-", *("" for _ in axes), "free", "", ""))
            continue
        number, progress = view.live[slot]
        share = min(1.0, progress.tokens_seen / progress.adapter.budget_tokens)
        done = round(share * BAR)
        rows.append((str(slot), str(number), *(f"{getattr(progress.adapter, axis):.3g}" for axis in axes), f"{'█' * done}{'░' * (BAR - done)} {share:4.0%}",
                     _number(progress.loss), _number(view.scores.get(number, math.nan))))  # fmt: skip
    return rows


def _number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.4f}"


def table_of(view: View, axes: Sequence[str] = AXES) -> Any:
    """The same as a rich table."""
    table = rich.table.Table(title="live adapters", caption=summary_of(view), caption_justify="left")
    for name in ("slot", "trial", *axes, "budget", "loss", "score"):
        table.add_column(name.replace("_", " "), justify="left" if name == "budget" else "right", no_wrap=True)
    for row in rows_of(view, axes):
        table.add_row(*row)
    return table


class Display:
    """A listener of `drive`, and a context manager so that the live table is always taken down."""

    def __init__(self, *, axes: Sequence[str] = AXES, stream: TextIO | None = None):
        self.axes, self.stream = tuple(axes), stream or sys.stdout
        self._said = (0, 0)
        self.live = None
        if rich is not None and self.stream.isatty():
            self.live = rich.live.Live(console=rich.console.Console(file=self.stream), refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, view: View) -> None:
        if self.live:
            self.live.update(table_of(view, self.axes))
        elif (now := (view.finished, view.pruned)) != self._said:
            print(summary_of(view), file=self.stream, flush=True)
            self._said = now
