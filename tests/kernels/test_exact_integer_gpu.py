"""Claim: on a GPU family B equals its CPU oracle bit for bit, for every schedule, operand and engine.

Run on a GPU host: python -m pytest tests/kernels/test_exact_integer_gpu.py. There is no tolerance here: digests are compared.
"""

import pytest
import torch

from kernels.exact.digests import digest
from kernels.exact.integer import (
    MAX_K,
    PRODUCTS,
    integer_accumulate,
    integer_finish,
    linear_integer,
    linear_integer_ref,
    prepare_integer,
    row_exponents,
    row_exponents_ref,
)
from kernels.exact.integer_decode import integer_decode_schedules
from kernels.exact.integer_engines import engines
from kernels.exact.integer_prefill import integer_prefill_schedules
from kernels.exact.norm import rmsnorm_ref
from kernels.exact.philox import philox_bell, philox_integers
from kernels.exact.sliced import (
    add_rmsnorm_sliced,
    add_rmsnorm_sliced_ref,
    rmsnorm_sliced,
    rmsnorm_sliced_ref,
    swiglu_sliced,
    swiglu_sliced_ref,
)
from kernels.exact.slices import digits_ref, quantise_ref, slice_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(x, w) for x in (BF16, FP16, FP32) for w in (BF16, FP16, FP32)]
# (N, K): whole blocks; K of SmolLM2; padding inside a block; less than a block
SHAPES_NK = [(160, 4096), (96, 576), (65, 1000), (33, 777), (40, 5)]


def same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert digest(y) == digest(want), f"{int((y.cpu() != want.cpu()).sum())} of {want.numel()} elements differ"


def hard_rows(rows: int, k: int) -> torch.Tensor:
    """Bit patterns of every exponent, subnormal, zero, non-finite and huge rows, maxima just below a power of two."""
    x = torch.from_numpy(philox_integers(rows * k, 3).view("int32").copy()).view(FP32).reshape(rows, k)
    x = torch.where(torch.isfinite(x), x, 0.5)
    x[1::9] *= 2.0**-126
    x[2::9] = 0.0
    x[3::9] = -(2.0**-149)
    x[4::9] = philox_bell(x[4::9].shape, 4)
    x[4::18, -1] = float("nan")
    x[5::9] = torch.ldexp(philox_bell(x[5::9].shape, 5), torch.tensor(-135))
    x[6::9] = philox_bell(x[6::9].shape, 6)
    x[6::9, 0] = -(2 - 2.0**-23)
    x[7::9] = torch.ldexp(philox_bell(x[7::9].shape, 7), torch.tensor(60))
    x[8::18, 0] = float("inf")
    return x


@pytest.mark.parametrize("k", [1, 70, 576, 4096, 14336, 20000, MAX_K])
def test_slicing_equals_the_reference_for_every_kind_of_row(k: int) -> None:
    for dtype in (FP32, BF16, FP16):
        x = hard_rows(20, k).to(dtype)
        planes, ex = slice_rows(x.cuda())
        assert ex.tolist() == row_exponents_ref(x).tolist() == row_exponents(x.cuda()).tolist()
        same(planes, digits_ref(torch.nn.functional.pad(quantise_ref(x, ex.cpu()), (0, -k % 64))))


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("x_dtype, w_dtype", DTYPES)
def test_decode_and_prefill_equal_the_oracle(x_dtype: torch.dtype, w_dtype: torch.dtype, products: str) -> None:
    for n, k in SHAPES_NK:
        x, w = philox_bell((70, k), 1, x_dtype), philox_bell((n, k), 2, w_dtype)
        weight, want = prepare_integer(w.cuda(), products=products), linear_integer_ref(x, w, products=products)
        for m in (1, 2, 7, 8, 9, 16, 17, 70):
            same(linear_integer(x[:m].cuda(), weight), want[:m])
        same(linear_integer(x.cuda(), prepare_integer(w.cuda(), products=products, prefill=False)), want)


@pytest.mark.parametrize("products", PRODUCTS)
def test_every_decode_schedule_gives_the_same_bits(products: str) -> None:
    for m, n, k in ((3, 200, 1088), (16, 72, 777)):
        x, w = philox_bell((m, k), 3, FP32), philox_bell((n, k), 4, BF16)
        want, weight = linear_integer_ref(x, w, products=products), prepare_integer(w.cuda(), products=products)
        for schedule in integer_decode_schedules()[:: 29 if products == "b9" else 11]:
            same(linear_integer(x.cuda(), weight, schedule=schedule), want)


@pytest.mark.parametrize("products", PRODUCTS)
def test_every_prefill_schedule_gives_the_same_bits(products: str) -> None:
    x, w = philox_bell((300, 1088), 5, FP32), philox_bell((270, 1088), 6, BF16)
    want, weight = linear_integer_ref(x, w, products=products), prepare_integer(w.cuda(), products=products)
    for schedule in integer_prefill_schedules(products):
        same(linear_integer(x.cuda(), weight, schedule=schedule), want)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("m", [5, 16, 100])
def test_hard_rows_give_the_same_bits(m: int, products: str) -> None:
    """NaN rows, zero rows, subnormal and infinite results share tiles with ordinary rows; weights of every exponent."""
    x = hard_rows(m, 300)
    w = torch.ldexp(philox_bell((76, 300), 8), torch.arange(-140, 126, 7).repeat(2)[:, None])
    for w_dtype in (BF16, FP32):
        want = linear_integer_ref(x, w.to(w_dtype), products=products)
        same(linear_integer(x.cuda(), prepare_integer(w.to(w_dtype).cuda(), products=products)), want)


@pytest.mark.parametrize("name", [name for name, engine in engines().items() if engine.device == "cuda"])
@pytest.mark.parametrize("products", PRODUCTS)
def test_engines_that_share_no_instruction_give_one_digest(products: str, name: str) -> None:
    for m, n, k in ((5, 40, 576), (70, 96, 1000)):
        x, w = philox_bell((m, k), 9, FP32), philox_bell((n, k), 10, BF16)
        same(engines()[name].run(x, w, products), linear_integer_ref(x, w, products=products, engine="int64"))


@pytest.mark.parametrize("products", PRODUCTS)
def test_the_largest_k_equals_the_oracle(products: str) -> None:
    x = torch.full((20, MAX_K), 1.984375 - 2.0**-23)
    x[1::2, ::3] = 1.7182817
    w = x[:9].clone()
    weight, want = prepare_integer(w.cuda(), products=products), linear_integer_ref(x, w, products=products)
    same(linear_integer(x.cuda(), weight), want)
    same(linear_integer(x[:3].cuda(), weight), want[:3])


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("m", [3, 40])
def test_tensor_parallel_shards_add_up_to_the_whole(m: int, products: str) -> None:
    x, w = philox_bell((m, 576), 11), philox_bell((50, 576), 12, BF16)
    x[1, :90] *= 4096
    parts = (slice(0, 288), slice(288, 576))
    x_gpu, w_gpu = x.cuda(), w.cuda()
    ex_M = torch.stack([row_exponents(x_gpu[:, p]) for p in parts]).amax(0)
    ex_N = torch.stack([row_exponents(w_gpu[:, p]) for p in parts]).amax(0)
    shards = [prepare_integer(w_gpu[:, p], products=products, exponents=ex_N) for p in parts]
    total = sum(integer_accumulate(x_gpu[:, p], shard, ex_M) for p, shard in zip(parts, shards, strict=True))
    same(integer_finish(total, ex_M, shards[0]), linear_integer_ref(x, w, products=products))


def test_a_captured_graph_replays_the_same_bits() -> None:
    x, w = philox_bell((8, 1024), 13).cuda(), prepare_integer(philox_bell((256, 1024), 14, BF16).cuda())
    want, out = linear_integer(x, w), torch.full((8, 256), float("nan"), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear_integer(x, w, out=out)
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        same(out, want)


def test_empty_operands_strides_and_devices() -> None:
    w = prepare_integer(philox_bell((8, 16), 1, BF16).cuda())
    assert linear_integer(torch.empty((0, 16), device="cuda"), w).shape == (0, 8)
    same(linear_integer(torch.empty((2, 0), device="cuda"), prepare_integer(torch.empty((8, 0), device="cuda"))), torch.zeros(2, 8))
    x = philox_bell((16, 40), 2)
    same(linear_integer(x.cuda().t(), prepare_integer(x.cuda().t())), linear_integer_ref(x.t(), x.t()))
    with pytest.raises(ValueError, match="on one device"):
        linear_integer(torch.ones(2, 16), w)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite elements"):
            prepare_integer(torch.full((2, 4), bad, device="cuda"))


@pytest.mark.parametrize("m, k", [(1, 4096), (8, 11008), (20, 576), (3, 18944)])
def test_operators_that_slice_their_result_equal_their_references(m: int, k: int) -> None:
    """The last K is longer than a program of SwiGLU keeps."""
    x, delta, w_K = philox_bell((m, k), 21), philox_bell((m, k), 22), philox_bell((k,), 23, BF16)
    x[0, -1] = float("inf")
    both = torch.cat([x, delta], 1)
    for num_warps in (None, 8, 16):
        found = rmsnorm_sliced(x.cuda(), w_K.cuda(), out_dtype=BF16, num_warps=num_warps), rmsnorm_sliced_ref(x, w_K, out_dtype=BF16)
        h, added = add_rmsnorm_sliced(x.cuda(), delta.cuda(), w_K.cuda(), 1e-5, BF16, num_warps=num_warps)
        h_ref, added_ref = add_rmsnorm_sliced_ref(x, delta, w_K, 1e-5, BF16)
        same(h, h_ref)
        for y, want in (found, (added, added_ref)):
            same(y.planes, want.planes)
            same(y.ex_R, want.ex_R)
    y, want = swiglu_sliced(*both.cuda().chunk(2, dim=1), out_dtype=BF16), swiglu_sliced_ref(x, delta, out_dtype=BF16)
    same(y.planes, want.planes)
    same(y.ex_R, want.ex_R)


@pytest.mark.parametrize("m", [1, 8, 16, 40])
def test_linears_share_a_sliced_operand_and_leave_their_tickets_as_zeros(m: int) -> None:
    """Many calls: the program that adds the parts of K is another one each time."""
    x, w_K = philox_bell((m, 4096), 24), philox_bell((4096,), 25, BF16)
    y, sliced = rmsnorm_ref(x, w_K, out_dtype=BF16), rmsnorm_sliced(x.cuda(), w_K.cuda(), out_dtype=BF16)
    for n in (4096, 100):
        w = philox_bell((n, 4096), 26 + n, BF16)
        want, weight = linear_integer_ref(y, w), prepare_integer(w.cuda())
        for _ in range(50):
            same(linear_integer(sliced, weight), want)
        assert not weight.tickets.any()
