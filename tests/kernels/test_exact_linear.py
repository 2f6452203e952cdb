"""Claims about the CPU oracle of the exact linear layer: its order, its engines, its hard values, its distance to float64."""

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.exact import _compile, _oracle_c, chunks, digest, fma_f32, linear_fma_ref, philox_bell, philox_integers, philox_uniform, spans
from kernels.exact.attention_decode import AttentionDecodeSchedule
from kernels.exact.decode import pack_weight
from kernels.exact.integer_prefill import IntegerPrefillSchedule
from kernels.exact.linear import linear_fma, products_are_exact
from kernels.exact.prefill_tiled import TiledSchedule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP32), (FP32, FP32)]
ROOT = Path(__file__).resolve().parents[2]
EPS = 2.0**-24  # half a unit in the last place of 1.0 in float32

# Bound on |y - exact| / (|x| |w|): a product passes through at most `depth` roundings, (1 + EPS)^depth - 1 <= 1.01 depth EPS
# (Higham 2002, eq. 3.5). depth = longest chain in a chunk + chunks of a span (+ 0 is exact) + 3 tree levels.
DEPTH = {(k): max(stop - start for span in chunks(k) for start, stop in span) + len(chunks(k)[0]) + 3 for k in (8, 77, 777, 1000, 4096)}

needs_c = pytest.mark.skipif(not _oracle_c.available(), reason="needs a C compiler named cc")


def test_order_covers_every_product_once_in_ascending_order() -> None:
    for k in (0, 1, 7, 8, 255, 256, 257, 2048, 2056, 4096, 11008):
        flat = [i for span in chunks(k) for start, stop in span for i in range(start, stop)]
        assert flat == list(range(k))
        assert len(spans(k)) == (8 if k % 8 == 0 else 1)
        assert all(stop - start <= 256 for span in chunks(k) for start, stop in span)
        assert all(stop - start == 256 for span in chunks(k) for start, stop in span[:-1])


def naive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The order as a scalar reads it: one output at a time, one fma_f32 per product."""

    def one(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        sums = []
        for span in chunks(len(row)):
            total = torch.tensor(0.0)
            for start, stop in span:
                acc = torch.tensor(0.0)
                for i in range(start, stop):
                    acc = fma_f32(row[i], column[i], acc)
                total = total + (acc + 0.0)
            sums.append(total)
        if len(sums) == 1:
            return sums[0]
        s = sums
        return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))

    return torch.stack([torch.stack([one(a, b) for b in w.float()]) for a in x.float()])


@pytest.mark.parametrize("x_dtype, w_dtype", [(BF16, BF16), (FP32, BF16)])
@pytest.mark.parametrize("k", [5, 24, 300, 2064])  # one span; several short spans; two chunks; spans of 258 with a last chunk of 2
def test_every_engine_equals_a_naive_loop(k: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = philox_bell((1, k), 1, x_dtype), philox_bell((2, k), 2, w_dtype)
    want = digest(naive(x, w))
    assert digest(linear_fma_ref(x, w, engine="torch")) == want
    if _oracle_c.available():
        assert digest(linear_fma_ref(x, w, engine="c")) == want


def test_the_order_matters_for_the_bits_that_are_tested() -> None:
    """Reversing k changes the result, so an engine with another order cannot pass the tests above."""
    x, w = philox_bell((4, 2064), 1, FP32), philox_bell((32, 2064), 2, BF16)
    assert digest(linear_fma_ref(x, w)) != digest(linear_fma_ref(x.flip(1), w.flip(1)))


@needs_c
@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 130, 777), (5, 33, 1000), (3, 64, 2048), (2, 1, 1)])
def test_torch_engine_equals_c_engine_bit_for_bit(m: int, n: int, k: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = philox_bell((m, k), 3, x_dtype), philox_bell((n, k), 4, w_dtype)
    assert digest(linear_fma_ref(x, w, engine="torch")) == digest(linear_fma_ref(x, w, engine="c"))


@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
@pytest.mark.parametrize("k", sorted(DEPTH))
def test_error_against_float64_is_below_the_derived_bound(k: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w = philox_bell((4, k), 5, x_dtype), philox_bell((40, k), 6, w_dtype)
    exact = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().abs().t()
    error = (linear_fma_ref(x, w).double() - exact).abs()
    assert bool((error <= 1.01 * DEPTH[k] * EPS * size).all()), float((error / size).max())


def hard_operands() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    k = 520
    tiny = torch.ldexp(philox_bell((12, k), 7), torch.tensor(-70)).to(BF16)
    huge = torch.ldexp(philox_bell((12, k), 8), torch.tensor(126)).to(BF16)
    bits = torch.from_numpy(philox_integers(12 * k, 9).astype("int64") % 65536 - 32768).to(torch.int16)
    special = philox_bell((12, k), 10, BF16)
    special[0, 3], special[1, 9], special[5, 0], special[7, 1] = float("inf"), float("nan"), -float("inf"), 2.0**-133
    zeros = -torch.zeros((12, k), dtype=BF16)
    return {name: (a[:4], a[4:]) for name, a in (("underflow", tiny), ("overflow", huge), ("every bit pattern", bits.view(BF16).reshape(12, k)), ("special", special), ("negative zero", zeros))}


@needs_c
@pytest.mark.parametrize("name", list(hard_operands()))
def test_hard_values_agree_between_engines(name: str) -> None:
    x, w = hard_operands()[name]
    assert digest(linear_fma_ref(x, w, engine="torch")) == digest(linear_fma_ref(x, w, engine="c"))


def test_underflow_is_recognised_and_costs_the_slow_path() -> None:
    tiny = hard_operands()["underflow"]
    assert not products_are_exact(*tiny)
    assert not products_are_exact(*hard_operands()["overflow"])
    assert products_are_exact(philox_bell((2, 64), 1, BF16), philox_bell((2, 64), 2, BF16))
    assert not products_are_exact(philox_bell((2, 64), 1, FP32), philox_bell((2, 64), 2, BF16))


def test_subnormal_products_are_kept_and_negative_zero_ends_positive() -> None:
    smallest = torch.tensor([[2.0**-126]]), torch.tensor([[2.0**-23]])
    assert float(linear_fma_ref(*smallest)) == 2.0**-149
    y = linear_fma_ref(-torch.zeros((1, 8)), torch.ones((1, 8)))
    assert float(y) == 0 and not torch.signbit(y).item()


def test_infinity_and_nan_reach_only_their_own_outputs() -> None:
    x, w = philox_bell((3, 64), 1, BF16), philox_bell((5, 64), 2, BF16)
    w[2, 7] = float("inf")
    y = linear_fma_ref(x, w)
    assert bool(torch.isinf(y[:, 2]).all()) and bool(torch.isfinite(y[:, [0, 1, 3, 4]]).all())


@pytest.mark.parametrize("engine", ["torch", pytest.param("c", marks=needs_c)])
def test_batch_and_threads_and_padding_cannot_change_bits(engine: str) -> None:
    x, w = philox_bell((7, 1032), 1, FP32), philox_bell((70, 1032), 2, BF16)
    whole = linear_fma_ref(x, w, engine=engine)
    assert torch.equal(torch.cat([linear_fma_ref(row[None], w, engine=engine) for row in x]), whole)
    assert torch.equal(torch.cat([linear_fma_ref(x, part, engine=engine) for part in w.split(13)], 1), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(linear_fma_ref(x, w, engine=engine), whole)
    finally:
        torch.set_num_threads(threads)


def test_zeros_appended_to_the_last_chunk_cannot_change_bits() -> None:
    x, w = philox_bell((2, 77), 1, FP32), philox_bell((9, 77), 2, BF16)  # one span before and after (neither is a multiple of 8)
    padded = [torch.nn.functional.pad(a, (0, 14)) for a in (x, w)]
    assert torch.equal(linear_fma_ref(*padded), linear_fma_ref(x, w))


def test_empty_operands_give_empty_or_zero() -> None:
    for m, n, k in itertools.product((0, 2), (0, 3), (0, 16)):
        y = linear_fma_ref(torch.ones((m, k)), torch.ones((n, k), dtype=BF16))
        assert y.shape == (m, n) and bool((y == k).all())


@pytest.mark.parametrize("x, w, message", [
    (torch.ones(2, 3), torch.ones(2, 4), "one K"), (torch.ones(3), torch.ones(2, 3), "one K"),
    (torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3), "bf16, fp16 or fp32"),
])  # fmt: skip
def test_wrong_operands_are_named(x: torch.Tensor, w: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_fma_ref(x, w)


def test_flushed_subnormals_are_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(AssertionError, match="flushed"):
            linear_fma_ref(philox_uniform((1, 8), 1), philox_uniform((1, 8), 2))
    finally:
        torch.set_flush_denormal(False)


POOL = """
import torch
from kernels.exact.ieee import assert_subnormals_kept
torch.set_num_threads(4)
if FIRST: assert_subnormals_kept()                          # a good answer must not be remembered
torch.set_num_threads(1)
print(torch.set_flush_denormal(True))
torch.set_num_threads(THREADS)
torch.ones(1 << 20) + 1.0                                   # starts the pool, or more of it
torch.set_flush_denormal(False)                             # this thread alone
try:
    assert_subnormals_kept()
except AssertionError as error:
    print(error)
"""


@pytest.mark.parametrize(("first", "threads"), [(False, 4), (True, 8)], ids=["new", "grown"])
def test_a_thread_of_the_pool_that_flushes_subnormals_is_found(first: bool, threads: int) -> None:
    """torch's threads keep the state of the thread that started them."""
    code = POOL.replace("FIRST", str(first)).replace("THREADS", str(threads))
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    if out[0] == "False":
        pytest.skip("this CPU cannot flush subnormals")
    assert out[1:] == ["subnormals are flushed on a thread of this process: start a new process without torch.set_flush_denormal(True)"]


@pytest.mark.parametrize("engine", ["torch", "auto"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_of_k_are_subtrees_so_tensor_parallel_sums_have_the_same_bits(ranks: int, engine: str) -> None:
    """The spans of a rank are a complete subtree: the ranks' parts, added as the upper levels of the tree, are the whole sum."""
    k = 8 * 300  # two chunks a span, the second one short
    x_MK, w_NK = philox_bell((3, k), 21), philox_bell((20, k), 22, torch.bfloat16)
    step = k // ranks
    parts = [linear_fma_ref(x_MK[:, i : i + step], w_NK[:, i : i + step], engine=engine, spans=8 // ranks) for i in range(0, k, step)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert torch.equal(parts[0], linear_fma_ref(x_MK, w_NK))


def test_a_shard_that_cuts_a_span_is_refused() -> None:
    with pytest.raises(ValueError, match="whole spans"):
        linear_fma_ref(torch.zeros((1, 24)), torch.zeros((4, 24)), spans=3)


def test_a_tiled_prefill_cuts_rows_by_span_only_where_that_saves_a_wave() -> None:
    from kernels.exact.prefill_tiled import TiledSchedule, whole_rows

    c = TiledSchedule(wave=396)
    assert whole_rows(4096, 4096, c) == 3904  # 5.2 waves: five, and three blocks of tokens by span
    assert whole_rows(2048, 22016, c) == 2048  # 13.9 waves: nothing to gain
    assert whole_rows(64, 128, c) == 64 and whole_rows(4096, 4096, TiledSchedule()) == 4096
    assert whole_rows(64, 640, TiledSchedule(wave=3)) == 0  # five tiles, three side by side: all by span


@pytest.mark.parametrize("k", [0, 8, 77])
def test_a_weight_without_outputs_is_packed(k: int) -> None:
    for spans in (None, 1):
        packed = pack_weight(torch.zeros(0, k), spans=spans)
        assert packed.shape == (0, k) and packed.data.shape[2:] == (0, 8)
    assert pack_weight(torch.zeros(3, k)).data.shape[2] == 3
    assert linear_fma_ref(torch.ones(2, k), torch.zeros(0, k)).shape == (2, 0)


def test_a_schedule_of_another_operator_is_refused() -> None:
    for wrong in (AttentionDecodeSchedule(), IntegerPrefillSchedule(), "decode"):
        with pytest.raises(ValueError, match="linear_fma takes a schedule of kernels.exact: DecodeSchedule, PrefillSchedule"):
            linear_fma(torch.ones(2, 8), torch.ones(3, 8), schedule=wrong)


def test_the_tile_of_every_schedule_fits_shared_memory() -> None:
    sizes = []
    for m, n, k, warps in itertools.product((64, 128, 256), (64, 128, 256), (8, 16, 32), (4, 8)):
        with contextlib.suppress(ValueError):
            sizes.append(TiledSchedule(block_m=m, block_n=n, block_k=k, warps=warps).shared_bytes)
    assert max(sizes) == 224 << 10 and len(sizes) > 20


def test_an_engine_that_cannot_be_loaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose library belongs to another system, or from which nothing may be executed."""

    def refuse(path: str) -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_compile.ctypes, "CDLL", refuse)
    library, why = _compile.load.__wrapped__("probe", "int probe(void) { return 1; }")
    if not list(tmp_path.rglob("*.so")):
        pytest.skip(f"needs a C compiler: {why}")
    assert library is None and why.endswith("cannot be loaded: wrong ELF class")
