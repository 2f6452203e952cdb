"""Statistics of a tensor in one read: exponents, moments, amax, and per row its amax and sum of squares. They merge.

    s = statistics_ref(x_RC).merge(statistics_ref(y_RC))
    s.amax, s.zeros, s.exponents[3 - MIN_EXPONENT]     # how many numbers have 8 <= |x| < 16

The histogram has a bin for every exponent that float32 has, so what any scale and format would flush or round is read from one pass:
counts are exact integers, equal on every device and in every order. Sums leave out numbers that are not finite and count them apart.
Everything stays on the device of x; nothing here waits for a GPU.

`sample=n` reads every n-th row only. On a GPU the pass reads 2 B per element of a 16-bit x that it samples and writes 20 B per row; the
histogram's ballots and popcounts, about 70 instructions per element, bound it near a fifth of a copy's bandwidth (counted in what sm_90
gets, not yet measured): a probe takes it rarely.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.fp8.scaling import finite_abs

__all__ = ["EXPONENTS", "MIN_EXPONENT", "Statistics", "statistics", "statistics_ref"]

MIN_EXPONENT = -126  # bin i counts floor(log2|x|) = MIN_EXPONENT + i
EXPONENTS = 254  # -126 ... 127; float32's subnormal numbers are counted in bin 0
_CODES = 256  # of a biased exponent: 0 zero, 1 ... 254 the bins, 255 not finite
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 4096  # elements that a program holds at once: 16 a thread, so that 24 warps of an SM have the registers they need
_PROGRAMS = 1024  # at most: each adds its histogram to the tensor's once


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
    counts = torch.bincount((x.reshape(-1).view(torch.int32) >> 23) & 0xFF, minlength=_CODES)
    subnormal = counts[0] - (x == 0).sum()
    counts[0] -= subnormal
    counts[1] += subnormal
    x = torch.where(x.abs() < float("inf"), x, 0.0)
    row_amax = torch.nn.functional.pad(x.abs(), (0, 1)).amax(1)  # a row without numbers has amax 0
    return _statistics(counts, row_amax, x.sum(1, dtype=torch.float64), x.double().square().sum(1))


def _statistics(counts: torch.Tensor, row_amax: torch.Tensor, row_sum: torch.Tensor, row_sum_squares: torch.Tensor) -> Statistics:
    return Statistics(
        exponents=counts[1:-1], zeros=counts[0], nonfinite=counts[-1], sum=row_sum.sum(), sum_squares=row_sum_squares.sum(),
        amax=torch.nn.functional.pad(row_amax, (0, 1)).amax(), row_amax=row_amax, row_sum_squares=row_sum_squares,
    )  # fmt: skip


# ---- kernel --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _power(exponent):
    """2^exponent as float64, for exponents of normal numbers."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def statistics_kernel(x_ptr, count_ptr, amax_ptr, sum_ptr, squares_ptr, rows, C, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CODES: tl.constexpr):
    """One read of x [rows, C]: rows' amax, sum and sum of squares, written once; counts [CODES] by integer addition, free of order.

    Sums of a row are taken of x 2^-e with 2^e <= amax < 2^(e+1), which rounds nothing, so that no square overflows or vanishes in float32;
    pieces of COLUMNS are added in float64.
    """
    code = tl.arange(0, CODES)
    counts = tl.zeros((CODES,), tl.int32)
    zero = tl.zeros((), tl.int64)
    padding = zero  # elements outside of x were counted as zeros
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        row_amax, row_sum, row_squares = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
        for start in range(0, C, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            place = row.to(tl.int64)[:, None] * stride_row + column
            x = tl.load(x_ptr + place, mask=(row < rows)[:, None] & (column < C), other=0.0).to(tl.float32)
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            # zero keeps code 0 and subnormal numbers get 1, that of the smallest normal ones
            codes = tl.where(bits == 0, 0, tl.maximum(bits >> 23, 1))
            counts += tl.histogram(tl.reshape(codes, (ROWS * COLUMNS,), can_reorder=True), CODES)
            a = finite_abs(x)
            amax = tl.max(a, 1)
            biased = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 1), 253)
            x = tl.where(bits < 0x7F800000, x, 0.0) * ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]
            unit = _power(biased - 127)
            row_amax = tl.maximum(row_amax, amax)
            row_sum += tl.sum(x, 1).to(tl.float64) * unit
            row_squares += tl.sum(x * x, 1).to(tl.float64) * unit * unit
        padding += zero + tl.cdiv(C, COLUMNS) * COLUMNS * ROWS - (zero + tl.minimum(rows - tile * ROWS, ROWS)) * C
        tl.store(amax_ptr + row, row_amax, mask=row < rows)
        tl.store(sum_ptr + row, row_sum, mask=row < rows)
        tl.store(squares_ptr + row, row_squares, mask=row < rows)
    counts = counts.to(tl.int64) - tl.where(code == 0, padding, 0)
    tl.atomic_add(count_ptr + code, counts, mask=counts != 0, sem="relaxed")


@on_gpu("statistics")
def statistics(x_RC: torch.Tensor, *, sample: int = 1) -> Statistics:
    """`statistics_ref` on a GPU in one read of the sampled rows: counts and amax are equal, sums within float32's rounding inside a row.

    x [..., R, C] in bf16, fp16 or fp32; columns side by side are read in place, other layouts copied first. Raises ValueError for what is none.
    """
    x = _rows(x_RC, sample)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, c = x.shape
    counts = torch.zeros(_CODES, dtype=torch.int64, device=x.device)
    row_amax = torch.zeros(rows, dtype=torch.float32, device=x.device)
    row_sum, row_sum_squares = torch.zeros(2, rows, dtype=torch.float64, device=x.device)
    if x.numel():
        wide = min(triton.next_power_of_2(c), _TILE)
        tile = dict(ROWS=min(_TILE // wide, triton.next_power_of_2(rows)), COLUMNS=wide)
        programs = min(_PROGRAMS, triton.cdiv(rows, tile["ROWS"]))
        statistics_kernel[(programs,)](x, counts, row_amax, row_sum, row_sum_squares, rows, c, x.stride(0), **tile, CODES=_CODES, num_warps=8)
    return _statistics(counts, row_amax, row_sum, row_sum_squares)
