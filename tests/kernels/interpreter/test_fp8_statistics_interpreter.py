"""Claim: the statistics kernel counts what the reference counts, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

Counts and amax are compared exactly. A row's sums are float32 sums of up to 4096 terms at a time, in any order: n terms are within n 2^-24 of the
sum of their magnitudes, squares once more by their own rounding; float64 adds the pieces.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.fp8 import statistics as module  # noqa: E402
from kernels.fp8.statistics import Statistics, statistics, statistics_ref  # noqa: E402


def rounding(terms: int) -> float:
    return (min(terms, 4096) + 1) * 2.0**-24


def agree(got: Statistics, want: Statistics, x: torch.Tensor) -> None:
    for name in ("exponents", "zeros", "nonfinite", "amax", "row_amax"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    bound = rounding(x.shape[-1])
    assert ((got.row_sum_squares - want.row_sum_squares).abs() <= bound * want.row_sum_squares).all()
    assert (got.sum_squares - want.sum_squares).abs() <= bound * want.sum_squares
    finite = torch.where(x.float().abs() < float("inf"), x.double(), 0.0)
    assert (got.sum - want.sum).abs() <= bound * finite.abs().sum()


# ragged tiles of many short rows; a batch; a row in pieces; one number
@pytest.mark.parametrize("shape, dtype", [((700, 13), torch.bfloat16), ((3, 5, 130), torch.float16), ((3, 9000), torch.float32), ((1, 1), torch.float32)])
def test_counts_are_equal_and_sums_near(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = philox_bell(shape, 1, scale_log2=-3).to(dtype)
    agree(statistics(x), statistics_ref(x), x)


# the interpreter makes zeros of bf16's subnormal numbers: rows of bf16 begin where the smallest number of the grid, 2^-17, is normal
@pytest.mark.parametrize("dtype, smallest", [(torch.float32, -140), (torch.bfloat16, -109)])
def test_rows_of_any_size_are_counted_and_no_square_overflows_or_vanishes(dtype: torch.dtype, smallest: int) -> None:
    """One size a row, up to 2^127, whose squares float32 could not hold."""
    x = (philox_bell((60, 40), 2) / 2).clamp(-0.99, 0.99).double() * torch.exp2(torch.linspace(smallest, 127, 60).round().double())[:, None]
    x = x.float().to(dtype)
    agree(statistics(x), statistics_ref(x), x)


def test_any_bits_are_counted() -> None:
    bits = torch.from_numpy(philox_integers(2000, 3).astype("int64").astype("int32").reshape(20, 100)).view(torch.float32)
    bits.view(-1)[:5] = torch.tensor([0.0, -0.0, 2.0**-149, float("nan"), -float("inf")])
    got, want = statistics(bits), statistics_ref(bits)
    for name in ("exponents", "zeros", "nonfinite", "row_amax"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert want.nonfinite > 2 and want.zeros == 2 and want.exponents[0] > 0


def test_programs_that_take_several_tiles_and_samples_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", 2)
    x = philox_bell((2, 1000, 20), 4)
    for part, sample in ((x, 1), (x, 3), (x[..., 1:], 1), (x[:, ::2], 1), (x.mT, 1), (x[:0], 1)):
        agree(statistics(part, sample=sample), statistics_ref(part, sample=sample), part)
