"""Claims about the logic of the exact kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

The interpreter's fma is mul + add, so bits are compared only where products are exact (bf16 x bf16); elsewhere a bound is.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact import (  # noqa: E402
    decode_schedules,
    digest,
    exp,
    exp_ref,
    gelu,
    gelu_ref,
    linear_fma,
    linear_fma_ref,
    pack_weight,
    philox_bell,
    prefill_schedules,
    rmsnorm,
    rmsnorm_ref,
    silu,
    silu_ref,
    swiglu,
    swiglu_ref,
)

BF16, FP32 = torch.bfloat16, torch.float32
# mul + add rounds once more than fma: each of at most 16 operations of an element may differ by one rounding, 2^-23 relative
ELEMENTWISE = 16 * 2.0**-23


@pytest.mark.parametrize("m, n, k", [(1, 40, 4096), (3, 70, 96), (5, 33, 77), (2, 17, 2064), (1, 1, 1)])
def test_every_decode_schedule_computes_the_oracle(m: int, n: int, k: int) -> None:
    x, w = philox_bell((m, k), 1, BF16), philox_bell((n, k), 2, BF16)
    want = digest(linear_fma_ref(x, w))
    for schedule in decode_schedules(m)[:: 1 if k < 2000 else 5]:
        assert digest(linear_fma(x, pack_weight(w), schedule=schedule)) == want, schedule
    assert digest(linear_fma(x.float(), pack_weight(w.float()))) == want


@pytest.mark.parametrize("m, n, k", [(40, 70, 1024), (17, 33, 77)])
def test_every_prefill_schedule_computes_the_oracle(m: int, n: int, k: int) -> None:
    x, w = philox_bell((m, k), 1, BF16), philox_bell((n, k), 2, BF16)
    want = digest(linear_fma_ref(x, w))
    for schedule in prefill_schedules()[::2]:
        assert digest(linear_fma(x, pack_weight(w), schedule=schedule)) == want, schedule


@pytest.mark.parametrize("op, ref", [(exp, exp_ref), (silu, silu_ref), (gelu, gelu_ref)])
def test_activations_follow_the_oracle(op: object, ref: object) -> None:
    x = philox_bell((1500,), 3, FP32, scale_log2=1)
    y, want = op(x), ref(x)
    assert bool(((y - want).abs() <= ELEMENTWISE * (1 + x.abs()) * want.abs()).all())
    assert torch.isnan(op(torch.tensor([float("nan")]))).all()


def test_swiglu_and_rmsnorm_follow_the_oracle() -> None:
    x, w = philox_bell((3, 1500), 4, FP32), philox_bell((1500,), 5, FP32)
    for y, want in ((swiglu(x, x), swiglu_ref(x, x)), (rmsnorm(x, w), rmsnorm_ref(x, w))):
        assert bool(((y - want).abs() <= ELEMENTWISE * want.abs()).all())
