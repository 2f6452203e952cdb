"""Claims about the logic of the fused norm, its gradient and the scaled product, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

    quantised data and scales      equal to quantise_ref of the kept result, bit for bit: no tolerance
    norm, activation (float32)     sqrt(K) 2^-22 of (|n| + 1)(|w| + 1) + |b|: a row's float32 sum of K terms errs by about sqrt(K) 2^-24,
                                   and four times that covers the ten roundings behind it
    gradients (float32)            the same of the largest |dx| of the row: dn - n <dn n> cancels terms of that size
    products (float32 out)         120 dB: the interpreter adds in float32, whose rounding 2^-24 over C <= 512 leaves 10 log10(2^48 / 512) = 117 dB
                                   in the worst order and 145 dB at random
"""

import dataclasses
import itertools
import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("fp8_casts"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.fp8 import _bench_cases, bench  # noqa: E402
from kernels.fp8.epilogue import ACTIVATIONS, NORMS, Epilogue  # noqa: E402
from kernels.fp8.gemm import scaled_gemm, scaled_gemm_ref  # noqa: E402
from kernels.fp8.norm_backward import norm_backward, norm_backward_ref  # noqa: E402
from kernels.fp8.norm_quantise import norm_quantise, norm_quantise_ref  # noqa: E402
from kernels.fp8.quantise import Quantised, quantise_ref  # noqa: E402
from kernels.fp8.recipes import OperandRecipe, gemm  # noqa: E402
from kernels.fp8.schedule import GemmSchedule, schedule  # noqa: E402

INF, NAN = float("inf"), float("nan")
ROW, BLOCK, TENSOR = (OperandRecipe(fmt="e4m3", granularity=g) for g in ("row", "block", "tensor"))
MIN_DB = 120.0


def bound(k: int) -> float:
    return k**0.5 * 2.0**-22


def same(a: Quantised, b: Quantised) -> bool:
    bits = [torch.where(q.data_RC.float().isnan(), 0x7F, q.data_RC.view(torch.uint8)) for q in (a, b)]
    return torch.equal(*bits) and torch.equal(a.scale, b.scale) and a.operand == b.operand


def sqnr_db(out: torch.Tensor, want: torch.Tensor) -> float:
    noise = (out.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise)) if noise else INF


def parameters(norm: str, k: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (philox_bell((k,), 11), philox_bell((k,), 12)) if norm in ("layernorm", "rmsnorm") else (None, None)


# K: one 16-wide tile padded; a ragged second block of 256; several rows a program. Leading axes: a batch.
@pytest.mark.parametrize("shape", [(2, 3, 13), (5, 300), (1, 1024)], ids=str)
@pytest.mark.parametrize("norm, activation", list(itertools.product(NORMS, ACTIVATIONS)))
def test_norm_and_activation_follow_float64_and_their_quantising_is_exact(norm: str, activation: str, shape: tuple[int, ...]) -> None:
    x, k = philox_bell(shape, 1, scale_log2=1) + 0.5, shape[-1]
    w, b = parameters(norm, k)
    q, saved = norm_quantise(x, norm, activation, ROW, w, b, keep=True)
    _, want = norm_quantise_ref(x, norm, activation, ROW, w, b, keep=True)
    size = (want.y_MK.abs() + x.abs() + 1) * (1 if w is None else w.abs() + 1) + (0 if b is None else b.abs())
    assert ((saved.y_MK - want.y_MK).abs() <= bound(k) * size).all()
    assert same(q, quantise_ref(saved.y_MK, ROW))
    for found, wanted in ((saved.mean, want.mean), (saved.rstd, want.rstd)):
        assert (found is None) == (wanted is None)
        assert found is None or (found.shape == wanted.shape and ((found - wanted).abs() <= bound(k) * (wanted.abs() + 1)).all())


@pytest.mark.parametrize("operand", [BLOCK, OperandRecipe(fmt="e5m2", granularity="row", power_of_two=True), TENSOR], ids=lambda o: f"{o.granularity}-{o.fmt}")
def test_every_granularity_quantises_what_is_kept_exactly(operand: OperandRecipe) -> None:
    scale = torch.tensor(0.037) if operand.granularity == "tensor" else None
    for dtype, shape in ((torch.float32, (5, 300)), (torch.bfloat16, (70, 128)), (torch.float16, (3, 700))):
        x = (philox_bell(shape, 2) * torch.exp2(torch.from_numpy(philox_integers(shape[0], 2) % 20).float() - 10)[:, None]).to(dtype)
        x[1] = 0.0
        q, saved = norm_quantise(x, "none", "hardswish", operand, keep=True, scale=scale)
        if scale is None:
            assert same(q, quantise_ref(saved.y_MK, operand)) and (q.scale[1] == 1).all()
        else:
            r = torch.ones(()) / scale
            assert torch.equal(q.data_RC.float(), (saved.y_MK.float() * r).clamp(-448, 448).to(torch.float8_e4m3fn).float()) and q.scale is scale


def test_rows_with_nan_and_infinities_strides_and_empty_batches_are_right() -> None:
    x = philox_bell((6, 300), 3)
    x[0, 5], x[2, 7], x[3] = NAN, INF, 0.0
    q, saved = norm_quantise(x, "none", "identity", ROW, keep=True)
    assert same(q, quantise_ref(x, ROW)) and saved.mean is None and saved.rstd is None
    normed, kept = norm_quantise(x, "blocknorm", "hardswish", ROW, keep=True)
    assert kept.y_MK[0, :256].isnan().all() and kept.y_MK[0, 256:].isfinite().all() and (normed.data_RC[3].float() == 0).all() and (normed.scale[3] == 1).all()
    wide = philox_bell((300, 6), 4)
    assert same(norm_quantise(wide.T, "rmsnorm", "silu", ROW)[0], norm_quantise(wide.T.contiguous(), "rmsnorm", "silu", ROW)[0])
    assert norm_quantise(x[:0], "layernorm", "silu", ROW)[0].data_RC.shape == (0, 300)


@pytest.mark.parametrize("shape", [(2, 3, 13), (9, 300), (2, 1024)], ids=str)
@pytest.mark.parametrize("norm, activation", list(itertools.product(NORMS, ACTIVATIONS)))
def test_gradients_follow_float64(norm: str, activation: str, shape: tuple[int, ...]) -> None:
    x, dy, k = philox_bell(shape, 5, scale_log2=1) + 0.5, philox_bell(shape, 6), shape[-1]
    w, b = parameters(norm, k)
    _, saved = norm_quantise(x, norm, activation, ROW, w, b, keep=True)
    found, want = norm_backward(dy, x, saved, norm, activation, w, b), norm_backward_ref(dy, x, saved, norm, activation, w, b)
    rows = torch.tensor(shape[:-1]).prod().item()
    for g, wanted, terms in zip(found, want, (k, rows, rows), strict=True):
        assert (g is None) == (wanted is None)
        assert g is None or ((g - wanted).abs() <= 8 * bound(max(terms, k)) * wanted.abs().amax().clamp(min=1)).all()


def test_a_row_s_gradient_does_not_depend_on_how_many_rows_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy, w = philox_bell((40, 64), 7), philox_bell((40, 64), 8), philox_bell((64,), 9)
    _, saved = norm_quantise(x, "rmsnorm", "silu", ROW, w, keep=True)
    want = norm_backward(dy, x, saved, "rmsnorm", "silu", w)
    monkeypatch.setattr("kernels.fp8.norm_backward._PROGRAMS", 1)  # one program loops over all tiles
    dx, dw, _ = norm_backward(dy, x, saved, "rmsnorm", "silu", w)
    assert torch.equal(dx, want[0]) and ((dw - want[1]).abs() <= bound(40) * want[1].abs().amax()).all()


# recipes: every pair of scales and formats; shapes: ragged in each axis, C not a multiple of 16 nor 128, a batch, one row
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["rowwise", "tensorwise-fast", "rowwise-grad", "blockwise", "blockwise-both"])
def test_products_follow_float64(name: str, split: int) -> None:
    recipe = gemm(name)
    plan = GemmSchedule(block_r=64, block_s=64, num_warps=4, stages=3, resident=1, share=1.0, split=split, group=2)
    for lead, (r, s, c) in (((), (150, 200, 300)), ((2,), (20, 130, 256)), ((), (1, 7, 13))):
        a, b = quantise_ref(philox_bell((*lead, r, c), 1), recipe.a), quantise_ref(philox_bell((*lead, s, c), 2), recipe.b)
        bias = philox_bell((s,), 3)
        if split == 2 and c <= 128:
            continue
        out = scaled_gemm(a, b, recipe, out_dtype=torch.float32, bias=bias, schedule=plan)
        assert sqnr_db(out, scaled_gemm_ref(a, b, recipe, out_dtype=torch.float32, bias=bias)) >= MIN_DB


# whole blocks of 256 features; a ragged second one; requantised by block, by row, not at all
@pytest.mark.parametrize("s, requantise", [(400, BLOCK), (200, ROW), (256, None)])
@pytest.mark.parametrize("name", ["rowwise-fast", "rowwise", "blockwise"])
def test_the_epilogue_normalises_activates_and_requantises(name: str, s: int, requantise: OperandRecipe | None) -> None:
    recipe, bias = gemm(name), philox_bell((s,), 3)
    a, b = quantise_ref(philox_bell((70, 300), 1), recipe.a), quantise_ref(philox_bell((s, 300), 2), recipe.b)
    both = dict(norm="blocknorm", activation="hardswish")
    plain = scaled_gemm(a, b, recipe, out_dtype=torch.float32, bias=bias, epilogue=Epilogue(**both))
    assert sqnr_db(plain, scaled_gemm_ref(a, b, recipe, out_dtype=torch.float32, bias=bias, epilogue=Epilogue(**both))) >= MIN_DB
    if requantise:
        assert same(scaled_gemm(a, b, recipe, bias=bias, epilogue=Epilogue(**both, requantise=requantise)), quantise_ref(plain, requantise))


def test_an_activation_alone_runs_behind_a_long_sum_of_few_outputs_which_would_be_split_without_it() -> None:
    recipe = gemm("tensorwise")
    a, b = quantise_ref(philox_bell((4, 4096), 1), recipe.a), quantise_ref(philox_bell((8, 4096), 2), recipe.b)
    silu = Epilogue(activation="silu")
    assert schedule(4, 8, 4096, kind="precise").split > 1
    assert sqnr_db(scaled_gemm(a, b, recipe, out_dtype=torch.float32, epilogue=silu), scaled_gemm_ref(a, b, recipe, out_dtype=torch.float32, epilogue=silu)) >= MIN_DB
    with pytest.raises(ValueError, match="its tiles are not whole"):
        scaled_gemm(a, b, recipe, epilogue=silu, schedule=schedule(4, 8, 4096, kind="precise"))


def test_the_bench_times_right_results_and_reports_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [c for c in _bench_cases.cases(only=("gemm",), shrink=64) if c.group == "gemm 32x64x64" and ("triton" in c.name or c.name == "bf16")]
    broken = dataclasses.replace(chosen[2], run=lambda *x: chosen[2].run(*x).float() * 1.02)
    raising = dataclasses.replace(chosen[3], run=lambda *x: 1 / 0)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "MOST_SETS", 2)
    monkeypatch.setattr(bench, "cases", lambda **_: [*chosen[:2], broken, raising])
    monkeypatch.setattr(bench, "interleaved_us", lambda variants, rounds: {name: float(len([call() for call in calls])) for name, calls in variants.items()})
    results, wrong = bench.measure((), 3)
    assert results == {"gemm 32x64x64": {"bf16": 2.0, chosen[1].name: 2.0}}
    assert len(wrong) == 2 and "ZeroDivisionError" in wrong[1]
    # 2% is 34 dB, a little less of it where the interpreter's bf16 has cut towards zero
    assert wrong[0].startswith(f"WRONG gemm 32x64x64 {chosen[2].name}: 3") and wrong[0].endswith("dB, at least 45.0")
