"""Statistics of a tensor in one read: exponents, moments, amax, and per row its amax and sum of squares. They merge.

    s = statistics_ref(x_RC).merge(statistics_ref(y_RC))
    s.amax, s.zeros, s.exponents[126 + 3]              # how many numbers have 8 <= |x| < 16

The histogram has a bin for every exponent that float32 has, so what any scale and format would flush or round is read from one pass:
counts are exact integers, equal on every device and in every order. Sums leave out numbers that are not finite and count them apart.
Everything stays on the device of x; nothing here waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["EXPONENTS", "MIN_EXPONENT", "Statistics", "statistics_ref"]

MIN_EXPONENT = -126  # bin i counts floor(log2|x|) = MIN_EXPONENT + i
EXPONENTS = 254  # -126 ... 127; float32's subnormal numbers are counted in bin 0
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Statistics:
    """What one pass over x [..., R, C] keeps. Rows are numbered through all leading axes; merging appends the other's rows."""

    exponents: torch.Tensor  # int64 [EXPONENTS], of finite numbers that are not zero
    zeros: torch.Tensor  # int64 []
    nonfinite: torch.Tensor  # int64 [], NaN and infinities
    sum: torch.Tensor  # float64 [], of finite numbers, as are all below
    sum_squares: torch.Tensor  # float64 []
    amax: torch.Tensor  # float32 [], 0 where nothing is finite
    row_amax: torch.Tensor  # float32 [rows]
    row_sum_squares: torch.Tensor  # float64 [rows]

    @property
    def count(self) -> torch.Tensor:
        """Numbers read, int64 []."""
        return self.exponents.sum() + self.zeros + self.nonfinite

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both parts. Associative: counts, amax and rows exactly, the two sums to float64's rounding."""
        both = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        combine = {"amax": torch.maximum, "row_amax": _append, "row_sum_squares": _append}
        return Statistics(**{name: combine.get(name, torch.add)(*pair) for name, pair in both.items()})

    def cpu(self) -> Statistics:
        return Statistics(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})


def _append(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b])


def _rows(x_RC: torch.Tensor, sample: int) -> torch.Tensor:
    if x_RC.ndim < 2 or x_RC.dtype not in _FLOATS:
        raise ValueError(f"statistics are of [..., R, C] in bfloat16, float16 or float32, got {tuple(x_RC.shape)=} {x_RC.dtype}; convert it first")
    if sample < 1:
        raise ValueError(f"every sample-th row is read, sample >= 1, got {sample=}; use 1 for all rows")
    rows = x_RC.shape[:-1].numel()
    return x_RC.detach().reshape(rows, x_RC.shape[-1])[::sample]


def statistics_ref(x_RC: torch.Tensor, *, sample: int = 1) -> Statistics:
    """Statistics of rows 0, sample, 2 sample, ... of x [..., R, C] (bf16, fp16, fp32), sums in float64."""
    x = _rows(x_RC, sample).float()
    bins = torch.bincount((x.reshape(-1).view(torch.int32) >> 23) & 0xFF, minlength=256)  # the biased exponent; 255: not finite
    zeros = (x == 0).sum()
    x = torch.where(x.abs() < float("inf"), x, 0.0)
    exponents = bins[1:255].clone()
    exponents[0] += bins[0] - zeros
    row_sum_squares = x.double().square().sum(1)
    row_amax = torch.nn.functional.pad(x.abs(), (0, 1)).amax(1)  # a row without numbers has amax 0
    return Statistics(
        exponents=exponents, zeros=zeros, nonfinite=bins[255], sum=x.sum(dtype=torch.float64), sum_squares=row_sum_squares.sum(),
        amax=torch.nn.functional.pad(row_amax, (0, 1)).amax(), row_amax=row_amax, row_sum_squares=row_sum_squares,
    )  # fmt: skip
