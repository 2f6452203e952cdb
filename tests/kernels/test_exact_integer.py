"""Claim: family B on the CPU is the exact sum of digit products, rounded once, for every operand; no order or cut of K changes a bit.

The judge is arithmetic on Python integers and fractions, written from the rule in slices.py and integer.py, not from their code.
"""

from fractions import Fraction

import pytest
import torch

from kernels.exact import _integer_c, integer
from kernels.exact.digests import digest
from kernels.exact.decode import DecodeSchedule
from kernels.exact.integer import (
    MAX_K,
    MAX_TOTAL_K,
    PRODUCTS,
    IntegerWeight,
    _multiply,
    integer_accumulate_ref,
    integer_finish_ref,
    linear_integer_ref,
    prepare_integer,
)
from kernels.exact.philox import philox_bell, philox_integers, philox_uniform
from kernels.exact.slices import EX_NONFINITE, EX_ZERO, Q_MAX, Q_MIN, digits_ref, quantise_ref, row_exponents_ref

ENGINES = tuple(e for e in integer.ENGINES if e != "c" or _integer_c.available())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# both sides in every type: exact and rounded quantisation
DTYPES = [(x, w) for x in (BF16, FP16, FP32) for w in (BF16, FP16, FP32)]
# Normwise error, in units of |x| |w| (2-norms). An operand's element is off by at most 2^-22.98 of its row's maximum, which is at most the
# row's norm, so |x - x'| <= 2^-22.98 sqrt(K) |x|, and the same for w; the last rounding adds 2^-24. b6 leaves out three digit products, less
# than 2.01 * 2^14 * 2^8 per k in units where max|x| max|w| >= 2^44: 2^-21 K max|x| max|w|; a bell in (-2, 2) of variance 1/3 has a maximum
# below 3.5 root mean squares, so that is 3.5^2 * 2^-21 |x| |w|.
QUANTISATION = 2.0**-22.98
DROPPED = 3.5**2 * 2.0**-21


def python_exponent(row: list[float]) -> int:
    """From the rule: 2^e <= max < 2^(e+1); +1; +1 more from 63/64 of the way up."""
    top = max(abs(Fraction(v)) for v in row)
    if top == 0:
        return EX_ZERO
    e = 200
    while Fraction(2) ** e > top:
        e -= 1
    return e + 1 + (top >= Fraction(127, 64) * Fraction(2) ** e)


def nearest_even(value: Fraction) -> int:
    return round(value)  # Python rounds ties of a Fraction to even


def python_digits(q: int) -> list[int]:
    d2 = (q + 128) % 256 - 128
    d1 = ((q - d2) // 256 + 128) % 256 - 128
    return [(q - d2 - 256 * d1) // 65536, d1, d2]


def python_float32(value: Fraction, negative: bool) -> float:
    """One rounding to float32, from the definition."""
    size, e = abs(value), -149
    while nearest_even(size / Fraction(2) ** e) > 1 << 24:
        e += 1
    n = nearest_even(size / Fraction(2) ** e)
    result = float("inf") if n * Fraction(2) ** e >= Fraction(2) ** 128 else float(n * Fraction(2) ** e)
    return -result if negative else result


def python_linear(x: torch.Tensor, w: torch.Tensor, products: str) -> torch.Tensor:
    rows = []
    for a in (x, w):
        values = a.double().tolist()
        exponents = [python_exponent(row) for row in values]
        rows.append([(ex, [nearest_even(Fraction(v) * Fraction(2) ** (23 - ex)) for v in row]) for ex, row in zip(exponents, values, strict=True)])
    y = torch.empty(len(rows[0]), len(rows[1]))
    last = 2 if products == "b6" else 4
    for m, (ex_m, q_m) in enumerate(rows[0]):
        for n, (ex_n, q_n) in enumerate(rows[1]):
            total = 0
            for a, b in zip(q_m, q_n, strict=True):
                total += sum(d * e << 8 * (4 - i - j) for i, d in enumerate(python_digits(a)) for j, e in enumerate(python_digits(b)) if i + j <= last)
            y[m, n] = python_float32(total * Fraction(2) ** (ex_m + ex_n - 46), total < 0)
    return y


def same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert digest(y) == digest(want), f"{int((y != want).sum())} of {want.numel()} elements differ: {y.flatten()[:4]} {want.flatten()[:4]}"


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
def test_it_equals_python_integers_for_every_mix_of_types(x_dtype: torch.dtype, w_dtype: torch.dtype, products: str) -> None:
    for scale_log2 in (0, -9, 7):
        x, w = philox_bell((3, 21), 1, x_dtype, scale_log2=scale_log2), philox_bell((4, 21), 2, w_dtype)
        for engine in ENGINES:
            same(linear_integer_ref(x, w, products=products, engine=engine), python_linear(x, w, products))


@pytest.mark.parametrize("products", PRODUCTS)
def test_it_equals_python_integers_for_every_exponent_of_a_float32(products: str) -> None:
    """Random bit patterns: rows of one huge and many small elements, results that are subnormal, zero by rounding, or infinite."""
    x = finite_patterns((24, 6), 3)
    w = finite_patterns((24, 6), 4)
    w[:8] *= 2.0**-90  # rounds: subnormal weights
    x[:12] = torch.ldexp(philox_bell((12, 6), 5), torch.arange(-150, -90, 5)[:, None])
    w[8:20] = torch.ldexp(philox_bell((12, 6), 6), torch.arange(-60, 60, 10)[:, None])
    y = linear_integer_ref(x, w, products=products)
    same(y, python_linear(x, w, products))
    tiny = (y != 0) & (y.abs() < 2.0**-126)
    assert int(tiny.sum()) > 20 and int(torch.isinf(y).sum()) > 5, "the case must reach both ends"
    assert bool(((y == 0) & (torch.signbit(y))).any()), "and negative sums that round to zero"


def finite_patterns(shape: tuple[int, int], seed: int) -> torch.Tensor:
    bits = torch.from_numpy(philox_integers(shape[0] * shape[1], seed).view("int32").copy())
    bits = torch.where(bits & 0x7F800000 == 0x7F800000, bits & ~0x00800000, bits)
    return bits.view(FP32).reshape(shape)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [0, 127, -126, -130, 5])
def test_a_maximum_just_below_a_power_of_two_never_overflows_the_top_digit(exponent: int, sign: int) -> None:
    """Mantissas from 1.984375 - ulp to 2 - ulp: without the extra exponent the largest would need a top digit of 128."""
    ulp = 2.0**-23
    for mantissa in (1.984375 - ulp, 1.984375, 1.984375 + ulp, 1.9921875, 1.9921876, 1.99609375, 2 - ulp):
        x = sign * torch.ldexp(torch.tensor([[mantissa, 0.3, -0.7]], dtype=torch.float64), torch.tensor(exponent)).float()
        ex = row_exponents_ref(x)
        assert ex.tolist() == [python_exponent(x[0].double().tolist())]
        q = quantise_ref(x, ex)
        assert q.tolist()[0] == [nearest_even(Fraction(v) * Fraction(2) ** (23 - int(ex))) for v in x[0].double().tolist()]
        assert int(q.abs().max()) <= 127 * 65536
        d = digits_ref(q)[:, 0].T.tolist()
        assert d == [python_digits(int(v)) for v in q[0]]


def test_digits_recompose_every_integer_at_the_edges_and_refuse_one_beyond() -> None:
    q = torch.cat([torch.arange(Q_MIN, Q_MIN + 70000), torch.arange(-70000, 70000), torch.arange(Q_MAX - 70000, Q_MAX + 1)]).int()[None]
    d = digits_ref(q).int()
    assert bool((d[0] * 65536 + d[1] * 256 + d[2] == q).all())
    assert digits_ref(torch.tensor([[Q_MIN, Q_MAX]], dtype=torch.int32))[:, 0].tolist() == [[-128, 127]] * 3
    for beyond in (Q_MIN - 1, Q_MAX + 1):
        with pytest.raises(ValueError, match="three balanced digits"):
            digits_ref(torch.tensor([[beyond]], dtype=torch.int32))


def test_subnormal_rows_are_sliced_as_finely_as_normal_ones() -> None:
    x = torch.tensor([[1, 0, -3], [0x7FFFFF, 5, -1], [0x7E0000, 1, 2], [0x800000, -1, 0]], dtype=torch.int32)
    x = torch.where(x < 0, (-x) | -(2**31), x).to(torch.int32).view(FP32)
    ex = row_exponents_ref(x)
    assert ex.tolist() == [python_exponent(row) for row in x.double().tolist()]
    q = quantise_ref(x, ex)
    assert q.tolist() == [[nearest_even(Fraction(v) * Fraction(2) ** (23 - e)) for v in row] for e, row in zip(ex.tolist(), x.double().tolist(), strict=True)]
    assert bool((q.double() * torch.exp2(ex.double() - 23)[:, None] == x.double())[[0, 2]].all())  # the others have 24 bits or the extra exponent
    x = x[[0, 2]]
    w = torch.tensor([[2.0**100, 0, 0], [0, 2.0**100, 0]])
    same(linear_integer_ref(x, w, products="b9"), (x.double() @ w.double().T).float())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("products", PRODUCTS)
def test_all_digits_minus_128_at_the_largest_k_stay_exact(products: str, engine: str) -> None:
    """The extreme of each accumulator (43,690 * 3 * 2^14 < 2^31) and of T; no float row reaches it, so q is planted."""
    digits = torch.full((3, 2, MAX_K), -128, dtype=torch.int8)
    weight = IntegerWeight(n=2, k=MAX_K, products=products, dtype=FP32, ex_N=torch.zeros(2, dtype=torch.int32), digits=digits, code=None)
    x = torch.full((1, MAX_K), Q_MIN * 2.0**-23)
    ex = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="none below the row's own"):
        integer_accumulate_ref(x, weight, ex)
    from kernels.exact import integer

    multiply = {"groups": integer._block_groups, "int64": integer._block_int64}.get(engine, integer._block_float64)
    total = multiply(digits[:, :1], digits, products)
    square = MAX_K * 2**14
    want = square * (2**16 + 2 * 2**8 + 3) if products == "b6" else MAX_K * Q_MIN**2
    assert total.tolist() == [[want, want]] and 3 * square < 2**31 and want < 2**62
    assert integer_finish_ref(total, ex, weight).tolist() == [[python_float32(want * Fraction(2) ** (-30 if products == "b6" else -46), False)] * 2]


def test_a_k_beyond_int32_is_refused_at_construction() -> None:
    assert prepare_integer(torch.ones(1, MAX_K, dtype=BF16)).k == 43690
    with pytest.raises(ValueError, match="43690; got K=43691"):
        prepare_integer(torch.ones(1, MAX_K + 1, dtype=BF16))


@pytest.mark.parametrize("products", PRODUCTS)
def test_the_largest_real_rows_at_the_largest_k_equal_integers(products: str) -> None:
    """Same-sign data: T of b9 needs more than 53 bits, so one float64 product of q_x q_w would be wrong here."""
    x = torch.full((1, MAX_K), 1.984375 - 2.0**-23)
    w = x.clone()
    w[0, ::3] = 1.7182817
    q_x, q_w = (int(v) for v in quantise_ref(x, row_exponents_ref(x))[0, :2]), quantise_ref(w, row_exponents_ref(w))[0].tolist()
    q = next(q_x)
    last = 2 if products == "b6" else 4
    pairs = [(i, j) for i in range(3) for j in range(3) if i + j <= last]
    product = {v: sum(python_digits(q)[i] * python_digits(v)[j] << 8 * (4 - i - j) for i, j in pairs) for v in set(q_w)}
    total = sum(product[v] for v in q_w)
    assert products == "b6" or total > 2**53
    for engine in ENGINES:
        assert linear_integer_ref(x, w, products=products, engine=engine).item() == python_float32(total * Fraction(2) ** (1 + 1 - 46), False)


def test_zero_rows_and_minus_zero_give_plus_zero() -> None:
    x, w = torch.zeros(3, 8), philox_bell((5, 8), 1, BF16)
    x[1] = -0.0
    x[2, 3] = 1.0
    w[2] = 0
    y = linear_integer_ref(x, w)
    assert row_exponents_ref(x).tolist() == [EX_ZERO, EX_ZERO, 1]
    assert not torch.signbit(y[:2]).any() and not y[:2].any() and y[2, 2] == 0
    same(linear_integer_ref(-x, -w), y)
    cancels = torch.tensor([[1.5, -1.5]])
    assert not torch.signbit(linear_integer_ref(cancels, torch.ones(1, 2))).any()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_non_finite_token_is_a_row_of_nan_and_touches_no_other(bad: float) -> None:
    for dtype in (BF16, FP16, FP32):
        x, w = philox_bell((4, 40), 1, dtype), philox_bell((5, 40), 2, BF16)
        want = linear_integer_ref(x, w)
        x[2, 7] = bad
        y = linear_integer_ref(x, w)
        assert row_exponents_ref(x)[2] == EX_NONFINITE and torch.isnan(y[2]).all()
        same(y[[0, 1, 3]], want[[0, 1, 3]])
        with pytest.raises(ValueError, match="finite elements; got 1 rows"):
            prepare_integer(x)


@pytest.mark.parametrize("m, n, k", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0)])
def test_empty_operands_give_empty_or_zero(m: int, n: int, k: int) -> None:
    for products in PRODUCTS:
        same(linear_integer_ref(torch.ones(m, k), torch.ones(n, k, dtype=BF16), products=products), torch.zeros(m, n))


def test_strides_do_not_matter() -> None:
    x, w = philox_bell((30, 6), 1), philox_bell((30, 7), 2, BF16)
    same(linear_integer_ref(x.T, w.T), linear_integer_ref(x.T.contiguous(), w.T.contiguous()))
    wide = philox_bell((6, 60), 3)
    same(linear_integer_ref(wide[:, ::2], w.T), linear_integer_ref(wide[:, ::2].contiguous(), w.T.contiguous()))


@pytest.mark.parametrize("products", PRODUCTS)
def test_permuting_k_changes_no_bit(products: str) -> None:
    x, w = philox_bell((5, 777), 1), philox_bell((6, 777), 2, FP16)
    order = torch.from_numpy(philox_integers(777, 3).astype("int64")).argsort()
    same(linear_integer_ref(x[:, order], w[:, order], products=products), linear_integer_ref(x, w, products=products))


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("cuts", [(0, 288, 576), (0, 1, 100, 333, 576)])
def test_tensor_parallel_shards_of_k_change_no_bit(products: str, cuts: tuple[int, ...]) -> None:
    x, w = philox_bell((5, 576), 1), philox_bell((6, 576), 2, BF16)
    x[1, 300:] *= 1024
    w[2, :100] *= 512
    x[3, 20] = float("nan")
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    ex_M = torch.stack([row_exponents_ref(x[:, p]) for p in parts]).amax(0)
    ex_N = torch.stack([row_exponents_ref(w[:, p]) for p in parts]).amax(0)
    shards = [prepare_integer(w[:, p], products=products, exponents=ex_N) for p in parts]
    totals = [integer_accumulate_ref(x[:, p], shard, ex_M) for p, shard in zip(parts, shards, strict=True)]
    want = linear_integer_ref(x, w, products=products)
    same(integer_finish_ref(sum(totals), ex_M, shards[0]), want)
    same(integer_finish_ref(sum(totals[::-1]), ex_M, shards[0]), want)
    with pytest.raises(ValueError, match="none below the row's own"):
        prepare_integer(w[:, parts[0]], exponents=ex_N - 20)


def test_blocks_of_the_oracle_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.exact import integer

    x, w = philox_bell((133, 100), 1), philox_bell((57, 100), 2, BF16)
    want = [linear_integer_ref(x, w, products=p) for p in PRODUCTS]
    monkeypatch.setattr(integer, "_TOKEN_BYTES", 0)
    monkeypatch.setattr(integer, "_WEIGHT_BYTES", 0)
    monkeypatch.setattr(integer, "_PREPARE_ELEMENTS", 128 * 3)
    for products, y in zip(PRODUCTS, want, strict=True):
        same(linear_integer_ref(x, w, products=products), y)
        same(linear_integer_ref(x, prepare_integer(w, products=products, prefill=False)), y)


def test_the_decode_code_of_a_bf16_weight_is_its_integer() -> None:
    """q has at most 8 significant bits, so bf16 holds it: 2 bytes a weight carry everything that three digits do."""
    w = torch.ldexp(philox_bell((64, 200), 1), torch.from_numpy(philox_integers(200, 2) % 30).int() - 25).to(BF16)
    weight = prepare_integer(w, prefill=False)
    assert weight.digits is None and bool((weight.code[:, :200].int() == quantise_ref(w, weight.ex_N)).all()) and not weight.code[:, 200:].any()
    both = torch.stack([torch.full((200,), 2.0**-140), w[0].float() * 2.0**60, w[1].float() * 2.0**-120]).to(BF16)
    same(linear_integer_ref(w, prepare_integer(both, prefill=False)), linear_integer_ref(w, both))


def test_one_rounding_at_the_edges_of_float32() -> None:
    """Ties, the step to infinity, and double rounding below 2^-126, each at T and exponent planted by hand."""
    totals = [2**24 + 1, 2**24 + 3, 2**25 + 2, 2**25 + 6, 2**61 + 1, 2**61 + 2**37, 2**61 + 2**37 + 1, 2**61 + 3 * 2**37, (2**24 - 1) << 20,
              (2**25 - 1) << 20,
              ((2**25 - 1) << 20) - 1, 1, 3, 5, 2**23 + 1, (2**24 + 2**10) | 1, (1 << 30) + (1 << 6), (1 << 30) + (1 << 6) + 1, 0]  # fmt: skip
    total = torch.tensor([totals + [-t for t in totals]]).T
    for products, scale in (("b6", 30), ("b9", 46)):
        for e in (0, 84, 66, 67, 104, -100, -148, -149, -150, -151, -160, -172, -173, -174, -175, -180, -200, -211, -250):
            ex_N = torch.tensor([e + scale], dtype=torch.int32) // 2
            weight = IntegerWeight(n=1, k=1, products=products, dtype=FP32, ex_N=ex_N, digits=None, code=None)
            ex_M = torch.full((len(total),), e + scale - int(ex_N), dtype=torch.int32)
            y = integer_finish_ref(total, ex_M, weight)
            want = [python_float32(int(t) * Fraction(2) ** e, int(t) < 0) for t in total]
            same(y, torch.tensor(want)[:, None])


def normwise(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    exact = x.double() @ w.double().T
    return (y.double() - exact).abs() / (x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)[None])


def test_the_error_stays_below_its_bound_and_b9_is_no_worse_than_b6() -> None:
    k = 4096
    x, w = philox_bell((8, k), 1), philox_bell((16, k), 2, BF16)
    bound = 2 * QUANTISATION * k**0.5 + 2.0**-24
    error = {p: normwise(linear_integer_ref(x, w, products=p), x, w) for p in PRODUCTS}
    assert float(error["b9"].max()) < bound and float(error["b6"].max()) < bound + DROPPED
    assert float(error["b9"].mean()) <= float(error["b6"].mean()) < 1e-7


def test_a_heavy_tailed_row_loses_the_ratio_of_its_maximum_to_its_median() -> None:
    """One element 2000 times the median costs the others about 11 bits less one: the error is normwise, and no more than that."""
    x, w = philox_uniform((4, 4096), 1), philox_bell((16, 4096), 2, BF16)
    heavy, without = x.clone(), w.clone()
    heavy[:, 0] = 1000.0  # the median of |x| is 0.5
    without[:, 0] = 0  # these outputs see the small elements only
    plain, lost = (linear_integer_ref(v, without, products="b9").double() - v.double() @ without.double().T for v in (x, heavy))
    bits = float(torch.log2(lost.abs().mean() / plain.abs().mean()))
    assert 7 < bits < 11, bits
    assert float(normwise(linear_integer_ref(heavy, w), heavy, w).max()) < 2 * QUANTISATION * 4096**0.5


def test_wrong_operands_are_refused_with_the_rule() -> None:
    weight = prepare_integer(torch.ones(4, 8, dtype=BF16))
    for call, text in (
        (lambda: linear_integer_ref(torch.ones(2, 9), weight), "need x_MK with K = 8"),
        (lambda: linear_integer_ref(torch.ones(2, 8, dtype=torch.float64), weight), "bf16, fp16 or fp32"),
        (lambda: linear_integer_ref(torch.ones(2, 8).int(), weight), "bf16, fp16 or fp32"),
        (lambda: linear_integer_ref(torch.ones(8), weight), "flatten"),
        (lambda: prepare_integer(torch.ones(4, 8, dtype=torch.float64)), "bf16, fp16 or fp32"),
        (lambda: prepare_integer(torch.ones(4)), "matrix"),
        (lambda: prepare_integer(torch.ones(4, 8), products="b7"), "b6 is the default"),
        (lambda: linear_integer_ref(torch.ones(2, 8), weight, engine="blas"), "engine is one of"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_shards_whose_sums_could_leave_62_bits_are_refused() -> None:
    """The largest total K still holds a sum of equal largest products; one input more does not."""
    largest = {"b6": 2**30 + 2 * 2**22 + 3 * 2**14, "b9": (127 << 16) ** 2}
    w = torch.ones(1, 8)
    for products, size in largest.items():
        most = MAX_TOTAL_K[products]
        assert most * size < 2**62 <= (most + 1) * size
        assert prepare_integer(w, products=products, total_k=most).k == 8
        for wrong in (most + 1, 7):
            with pytest.raises(ValueError, match="the total K"):
                prepare_integer(w, products=products, total_k=wrong)
    top = torch.full((1, 4), 2 - 2.0**-5, dtype=FP32)  # just below the extra bit of the exponent: the largest |q|
    assert int(quantise_ref(top, row_exponents_ref(top)).max()) <= 127 << 16
    with pytest.raises(ValueError, match="totals lie within"):
        integer_finish_ref(torch.tensor([[2**62]]), torch.zeros(1, dtype=torch.int32), prepare_integer(w))


def test_a_schedule_of_another_family_is_refused() -> None:
    for schedule in (DecodeSchedule(), "decode"):
        with pytest.raises(ValueError, match="IntegerDecodeSchedule or IntegerPrefillSchedule"):
            _multiply(torch.zeros((3, 1, 64), dtype=torch.int8), torch.zeros(1, dtype=torch.int32), prepare_integer(torch.ones(1, 8)), schedule, None, FP32)
