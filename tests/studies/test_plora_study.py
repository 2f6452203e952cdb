"""The PLoRA study: what its presets ask and of whom, what cells report, and that its numbers of the work and of memory are right.

Tolerances:
    REAL_TOKENS  means of the kept lengths are given to a tenth
    CARD_BYTES   an H200 has 141e9 bytes; an eighth is left to the context, fragments and what the memory model errs
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import subprocess
import sys
from collections import Counter

import pytest
import torch

from studies.plora import presets, questions
from studies.plora.cells.threads import on_one_thread
from studies.plora.data.lengths import lengths
from studies.plora.data.sets import ASSETS
from studies.plora.declared import kept
from studies.plora.engine.shapes import SHAPES
from studies.plora.measures import kernels as of_kernels
from studies.plora.measures import published, tables, throughput
from studies.plora.measures.subjects import uniform
from studies.plora.planning.design import shape_of
from studies.plora.planning.memory import predict
from studies.plora.study import STUDY
from suite.identity import ROOT, canonical_json, sha256_file
from suite.measure import Context, Result

REAL_TOKENS = 0.05
CARD_BYTES = 124e9
CPU = Context(device="cpu")
CELLS = {name: STUDY.cells(preset()) for name, preset in STUDY.presets.items()}
ADAPTERS = ("kernels", "planning", "search", "throughput", "training")


# ---- what is asked -------------------------------------------------------------------------------------------------------------


def function_of(measure: str):
    module, _, name = measure.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(CELLS))
def test_presets_ask_each_question_once_under_a_label_of_its_own(name):
    assert max(Counter(c.point for c in CELLS[name]).values()) == 1
    assert max(Counter(c.label for c in CELLS[name]).values()) == 1


def test_cells_pass_exactly_what_their_functions_take():
    for cell in (c for cells in CELLS.values() for c in cells):
        wanted = inspect.signature(function_of(cell.measure)).parameters
        needed = {n for n, p in wanted.items() if n != "ctx" and p.default is p.empty}
        assert needed <= set(cell.params) <= set(wanted), cell.label


@pytest.mark.parametrize("name", sorted(CELLS))
def test_parameters_are_short_enough_for_the_tracker(name):
    long = {c.label: {k: len(canonical_json(v)) for k, v in c.params.items() if len(canonical_json(v)) > 6000} for c in CELLS[name]}
    assert {k: v for k, v in long.items() if v} == {}


def test_only_a_gpu_times_anything_and_alone():
    assert all(c.needs.device == "cpu" for name in ("smoke", "cpu") for c in CELLS[name])
    timed = [c for c in CELLS["gpu"] if c.label.startswith("time ")]
    assert len(timed) > 150 and all(c.needs.device == "cuda" and c.needs.exclusive for c in timed)
    assert all(c.needs.exclusive for c in (*CELLS["gpu"], *CELLS["gpu2"]) if ":makespan_live" in c.measure)


def test_claims_behind_ratios_have_five_process_starts_each_and_replicates_are_the_outer_loop():
    for function in ("ladder", "saturation", "kernels"):
        cells = [c for c in CELLS["gpu"] if c.measure.endswith(f":{function}")]
        assert [c.replicate for c in cells] == sorted(c.replicate for c in cells), function
    headline = [c for c in CELLS["gpu"] if c.measure.endswith(":ladder") and c.params["tokens"] == 128 and c.params["model"] in presets.MODELS]
    assert Counter(c.params["model"] for c in headline) == dict.fromkeys(presets.MODELS, presets.REPLICATES)
    assert {(c.params["which"], c.params["d"], c.params["tokens"]) for c in CELLS["gpu"] if c.measure.endswith(":kernels") and c.replicate == 4} >= {
        (which, presets.KERNEL_HEADLINE["d"], presets.KERNEL_HEADLINE["tokens"]) for which in of_kernels.WAYS}  # fmt: skip


def test_groups_of_cells_are_named_by_their_labels():
    """`--only PATTERN` takes a sensible part of the preset."""
    first = Counter(" ".join(c.label.split()[:2]) for c in CELLS["gpu"])
    for group in ("time ladder", "time surface", "time saturation", "time kernel", "time steps", "record grid", "search smollm2", "makespan live"):
        assert first[group], (group, sorted(first))


def test_packs_of_a_surface_fit_their_tokens():
    for s in presets.gpu().surfaces:
        cells = [c for c in CELLS["gpu"] if c.measure.endswith(":surface") and c.params["model"] == s.model]
        assert cells and all(max(c.params["ks"]) * c.params["batch"] * c.params["tokens"] <= s.most for c in cells)


def packs_of(cell) -> list[tuple]:
    """(shape, captured) of every pack that stands in memory while a contest runs."""
    p, function = cell.params, cell.measure.partition(":")[2]
    of = lambda k, rows: uniform(p["tokens"], slots=k, rank=p["rank"], rows=rows)  # noqa: E731
    if function == "saturation":
        return [(of(p["k"], 1), True), *((of(1, n // p["tokens"]), True) for n in p["singles"])]
    rungs = {v: throughput.LADDER[v] for v in p.get("variants", presets.SINGLES)}
    asked = [(of(p["k"] if r.packed else 1, p["batch"]), r.graphed) for r in rungs.values()] + [(of(k, p["batch"]), True) for k in p.get("ks", ())]
    return [*asked, (of(1, p["saturated_tokens"] // p["tokens"]), True)]


def test_packs_of_a_contest_fit_the_card_together():
    """Adapters of all of them, activations of the captured ones, and of the largest eager one, by the memory model."""
    for cell in CELLS["gpu"]:
        if cell.measure.endswith((":ladder", ":surface", ":saturation")):
            asked = packs_of(cell)
            needs = [predict(SHAPES[cell.params["model"]], shape, answer_tokens=cell.params["answer_tokens"]) for shape, _ in asked]
            passing = [(n.activations + n.logits + n.workspace, captured) for n, (_, captured) in zip(needs, asked, strict=True)]
            total = needs[0].base + sum(n.adapters for n in needs) + sum(b for b, captured in passing if captured) + max((b for b, captured in passing if not captured), default=0)
            assert total <= CARD_BYTES, (cell.label, total)


def test_compositions_of_tables_fit_the_card_one_by_one():
    for cell in CELLS["gpu"]:
        if cell.measure.endswith(":step_times"):
            shapes = [shape_of(s) for s in tables.shapes_of(cell.params["model"], cell.params["table"])]
            assert max(predict(SHAPES[cell.params["model"]], s, answer_tokens=tables.ANSWER_TOKENS).total for s in shapes) <= CARD_BYTES, cell.label
            assert all(1 <= s.tokens <= 2048 and tables.ANSWER_TOKENS < s.tokens for s in shapes)


def test_saturation_is_asked_at_8k_tokens():
    assert all(s.k * s.tokens >= 8192 for s in presets.gpu().saturation)


def test_replays_ask_for_slots_whose_times_are_recorded():
    for name in ("cpu", "gpu"):
        recorded = next(c for c in CELLS[name] if c.measure.endswith(":pack_times"))
        packs = {(len(p), p[0][1], p[0][0]) for p in recorded.params["packs"]}
        grid = next(c for c in CELLS[name] if c.measure.endswith(":grid"))
        for cell in (c for c in CELLS[name] if c.measure.endswith(":replayed")):
            assert (len(cell.params["slots"]), 1, max(cell.params["slots"])) in packs
        assert {(1, b, r) for b in grid.params["batches"] for r in grid.params["ranks"]} <= packs, "one adapter at a time passes whole batches"


def test_the_recorded_grid_is_that_of_the_plan():
    g = presets.gpu().grid
    assert (len(g.learning_rates), len(g.ranks), len(g.batches), len(g.alpha_ratios), g.seeds) == (6, 4, 4, 2, 3)


def test_constants_are_those_of_the_data_and_the_measures():
    assert questions.REAL_TOKENS == {name: pytest.approx(float(lengths(name).mean()), abs=REAL_TOKENS) for name in questions.REAL_TOKENS}
    assert all((lengths(name) > tokens).mean() < 1e-3 for name, tokens in questions.PADDED_TOKENS.items())
    assert questions.TASK_ASSETS.items() <= ASSETS.items()
    assert questions.STEP_ANSWERS == tables.ANSWER_TOKENS
    assert presets.RUNGS == tuple(throughput.LADDER) and (presets.SINGLES, presets.OURS) == (throughput.SINGLES, throughput.OURS)
    assert {*presets.MODELS, "smollm2", "tiny"} <= set(SHAPES)


def test_what_is_not_in_the_tree_is_not_planned():
    cell = questions._trains("measures.nowhere:nothing", {"model": "tiny"}, "x", "cpu")
    other = questions._trains("cells.training:grid", {"model": "tiny"}, "y", "cpu", inputs={"a": cell})
    assert not questions._is_here(cell) and questions._is_here(other)
    assert not questions._is_here(questions._trains("cells.training:nothing", {"model": "tiny"}, "z", "cpu"))
    assert questions._with_what_is_here(other).inputs == {}


def test_the_study_is_listed_without_torch():
    code = ("import sys; from studies.plora.study import STUDY; [STUDY.cells(p()) for p in STUDY.presets.values()]; print(sorted({'torch', 'scipy', 'optuna', 'numpy.random'} & set(sys.modules)))")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"


@pytest.mark.parametrize("made", [lambda: presets.Ladder(model="3b", k=0, saturated=1), lambda: presets.Training(model="tiny", task="synthetic", rows=(None, 0, 4), tokens=8, budget_tokens=9)])
def test_empty_sizes_are_refused(made):
    with pytest.raises(ValueError, match="mend it"):
        made()


# ---- what cells report ---------------------------------------------------------------------------------------------------------


def test_what_is_not_declared_stays_in_the_bundle_and_names_may_differ():
    def measure(ctx: Context, *, n: int) -> Result:
        return Result(metrics={"mape": 1.0, "regret": 1.5, "own": 2.0, "planner_regret": 3.0, "odd": math.inf}, records={"points": [n]}, kind="replayed")

    found = kept(measure, "mape", planner_regret="regret")(CPU, n=3)
    assert dict(found.metrics) == {"mape": 1.0, "planner_regret": 1.5} and found.kind == "replayed"
    assert found.records == {"points": [3], "more": {"own": 2.0, "planner_regret": 3.0, "odd": None}}
    assert "more" not in kept(lambda: Result(metrics={"mape": 1.0}), "mape")().records


def test_cells_keep_declared_metrics_only():
    for module in (importlib.import_module(f"studies.plora.cells.{name}") for name in ADAPTERS):
        for name in module.__all__:
            assert set(getattr(module, name).declared) <= STUDY.metric_names(), (module.__name__, name)


def test_a_cell_on_a_cpu_has_one_thread_and_leaves_the_others_as_they_were():
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        cell = on_one_thread(lambda ctx: seen.append(torch.get_num_threads()))
        cell(CPU)
        cell(Context(device="cuda"))
        with pytest.raises(ZeroDivisionError):
            on_one_thread(lambda ctx: 1 / 0)(CPU)
        assert seen == [1, 2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- a published grid ----------------------------------------------------------------------------------------------------------


def publish(root, name: str, params: dict, payload: str, value, *, gpu: str = "NVIDIA H200", at: str = "2026-12-01") -> str:
    """A bundle under root/reports/published, as suite publish leaves it; returns its id."""
    folder = root / "reports" / "published" / "plora" / "h200" / f"{name}-{at}"
    folder.mkdir(parents=True)
    (folder / payload).write_text(json.dumps(value))
    body = {"status": "OK", "environment": {"gpu_model": gpu}, "started_at": at, "cell": {"measure": f"studies.plora.cells.training:{name}", "params": params},
            "files": {payload: {"sha256": sha256_file(folder / payload)}}}  # fmt: skip
    (folder / "bundle.json").write_text(json.dumps(body))
    return sha256_file(folder / "bundle.json")


AT = {"model": "smollm2", "task": {"name": "banking77"}, "tokens": 48}


def test_the_newest_published_grid_is_taken_with_its_own_step_times(tmp_path):
    assert questions.newest_published(tmp_path) == {}
    publish(tmp_path, "grid", AT | {"ranks": [8]}, "curves.json", [], gpu="")
    assert questions.newest_published(tmp_path) == {}, "recorded on a CPU"
    publish(tmp_path, "grid", AT | {"ranks": [8], "tokens": 64}, "curves.json", [], at="2026-12-03")
    grid = publish(tmp_path, "grid", AT | {"ranks": [8, 64]}, "curves.json", [], at="2026-12-02")
    times = publish(tmp_path, "pack_times", AT, "times.json", {})
    assert questions.newest_published(tmp_path) == {"grid": grid, "times": times, "ranks": [8, 64]}, "the newer grid has no step times"


def test_a_laptop_replays_the_published_grid_instead_of_recording_its_own(monkeypatch):
    monkeypatch.setattr(questions, "newest_published", lambda: {"grid": "a" * 64, "times": "b" * 64, "ranks": [8, 64]})
    cells = questions.questions(presets.cpu())
    replays = [c for c in cells if c.label.startswith("replay ")]
    assert not any(c.measure.endswith((":grid", ":pack_times", ":replayed")) for c in cells) and len(replays) == 15
    assert {c.params["grid"] for c in replays} == {"a" * 64} and all(c.params["slots"] == [64] * 16 and not c.inputs for c in replays)


def test_a_published_bundle_is_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "PUBLISHED", tmp_path / "reports" / "published" / "plora")
    id_ = publish(tmp_path, "grid", AT, "curves.json", [1, 2])
    assert json.loads((published.folder_of(id_, "curves.json") / "curves.json").read_text()) == [1, 2]
    with pytest.raises(ValueError, match="got no ffff"):
        published.folder_of("f" * 64, "curves.json")
    (published.folder_of(id_, "curves.json") / "curves.json").write_text("[1, 3]")
    with pytest.raises(ValueError, match="got another in"):
        published.folder_of(id_, "curves.json")
