"""Claims about the logic of the portable operators' kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

The interpreter's fma is mul + add and its fp32 -> bf16 truncates: bits are compared where a kernel has integers or no fma, else a bound is.
"""

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact import activations, digest, philox_bell, philox_integers, philox_ref, philox_uniform  # noqa: E402
from kernels.exact.norm import add_rmsnorm, add_rmsnorm_ref, layernorm, layernorm_ref, rmsnorm, rmsnorm_ref  # noqa: E402
from kernels.exact.philox import philox_u32  # noqa: E402
from kernels.exact.rope import rope, rope_ref, rope_tables  # noqa: E402
from kernels.exact.sampling import argmax, argmax_ref, sample, sample_ref  # noqa: E402
from kernels.exact.softmax import (  # noqa: E402
    cross_entropy, cross_entropy_ref, log_softmax, log_softmax_ref, softmax, softmax_ref, token_losses, token_losses_ref,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
# mul + add rounds once more than fma: each of at most 32 operations of an element may differ by one rounding, 2^-23 relative
BOUND = 32 * 2.0**-23


def near(y: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | float = 0.0) -> bool:
    return bool(((y - want).abs() <= BOUND * (want.abs() + scale)).all()) and y.dtype == want.dtype and y.shape == want.shape


@triton.jit
def words_kernel(counter_ptr, out_ptr, k0, k1, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT) * 4
    c0, c1, c2, c3 = (tl.load(counter_ptr + i).to(tl.uint32), tl.load(counter_ptr + i + 1).to(tl.uint32), tl.load(counter_ptr + i + 2).to(tl.uint32),
                      tl.load(counter_ptr + i + 3).to(tl.uint32))  # fmt: skip
    zero = c0 ^ c0
    r0, r1, r2, r3 = philox_u32(c0, c1, c2, c3, zero + k0.to(tl.uint32), zero + k1.to(tl.uint32))
    tl.store(out_ptr + i, r0.to(tl.int64))
    tl.store(out_ptr + i + 1, r1.to(tl.int64))
    tl.store(out_ptr + i + 2, r2.to(tl.int64))
    tl.store(out_ptr + i + 3, r3.to(tl.int64))


@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0)])
def test_the_kernel_s_philox_gives_the_generator_s_words(key: tuple[int, int]) -> None:
    known = [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]  # Random123's, see test_exact_elementwise.py
    counter = np.concatenate([np.array(known, dtype=np.uint32), philox_integers(4 * 61, 1).reshape(61, 4)])
    out = torch.zeros(64, 4, dtype=torch.int64)
    signed = [k - (1 << 32) if k >> 31 else k for k in key]
    words_kernel[(1,)](torch.from_numpy(counter.astype(np.int64)), out, *signed, COUNT=64)
    assert np.array_equal(out.numpy(), philox_ref(counter, key).astype(np.int64))


@pytest.mark.parametrize("name", ["log", "tanh", "erf", "gelu_erf"])
def test_activations_follow_the_oracle(name: str) -> None:
    x = torch.cat([philox_bell((1500,), 3, scale_log2=2), torch.tensor([0.0, -0.0, INF, -INF, NAN, 2.0**-149, 0.55, 0.9375, 15.0, -15.0, -0.01])])
    y, want = getattr(activations, name)(x), getattr(activations, f"{name}_ref")(x)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(torch.signbit(y[~y.isnan()]), torch.signbit(want[~y.isnan()]))
    finite = want.isfinite()
    assert torch.equal(y[want.isinf()], want[want.isinf()])
    slack = x[finite].clamp(-15, 15).square() * want[finite].abs() if name == "gelu_erf" else 0.0  # without fma the rounding of t^2 is not put back
    assert near(y[finite], want[finite], slack)


def test_limits_of_the_gated_functions_hold_in_the_kernel() -> None:
    x = torch.tensor([-INF, INF, 0.0])
    for name in ("silu", "gelu", "gelu_erf"):
        y = getattr(activations, name)(x)
        assert y.tolist() == [0.0, INF, 0.0] and torch.signbit(y).tolist() == [True, False, False]


def test_swiglu_reads_halves_of_one_tensor_in_place() -> None:
    both = philox_bell((3, 2 * 1100), 4, scale_log2=1)
    gate, up = both.chunk(2, dim=1)
    want = activations.swiglu_ref(gate, up)
    for pair in ((gate, up), (gate.contiguous(), up), (gate.contiguous(), up.contiguous()), (gate.T.contiguous().T, up)):
        y = activations.swiglu(*pair)
        assert near(y, want) and y.is_contiguous() and digest(y) == digest(activations.swiglu(gate, up))
    assert activations.swiglu(gate[:0], up[:0]).shape == (0, 1100)


@pytest.mark.parametrize("m, k", [(3, 1500), (2, 7), (1, 9000), (0, 8)])
def test_norms_follow_the_oracle(m: int, k: int) -> None:
    x, d, w, b = philox_bell((m, k), 1), philox_bell((m, k), 2), philox_uniform((k,), 3), philox_uniform((k,), 4)
    assert near(rmsnorm(x, w), rmsnorm_ref(x, w)) and near(layernorm(x, w), layernorm_ref(x, w), 1.0)
    assert near(layernorm(x + 5, w, b), layernorm_ref(x + 5, w, b), 8.0)
    (h, y), (h_want, want) = add_rmsnorm(x, d, w, 1e-5), add_rmsnorm_ref(x, d, w, 1e-5)
    assert digest(h) == digest(h_want) and near(y, want) and near(rmsnorm(x.T.contiguous().T, w), rmsnorm_ref(x, w))


@pytest.mark.parametrize("b, t, h, dim", [(2, 3, 5, 16), (1, 1, 40, 6), (3, 2, 1, 128), (0, 2, 1, 4)])
def test_rope_is_the_oracle_bit_for_bit(b: int, t: int, h: int, dim: int) -> None:
    cos, sin = rope_tables(tokens=40, head_dim=dim, base=1e4)
    wide, position = philox_bell((b, t, h + 2, dim), 5), torch.arange(b * t).view(b, t) * 13 % 40
    if b == 2:
        position[0, 0], position[1, 2] = -1, 40
    for x in (wide[:, :, 1 : h + 1], wide[:, :, :h].mT.contiguous().mT):
        for kind in (torch.int32, torch.int64):
            assert digest(rope(x, position.to(kind), cos, sin)) == digest(rope_ref(x, position, cos, sin))


@pytest.mark.parametrize("m, v", [(4, 3), (3, 1024), (2, 2500), (0, 4)])
def test_argmax_and_sample_are_the_oracle_s(m: int, v: int) -> None:
    x = philox_bell((m, v), 6)
    if m == 4:
        x = torch.tensor([[0.0, NAN, NAN], [-0.0, 0.0, -0.0], [-INF, -INF, -INF], [1.0, INF, INF]])
    where = dict(request_M=torch.arange(m) * 2**33 - 1, position_M=(torch.arange(m) * 5 % 7).int())
    for block in (256, 1024):
        assert argmax(x, block=block).tolist() == argmax_ref(x).tolist() == argmax(torch.cat([x, x + 9], 1)[:, :v], block=block).tolist()
        for seed in (0, 2**64 - 1):
            assert sample(x, seed=seed, temperature=0.8, block=block, **where).tolist() == sample_ref(x, seed=seed, temperature=0.8, **where).tolist()


@pytest.mark.parametrize("m, v", [(6, 3), (3, 1024), (2, 5000), (0, 4)])
def test_softmax_and_losses_follow_the_oracle(m: int, v: int) -> None:
    x, target = philox_bell((m, v), 7, scale_log2=1), torch.arange(m) % v
    if m == 6:
        x[0, 0], x[1, 1], x[2, 2], target[3:] = -INF, INF, NAN, torch.tensor([-100, 3, 1])
    for op, ref in ((softmax, softmax_ref), (log_softmax, log_softmax_ref)):
        y, want = op(x), ref(x)
        assert torch.equal(y.isnan(), want.isnan()) and near(y.nan_to_num(neginf=-9.0), want.nan_to_num(neginf=-9.0), 16.0 * (op is log_softmax))
    y, want = token_losses(x, target), token_losses_ref(x, target)
    assert torch.equal(y.isnan(), want.isnan()) and near(y.nan_to_num(), want.nan_to_num(), 16.0)
    assert near(cross_entropy(x, target).nan_to_num(), cross_entropy_ref(x, target).nan_to_num(), 16.0)
