"""What enters a contest: a variant, and how many input sets it must rotate through.

    sets = rotations_needed(bytes_per_set=x.nbytes + y.nbytes, device="cuda")
    Variant(name="fused", calls=tuple(partial(fused, x, out=y) for x, y in pairs), check=check, poison=poison)

It runs nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CACHE_MULTIPLE", "Variant", "cache_bytes", "rotations_needed"]

CACHE_MULTIPLE = 3  # rotated inputs exceed the last-level cache this many times, so a set is evicted before it returns
_UNKNOWN_CPU_CACHE_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One program of a comparison.

    calls: zero-argument callables, one per rotated input set; each writes into outputs allocated beforehand (a graph
        replay computes into the buffers that it was captured with, so `check` must look at those).
    check: raises AssertionError where the outputs are wrong. poison: overwrites all that `check` reads with NaN or
        garbage; it is called before a checked pass. Both or neither.
    bytes_moved, flops: per call, for `ContestResult.gbps` and `.tflops`; bytes are counted read plus written.

    Raises ValueError for an empty name, no calls, a check without poison (or the reverse), or a count that is not positive.
    """

    name: str
    calls: tuple[Callable[[], object], ...]
    check: Callable[[], object] | None = None
    poison: Callable[[], object] | None = None
    bytes_moved: int | None = None
    flops: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a variant needs a name that is a non-empty string, got {self.name=}; name it")
        if not isinstance(self.calls, tuple) or not self.calls or not all(map(callable, self.calls)):
            raise ValueError(
                f"variant {self.name!r} needs a non-empty tuple of callables, got {self.calls=}; give one per rotated input set"
            )
        if (self.check is None) != (self.poison is None):
            raise ValueError(
                f"variant {self.name!r} needs check and poison together, got {self.check=} and {self.poison=}; "
                "a check on outputs that were not poisoned passes on stale results"
            )
        for field in ("bytes_moved", "flops"):
            count = getattr(self, field)
            if count is not None and not count > 0:
                raise ValueError(f"variant {self.name!r} needs a positive {field} per call, got {count!r}; leave it out where unknown")


def cache_bytes(device: str) -> int:
    """Size in bytes of the last-level cache: a CUDA device's L2, a CPU's L3 (32 MiB where the system does not tell)."""
    if str(device).startswith("cuda"):
        import torch

        index = torch.device(device).index
        return int(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).L2_cache_size)
    told = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return told if told > 0 else _UNKNOWN_CPU_CACHE_BYTES


def rotations_needed(bytes_per_set: int, *, device: str) -> int:
    """Number of input sets (at least 2) that together exceed three times the last-level cache of `device`.

    Raises ValueError where `bytes_per_set` (inputs and outputs that one call touches) is not positive.
    """
    if not bytes_per_set > 0:
        raise ValueError(f"an input set needs a positive size, got {bytes_per_set=}; count inputs and outputs of one call")
    return max(2, math.floor(CACHE_MULTIPLE * cache_bytes(device) / bytes_per_set) + 1)
