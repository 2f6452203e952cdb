"""A cell that searched: its trials become MLflow runs under its own and an Optuna study, once, whatever stops the ingest; a stranger's record is refused whole."""

import json
import math
import shutil

import optuna
import pytest

from suite._runs import Refused
from suite._trial_runs import MAX_RUNS, searched_of
from suite.bundle import BundleStore
from suite.ingest import ingest_paths
from suite.measure import Result
from suite.tracking import open_tracker
from tests.contracts.test_tracker import METRICS, empty_database, write  # noqa: F401 (a fixture)
from tests.suite.searches import BUDGET, no_storage_from_outside  # noqa: F401 (a fixture)
from tests.suite.test_search_storage import searched

STUDIES = {"demo": METRICS}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Ten trials: complete (one of infinite value), pruned and failed."""
    return json.loads(json.dumps(searched(tmp_path_factory.mktemp("search")), allow_nan=False))


@pytest.fixture
def store(tmp_path):
    return BundleStore(tmp_path / "state")


@pytest.fixture
def tracker(store, empty_database):  # noqa: F811
    (store.root / "tracking").mkdir(parents=True)
    shutil.copy(empty_database, store.root / "tracking" / "mlflow.db")
    return open_tracker(None, store.root)


def search_bundle(store, record, n=1):
    return write(store, n, Result(metrics={"square": 1.0}, records={"trials": record}))


def trial_runs(tracker, parent):
    runs = tracker._search("demo", f"tags.`mlflow.parentRunId` = '{parent}'")
    return sorted(runs, key=lambda r: int(r.data.tags["trial"]))


def replayed(store):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(store.root / "searches" / "replayed.journal")))
    return {s.study_name: optuna.load_study(study_name=s.study_name, storage=storage) for s in optuna.get_all_study_summaries(storage)}


def test_trials_become_runs_under_their_cells_and_an_optuna_study(store, tracker, record):
    bundle = search_bundle(store, record)
    run_id, _ = tracker.ingest(bundle, None, METRICS, "here")
    runs = trial_runs(tracker, run_id)
    assert [r.data.tags["state"] for r in runs] == [t["state"] for t in record["trials"]] and {r.data.tags["role"] for r in runs} == {"trial"}
    assert [r.info.status for r in runs] == [{"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}[t["state"]] for t in record["trials"]]
    for run, trial in zip(runs, record["trials"]):
        assert {k: json.loads(v) for k, v in run.data.params.items()} == trial["params"]
        assert run.data.metrics["loss"] == trial["intermediate"][-1][1]
        if trial["value"] == "inf":
            assert run.data.tags["nonfinite.loss.final"] == "inf" and "loss.final" not in run.data.metrics
        elif trial["value"] is not None:
            assert run.data.metrics["loss.final"] == trial["value"]
    history = tracker._client.get_metric_history(runs[0].info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [tuple(s) for s in record["trials"][0]["intermediate"]]
    ((name, study),) = replayed(store).items()
    assert name == f"toy/toy/replayed/{bundle.id[:12]}" and [t.state.name for t in study.trials] == [t["state"] for t in record["trials"]]
    assert study.best_value == min(t["value"] for t in record["trials"] if t["state"] == "COMPLETE" and t["value"] != "inf")


def test_trials_are_no_rows_and_ingesting_again_adds_nothing(store, tracker, record):
    bundle = search_bundle(store, record)
    run_id, new = tracker.ingest(bundle, None, METRICS, "here")
    assert new and tracker.ingest(bundle, None, METRICS, "here") == (run_id, False)
    (row,) = tracker.rows("demo")
    assert row.run_id == run_id and row.metrics == {"square": 1.0} and row.record("trials") == record
    assert len(trial_runs(tracker, run_id)) == BUDGET == len(next(iter(replayed(store).values())).trials)


@pytest.mark.parametrize("at", [0, 3, "replay"])  # before the first trial's run, among them, and when Optuna's journal is written
def test_an_ingest_that_stops_half_way_is_done_again_without_a_double(store, tracker, record, at, monkeypatch):
    bundle, count = search_bundle(store, record), iter(range(100))
    with monkeypatch.context() as patch:
        whole = type(tracker)._write_trial
        if at == "replay":
            patch.setattr("suite._trial_runs.replay", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("pulled the plug")))
        else:
            patch.setattr(type(tracker), "_write_trial", lambda *a: whole(*a) if next(count) < at else (_ for _ in ()).throw(RuntimeError("pulled the plug")))
        with pytest.raises(RuntimeError, match="pulled the plug"):
            tracker.ingest(bundle, None, METRICS, "here")
    assert tracker.rows("demo") == []
    run_id, new = tracker.ingest(bundle, None, METRICS, "here")
    assert new and len(trial_runs(tracker, run_id)) == BUDGET == len(tracker._search("demo", "tags.role = 'trial'"))
    assert len(next(iter(replayed(store).values())).trials) == BUDGET


def test_a_search_of_another_machine_comes_in_with_its_bundle(tmp_path, store, tracker, record):
    theirs = BundleStore(tmp_path / "theirs")
    bundle = search_bundle(theirs, record)
    report = ingest_paths([theirs.root], store, tracker, STUDIES)
    assert report.new == (bundle.id,) and len(tracker._search("demo", "tags.role = 'trial'")) == BUDGET and len(replayed(store)) == 1


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda r: [1, 2], "what SearchRun.record wrote"),
        (lambda r: {**r, "definition": {**r["definition"], "objective": "a\nb"}}, "are letters"),
        (lambda r: {**r, "definition": {**r["definition"], "objective": None}}, "are letters"),
        (lambda r: {**r, "trials": [{**t, "state": ["COMPLETE"]} for t in r["trials"]] + [{"state": "COMPLETE"}]}, "what SearchRun.record wrote"),
        (lambda r: {**r, "trials": [{**r["trials"][0], "number": i} for i in range(MAX_RUNS + 1)]}, "at most 2000 trials"),
        (lambda r: {**r, "trials": [{**r["trials"][0], "intermediate": [[2**60, 1.0]]}]}, "steps up to"),
    ],
)
def test_a_record_that_is_none_is_refused_with_the_rule(store, record, spoil, rule):
    with pytest.raises(Refused, match=rule) as caught:
        searched_of(search_bundle(store, spoil(record)))
    assert "\n" not in str(caught.value)


def test_a_bundle_whose_record_is_none_costs_only_itself(tmp_path, store, tracker, record):
    theirs = BundleStore(tmp_path / "theirs")
    bad, good = search_bundle(theirs, {}, 1), search_bundle(theirs, record, 2)
    with pytest.raises(Refused):
        tracker.ingest(bad, None, METRICS, "here")
    report = ingest_paths([theirs.root], store, tracker, STUDIES)
    assert report.new == (good.id,) and [reason for _, reason in report.skipped][0].startswith("a record of trials is what") and len(report.skipped) == 1


def test_what_was_no_search_has_no_trials(store, record):
    assert searched_of(write(store, 1)) is None
    assert searched_of(write(store, 2, Result(records={"trials": record}), status="FAILED", error="boom")) is None
    assert math.isinf(searched_of(search_bundle(store, record, 3)).trials[3].value)
