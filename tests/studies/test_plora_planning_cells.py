"""The planning cells on tables of step times made by hand: what they report follows from what they read, and says of which kind it is."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from studies.models.config import QWEN25_7B
from studies.plora.adapter import PackShape, SlotShape
from studies.plora.measures import planning as cells
from studies.plora.planning.cases import cases, to_time
from studies.plora.planning.continuous import candidates, refilled
from studies.plora.planning.design import PAPER_BATCHES, PAPER_RANKS, paper_configurations, spread
from studies.plora.planning.memory import Calibration, predict
from studies.plora.planning.time_model import StepTable, StepTime, TimeModel
from studies.plora.planning.work import Work
from suite.measure import Context

CONFIG = replace(QWEN25_7B, layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, vocabulary=151936, tied_head=True)
SIZES = {"config": asdict(CONFIG), "answer_tokens": 16}
MODEL = TimeModel(fixed_s=3e-3, token_s=1.5e-5, token_rank_s=5e-9, token_position_s=1e-9, slot_s=2e-4, floor_s=6e-3)
TRUE = Calibration(activations=1.25, workspace_bytes=3 * 10**8)
RANGES = dict(tokens=(64, 128, 256, 512), most_tokens=8192)
# The held-out errors of times with 1% of noise: as tests.studies.test_plora_time_model derives them, twice sqrt(1 + 5 / 24) sqrt(2 / pi) of it.
NOISE = 0.01
MAPE = 2 * NOISE * math.sqrt((1 + 5 / 24) * 2 / math.pi)
EXACT = 1e-6  # of what only solvers and whole bytes round


def bytes_of(shape: PackShape) -> int:
    return predict(CONFIG, shape, answer_tokens=16, calibration=TRUE).total


def measured(shapes, seed) -> list[StepTime]:
    rng = np.random.default_rng(seed)
    return [StepTime(shape=s, seconds=MODEL.seconds(s) * (1 + NOISE * rng.standard_normal()), peak_bytes=bytes_of(s)) for s in shapes]


@pytest.fixture
def bundle(tmp_path):
    """Writes records as a cell's bundle; returns its folder."""

    def write(role: str, **records):
        folder = tmp_path / role
        folder.mkdir()
        for name, value in records.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        return folder

    return write


@pytest.fixture
def tables(bundle):
    parts = {"fit": measured(spread(24, **RANGES), 1), "holdout": measured(spread(20, first=24, **RANGES), 2)}
    return {role: bundle(role, step_times=[p.to_json() for p in points]) for role, points in parts.items()}


def test_a_cost_model_is_judged_on_compositions_that_it_never_saw(tables):
    found = cells.cost_model(Context(device="cpu", inputs=tables))
    assert found.kind == "measured" and found.metrics["fit_points"] == 24 and found.metrics["holdout_points"] == 20
    assert found.metrics["mape_low"] < found.metrics["mape"] < found.metrics["mape_high"] < 2 * MAPE and found.metrics["mape"] < MAPE
    off = [abs(r["error"]) for r in found.records["residuals"] if r["part"] == "holdout"]
    assert found.metrics["mape"] == pytest.approx(np.mean(off)) and found.metrics["worst_error"] == pytest.approx(max(off))
    assert len(found.records["residuals"]) == 44
    model = TimeModel(**found.records["model"])
    first = found.records["residuals"][0]
    assert first["predicted_s"] == model.seconds(PackShape(tokens=first["tokens"], slots=tuple(SlotShape(rank=r, rows=n) for r, n in first["slots"])))


def test_a_composition_in_both_parts_is_refused(tables):
    with pytest.raises(ValueError, match="24 of them fitted too"):
        cells.cost_model(Context(device="cpu", inputs={"fit": tables["fit"], "holdout": tables["fit"]}))


def test_a_memory_model_is_calibrated_on_one_part_and_right_on_the_other(tables):
    found = cells.memory_model(Context(device="cpu", inputs=tables), **SIZES)
    assert found.metrics["memory_worst"] < EXACT and found.metrics["memory_mape"] <= found.metrics["memory_worst"]
    assert found.records["calibration"]["activations"] == pytest.approx(TRUE.activations, rel=EXACT)
    assert len(found.records["peaks"]) == 44


def test_peaks_are_needed(bundle, tables):
    lines = [StepTime(shape=s, seconds=1.0).to_json() for s in spread(3, first=100, **RANGES)]
    with pytest.raises(ValueError, match="got none in the input 'holdout'"):
        cells.memory_model(Context(device="cpu", inputs={**tables, "holdout": bundle("none", step_times=lines)}), **SIZES)


@pytest.fixture
def planned(bundle, tables):
    """Cases, and the inputs of `regret` with times of all their compositions."""
    found = cases(tokens=512, real_tokens=180.0, budget_tokens=20_000, turns=(0,))
    ctx = Context(device="cpu", inputs=tables)
    inputs = {"model": bundle("model", model=cells.cost_model(ctx).records["model"]), "memory": bundle("memory", calibration=cells.memory_model(ctx, **SIZES).records["calibration"]),
              "times": bundle("times", step_times=[p.to_json() for p in measured(to_time(found, bytes_of), 3)])}  # fmt: skip
    return [c.to_json() for c in found], inputs


def test_regret_is_small_with_a_good_model_and_the_table_has_every_planner(planned):
    """Times known to about 1% leave the chosen plan within a few of them from the best: sums of packs of independent errors, twice for chosen and best."""
    asked, inputs = planned
    found = cells.regret(Context(device="cpu", inputs=inputs), cases=asked, **SIZES)
    assert found.kind == "replayed" and found.metrics["cases"] == 4 and found.metrics["fewest_plans"] >= 30
    assert 1 <= found.metrics["planner_regret_mean"] <= found.metrics["planner_regret"] < 1 + 4 * NOISE
    lines = found.records["planners"]
    assert len(lines) == 4 * 6 and {x["planner"] for x in lines} == {"exact", "chunks", "lpt", "fifo", "dtm, one GPU a job", "sequential"}
    assert all(x["gap"] == 0 for x in lines if x["planner"] == "exact") and all(x["gap"] > -EXACT for x in lines)
    assert max(x["regret"] for x in lines if x["planner"] == "fifo") > 1.1


def test_a_planner_that_fills_memory_to_the_brim_by_a_wrong_model_has_no_finite_regret(planned):
    """Uncalibrated, activations are a fifth too small: some plan does not fit, which is said and not hidden."""
    asked, inputs = planned
    found = cells.regret(Context(device="cpu", inputs={k: v for k, v in inputs.items() if k != "memory"}), cases=asked, reserve=0.0, **SIZES)
    assert found.metrics["planner_regret"] == math.inf and any(x["regret"] is None for x in found.records["planners"])
    with pytest.raises(ValueError, match="a share of the memory"):
        cells.regret(Context(device="cpu", inputs=inputs), cases=asked, reserve=1.0, **SIZES)


def test_a_missing_composition_is_an_error_and_not_a_guess(bundle, planned):
    asked, inputs = planned
    lines = json.loads((inputs["times"] / "step_times.json").read_text())
    with pytest.raises(ValueError, match="every composition has a measured time"):
        cells.regret(Context(device="cpu", inputs={**inputs, "times": bundle("short", step_times=lines[1:])}), cases=asked, **SIZES)


def test_gaps_need_no_times_and_are_simulated(planned):
    asked, inputs = planned
    by_assumption, by_fit = (cells.gaps(Context(device="cpu", inputs=i), cases=asked, **SIZES) for i in ({}, inputs))
    for found in (by_assumption, by_fit):
        assert found.kind == "simulated" and all(gap > -EXACT for gap in found.metrics.values()) and found.metrics["gap_fifo"] > 0.05
        assert set(found.metrics) == {"gap_chunks", "gap_lpt", "gap_fifo", "gap_dtm", "gap_sequential"}
    assert by_assumption.metrics != by_fit.metrics


def test_the_papers_makespan_is_computed_from_the_steps_that_were_timed(bundle):
    at = {"tokens": 128, "real_tokens": 65.8, "budget_tokens": 20_000, "gpus": 8, "limit_bytes": 40 * 10**9}
    work = Work(adapters=paper_configurations(budget_tokens=20_000), tokens=128, real_tokens=65.8)
    shapes = candidates(work, gpus=8, fits=lambda s: bytes_of(s) <= 40e9, rows=(1, 4), slots=(3, 5, 15))
    rows = (1, 2, 8, 32)
    alone = [PackShape(tokens=128, slots=(SlotShape(rank=r, rows=n),)) for r in PAPER_RANKS for n in rows]
    useless = PackShape(tokens=128, slots=(SlotShape(rank=16, rows=32),))  # the fastest of all, but most adapters have no slot in it
    points = {"packed": [*measured(shapes, 4), StepTime(shape=useless, seconds=1e-6)], "graphed": measured(alone, 5), "eager": [StepTime(shape=s, seconds=0.25) for s in alone]}
    inputs = {role: bundle(role, step_times=[p.to_json() for p in of]) for role, of in points.items()}
    found = cells.makespan(Context(device="cpu", inputs=inputs), **SIZES, **at)
    assert found.kind == "simulated"
    table = StepTable(points["packed"])
    best = min(refilled(work, s, gpus=8).steps * table.seconds(s) for s in shapes)
    assert found.metrics["makespan_s"] == pytest.approx(best)
    # eager: 0.25 s a step, and the most rows that were timed and divide the batch: 1, 2, 2, 8, 8, 32 for the six batches, 20 adapters of each, 304 sequences
    eager_s = 20 * sum(math.ceil(304 / max(n for n in rows if b % n == 0)) for b in PAPER_BATCHES) * 0.25 / 8
    assert eager_s <= found.metrics["makespan_over_eager"] * found.metrics["makespan_s"] <= eager_s * (4 / 3)
    assert 1 < found.metrics["makespan_over_graphed"] < found.metrics["makespan_over_eager"]
    assert sorted(i for gpu in found.records["order"] for slot in gpu for i in slot) == list(range(120))
    short = bundle("no1", step_times=[p.to_json() for p in points["eager"] if p.shape.slots[0].rows > 1])
    with pytest.raises(ValueError, match="rank 8 and batch 1 at 128 tokens"):
        cells.makespan(Context(device="cpu", inputs={**inputs, "eager": short}), **SIZES, **at)


def test_clusters_are_simulated(bundle):
    at = {"tokens": 128, "real_tokens": 65.8, "budget_tokens": 20_000, "gpus": [8], "limit_bytes": 80 * 10**9, "degrees": [1], "most_rows": 1}
    found = cells.clusters(Context(device="cpu", inputs={"model": bundle("model", model=asdict(MODEL))}), **SIZES, **at)
    lines = {(x["planner"], x["tail"]): x["makespan_s"] for x in found.records["planners"] if x["gpus"] == 8}
    ours = lines["continuous", "refill"]
    assert found.kind == "simulated" and found.metrics["simulated_over_sequential"] == pytest.approx(lines["sequential", "idle"] / ours)
    assert found.metrics["simulated_over_dtm"] == pytest.approx(min(v for (name, _), v in lines.items() if name.startswith("dtm")) / ours)
