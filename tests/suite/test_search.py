"""A search asks, tells and recovers: real Optuna, a toy objective, bundles that are three fields."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from suite.identity import ROOT
from suite.search import Choice, SearchError, SearchRun
from tests.suite.searches import BUDGET, FLAGS, FakeBundle, cell_of, drain, measure, params, toy, no_storage_from_outside  # noqa: F401 (a fixture)

# ---------------------------------------------------------------- asking and telling


@pytest.mark.parametrize("sampler", sorted(FLAGS))  # every sampler that a study can name
def test_a_sequential_search_spends_its_budget_and_repeats(sampler, tmp_path):
    runs = []
    for folder in ("one", "two"):
        with SearchRun(toy(sampler), tmp_path / folder) as run:
            drain(run)
            runs.append(params(run))
            assert len(runs[-1]) == BUDGET and run.next_cells() == []
    assert runs[0] == runs[1]


def test_a_grid_visits_every_point_once_in_an_order_of_its_seed(tmp_path):
    with SearchRun(toy("grid"), tmp_path) as run:
        drain(run)
        assert params(run) == toy("grid").grid() != toy("grid", sampler_seed=6).grid()
        assert len({json.dumps(p) for p in params(run)}) == BUDGET


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_a_search_closed_half_way_gives_the_trials_of_an_unbroken_one(sampler, tmp_path):
    with SearchRun(toy(sampler), tmp_path / "unbroken") as run:
        drain(run)
        expected = params(run)
    for _ in range(3):
        with SearchRun(toy(sampler), tmp_path / "broken") as run:
            run.recover(lambda point: None)
            drain(run, most=4)
            got = params(run)
    assert got == expected


def test_a_point_is_recorded_before_its_cell_is_handed_out(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        ((number, cell),) = run.next_cells()
    with SearchRun(toy(), tmp_path) as run:
        (trial,) = run.trials()
        assert (trial.number, trial.state, trial.point) == (number, "RUNNING", cell.point)


@pytest.mark.parametrize("sampler", ["random", "tpe"])  # with and without a model of running trials
def test_at_most_parallelism_cells_are_in_flight_and_refilled(sampler, tmp_path):
    with SearchRun(toy(sampler, parallelism=3), tmp_path) as run:
        flying = [cell for _, cell in run.next_cells()]
        assert len(flying) == 3 and run.next_cells() == []
        while flying:
            cell = flying.pop()
            run.tell(cell.point, measure(cell))
            flying += [c for _, c in run.next_cells()]
            assert len(flying) <= 3
        assert run.finished and len(params(run)) == BUDGET


def test_telling_again_or_of_a_stranger_changes_nothing(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        ((number, cell),) = run.next_cells()
        assert run.tell(cell.point, measure(cell)) == [number]
        before = run.trials()
        assert run.tell(cell.point, FakeBundle(status="FAILED")) == [] == run.tell("0" * 64, measure(cell))
        assert run.trials() == before


@pytest.mark.parametrize("bundle", [FakeBundle(status="FAILED"), FakeBundle(status="TIMED OUT"), FakeBundle(metrics={"loss": math.nan})])
def test_a_cell_without_a_number_fails_its_trial_and_costs_only_that(bundle, tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        ((_, cell),) = run.next_cells()
        run.tell(cell.point, bundle)
        assert run.trials()[0].state == "FAIL" and run.trials()[0].reason
        drain(run)
        assert [t.state for t in run.trials()] == ["FAIL"] + ["COMPLETE"] * (BUDGET - 1)


def test_a_paused_cell_leaves_its_trial_open(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        ((_, cell),) = run.next_cells()
        assert run.tell(cell.point, FakeBundle(status="PAUSED")) == []
        assert run.trials()[0].state == "RUNNING"


def test_an_infinite_objective_is_a_value(tmp_path):
    with SearchRun(toy(budget=1), tmp_path) as run:
        drain(run, lambda cell: FakeBundle(metrics={"loss": math.inf}))
        assert run.best().value == math.inf


def test_an_undeclared_objective_is_said(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        ((_, cell),) = run.next_cells()
        with pytest.raises(ValueError, match="objective is a metric.*'loss'.*accuracy"):
            run.tell(cell.point, FakeBundle(metrics={"accuracy": 1.0}))


@pytest.mark.parametrize(("direction", "pick"), [("minimize", min), ("maximize", max)])
def test_best_is_the_extreme_and_the_earliest_of_equals(direction, pick, tmp_path):
    with SearchRun(toy(direction=direction), tmp_path) as run:
        assert run.best() is None
        drain(run, lambda cell: FakeBundle(metrics={"loss": float(round(cell.params["x"] * 2))}))
        complete = run.trials()
        extreme = pick(t.value for t in complete)
        assert run.best().number == min(t.number for t in complete if t.value == extreme)


def test_a_repeated_proposal_takes_the_known_answer(tmp_path):
    search = toy(space={"x": Choice(options=(0, 1))}, parallelism=2)
    measured = []
    with SearchRun(search, tmp_path) as run:
        drain(run, lambda cell: measured.append(cell.params["x"]) or measure(cell))
        assert sorted(measured) == [0, 1] and len(run.trials()) == BUDGET
        assert {(t.params["x"], t.value) for t in run.trials()} == {(0, 0.0625), (1, 0.5625)}


def test_a_repeated_proposal_of_a_failed_point_fails_too(tmp_path):
    with SearchRun(toy(space={"x": Choice(options=(0,))}), tmp_path) as run:
        assert drain(run, lambda cell: FakeBundle(status="FAILED")) == 1
        assert [t.state for t in run.trials()] == ["FAIL"] * BUDGET


# ---------------------------------------------------------------- crashes


def test_recovery_tells_dispatches_or_fails_by_number(tmp_path):
    search = toy(parallelism=3)
    with SearchRun(search, tmp_path) as run:
        cells = dict(run.next_cells())
        run._study.ask(run._distributions)  # as a crash before the point was recorded leaves it
        run._study.ask()  # and one before the parameters were
    with SearchRun(search, tmp_path) as run:
        with pytest.raises(ValueError, match="call recover"):
            run.next_cells()
        assert run.recover({cells[0].point: measure(cells[0]), cells[1].point: FakeBundle(status="FAILED")}.get) == {"told": [0], "again": [1, 2], "failed": [3, 4]}
        assert run.recover(lambda point: None) == {"told": [], "again": [], "failed": []}
        again = run.next_cells()
        assert {n: c.point for n, c in again if n in (1, 2)} == {n: cells[n].point for n in (1, 2)} and len(again) == 3
        for _, cell in again:
            run.tell(cell.point, measure(cell))
        drain(run)
        states = [t.state for t in run.trials()]
        assert states.count("FAIL") == 2 and states.count("COMPLETE") == BUDGET


def test_a_trial_whose_cell_is_another_now_is_failed(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        run.next_cells()
    with SearchRun(toy(make_cell=lambda p: replace(cell_of(p), seed=1)), tmp_path) as run:
        assert run.recover(lambda point: FakeBundle(metrics={"loss": 0.0}))["failed"] == [0]


CHILD = """
import json, sys, time
from pathlib import Path
from suite.search import SearchRun
from tests.suite.searches import FakeBundle, measure, toy

home = Path(sys.argv[1])

def done(point):
    file = home / point
    return FakeBundle(metrics=json.loads(file.read_text())) if file.exists() else None

with SearchRun(toy("tpe", budget=30), home) as run:
    run.recover(done)
    while not run.finished:
        for number, cell in run.next_cells():
            time.sleep(0.01)
            (home / "tmp").write_text(json.dumps(measure(cell).metrics))
            (home / "tmp").rename(home / cell.point)
            print(number, flush=True)
            run.tell(cell.point, measure(cell))
"""
KILLS = 3
OP_FINISH = 6  # optuna's JournalOperation.SET_TRIAL_STATE_VALUES


def start(home):
    return subprocess.Popen([sys.executable, "-c", CHILD, str(home)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def test_after_sigkills_no_trial_is_lost_none_is_told_twice_and_the_sequence_is_the_unbroken_one(tmp_path):
    moments = random.Random(11)
    for _ in range(KILLS):
        with start(tmp_path) as child:
            for _ in range(moments.randint(3, 7)):
                assert child.stdout.readline(), "the search ended before it could be killed"
            time.sleep(moments.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
    with start(tmp_path) as child:
        assert child.wait(60) == 0
    with SearchRun(toy("tpe", budget=30), tmp_path) as run:
        dispatched = [t for t in run.trials() if t.point]
        assert run.finished and [t.state for t in dispatched] == ["COMPLETE"] * 30
        assert all(t.reason == "incomplete after a crash" for t in run.trials() if not t.point)
        assert {t.point for t in dispatched} == {p.name for p in tmp_path.iterdir() if len(p.name) == 64}
        broken = params(run)
    journal = next(tmp_path.glob("*.journal")).read_text().splitlines()
    finished = [op["trial_id"] for op in map(json.loads, journal) if op["op_code"] == OP_FINISH]
    assert len(finished) == len(set(finished))
    with SearchRun(toy("tpe", budget=30), tmp_path / "unbroken") as run:
        drain(run)
        assert params(run) == broken


@pytest.mark.parametrize("cut", [1, 7, 40])  # bytes off the end: the newline alone, and into the last entry
def test_a_journal_cut_in_its_last_line_opens_and_goes_on(cut, tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        drain(run, most=4)
    journal = next(tmp_path.glob("*.journal"))
    os.truncate(journal, journal.stat().st_size - cut)
    (tmp_path / f"{journal.name}.lock").symlink_to(journal)  # Optuna's lock, as its killed holder leaves it
    start_s = time.monotonic()
    with SearchRun(toy(), tmp_path) as run:
        run.recover(lambda point: None)
        drain(run)
    with SearchRun(toy(), tmp_path) as run:
        assert [t.state for t in run.trials()] == ["COMPLETE"] * BUDGET
    assert time.monotonic() - start_s < 15  # Optuna alone would wait 30 s for that lock


def test_a_journal_damaged_elsewhere_is_one_clear_line(tmp_path):
    with SearchRun(toy(), tmp_path) as run:
        drain(run, most=2)
    journal = next(tmp_path.glob("*.journal"))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"\x00" * 20 + b"\n", *lines[2:]]))
    with pytest.raises(SearchError, match=r"JSON object, got another in line 2 of .*move the file away") as caught:
        SearchRun(toy(), tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(SearchError):  # and the failed opening holds no lock
        SearchRun(toy(), tmp_path)
