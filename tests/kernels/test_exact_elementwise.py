"""Claims about FMA, activations, RMSNorm, Philox and digests on the CPU."""

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
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
from kernels.exact.activations import erf_ref, gelu_erf_ref, log_ref, swiglu, tanh_ref
from kernels.exact.norm import add_rmsnorm_ref, lane_sum_ref, layernorm_ref, sum_of_squares_ref

FP32 = torch.float32
INF, NAN = math.inf, math.nan

# Largest error in units in the last place of the float32 result.
#   exp: the paper bound of its polynomial is 0.5 (last rounding) + 0.5 (scaled rounding of p) = 1.
#   silu: exp (1) + x*e or 1+e (0.5 each, 1+e carries exp's error damped) + division (0.5), doubled where the result's binade is lower.
#   gelu: as silu plus |t| * 2 roundings of t, t = 1.6 x (1 + 0.045 x^2): at x = 10 |t| is 87, at 5 it is 17, at 1 it is 1.7.
#   rmsnorm: sum 15 roundings halved by the root, mean, eps, root, reciprocal and two products: 7.5 + 6 worst case, half of it seen.
#   log: 0.5 (last rounding) + 0.5 (the sum before it, at most as large) + 0.1 (its polynomial, e ln 2 in two parts).
#   tanh near 0: 0.5 + the term t^3 P, a tenth of t, with 3 roundings: 0.8. Far: exp's 1 times 2/(e^2t+1) / tanh <= 1, division 0.5 and
#     its place one binade lower, last rounding 0.5: 1.75.
#   erf: near, last rounding 0.5 + its term t P, an eighth of t, with a rounding of t^2 behind -0.376 t^2: 1; far, erfc <= 0.19 with
#     relative error 2^-24 (2 + 2 p), p <= 1.7 there: 0.5 + 0.7.
#   gelu_erf: q's 1.5 roundings times dP/dq = 1.2 over P = 0.5 are 3.6; exp 1, its correction 0.5, P 1, two divisions and products 2.5.
#     Below -12.8 exp is subnormal: an error of half its grid, times |x| P / (1 + 2 t) <= 0.4, and that of the tail above: 10 at the edge.
ULPS = {
    "exp": 1.0, "silu": 4.0, "gelu near": 8.0, "gelu 5": 40.0, "gelu 10": 250.0, "rmsnorm": 13.5,
    "log": 1.1, "tanh near": 0.8, "tanh far": 1.75, "erf": 1.25, "gelu_erf": 8.6, "gelu_erf tail": 10.0,
}  # fmt: skip


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


def bits_between(low: float, high: float, count: int = 200_001) -> torch.Tensor:
    """Float32 numbers evenly spaced by their bit patterns, 0 < low < high: every binade has its share."""
    ends = torch.tensor([low, high]).view(torch.int32).tolist()
    return torch.linspace(*ends, count, dtype=torch.float64).to(torch.int32).view(FP32)


def test_log_stays_within_its_ulps_over_all_positive_numbers() -> None:
    for x in (bits_between(2.0**-149, 3.4e38), torch.linspace(0.4, 3, 200_001)):
        assert ulps(log_ref(x), x.double().log()) <= ULPS["log"]
    y = log_ref(torch.tensor([1.0, 0.0, -0.0, INF, -1.0, -INF, -(2.0**-149), NAN]))
    assert y[:4].tolist() == [0.0, -INF, -INF, INF] and not torch.signbit(y[0]) and bool(y[4:].isnan().all())


def test_tanh_and_erf_stay_within_their_ulps_and_are_odd_bit_for_bit() -> None:
    for ref, exact, ranges in (
        (tanh_ref, np.tanh, (("tanh near", 2.0**-149, 0.5499999), ("tanh far", 0.55, 1.0), ("tanh far", 1.0, 3e38))),
        (erf_ref, scipy.special.erf, (("erf", 2.0**-126, 0.9374999), ("erf", 0.9375, 3.0), ("erf", 3.0, 3e38))),
    ):
        for name, low, high in ranges:
            x = bits_between(low, high)
            assert ulps(ref(x), torch.from_numpy(exact(x.double().numpy()))) <= ULPS[name], (name, low)
            assert torch.equal(ref(-x), -ref(x))
        y = ref(torch.tensor([0.0, -0.0, INF, -INF, NAN]))
        assert y[:4].tolist() == [0.0, 0.0, 1.0, -1.0] and torch.signbit(y[:2]).tolist() == [False, True] and math.isnan(y[4])


def test_gelu_by_erf_stays_within_its_ulps_into_the_tail() -> None:
    def exact(x: torch.Tensor) -> torch.Tensor:
        d = x.double().numpy()
        tail = scipy.special.erfcx(np.abs(d) / math.sqrt(2)) / 2 * np.exp(-d * d / 2)  # without the cancellation of 1 + erf
        return torch.from_numpy(np.where(d < 0, d * tail, d * (1 - tail)))

    for name, low, high in (("gelu_erf tail", -15.0, -12.8), ("gelu_erf", -12.8, -1e-3), ("gelu_erf", 1e-3, 20.0)):
        x = torch.linspace(low, high, 200_001)
        assert ulps(gelu_erf_ref(x), exact(x)) <= ULPS[name], name
    assert gelu_erf_ref(torch.tensor([16.0, 1e30, INF])).tolist() == [16.0, float(torch.tensor(1e30)), INF]


@pytest.mark.parametrize("ref", [silu_ref, gelu_ref, gelu_erf_ref], ids=lambda f: f.__name__)
def test_gated_functions_have_their_limits_at_the_ends(ref: object) -> None:
    y = ref(torch.tensor([-INF, -3e38, -0.0, 0.0, INF, NAN]))
    assert y[:5].tolist() == [0.0, 0.0, 0.0, 0.0, INF] and torch.signbit(y[:4]).tolist() == [True, True, True, False] and math.isnan(y[5])


def test_values_of_the_activations_are_pinned() -> None:
    """Every golden digest behind them changes with these: bits of 100,000 random patterns, NaN folded."""
    x = torch.from_numpy(philox_integers(100_000, 21).view("int32").copy()).view(FP32)
    x = torch.cat([x, torch.ldexp(philox_bell((100_000,), 22), torch.tensor(4))])
    assert ACTIVATIONS == {ref.__name__: digest(ref(x))[:16] for ref in (exp_ref, log_ref, tanh_ref, erf_ref, silu_ref, gelu_ref, gelu_erf_ref)}


def test_swiglu_is_silu_times_up_rounded_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = philox_bell((64,), 1, scale_log2=2), philox_bell((64,), 2)
    assert torch.equal(swiglu_ref(gate, up), silu_ref(gate) * up)
    both = torch.cat([gate.view(4, 16), up.view(4, 16)], dim=1)
    assert torch.equal(swiglu_ref(*both.chunk(2, dim=1)).flatten(), swiglu_ref(gate, up))
    assert swiglu_ref(torch.tensor([-INF]), torch.tensor([2.0])).tolist() == [0.0]
    monkeypatch.setattr("kernels.device._launches_nothing", lambda: True)  # so the operands stay on the CPU
    for op in (swiglu_ref, swiglu):
        with pytest.raises(ValueError, match="one shape"):
            op(gate, up[:3])
        with pytest.raises(ValueError, match="one dtype"):
            op(gate, up.bfloat16())


def test_activations_take_empty_and_strided_tensors_and_name_other_dtypes() -> None:
    x = philox_bell((6, 10), 1, torch.bfloat16)
    for ref in (exp_ref, log_ref, tanh_ref, erf_ref, silu_ref, gelu_ref, gelu_erf_ref):
        assert ref(x[:0]).shape == (0, 10) and ref(x).dtype == torch.bfloat16 and ref(x, out_dtype=FP32).dtype == FP32
        assert torch.equal(ref(x.T).nan_to_num(), ref(x).T.nan_to_num()) and torch.equal(ref(x[:, ::3]).nan_to_num(), ref(x)[:, ::3].nan_to_num())
        for bad in (x.double(), x.int()):
            with pytest.raises(ValueError, match="convert them first"):
                ref(bad)


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


def test_add_rmsnorm_is_a_rounded_sum_and_the_norm_of_it() -> None:
    for dtype in (FP32, torch.bfloat16):
        h, delta, w = philox_bell((3, 1500), 1, dtype), philox_bell((3, 1500), 2, FP32), philox_uniform((1500,), 3)
        h_new, y = add_rmsnorm_ref(h, delta, w, 1e-5, torch.bfloat16)
        assert h_new.dtype == dtype and torch.equal(h_new, (h.float() + delta).to(dtype))
        assert torch.equal(y, rmsnorm_ref(h_new, w, eps=1e-5, out_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one shape"):
        add_rmsnorm_ref(h, delta[:1], w)


@pytest.mark.parametrize("offset", [0.0, 1.0, 50.0])
def test_layernorm_is_near_float64_even_where_the_mean_is_large(offset: float) -> None:
    k = 3000
    x, w, b = philox_bell((4, k), 1, FP32) + offset, philox_uniform((k,), 2), philox_uniform((k,), 3)
    d = x.double()
    c = d - d.mean(1, keepdim=True)
    r = 1 / ((c * c).mean(1, keepdim=True) + float(torch.tensor(1e-5))).sqrt()
    # The mean is wrong by steps + ten levels + one roundings of mean |x|, and c by one more of c; r w multiplies that. c's error shifts r by
    # second order. The rest is rmsnorm's relative error, at most 2 ulps a unit of 2^-23 each, and the rounding of the bias' sum.
    mean = (math.ceil(k / 1024) + 11) * 2.0**-24 * d.abs().mean(1, keepdim=True)
    exact = c * r * w.double()
    bound = (mean + c.abs() * 2.0**-24) * r * w.double().abs() + (ULPS["rmsnorm"] + 1) * 2.0**-23 * exact.abs()
    assert bool(((layernorm_ref(x, w).double() - exact).abs() <= bound).all())
    assert bool(((layernorm_ref(x, w, b).double() - exact - b.double()).abs() <= bound + 2.0**-24 * (exact.abs() + 1)).all())


def test_layernorm_has_the_stated_order() -> None:
    x, w = philox_bell((2, 2100), 4, FP32), philox_uniform((2100,), 5)
    lanes = [torch.tensor(0.0) for _ in range(1024)]
    for k in range(2100):
        lanes[k % 1024] = lanes[k % 1024] + x[1, k]
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    assert float(lane_sum_ref(x)[1]) == float(lanes[0])
    c = x - (lane_sum_ref(x) / torch.tensor(2100.0))[:, None]
    assert torch.equal(layernorm_ref(x, w, eps=1e-6), rmsnorm_ref(c, w, eps=1e-6))
    assert torch.equal(layernorm_ref(x, w, w), layernorm_ref(x, w) + w)


def test_a_row_without_finite_values_harms_no_other_row_and_empty_batches_stay_empty() -> None:
    x, w = philox_bell((3, 40), 6), torch.ones(40)
    x[0, 3], x[1, 5] = INF, NAN
    for ref in (rmsnorm_ref, layernorm_ref):
        y = ref(x, w)
        assert bool(y[:2].isnan().any(1).all()) and torch.equal(y[2:], ref(x[2:], w)) and ref(x[:0], w).shape == (0, 40)
        assert torch.equal(ref(x[2:].repeat(4, 1).T.contiguous().T, w)[1], y[2])
    tiny = torch.full((1, 64), 2.0**-140)
    assert torch.equal(rmsnorm_ref(tiny, torch.ones(64)), tiny * 1000.0)  # its squares vanish: eps alone


def test_norms_name_wrong_operands() -> None:
    for ref in (rmsnorm_ref, layernorm_ref):
        for x, w in ((torch.ones(2, 3), torch.ones(4)), (torch.ones(3), torch.ones(3)), (torch.ones(2, 0), torch.ones(0))):
            with pytest.raises(ValueError, match="one K > 0"):
                ref(x, w)
        for eps in (-1.0, NAN, INF):
            with pytest.raises(ValueError, match="eps"):
                ref(torch.ones(2, 3), torch.ones(3), eps=eps)
        with pytest.raises(ValueError, match="convert them first"):
            ref(torch.ones(2, 3).double(), torch.ones(3))
    with pytest.raises(ValueError, match="bias"):
        layernorm_ref(torch.ones(2, 3), torch.ones(3), torch.ones(2))


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
ACTIVATIONS = {
    "exp_ref": "ab914954c9a9e0b9",
    "log_ref": "7d462a53c1c3d311",
    "tanh_ref": "3709b5b712be5e12",
    "erf_ref": "da0ac6259c4acedc",
    "silu_ref": "04662a5556ef3b7e",
    "gelu_ref": "3ea90b1d39e82fff",
    "gelu_erf_ref": "c9323b79c00064a1",
}


def test_the_compiled_fma_has_the_bits_of_the_float64_one() -> None:
    """All kinds of operands: any bit pattern (subnormals, infinities, NaN), near cancellation, broadcast and strided."""
    from kernels.exact import _fma_c
    from kernels.exact.ieee import fma_by_float64

    if not _fma_c.available():
        pytest.skip("needs a C compiler named cc")
    bits = [torch.from_numpy(philox_integers(1 << 18, 60 + i).view("int32").copy()).view(torch.float32) for i in range(3)]
    a, b = philox_bell((512, 512), 63), philox_bell((512, 512), 64)
    cases = [bits, (a, b, -(a * b)), (a, b, (-(a * b)).nextafter(torch.zeros(())))]
    cases += [(a[:, :1], b, torch.tensor(0.5)), (a.t(), b[0], a), (a * 2.0**-75, b * 2.0**-75, b * 2.0**-149)]
    for x, y, z in cases:
        assert digest(_fma_c.fma(x, y, z)) == digest(fma_by_float64(x, y, z))
