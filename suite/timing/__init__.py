"""Contests: all variants of one comparison, timed interleaved in one process, with an A/A control beside them.

    from suite.timing import Variant, contest
    result = contest([Variant(name="a", calls=(f,)), Variant(name="b", calls=(g,))],
                     device="cpu", rounds=20, launches_per_round=30, warmup_s=0.5)
    print(result.median_s("a"), result.log_ratio("b", "a"), result.noise_floor)

A ratio is always read inside one contest. A claim needs the log ratios of at least five fresh processes
(`suite.stats.ratio_interval`): what one process measures twice is not two measurements.
Imports the standard library, numpy and (for CUDA only) torch. It judges nothing: that is `suite.stats`.
"""

from suite.timing._bandwidth import copy_bandwidth_gbps, copy_variant
from suite.timing._contest import WrongOutput, contest
from suite.timing._result import ContestResult
from suite.timing._variant import Variant, cache_bytes, rotations_needed

__all__ = [
    "ContestResult",
    "Variant",
    "WrongOutput",
    "cache_bytes",
    "contest",
    "copy_bandwidth_gbps",
    "copy_variant",
    "rotations_needed",
]
