"""Claims about operators that slice their own result, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

Both ways to a sliced row run the same float operations, so even here they must agree in every bit.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.activations import swiglu  # noqa: E402
from kernels.exact.digests import digest  # noqa: E402
from kernels.exact.integer import linear_integer, prepare_integer  # noqa: E402
from kernels.exact.norm import add_rmsnorm, rmsnorm  # noqa: E402
from kernels.exact.philox import philox_bell  # noqa: E402
from kernels.exact.slices import Sliced, padded, slice_rows  # noqa: E402
from kernels.exact.sliced import add_rmsnorm_sliced, rmsnorm_sliced, swiglu_sliced  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [1, 70, 576, 1030]  # one element, less than a block, whole planes, two blocks of the norm


def rows(k: int, seed: int) -> torch.Tensor:
    """Ordinary, large, tiny, zero and non-finite ones."""
    x = philox_bell((6, k), seed, FP32)
    x[1] *= 2.0**40
    x[2] *= 2.0**-130
    x[3] = 0.0
    x[4, -1], x[5, 0] = float("nan"), float("inf")
    return x


def same(found: Sliced, y_MK: torch.Tensor) -> None:
    """`found` is what slicing makes of y."""
    planes, ex = slice_rows(y_MK)
    assert found.shape == tuple(y_MK.shape) and found.planes.shape == (3, len(y_MK), padded(y_MK.shape[1]))
    assert found.ex_R.tolist() == ex.tolist()
    assert digest(found.planes) == digest(planes)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("k", LENGTHS)
def test_a_norm_that_slices_gives_the_digits_of_the_norm(k: int, dtype: torch.dtype) -> None:
    x, delta, w = rows(k, 1), rows(k, 2) * 2.0**-3, philox_bell((k,), 3, BF16)
    for eps in (0.0, 1e-5):  # a row of zeros without eps is 0 times infinity
        same(rmsnorm_sliced(x, w, eps=eps, out_dtype=dtype), rmsnorm(x, w, eps=eps, out_dtype=dtype))
        (h, y), (h_sliced, y_sliced) = add_rmsnorm(x, delta, w, eps, dtype), add_rmsnorm_sliced(x, delta, w, eps, dtype)
        assert digest(h) == digest(h_sliced)
        same(y_sliced, y)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("k", [*LENGTHS, 5000])
def test_a_swiglu_that_slices_gives_the_digits_of_swiglu(k: int, dtype: torch.dtype) -> None:
    both = torch.cat([rows(k, 4), rows(k, 5)], dim=1)
    for gate, up in (both.chunk(2, dim=1), (both[:, :k].contiguous(), both[:, k:].contiguous())):
        same(swiglu_sliced(gate, up, out_dtype=dtype), swiglu(gate, up, out_dtype=dtype))


def test_rows_too_long_for_one_program_are_sliced_by_a_second_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.exact import sliced

    monkeypatch.setattr(sliced, "_LONGEST_GATED", 64)
    gate, up = rows(70, 6), rows(70, 7)
    same(swiglu_sliced(gate, up, out_dtype=BF16), swiglu(gate, up, out_dtype=BF16))


def test_no_rows_are_sliced_to_none() -> None:
    x, w = torch.zeros(0, 70), torch.ones(70)
    assert rmsnorm_sliced(x, w).shape == swiglu_sliced(x, x).shape == (0, 70)


@pytest.mark.parametrize("m", [3, 20])
def test_linears_read_one_sliced_operand_as_they_read_the_rows(m: int) -> None:
    """By the decode and by the prefill kernel, with parts of K and without."""
    x, w_K = philox_bell((m, 130), 8, FP32), philox_bell((130,), 9, BF16)
    y, y_sliced = rmsnorm(x, w_K, out_dtype=BF16), rmsnorm_sliced(x, w_K, out_dtype=BF16)
    for n in (5, 33):
        weight = prepare_integer(philox_bell((n, 130), 10 + n, BF16))
        assert digest(linear_integer(y_sliced, weight)) == digest(linear_integer(y, weight))
