"""What `suite warm loka` lists covers the GPU cells of every preset, and its tasks run and compile what the cells compile."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.fp8 import norm_quantise as fused_kernel
from kernels.fp8.norm_quantise import norm_quantise_ref
from studies.loka import presets, warm_tasks
from studies.loka.measures import contests, model_speed
from studies.loka.questions import questions
from studies.loka.study import STUDY
from studies.loka.warm import BY_KIND, NOT_PREPARED, warm
from suite.identity import ROOT

GPU = questions(presets.gpu())
TASKS = warm(presets.gpu())


def kind(cell) -> str:
    return cell.measure.removeprefix("studies.loka.")


def test_every_kind_of_gpu_cell_has_tasks_or_a_reason_for_none() -> None:
    """A new kind of GPU cell needs an entry, or its kernels are compiled one after another again."""
    cells = [c for name in STUDY.presets for c in questions(STUDY.presets[name]()) if c.needs.device == "cuda"]
    assert {kind(c) for c in cells} == {*BY_KIND, *NOT_PREPARED} and not {*BY_KIND} & {*NOT_PREPARED}
    empty = [c.label for c in cells if kind(c) in BY_KIND and not list(BY_KIND[kind(c)](c))]
    assert all("quality ours" in label or "quality loka" in label for label in empty)
    assert STUDY.warm is warm and not warm(presets.cpu())


def test_each_task_is_listed_once_and_calls_a_function_that_takes_it() -> None:
    assert len({repr((t.run, t.params)) for t in TASKS}) == len(TASKS) == len({t.label for t in TASKS})
    for task in TASKS:
        module, _, function = task.run.partition(":")
        inspect.signature(getattr(importlib.import_module(module), function)).bind(task.device, **task.params)
        assert task.device == "cuda"


def test_every_product_that_a_cell_times_is_compiled_ahead() -> None:
    """By pass, sizes and recipe of crossover cells, and by model, pass and recipe of site_times."""
    of = lambda name: [t.params for t in TASKS if t.run.endswith(f":{name}")]  # noqa: E731
    keys = ("m", "k", "n", "which", "recipes", "fused")
    assert [{k: c.params[k] for k in keys} for c in GPU if kind(c) == "cells.contests:crossover"] == of("crossover")
    wanted = {(c.params["model"], c.params["size"], c.params["batch"], w, r) for c in GPU if kind(c) == "cells.speed:site_times" for w, rs in c.params["recipes"].items() for r in rs}
    assert wanted <= {(p["model"], p["size"], p["batch"], p["which"], p["recipe"]) for p in of("products") if p["dtype"] == "bfloat16"}


def test_variants_are_those_of_the_cells_and_found_plans_have_stand_ins() -> None:
    asked = {(c.params["model"], c.params["size"], c.params["mods"], c.params["training"], v) for c in GPU if kind(c) == "cells.speed:dense_step" for v in c.params["variants"]}
    prepared = {(p["model"], p["size"], p["mods"], p["training"], p["variant"]) for p in (t.params for t in TASKS if t.run.endswith(":step"))}
    fixed = {a for a in asked if a[-1].split()[0] not in ("dispatch", "planner")}
    assert fixed <= prepared and not any(p[-1].split()[0] in ("dispatch", "planner") for p in prepared)
    stand_ins = {"dispatch": "single rowwise", "dispatch fused": "single rowwise fused", "dispatch epilogues": "single blockwise epilogues"}
    assert {(*a[:-1], stand_ins.get(a[-1], "single rowwise")) for a in asked - fixed} <= prepared


def test_importing_it_imports_neither_torch_nor_triton() -> None:
    code = "import sys; import studies.loka.warm; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------- tasks


@pytest.fixture
def on_cpu(monkeypatch):
    """The GPU's part by its references, and torch's compiler leaves functions as they are."""
    monkeypatch.setattr(contests, "unsupported", lambda recipe, size, device, *, backend: "")
    monkeypatch.setattr(contests, "norm_quantise", norm_quantise_ref)
    monkeypatch.setattr(fused_kernel, "norm_quantise", norm_quantise_ref)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


CHEAP = {
    "crossover": {"m": 32, "k": 256, "n": 48, "which": "forward", "recipes": ["rowwise-fast", "blockwise"], "fused": ["rowwise-fast"]},
    "products": {"model": "wukong", "size": "small", "batch": 16, "which": "wgrad", "recipe": "rowwise-p2", "dtype": "float32"},
    "safety": {"which": "wgrad", "op": "linear", "products": 1, "rows": 16, "contracted": 64},
    "fused_quantise": {"m": 8, "k": 512, "norm": "blocknorm", "activation": "hardswish", "granularity": "row", "keep": False},
    "step": {"model": "wukong", "size": "small", "mods": "nobias", "batch": 8, "training": True, "variant": "single rowwise fused"},
    "arm": {"arm": "naive", "model": "wukong", "size": "small", "mods": "", "data": "planted", "batch": 16},
    "captured": {"model": "wukong", "size": "small", "mods": "", "batch": 16, "examples": 32},
}


@pytest.mark.parametrize("name", CHEAP)
def test_tasks_run_to_their_end_on_this_cpu(name, on_cpu, monkeypatch) -> None:
    """With little to do: it is the calls that are tried."""
    monkeypatch.setattr(warm_tasks, "TEST_ROWS", 64)
    getattr(warm_tasks, name)("cpu", **CHEAP[name])


def test_a_task_runs_the_bf16_base_the_recipes_and_the_fused_kernel_once_each(on_cpu, monkeypatch) -> None:
    seen, program = [], contests.program
    monkeypatch.setattr(contests, "program", lambda entry, *rest: seen.append(entry.name) or program(entry, *rest))
    warm_tasks.crossover("cpu", **CHEAP["crossover"])
    assert seen == ["bf16", "norm+bf16", "whole rowwise-fast triton", "whole blockwise triton", "fused rowwise-fast triton"]


def test_a_layer_with_mods_is_the_one_that_is_timed(monkeypatch) -> None:
    """The task's layer and input have the shapes of one of mods_latency's, which ends here where its contest would begin."""
    shapes = []
    monkeypatch.setattr(torch, "compile", lambda layer, **options: layer)
    monkeypatch.setattr(model_speed, "run_layer", lambda layer, call, x, training: shapes.append(([tuple(p.shape) for p in layer.parameters()], tuple(x.shape), x.requires_grad, x.dtype)))
    warm_tasks.mods_layer("cpu", size="small", batch=4, training=True, mods="blocknorm")
    monkeypatch.setattr(model_speed, "variant_of_layer", lambda name, step, *rest: step())
    monkeypatch.setattr(model_speed, "contest", lambda *a, **k: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        model_speed.mods_latency(contests.Context(device="cpu", seed=0), size="small", batch=4, training=True, rounds=1, launches=1, warmup_s=0.0)
    assert shapes[0] in shapes[1:]


def test_a_task_waits_for_room_only_on_a_gpu_and_not_for_ever(monkeypatch) -> None:
    slept = []
    monkeypatch.setattr(warm_tasks.time, "sleep", slept.append)
    warm_tasks._wait_for_room("cpu", 40)
    assert not slept
    free, clock = iter([0, 1 << 30, 60 << 30]), iter(range(0, 10_000, 90))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free, 0), 141 << 30))
    warm_tasks._wait_for_room("cuda", 40)
    assert len(slept) == 2
    monkeypatch.setattr(warm_tasks.time, "monotonic", lambda: next(clock))
    warm_tasks._wait_for_room("cuda", 40)
    assert len(slept) < 8


@pytest.mark.parametrize("which, recipe", [("forward", "rowwise-fast"), ("wgrad", "rowwise-p2")])
def test_a_task_compiles_the_kernels_of_the_cell(which, recipe, tmp_path, monkeypatch) -> None:
    """The compiler's hashes of a task's launches, taken offline, are those of a contest's program on other operands of the shape."""
    from kernels.fp8.gemm import scaled_gemm
    from kernels.fp8.quantise import quantise
    from studies.loka.site import Site

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(contests, "unsupported", lambda *a, **k: "")

    def product(a, b, g, out_dtype, *, a_transposed=False, b_transposed=False, **_):
        if g.is_fp8:
            scaled_gemm(quantise(a, g.a, transpose=a_transposed), quantise(b, g.b, transpose=b_transposed), g, out_dtype=out_dtype)

    monkeypatch.setattr(contests, "product", product)
    sizes = {"m": 64, "k": 256, "n": 48}
    task = captured("task", lambda: warm_tasks.crossover("cpu", **sizes, which=which, recipes=[recipe], fused=[]), family="elementwise", as_gpu=True)
    site = Site(name="layer", op="linear", batch=1, **sizes)
    operands = contests.make_operands(site, which, "cpu", seed=9, sets=2)
    entry = contests.Entry(work="whole", recipe=recipe, backend="triton")
    cell = captured("cell", lambda: contests.program(entry, operands, "none", "identity")(1), family="elementwise", as_gpu=True)
    hashes = [{compile_specimen(s, "sm_90").metadata.hash for s in specimens} for specimens in (task, cell)]
    assert hashes[0] == hashes[1] and len(hashes[0]) >= 2
