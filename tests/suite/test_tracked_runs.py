"""Whole runs with MLflow: one run per bundle, dead parents closed, a store that goes away costs nothing."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest

from suite.bundle import Bundle
from suite.driver import Conditions, run_plan
from suite.executors.local import LocalExecutor
from suite.machine import environment, this_machine
from suite.plan import make_plan
from suite.tracking import TrackingError, open_tracker
from tests.suite.test_faults import wait_for


@pytest.fixture
def tracked(checkout):
    del checkout.env["SUITE_NO_TRACKING"]
    return checkout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_run_judges_its_claims_and_says_what_was_not_measured_here(tracked):
    shown = tracked.suite("run", "toy", "--preset", "gpu", check=True).stdout
    assert "NOT MEASURED HERE" in shown and "1 UNAVAILABLE" in shown
    claims = json.loads(tracked.suite("claims", "toy", "--json", check=True).stdout)
    keys = {"study", "id", "statement", "target", "bar", "bar_met", "value", "low", "high", "unit", "n", "kind", "machine", "commit", "stale", "verdict", "command", "others"}
    assert {c["id"]: c["verdict"] for c in claims}["gpu_answers"] == "NOT MEASURED HERE" and all(keys <= set(c) for c in claims)
    assert {c["id"]: (c["value"], c["bar_met"], c["verdict"]) for c in claims}["adds_up"] == (4.0, True, "REPRODUCED")


def test_killed_and_resumed_runs_leave_one_run_a_bundle_and_no_parent_running(tracked):
    run = tracked.start("run", "toy", "--preset", "slow")
    wait_for(lambda: len(tracked.bundles()) >= 4, 60)
    run.kill()
    run.communicate()
    tracked.suite("run", "toy", "--preset", "slow", check=True)
    tracker = open_tracker(None, tracked.state)
    rows = tracker.rows("toy")
    assert Counter(r.bundle_id for r in rows).most_common(1)[0][1] == 1 and len(rows) == 16
    assert {r.point for r in rows} == tracked.bundles_ok_points()


def test_a_server_that_is_down_costs_no_bundle_and_ingest_takes_them_later(tracked):
    down = tracked.suite("run", "toy", "--preset", "smoke", MLFLOW_TRACKING_URI=f"http://127.0.0.1:{free_port()}")
    assert down.returncode == 4 and "bundles are kept" in down.stderr and "Traceback" not in down.stderr
    assert len(tracked.bundles(status="OK")) == 4
    later = tracked.suite("ingest", str(tracked.state / "bundles"), check=True)
    assert "4 new" in later.stdout
    assert "0 new" in tracked.suite("ingest", str(tracked.state / "bundles"), check=True).stdout


def test_a_corrupt_bundle_is_skipped_at_ingest_and_the_rest_taken(tracked, tmp_path):
    there = str(tmp_path / "there")
    tracked.suite("run", "toy", "--preset", "smoke", check=True, SUITE_NO_TRACKING="1", SUITE_STATE=there)
    victim = sorted((tmp_path / "there" / "bundles").glob("??/*/*/bundle.json"))[0]
    victim.write_text("{")
    done = tracked.suite("ingest", there)
    assert done.returncode == 1 and "3 new" in done.stdout and str(victim.parent) in done.stderr and "JSON" in done.stderr


def test_tracking_that_fails_in_mid_run_stops_tracking_and_nothing_else(tmp_path, monkeypatch):
    """The driver with a tracker that goes away after its first bundle."""
    from tests.toy.study import Config, cells

    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    from suite.bundle import BundleStore
    from suite.cell import Cell

    toys = [Cell(study="toy", measure=c.measure.replace("studies.toy", "tests.toy"), params=c.params, label=c.label) for c in cells(Config(answers=3)) if not c.inputs]
    plan = make_plan("toy", "smoke", toys, bundles=[], machine=this_machine(), versions=lambda d: {}, asset_sha256=str)
    taken: list[Bundle] = []

    def ingest(bundle: Bundle) -> None:
        if taken:
            raise TrackingError("the server does not answer")
        taken.append(bundle)

    messages: list[str] = []
    conditions = Conditions(environment=environment, commit="c", dirty=False)
    with LocalExecutor() as executor:
        report = run_plan(plan, executor=executor, store=BundleStore(tmp_path / "store"), conditions=conditions, ingest=ingest, listener=lambda p: messages.extend(p.messages))
    assert set(report.states.values()) == {"DONE"} and len(report.added) == 3
    assert "does not answer" in report.tracking_error and any("bundles are kept" in m for m in messages)


def test_the_csv_has_a_line_a_run(tracked, tmp_path):
    tracked.suite("run", "toy", "--preset", "smoke", check=True)
    tracked.suite("export", "toy", "--csv", str(tmp_path / "toy.csv"), check=True)
    lines = (tmp_path / "toy.csv").read_text().splitlines()
    assert len(lines) == 5 and "square" in lines[0]
