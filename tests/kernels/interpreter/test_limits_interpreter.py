"""Claims about the ends of what the kernels take, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter."""

import os

import pytest
import torch
import triton.language as tl

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact import attention_prefill, decode, integer_decode  # noqa: E402
from kernels.exact.attention import attention, make_cache  # noqa: E402
from kernels.exact.backward import rmsnorm_backward, rmsnorm_backward_ref  # noqa: E402
from kernels.exact.decode import DecodeSchedule, pack_weight  # noqa: E402
from kernels.exact.digests import digest  # noqa: E402
from kernels.exact.integer import linear_integer, linear_integer_ref, prepare_integer  # noqa: E402
from kernels.exact.linear import linear_fma, linear_fma_ref  # noqa: E402
from kernels.exact.philox import philox_bell  # noqa: E402


def test_the_norms_gradient_has_the_references_signs_of_zero() -> None:
    """x = +0 and dy = +-0: the product is -0 or +0 by the sign of c, and so is its sum with a zero."""
    for c_sign in (1.0, -1.0):
        x, dy = torch.zeros(2, 4), torch.zeros(2, 4)
        x[:, 0], dy[:, 0] = 1.0, c_sign
        dy[0, 2], x[1, 1], dy[1, 3] = -0.0, -0.0, -0.0
        w = torch.ones(4)
        for kernel, reference in zip(rmsnorm_backward(dy, x, w), rmsnorm_backward_ref(dy, x, w), strict=True):
            zero = reference == 0  # the interpreter's fma rounds twice, which no zero here sees
            assert bool((kernel[zero] == 0).all()) and torch.equal(torch.signbit(kernel[zero]), torch.signbit(reference[zero]))


def test_more_blocks_of_tokens_than_a_grid_has_are_launched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_BLOCKS", 2)
    monkeypatch.setattr(integer_decode, "MOST_BLOCKS", 2)
    w = philox_bell((33, 64), 2, torch.bfloat16)
    x, schedule = philox_bell((70, 64), 1, torch.bfloat16), DecodeSchedule(block_m=2, folds=2)
    assert digest(linear_fma(x, pack_weight(w), schedule=schedule)) == digest(linear_fma_ref(x, w))
    assert digest(linear_integer(x, prepare_integer(w, prefill=False))) == digest(linear_integer_ref(x, w))


def test_a_negative_start_reads_nothing_outside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    cache, reads = make_cache(1, 128, 1, 16), []
    load = interpreter.InterpreterBuilder.create_masked_load

    def noted(self, ptrs, mask, *rest):
        if ptrs.get_element_ty() == tl.bfloat16:
            reads.extend(ptrs.data[mask.data.astype(bool)].ravel().tolist())
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noted)
    bounds = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in (cache.k, cache.v)]
    for start in (-1000, -70, -3):
        where, count = torch.tensor([start], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
        attention(torch.ones(1, 100, 1, 16), cache, where, count, schedule=attention_prefill.prefill_schedules()[3])
    assert reads and all(any(low <= address < high for low, high in bounds) for address in reads)
