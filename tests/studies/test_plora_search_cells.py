"""The cells of the search: replayed on a recorded grid, live on a two-layer model, and Optuna's pruners beside ours."""

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies.plora.measures.pruners import pruners
from studies.plora.measures.search import live, replayed, space_from
from studies.plora.search.recorded import read_curves, space_of
from studies.plora.search.space import Choice, Float, Levels
from suite import identity
from suite.bundle import load_record, read_bundle
from suite.cell import Cell, Needs
from suite.executors.local import LocalExecutor
from suite.measure import Context, Pause
from tests.contracts.test_executor import job
from tests.studies.plora_grid import BUDGET, final_score, grid

REPLAYED = {"sampler": "tpe", "arm": "packed+prune+refill", "trials": 24, "slots": [64] * 8, "looks": 8, "shares": [0.125, 0.25, 0.5], "eta": 2}
LIVE = {"model": "tiny", "task": {"name": "synthetic", "rows": [64, 16, 16], "classes": 4}, "tokens": 12, "budget_tokens": 400, "sampler": "tpe", "arm": "packed+prune+refill", "trials": 5,
        "space": {"learning_rate": {"low": 1e-3, "high": 5e-2, "log": True}, "rank": [4, 8], "batch": [1, 2], "alpha_ratio": 2.0}, "slots": [8, 8, 4], "looks": 6, "shares": [0.25, 0.5], "eta": 2}  # fmt: skip
KILL_AFTER = 4  # events in the log


@pytest.fixture(autouse=True)
def no_storage_from_outside(monkeypatch):
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What the grid's and the times' cells leave: three seeds of made-up curves, times of packs of 8 and of single adapters."""
    home = tmp_path_factory.mktemp("inputs")
    lines = []
    for adapter, curve in grid().items():
        for seed in range(3):
            shift = 0.002 * ((seed * 7 + adapter.rank) % 3)
            lines.append({"adapter": {**adapter.to_json(), "seed": seed}, "tokens": list(curve.tokens), "scores": [s + shift for s in curve.scores], "losses": list(curve.losses),
                          "tokens_a_sequence": curve.tokens_a_sequence, "test_score": curve.test_score, "sequences": 930})  # fmt: skip
    times = {"micro_step_s": [[8, 1, 64, 0.008]] + [[1, rows, rank, 0.004] for rows in (1, 2, 4, 8) for rank in (8, 16, 32, 64)], "evaluate_s": [[1, 0.05], [8, 0.1]]}
    for role, name, value in (("grid", "curves", lines), ("times", "times", times)):
        (home / role).mkdir()
        (home / role / f"{name}.json").write_text(json.dumps(value))
    return {"grid": home / "grid", "times": home / "times"}


def context(tmp_path, inputs, seed=0, **fields):
    tmp_path.mkdir(exist_ok=True)
    return Context(device="cpu", seed=seed, inputs=inputs, state_dir=tmp_path, **fields)


# ---------------------------------------------------------------- replayed


def test_a_replayed_search_reports_its_winner_where_it_was_recorded(tmp_path, inputs):
    result = replayed(context(tmp_path, inputs), **REPLAYED)
    assert result.kind == "replayed" and result.metrics["trials"] == 24 and result.metrics["trained"] <= 24
    curves = read_curves(json.loads((inputs["grid"] / "curves.json").read_text()))
    winner = next(c for a, c in curves.items() if a.to_json() == result.records["winner"]["adapter"])
    assert result.metrics["best_score"] == winner.scores[-1] and result.metrics["test_score"] == winner.test_score
    means = [sum(curves[replace(a, seed=s)].scores[-1] for s in range(3)) / 3 for a in curves]
    of_winner = sum(curves[replace(winner.adapter, seed=s)].scores[-1] for s in range(3)) / 3
    assert result.metrics["gap"] == pytest.approx(max(means) - of_winner, abs=1e-12) and result.metrics["gap"] >= 0
    assert [line["score"] for line in result.records["progress"]] == sorted(line["score"] for line in result.records["progress"])
    assert result.records["progress"][-1]["test_score"] == winner.test_score
    assert {t["state"] for t in result.records["trials"]["trials"]} == {"COMPLETE", "PRUNED"}


def test_arms_differ_in_cost_and_seeds_in_trials(tmp_path, inputs):
    seconds = {arm: replayed(context(tmp_path / arm, inputs), **{**REPLAYED, "arm": arm, "sampler": "random", "trials": 16}).metrics["search_s"] for arm in ("sequential", "sequential+prune", "packed+prune+refill")}
    assert seconds["sequential"] > seconds["sequential+prune"] > seconds["packed+prune+refill"]
    trials = [replayed(context(tmp_path / str(seed), inputs, seed), **{**REPLAYED, "trials": 10}).records["trials"]["trials"] for seed in (1, 2)]
    assert [t["params"] for t in trials[0]] != [t["params"] for t in trials[1]]


def test_a_sequential_search_passes_whole_batches(tmp_path, inputs):
    """One adapter alone takes a micro-step for a batch: fewer steps than accumulation would take."""
    result = replayed(context(tmp_path, inputs), **{**REPLAYED, "arm": "sequential", "sampler": "random", "trials": 6})
    trained = [line for line in result.records["adapters"] if line["twin_of"] is None]
    expected = sum(math.ceil(math.ceil(BUDGET / 21.5) / line["adapter"]["batch"]) * 0.004 + 0.05 for line in trained)
    assert result.metrics["search_s"] == pytest.approx(expected, rel=0.01) and {line["adapter"]["batch"] for line in trained} != {1}


def test_a_replayed_search_that_pauses_gives_the_result_of_an_unbroken_one(tmp_path, inputs):
    asked = {**REPLAYED, "trials": 14}
    expected = replayed(context(tmp_path / "unbroken", inputs), **asked)
    pauses = 0
    while True:
        try:
            result = replayed(context(tmp_path / "broken", inputs, deadline=0.0), **asked)
            break
        except Pause:
            pauses += 1
    assert pauses > 5 and result.metrics == expected.metrics and result.records == expected.records


@pytest.mark.parametrize(("change", "rule"), [({"arm": "all"}, "an arm is one of"), ({"looks": 3}, "more often than it has rungs"), ({"slots": [64] * 9}, "a full pack of the same rows and rank was timed")])
def test_a_wrong_replay_is_refused(tmp_path, inputs, change, rule):
    with pytest.raises(ValueError, match=rule):
        replayed(context(tmp_path, inputs), **{**REPLAYED, **change})


def test_a_grid_with_a_hole_is_no_space():
    curves = grid()
    space = space_of(curves)
    assert {name: len(axis.values) for name, axis in space.axes.items()} == {"learning_rate": 6, "rank": 4, "batch": 4, "alpha_ratio": 2}
    del curves[max(curves, key=final_score)]
    with pytest.raises(ValueError, match="every combination"):
        space_of(curves)


def test_a_space_is_read_from_json():
    space = space_from({"learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}, "rank": [8, 16], "batch": 4, "alpha_ratio": 2.0, "schedule": ["linear", "cosine"]})
    assert space.distributions().keys() == {"learning_rate", "rank_level", "schedule"}
    assert space.axes == {"learning_rate": Float(low=1e-5, high=1e-3, log=True), "rank": Levels(values=(8, 16)), "schedule": Choice(options=("linear", "cosine"))}
    adapter = space.adapter({"learning_rate": 1e-4, "rank_level": 1, "schedule": "cosine"}, budget_tokens=10, seed=3)
    assert (adapter.rank, adapter.alpha, adapter.batch, adapter.schedule, adapter.seed) == (16, 32.0, 4, "cosine", 3)


# ---------------------------------------------------------------- pruners


def test_optunas_pruners_do_not_serve_a_pack_and_ours_does(tmp_path):
    result = pruners(Context(device="cpu", state_dir=tmp_path), trials=8, steps=16)
    pruned = {(line["pruner"], line["order"]): line["pruned"] for line in result.records["pruners"]}
    assert {pruned[f"optuna: {name}", order] for name in ("median", "Wilcoxon") for order in ("best first", "worst first", "shuffled")} == {0}
    assert (pruned["optuna: successive halving", "best first"], pruned["optuna: successive halving", "worst first"]) == (7, 0)
    assert {pruned["optuna: successive halving, bootstrap 4", order] for order in ("best first", "worst first")} == {8}
    assert pruned["optuna: Hyperband", "best first"] > pruned["optuna: Hyperband", "worst first"] == 0
    assert {pruned["plora: synchronous halving", order] for order in ("best first", "worst first", "shuffled")} == {7}
    assert result.metrics == {"sound_pruners": 1.0, "ours_kept": 1.0} and not any(line["best_pruned"] for line in result.records["pruners"] if "plora" in line["pruner"])


# ---------------------------------------------------------------- live


def test_a_live_search_trains_prunes_and_tests_its_winner_alone(tmp_path, inputs):
    result = live(context(tmp_path, {}), **LIVE)
    assert result.kind == "measured" and result.metrics["pruned"] >= 1 and result.metrics["trained"] == 5
    assert result.metrics["winner_score"] == result.metrics["best_score"]  # packed and alone are the same on a CPU
    assert 0 <= result.metrics["test_score"] <= 1 and result.metrics["search_s"] > 0


def test_a_live_search_whose_worker_is_killed_ends_as_an_unbroken_one(tmp_path, monkeypatch):
    """SIGKILL of a real worker in the midst of its cell; the same job again in another worker. One thread: two that wait for each other on a busy machine take minutes."""
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        unbroken = live(context(tmp_path / "unbroken", {}), **LIVE)
    finally:
        torch.set_num_threads(threads)
    search = replace(job(tmp_path, "answer"), **_job(tmp_path))
    with LocalExecutor(jobs=1, cores=1) as executor:
        executor.start(search)
        _wait_for_events(search, KILL_AFTER)
        os.kill(executor._slots[0].process.pid, signal.SIGKILL)
        assert _done(executor).status == "DIED"
        executor.start(search)
        done = _done(executor)
    bundle = read_bundle(Path(done.path))
    assert done.status == "OK", bundle.data["error"]
    assert _events(search.state_dir) == _events(tmp_path / "unbroken")  # to the last bit of every loss: weights, moments and data order came back
    assert load_record(bundle.path, "adapters") == unbroken.records["adapters"] and bundle.metrics["winner_score"] == unbroken.metrics["winner_score"]


def _events(state_dir):
    (log,) = state_dir.glob("*.events")
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in log.read_text().splitlines()]


def _job(home):
    params = {**LIVE, "checkpoint_s": 0.0}
    cell = Cell(study="plora", measure="studies.plora.measures.search:live", params=params, needs=Needs(packages=("optuna",)))
    return {"cell": {**job(home, "answer").cell, "study": "plora", "measure": cell.measure, "params": params, "needs": cell.needs.to_json()}, "point": cell.point, "key": cell.point,
            "modules": tuple(identity.reached_modules(cell.module))}  # fmt: skip


def _wait_for_events(search, count, seconds=60.0):
    until = time.monotonic() + seconds
    while sum(len(p.read_text().splitlines()) for p in search.state_dir.glob("*.events")) < count:
        assert time.monotonic() < until, "the search never began"
        time.sleep(0.01)


def _done(executor, seconds=120.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if done := executor.wait(1.0):
            return done[0]
    raise AssertionError("the cell never ended")
