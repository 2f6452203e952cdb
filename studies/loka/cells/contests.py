"""Cells of single products' times: studies.loka.measures.contests with the metrics that the study declares (studies.loka.declared)."""

from studies.loka.declared import kept
from studies.loka.measures import contests

__all__ = ["crossover", "fused_quantise"]

CONDITIONS = ("log_control", "noise_floor")
WORKS = tuple(f"log_speedup_{work}" for work in ("whole", "product", "frozen", "fused"))
crossover = kept(contests.crossover, "bf16_us", *WORKS, *CONDITIONS)
fused_quantise = kept(contests.fused_quantise, "fused_us", "log_bandwidth_share", "log_speedup_over_compiled", "log_speedup_over_separate", *CONDITIONS)
