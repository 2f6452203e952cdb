"""Claims about the logic of the batch-invariant baseline's kernel, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter."""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact import philox_uniform  # noqa: E402
from studies.models.invariant import linear_invariant  # noqa: E402

FP16 = torch.float16  # the interpreter's dot takes no bf16


# tiles cut in every dimension, several bands of tokens, one token, nothing
@pytest.mark.parametrize("m, n, k", [(70, 150, 100), (9 * 64, 130, 64), (1, 3, 65), (0, 5, 8), (2, 0, 8), (2, 3, 0)])
def test_the_batch_invariant_linear_is_a_matrix_product(m: int, n: int, k: int) -> None:
    x_MK, w_NK = philox_uniform((m, k), 1, FP16), philox_uniform((n, k), 2, FP16)
    want = x_MK.double() @ w_NK.double().T
    # exact products, K sums in fp32 in any order: K u |x||w|, |x||w| <= K
    assert float((linear_invariant(x_MK, w_NK) - want).abs().max() if m * n else 0.0) <= k * k * 2.0**-24


def test_operands_of_another_kind_are_refused() -> None:
    x_MK = torch.zeros(2, 8, dtype=FP16)
    for w_NK in (torch.zeros(3, 9, dtype=FP16), torch.zeros(3, 8)):
        with pytest.raises(ValueError, match="got "):
            linear_invariant(x_MK, w_NK)
