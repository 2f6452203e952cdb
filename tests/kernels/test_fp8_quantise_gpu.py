"""Claim: on a GPU quantise gives the reference's bits, for every recipe, layout and size; statistics the reference's counts.

Run on a GPU host: python -m pytest tests/kernels/test_fp8_quantise_gpu.py. Scales and bytes are compared, with one NaN. The only tolerance is
that of a row's sums: float32 in any order over pieces of at most 4096 numbers, n 2^-24 of the sum of magnitudes for n of them.
"""

import itertools
import math

import pytest
import torch

from kernels.exact.philox import philox_bell, philox_integers
from kernels.fp8.formats import E4M3, E5M2, cast
from kernels.fp8.quantise import LONG, SHORT, Quantised, quantise, quantise_ref
from kernels.fp8.recipes import GRANULARITIES, OperandRecipe
from kernels.fp8.statistics import statistics, statistics_ref

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

INF, NAN = float("inf"), float("nan")
WAYS = list(itertools.product(GRANULARITIES, (False, True)))
# one number; one row; M % 256 != 0 and odd K; K = 13 as in DLRM's first layer; whole tiles; a batch of small matrices; columns just within and
# just beyond one program; rows just within and beyond; enough tiles that programs of the cast take several; rows in two pieces
SHAPES = [(1, 1), (1, 512), (2047, 479), (2050, 13), (512, 1024), (33, 48, 160), (SHORT, 96), (SHORT + 1, 96), (3, LONG), (3, LONG + 24), (5000, 1040), (131, 2304), (5, 18432)]


def wild(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different sizes, with a zero row, NaN and infinities where they fit."""
    rows = math.prod(shape[:-1])
    x = philox_bell(shape, seed) * torch.exp2(torch.from_numpy(philox_integers(rows, seed, 1).reshape(*shape[:-1], 1) % 24).float() - 16)
    if x.numel() > 400 and shape[-2] > 1:
        x[..., 1, :] = 0.0
        x.view(-1)[[0, 7, 9]] = torch.tensor([NAN, INF, -INF])
    return x.to(dtype)


def same(got: Quantised, want: Quantised) -> None:
    bits = [torch.where(q.data_RC.float().isnan(), 0x7F, q.data_RC.view(torch.uint8)).cpu() for q in (got, want)]
    assert torch.equal(got.scale.cpu(), want.scale.cpu()), f"{int((got.scale.cpu() != want.scale.cpu()).sum())} of {want.scale.numel()} scales differ"
    assert torch.equal(*bits), f"{int((bits[0] != bits[1]).sum())} of {bits[0].numel()} bytes differ"


@pytest.mark.parametrize("granularity, transpose", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantise_equals_the_reference(shape: tuple[int, ...], granularity: str, transpose: bool) -> None:
    for number, (fmt, power_of_two) in enumerate(itertools.product(("e4m3", "e5m2"), (False, True))):
        x = wild(shape, number, (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)[number])
        operand = OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two)
        same(quantise(x.cuda(), operand, transpose=transpose), quantise_ref(x, operand, transpose=transpose))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_hardware_casts_every_bf16_number_and_every_tie_as_the_reference(fmt) -> None:
    """amax = the format's largest number makes the power-of-two scale 1: what is stored is the cast alone."""
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat([bf16, middle, -middle, torch.nextafter(middle, torch.tensor(INF)), torch.nextafter(middle, torch.tensor(0.0)), torch.tensor([fmt.max])])
    x = torch.where(x.isfinite() & (x.abs() > fmt.max), 0.0, x)[None]
    for granularity in ("row", "tensor"):
        q = quantise(x.cuda(), OperandRecipe(fmt=fmt.name, granularity=granularity, power_of_two=True))
        assert (q.scale == 1).all()
        same(q, Quantised(cast(x, fmt), torch.ones_like(q.scale).cpu(), q.operand))


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_any_strides_give_the_numbers_they_show(granularity: str, transpose: bool) -> None:
    base = wild((4, 70, 300), 8)
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    for view in (
        lambda b: b[:, 2:, 3:], lambda b: b[::2, ::3], lambda b: b.mT, lambda b: b[..., ::2], lambda b: b.transpose(0, 1), lambda b: b[1].expand(3, 70, 300),
        lambda b: b[:, :, :1].expand(4, 70, 9), lambda b: b[:, :1], lambda b: b.unflatten(0, (2, 2)).transpose(0, 1),
    ):  # fmt: skip
        same(quantise(view(base.cuda()), operand, transpose=transpose), quantise_ref(view(base), operand, transpose=transpose))


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_empty_and_hopeless_tensors(granularity: str, transpose: bool) -> None:
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    hopeless = torch.full((130, 140), NAN)
    hopeless[::2] = INF
    for x in (torch.zeros(0, 5), torch.zeros(5, 0), torch.zeros(2, 0, 3), torch.zeros(130, 140), hopeless):
        q = quantise(x.cuda(), operand, transpose=transpose)
        assert (q.scale == 1).all()
        same(q, quantise_ref(x, operand, transpose=transpose))


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_offsets_beyond_31_bits(granularity: str, transpose: bool) -> None:
    """A tensor of more than 2^31 elements: its last rows are those of a reference that saw the same amax."""
    rows, columns = 2**31 // 1024 + 128, 1024
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    tail = wild((256, columns), 9).nan_to_num(0.0, 0.0, 0.0)
    tail[7, :] = 300.0  # the amax of the tensor and of every column
    x[-256:] = tail.cuda()
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    got, want = quantise(x, operand, transpose=transpose), quantise_ref(tail, operand, transpose=transpose)
    data = got.data_RC[:, -256:] if transpose else got.data_RC[-256:]
    if granularity == "tensor" or granularity == "row" and transpose:
        scale = got.scale
    else:
        n = want.scale.shape[-1] if transpose else want.scale.shape[-2]
        scale = got.scale[:, -n:] if transpose else got.scale[-n:]
    same(Quantised(data.contiguous(), scale.contiguous(), operand), want)


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_nothing_waits_for_the_gpu_and_a_captured_graph_reads_the_numbers_of_now(granularity: str, transpose: bool) -> None:
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    first, second = wild((640, 272), 10), wild((640, 272), 11)
    x = first.cuda()
    same(quantise(x, operand, transpose=transpose), quantise_ref(first, operand, transpose=transpose))
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantise(x, operand, transpose=transpose)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantise(x, operand, transpose=transpose)
    x.copy_(second)
    graph.replay()
    same(q, quantise_ref(second, operand, transpose=transpose))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sample", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (2050, 13), (3, 70, 1000), (5000, 1024), (7, 20000)], ids=str)
def test_statistics_count_what_the_reference_counts(shape: tuple[int, ...], sample: int, dtype: torch.dtype) -> None:
    x = wild(shape, 12, dtype)
    got, want = statistics(x.cuda(), sample=sample).cpu(), statistics_ref(x, sample=sample)
    for name in ("exponents", "zeros", "nonfinite", "amax", "row_amax"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    bound = (min(shape[-1], 4096) + 1) * 2.0**-24
    rows = x.double().reshape(-1, shape[-1])[::sample]
    assert ((got.row_sum_squares - want.row_sum_squares).abs() <= bound * want.row_sum_squares).all()
    assert (got.sum - want.sum).abs() <= bound * torch.where(rows.isfinite(), rows.abs(), 0.0).sum()
    assert (got.sum_squares - want.sum_squares).abs() <= bound * want.sum_squares


def test_statistics_of_any_bits_are_exact_and_the_same_each_time() -> None:
    bits = torch.from_numpy(philox_integers(1 << 20, 13).astype("int64").astype("int32").reshape(1024, 1024)).view(torch.float32)
    want = statistics_ref(bits)
    runs = [statistics(bits.cuda()).cpu() for _ in range(3)]
    for got in runs:
        assert torch.equal(got.exponents, want.exponents) and got.zeros == want.zeros and got.nonfinite == want.nonfinite
        assert torch.equal(got.row_amax, want.row_amax) and torch.equal(got.row_sum_squares, runs[0].row_sum_squares)


def test_statistics_beyond_31_bits() -> None:
    x = torch.zeros(2**31 // 1024 + 4, 1024, dtype=torch.bfloat16, device="cuda")
    x[-3:] = 3.0
    s = statistics(x).cpu()
    assert s.zeros == x.numel() - 3072 and s.exponents[127] == 3072 and s.sum == 3 * 3072 and s.row_amax[-4:].tolist() == [0.0, 3.0, 3.0, 3.0]
