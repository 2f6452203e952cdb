"""What only the embedded store promises: safe creation, rebuilding from bundles, and one clear line for each fault."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from suite.bundle import BundleStore
from suite.identity import ROOT
from suite.tracking import TrackingError, open_tracker
from tests.contracts.test_tracker import METRICS, MIN_RUNS_PER_S, empty_database, ingest_all, plain, write  # noqa: F401 (a fixture)

SPEED_SLACK = 2.0  # a shared machine
SERVER_DOWN_LIMIT_S = 30.0


@pytest.fixture
def state(tmp_path, empty_database) -> Path:  # noqa: F811
    state = tmp_path / "state"
    (state / "tracking").mkdir(parents=True)
    shutil.copy(empty_database, state / "tracking" / "mlflow.db")
    return state


def python(code: str, *arguments: object, cwd: Path = ROOT) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_four_processes_that_race_for_a_fresh_store_all_get_a_usable_one(tmp_path, tmp_path_factory):
    store = BundleStore(tmp_path)
    bundles = [write(store, n) for n in range(4)]
    code = """
        import sys, time
        from pathlib import Path
        from suite.bundle import read_bundle
        from suite.tracking import open_tracker
        import mlflow, mlflow.store.tracking.sqlalchemy_store
        state, bundle, gate = Path(sys.argv[1]), read_bundle(Path(sys.argv[2])), Path(sys.argv[3])
        (gate / bundle.id).touch()
        while len(list(gate.iterdir())) < 4:
            time.sleep(0.01)
        print(open_tracker(None, state).ingest(bundle, None, frozenset({"square"}), "here")[1])
        """
    gate = tmp_path_factory.mktemp("gate")
    racers = [python(code, tmp_path, b.path, gate, cwd=tmp_path) for b in bundles]
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert (racer.returncode, out.strip()) == (0, "True"), err[-2000:]
    assert {r.bundle_id for r in open_tracker(None, tmp_path).rows("demo")} == {b.id for b in bundles}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundles", "tracking"], "nothing is left in the current directory"


def test_a_deleted_database_is_rebuilt_from_bundles_with_the_same_rows(state):
    store = BundleStore(state)
    bundles = [write(store, n, status="OK" if n else "FAILED") for n in range(4)]
    ingest_all(open_tracker(None, state), bundles)
    before = plain(open_tracker(None, state).rows("demo"))
    shutil.rmtree(state / "tracking")
    assert open_tracker(None, state).rows("demo") == []
    ingest_all(open_tracker(None, state), bundles[::-1])
    assert plain(open_tracker(None, state).rows("demo")) == before and len(before) == 4


def test_ingest_keeps_up_with_the_measuring(state):
    store, tracker = BundleStore(state), open_tracker(None, state)
    bundles = [write(store, n) for n in range(31)]
    tracker.ingest(bundles[0], None, METRICS, "here")
    start = time.perf_counter()
    ingest_all(tracker, bundles[1:])
    assert 30 / (time.perf_counter() - start) > MIN_RUNS_PER_S / SPEED_SLACK


def test_artifacts_lie_beside_the_database_whatever_the_current_directory_is(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_tracker(None, state).ingest(write(BundleStore(state)), None, METRICS, "here")
    assert list((state / "tracking" / "artifacts" / "demo").glob("*/artifacts/bundle.json"))
    assert not (tmp_path / "mlruns").exists()


def test_telemetry_is_off_and_mlflow_is_imported_only_when_a_tracker_opens(tmp_path):
    code = """
        import os, sys
        import suite.tracking, suite.ingest, suite.archive, suite.export, suite.claims
        assert "mlflow" not in sys.modules
        try:
            suite.tracking.open_tracker("http://127.0.0.1:9", __import__("pathlib").Path(sys.argv[1]))
        except suite.tracking.TrackingError:
            pass
        print("mlflow" in sys.modules, os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"])
        """
    out, err = python(code, tmp_path).communicate(timeout=60)
    assert out.split() == ["True", "true", "true"], err


def test_a_server_that_is_down_is_one_line_within_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    tracker, start = open_tracker(f"http://user:secret@127.0.0.1:{port}", tmp_path), time.monotonic()
    bundle = write(BundleStore(tmp_path))
    with pytest.raises(TrackingError, match="did not take it") as caught:
        tracker.ingest(bundle, None, METRICS, "here")
    assert time.monotonic() - start < SERVER_DOWN_LIMIT_S
    assert str(caught.value) == f"the tracking store http://***@127.0.0.1:{port} did not take it: [Errno 111] Connection refused"
    assert bundle.path.is_dir()


def test_a_read_only_database_is_one_line_and_can_still_be_read(state):
    store = BundleStore(state)
    bundles = [write(store, n) for n in range(2)]
    open_tracker(None, state).ingest(bundles[0], None, METRICS, "here")
    with open(state / "tracking" / "mlflow.db", "r+b") as f:
        f.seek(18)  # the file format's write version: above 2, sqlite takes the file as read-only (sqlite.org/fileformat2.html, 1.3.3)
        f.write(b"\x03")
    tracker = open_tracker(None, state)
    assert len(tracker.rows("demo")) == 1
    with pytest.raises(TrackingError, match="readonly") as caught:
        tracker.ingest(bundles[1], None, METRICS, "here")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_and_the_store_works_again_after(state):
    store = BundleStore(state)
    bundles = [write(store, n) for n in range(30)]
    code = """
        import resource, sys
        from pathlib import Path
        from suite.bundle import BundleStore
        from suite.tracking import TrackingError, open_tracker
        state = Path(sys.argv[1])
        tracker, bundles = open_tracker(None, state), BundleStore(state).load_all()[0]
        size = (state / "tracking" / "mlflow.db").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, size + 20_000))
        try:
            for b in bundles:
                tracker.ingest(b, None, frozenset({"square"}), "here")
        except TrackingError as error:
            print("refused:", error)
        """
    out, err = python(code, state).communicate(timeout=60)
    assert out.startswith("refused: the tracking store sqlite:///") and out.count("\n") == 1, err
    tracker = open_tracker(None, state)
    ingest_all(tracker, bundles)
    assert len(tracker.rows("demo")) == 30 == len(tracker._search("demo", "tags.role = 'cell'"))


def test_a_store_whose_folder_moved_says_how_to_rebuild_it(state):
    bundle = write(BundleStore(state))
    open_tracker(None, state).ingest(bundle, None, METRICS, "here")
    moved = state.with_name("moved")
    state.rename(moved)
    with pytest.raises(TrackingError, match="was moved.*suite ingest"):
        open_tracker(None, moved).rows("demo")


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_broken_database_file_is_one_line_and_an_empty_one_is_made_anew(state, content):
    (state / "tracking" / "mlflow.db").write_bytes(content)
    if not content:
        assert open_tracker(None, state).rows("demo") == []
        return
    with pytest.raises(TrackingError, match="not a database"):
        open_tracker(None, state).rows("demo")


def test_a_path_with_spaces_and_umlauts_works(tmp_path, empty_database):  # noqa: F811
    state = tmp_path / "ein ordner für 100%"
    (state / "tracking").mkdir(parents=True)
    shutil.copy(empty_database, state / "tracking" / "mlflow.db")
    bundle = write(BundleStore(state))
    open_tracker(None, state).ingest(bundle, None, METRICS, "here")
    shutil.rmtree(bundle.path)
    (row,) = open_tracker(None, state).rows("demo")
    assert (row.path / "bundle.json").is_file()
    with pytest.raises(TrackingError, match="without options"):
        open_tracker("sqlite:////tmp/x.db?mode=ro", state)
