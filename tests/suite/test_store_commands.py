"""`suite clean` and `suite ingest` on a store of bundles, without MLflow."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import pytest

from suite import cli
from suite.bundle import BundleStore, Draft
from suite.session import Session
from suite.tracking import TrackingError

DAY_S = 86400


@pytest.fixture
def store(tmp_path, monkeypatch) -> BundleStore:
    monkeypatch.setenv("SUITE_STATE", str(tmp_path / "state"))
    return BundleStore(tmp_path / "state")


def write(store: BundleStore, *, n: int = 1, days_ago: float = 0.0, status: str = "OK", **fields):
    cell = {"study": "determinism", "measure": "a:b", "label": f"cell {n}", "params": {}, "seed": 0, "replicate": 0, "needs": {}, "inputs": {}, "assets": {}}
    environment = {"device_model": "a CPU", "machine": "0" * 12}
    started = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat()
    return store.write(Draft(**{"cell": cell, "point": f"{n:064x}", "key": f"{n:064x}", "code": "2" * 64, "environment": environment, "commit": "c", "dirty": False,
                                "started_at": started, "duration_s": 1.0, "status": status, **fields}))  # fmt: skip


def test_clean_goes_by_the_time_that_an_attempt_names_not_by_its_files(store, capsys):
    old, recent = write(store, n=1, days_ago=10, status="FAILED"), write(store, n=2, days_ago=1, status="FAILED")  # the old one was unpacked just now
    os.utime(recent.path / "bundle.json", (time.time() - 30 * DAY_S,) * 2)
    assert cli.main(["clean", "--older-than", "7d"]) == 0
    assert "deleted 1 attempts" in capsys.readouterr().out
    assert not old.path.exists() and recent.path.exists()


def test_clean_keeps_answers_however_old_and_attempts_whose_time_cannot_be_read(store):
    answer, unread = write(store, days_ago=1000), write(store, n=2, status="FAILED", started_at="yesterday")
    assert cli.main(["clean", "--older-than", "0s"]) == 0
    assert answer.path.exists() and unread.path.exists()


def test_ingest_takes_bundles_in_before_it_asks_the_tracker(store, tmp_path, monkeypatch, capsys):
    theirs = write(BundleStore(tmp_path / "theirs"))
    monkeypatch.delenv("SUITE_NO_TRACKING", raising=False)
    monkeypatch.setattr(Session, "open_tracker", lambda self: (_ for _ in ()).throw(TrackingError("the server is away")))
    assert cli.main(["ingest", str(theirs.path)]) == cli.EXIT_STORE
    assert "the server is away" in capsys.readouterr().err
    assert [b.id for b in store.load_all()[0]] == [theirs.id]
