"""Claims about the timing cells, on a CPU with stand-ins for the GPU's kernels: what is timed, what is checked, what is refused, what is recorded."""

import gc
import math
import os
import weakref
from collections import Counter

import numpy
import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from kernels.exact.philox import philox_bell
from kernels.fp8 import autograd
from kernels.fp8.emulate import product_ref
from kernels.fp8.norm_quantise import norm_quantise_ref
from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import GEMMS, OperandRecipe, gemm
from studies.loka.measures import contest_inputs, contests
from studies.loka.measures.assembler import VARIABLE, one_assembler
from studies.loka.measures.contest_inputs import Sink, bell_rows, normed
from studies.loka.measures.shapes import MOST, SHAPES, Shape
from studies.loka.site import Site
from studies.loka.sites.model_sites import model_sites
from suite.measure import Context
from suite.timing import ContestResult, Variant, WrongOutput, contest

CPU = Context(device="cpu", seed=0)
QUICK = {"rounds": 2, "launches": 2, "warmup_s": 0.0}
CHECKED = 32


def layer(m: int, k: int, n: int, batch: int = 1) -> Site:
    return Site(name="layer", op="bmm" if batch > 1 else "linear", batch=batch, m=m, k=k, n=n)


@pytest.fixture
def on_cpu(monkeypatch):
    """The GPU's part by its references: products are emulated, torch's compiler leaves functions as they are, two sets are enough."""
    monkeypatch.setattr(contests, "unsupported", lambda recipe, size, device, *, backend: "torch has no such recipe" if (recipe.name, backend) == ("rowwise-p2", "torch") else "")
    monkeypatch.setattr(contests, "norm_quantise", norm_quantise_ref)
    monkeypatch.setattr(contests, "rotations_needed", lambda moved, device: 2)
    monkeypatch.setattr(contests, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


# ---------------------------------------------------------------- shapes


def test_the_map_has_at_most_sixty_shapes_and_no_two_alike() -> None:
    sizes = Counter((s.m, s.k, s.n) for s in SHAPES.values())
    assert len(SHAPES) <= MOST and [size for size, count in sizes.items() if count > 1] == []
    with pytest.raises(ValueError, match="at least one row"):
        Shape(m=0, k=1, n=1, source="")


def test_every_layer_of_dlrm_is_on_the_map() -> None:
    sites = {(s.m, s.k, s.n) for s in model_sites("dlrm_v2", "mlperf", 8192) if s.op == "linear"}
    assert sites and sites <= {(s.m, s.k, s.n) for s in SHAPES.values()}


# ---------------------------------------------------------------- crossover


@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_a_contest_times_every_variant_that_runs_and_says_why_others_do_not(which: str, on_cpu) -> None:
    recipes, fused = ["rowwise-fast", "rowwise-p2", "blockwise"], ["rowwise-fast", "tensorwise"]
    result = contests.crossover(CPU, m=192, k=256, n=160, which=which, recipes=recipes, backends=["triton", "torch"], fused=fused, **QUICK)
    lines = {x["variant"]: x for x in result.records["variants"]}
    works = ("whole", "product", "frozen") if which == "forward" else ("whole", "product")
    want = {"bf16"} | {f"{w} {r} {b}" for w in works for r in recipes for b in ("triton", "torch") if (r, b) != ("rowwise-p2", "torch")}
    want |= {"norm+bf16", "fused rowwise-fast triton", "fused rowwise-fast torch"} if which == "forward" else set()
    assert set(lines) == want
    refused = {x["variant"]: x["why"] for x in result.records["unsupported"]}
    assert {f"{w} rowwise-p2 torch" for w in works} <= set(refused) and ("fused tensorwise triton" in refused) == (which == "forward")
    assert result.metrics["bf16_us"] > 0 and result.metrics["log_speedup_whole"] == max(x["log_speedup"] for x in lines.values() if x["work"] == "whole")
    assert ("log_speedup_fused" in result.metrics) == ("log_speedup_frozen" in result.metrics) == (which == "forward")
    assert lines["bf16"]["sqnr_db"] > 50 > lines["whole rowwise-fast triton"]["sqnr_db"] > 25  # what is recorded is the recipe's own error


def test_a_products_operands_are_read_as_the_pass_stores_them(on_cpu) -> None:
    for which, shapes in (("forward", ((6, 4), (5, 4))), ("dgrad", ((6, 5), (4, 5))), ("wgrad", ((5, 6), (4, 6)))):
        made = contests.make_operands(layer(6, 4, 5), which, "cpu", seed=1)
        a, b = made.read(0)
        assert (tuple(a.shape), tuple(b.shape)) == shapes and made.size.c == a.shape[1]
        (a, b), (rolled_a, rolled_b) = made.read(0), made.read(1)
        assert not torch.equal(a, rolled_a) and torch.equal((a.double() @ b.double().T).roll((13, 13), (0, 1)), rolled_a.double() @ rolled_b.double().T)


def test_a_norm_whose_blocks_do_not_divide_the_row_leaves_the_fused_variants_out_and_says_so(on_cpu) -> None:
    made = contests.make_operands(layer(64, 300, 64), "forward", "cpu", seed=1)
    for norm, count in (("blocknorm", 0), ("layernorm", 2)):
        entries, refused = contests.entered(made, ["rowwise"], ["triton"], ["rowwise"], "cpu", norm=norm)
        assert sum(e.work in ("norm+bf16", "fused") for e in entries) == count and [r["variant"] for r in refused] == ["norm+bf16"] * (count == 0)


@pytest.mark.parametrize("broken, message", [
    (lambda y: y.neg_(), "from its emulation"),
    (lambda y: y[3:4].fill_(float("nan")), "with some"),
    (lambda y: y.add_(0.05), "from its emulation"),
])  # fmt: skip
def test_a_wrong_product_ends_the_contest(broken, message: str, on_cpu, monkeypatch) -> None:
    def wrong(*args, **options):
        y = autograd.product(*args, **options)
        return y if not args[2].is_fp8 else (broken(y), y)[1]

    monkeypatch.setattr(contests, "product", wrong)
    with pytest.raises(WrongOutput, match=message):
        contests.crossover(CPU, m=192, k=256, n=160, which="forward", recipes=["rowwise-fast"], backends=["triton"], fused=[], **QUICK)


def test_a_variant_that_was_also_launched_call_by_call_has_that_time_in_its_line(on_cpu) -> None:
    """A CPU has no graphs, so the contest's result is made here."""
    made, entry = contests.make_operands(layer(64, 64, 64), "forward", "cpu", seed=1), contests.Entry(work="whole", recipe="rowwise", backend="triton")
    times = {"bf16": 4e-6, "bf16 [A/A]": 4e-6, entry.name: 2e-6, f"{entry.name} [eager]": 50e-6}
    fields = dict(control=("bf16", "bf16 [A/A]"), device="cuda:0", mode="graph", calls_per_launch={}, bytes_moved={}, flops=dict.fromkeys(times, 2 * 64**3), telemetry=[], conditions={})
    result = ContestResult(samples={name: numpy.full((2, 3), s) for name, s in times.items()}, **fields)
    line = contests.line_of(entry, result, made, {entry.name: 28.5})
    assert line["eager_us"] == pytest.approx(50.0) and line["us"] == pytest.approx(2.0) and line["log_speedup"] == pytest.approx(math.log(2)) and line["sqnr_db"] == 28.5
    assert line["tflops"] == pytest.approx(2 * 64**3 / 2e-6 / 1e12)


def test_the_backend_of_a_variant_is_the_one_that_runs(on_cpu, monkeypatch) -> None:
    seen = []
    real = autograd.multiply_ref
    monkeypatch.setattr(autograd, "multiply_ref", lambda *args, **options: seen.append(autograd._BACKENDS.get(None)) or real(*args, **options))
    made = contests.make_operands(layer(64, 64, 64), "forward", "cpu", seed=1)
    for backend in ("torch", "triton"):
        contests.program(contests.Entry(work="whole", recipe="rowwise", backend=backend), made, "none", "identity")(0)
    assert seen == ["torch", "triton"]


@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_batched_products_are_read_and_checked_by_their_first_matrix(which: str, on_cpu) -> None:
    made = contests.make_operands(layer(70, 64, 80, batch=3), which, "cpu", seed=1)
    a, b = made.read(1)
    entry = contests.Entry(work="whole", recipe="rowwise", backend="triton")
    y = contests.program(entry, made, "none", "identity")(1)
    assert y.shape == (3, made.size.r, made.size.s) and contest_inputs.snr_db(y, a.double() @ b.double().mT) > 25
    errors = {}
    variant = contests.variant_of(entry, made, errors, "none", "identity")
    [call() for call in variant.calls]
    variant.check()
    assert variant.flops == 2 * 3 * 70 * 64 * 80 and 25 < errors[entry.name] < 32


def test_what_fast_accumulation_may_lose_grows_with_the_sum_and_no_other_does() -> None:
    assert contests.least_db(gemm("rowwise-fast"), 4096) == contests.least_db(gemm("rowwise"), 1 << 17) == contests.LEAST_DB
    assert contests.LEAST_DB - contests.least_db(gemm("rowwise-fast"), 16384) == pytest.approx(12.04, abs=0.01)
    a, b = philox_bell((CHECKED, 16384), 1), philox_bell((CHECKED, 16384), 2)
    for name in ("rowwise-fast", "rowwise"):  # the model of the hardware passes the bar that the hardware has to pass
        exact = product_ref(a, b, gemm(name))
        y = product_ref(a, b, gemm(name), accumulate="hopper").bfloat16()
        assert contest_inputs.snr_db(y, exact) > contests.least_db(gemm(name), 16384)




# ---------------------------------------------------------------- fused quantising


@pytest.mark.parametrize("granularity, keep, moved", [("row", False, 3 * 96 * 512 + 4 * 96), ("block", False, 3 * 96 * 512 + 16 * 96), ("row", True, 5 * 96 * 512 + 4 * 96)])
def test_bandwidth_counts_what_the_fused_kernel_must_move(granularity: str, keep: bool, moved: int, on_cpu) -> None:
    result = contests.fused_quantise(CPU, m=96, k=512, norm="blocknorm", activation="hardswish", granularity=granularity, keep=keep, **QUICK)
    assert result.facts["bytes"] == str(moved)
    seconds = result.metrics["fused_us"] * 1e-6
    # medians of ratios and ratios of medians differ by the rounds' spread: a factor of 3 on a shared CPU
    assert abs(result.metrics["log_bandwidth_share"] - torch.tensor(moved / seconds / 1e9 / result.metrics["copy_gbps"]).log()) < 1.1
    assert {"log_speedup_over_compiled", "log_speedup_over_separate", "noise_floor"} <= set(result.metrics)


def test_a_fused_kernel_that_forgets_the_activation_is_found(on_cpu, monkeypatch) -> None:
    monkeypatch.setattr(contests, "norm_quantise", lambda x, norm, activation, operand, keep: norm_quantise_ref(x, norm, "identity", operand, keep=keep))
    with pytest.raises(WrongOutput, match="from the reference"):
        contests.fused_quantise(CPU, m=96, k=512, norm="blocknorm", activation="hardswish", granularity="row", keep=False, **QUICK)


@pytest.mark.parametrize("norm", ["none", "layernorm", "rmsnorm", "blocknorm"])
@pytest.mark.parametrize("activation", ["identity", "silu", "hardswish"])
def test_torchs_norms_are_the_kernels_norms(norm: str, activation: str) -> None:
    """Float32 against float64, both rounded to bf16 once: at most neighbours, which are 2^-7 of a number apart."""
    x = bell_rows(40, 512, 1, "cpu")
    want = norm_quantise_ref(x, norm, activation, OperandRecipe(fmt="e4m3", granularity="row"), keep=True)[1].y_MK
    torch.testing.assert_close(normed(x, norm, activation), want, rtol=2.0**-7, atol=2.0**-20)


def test_blocks_that_do_not_divide_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="divide the row"):
        normed(torch.zeros(2, 300), "blocknorm", "silu")


# ---------------------------------------------------------------- outputs


def test_a_sink_keeps_outputs_and_finds_what_was_not_written() -> None:
    x = [bell_rows(8, 16, 1, "cpu").roll(i, dims=0) for i in range(3)]
    for program in (lambda i: x[i] * 2, lambda i: quantise_ref(x[i], GEMMS["rowwise"].a)):
        sink = Sink(3, program)
        with pytest.raises(AssertionError, match="set 0 has 0 outputs"):
            sink.written()
        for call in sink.calls:
            call()
        assert len(sink.written()) == 1
        sink.poison()
        sink.calls[0]()
        with pytest.raises(AssertionError, match="set 1 has 0 outputs"):
            sink.written()
    twice = Sink(2, lambda i: x[i] * (1 + 0.02 * i))
    for call in twice.calls:
        call()
    with pytest.raises(AssertionError, match="norms of the sets"):
        twice.written()


def test_outputs_of_a_contest_go_with_it_and_wait_for_no_collector() -> None:
    """A cell times product after product: on a GPU the collector does not know how much memory hangs on a cycle."""
    gc.disable()
    try:
        sink = Sink(2, lambda i: torch.full((4,), float(i)))
        sink.calls[0]()
        output = weakref.ref(sink._eager[0])
        variant = Variant(name="v", calls=sink.calls, check=lambda: sink.written(), poison=sink.poison)
        assert output() is not None
        del sink, variant
        assert output() is None
    finally:
        gc.enable()


def test_outputs_of_captured_graphs_are_kept_beside_each_other(monkeypatch) -> None:
    """A replay of either capture of a variant (it is entered twice, as its own control) is found."""
    sink = Sink(1, lambda i: torch.ones(4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sink.calls[0](), sink.calls[0]()
    first, second = sink._captured[0]
    sink.poison()
    assert first is not second and first.isnan().all() and second.isnan().all()
    second.fill_(3.0)
    assert [float(y[0]) for y in sink.written()] == [3.0]


def test_a_contest_of_sinks_runs_by_the_rules_of_suite_timing() -> None:
    x = [torch.ones(4, 4), torch.ones(4, 4)]
    sink = Sink(2, lambda i: x[i] @ x[i])
    check = lambda: [None for y in sink.written() if not torch.equal(y, torch.full((4, 4), 4.0)) and pytest.fail("wrong")]  # noqa: E731
    result = contest([Variant(name="a", calls=sink.calls, check=check, poison=sink.poison)], device="cpu", rounds=1, launches_per_round=2, warmup_s=0.0)
    assert result.conditions["unchecked"] == []


# ---------------------------------------------------------------- assembler


def test_a_cell_names_triton_s_own_assembler_and_leaves_the_variable_as_it_was(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    own, key = knobs.nvidia.ptxas.path, make_backend(GPUTarget("cuda", 90, 32)).hash()

    @one_assembler()
    def cell(fail: bool) -> str:
        assert make_backend(GPUTarget("cuda", 90, 32)).hash() == key  # the cache's: what was compiled without is found
        if fail:
            raise InterruptedError
        os.environ.setdefault(VARIABLE, "torch's")
        return os.environ[VARIABLE]

    assert cell(False) == cell(fail=False) == own and VARIABLE not in os.environ
    with pytest.raises(InterruptedError):
        cell(True)
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "the user's")
    with one_assembler():
        assert os.environ[VARIABLE] == "the user's"
    assert os.environ[VARIABLE] == "the user's"
