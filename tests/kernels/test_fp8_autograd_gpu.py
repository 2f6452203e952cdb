"""Claims on a GPU: operands are the emulation's bit for bit, products within their accumulation, gradients too; compiled and captured they stay.

Run on a GPU host: python -m pytest tests/kernels/test_fp8_autograd_gpu.py.
"""

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.fp8.autograd import linear, matmul, product, quantised
from kernels.fp8.recipes import GEMMS, RECIPES, gemm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP32 = torch.bfloat16, torch.float32
# Sums along C <= 4096 in 14 bits, cut off every 32 towards zero: 45 dB and more of zero-mean numbers (kernels.fp8.emulate; 50 dB at C = 4096).
# An output in bf16 rounds at 2^-9, 2^-18/3 of its square on average: 56 dB and more. Together above 44.
LEAST_DB = {FP32: 45.0, BF16: 44.0}
# Emulated TF32 rounds to nearest, hardware may truncate: one unit of 2^-10 in each operand, |error| / |x| up to 2^-10, mean square 2^-20 / 3.
TF32_DB = 55.0
SHAPES_MNK = [(1, 16, 16), (130, 48, 80), (257, 512, 3456), (2048, 160, 24), (6144, 48, 144), (300, 1, 256), (64, 512, 13)]
LAYERS = sorted(set(RECIPES) - {"tf32", "fp32"})


def snr_db(y: torch.Tensor, want: torch.Tensor) -> float:
    noise = (y.cpu().double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise)) if noise > 0 else float("inf")


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", sorted(name for name, g in GEMMS.items() if g.is_fp8))
def test_operands_are_those_of_the_cpu_bit_for_bit(name: str, transpose: bool) -> None:
    for shape in ((1, 13), (130, 300), (3, 70, 129)):
        x = philox_bell(shape, 1, BF16)
        for operand in (gemm(name).a, gemm(name).b):
            ours, want = quantised(x.cuda(), operand, transpose), quantised(x, operand, transpose)
            assert torch.equal(ours.data_RC.cpu().view(torch.uint8), want.data_RC.view(torch.uint8)) and torch.equal(ours.scale.cpu(), want.scale)


@pytest.mark.parametrize("m, n, k", SHAPES_MNK)
@pytest.mark.parametrize("name", sorted(GEMMS))
def test_products_of_every_recipe_at_ragged_sizes(name: str, m: int, n: int, k: int) -> None:
    a, b, bias = philox_bell((m, k), 2, BF16), philox_bell((n, k), 3), philox_bell((n,), 4, BF16)
    for out_dtype in (BF16, FP32):
        y = product(a.cuda(), b.cuda(), gemm(name), out_dtype, bias=bias.cuda())
        assert y.dtype == out_dtype and y.shape == (m, n)
        least = TF32_DB if name == "tf32" else LEAST_DB[out_dtype]
        assert snr_db(y, product(a, b, gemm(name), FP32, bias=bias)) > least


@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_gradients_are_the_emulations(name: str) -> None:
    m, n, k = 300, 272, 208
    x, w, bias, dy = philox_bell((m, k), 5, BF16), philox_bell((n, k), 6), philox_bell((n,), 7), philox_bell((m, n), 8, BF16)
    found = []
    for device in ("cuda", "cpu"):
        leaves = [t.to(device).requires_grad_() for t in (x, w, bias)]
        y = linear(*leaves, RECIPES[name])
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(device))])
    for ours, want in zip(*found, strict=True):
        assert ours.dtype == want.dtype and snr_db(ours, want) > LEAST_DB[BF16]


@pytest.mark.parametrize("name", ["rowwise", "bf16"])
def test_batched_matmuls_and_their_gradients(name: str) -> None:
    x, y, dout = philox_bell((3, 150, 144), 9, BF16), philox_bell((3, 144, 80), 10, BF16), philox_bell((3, 150, 80), 11, BF16)
    found = []
    for device in ("cuda", "cpu"):
        leaves = [t.to(device).requires_grad_() for t in (x, y)]
        out = matmul(*leaves, RECIPES[name])
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(device))])
    for ours, want in zip(*found, strict=True):
        assert snr_db(ours, want) > LEAST_DB[BF16]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "rowwise-hp-wgrad"])
def test_no_rows_zero_rows_and_values_that_are_not_finite(name: str) -> None:
    w = philox_bell((48, 80), 14, BF16).cuda().requires_grad_()
    empty = torch.zeros(0, 80, dtype=BF16, device="cuda", requires_grad=True)
    linear(empty, w, None, RECIPES[name]).sum().backward()
    assert empty.grad.shape == (0, 80) and not bool(w.grad.any())
    x = philox_bell((33, 80), 15, BF16).cuda()
    x[3], x[5, 7], x[6, 1] = 0.0, float("nan"), float("inf")
    y = linear(x, w.detach(), None, RECIPES[name])
    others = [i for i in range(33) if i != 5]
    assert not bool(y[3].any()) and bool(y[5].isnan().all()) and bool(y[others].isfinite().all())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_compiled_and_captured_a_layer_follows_weights_that_change_on_the_device(name: str) -> None:
    """A replay quantises the weight again: after an update in place it gives what an eager step gives."""
    x, w = philox_bell((256, 512), 12, BF16).cuda(), philox_bell((384, 512), 13).cuda()
    step = torch.compile(lambda x, w: linear(x, w, None, RECIPES[name]), fullgraph=True)
    for _ in range(3):
        step(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x, w)
    w.mul_(-3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert snr_db(y.cpu(), linear(x, w, None, RECIPES[name]).cpu().float()) > 100  # the same kernels on the same numbers
