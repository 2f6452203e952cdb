"""Cells of real training: studies.plora.measures with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.cells.threads import on_one_thread
from studies.plora.declared import kept
from studies.plora.measures import grid as of_grid
from studies.plora.measures import makespan as of_makespan
from studies.plora.measures import quality as of_quality

__all__ = ["against_peft", "grid", "makespan_live", "pack_times", "quality", "same_adapters", "winner"]

grid = on_one_thread(kept(of_grid.grid, "best_score", "device_s", "tokens_per_s"))
pack_times = on_one_thread(kept(of_grid.pack_times))
makespan_live = on_one_thread(kept(of_makespan.makespan, "makespan_s", "gpus", "tokens_per_s", makespan_speedup="speedup"))
same_adapters = on_one_thread(kept(of_makespan.same_adapters, "equal_share"))
quality = on_one_thread(kept(of_quality.quality, test_score="score"))
winner = on_one_thread(kept(of_quality.winner, test_score="alone_score"))
against_peft = on_one_thread(kept(of_quality.against_peft, test_score="score"))
