"""Sources: searches as the driver sees them, one stream of plan entries each.

    sources = sources_for(study.searches(config), entries_of=..., storage_dir=...)
    run_plan(plan, sources=sources, ...)

A source hands out at most its search's parallelism and is told every result once. What a trial means is
the search's business (suite.search); what an entry means is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from suite.bundle import Bundle
from suite.cell import Cell
from suite.plan import Entry


class SearchSource:
    """One search. `entries_of(cell)` gives the cell's plan entries: its inputs', then its own, with today's keys.

    Trials of other code are another search: the key of the search's corner cell is its condition.
    """

    def __init__(self, search, *, entries_of: Callable[[Cell], Sequence[Entry]], storage_dir: Path):
        from suite.search import SearchRun

        self._entries_of, self._search = entries_of, search
        self._run = SearchRun(search, storage_dir, conditions=entries_of(search.make_cell(search.corner()))[-1].key)
        answers = {t.point: self._own_entry(t.params) for t in self._run.trials() if t.point}
        self._run.recover(lambda point: answers[point].bundle if point in answers else None)
        self._known = [e for e in answers.values() if e.bundle is not None]  # earlier trials are part of the plan

    def _own_entry(self, params: dict) -> Entry:
        return self._entries_of(self._search.make_cell(params))[-1]

    def new_entries(self) -> list[Entry]:
        """Cells that the sampler asks for now: none while as many as the parallelism are out."""
        out, self._known = self._known, []
        while True:  # an answered proposal makes room for the next, also where nothing runs
            answered = False
            for _, cell in self._run.next_cells():
                entries = self._entries_of(cell)
                out.extend(entries)
                if entries[-1].bundle is not None:
                    answered = bool(self._run.tell(cell.point, entries[-1].bundle)) or answered
            if not answered:
                return out

    def tell(self, point: str, bundle: Bundle) -> None:
        """A result came in; points of other cells are ignored."""
        self._run.tell(point, bundle)

    def close(self) -> None:
        self._run.close()


def sources_for(searches: Sequence, *, entries_of: Callable[[Cell], Sequence[Entry]], storage_dir: Path) -> tuple[SearchSource, ...]:
    return tuple(SearchSource(s, entries_of=entries_of, storage_dir=storage_dir) for s in searches)
