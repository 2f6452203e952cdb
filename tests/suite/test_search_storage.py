"""Where a search lives and what it refuses; searches inside one process, and their replay: real Optuna, a toy objective."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from suite import locks
from suite.identity import ROOT, reached_modules
from suite.search import Choice, Float, Int, SearchError, SearchRun, replay
from tests.suite.searches import BUDGET, drain, params, toy, no_storage_from_outside  # noqa: F401 (a fixture)

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
