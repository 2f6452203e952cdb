"""Timing cells of the PLoRA study: their arithmetic, what they refuse, and that a broken way to compute is found before it is timed.

Tolerances:
    SIZES     sizes of Qwen2.5's shapes are known to three digits
    SAME      one number computed in two orders, in float64
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.lora import backward, forward, paths
from studies.plora.adapter import PackShape, SlotShape
from studies.plora.engine.shapes import SHAPES
from studies.plora.measures import kernels as of_kernels
from studies.plora.measures import memory as of_memory
from studies.plora.measures import saturation as of_saturation
from studies.plora.measures import step_times as of_steps
from studies.plora.measures import tables, throughput
from studies.plora.measures.flops import linear_elements, peak_flops, step_flops
from studies.plora.measures.subjects import STEPS, endless, rows_of, subject_of, uniform
from studies.plora.planning.cases import Case
from studies.plora.planning.design import shape_json
from studies.plora.planning.memory import rank_row_elements
from studies.plora.planning.time_model import StepTime
from suite.measure import Context, Pause
from suite.timing import ContestResult, WrongOutput

SIZES = 5e-3
SAME = 1e-12
CPU = Context(device="cpu")
QUICK = {"rounds": 1, "launches": 1, "warmup_s": 0.0}
TINY = {"model": "tiny", "tokens": 8, "answer_tokens": 2, **QUICK}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(seconds: dict[str, float]):
    """A contest whose entries run once and take what they are told."""

    def contest(variants, *, control, **_):
        names = [v.name for v in variants]
        for v in variants:
            v.calls[0]()
        samples = {n: np.full((2, 1), STEPS * seconds[n]) for n in names} | {f"{control} [A/A]": np.full((2, 1), STEPS * seconds[control] * 1.01)}
        none = dict.fromkeys(samples)
        return ContestResult(samples=samples, control=(control, f"{control} [A/A]"), device="cpu", mode="eager", calls_per_launch=dict.fromkeys(samples, 1), bytes_moved=none, flops=none, telemetry=[], conditions={})

    return contest


# ---- work ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, linear, rank_row", [("0.5b", 358e6, 0.550e6), ("3b", 2.77e9, 1.87e6), ("7b", 6.53e9, 2.52e6), ("smollm2", 106e6, 0.305e6)])
def test_models_have_the_sizes_of_their_families(model, linear, rank_row):
    assert linear_elements(SHAPES[model]) == pytest.approx(linear, rel=SIZES) and rank_row_elements(SHAPES[model]) == pytest.approx(rank_row, rel=SIZES)


def test_flops_are_those_of_every_product_of_a_frozen_base():
    config, t, r, answers = SHAPES["tiny"], 8, 3, 2
    products = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "gate": (64, 160), "up": (64, 160), "down": (160, 64)}
    base = sum(2 * 2 * t * k * n for k, n in products.values())  # forward, and the gradient of the input
    adapter = sum(3 * 2 * t * r * (k + n) for k, n in products.values())  # A and B: forward, gradient of the weight, gradient of the input
    pairs = t * t / 2  # causal
    attention = (2 + 4) * 2 * pairs * 4 * 16  # two products forward and four backward, of 4 heads of 16
    head = 2 * 2 * answers * config.vocabulary * config.hidden
    shape = PackShape(tokens=t, slots=(SlotShape(rank=r),))
    assert step_flops(config, shape, answer_tokens=answers) == pytest.approx(config.layers * (base + adapter + attention) + head, rel=SAME)


def test_flops_of_packs_add_up_over_rows():
    config = SHAPES["tiny"]
    one = lambda rank, rows: step_flops(config, PackShape(tokens=8, slots=(SlotShape(rank=rank, rows=rows),)), answer_tokens=2)  # noqa: E731
    both = step_flops(config, PackShape(tokens=8, slots=(SlotShape(rank=4, rows=3), SlotShape(rank=16))), answer_tokens=2)
    assert both == pytest.approx(3 * one(4, 1) + one(16, 1), rel=SAME) and one(4, 3) == pytest.approx(3 * one(4, 1), rel=SAME)


def test_peaks_are_of_whole_names():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GH200 480GB") is None and peak_flops("") is None


@pytest.mark.parametrize("which", of_kernels.WAYS)
def test_bytes_are_those_of_every_tensor_once(which):
    """Counted from the operands: gradients and outputs are read and written, the rest is read; s is handed from launch to launch."""
    (o,) = of_kernels.operands_of(Context(device="cpu"), which, d=32, tokens=4, slots=3, rank=8, sets=1)
    bf16 = lambda *tensors: sum(2 * t.numel() for t in tensors)  # noqa: E731
    if which == "forward":
        want = bf16(o.x_MK, o.a_TK, o.b_TN) + 2 * bf16(o.y_MN) + 2 * bf16(o.s_MR)
        flops = 2 * 2 * 12 * 8 * 32
    else:
        want = bf16(o.y_MN, o.x_MK, o.a_TK, o.b_TN, o.s_MR) + 2 * bf16(o.s_MR) + 2 * bf16(o.dx_MK) + 2 * (o.grad_a_TK.nbytes + o.grad_b_TN.nbytes)
        flops = 4 * 2 * 12 * 8 * 32
    assert of_kernels.work(which, d=32, rows=12, slots=3, rank=8) == (want, flops)


# ---- throughput ----------------------------------------------------------------------------------------------------------------


def test_a_gain_is_of_an_adapter_over_the_faster_single_one_and_the_cap_is_of_tokens(monkeypatch):
    seconds = {"B1 one graphed": 0.010, "B1 one graphed, our kernels": 0.008, "B7 ours, graphed": 0.012, "saturated": 0.016, "one eager": 0.2}
    monkeypatch.setattr(throughput, "contest", told(seconds))
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1e12)
    found = throughput.ladder(CPU, batch=1, k=3, rank=4, saturated_tokens=64, variants=["one eager"], **TINY)
    assert math.exp(found.metrics["log_pack_speedup"]) == pytest.approx(3 * 0.008 / 0.012, rel=SAME)
    assert math.exp(found.metrics["log_pack_cap"]) == pytest.approx((64 / 0.016) / (8 / 0.008), rel=SAME)
    assert found.metrics["tokens_per_s"] == pytest.approx(24 / 0.012, rel=SAME) and found.metrics["step_ms"] == pytest.approx(12.0, rel=SAME)
    work = lambda k, rows: step_flops(SHAPES["tiny"], uniform(8, slots=k, rank=4, rows=rows), answer_tokens=2) / 1e12  # noqa: E731
    assert [found.metrics[m] for m in ("mfu_single", "mfu_pack", "mfu_max")] == pytest.approx([work(1, 1) / 0.008, work(3, 1) / 0.012, work(1, 8) / 0.016], rel=SAME)
    lines = {x["variant"]: x for x in found.records["variants"]}
    assert lines["B1 one graphed, our kernels"]["log_speedup"] == 0.0 and math.exp(lines["one eager"]["log_speedup"]) == pytest.approx(0.008 / 0.2, rel=SAME)
    assert found.metrics["noise_floor"] == pytest.approx(math.log(1.01), rel=1e-6)
    assert all(x["cosine"] > 1 - 1e-6 for v, x in lines.items() if v != "saturated"), "in float32 paths differ by roundings"


def test_the_surface_has_a_pack_for_every_k(monkeypatch):
    seconds = {"B1 one graphed": 0.010, "B1 one graphed, our kernels": 0.020, "k=2": 0.010, "k=3": 0.012, "saturated": 0.016}
    monkeypatch.setattr(throughput, "contest", told(seconds))
    found = throughput.surface(CPU, batch=2, rank=4, ks=[2, 3], saturated_tokens=64, **TINY)
    gains = {x["variant"]: math.exp(x["log_speedup"]) for x in found.records["variants"]}
    assert gains["k=2"] == pytest.approx(2.0, rel=SAME) and gains["k=3"] == pytest.approx(2.5, rel=SAME) == math.exp(found.metrics["log_pack_speedup"])


def test_a_ladder_runs_every_rung_on_this_cpu():
    found = throughput.ladder(CPU, batch=1, k=2, rank=4, saturated_tokens=16, variants=["B3 looped", "B4 padded", "B6 ours"], **TINY)
    assert [x["adapters"] for x in found.records["variants"]] == [1, 1, 2, 2, 2, 2, 1] and all(x["us"] > 0 for x in found.records["variants"])


def test_a_path_that_trains_something_else_is_not_timed(monkeypatch):
    """The padded pack's first adapter starts from another A."""
    whole = throughput.Subject.pack

    def pack(self, shape, *, path="triton", **how):
        made = whole(self, shape, path=path, **how)
        if path == "padded":
            made.release(0)
            made.admit(0, endless(shape.slots[0], seed=99))
        return made

    monkeypatch.setattr(throughput.Subject, "pack", pack)
    with pytest.raises(AssertionError, match="'B4 padded': .*a path is broken"):
        throughput.ladder(CPU, batch=1, k=2, rank=4, saturated_tokens=16, variants=["B3 looped", "B4 padded"], **TINY)


def test_unknown_rungs_and_models_are_refused():
    with pytest.raises(ValueError, match="a rung is one of"):
        throughput.ladder(CPU, batch=1, k=2, rank=4, saturated_tokens=16, variants=["B9"], **TINY)
    with pytest.raises(ValueError, match="a model is one of"):
        subject_of(CPU, "gpt", tokens=8, answer_tokens=2)


def test_saturation_is_of_flops_over_the_best_single_size(monkeypatch):
    seconds = {"pack": 0.010, "one adapter, 16 tokens": 0.009, "one adapter, 32 tokens": 0.016}
    monkeypatch.setattr(of_saturation, "contest", told(seconds))
    found = of_saturation.saturation(CPU, rank=4, k=2, singles=[16, 32], **TINY)
    work = lambda k, rows: step_flops(SHAPES["tiny"], uniform(8, slots=k, rank=4, rows=rows), answer_tokens=2)  # noqa: E731
    assert found.facts["best"] == "one adapter, 32 tokens"
    assert math.exp(found.metrics["log_saturation_share"]) == pytest.approx((work(2, 1) / 0.010) / (work(1, 4) / 0.016), rel=SAME)


def test_rows_have_their_lengths_and_answers_and_are_the_same_everywhere():
    rows = rows_of([5, 3], [2, 1], vocabulary=512, seed=1)
    assert rows.lengths.tolist() == [5, 3] and rows.answer_tokens.tolist() == [2, 1]
    assert [r.tolist() for r in rows.ids] == [r.tolist() for r in rows_of([5, 3], [2, 1], vocabulary=512, seed=1).ids] and len({int(t) for r in rows.ids for t in r}) > 5


# ---- kernels -------------------------------------------------------------------------------------------------------------------

SMALL = {"d": 32, "tokens": 4, "slots": 3, "rank": 8, **QUICK}
REFERENCE = paths.Path(name="triton", shrink=forward.shrink_ref, expand=forward.expand_ref, grad_s=backward.grad_s_ref, grad_b=backward.grad_b_ref, grad_a=backward.grad_a_ref, grad_x=backward.grad_x_ref)


@pytest.fixture
def on_cpu(monkeypatch):
    """Ours by its references."""
    monkeypatch.setitem(paths.PATHS, "triton", REFERENCE)
    monkeypatch.setattr(of_kernels, "_ours_backward", of_kernels._backward)


@pytest.mark.parametrize("which", of_kernels.WAYS)
def test_kernels_are_timed_beside_the_other_ways(which, on_cpu):
    found = of_kernels.kernels(CPU, which=which, paths=["padded", "grouped"], **SMALL)
    assert [x["path"] for x in found.records["variants"]] == ["triton", "looped", "padded", "grouped"]
    m = found.metrics
    assert m["log_kernel_cap_share"] == pytest.approx(m["log_kernel_roofline_share"]) and m["log_kernel_speedup"] == pytest.approx(-next(x["log_speedup"] for x in found.records["variants"] if x["path"] == "looped") + next(x["log_speedup"] for x in found.records["variants"] if x["path"] == "triton"))
    assert math.exp(m["log_kernel_cap"]) * math.exp(m["log_kernel_cap_share"]) == pytest.approx(math.exp(m["log_kernel_speedup"]), rel=1.0), "medians of one round"


def _other_slot(op):
    """Uses the neighbour's rank rows: right sizes, wrong adapter."""
    return lambda a, w, seg, *rest: op(a, w.roll(8, dims=0), seg, *rest)


BROKEN = {"shrink": ("forward", _other_slot(forward.shrink_ref)), "grad_s": ("backward", _other_slot(backward.grad_s_ref)), "grad_x": ("backward", lambda dx, ds, a, seg: backward.grad_x_ref(dx, ds, a.roll(8, dims=0), seg)),
          "grad_b": ("backward", lambda s, dy, seg, out: None), "grad_a": ("backward", lambda ds, x, seg, out: backward.grad_a_ref(ds, x.roll(1, dims=0), seg, out))}  # fmt: skip


@pytest.mark.parametrize("op", sorted(BROKEN))
def test_a_broken_product_is_found_and_not_timed(op, on_cpu, monkeypatch):
    which, broken = BROKEN[op]
    monkeypatch.setitem(paths.PATHS, "padded", replace(REFERENCE, **{op: broken}))
    with pytest.raises(WrongOutput, match="padded"):
        of_kernels.kernels(CPU, which=which, paths=["padded"], **SMALL)


def test_another_way_than_forward_and_backward_is_refused():
    with pytest.raises(ValueError, match="a way is one of"):
        of_kernels.kernels(CPU, which="sideways", paths=[], **SMALL)


# ---- tables --------------------------------------------------------------------------------------------------------------------

SHAPES_ASKED = [{"tokens": 20, "slots": [[4, 1], [8, 2]]}, {"tokens": 18, "slots": [[4, 1]]}, {"tokens": 18, "slots": [[8, 1]]}]  # longer than their 16 answers
TABLE = {"model": "tiny", **QUICK}


def test_a_table_has_a_line_for_each_composition_that_planners_read(tmp_path):
    found = of_steps.step_times(replace(CPU, state_dir=tmp_path), table={"listed": SHAPES_ASKED}, **TABLE)
    lines = [StepTime.from_json(x) for x in found.records["step_times"]]
    assert [(p.shape.tokens, [[s.rank, s.rows] for s in p.shape.slots]) for p in lines] == [(s["tokens"], s["slots"]) for s in SHAPES_ASKED]


def test_tables_are_named_by_a_few_numbers():
    spread = lambda first, count: tables.shapes_of("3b", {"spread": {"first": first, "count": count, "tokens": [64, 128], "most_tokens": 4096}})  # noqa: E731
    assert spread(0, 4) + spread(4, 3) == spread(0, 7) and len({json.dumps(s) for s in spread(0, 7)}) == 7, "a fit and its errors share no composition"
    problem = {"tokens": 512, "real_tokens": 190.4, "budget_tokens": 40_000}
    plans = {json.dumps(s) for s in tables.shapes_of("3b", {"plans": problem})}
    cases = [Case.from_json(c) for c in tables.cases_of(problem)]
    assert len(cases) >= 6 and all(json.dumps(shape_json(c.work.shape((i, j)))) in plans for c in cases for i in range(3) for j in range(i + 1, 4)), "a pair of a case is timed"
    packs = tables.shapes_of("3b", {"packs": problem | {"gpus": 8, "limit_bytes": 120e9, "most_tokens": 8192}})
    assert len(packs) > 10 and all(p["tokens"] * sum(n for _, n in p["slots"]) <= 8192 for p in packs)
    alone = tables.shapes_of("3b", {"alone": {"tokens": 512, "most_tokens": 4096}})
    assert {(r, n) for s in alone for r, n in s["slots"]} == {(r, n) for r in (8, 16, 32, 64, 128) for n in (1, 2, 4, 8)}
    with pytest.raises(ValueError, match="a table is of one kind"):
        tables.shapes_of("3b", {"all": {}})


def test_a_table_goes_on_where_it_paused(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(of_steps, "_timed", lambda ctx, subject, entry, **how: timed.append(entry) or {"seconds": 0.1 * len(timed), "noise_floor": 0.01})
    first = replace(CPU, state_dir=tmp_path, deadline=0.0)
    for done in range(3):  # a deadline that has passed stops it before the next composition
        monkeypatch.setattr(Context, "time_is_up", lambda self, left=[False, True]: left.pop(0))
        with pytest.raises(Pause):
            of_steps.step_times(first, table={"listed": [*SHAPES_ASKED, SHAPES_ASKED[0]]}, **TABLE)
        assert len(timed) == done + 1
    monkeypatch.undo()
    monkeypatch.setattr(of_steps, "_timed", lambda ctx, subject, entry, **how: timed.append(entry) or {"seconds": 9.0, "noise_floor": 0.0})
    found = of_steps.step_times(replace(CPU, state_dir=tmp_path), table={"listed": [*SHAPES_ASKED, SHAPES_ASKED[0]]}, **TABLE)
    assert [x["seconds"] for x in found.records["step_times"]] == pytest.approx([0.1, 0.2, 0.3, 9.0]) and timed == [*SHAPES_ASKED, SHAPES_ASKED[0]]


def test_what_does_not_fit_is_refused_with_why_and_a_table_of_nothing_is_no_table(tmp_path, monkeypatch):
    def pack(self, shape, **how):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    whole = of_steps.Subject.pack
    monkeypatch.setattr(of_steps.Subject, "pack", lambda self, shape, **how: pack(self, shape) if len(shape.slots) > 1 else whole(self, shape, **how))
    found = of_steps.step_times(replace(CPU, state_dir=tmp_path / "a"), table={"listed": SHAPES_ASKED}, **TABLE)
    assert [x["why"] for x in found.records["refused"]] == ["CUDA out of memory. Tried to allocate"] and len(found.records["step_times"]) == 2
    with pytest.raises(ValueError, match="at least one time"):
        of_steps.step_times(replace(CPU, state_dir=tmp_path / "b"), table={"listed": SHAPES_ASKED[:1]}, **TABLE)


@pytest.mark.parametrize("true", [0, 1, 2, 7, 20, 33])
@pytest.mark.parametrize("start", [0, 1, 6, 20, 64])
def test_the_most_that_fits_is_found_from_any_start_in_few_tries(true, start):
    tried = []
    assert of_memory.most(start, lambda k: (tried.append(k), k <= true)[1]) == true
    assert len(set(tried)) == len(tried) <= 2 + 2 * math.ceil(math.log2(2 + abs(true - start))) and min(tried) >= 1


def test_a_limit_on_memory_is_a_gpu_s():
    with pytest.raises(ValueError, match="a GPU's"):
        of_memory.largest(CPU, model="tiny", tokens=8, rank=4, rows=1, limits_bytes=[1], answer_tokens=2)
