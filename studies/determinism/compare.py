"""Bitwise comparison: equal, how many elements differ, and by how many units in the last place.

    compare(y, expected)        # Difference(equal=False, differing=12, max_ulp=3, elements=4096)

ULP distance is counted on the ordered integers behind the floats, so it is exact and symmetric;
NaN equals NaN whatever its payload, +0 and -0 differ (by one step).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, kw_only=True)
class Difference:
    equal: bool
    differing: int
    max_ulp: int
    elements: int


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Floats as int64 in their order on the number line: neighbours differ by 1, -0 is one below +0."""
    bits = x.contiguous().view(_BITS[x.dtype]).to(torch.int64)
    low = torch.iinfo(_BITS[x.dtype]).min
    return torch.where(bits < 0, low - bits - 1, bits)


def compare(y: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Shapes and dtypes must match; both on the CPU."""
    if y.shape != expected.shape or y.dtype != expected.dtype:
        raise ValueError(f"results to compare have one shape and dtype, got {tuple(y.shape)} {y.dtype} and {tuple(expected.shape)} {expected.dtype}")
    if y.numel() == 0:
        return Difference(equal=True, differing=0, max_ulp=0, elements=0)
    both_nan = torch.isnan(y) & torch.isnan(expected)
    distance = (ordered(y) - ordered(expected)).abs().masked_fill(both_nan, 0)
    one_nan = torch.isnan(y) ^ torch.isnan(expected)
    distance = distance.masked_fill(one_nan, 2**31)
    differing = int((distance != 0).sum())
    return Difference(equal=differing == 0, differing=differing, max_ulp=int(distance.max()), elements=y.numel())
