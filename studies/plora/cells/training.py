"""Cells of real training: studies.plora.measures with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.declared import kept
from studies.plora.measures import grid as of_grid
from studies.plora.measures import makespan as of_makespan

__all__ = ["grid", "makespan_live", "pack_times", "same_adapters"]

grid = kept(of_grid.grid, "best_score", "device_s", "tokens_per_s", "diverged")
pack_times = kept(of_grid.pack_times)
makespan_live = kept(of_makespan.makespan, "makespan_s", "gpus", "tokens_per_s", "diverged", makespan_speedup="speedup", makespan_speedup_built="speedup_built")
same_adapters = kept(of_makespan.same_adapters, "equal_share")
