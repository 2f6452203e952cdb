"""Cells of searches: studies.plora.measures with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.cells.threads import on_one_thread
from studies.plora.declared import kept
from studies.plora.measures import pruners as of_pruners
from studies.plora.measures import published
from studies.plora.measures import search

__all__ = ["live", "pruners", "replayed", "replayed_published"]

FOUND = ("best_score", "test_score", "pruned", "trained")
live = on_one_thread(kept(search.live, *FOUND, device_s="search_s"))
replayed = kept(search.replayed, *FOUND, device_s="search_s")
replayed_published = kept(published.replayed_published, *FOUND, device_s="search_s")
pruners = kept(of_pruners.pruners)
