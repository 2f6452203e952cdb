"""Claim: on a GPU the operators around the matrix products equal their CPU oracles bit for bit, for any number of warps.

Run on a GPU host: python -m pytest tests/kernels/test_exact_ops_gpu.py. There is no tolerance here: digests are compared.
"""

import pytest
import torch

from kernels.exact import activations, digest, philox_bell, philox_integers, philox_uniform
from kernels.exact.norm import add_rmsnorm, add_rmsnorm_ref, layernorm, layernorm_ref
from kernels.exact.rope import rope, rope_ref, rope_tables
from kernels.exact.sampling import argmax, argmax_ref, sample, sample_ref
from kernels.exact.softmax import cross_entropy, cross_entropy_ref, log_softmax, log_softmax_ref, softmax, softmax_ref, token_losses, token_losses_ref

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
# Zeros, infinities, NaN, subnormals, the ends of exp, and both sides of every threshold of elementary.py
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 88.72283, 89.0, -87.33655, -103.9, -104.1, 2.0**-149, -(2.0**-149), 2.0**-126, -1.0, 1.0, 0.55, 0.5499999, -0.55,
           0.9375, 0.93749994, -0.9375, 4.0, 4.1, 15.0, -15.0, -15.1, 0.6666667, 0.66666663, 1.3333334, 3.4e38, -3.4e38, 2.0**-127, 0.99999994, 1.0000001]  # fmt: skip


def same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert digest(y) == digest(want), f"{int((y.cpu() != want).sum())} of {want.numel()} elements differ"


@pytest.mark.parametrize("name", ["log", "tanh", "erf", "gelu_erf", "silu", "gelu"])
def test_activations_equal_the_oracle_on_random_bits_and_special_values(name: str) -> None:
    bits = torch.from_numpy(philox_integers(1 << 19, 13).view("int32").copy()).view(FP32)
    x = torch.cat([bits, philox_bell((1 << 19,), 14, scale_log2=4), torch.tensor(SPECIAL)])
    op, want = getattr(activations, name), getattr(activations, f"{name}_ref")(x)
    for num_warps, out_dtype in ((1, FP32), (4, BF16), (8, FP16), (2, FP32)):
        same(op(x.cuda(), out_dtype=out_dtype, num_warps=num_warps), want.to(out_dtype))


@pytest.mark.parametrize("m, f", [(1, 11008), (5, 1000), (0, 8)])
def test_swiglu_of_halves_equals_the_oracle(m: int, f: int) -> None:
    both = philox_bell((m, 2 * f), 15, BF16, scale_log2=3)
    for num_warps in (1, 4, 8):
        same(activations.swiglu(*both.cuda().chunk(2, dim=1), num_warps=num_warps), activations.swiglu_ref(*both.chunk(2, dim=1)))


@pytest.mark.parametrize("m, k", [(5, 4096), (3, 1000), (2, 11008), (1, 40000), (4, 7), (0, 64)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norms_equal_the_oracle_for_any_number_of_warps(m: int, k: int, dtype: torch.dtype) -> None:
    x, d, w, b = philox_bell((m, k), 1, dtype), philox_bell((m, k), 2, FP32), philox_uniform((k,), 3, dtype), philox_uniform((k,), 4, dtype)
    if m > 2:
        x[0, 0], x[1, 3], x[2] = INF, NAN, x[2] * 2.0**-130
    for num_warps in (None, 1, 8, 16):
        for y, want in zip(add_rmsnorm(x.cuda(), d.cuda(), w.cuda(), 1e-5, BF16, num_warps=num_warps), add_rmsnorm_ref(x, d, w, 1e-5, BF16), strict=True):
            same(y, want)
        same(layernorm(x.cuda(), w.cuda(), num_warps=num_warps), layernorm_ref(x, w))
        same(layernorm(x.cuda(), w.cuda(), b.cuda(), num_warps=num_warps), layernorm_ref(x, w, b))


@pytest.mark.parametrize("b, t, h, dim", [(8, 1, 40, 128), (2, 33, 9, 64), (1, 5, 3, 96), (3, 2, 1, 2), (0, 4, 2, 64)])
def test_rope_equals_the_oracle_on_views_and_outside_the_tables(b: int, t: int, h: int, dim: int) -> None:
    cos, sin = rope_tables(tokens=128, head_dim=dim, base=1e4)
    wide, position = philox_bell((b, t, h + 3, dim), 6, FP32), torch.arange(b * t).view(b, t) * 5 % 128
    if b == 2:
        position[0, 0], position[1, 1], wide[0, 2, 0, :4] = -1, 128, torch.tensor([INF, NAN, -0.0, 2.0**-149])
    for num_warps, out_dtype, kind in ((1, FP32, torch.int64), (2, BF16, torch.int32), (4, FP16, torch.int64)):
        y = rope(wide.cuda()[:, :, :h], position.to(kind).cuda(), cos.cuda(), sin.cuda(), out_dtype, num_warps=num_warps)
        same(y, rope_ref(wide[:, :, :h], position, cos, sin, out_dtype))


@pytest.mark.parametrize("m, v", [(1, 32000), (16, 152064), (3, 5), (2, 1), (600, 1000), (0, 10)])
def test_argmax_equals_the_oracle_with_ties_zeros_and_nan(m: int, v: int) -> None:
    x = philox_bell((m, v), 7)
    if m > 2:
        x[0, -1], x[0, 2], x[1], x[2, ::3] = NAN, NAN, -0.0, INF
        x[1, 3] = 0.0
    for block, num_warps in ((1024, 4), (256, 1), (4096, 8)):
        same(argmax(x.cuda(), block=block, num_warps=num_warps), argmax_ref(x))
    same(argmax(torch.cat([x, x + 9], 1).cuda()[:, :v]), argmax_ref(x))


@pytest.mark.parametrize("m, v", [(64, 4096), (4, 152064), (3, 5), (0, 10)])
def test_sampled_tokens_equal_the_oracle_s_where_the_noise_decides(m: int, v: int) -> None:
    x, request, position = torch.zeros(m, v), torch.arange(m) * 2**33 - 3, torch.arange(m) * 77 % 13 + 2**31
    for seed, temperature in ((1, 1.0), (2**64 - 5, 0.7)):
        want = sample_ref(x, seed=seed, request_M=request, position_M=position, temperature=temperature)
        for block, num_warps in ((1024, 4), (256, 1), (4096, 8)):
            where = dict(request_M=request.cuda(), position_M=position.cuda())
            same(sample(x.cuda(), seed=seed, temperature=temperature, block=block, num_warps=num_warps, **where), want)


@pytest.mark.parametrize("m, v", [(4, 32000), (6, 1000), (5, 3), (2, 1), (70, 4097), (0, 7)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_softmax_and_losses_equal_the_oracle(m: int, v: int, dtype: torch.dtype) -> None:
    x, target = philox_bell((m, v), 9, dtype, scale_log2=3), torch.arange(m) * 31 % v
    if m > 4:
        x[0, 0], x[1, 1], x[2, 2], x[3] = -INF, INF, NAN, -INF
    if m > 5:
        target[4], target[5] = -100, v
    for num_warps in (1, 8):
        same(softmax(x.cuda(), num_warps=num_warps), softmax_ref(x))
        same(log_softmax(x.cuda(), out_dtype=FP32, num_warps=num_warps), log_softmax_ref(x, out_dtype=FP32))
        same(token_losses(x.cuda(), target.cuda(), num_warps=num_warps), token_losses_ref(x, target))
    same(cross_entropy(x.cuda(), target.cuda()), cross_entropy_ref(x, target))
