"""What every tracking store must do: one suite, run over the embedded store and, in the long tier, over a server."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from suite.bundle import Bundle, BundleStore, Draft
from suite.identity import sha256_json
from suite.measure import Result
from suite.tracking import Refused, Tracker, driver_id, open_tracker

METRICS = frozenset({"square", "worst", "speed.up"})
SERVER_START_S = 90.0
MIN_RUNS_PER_S = 10.0  # stated in the design; measured about 45 on two cores


def draft(n: int = 1, **fields) -> Draft:
    """A draft of cell number n; `params`, `label`, `study` go into its cell, other fields replace the draft's."""
    cell = {"study": "demo", "label": f"answer {n}", "measure": "studies.demo.cells:answer", "params": {"n": n}, "seed": 0, "replicate": 0, "needs": {}, "inputs": {}, "assets": {}}
    cell |= {k: fields.pop(k) for k in list(fields) if k in cell}
    environment = {"device_model": "CPU 9000", "cpu_model": "CPU 9000", "gpu_model": "", "machine": "0123456789ab", "cores": 2}
    usual = dict(cell=cell, point=sha256_json(["point", n]), key=sha256_json(["key", n]), code=sha256_json("code"), environment=environment, commit="a" * 40, dirty=False,
                 started_at=f"2026-01-02T03:04:{n % 60:02}+00:00", duration_s=1.5, status="OK")
    return Draft(**{**usual, **fields})


def write(store: BundleStore, n: int = 1, result: Result | None = None, **fields) -> Bundle:
    return store.write(draft(n, **fields), result or Result(metrics={"square": float(n * n)}, facts={"digest": "f00"}))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """A created store without experiments: making one takes seconds, copying it none."""
    state = tmp_path_factory.mktemp("empty")
    open_tracker(None, state)
    return state / "tracking" / "mlflow.db"


@pytest.fixture(scope="session")
def server_uri(tmp_path_factory):
    home = tmp_path_factory.mktemp("server")
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{home / 'server.db'}",
               "--artifacts-destination", str(home / "artifacts")]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"})
    try:
        until = time.monotonic() + SERVER_START_S
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (home / "log").read_text()[-2000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait(20)


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.soak)])
def place(request, tmp_path, empty_database):
    """(bundle store, function that opens its tracker, study name): a fresh store, or a study of its own on the server."""
    if request.param == "sqlite":
        (tmp_path / "tracking").mkdir()
        shutil.copy(empty_database, tmp_path / "tracking" / "mlflow.db")
        return BundleStore(tmp_path), lambda: open_tracker(None, tmp_path), "demo"
    uri = request.getfixturevalue("server_uri")
    return BundleStore(tmp_path), lambda: open_tracker(uri, tmp_path), f"demo_{os.urandom(4).hex()}"


def plain(rows) -> list[dict]:
    """Rows as they must be after any way of ingesting: without the run ids, which a store makes up."""
    return [{k: v for k, v in r.__dict__.items() if k != "run_id"} for r in rows]


def test_a_row_holds_all_that_its_bundle_holds(place):
    store, open_, study = place
    bundle = write(store, 3, Result(metrics={"square": 9.5, "worst": -0.0}, facts={"digest": "f00", "empty": ""}, arrays={"x": np.arange(3)}, kind="simulated"), study=study,
                   params={"n": 3, "x": 0.1, "on": True, "none": None, "of": [1, {"a": "b"}]}, seed=7, replicate=2, dirty=True)
    run_id, new = open_().ingest(bundle, None, METRICS, "published")
    (row,) = open_().rows(study)
    assert new and row.run_id == run_id and row.bundle_id == bundle.id and row.path == bundle.path
    assert (row.study, row.point, row.key, row.code) == (study, bundle.point, bundle.key, bundle.data["code"])
    assert row.params == {"n": 3, "x": 0.1, "on": True, "none": None, "of": [1, {"a": "b"}]}
    assert row.metrics == {"square": 9.5, "worst": 0.0} and row.facts == {"digest": "f00", "empty": ""}
    assert (row.kind, row.status, row.seed, row.replicate, row.dirty, row.origin) == ("simulated", "OK", 7, 2, True, "published")
    assert row.device == "CPU 9000" and row.environment == bundle.data["environment"] and row.machine == "0123456789ab"
    assert row.files == {"arrays.npz": bundle.data["files"]["arrays.npz"]["sha256"]}
    assert row.arrays()["x"].tolist() == [0, 1, 2]


def test_ingest_is_idempotent_by_bundle_id(place):
    store, open_, study = place
    bundle = write(store, study=study)
    tracker = open_()
    first = tracker.ingest(bundle, None, METRICS, "here")
    assert first[1] and tracker.ingest(bundle, None, METRICS, "here") == (first[0], False) == open_().ingest(bundle, None, METRICS, "here")
    assert open_().run_ids_by_bundle(study) == {bundle.id: first[0]}


def test_every_status_is_tracked(place):
    store, open_, study = place
    tracker = open_()
    for n, status in enumerate(("OK", "FAILED", "TIMED OUT", "PAUSED")):
        tracker.ingest(write(store, n, study=study, status=status, error="" if status == "OK" else "boom"), None, METRICS, "here")
    rows = tracker.rows(study)
    assert [r.status for r in rows] == ["OK", "FAILED", "TIMED OUT", "PAUSED"]
    assert [tracker._client.get_run(r.run_id).info.status for r in rows] == ["FINISHED", "FAILED", "FAILED", "KILLED"]


def test_infinities_and_nan_come_back_as_they_were(place):
    store, open_, study = place
    open_().ingest(write(store, 1, Result(metrics={"square": math.inf, "worst": -math.inf, "speed.up": math.nan}), study=study), None, METRICS, "here")
    metrics = open_().rows(study)[0].metrics
    assert metrics["square"] == math.inf and metrics["worst"] == -math.inf and math.isnan(metrics["speed.up"])


def test_unicode_comes_back_as_it_was(place):
    store, open_, study = place
    text = "größe 数 🎲 \u202e <b>&amp; 'quote' \"; drop table runs; \n\t end"
    open_().ingest(write(store, 1, Result(facts={"text": text}), study=study, label=text, params={"größe": text}), None, METRICS, "here")
    (row,) = open_().rows(study)
    assert (row.label, row.facts["text"], row.params["größe"]) == (text, text, text)


def test_many_facts_and_files_fit(place):
    store, open_, study = place
    facts, records = {f"f{i}": "x" * 100 for i in range(250)}, {f"record-with-a-long-name-{'y' * 80}{i}": i for i in range(60)}
    open_().ingest(write(store, 1, Result(facts=facts, records=records), study=study), None, METRICS, "here")
    (row,) = open_().rows(study)
    assert row.facts == facts and len(row.files) == 60 and row.record(next(iter(records))) == 0


@pytest.mark.parametrize(
    ("result", "fields", "rule"),
    [
        (Result(metrics={"cube": 1.0}), {}, "cube"),
        (Result(metrics={"cube": math.inf}), {}, "cube"),
        (None, {"params": {f"p{i}": i for i in range(101)}}, "at most 100 params"),
        (None, {"params": {"p": "x" * 6001}}, "6000"),
        (None, {"params": {"a/../b": 1}}, "name"),
        (Result(facts={"f": "x" * 8001}), {}, "8000"),
        (Result(facts={"f": "\ud800"}), {}, "Unicode"),
        (None, {"started_at": "yesterday"}, "ISO 8601"),
        (None, {"study": "../demo"}, "study"),
        (None, {"environment": {}}, "device_model"),
        (None, {"duration_s": 1e300}, "1e+09"),
    ],
)
def test_what_mlflow_cannot_hold_is_refused_with_the_rule(place, result, fields, rule):
    store, open_, study = place
    tracker = open_()
    with pytest.raises(Refused, match=rule.replace("+", r"\+")):
        tracker.ingest(write(store, 1, result, **{"study": study, **fields}), None, METRICS, "here")
    assert tracker.rows(study) == []


def test_a_half_written_run_is_not_read_and_goes_at_the_next_ingest(place, monkeypatch):
    store, open_, study = place
    tracker, bundle = open_(), write(store, study=study)
    monkeypatch.setattr(tracker._client, "set_tag", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tracker.ingest(bundle, None, METRICS, "here")
    half = tracker._search(study, "tags.role = 'cell'")
    assert len(half) == 1 and tracker.rows(study) == [] and tracker.run_ids_by_bundle(study) == {}
    tracker._client.log_batch(half[0].info.run_id, tags=[_tag("driver", dead_driver())])
    other = open_()
    run_id, new = other.ingest(bundle, None, METRICS, "here")
    assert new and [r.info.run_id for r in other._search(study, "tags.role = 'cell'")] == [run_id]


def test_a_run_that_a_living_driver_is_writing_is_left_alone(place):
    store, open_, study = place
    tracker = open_()
    tracker.ingest(write(store, 1, study=study), None, METRICS, "here")
    being_written = tracker._client.create_run(tracker._experiment(study), tags={"role": "cell", "driver": driver_id()}).info.run_id
    other = open_()
    other.ingest(write(store, 2, study=study), None, METRICS, "here")
    assert being_written in {r.info.run_id for r in other._search(study, "tags.role = 'cell'")}
    assert len(other.rows(study)) == 2


def test_two_drivers_that_ingest_the_same_bundle_leave_one_row(place):
    store, open_, study = place
    a, b, bundle = open_(), open_(), write(store, study=study)
    a.run_ids_by_bundle(study), b.run_ids_by_bundle(study)  # both have looked before either writes
    ids = {t.ingest(bundle, None, METRICS, "here")[0] for t in (a, b)}
    (row,) = open_().rows(study)
    assert len(ids) == 2 and row.run_id == min(ids) == open_().run_ids_by_bundle(study)[bundle.id]


def test_an_invocation_holds_its_plan_and_its_cells(place):
    store, open_, study = place
    tracker, bundle = open_(), write(store, study=study)
    parent = tracker.start_invocation(study, {"cells": ["a"]}, {"commit": "c" * 40, "preset": "smoke"})
    run_id, _ = tracker.ingest(bundle, parent, METRICS, "here")
    tracker.end_invocation(parent, "FINISHED", {bundle.point: run_id})
    run = tracker._client.get_run(parent)
    plan = json.loads(Path(tracker._client.download_artifacts(parent, "plan.json", str(store.root))).read_text())
    assert plan == {"plan": {"cells": ["a"]}, "runs": {bundle.point: run_id}}
    assert run.info.status == "FINISHED" and run.data.tags["preset"] == "smoke"
    assert tracker._client.get_run(run_id).data.tags["mlflow.parentRunId"] == parent
    assert [r.run_id for r in tracker.rows(study)] == [run_id]


def test_parents_of_dead_drivers_become_killed_and_living_ones_stay(place):
    _, open_, study = place
    tracker = open_()
    dead, alive = (tracker.start_invocation(study, {}, {}) for _ in range(2))
    tracker._client.log_batch(dead, tags=[_tag("driver", dead_driver())])
    open_().start_invocation(study, {}, {})
    assert tracker._client.get_run(dead).info.status == "KILLED" and tracker._client.get_run(alive).info.status == "RUNNING"


def test_the_order_of_ingest_does_not_matter(place, tmp_path_factory):
    store, open_, study = place
    bundles = [write(store, n, study=study) for n in range(5)]
    tracker = open_()
    for b in bundles[::2] + bundles[1::2][::-1]:
        tracker.ingest(b, None, METRICS, "here")
    assert [r.bundle_id for r in open_().rows(study)] == [b.id for b in bundles]


def test_payload_is_fetched_from_mlflow_only_where_the_local_copy_is_absent(place):
    store, open_, study = place
    noise = np.random.default_rng(0).integers(0, 1 << 62, (5 << 20) // 8)
    small, large = write(store, 1, Result(arrays={"x": np.arange(4)}), study=study), write(store, 2, Result(arrays={"x": noise}), study=study)
    tracker = open_()
    for b in (small, large):
        tracker.ingest(b, None, METRICS, "here")
    assert [r.path for r in tracker.rows(study)] == [small.path, large.path]
    for b in (small, large):
        shutil.rmtree(b.path)
    rows = open_().rows(study)
    assert rows[0].arrays()["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="too large for MLflow"):
        rows[1].arrays()


def dead_driver() -> str:
    """The driver tag of a process of this host that is gone."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    tag = driver_id(process.pid)
    process.kill()
    process.wait()
    return tag


def _tag(key: str, value: str):
    from mlflow.entities import RunTag

    return RunTag(key, value)


def ingest_all(tracker: Tracker, bundles: list[Bundle]) -> None:
    for b in bundles:
        tracker.ingest(b, None, METRICS, "here")
