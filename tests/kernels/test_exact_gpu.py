"""Claim: on a GPU every operator of kernels.exact equals its CPU oracle bit for bit, for every schedule.

Run on a GPU host: python -m pytest tests/kernels/test_exact_gpu.py. There is no tolerance here: digests are compared.
"""

import itertools

import pytest
import torch

from kernels.exact import (
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
    philox_integers,
    prefill_schedules,
    rmsnorm,
    rmsnorm_ref,
    silu,
    silu_ref,
    swiglu,
    swiglu_ref,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# activation x weight: exact products (16 x 16), rounded products (32 x 16), and float32 weights
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16), (FP32, FP32), (BF16, FP32)]
# (N, K): whole chunks; a short last chunk; spans that are no multiple of 8; one span (8 does not divide K); less than a group
SHAPES_NK = [(160, 4096), (96, 11008), (65, 1000), (33, 777), (40, 5), (8, 8)]


def same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert digest(y) == digest(want), f"{int((y.cpu() != want).sum())} of {want.numel()} elements differ"


@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
@pytest.mark.parametrize("n, k", SHAPES_NK)
def test_decode_equals_the_oracle_for_1_to_16_tokens(n: int, k: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = philox_bell((16, k), 1, x_dtype), philox_bell((n, k), 2, w_dtype)
    packed, want = pack_weight(w.cuda()), linear_fma_ref(x, w)
    for m in range(1, 17):
        same(linear_fma(x[:m].cuda(), packed), want[:m])


@pytest.mark.parametrize("m, schedule", [(m, s) for m in (1, 3, 8, 16) for s in decode_schedules(m)], ids=str)
def test_every_decode_schedule_gives_the_same_bits(m: int, schedule: object) -> None:
    for n, k in ((200, 4096), (33, 777)):
        x, w = philox_bell((m, k), 3, FP32), philox_bell((n, k), 4, BF16)
        same(linear_fma(x.cuda(), pack_weight(w.cuda()), schedule=schedule), linear_fma_ref(x, w))


@pytest.mark.parametrize("schedule", prefill_schedules(), ids=str)
def test_every_prefill_schedule_gives_the_same_bits(schedule: object) -> None:
    for m, n, k in ((130, 300, 4096), (17, 33, 777)):
        x, w = philox_bell((m, k), 5, FP32), philox_bell((n, k), 6, BF16)
        same(linear_fma(x.cuda(), pack_weight(w.cuda()), schedule=schedule), linear_fma_ref(x, w))


@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
def test_prefill_equals_the_oracle(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for (n, k), m in itertools.product(SHAPES_NK, (17, 64)):
        x, w = philox_bell((m, k), 7, x_dtype), philox_bell((n, k), 8, w_dtype)
        same(linear_fma(x.cuda(), pack_weight(w.cuda())), linear_fma_ref(x, w))


@pytest.mark.parametrize("m", [2, 40])
def test_hard_values_give_the_same_bits(m: int) -> None:
    """Underflowing products, subnormal sums, infinities, NaN, -0 (all bit patterns of bf16 take part)."""
    k, n = 1024, 64
    bits = torch.from_numpy(philox_integers((m + n) * k, 9).astype("int64"))
    every = (bits % 65536 - 32768).to(torch.int16).view(BF16).reshape(m + n, k)
    tiny = torch.ldexp(philox_bell((m + n, k), 10, FP32), torch.tensor(-70)).to(BF16)
    few = tiny.clone()
    few[:, 5] = float("inf")
    few[m // 2, 77] = float("nan")
    for values in (every, tiny, few, -torch.zeros_like(tiny)):
        same(linear_fma(values[:m].cuda(), pack_weight(values[m:].cuda())), linear_fma_ref(values[:m], values[m:]))


def test_empty_batch_and_empty_sum() -> None:
    w = pack_weight(philox_bell((8, 16), 1, BF16).cuda())
    assert linear_fma(torch.empty((0, 16), device="cuda"), w).shape == (0, 8)
    same(linear_fma(torch.empty((2, 0), device="cuda"), pack_weight(torch.empty((8, 0), device="cuda"))), torch.zeros(2, 8))


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [1, 576, 4096, 5000])
def test_rmsnorm_equals_the_oracle_for_any_number_of_warps(k: int, num_warps: int) -> None:
    for dtype in (BF16, FP32):
        x, w = philox_bell((7, k), 11, dtype), philox_bell((k,), 12, BF16)
        same(rmsnorm(x.cuda(), w.cuda(), num_warps=num_warps), rmsnorm_ref(x, w))


def float_patterns() -> torch.Tensor:
    """Random float32 bit patterns, a fine grid where exp is finite, and the special values."""
    bits = torch.from_numpy(philox_integers(1 << 19, 13).view("int32").copy()).view(FP32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 88.72283, -87.33655, -103.9, -104.1, 2.0**-149])
    return torch.cat([bits, torch.ldexp(philox_bell((1 << 19,), 14), torch.tensor(6)), special])


@pytest.mark.parametrize("op, ref", [(exp, exp_ref), (silu, silu_ref), (gelu, gelu_ref)])
def test_activations_equal_the_oracle(op: object, ref: object) -> None:
    x = float_patterns()
    for num_warps, out_dtype in ((1, FP32), (8, BF16), (4, FP16)):
        same(op(x.cuda(), out_dtype=out_dtype, num_warps=num_warps), ref(x, out_dtype=out_dtype))


def test_swiglu_equals_the_oracle() -> None:
    gate, up = philox_bell((64, 1000), 15, BF16, scale_log2=3), philox_bell((64, 1000), 16, BF16)
    same(swiglu(gate.cuda(), up.cuda()), swiglu_ref(gate, up))
