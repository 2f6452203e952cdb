"""Claims about sliced operands on the CPU: what they are by definition, and what is refused."""

import pytest
import torch

from kernels.exact.activations import swiglu_ref
from kernels.exact.integer import linear_integer, prepare_integer
from kernels.exact.norm import add_rmsnorm_ref, rmsnorm_ref
from kernels.exact.philox import philox_bell
from kernels.exact.sliced import add_rmsnorm_sliced_ref, rmsnorm_sliced_ref, swiglu_sliced, swiglu_sliced_ref
from kernels.exact.slices import EX_NONFINITE, EX_ZERO, Sliced, sliced_ref

BF16, FP32 = torch.bfloat16, torch.float32
WEIGHT_DIGITS = torch.tensor([65536, 256, 1])[:, None, None]


def value(x: Sliced) -> torch.Tensor:
    """The rows that the digits stand for, in float64."""
    q_RK = (x.planes.int() * WEIGHT_DIGITS).sum(0)[:, : x.k]
    return torch.ldexp(q_RK.double(), (x.ex_R - 23)[:, None])


def same(found: Sliced, y_MK: torch.Tensor) -> None:
    want = sliced_ref(y_MK)
    assert torch.equal(found.planes, want.planes) and torch.equal(found.ex_R, want.ex_R) and found.k == want.k


@pytest.mark.parametrize("k", [1, 64, 70])
def test_sliced_rows_of_close_16_bit_numbers_are_those_numbers(k: int) -> None:
    """bf16 within 2^-16 of the row's maximum is exact (slices.py); columns from k on are zero."""
    x = philox_bell((5, k), 1, BF16)
    x = torch.where(x.abs() < 2.0**-10, 0.5, x).to(BF16)
    found = sliced_ref(x)
    assert found.shape == (5, k) and found.planes.shape[2] == -(-k // 64) * 64 and not found.planes[:, :, k:].any()
    assert torch.equal(value(found), x.double())


def test_rows_of_zeros_and_of_nan_are_marked() -> None:
    x = torch.zeros(3, 8)
    x[1, 3], x[2, 0] = float("nan"), -float("inf")
    found = sliced_ref(x)
    assert found.ex_R.tolist() == [EX_ZERO, EX_NONFINITE, EX_NONFINITE] and not found.planes.any()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_an_operator_that_slices_slices_the_value_that_it_would_return(dtype: torch.dtype) -> None:
    x, delta, w_K = philox_bell((4, 300), 2), philox_bell((4, 300), 3), philox_bell((300,), 4, BF16)
    same(rmsnorm_sliced_ref(x, w_K, out_dtype=dtype), rmsnorm_ref(x, w_K, out_dtype=dtype))
    same(swiglu_sliced_ref(x, delta, out_dtype=dtype), swiglu_ref(x, delta, out_dtype=dtype))
    (h, y), (h_new, found) = add_rmsnorm_ref(x, delta, w_K, 1e-6, dtype), add_rmsnorm_sliced_ref(x, delta, w_K, 1e-6, dtype)
    assert torch.equal(h, h_new)
    same(found, y)


def test_a_linear_refuses_an_operand_of_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.device._launches_nothing", lambda: True)  # so the operands stay on the CPU
    with pytest.raises(ValueError, match="need sliced rows with K = 64"):
        linear_integer(sliced_ref(torch.ones(2, 70)), prepare_integer(torch.ones(3, 64)))
    with pytest.raises(ValueError, match="are a matrix"):
        swiglu_sliced(torch.ones(70), torch.ones(70))
