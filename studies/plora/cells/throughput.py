"""Cells of packs' times and memory: studies.plora.measures with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.declared import kept
from studies.plora.measures import memory as of_memory
from studies.plora.measures import saturation as of_saturation
from studies.plora.measures import step_times as of_steps
from studies.plora.measures import throughput

__all__ = ["ladder", "largest", "saturation", "step_times", "surface"]

CONDITIONS = ("log_control", "noise_floor")
PACKED = ("log_pack_speedup", "log_pack_cap", "tokens_per_s", "mfu_single", "mfu_pack", "mfu_max", "step_ms", "peak_gib")
ladder = kept(throughput.ladder, *PACKED, *CONDITIONS)
surface = kept(throughput.surface, *PACKED, *CONDITIONS)
saturation = kept(of_saturation.saturation, "log_saturation_share", "mfu_pack", "mfu_max", "step_ms", *CONDITIONS)
step_times = kept(of_steps.step_times, "noise_floor")
largest = kept(of_memory.largest, "largest_k_gap")
