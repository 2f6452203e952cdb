"""Claims about FMA, activations, RMSNorm, Philox and digests on the CPU."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernels.exact import (
    digest,
    exp_ref,
    fma_f32,
    gelu_ref,
    philox_bell,
    philox_integers,
    philox_ref,
    philox_uniform,
    rmsnorm_ref,
    silu_ref,
    swiglu_ref,
)
from kernels.exact.norm import sum_of_squares_ref

FP32 = torch.float32

# Largest error in units in the last place of the float32 result.
#   exp: the paper bound of its polynomial is 0.5 (last rounding) + 0.5 (scaled rounding of p) = 1.
#   silu: exp (1) + x*e or 1+e (0.5 each, 1+e carries exp's error damped) + division (0.5), doubled where the result's binade is lower.
#   gelu: as silu plus |t| * 2 roundings of t, t = 1.6 x (1 + 0.045 x^2): at x = 10 |t| is 87, at 5 it is 17, at 1 it is 1.7.
#   rmsnorm: sum 15 roundings halved by the root, mean, eps, root, reciprocal and two products: 7.5 + 6 worst case, half of it seen.
ULPS = {"exp": 1.0, "silu": 4.0, "gelu near": 8.0, "gelu 5": 40.0, "gelu 10": 250.0, "rmsnorm": 13.5}


def ulps(y: torch.Tensor, exact: torch.Tensor) -> float:
    exponent = torch.clamp(torch.frexp(exact).exponent - 24, min=-149)
    return float(((y.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent)).max())


def rounded(exact: Fraction) -> float:
    """Nearest float32 of a rational, ties to even, subnormals included: integer arithmetic only."""
    if exact == 0:
        return 0.0
    sign, size = (-1 if exact < 0 else 1), abs(exact)
    e = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    while Fraction(2) ** (e + 1) <= size:
        e += 1
    step = Fraction(2) ** (e - 23)
    return sign * float(round(size / step) * step)


def test_fma_is_rounded_once_on_random_and_on_tie_breaking_operands() -> None:
    a, b, c = (philox_bell((300,), s, FP32, scale_log2=e) for s, e in ((1, 0), (2, -3), (3, -2)))
    tie = torch.tensor([1 + 2.0**-12, 1 + 2.0**-23, 2.0**-75, -(2.0**-75), 3 * 2.0**-75])
    a, b = torch.cat([a, tie]), torch.cat([b, tie.abs()])
    c = torch.cat([c, torch.tensor([2.0**24, -1.0, 2.0**-149, -(2.0**-148), 2.0**-130])])
    got = fma_f32(a, b, c)
    for i in range(len(a)):
        assert float(got[i]) == rounded(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))), i


def test_fma_double_rounding_is_avoided() -> None:
    """a*b + c = c + 2^-24 - 2^-54 lies below a float32 tie by a quarter of a float64 ulp: float64 rounds it onto the tie, then up."""
    a, b, c = torch.tensor(1 + 2.0**-15), torch.tensor((1 - 2.0**-15) * 2.0**-24), torch.tensor(1 + 2.0**-23)
    assert float((a.double() * b.double() + c.double()).to(FP32)) == 1 + 2.0**-22  # what a plain float64 sum gives
    assert float(fma_f32(a, b, c)) == 1 + 2.0**-23 == rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
    assert float(fma_f32(-a, b, -c)) == -(1 + 2.0**-23)


def test_fma_of_infinities_and_nan() -> None:
    inf = math.inf
    y = fma_f32(torch.tensor([inf, inf, 0.0, 1.0]), torch.tensor([1.0, 1.0, inf, 2.0]), torch.tensor([1.0, -inf, 1.0, math.nan]))
    assert float(y[0]) == inf and bool(torch.isnan(y[1:]).all())


def test_exp_stays_within_its_ulps_and_its_ends_are_exact() -> None:
    x = torch.linspace(-87, 88, 200_001)
    assert ulps(exp_ref(x), x.double().exp()) <= ULPS["exp"]
    x = torch.linspace(-104, -87, 50_001)
    assert ulps(exp_ref(x), x.double().exp()) <= ULPS["exp"]
    y = exp_ref(torch.tensor([0.0, -0.0, math.inf, -math.inf, 89.0, -104.0, math.nan]))
    assert y[:6].tolist() == [1.0, 1.0, math.inf, 0.0, math.inf, 0.0] and math.isnan(y[6])


def test_silu_and_gelu_stay_within_their_ulps() -> None:
    x = torch.linspace(-87, 88, 200_001)
    d = x.double()
    assert ulps(silu_ref(x), d / (1 + torch.exp(-d))) <= ULPS["silu"]
    c1 = float(torch.tensor(2 * math.sqrt(2 / math.pi), dtype=torch.float64))
    for low, high, name in ((-1, 10, "gelu near"), (-5, -1, "gelu 5"), (-10, -5, "gelu 10")):
        x = torch.linspace(low, high, 100_001)
        d = x.double()
        assert ulps(gelu_ref(x), d / (1 + torch.exp(-c1 * (d + 0.044715 * d**3)))) <= ULPS[name]


def test_swiglu_is_silu_times_up_rounded_once_more() -> None:
    gate, up = philox_bell((64,), 1, scale_log2=2), philox_bell((64,), 2)
    assert torch.equal(swiglu_ref(gate, up), silu_ref(gate) * up)
    with pytest.raises(ValueError, match="one shape"):
        swiglu_ref(gate, up[:3])


def test_rmsnorm_stays_within_its_ulps_and_its_sum_has_the_stated_order() -> None:
    x, w = philox_bell((4, 3000), 1, FP32), philox_uniform((3000,), 2)
    d = x.double()
    exact = d / ((d * d).mean(1, keepdim=True) + float(torch.tensor(1e-6))).sqrt() * w.double()
    assert ulps(rmsnorm_ref(x, w), exact) <= ULPS["rmsnorm"]
    lanes = [torch.tensor(0.0) for _ in range(1024)]
    for k in range(3000):
        lanes[k % 1024] = fma_f32(x[0, k], x[0, k], lanes[k % 1024])
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    assert float(sum_of_squares_ref(x)[0]) == float(lanes[0])


def test_rmsnorm_names_wrong_operands() -> None:
    with pytest.raises(ValueError, match="one K > 0"):
        rmsnorm_ref(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(ValueError, match="eps"):
        rmsnorm_ref(torch.ones(2, 3), torch.ones(3), eps=-1.0)


@pytest.mark.parametrize("counter, key, want", [  # Random123, kat_vectors, philox4x32 10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert tuple(int(v) for v in philox_ref(np.array(counter, dtype=np.uint32), key)) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_philox_uniform_is_exact_symmetric_and_prefix_stable(dtype: torch.dtype) -> None:
    x = philox_uniform((1000, 10), 7, dtype)
    assert float(x.float().abs().max()) < 1 and float(x.float().abs().min()) > 0
    assert torch.equal(philox_uniform((10,), 7, dtype), x[0])
    assert abs(float(x.double().mean())) < 4 / math.sqrt(3 * x.numel())  # four standard errors of a uniform's mean
    assert not torch.equal(philox_uniform((10,), 7, dtype, stream=1), x[0])


def test_philox_values_are_pinned() -> None:
    """Changing the generator changes every golden digest: this digest may only change with them."""
    assert philox_integers(5, 2**40 + 3, 9)[:4].tolist() == philox_ref(np.array([0, 0, 9, 0], dtype=np.uint32), (3, 256)).tolist()
    assert PINNED == {name: digest(make((64,), 1, torch.bfloat16))[:16] for name, make in (("uniform", philox_uniform), ("bell", philox_bell))}


def test_digest_keeps_negative_zero_and_folds_nan_and_tells_dtype_and_shape() -> None:
    zero = torch.zeros(4)
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -1, 0x7F800001], dtype=torch.int64).to(torch.int32).view(FP32)
    assert digest(zero) != digest(-zero)
    assert digest(nans) == digest(torch.full((4,), math.nan))
    assert len({digest(zero), digest(zero.reshape(2, 2)), digest(zero.to(torch.bfloat16)), digest(zero.to(torch.int32))}) == 4
    assert digest(zero) == digest(torch.zeros(4, 2)[:, 0])
    with pytest.raises(ValueError, match="a digest is defined"):
        digest(torch.zeros(2, dtype=torch.complex64))


PINNED = {"uniform": "38de54da419425e0", "bell": "0cfddc4d1ad28a24"}
