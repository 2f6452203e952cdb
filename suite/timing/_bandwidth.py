"""The memory ceiling: a plain copy as a variant, counted read plus written.

    print(copy_bandwidth_gbps("cuda", bytes_each=256 * 2**20))

A data sheet's bandwidth is not reached by any program; this one is. Copies within one device only.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from suite.timing._contest import contest
from suite.timing._variant import Variant, rotations_needed

__all__ = ["copy_bandwidth_gbps", "copy_variant"]

_ITEM_BYTES = 4


def copy_variant(device: str, bytes_each: int, *, name: str = "copy") -> Variant:
    """A variant that copies `bytes_each` (a multiple of 4) of counting int32 per call, rotated beyond the cache.

    Raises ValueError for a size that is not a positive multiple of 4.
    """
    if bytes_each < _ITEM_BYTES or bytes_each % _ITEM_BYTES:
        raise ValueError(f"a copy needs a positive multiple of {_ITEM_BYTES} bytes, got {bytes_each=}; round it up")
    num_items = bytes_each // _ITEM_BYTES
    num_sets = rotations_needed(2 * bytes_each, device=device)
    if str(device) == "cpu":
        pairs = [(np.arange(num_items, dtype=np.int32), np.zeros(num_items, dtype=np.int32)) for _ in range(num_sets)]
        calls = tuple(partial(np.copyto, target, source) for source, target in pairs)
        fill, equal = np.ndarray.fill, np.array_equal
    else:
        import torch

        sources = [torch.arange(num_items, dtype=torch.int32, device=device) for _ in range(num_sets)]
        pairs = [(source, torch.zeros_like(source)) for source in sources]
        calls = tuple(partial(target.copy_, source) for source, target in pairs)
        fill, equal = torch.Tensor.fill_, torch.equal

    def poison() -> None:
        for _, target in pairs:
            fill(target, -1)

    def check() -> None:
        for place, (source, target) in enumerate(pairs):
            assert equal(source, target), f"copy {place} of {num_sets} differs from its source"

    return Variant(name=name, calls=calls, check=check, poison=poison, bytes_moved=2 * bytes_each)


def copy_bandwidth_gbps(
    device: str, bytes_each: int, *, rounds: int = 5, launches_per_round: int = 10, warmup_s: float = 1.0
) -> float:
    """GB/s (1e9 bytes, read plus written) of a copy on `device`, median over rounds of a contest of its own.

    As a ceiling for a ratio, enter `copy_variant` into the same contest instead.
    """
    variant = copy_variant(device, bytes_each)
    result = contest([variant], device=device, rounds=rounds, launches_per_round=launches_per_round, warmup_s=warmup_s)
    return result.gbps(variant.name)
