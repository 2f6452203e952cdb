"""Bundles of strangers: what is valid is taken once, and each bad one costs only itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from suite.archive import pack
from suite.bundle import BundleStore, origin_of
from suite.driver import StoreFull
from suite.export import export_csv
from suite.identity import sha256_bytes
from suite.ingest import ingest_paths
from suite.measure import Result
from suite.tracking import TrackingError, open_tracker
from tests.contracts.test_tracker import METRICS, empty_database, write  # noqa: F401 (a fixture)

STUDIES = {"demo": METRICS}


@pytest.fixture
def theirs(tmp_path) -> BundleStore:
    store = BundleStore(tmp_path / "theirs")
    for n in range(3):
        write(store, n, Result(metrics={"square": 1.0}, arrays={"x": np.random.default_rng(n).integers(0, 256, 12_000, dtype=np.uint8)}))  # a small part holds one bundle
    return store


@pytest.fixture
def ours(tmp_path) -> BundleStore:
    return BundleStore(tmp_path / "ours")


@pytest.fixture
def tracker(ours, empty_database):  # noqa: F811
    (ours.root / "tracking").mkdir(parents=True)
    shutil.copy(empty_database, ours.root / "tracking" / "mlflow.db")
    return open_tracker(None, ours.root)


def ids(store: BundleStore) -> set[str]:
    return {b.id for b in store.load_all()[0]}


@pytest.mark.parametrize("how", ["folder", "each bundle", "archive", "parts of an archive", "folder with an archive"])
def test_bundles_come_in_by_every_way_once(theirs, ours, tracker, tmp_path, how):
    if how == "each bundle":
        paths = list(theirs.folders())
    elif how == "folder":
        paths = [theirs.root]
    else:
        (tmp_path / "post").mkdir()
        pack(theirs, None, tmp_path / "post" / "out.tar", 20_480 if "parts" in how else 15 << 20)
        paths = [tmp_path / "post"] if "folder" in how else [tmp_path / "post" / "out.tar"]
    report = ingest_paths(paths, ours, tracker, STUDIES)
    assert (set(report.new), report.known, report.skipped) == (ids(theirs), (), ())
    assert ids(ours) == ids(theirs) and {origin_of(p) for p in ours.folders()} == {"ingested"}
    rows = tracker.rows("demo")
    assert {r.bundle_id for r in rows} == ids(theirs) and {r.origin for r in rows} == {"ingested"}
    assert all(ours.root in r.path.parents for r in rows)
    again = ingest_paths([*paths, *paths], ours, tracker, STUDIES)
    assert (again.new, set(again.known), again.skipped) == ((), ids(theirs), ())


def test_our_own_store_rebuilds_a_lost_database_and_its_bundles_stay_ours(theirs, tracker, ours):
    own = write(ours, 9)
    ingest_paths([theirs.root], ours, None, STUDIES)
    report = ingest_paths([ours.root], ours, tracker, STUDIES)
    assert set(report.new) == ids(ours) and len(ids(ours)) == 4
    assert {r.bundle_id for r in tracker.rows("demo") if r.origin == "here"} == {own.id}


def test_without_a_tracker_bundles_are_taken_all_the_same(theirs, ours):
    assert set(ingest_paths([theirs.root], ours, None, STUDIES).new) == ids(ours) == ids(theirs)
    assert ingest_paths([theirs.root], ours, None, STUDIES).new == ()


def rewrite(folder: Path, change) -> None:
    data = json.loads((folder / "bundle.json").read_text())
    change(data)
    (folder / "bundle.json").write_text(json.dumps(data))


def drop(name: str):
    return lambda data: data.pop(name)


CORRUPT = {
    "payload changed": (lambda f: (f / "arrays.npz").write_bytes((f / "arrays.npz").read_bytes()[:-1] + b"!"), "sha256"),
    "payload missing": (lambda f: (f / "arrays.npz").unlink(), "missing"),
    "payload is a link": (lambda f: ((f / "arrays.npz").unlink(), (f / "arrays.npz").symlink_to("/etc/hostname")), "missing"),
    "truncated header": (lambda f: (f / "bundle.json").write_text((f / "bundle.json").read_text()[:100]), "JSON"),
    "header is no text": (lambda f: (f / "bundle.json").write_bytes(b"\xff\xfe\x00"), ""),
    "deeply nested": (lambda f: (f / "bundle.json").write_text("[" * 100_000), ""),
    "huge header": (lambda f: (f / "bundle.json").write_bytes(b" " * ((4 << 20) + 1)), "over"),
    "huge number": (lambda f: rewrite(f, lambda d: d["metrics"].update(square=10**400)), ""),
    "null header": (lambda f: (f / "bundle.json").write_text("null"), "schema"),
    "no metrics": (lambda f: rewrite(f, drop("metrics")), "metrics"),
    "params are a list": (lambda f: rewrite(f, lambda d: d["cell"].update(params=[1])), "params"),
    "file outside": (lambda f: rewrite(f, lambda d: d["files"].update({"../x": {"sha256": "0" * 64, "bytes": 1}})), "plain"),
    "file is a number": (lambda f: rewrite(f, lambda d: d["files"].update(x=3)), "sha256"),
    "undeclared metric": (lambda f: rewrite(f, lambda d: d["metrics"].update(cube=1.0)), "declared by its study"),
    "unknown study": (lambda f: rewrite(f, lambda d: d["cell"].update(study="other")), "a study is one of"),
    "odd nonfinite": (lambda f: rewrite(f, lambda d: d["nonfinite"].update(worst="1.0")), "inf, -inf or nan"),
    "lone surrogate": (lambda f: rewrite(f, lambda d: d["facts"].update(a="\ud800")), "Unicode"),
    "negative time": (lambda f: rewrite(f, lambda d: d.update(duration_s=-1)), "takes 0"),
}


@pytest.mark.parametrize("how", CORRUPT)
def test_a_corrupt_bundle_is_skipped_with_path_and_reason_and_the_rest_is_taken(theirs, ours, how):
    harm, reason = CORRUPT[how]
    bad, *good = theirs.load_all()[0]
    harm(bad.path)
    report = ingest_paths([theirs.root], ours, None, STUDIES)
    ((path, why),) = report.skipped
    assert path == bad.path and reason in why and why
    assert set(report.new) == ids(ours) == {b.id for b in good}


def test_a_bundle_keeps_the_id_that_its_maker_printed(theirs, ours):
    ingest_paths([theirs.root], ours, None, STUDIES)
    assert all(sha256_bytes((p / "bundle.json").read_bytes()) in ids(theirs) for p in ours.folders())


def test_paths_without_bundles_and_bad_archives_are_told(theirs, ours, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.tar").write_bytes(b"no tar")
    (tmp_path / "note.txt").write_text("hello")
    report = ingest_paths([tmp_path / "empty", tmp_path / "bad.tar", tmp_path / "note.txt", tmp_path / "none", theirs.root], ours, None, STUDIES)
    assert dict(report.skipped).keys() == {tmp_path / n for n in ("empty", "bad.tar", "note.txt", "none")}
    assert all(why for _, why in report.skipped) and len(report.new) == 3


def test_of_a_damaged_archive_the_whole_bundles_are_taken(theirs, ours, tmp_path):
    parts = pack(theirs, None, tmp_path / "out.tar", 20_480)
    parts[-1].write_bytes(parts[-1].read_bytes()[:4000])
    report = ingest_paths([tmp_path / "out.tar"], ours, None, STUDIES)
    assert report.skipped[0][0] == parts[-1] and report.new and set(report.new) == ids(ours) < ids(theirs)


def test_a_folder_of_links_that_loops_ends(theirs, ours):
    (theirs.root / "loop").symlink_to(theirs.root)
    assert len(ingest_paths([theirs.root], ours, None, STUDIES).new) == 3


def test_folders_below_the_depth_limit_are_told(theirs, ours, tmp_path):
    deep = tmp_path.joinpath("deep", *"abcdefghijklmnop")
    deep.mkdir(parents=True)
    shutil.copytree(next(iter(theirs.folders())), deep / "bundle")
    ((_, why),) = ingest_paths([tmp_path / "deep"], ours, None, STUDIES).skipped[:1]
    assert "deeper than" in why


def test_a_tracker_that_stops_leaves_every_bundle_in_the_store(theirs, ours, tracker, monkeypatch):
    def down(*args, **kwargs):
        raise OSError("connection refused")

    monkeypatch.setattr(tracker._client, "create_run", down)
    with pytest.raises(TrackingError, match="connection refused"):
        ingest_paths([theirs.root], ours, tracker, STUDIES)
    assert ids(ours) == ids(theirs)
    monkeypatch.undo()
    assert set(ingest_paths([theirs.root], ours, tracker, STUDIES).new) == ids(theirs)


def test_a_store_that_cannot_be_written_is_told_apart_from_bad_bundles(theirs, ours):
    ours.root.write_text("a file where the folder should be")
    with pytest.raises(StoreFull, match="Not a directory"):
        ingest_paths([theirs.root], ours, None, STUDIES)


def test_the_export_is_one_line_per_attempt_with_every_number(ours, tracker, tmp_path):
    import csv

    for n, (metrics, label) in enumerate([({"square": 0.1}, "a"), ({"worst": float("inf")}, "=1+1"), ({}, "umlaut ö,\n\"quoted\"")]):
        tracker.ingest(write(ours, n, Result(metrics=metrics, facts={"digest": "f00"}), label=label, params={"n": n, "none": None}), None, METRICS, "here")
    export_csv(tracker.rows("demo"), tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as f:
        lines = list(csv.DictReader(f))
    assert [line["label"] for line in lines] == ["a", "'=1+1", "umlaut ö,\n\"quoted\""]
    assert [(line["metric.square"], line["metric.worst"]) for line in lines] == [("0.1", ""), ("", "inf"), ("", "")]
    assert {(line["param.none"], line["fact.digest"], line["seed"]) for line in lines} == {("null", "f00", "0")}
