"""Contests: all variants of one comparison, timed interleaved in one process, with an A/A control beside them.

    from suite.timing import Variant, contest
    result = contest([Variant(name="a", calls=(f,)), Variant(name="b", calls=(g,))],
                     device="cpu", rounds=20, launches_per_round=30, warmup_s=0.5)
    print(result.median_s("a"), result.log_ratio("b", "a"), result.noise_floor)

A ratio is always read inside one contest. A claim needs the log ratios of at least five fresh processes
(`suite.stats.ratio_interval`): what one process measures twice is not two measurements.
Imports the standard library, numpy and (for CUDA only) torch. It judges nothing: that is `suite.stats`.
"""

_EXPORTS = {
    "ContestResult": "suite.timing._result",
    "Variant": "suite.timing._variant",
    "WrongOutput": "suite.timing._contest",
    "cache_bytes": "suite.timing._variant",
    "contest": "suite.timing._contest",
    "copy_bandwidth_gbps": "suite.timing._bandwidth",
    "copy_variant": "suite.timing._bandwidth",
    "rotations_needed": "suite.timing._variant",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
