"""Claims: the reference is the product rounded once, tiles follow from the weight alone, and what does not fit is refused.

The kernels' own claims (rows keep their bits in any batch) are in test_lora_step_gpu.py, their logic in the interpreter's tests.
"""

import inspect
from fractions import Fraction

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.lora.fixed_gemm import fixed_dgrad, fixed_dgrad_ref, fixed_linear, fixed_linear_ref, tiles_of


def exact(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float64 of the exact rational a b^T + bias."""
    rows = [[sum((Fraction(x) * Fraction(y) for x, y in zip(p, q, strict=True)), Fraction(0)) for q in b.tolist()] for p in a.tolist()]
    extra = [0.0] * len(b) if bias is None else bias.tolist()
    return torch.tensor([[float(v + Fraction(e)) for v, e in zip(row, extra, strict=True)] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_is_the_exact_product_rounded_once(dtype: torch.dtype) -> None:
    """Sums of 13 products of these numbers (multiples of 2^-16 below 2) are exact in float64, so only the last rounding is left."""
    x, w, bias = philox_bell((5, 13), 1, dtype), philox_bell((7, 13), 2, dtype), philox_bell((7,), 3, dtype)
    assert torch.equal(fixed_linear_ref(x, w, bias), exact(x, w, bias).to(dtype))
    assert torch.equal(fixed_linear_ref(x, w), exact(x, w, None).to(dtype))
    dy = philox_bell((5, 7), 4, dtype)
    assert torch.equal(fixed_dgrad_ref(dy, w), exact(dy, w.T, None).to(dtype))


def test_tiles_know_nothing_of_the_number_of_rows() -> None:
    assert list(inspect.signature(tiles_of).parameters) == ["columns", "dtype"]
    assert len({tiles_of(columns, torch.bfloat16).step for columns in (8, 192, 1024, 1536, 18944)}) == 1, "one order of the sum"


def test_what_does_not_fit_is_refused() -> None:
    x, w = torch.zeros(4, 8), torch.zeros(6, 8)
    for call in (lambda: fixed_linear_ref(x, w.T), lambda: fixed_dgrad_ref(x, w), lambda: fixed_linear_ref(x[None], w), lambda: fixed_linear_ref(x[:, :0], w[:, :0])):
        with pytest.raises(ValueError, match="operands are x \\[M, K\\]"):
            call()
    with pytest.raises(ValueError, match="one dtype"):
        fixed_linear_ref(x, w.bfloat16())
    with pytest.raises(ValueError, match="a bias is \\[N\\]"):
        fixed_linear_ref(x, w, torch.zeros(8))
    for call in (lambda: fixed_linear(x, w), lambda: fixed_dgrad(torch.zeros(4, 6), w)):
        with pytest.raises(ValueError, match="runs on a GPU"):
            call()
