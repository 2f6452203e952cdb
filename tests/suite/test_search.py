"""A search asks, tells and recovers: real Optuna, a toy objective, bundles that are three fields."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna
import pytest

from suite import locks
from suite.cell import Cell
from suite.identity import ROOT, reached_modules
from suite.search import Choice, Float, Int, Search, SearchError, SearchRun, replay

FLAGS = {
    "random": {},
    "grid": {},
    "tpe": {"constant_liar": True, "group": False, "multivariate": True, "n_ei_candidates": 8, "n_startup_trials": 4},
    "gp": {"deterministic_objective": True, "n_startup_trials": 4},
    "nsga2": {"crossover_prob": 0.9, "mutation_prob": None, "population_size": 4, "swapping_prob": 0.5},
}
SPACES = {"grid": {"x": Int(low=0, high=4), "kind": Choice(options=("a", "b"))}}
SPACE = {"x": Float(low=0.0, high=1.0), "n": Int(low=1, high=64, log=True), "kind": Choice(options=("a", "b"))}
BUDGET = 10


@dataclass
class FakeBundle:
    """What a search reads of a bundle."""

    status: str = "OK"
    metrics: dict = field(default_factory=dict)
    id: str = "b" * 64


def cell_of(params):
    return Cell(study="toy", measure="studies.toy.cells:objective", params=params)


def toy(sampler="random", **changes):
    return replace(Search(name="toy", study="toy", space=SPACES.get(sampler, SPACE), sampler=sampler, sampler_seed=5, sampler_flags=FLAGS[sampler], direction="minimize",
                          objective="loss", budget=BUDGET, make_cell=cell_of), **changes)  # fmt: skip


def measure(cell):
    return FakeBundle(metrics={"loss": (cell.params["x"] - 0.25) ** 2 + cell.params.get("n", 0) / 100})


def drain(run, answer=measure, most=10_000):
    """Run the search to its end, or until `most` cells were measured; returns how many were."""
    done = 0
    while not run.finished and done < most:
        for _, cell in run.next_cells()[: most - done]:
            run.tell(cell.point, answer(cell))
            done += 1
    return done


def params(run):
    return [dict(t.params) for t in run.trials() if t.point]


@pytest.fixture(autouse=True)
def _no_storage_from_outside(monkeypatch):
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)


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
from tests.suite.test_search import FakeBundle, SearchRun, measure, toy

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


# ---------------------------------------------------------------- where it lives


def test_a_search_has_one_writer(tmp_path):
    with SearchRun(toy(), tmp_path), pytest.raises(locks.Held):
        SearchRun(toy(), tmp_path)


def test_conditions_and_definitions_keep_runs_apart_and_a_budget_may_grow(tmp_path):
    with SearchRun(toy(budget=2), tmp_path) as run:
        drain(run)
    with SearchRun(toy(budget=3), tmp_path) as run:
        assert len(run.trials()) == 2 and not run.finished
    for search, conditions in ((toy(), "other code"), (toy(sampler_seed=6), "")):
        with SearchRun(search, tmp_path, conditions=conditions) as run:
            assert run.trials() == []


def test_optuna_storage_is_passed_through_untouched(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/there.db"
    monkeypatch.setenv("OPTUNA_STORAGE", url)
    with SearchRun(toy(budget=2), tmp_path / "here") as run:
        drain(run)
        study = optuna.load_study(study_name=run.name, storage=url)
    assert len(study.trials) == 2 and not list((tmp_path / "here").glob("*.journal"))


def test_without_optuna_there_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SearchError, match=r"a search needs optuna.*pip install") as caught:
        SearchRun(toy(), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_cell_that_searches_gets_neither_planner_nor_driver_into_its_digest():
    assert reached_modules("suite.search") == {"suite.search", "suite._trials", "suite.cell", "suite.identity", "suite.locks"}


def test_importing_the_module_imports_no_optuna():
    done = subprocess.run([sys.executable, "-c", "import suite.search, sys; print('optuna' in sys.modules)"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"sampler": "sobol"}, "a sampler is one of"),
        ({"sampler_flags": {"seed": 1}}, "names every flag"),
        ({"sampler": "tpe", "sampler_flags": {}}, "names every flag.*constant_liar"),
        ({"direction": "down"}, "a direction is"),
        ({"budget": 0}, "at least 1"),
        ({"space": {}}, "at least one parameter"),
        ({"name": "../x"}, "names are letters"),
        ({"sampler": "grid"}, "a grid has no Float"),
        ({"sampler": "grid", "space": {"x": Choice(options=(1, 2))}}, "at most its size 2"),
    ],
)
def test_a_wrong_search_is_refused(changes, rule):
    with pytest.raises(ValueError, match=rule):
        replace(toy(), **changes)


@pytest.mark.parametrize("make", [lambda: Float(low=2, high=1), lambda: Float(low=0, high=1, log=True), lambda: Float(low=0, high=math.inf), lambda: Int(low=0, high=5, step=2),
                                  lambda: Int(low=1, high=9, log=True, step=2), lambda: Choice(options=()), lambda: Choice(options=([1],))])  # fmt: skip
def test_a_wrong_distribution_is_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


# ---------------------------------------------------------------- inside one process, and replay


def searched(tmp_path: Path):
    """A search that ran without cells: pruned, failed and complete trials."""
    with SearchRun(toy(make_cell=None, parallelism=2), tmp_path) as run:
        while not run.finished:
            for trial in run.next_trials():
                run.report(trial.number, 1, trial.params["x"])
                value = math.inf if trial.number == 3 else None if trial.number == 4 else trial.params["x"]
                run.tell_value(trial.number, value, pruned=trial.number % 3 == 2)
        return run.record()


def test_a_search_without_cells_asks_reports_prunes_and_refills(tmp_path):
    trials = searched(tmp_path)["trials"]
    assert [t["state"] for t in trials] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE", "FAIL", "PRUNED", "COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert all(t["intermediate"] == [[1, t["params"]["x"]]] for t in trials)
    assert trials[2]["value"] == trials[2]["params"]["x"] and trials[3]["value"] == "inf"


def test_replay_copies_a_record_once(tmp_path):
    record = json.loads(json.dumps(searched(tmp_path / "worker"), allow_nan=False))
    half = {**record, "trials": record["trials"][:4]}  # as a crash half-way leaves it
    assert [replay(r, storage_dir=tmp_path, source="a" * 64) for r in (half, record, record)] == [4, 6, 0]
    assert replay(record, storage_dir=tmp_path, source="c" * 64) == BUDGET  # another bundle, another study
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "replayed.journal")))
    study = optuna.load_study(study_name=f"toy/toy/replayed/{'a' * 12}", storage=storage)
    assert [t.state.name for t in study.trials] == [t["state"] for t in record["trials"]]
    assert [t.params for t in study.trials] == [t["params"] for t in record["trials"]]
    assert study.trials[3].value == math.inf


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: None,
        lambda r: {**r, "trials": 3},
        lambda r: {**r, "trials": [{**r["trials"][0], "number": "x"}]},
        lambda r: {**r, "trials": [r["trials"][0]] * 2},
        lambda r: {**r, "trials": [{**r["trials"][0], "params": {**r["trials"][0]["params"], "x": 7.0}}]},
        lambda r: {**r, "definition": {**r["definition"], "direction": "down"}},
        lambda r: {**r, "definition": {**r["definition"], "name": "a\nb"}},
        lambda r: {**r, "definition": {**r["definition"], "space": {"x": {"kind": "lambda"}}}},
    ],
)
def test_a_strangers_record_is_refused_in_one_line(spoil, tmp_path):
    record = json.loads(json.dumps(searched(tmp_path / "worker")))
    with pytest.raises(SearchError, match="a record of trials is what SearchRun.record wrote") as caught:
        replay(spoil(record), storage_dir=tmp_path, source="a" * 64)
    assert "\n" not in str(caught.value)
