"""Sources: searches as the driver sees them, one stream of plan entries each.

    sources = sources_for(study.searches(config), entry_of=..., find=..., storage_dir=...)
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
    """One search. `entry_of` keys a cell and finds its state; `find` gives the OK bundle of a point, if any."""

    def __init__(self, search, *, entry_of: Callable[[Cell], Entry], find: Callable[[str], Bundle | None], storage_dir: Path):
        from suite.search import SearchRun

        self._run = SearchRun(search, storage_dir)
        self._entry_of = entry_of
        self._run.recover(find)

    def new_entries(self) -> list[Entry]:
        """Cells that the sampler asks for now: none while as many as the parallelism are out."""
        return [self._entry_of(cell) for _, cell in self._run.next_cells()]

    def tell(self, point: str, bundle: Bundle) -> None:
        """A result came in; points of other cells are ignored."""
        self._run.tell(point, bundle)


def sources_for(searches: Sequence, *, entry_of, find, storage_dir: Path) -> tuple[SearchSource, ...]:
    return tuple(SearchSource(s, entry_of=entry_of, find=find, storage_dir=storage_dir) for s in searches)
