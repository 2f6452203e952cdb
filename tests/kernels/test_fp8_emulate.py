"""Claims about emulated FP8 products: Hopper's accumulator against a scalar model in fractions, errors against theory, TF32 bit by bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernels.exact.philox import philox_bell, philox_uniform
from kernels.fp8.emulate import ACCUMULATIONS, STEP, multiply_ref, product_ref, round_tf32, truncate
from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import BLOCK, GEMMS, gemm

FP8 = sorted(name for name, g in GEMMS.items() if g.is_fp8)
# Numbers +-2^u, u uniform over (-8, 0), groups scaled so that the largest lies at 2^f of the format's top binade: f = log2 1.75 where 1 becomes
# F = 1.75 2^e, f = 1 with power-of-two scales. Noise is step^2/12, step = 2^-bits of the binade: 4^-bits/12 (f + 1/4 + 1/16 + ...); the signal
# is the integral of 4^u up to f, 4^f / (2 ln 2). A product has the noise of both operands.
TOP = {False: math.log2(1.75), True: 1.0}
BINADES = 8
# A group's largest number lies a little below 1: on average BINADES/128 of a binade in the smallest groups, where a binade is at most 6 dB.
OPERAND_DB_TOLERANCE = 6 * BINADES / 128


def noise_to_signal(operand) -> float:
    f = TOP[operand.power_of_two]
    return 4.0**-operand.format.mantissa_bits / 12 * (f + 1 / 3) / (4**f / (2 * math.log(2)))


def snr_db(y: torch.Tensor, want: torch.Tensor) -> float:
    return float(10 * torch.log10(want.double().square().sum() / (y.double() - want.double()).square().sum()))


# ---------------------------------------------------------------- Hopper's accumulator


def truncated(value: Fraction) -> Fraction:
    """14 significant bits, towards zero."""
    if not value:
        return value
    sign, size = (-1 if value < 0 else 1), abs(value)
    exponent = math.frexp(float(size))[1] - 14  # size < 2^(exponent + 14), and the float is exact: few bits
    return sign * Fraction(math.floor(size / Fraction(2) ** exponent)) * Fraction(2) ** exponent


def float32(value: Fraction) -> Fraction:
    return Fraction(float(np.float32(float(value))))


def scale_at(q, row: int, c: int) -> Fraction:
    column, group = c // BLOCK, {"tensor": (), "row": (row, 0), "block": (row, c // BLOCK), "square": (row // BLOCK, c // BLOCK)}[q.operand.granularity]
    assert column <= q.data_RC.shape[1] // BLOCK
    return Fraction(float(q.scale[group]))


def scalar_model(a, b, fast: bool) -> list[list[float]]:
    """One output after the other, one product after the other, in fractions."""
    blocked = [q.operand.granularity in ("block", "square") for q in (a, b)]
    c, out = a.data_RC.shape[1], []
    for i, row in enumerate(a.data_RC.float().tolist()):
        out.append([])
        for j, column in enumerate(b.data_RC.float().tolist()):
            total = accumulator = Fraction(0)
            for k in range(c):
                accumulator += Fraction(row[k]) * Fraction(column[k])
                if k % STEP == STEP - 1 or k == c - 1:
                    accumulator = truncated(accumulator)
                if k == c - 1 or (not fast and k % BLOCK == BLOCK - 1):
                    part = accumulator
                    for q, r, on in ((a, i, blocked[0]), (b, j, blocked[1])):
                        part = float32(part * scale_at(q, r, k)) if on else part
                    total, accumulator = float32(total + part), Fraction(0)
            for q, r, on in ((a, i, not blocked[0]), (b, j, not blocked[1])):
                total = float32(total * scale_at(q, r, 0)) if on else total
            out[-1].append(float(total))
    return out


@pytest.mark.parametrize("name", FP8)
def test_hoppers_accumulator_equals_a_scalar_model_in_fractions(name: str) -> None:
    """C = 300: two whole blocks of 128, then one whole step of 32 and a short one. Positive sums are truncated at every step."""
    recipe = gemm(name)
    for shift in (0.0, 2.0):
        a, b = quantise_ref(philox_bell((3, 300), 1) + shift, recipe.a), quantise_ref(philox_bell((2, 300), 2) + shift, recipe.b)
        assert multiply_ref(a, b, recipe, accumulate="hopper").tolist() == scalar_model(a, b, recipe.fast_accum)


def test_sums_of_one_sign_shrink_by_what_each_step_cuts_off() -> None:
    """A step cuts off half of 2^-13 of the sum's binade on average, a binade lies between half the sum and the sum, and a sum that grows evenly
    over n steps is on average (n + 1) / 2n of its last value: the loss of n steps lies between (n + 1) 2^-13 / 8 and twice that of the sum.
    n = C / 32, and 4 where sums of 128 are promoted."""
    a, b = philox_uniform((8, 16384), 3).abs(), philox_uniform((8, 16384), 4).abs()
    exact = product_ref(a, b, gemm("rowwise"))
    for name, n in (("rowwise-fast", 16384 // STEP), ("rowwise", BLOCK // STEP)):
        bias = float((product_ref(a, b, gemm(name), accumulate="hopper").double() / exact - 1).mean())
        assert -2 < bias / (2.0**-13 / 8 * (n + 1)) < -1, (name, bias)


def test_the_accumulator_is_negligible_beside_the_operands_up_to_4096_and_promotion_keeps_it_so_beyond() -> None:
    for c, name, least_db in ((512, "rowwise-fast", 60), (4096, "rowwise-fast", 45), (16384, "rowwise", 70)):
        a, b = philox_bell((16, c), 5), philox_bell((16, c), 6)
        exact = product_ref(a, b, gemm(name))
        assert snr_db(product_ref(a, b, gemm(name), accumulate="hopper"), exact) > least_db
        assert snr_db(exact, a.double() @ b.double().T) < 30  # what the operands cost


def test_truncation_keeps_14_bits_towards_zero() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 1 + 2.0**-13, 1 + 2.0**-14, -1 - 2.0**-14, 2 - 2.0**-20, 2.0**-18 * 1.5], dtype=torch.float64)
    assert truncate(x, 14).tolist() == [0.0, 1.0, -1.0, 1 + 2.0**-13, 1.0, -1.0, 2 - 2.0**-13, 2.0**-18 * 1.5]


# ---------------------------------------------------------------- errors of operands


@pytest.mark.parametrize("name", FP8)
def test_two_operands_cost_what_their_mantissas_say_whatever_the_granularity(name: str) -> None:
    a, b = (torch.exp2((philox_uniform((128, 512), seed) - 1) * BINADES / 2) * philox_uniform((128, 512), seed, stream=1).sign() for seed in (7, 8))
    recipe = gemm(name)
    theory_db = -10 * math.log10(noise_to_signal(recipe.a) + noise_to_signal(recipe.b))
    assert abs(snr_db(product_ref(a, b, recipe), a.double() @ b.double().T) - theory_db) < OPERAND_DB_TOLERANCE


@pytest.mark.parametrize("name", FP8)
def test_float32_sums_of_dequantised_operands_stay_within_their_roundings(name: str) -> None:
    """Two roundings of dequantising and C of sums, each 2^-24 of what it rounds."""
    a, b, recipe = philox_bell((5, 200), 9), philox_bell((4, 200), 10), gemm(name)
    qa, qb = quantise_ref(a, recipe.a), quantise_ref(b, recipe.b)
    exact, size = product_ref(a, b, recipe), qa.dequantise().double().abs() @ qb.dequantise().double().abs().T
    y = product_ref(a, b, recipe, accumulate="float32")
    assert y.dtype == torch.float32 and bool(((y.double() - exact).abs() <= (200 + 2) * 2.0**-24 * size).all())


def test_batches_are_products_one_by_one() -> None:
    a, b = philox_bell((2, 3, 5, 140), 11), philox_bell((2, 3, 4, 140), 12)
    for name in ("rowwise", "blockwise", "blockwise-both", "bf16", "tf32"):
        for accumulate in ACCUMULATIONS if gemm(name).is_fp8 else ACCUMULATIONS[:1]:
            y = product_ref(a, b, gemm(name), accumulate=accumulate)
            for i in range(2):
                for j in range(3):
                    one = product_ref(a[i, j], b[i, j], gemm(name), accumulate=accumulate)
                    # torch picks its order of additions by shape; float64 sums of exact products are exact but for the last bits
                    size = product_ref(a[i, j].abs(), b[i, j].abs(), gemm(name))
                    eps = {"float32": 2.0**-24, "float64": 2.0**-53, "hopper": 0.0}[accumulate]
                    assert bool(((y[i, j].double() - one.double()).abs() <= 2 * 140 * eps * size).all())


# ---------------------------------------------------------------- TF32, BF16, and what is refused


def test_tf32_rounds_to_ten_mantissa_bits_ties_away_from_zero() -> None:
    high = torch.tensor([0x3F800000, 0x3FFFE000, 0x42F6E000, 0x00802000], dtype=torch.int64)  # up to a carry into the exponent, and a small number
    bits = (high[:, None] + torch.arange(0x2000)[None]).to(torch.int32)
    x = bits.view(torch.float32)
    step = torch.exp2(torch.frexp(x.double())[1].double() - 11)
    want = torch.floor(x.double() / step + 0.5) * step
    assert torch.equal(round_tf32(x).double(), want) and torch.equal(round_tf32(-x), -round_tf32(x))
    special = round_tf32(torch.tensor([math.inf, -math.inf, math.nan, -0.0]))
    assert special[:2].tolist() == [math.inf, -math.inf] and special[2].isnan() and torch.signbit(special[3])


def test_bf16_and_tf32_products_are_exact_sums_of_rounded_operands() -> None:
    a, b = philox_uniform((6, 70), 13), philox_uniform((5, 70), 14)
    assert torch.equal(product_ref(a, b, gemm("bf16")), a.bfloat16().double() @ b.bfloat16().double().T)
    assert torch.equal(product_ref(a, b, gemm("tf32")), round_tf32(a).double() @ round_tf32(b).double().T)
    assert torch.equal(product_ref(a, b, gemm("fp32")), a.double() @ b.double().T)


def test_no_rows_and_no_sums_give_no_rows_and_zeros() -> None:
    for accumulate in ACCUMULATIONS:
        assert product_ref(torch.zeros(0, 8), torch.ones(3, 8), gemm("rowwise"), accumulate=accumulate).shape == (0, 3)
        assert product_ref(torch.zeros(2, 0), torch.ones(3, 0), gemm("rowwise"), accumulate=accumulate).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "a_shape, b_shape, name, accumulate, message",
    [
        ((2, 8), (3, 8), "rowwise", "float16", "an accumulation is one of"),
        ((2, 8), (3, 8), "bf16", "hopper", "short accumulator is that of fp8 products"),
        ((2, 8), (3, 9), "rowwise", "float64", "both have the contracted axis last"),
        ((8,), (3, 8), "rowwise", "float64", "both have the contracted axis last"),
    ],
)
def test_what_is_no_product_is_refused(a_shape: tuple, b_shape: tuple, name: str, accumulate: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        product_ref(torch.zeros(a_shape), torch.zeros(b_shape), gemm(name), accumulate=accumulate)
