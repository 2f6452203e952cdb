"""Claims about the fused norm, activation and quantising that need no GPU: references, what is refused, and the compiled kernels.

    F64       float64 against float64 in another order: sqrt(K) 2^-50 of a result of size 1, K <= 600
    ROUNDED   one rounding to bf16 of an exact result: half a unit of its 8 bits, 2^-8 of it, by way of float32, 2^-24 more
    SLOPE     central differences in float64 with step h = 2^-17: the error of order h^2, below 2^-32, and rounding 2^-52 / h = 2^-35
"""

import itertools

import pytest
import torch

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.exact.philox import philox_bell
from kernels.fp8 import bench
from kernels.fp8.epilogue import ACTIVATIONS, NORMS, activate_ref, normalise_ref
from kernels.fp8.norm_backward import norm_backward, norm_backward_ref
from kernels.fp8.norm_quantise import MAX_K, Saved, norm_quantise, norm_quantise_ref, row_schedule
from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import OperandRecipe

F64 = 600**0.5 * 2.0**-50
ROUNDED = 2.0**-8 + 2.0**-23
STEP, SLOPE = 2.0**-17, 2.0**-30
ROW, BLOCK, TENSOR, SQUARE = (OperandRecipe(fmt="e4m3", granularity=g) for g in ("row", "block", "tensor", "square"))
torch_activation = {"identity": lambda v: v, "silu": torch.nn.functional.silu, "hardswish": torch.nn.functional.hardswish}


def torch_norm(x: torch.Tensor, norm: str, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    """torch's own operators in float64; BlockNorm as the notes on LoKA write it: RMSNorm of a view [-1, 256]."""
    x, k = x.double(), x.shape[-1]
    if norm == "layernorm":
        return torch.nn.functional.layer_norm(x, (k,), w.double(), b.double(), eps=1e-5)
    if norm == "rmsnorm":
        return torch.nn.functional.rms_norm(x, (k,), w.double(), eps=1e-5) + b.double()
    return torch.nn.functional.rms_norm(x.reshape(-1, 256), (256,), eps=1e-5).view_as(x) if norm == "blocknorm" else x


def parameters(norm: str, k: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (philox_bell((k,), 11), philox_bell((k,), 12)) if norm in ("layernorm", "rmsnorm") else (None, None)


@pytest.mark.parametrize("norm, activation", list(itertools.product(NORMS, ACTIVATIONS)))
def test_norms_and_activations_are_torch_s_in_float64(norm: str, activation: str) -> None:
    x, (w, b) = philox_bell((2, 3, 512), 1, scale_log2=2), parameters(norm, 512)
    found = activate_ref(normalise_ref(x, norm, w, b), activation)
    want = torch_activation[activation](torch_norm(x, norm, w, b))
    assert found.dtype == torch.float64 and ((found - want).abs() <= F64 * (1 + want.abs())).all()


def test_a_last_block_may_be_shorter_and_is_normalised_by_its_own_length() -> None:
    x = philox_bell((4, 600), 2)
    found, tail = normalise_ref(x, "blocknorm"), x[:, 512:].double()
    assert ((found[:, 512:] - tail * torch.rsqrt(tail.square().mean(-1, keepdim=True) + 1e-5)).abs() <= F64).all()
    assert ((found[:, :512] - normalise_ref(x[:, :512], "blocknorm")).abs() <= F64).all()
    assert ((normalise_ref(x[:, :64], "blocknorm", block=32) - normalise_ref(x[:, :64].reshape(8, 32), "rmsnorm").view(4, 64)).abs() <= F64).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operand", [ROW, BLOCK, TENSOR], ids=lambda o: o.granularity)
def test_the_result_is_rounded_once_to_x_s_type_and_then_quantised(operand: OperandRecipe, dtype: torch.dtype) -> None:
    x, scale = philox_bell((5, 512), 3).to(dtype), torch.tensor(0.02) if operand is TENSOR else None
    q, saved = norm_quantise_ref(x, "layernorm", "silu", operand, *parameters("layernorm", 512), keep=True, scale=scale)
    exact = activate_ref(normalise_ref(x, "layernorm", *parameters("layernorm", 512)), "silu")
    assert saved.y_MK.dtype == dtype and ((saved.y_MK.double() - exact).abs() <= ROUNDED * exact.abs()).all()
    if operand is TENSOR:
        want = (saved.y_MK.float() * (torch.ones(()) / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(q.data_RC.float(), want.float()) and torch.equal(q.scale, scale)
    else:
        want = quantise_ref(saved.y_MK, operand)
        assert torch.equal(q.data_RC.view(torch.uint8), want.data_RC.view(torch.uint8)) and torch.equal(q.scale, want.scale)
    assert saved.mean.shape == saved.rstd.shape == (5, 1) and norm_quantise_ref(x, "none", "silu", operand, scale=scale)[1] is None
    again = (x.double() - saved.mean.double()) * saved.rstd.double()
    assert ((again.square().mean(-1) - 1).abs() <= 2.0**-10).all()  # eps = 1e-5 of a variance near 1/3


@pytest.mark.parametrize("norm, activation", list(itertools.product(NORMS, ACTIVATIONS)))
def test_gradients_are_the_slopes_of_the_forward_pass(norm: str, activation: str) -> None:
    x, dy, (w, b) = philox_bell((3, 300), 4), philox_bell((3, 300), 5).double(), parameters(norm, 300)
    saved = norm_quantise_ref(x, norm, activation, ROW, w, b, keep=True)[1]
    found = norm_backward_ref(dy.float(), x, saved, norm, activation, w, b)
    f = lambda *v: float((activate_ref(normalise_ref(v[0], norm, *v[1:]), activation) * dy).sum())  # noqa: E731
    point = [None if v is None else v.double() for v in (x, w, b)]
    for i, g in enumerate(found):
        assert (g is None) == (point[i] is None)
        if g is None:
            continue
        way = philox_bell(tuple(g.shape), 6).double()
        up, down = ([p if j != i else p + sign * STEP * way for j, p in enumerate(point)] for sign in (1, -1))
        slope, along = (f(*up) - f(*down)) / (2 * STEP), float((g.double() * way).sum())
        terms = float((g.double() * way).abs().sum())
        assert abs(slope - along) <= terms * (SLOPE + 2.0**-23) + 900 * SLOPE, "g itself is rounded to float32"


@pytest.mark.parametrize("norm, activation", list(itertools.product(NORMS, ACTIVATIONS)))
def test_gradients_are_those_that_torch_finds_for_the_reference(norm: str, activation: str) -> None:
    x, dy, (w, b) = philox_bell((2, 3, 300), 8, scale_log2=2), philox_bell((2, 3, 300), 9), parameters(norm, 300)
    leaves = [None if v is None else v.double().requires_grad_() for v in (x, w, b)]
    y = activate_ref(normalise_ref(leaves[0], norm, *leaves[1:]), activation)
    want = iter(torch.autograd.grad(y, [v for v in leaves if v is not None], dy.double()))
    found = norm_backward_ref(dy, x, norm_quantise_ref(x, norm, activation, ROW, w, b, keep=True)[1], norm, activation, w, b)
    for leaf, g in zip(leaves, found, strict=True):
        assert (leaf is None) == (g is None)
        if g is not None:
            wanted = next(want)
            assert g.shape == wanted.shape and ((g.double() - wanted).abs() <= 2.0**-24 * wanted.abs() + F64).all(), "float64, then one rounding to float32"


def test_what_the_rules_exclude_is_refused() -> None:
    x, w = philox_bell((4, 300), 7), philox_bell((300,), 8)
    for error, call in {
        "a norm is one of": lambda: norm_quantise_ref(x, "batchnorm", "silu", ROW),
        "an activation one of": lambda: norm_quantise_ref(x, "none", "relu", ROW),
        "eps is added": lambda: norm_quantise_ref(x, "rmsnorm", "silu", ROW, eps=float("inf")),
        "a power of two": lambda: norm_quantise_ref(x, "blocknorm", "silu", ROW, block=100),
        "1 <= K <= 16384": lambda: norm_quantise_ref(torch.zeros(1, MAX_K + 1), "none", "silu", ROW),
        r"x is \[..., M, K\]": lambda: norm_quantise_ref(x[0], "none", "silu", ROW),
        "bf16, fp16 or fp32": lambda: norm_quantise_ref(x.double(), "none", "silu", ROW),
        "have a weight and a bias": lambda: norm_quantise_ref(x, "blocknorm", "silu", ROW, w),
        r"a bias is \[K\]": lambda: norm_quantise_ref(x, "layernorm", "silu", ROW, w, w[:4]),
        "spans 128 rows": lambda: norm_quantise_ref(x, "none", "silu", SQUARE),
        "a second read": lambda: norm_quantise_ref(x, "none", "silu", TENSOR),
        "others are found here": lambda: norm_quantise_ref(x, "none", "silu", ROW, scale=torch.tensor(1.0)),
        r"float32 tensor of shape \[\]": lambda: norm_quantise_ref(x, "none", "silu", TENSOR, scale=torch.ones(1)),
        "norm_quantise runs on a GPU": lambda: norm_quantise(x, "none", "silu", ROW),
        "norm_backward runs on a GPU": lambda: norm_backward(x, x, None, "none", "silu"),
        "needs its forward pass's statistics": lambda: norm_backward_ref(x, x, None, "rmsnorm", "silu"),
        "like x": lambda: norm_backward_ref(x[:2], x, None, "none", "silu"),
    }.items():
        with pytest.raises(ValueError, match=error):
            call()
    rms = norm_quantise_ref(x, "rmsnorm", "silu", ROW, keep=True)[1]
    with pytest.raises(ValueError, match="the same norm"):
        norm_backward_ref(x, x, rms, "layernorm", "silu")


@pytest.mark.parametrize("k, want", [(13, (256, 16, 4)), (1024, (4, 1024, 4)), (3456, (1, 4096, 4)), (16384, (1, 16384, 16))])
def test_a_program_has_whole_rows_and_32_numbers_a_thread(k: int, want: tuple[int, int, int]) -> None:
    s = row_schedule(k)
    assert (s.rows, s.width, s.num_warps) == want and s.rows * s.width == 32 * 32 * s.num_warps


def test_few_rows_are_spread_over_the_sms_in_whole_16_byte_loads() -> None:
    assert [row_schedule(128, m=m).rows for m in (1, 2048, 4300, 10000)] == [8, 8, 16, 32] and row_schedule(8192, m=1).rows == 1


# the widest row; several rows a program; a row that is no power of two; block scales
@pytest.mark.parametrize(
    "k, norm, activation, operand, keep",
    [(16384, "layernorm", "silu", ROW, False), (512, "blocknorm", "hardswish", ROW, True), (3456, "blocknorm", "hardswish", BLOCK, False)],
)
def test_kernels_read_and_write_16_bytes_at_a_time_without_spills(k: int, norm: str, activation: str, operand: OperandRecipe, keep: bool) -> None:
    x = torch.empty(8192, k, dtype=torch.bfloat16)
    w = (torch.empty(k), torch.empty(k)) if norm == "layernorm" else ()
    u = usage(lambda: norm_quantise(x, norm, activation, operand, *w, keep=keep))
    # a thread: 32 numbers of x in 4 loads, of q in 2 stores, of y in 4
    assert u["spills"] == u["stack"] == 0 and u["wide"] >= 6 + 4 * keep, u
    assert u["registers"] <= 128, "16 warps of a thread's 32 numbers fill half an SM, so that two programs are in flight at the least"


def test_the_gradient_kernel_reads_16_bytes_at_a_time_without_spills() -> None:
    x, rstd = torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(1024, 16)
    u = usage(lambda: norm_backward(x, x, Saved(y_MK=x, rstd=rstd), "blocknorm", "hardswish"))
    assert u["spills"] == u["stack"] == 0 and u["wide"] >= 6, u


def usage(call: object) -> dict[str, int]:
    return bench.usage_of(compile_specimen(captured("fused", call, family="elementwise")[0], "sm_90"))


def test_the_bench_s_fused_cases_run_their_references_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--dry-run", "--only", "quantise,fused"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(bench.cases(only=("quantise", "fused")))
    # 3 bytes an element: 3 x 8192 x 16384 / 4.19 TB/s
    assert any("fused 16384x8192" in line and "blocknorm hardswish row " in line and "floor     96.1 us" in line for line in lines)
