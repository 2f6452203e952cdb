"""Claims about the logic of family B's kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

Every float operation in them is exact or rounds once from exact operands, so here the interpreter must give the oracle's bits.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.digests import digest  # noqa: E402
from kernels.exact.integer import (  # noqa: E402
    PRODUCTS,
    IntegerWeight,
    integer_accumulate,
    integer_finish,
    integer_finish_ref,
    linear_integer,
    linear_integer_ref,
    prepare_integer,
    row_exponents,
    row_exponents_ref,
)
from kernels.exact.integer_decode import IntegerDecodeSchedule  # noqa: E402
from kernels.exact.integer_prefill import IntegerPrefillSchedule  # noqa: E402
from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.exact.slices import digits_ref, padded, quantise_ref, slice_rows  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PREFILL = [IntegerPrefillSchedule(block_m=16, block_n=16, block_k=32, group_m=2), IntegerPrefillSchedule(block_m=32, block_n=16, block_k=64, tma=True),
           IntegerPrefillSchedule(block_m=16, block_n=32, block_k=128)]  # fmt: skip
DECODE = [IntegerDecodeSchedule(block_n=16, block_k=32, split=1), IntegerDecodeSchedule(block_n=32, block_k=64, split=3, wide=False),
          IntegerDecodeSchedule(block_n=16, block_k=128, split=2), IntegerDecodeSchedule(block_n=16, block_k=64, split=1, wide=False)]  # fmt: skip


def same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert digest(y) == digest(want), f"{int((y != want).sum())} of {want.numel()} elements differ"


def hard_rows(k: int) -> torch.Tensor:
    """Every kind of row: bit patterns, subnormal, zero, non-finite, huge, and maxima just below a power of two."""
    x = torch.from_numpy(philox_integers(12 * k, 3).view("int32").copy()).view(FP32).reshape(12, k)
    x = torch.where(torch.isfinite(x), x, 0.5)
    x[1] *= 2.0**-126
    x[2:5] = torch.tensor([0.0, -0.0, 2.0**-149])[:, None]
    x[5:8] = philox_bell((3, k), 4)
    x[5, -1], x[6, 0], x[7, 0] = float("nan"), float("inf"), -(2 - 2.0**-23)
    x[8:] = torch.ldexp(philox_bell((4, k), 5), torch.tensor([-135, -60, 60, 126])[:, None])
    return x


@pytest.mark.parametrize("k", [1, 130])
def test_slicing_equals_the_reference_for_every_kind_of_row(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.exact import slices

    x = hard_rows(k)
    for step in (16384, 64):  # one pass, and rows longer than a CTA keeps
        monkeypatch.setattr(slices, "_ONE_REGISTER_PASS", step)
        for a in (x, x.to(BF16), x.to(FP16), x.t().contiguous().t()):
            planes, ex = slice_rows(a)
            assert ex.tolist() == row_exponents_ref(a).tolist() == row_exponents(a).tolist()
            same(planes, digits_ref(torch.nn.functional.pad(quantise_ref(a, ex), (0, -k % 64))))
            assert planes.shape == (3, 12, padded(k))
        given = torch.where(ex < 100, ex + 3, ex)
        same(slice_rows(x, ex_R=given)[0], digits_ref(torch.nn.functional.pad(quantise_ref(x, given), (0, -k % 64))))


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("m, n, k", [(20, 33, 130), (17, 16, 64)])
def test_every_prefill_schedule_computes_the_oracle(m: int, n: int, k: int, products: str) -> None:
    x, w = philox_bell((m, k), 1, FP32), philox_bell((n, k), 2, BF16)
    want, weight = linear_integer_ref(x, w, products=products), prepare_integer(w, products=products)
    for schedule in PREFILL:
        same(linear_integer(x, weight, schedule=schedule), want)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("m, n, k", [(1, 17, 200), (13, 16, 130), (20, 9, 70)])
def test_every_decode_schedule_computes_the_oracle(m: int, n: int, k: int, products: str) -> None:
    x, w = philox_bell((m, k), 1, FP32), philox_bell((n, k), 2, BF16)
    want = linear_integer_ref(x, w, products=products)
    for schedule in DECODE:
        for prefill in (True, False):  # digit planes, and the 2-byte code
            same(linear_integer(x, prepare_integer(w, products=products, prefill=prefill), schedule=schedule), want)
    same(linear_integer(x, prepare_integer(w, products=products, prefill=False)), want)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("schedule", [PREFILL[0], DECODE[0], DECODE[1], DECODE[2]], ids=str)
def test_hard_rows_give_the_oracle_through_every_kernel(schedule: object, products: str) -> None:
    """Tiles that mix NaN rows, zero rows, subnormal and infinite results take the slow rounding; weights of every exponent too."""
    x = hard_rows(70)
    w = torch.ldexp(philox_bell((38, 70), 6), torch.arange(-140, 126, 7)[:, None]).to(BF16)
    want = linear_integer_ref(x, w, products=products)
    assert int(((want != 0) & (want.abs() < 2.0**-126)).sum()) > 10 and torch.isinf(want).any() and torch.isnan(want).any()
    for prefill in (True, False) if isinstance(schedule, IntegerDecodeSchedule) else (True,):
        same(linear_integer(x, prepare_integer(w, products=products, prefill=prefill), schedule=schedule), want)


def test_the_code_of_a_weight_gives_its_digits_for_every_integer_of_eight_bits() -> None:
    """All q = m 2^s, |m| < 256, as weights against a unit token: b9 returns q itself."""
    q = torch.cat([torch.arange(-255, 256) * 2**s for s in range(16)])
    q = q[q.abs() <= 127 * 65536].unique()
    q = torch.nn.functional.pad(q, (0, -len(q) % 16))
    weight = IntegerWeight(n=len(q), k=1, products="b9", dtype=BF16, ex_N=torch.full((len(q),), 23, dtype=torch.int32), digits=None,
                           code=torch.nn.functional.pad(q[:, None].to(BF16), (0, 63)))  # fmt: skip
    for schedule in (IntegerDecodeSchedule(block_n=128, block_k=64, split=1),):
        same(linear_integer(torch.ones(1, 1), weight, schedule=schedule)[0], q.float())


@pytest.mark.parametrize("products", PRODUCTS)
def test_rounding_of_planted_totals_equals_the_reference(products: str) -> None:
    """Ties and double-rounding traps at every exponent, through the finish kernel."""
    totals = [2**24 + 1, 2**24 + 3, 2**45 - 1, 2**45, 2**45 + 1, 2**61 + 2**37, 2**61 + 2**37 + 1, 2**61 + 3 * 2**37 - 1,
              ((2**25 - 1) << 20) - 1, (2**25 - 1) << 20,
              1, 3, 5, 2**23 + 1, (1 << 30) + (1 << 6), (1 << 30) + (1 << 6) + 1, 0, 2**46 + 2**22, 2**60 - 1]  # fmt: skip
    ex = torch.tensor([-149, -148, -130, -101, -60, -51, 0, 30, 64, 65, 100, 128], dtype=torch.int32)
    signed = torch.tensor(totals + [-t for t in totals])
    for ex_n, ex_m in ((ex, (-148, -70, -51, 2, 64, 129, 255)), (ex[6:7], (2,))):  # every exponent, and a tile of moderate ones
        ex_M = torch.tensor(ex_m, dtype=torch.int32)
        total = signed.repeat_interleave(len(ex_n)).masked_fill(ex_n.repeat(len(signed)) == -149, 0)  # only rows of zeros have EX_ZERO
        weight = IntegerWeight(n=len(total), k=1, products=products, dtype=FP32, ex_N=ex_n.repeat(len(signed)), digits=None, code=None)
        total_MN = total.expand(len(ex_m), -1).contiguous()
        same(integer_finish(total_MN, ex_M, weight), integer_finish_ref(total_MN, ex_M, weight))


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("m", [3, 20])
def test_tensor_parallel_shards_add_up_to_the_whole(m: int, products: str) -> None:
    x, w = philox_bell((m, 200), 1), philox_bell((18, 200), 2, BF16)
    x[1, :90] *= 4096
    parts = (slice(0, 90), slice(90, 200))
    ex_M = torch.stack([row_exponents(x[:, p]) for p in parts]).amax(0)
    ex_N = torch.stack([row_exponents(w[:, p]) for p in parts]).amax(0)
    shards = [prepare_integer(w[:, p], products=products, exponents=ex_N) for p in parts]
    total = sum(integer_accumulate(x[:, p], shard, ex_M) for p, shard in zip(parts, shards, strict=True))
    same(integer_finish(total, ex_M, shards[0]), linear_integer_ref(x, w, products=products))


def test_out_is_checked_and_empty_operands_launch_nothing() -> None:
    weight = prepare_integer(torch.ones(4, 8, dtype=BF16))
    out = torch.full((2, 4), float("nan"))
    assert linear_integer(torch.ones(2, 8), weight, out=out) is out and out.tolist() == [[8.0] * 4] * 2
    with pytest.raises(ValueError, match="out is a contiguous fp32"):
        linear_integer(torch.ones(2, 8), weight, out=out.T)
    with pytest.raises(ValueError, match="digit planes"):
        linear_integer(torch.ones(2, 8), prepare_integer(torch.ones(4, 8, dtype=BF16), prefill=False), schedule=PREFILL[0])
    assert linear_integer(torch.ones(0, 8), weight).shape == (0, 4)
    assert linear_integer(torch.ones(2, 0), prepare_integer(torch.ones(4, 0))).tolist() == [[0.0] * 4] * 2
    assert linear_integer(torch.ones(2, 8), prepare_integer(torch.ones(0, 8))).shape == (2, 0)


@pytest.mark.parametrize("products", PRODUCTS)
def test_the_engine_of_packed_bytes_computes_the_oracles_totals(products: str) -> None:
    from kernels.exact.integer import integer_accumulate_ref
    from kernels.exact.integer_engines import dp4a_totals

    x, w = philox_bell((5, 70), 1), philox_bell((33, 70), 2, BF16)
    weight = prepare_integer(w, products=products)
    planes, ex_M = slice_rows(x)
    same(dp4a_totals(planes, weight.digits, products), integer_accumulate_ref(x, weight, ex_M))
