"""Claims on a Hopper GPU: the fused norm quantises exactly what it keeps, gradients and products follow float64, whatever the shape.

Run on a GPU host: python -m pytest tests/kernels/test_fp8_gemm_gpu.py.

    MIN_SQNR_DB     products in float32 and bf16, C <= 4096: derived in test_fp8_gemm.py
    NORM_DB         y in bf16 against float64: one rounding, 10 log10(3 2^16) = 52.9 dB in the worst case, and float32 sums far below it
    GRADIENT_DB     dx in bf16, the same
    MIN_FLIPPED_DB  requantised: a value near the edge of two codes may take the other one. An error of 45 dB is 0.6% of a value and a step about
                    9%, so some 5% of them move by a step: 10 log10(1 / (0.05 0.09^2)) = 34 dB, less 3 for the spread of steps
"""

import itertools

import pytest
import torch

from kernels.exact.philox import philox_bell, philox_integers
from kernels.fp8._bench_cases import sqnr_db
from kernels.fp8.epilogue import ACTIVATIONS, NORMS, Epilogue
from kernels.fp8.gemm import BACKENDS, MIN_SQNR_DB, kind_of, scaled_gemm, scaled_gemm_ref, unsupported_sizes
from kernels.fp8.norm_backward import norm_backward, norm_backward_ref
from kernels.fp8.norm_quantise import norm_quantise, norm_quantise_ref
from kernels.fp8.quantise import Quantised, quantise, quantise_ref
from kernels.fp8.recipes import GEMMS, OperandRecipe, gemm
from kernels.fp8.schedule import schedules
from studies.loka.site import Gemm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NORM_DB = GRADIENT_DB = 52.0
MIN_FLIPPED_DB = 31.0
INF, NAN = float("inf"), float("nan")
BF16, FP32 = torch.bfloat16, torch.float32
ROW, BLOCK, TENSOR = (OperandRecipe(fmt="e4m3", granularity=g) for g in ("row", "block", "tensor"))
FP8 = [name for name, recipe in GEMMS.items() if recipe.is_fp8]
# R, S, C: whole tiles; ragged in every axis (pytorch#133334: R % 256); one row; K = 13 and N = 1 of DLRM-v2; a long sum of few outputs
SHAPES = [(256, 512, 4096), (777, 333, 1000), (1, 512, 256), (2048, 1, 13), (512, 256, 4096)]


def same(a: Quantised, b: Quantised) -> bool:
    bits = [torch.where(q.data_RC.float().isnan(), 0x7F, q.data_RC.view(torch.uint8)) for q in (a, b)]
    return torch.equal(*bits) and torch.equal(a.scale, b.scale)


def wild(shape: tuple[int, ...], seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    x = philox_bell(shape, seed) * torch.exp2(torch.from_numpy(philox_integers(shape[-2], seed, 1) % 20).float() - 10)[:, None]
    x[..., min(1, shape[-2] - 1), :] = 0.0
    return x.to(dtype).cuda()


def parameters(norm: str, k: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (philox_bell((k,), 11).cuda(), philox_bell((k,), 12, BF16).cuda()) if norm in ("layernorm", "rmsnorm") else (None, None)


def operands(name: str, r: int, s: int, c: int, lead: tuple[int, ...] = ()) -> tuple[Quantised, Quantised]:
    recipe = gemm(name)
    return quantise(philox_bell((*lead, r, c), 1).cuda(), recipe.a), quantise(philox_bell((*lead, s, c), 2).cuda(), recipe.b)


# every norm with every activation on a ragged shape; then K padded to a tile, whole blocks, the widest, and M = 1, for one of each
EVERY = [(norm, activation, (777, 300)) for norm, activation in itertools.product(NORMS, ACTIVATIONS)]
PAIRS = (("layernorm", "silu"), ("blocknorm", "hardswish"))
SOME = [(*pair, shape) for pair in PAIRS for shape in ((2, 130, 13), (1, 3456), (300, 1024), (37, 16384))]


@pytest.mark.parametrize("norm, activation, shape", EVERY + SOME)
def test_the_fused_norm_quantises_exactly_what_it_keeps(norm: str, activation: str, shape: tuple[int, ...]) -> None:
    x, (w, b) = wild(shape, 1), parameters(norm, shape[-1])
    for operand in (ROW, BLOCK):
        q, saved = norm_quantise(x, norm, activation, operand, w, b, keep=True)
        assert same(q, quantise_ref(saved.y_MK, operand))
    if (norm, activation) in PAIRS:
        assert same(q, norm_quantise(x, norm, activation, BLOCK, w, b)[0]), "keeping changes no bit"
    wanted = norm_quantise_ref(x, norm, activation, ROW, w, b, keep=True)[1]
    assert sqnr_db(saved.y_MK, wanted.y_MK) >= NORM_DB - 3  # both are rounded
    for found, want in ((saved.mean, wanted.mean), (saved.rstd, wanted.rstd)):
        assert (found is None) == (want is None) and (found is None or sqnr_db(found, want) >= 100)


def test_a_given_scale_nan_infinities_strides_and_empty_batches() -> None:
    x, scale = wild((70, 512), 2, FP32), torch.tensor(0.05, device="cuda")
    q, saved = norm_quantise(x, "blocknorm", "hardswish", TENSOR, keep=True, scale=scale)
    want = (saved.y_MK * (torch.ones_like(scale) / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.data_RC.view(torch.uint8), want.view(torch.uint8))
    x[0, 3], x[2, 5], x[2, 300] = NAN, INF, -INF
    assert same(norm_quantise(x, "none", "identity", ROW)[0], quantise_ref(x, ROW))
    tall = wild((512, 70), 3)
    assert same(norm_quantise(tall.T, "rmsnorm", "silu", BLOCK)[0], norm_quantise(tall.T.contiguous(), "rmsnorm", "silu", BLOCK)[0])
    assert norm_quantise(x[:0], "layernorm", "silu", ROW)[0].data_RC.shape == (0, 512)


@pytest.mark.parametrize("norm, activation, shape", EVERY + SOME + [("layernorm", "silu", (5000, 1024))])
def test_gradients_follow_float64(norm: str, activation: str, shape: tuple[int, ...]) -> None:
    x, dy, (w, b) = (philox_bell(shape, 4) + 0.25).bfloat16().cuda(), philox_bell(shape, 5, BF16).cuda(), parameters(norm, shape[-1])
    saved = norm_quantise(x, norm, activation, ROW, w, b, keep=True)[1]
    found, want = norm_backward(dy, x, saved, norm, activation, w, b), norm_backward_ref(dy, x, saved, norm, activation, w, b)
    for g, wanted in zip(found, want, strict=True):
        assert (g is None) == (wanted is None) and (g is None or sqnr_db(g, wanted) >= GRADIENT_DB - 3)
    assert all(g is None or torch.equal(g, h) for g, h in zip(found, norm_backward(dy, x, saved, norm, activation, w, b), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("r, s, c", SHAPES)
@pytest.mark.parametrize("name", FP8)
def test_products_follow_float64(name: str, r: int, s: int, c: int, backend: str) -> None:
    a, b = operands(name, r, s, c)
    bias = philox_bell((s,), 3).cuda()
    assert unsupported_sizes(gemm(name), Gemm(batch=1, r=r, s=s, c=c), backend) == ""
    for out_dtype in (BF16, FP32) if r == 777 else (BF16,):
        out = scaled_gemm(a, b, gemm(name), out_dtype=out_dtype, bias=bias, backend=backend)
        assert out.shape == (r, s) and out.dtype == out_dtype
        assert sqnr_db(out, scaled_gemm_ref(a, b, gemm(name), out_dtype=FP32, bias=bias)) >= MIN_SQNR_DB


@pytest.mark.parametrize("name", ["rowwise-fast", "rowwise", "blockwise", "blockwise-both"])
def test_every_schedule_gives_the_product_and_equal_calls_equal_bits(name: str) -> None:
    r, s, c = 300, 200, 3000
    a, b = operands(name, r, s, c)
    want = scaled_gemm_ref(a, b, gemm(name), out_dtype=FP32)
    for plan in schedules(r, s, c, kind=kind_of(gemm(name))):
        out = scaled_gemm(a, b, gemm(name), out_dtype=FP32, schedule=plan)
        assert sqnr_db(out, want) >= MIN_SQNR_DB, plan
        assert torch.equal(out, scaled_gemm(a, b, gemm(name), out_dtype=FP32, schedule=plan)), plan


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_batches_multiply_matrix_by_matrix_and_empty_ones_are_empty(name: str) -> None:
    a, b = operands(name, 130, 70, 200, (2, 3))
    assert sqnr_db(scaled_gemm(a, b, gemm(name), out_dtype=FP32), scaled_gemm_ref(a, b, gemm(name), out_dtype=FP32)) >= MIN_SQNR_DB
    a, b = operands(name, 0, 70, 200)
    assert scaled_gemm(a, b, gemm(name)).shape == (0, 70)


def test_without_fast_accumulation_a_long_sum_of_one_sign_keeps_its_value() -> None:
    """Same-sign inputs at C = 16384 lose about 1% in a 14-bit accumulator that cuts towards zero (n / 2 steps of 2^-14 ln 2 of the sum, n = 512)."""
    r, s, c = 128, 128, 16384
    x, w = philox_bell((r, c), 1).abs().cuda(), philox_bell((s, c), 2).abs().cuda()
    bias = {}
    for name in ("rowwise", "rowwise-fast"):
        a, b = quantise(x, gemm(name).a), quantise(w, gemm(name).b)
        plan = next(p for p in schedules(r, s, c, kind=kind_of(gemm(name))) if p.split == 1)
        out, want = scaled_gemm(a, b, gemm(name), out_dtype=FP32, schedule=plan), scaled_gemm_ref(a, b, gemm(name), out_dtype=FP32)
        bias[name] = float((out / want - 1).mean())
    assert abs(bias["rowwise"]) <= 2.0**-12 and -0.03 <= bias["rowwise-fast"] <= -0.003, bias


@pytest.mark.parametrize(
    "name, s, requantise",
    [*((name, 640, BLOCK) for name in ("rowwise-fast", "rowwise", "tensorwise", "blockwise", "blockwise-both")), ("rowwise-fast", 4096, BLOCK), ("rowwise", 200, ROW), ("blockwise", 512, None)],
)
def test_the_epilogue_normalises_activates_and_requantises(name: str, s: int, requantise: OperandRecipe | None) -> None:
    a, b = operands(name, 777, s, 1000)
    bias, both = philox_bell((s,), 3).cuda(), dict(norm="blocknorm", activation="hardswish")
    plain = scaled_gemm(a, b, gemm(name), out_dtype=FP32, bias=bias, epilogue=Epilogue(**both))
    assert sqnr_db(plain, scaled_gemm_ref(a, b, gemm(name), out_dtype=FP32, bias=bias, epilogue=Epilogue(**both))) >= MIN_SQNR_DB
    if requantise:
        q = scaled_gemm(a, b, gemm(name), bias=bias, epilogue=Epilogue(**both, requantise=requantise))
        assert same(q, quantise_ref(plain, requantise)), "requantised is the plain result quantised, bit for bit"
        assert sqnr_db(q.dequantise(), scaled_gemm_ref(a, b, gemm(name), bias=bias, epilogue=Epilogue(**both, requantise=requantise)).dequantise()) >= MIN_FLIPPED_DB


def test_a_captured_graph_replays_a_layer() -> None:
    recipe, x, w = gemm("rowwise-fast"), wild((512, 1024), 6), philox_bell((768, 1024), 7, BF16).cuda()

    def layer() -> torch.Tensor:
        return scaled_gemm(norm_quantise(x, "blocknorm", "hardswish", recipe.a)[0], quantise(w, recipe.b), recipe)

    want = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    out.fill_(NAN)
    graph.replay()
    assert torch.equal(out, want)
    x.mul_(2.0)
    graph.replay()
    assert torch.equal(out, layer()) and not torch.equal(out, want)
