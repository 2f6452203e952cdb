"""What `suite warm plora` lists covers the GPU cells of every preset, and its tasks run the packs and kernels that cells run."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from kernels.lora.schedules import PRODUCTS, schedule
from studies.plora import presets, warm_tasks
from studies.plora.engine.pack import EnginePack
from studies.plora.engine.shapes import SHAPES
from studies.plora.measures import kernels as of_kernels
from studies.plora.measures import throughput
from studies.plora.measures.tables import shapes_of
from studies.plora.planning.memory import site_sizes
from studies.plora.questions import questions
from studies.plora.study import STUDY
from studies.plora.warm import BY_KIND, NOT_PREPARED, PATHS, warm
from suite.identity import ROOT

TASKS = warm(presets.gpu())


def kind(cell) -> str:
    return cell.measure.removeprefix("studies.plora.")


def test_every_kind_of_gpu_cell_has_tasks_or_a_reason_for_none() -> None:
    """Baselines and exactness come with measures of their own, which say what they compile."""
    cells = [c for name in STUDY.presets for c in questions(STUDY.presets[name]()) if c.needs.device == "cuda" and not kind(c).startswith("measures.")]
    assert {kind(c) for c in cells} == {*BY_KIND, *NOT_PREPARED} and not {*BY_KIND} & {*NOT_PREPARED}
    assert STUDY.warm is warm and not warm(presets.cpu())


def test_each_task_is_listed_once_and_calls_a_function_that_takes_it() -> None:
    assert len({repr((t.run, t.params)) for t in TASKS}) == len(TASKS) == len({t.label for t in TASKS}) > 200
    for task in TASKS:
        module, _, function = task.run.partition(":")
        inspect.signature(getattr(importlib.import_module(module), function)).bind(task.device, **task.params)


def test_rungs_are_prepared_by_the_paths_that_the_ladder_takes() -> None:
    assert PATHS == {name: (rung.path, rung.packed) for name, rung in throughput.LADDER.items()}


def test_the_packs_of_a_headline_are_prepared() -> None:
    packs = {(t.params["model"], t.params["tokens"], len(t.params["slots"]), t.params["slots"][0][1], t.params["path"]) for t in TASKS if t.run.endswith(":pack")}
    for ladder in presets.gpu().ladders:
        assert {(ladder.model, ladder.tokens, 1, ladder.batch, "looped"), (ladder.model, ladder.tokens, 1, ladder.batch, "triton"), (ladder.model, ladder.tokens, ladder.k, ladder.batch, "triton"),
                (ladder.model, ladder.tokens, 1, ladder.saturated // ladder.tokens, "triton")} <= packs  # fmt: skip


def test_a_table_has_a_task_for_every_schedule_that_its_compositions_ask_for() -> None:
    """By the schedules themselves, of every product and width of the model."""
    widths = {d for sizes in site_sizes(SHAPES["3b"]).values() for d in sizes}

    def schedules(slots: list, tokens: int) -> set:
        of = {"rank": max(r for r, _ in slots), "rows": tokens * max(n for _, n in slots), "slots": len(slots)}
        return {(product, d, schedule(product, d=d, **of)) for product in PRODUCTS for d in widths}

    for cell in (c for c in questions(presets.gpu()) if kind(c) == "cells.throughput:step_times" and c.params["model"] == "3b"):
        wanted = set().union(*(schedules(s["slots"], s["tokens"]) for s in shapes_of("3b", cell.params["table"])))
        tasks = list(BY_KIND[kind(cell)](cell))
        assert wanted == set().union(*(schedules(t.params["slots"], t.params["tokens"]) for t in tasks)) and len(tasks) <= 40, cell.label


def test_importing_it_imports_neither_torch_nor_triton() -> None:
    code = "import sys; from studies.plora import presets, warm; warm.warm(presets.gpu()); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.fixture
def stepped(monkeypatch) -> list[tuple]:
    """(slots, tokens, path's layers, optimizer steps) of every pack that a task advances."""
    seen, advance = [], EnginePack.advance

    def spied(self, steps):
        spent = advance(self, steps)
        seen.append(([[s.rank, s.rows] for s in self.shape.slots], self.shape.tokens, len(self.base.layers), {p.optimizer_steps for p in self.live().values()}))
        return spent

    monkeypatch.setattr(EnginePack, "advance", spied)
    return seen


def test_a_pack_is_stepped_once_with_its_optimizer_on_one_layer(stepped) -> None:
    warm_tasks.pack("cpu", model="tiny", tokens=8, answer_tokens=2, slots=[[8, 2], [4, 1]], path="padded")
    assert stepped == [([[8, 2], [4, 1]], 8, 1, {1})]


def test_learning_is_stepped_and_evaluated(stepped, monkeypatch) -> None:
    looked, evaluate = [], EnginePack.evaluate
    monkeypatch.setattr(EnginePack, "evaluate", lambda self: looked.append(len(self.live())) or evaluate(self))
    warm_tasks.learning("cpu", model="tiny", task={"name": "synthetic", "rows": [8, 4, 4], "classes": 4}, tokens=12, slots=[[4, 1], [4, 1]])
    assert stepped == [([[4, 1], [4, 1]], 12, 1, {1})] and looked == [2]


@pytest.mark.parametrize("which", of_kernels.WAYS)
def test_every_path_of_the_kernels_runs_once(which, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(of_kernels, "program", lambda name, way: lambda o: ran.append((name, way, tuple(o.x_MK.shape))))
    warm_tasks.kernels("cpu", which=which, d=32, tokens=4, slots=3, rank=8, paths=["looped", "padded"])
    assert ran == [(name, which, (12, 32)) for name in ("triton", "looped", "padded")] and not torch.cuda.is_initialized()
