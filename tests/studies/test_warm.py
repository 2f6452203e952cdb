"""What `suite warm determinism` lists covers the GPU cells of every preset, and its tasks run."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kernels.exact.audit.specimen import captured, compile_specimen
from studies.determinism import presets, warm_tasks
from studies.determinism.evidence import ENGINE_SHAPES as MEASURED_SHAPES
from studies.determinism.implementations import Schedule, run
from studies.determinism.operators import load_operators, to_bits
from studies.determinism.questions import questions
from studies.determinism.study import STUDY
from studies.determinism.warm import BY_KIND, COMPILED, ENGINE_SHAPES, warm
from studies.models.llama import LINEARS, load_smollm2
from suite import assets
from suite.assets import AssetError
from suite.identity import ROOT

PRESETS = {name: preset() for name, preset in STUDY.presets.items()}
TASKS = warm(presets.gpu())
CUBLAS = {"layercast", "sgemm", "bf16", "bf16_padded", "copy"}  # variants of a contest that no Triton kernel runs


@pytest.mark.parametrize("name", PRESETS)
def test_every_gpu_cell_of_one_gpu_has_tasks(name):
    """A new kind of GPU cell needs an entry, or its kernels are compiled one after another again."""
    cells = [c for c in questions(PRESETS[name]) if c.needs.device == "cuda" and c.needs.ranks == 1]
    assert {c.measure.rpartition(".")[2] for c in cells} <= set(BY_KIND)
    assert all(list(BY_KIND[c.measure.rpartition(".")[2]](c)) for c in cells)
    assert bool(warm(PRESETS[name])) == bool(cells)


def test_each_task_is_listed_once_and_calls_a_function_that_takes_it():
    assert len({repr((t.run, t.params)) for t in TASKS}) == len(TASKS) == len({t.label for t in TASKS})
    for task in TASKS:
        module, _, function = task.run.partition(":")
        inspect.signature(getattr(importlib.import_module(module), function)).bind(task.device, **task.params)
        assert task.device == "cuda"


def test_every_variant_of_a_contest_is_compiled_ahead_or_is_a_library_s():
    asked = {v for c in presets.gpu().contests for v in c.variants}
    assert asked - CUBLAS == set(COMPILED) and ENGINE_SHAPES == len(MEASURED_SHAPES)


def test_listing_imports_neither_torch_nor_triton():
    code = "import sys; from studies.determinism import presets, warm; warm.warm(presets.gpu()); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def weights():
    try:
        return load_smollm2()
    except AssetError as error:
        pytest.skip(f"the model file is on no source that this machine reaches: {error}")


def test_the_small_model_and_the_stand_ins_have_the_shapes_of_smollm2(weights):
    assert replace(weights.config, rms_eps=warm_tasks.SMOLLM2.rms_eps) == warm_tasks.SMOLLM2  # the file's is the nearest fp32
    names = [f"layers.0.{linear}" for linear in LINEARS]
    real = load_operators({f"w.{n}": to_bits(weights[n].to(torch.bfloat16)) for n in names} | {f"x.{n}": to_bits(torch.ones((64, weights[n].shape[1]), dtype=torch.bfloat16)) for n in names})
    made = warm_tasks.stand_ins()
    described = [{n: (op.x_MK.shape, op.x_MK.dtype, op.w_NK.shape, op.w_NK.dtype) for n, op in ops.items()} for ops in (real, made)]
    assert described[0] == described[1]


CHEAP = {
    "golden": {"question": next(t.params["question"] for t in TASKS if t.run.endswith(":golden"))},
    "operators": {"impl": "sgemm", "rows": 16, "chunk_rows": 8, "kernel": {}},
    "training": {"steps": 1},
    "generation": {"family": "fma", "prompts": 2, "new_tokens": 2, "batch": 2, "chunk": 0, "pad_to": 0, "cache": True, "graph": False, "sampled": True},
    "texts": {"impl": "sgemm", "batch": 2, "prompts": 3, "new_tokens": 3},
    "labels": {"impl": "sgemm", "batch": 2, "sentences": 3},
    "contest": {"variant": "sgemm", "rows": 2, "n": 32, "k": 64},
    "profiled": {"variant": "integer", "rows": 2, "n": 32, "k": 64},
}


@pytest.mark.parametrize("name", CHEAP)
def test_tasks_run_to_their_end_on_this_cpu(name, monkeypatch, weights):
    """With little to do and by the references: it is the calls that are tried. Our own prompts stand in for questions and sentences."""
    own = assets.prompts
    monkeypatch.setattr(warm_tasks, "LAYERS", 1)
    monkeypatch.setattr(assets, "prompts", lambda count, source: own(count, source="own-prompts"))
    monkeypatch.setattr(assets, "load", lambda name: [("a fine film", 1), ("dull", 0), ("not bad at all", 1), ("no", 0)])
    getattr(warm_tasks, name)("cpu", **CHEAP[name])


@pytest.mark.parametrize("name, params", [("serving_decode", {"batch": 2, "context": 32}), ("serving_prefill", {"tokens": 8})])
def test_the_serving_tasks_run_on_a_narrow_decoder(name, params, monkeypatch):
    monkeypatch.setattr(warm_tasks, "LLAMA2_7B", replace(warm_tasks.LLAMA2_7B, hidden=64, intermediate=96, heads=4, kv_heads=4, vocabulary=128))
    for variant in ("fma", "bf16"):
        getattr(warm_tasks, name)("cpu", variant=variant, **params)


def test_a_golden_question_that_does_not_run_is_an_error(monkeypatch):
    from studies.determinism import verify_cells

    monkeypatch.setattr(verify_cells, "outputs", lambda *a: (_ for _ in ()).throw(ValueError("planned")))
    with pytest.raises(RuntimeError, match="planned"):
        warm_tasks.golden("cpu", **CHEAP["golden"])


@pytest.mark.parametrize("impl, rows, kernel", [("fma", 1, {}), ("integer", 16, {}), ("fma", 1, {"kind": "decode", "rows": 1, "lanes": 32, "unroll": 1, "split": 1, "block_m": 1})])
def test_a_stand_in_compiles_the_kernels_of_real_operands(impl, rows, kernel, tmp_path, monkeypatch):
    """The compiler's hashes of a task's launches, taken offline, hold those of an operand with other values at the same shape."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    op = warm_tasks.stand_ins()["layers.0.self_attn.k_proj"]
    task = captured("task", lambda: run(impl, op.x_MK, op.w_NK, Schedule(rows=rows, kernel=kernel)), family=impl, as_gpu=True)
    x_MK, w_NK = torch.zeros_like(op.x_MK), torch.ones_like(op.w_NK)
    cell = captured("cell", lambda: run(impl, x_MK, w_NK, Schedule(rows=rows, kernel=kernel)), family=impl, as_gpu=True)
    hashes = [{compile_specimen(s, "sm_90").metadata.hash for s in specimens} for specimens in (task, cell)]
    assert hashes[0] == hashes[1] and hashes[0]
