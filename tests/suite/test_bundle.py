"""A bundle is whole or absent, and what is not a bundle is refused with the rule that it breaks."""

import json

import numpy as np
import pytest

from suite import bundle as bundles
from suite.bundle import BundleError, BundleStore, Draft, load_arrays, load_record, read_bundle
from suite.measure import KINDS, Result, weakest

INF = float("inf")


def draft(**fields) -> Draft:
    cell = {"study": "toy", "measure": "a:b", "label": "x", "params": {}, "seed": 0, "replicate": 0, "needs": {}, "inputs": {}, "assets": {}}
    return Draft(**{"cell": cell, "point": "0" * 64, "key": "1" * 64, "code": "2" * 64, "environment": {}, "commit": "c", "dirty": False, "started_at": "t", "duration_s": 1.0, "status": "OK", **fields})


@pytest.fixture
def bundle(tmp_path):
    result = Result(metrics={"a": 1.5, "b": INF, "c": -INF, "d": float("nan")}, facts={"digest": "ab"}, arrays={"x": np.arange(5, dtype=np.uint16)}, records={"ops": [{"n": 1}]})
    return BundleStore(tmp_path).write(draft(log="a line\n"), result)


def test_what_is_written_is_read_back(bundle):
    again = read_bundle(bundle.path)
    assert again.id == bundle.id and again.facts == {"digest": "ab"}
    assert (again.metrics["a"], again.metrics["b"], again.metrics["c"]) == (1.5, INF, -INF) and np.isnan(again.metrics["d"])
    assert list(load_arrays(bundle.path)["x"]) == [0, 1, 2, 3, 4] and load_record(bundle.path, "ops") == [{"n": 1}]
    assert (bundle.path / "log.txt").read_text() == "a line\n"


def header(path, **changes) -> None:
    file = path / "bundle.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "damage, rule",
    [
        (lambda p: (p / "bundle.json").write_text("{"), "not JSON"),
        (lambda p: (p / "bundle.json").unlink(), "missing"),
        (lambda p: (p / "arrays.npz").write_bytes(b"x"), "bytes"),
        (lambda p: (p / "arrays.npz").write_bytes(bytes((p / "arrays.npz").stat().st_size)), "sha256"),
        (lambda p: (p / "ops.json").unlink(), "missing"),
        (lambda p: (p / "bundle.json").write_text("[" * 100_000), "not JSON"),
        (lambda p: header(p, metrics={"a": 10**400}), "not JSON that holds"),
        (lambda p: header(p, schema=99), "schema"),
        (lambda p: header(p, status="FINE"), "status"),
        (lambda p: header(p, key="../../x"), "64 hex"),
        (lambda p: header(p, metrics={"a": "1"}), "finite number"),
        (lambda p: header(p, files={"../up": {"sha256": "0" * 64, "bytes": 1}}), "not plain"),
        (lambda p: header(p, facts={"a": 1}), "string"),
    ],
)
def test_a_damaged_bundle_is_refused_with_its_path_and_the_rule(bundle, damage, rule):
    damage(bundle.path)
    with pytest.raises(BundleError, match=rule) as caught:
        read_bundle(bundle.path)
    assert caught.value.path == bundle.path


def test_a_link_in_place_of_a_file_is_refused(bundle, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_bytes((bundle.path / "ops.json").read_bytes())
    (bundle.path / "ops.json").unlink()
    (bundle.path / "ops.json").symlink_to(target)
    with pytest.raises(BundleError, match="missing"):
        read_bundle(bundle.path)


def test_an_attempt_is_never_overwritten(tmp_path):
    store = BundleStore(tmp_path)
    assert store.write(draft()).path != store.write(draft()).path


def test_a_failed_write_leaves_nothing(tmp_path):
    store = BundleStore(tmp_path)
    with pytest.raises(ValueError):
        store.write(draft(), Result(records={"bad": float("nan")}))
    assert [p for p in tmp_path.rglob("*") if p.is_file() or p.name.startswith(".tmp")] == []


def all_of(root) -> list:
    return [p for p in root.rglob("*") if p.is_file() or p.name.startswith(".tmp")]


def test_an_adoption_that_fails_leaves_nothing(bundle, tmp_path, monkeypatch):
    here = BundleStore(tmp_path / "here")
    with monkeypatch.context() as m:
        m.setattr(bundles.os, "rename", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            here.adopt(bundle.path, "ingested")
    (bundle.path / "ops.json").write_bytes(b'[{"n": 2}]')
    with pytest.raises(BundleError, match="sha256") as caught:
        here.adopt(bundle.path, "ingested")
    assert caught.value.path == bundle.path and all_of(tmp_path / "here") == []


def test_a_temp_folder_of_a_dead_writer_is_no_known_bundle(bundle, tmp_path):
    here = BundleStore(tmp_path / "here")
    left, _ = here.adopt(bundle.path, "ingested")
    left.path.rename(left.path.with_name(".tmp-dead"))
    again, new = here.adopt(bundle.path, "ingested")
    assert new and here.remove_leftovers() == 1 and again.path.is_dir()


def test_what_is_verified_is_the_copy(bundle, tmp_path, monkeypatch):
    """A payload that changes between two reads must not come in under the old digest."""
    write, here = bundles._write_synced, BundleStore(tmp_path / "here")
    monkeypatch.setattr(bundles, "_write_synced", lambda path, data: write(path, data.replace(b'"n": 1', b'"n": 2') if path.name == "ops.json" else data))
    with pytest.raises(BundleError, match="sha256"):
        here.adopt(bundle.path, "ingested")
    assert all_of(tmp_path / "here") == []


def test_a_bundle_is_synced_before_and_after_it_gets_its_name(bundle, tmp_path, monkeypatch):
    seen, rename = [], bundles.os.rename
    monkeypatch.setattr(bundles, "_fsync_dir", lambda path: seen.append(path.name if path.name[:1] != "." else ".tmp"))
    monkeypatch.setattr(bundles.os, "rename", lambda a, b: (seen.append("rename"), rename(a, b)))
    BundleStore(tmp_path / "here").adopt(bundle.path, "ingested")
    BundleStore(tmp_path / "there").write(draft())
    assert seen == [".tmp", "rename", "1" * 64, "11"] * 2


def test_object_arrays_and_odd_names_are_refused():
    with pytest.raises(ValueError, match="object array"):
        Result(arrays={"x": np.array([object()])})
    with pytest.raises(ValueError, match="names are"):
        Result(metrics={"../x": 1.0})
    with pytest.raises(ValueError, match="kind is one of"):
        Result(kind="guessed")


def test_a_derived_number_takes_the_weakest_kind():
    assert weakest(["measured", "emulated", "measured"]) == "emulated" and weakest(list(KINDS)) == "extrapolated"
