"""Archives keep every byte through parts of a bounded size, a malicious one harms nothing, and a run that is ended leaves one."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from suite import cli, locks
from suite.archive import PART_BYTES, ArchiveError, pack, parts_of, unpack
from suite.bundle import BundleStore, read_bundle
from suite.cell import Cell, Needs
from suite.commands import archive as command
from suite.commands.archive import RunArchive, TooSlow, replace_archive, time_limit
from suite.driver import Conditions, run_plan
from suite.executors._base import Done
from suite.machine import Machine
from suite.measure import Result
from suite.plan import make_plan
from tests.contracts.test_tracker import write

SMALL_PART = 40_960  # four tar records
KEY = "ab" * 32
END_S = 10.0  # from SIGTERM to the end of a run, its archive included; a few small bundles take milliseconds


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def noise(n_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


@pytest.fixture
def store(tmp_path) -> BundleStore:
    """Five bundles, one of them larger than a small part, one foreign; the state of a paused cell with folders."""
    store = BundleStore(tmp_path / "store")
    for n in range(4):
        write(store, n, Result(metrics={"square": 1.0}, arrays={"x": noise(7000, n)}, records={"r" * 100: [n]}))
    write(store, 4, Result(arrays={"x": noise(150_000)}))
    other = write(BundleStore(tmp_path / "elsewhere"), 5)
    store.adopt(other.path, "ingested")
    state = store.state_dir(KEY)
    (state / "a" / "b").mkdir(parents=True)
    (state / "weights.bin").write_bytes(noise(200_000).tobytes())
    (state / "a" / "b" / "größe.json").write_text("{}")
    (state / "a" / "empty").write_bytes(b"")
    return store


@pytest.mark.parametrize("limit", [SMALL_PART, SMALL_PART + 777, PART_BYTES])
def test_what_is_packed_comes_back_byte_for_byte_through_bounded_parts(store, tmp_path, limit):
    parts = pack(store, None, tmp_path / "out.tar", limit)
    assert all(p.stat().st_size <= limit for p in parts)
    assert [p.name for p in parts] == ["out.tar", *(f"out.{n}.tar" for n in range(2, len(parts) + 1))]
    assert (len(parts) == 1) == (limit == PART_BYTES)
    back = BundleStore(tmp_path / "back")
    report = unpack(tmp_path / "out.tar", back)
    assert contents(back.root) == contents(store.root)
    assert (len(report.bundles), len(report.states), report.kept) == (6, 1, ())


def test_equal_contents_give_equal_bytes(store, tmp_path):
    first = [p.read_bytes() for p in pack(store, None, tmp_path / "one.tar", SMALL_PART)]
    for path in store.root.rglob("*"):
        os.utime(path, (1, 1))
    assert [p.read_bytes() for p in pack(store, None, tmp_path / "two.tar", SMALL_PART)] == first


def test_keys_choose_what_is_packed(store, tmp_path):
    chosen = store.load_all()[0][2]
    unpack(pack(store, [chosen.key], tmp_path / "out.tar"), back := BundleStore(tmp_path / "back"))
    assert [b.id for b in back.load_all()[0]] == [chosen.id] and not (back.root / "state").exists()


def test_a_second_archive_of_the_name_leaves_no_part_of_the_first(store, tmp_path):
    assert len(pack(store, None, tmp_path / "out.tar", SMALL_PART)) > 3
    (tmp_path / "out.other.tar").touch()
    assert parts_of(tmp_path / "out.tar") != pack(store, None, tmp_path / "out.tar") == [tmp_path / "out.tar"] == parts_of(tmp_path / "out.tar")
    assert (tmp_path / "out.other.tar").exists()


def test_what_is_here_already_is_kept_as_it_is(store, tmp_path):
    pack(store, None, tmp_path / "out.tar")
    (store.state_dir(KEY) / "weights.bin").write_bytes(b"newer")
    report = unpack(tmp_path / "out.tar", store)
    assert (report.bundles, report.states, len(report.kept)) == ((), (), 7)
    assert (store.state_dir(KEY) / "weights.bin").read_bytes() == b"newer"


def test_an_empty_store_packs_to_an_empty_archive(tmp_path):
    assert unpack(pack(BundleStore(tmp_path / "none"), None, tmp_path / "out.tar"), BundleStore(tmp_path / "back")).bundles == ()


@pytest.mark.parametrize("lost", [0, 2, -1])
def test_a_lost_part_is_told_and_nothing_of_its_archive_is_taken(store, tmp_path, lost):
    parts = pack(store, None, tmp_path / "out.tar", SMALL_PART)
    parts[lost].unlink()
    left = next(p for p in parts if p.exists())
    with pytest.raises(ArchiveError):
        unpack(left, back := BundleStore(tmp_path / "back"))
    assert contents(back.root) == {}


@pytest.mark.parametrize("name", ["out.gz", "out.2.tar"])
def test_an_archive_is_named_so_that_its_parts_are_found(store, tmp_path, name):
    with pytest.raises(ValueError, match="FILE.tar"):
        pack(store, None, tmp_path / name)


def member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as t:
        for info, data in members:
            t.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return path


MALICIOUS = {
    "absolute path": [member("/etc/evil")],
    "parent path": [member("state/../../evil")],
    "backslash": [member("state\\..\\evil")],
    "control code": [member("state/\x1b[2Jevil")],
    "symbolic link": [member("state/link", kind=tarfile.SYMTYPE, link="/etc"), member("state/link/evil")],
    "hard link": [member("state/link", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "device": [member("state/null", kind=tarfile.CHRTYPE)],
    "fifo": [member("state/fifo", kind=tarfile.FIFOTYPE)],
    "named twice": [member("state/a"), member("state/a")],
    "file and folder": [member("state/a"), member("state/a/b")],
    "too deep": [member("/".join(["state", *"abcdefghijklmn"]))],
    "too long": [member("state/" + "a" * 2000)],
    "piece escapes": [member("pieces/0-of-1/../../evil")],
    "piece out of order": [member("pieces/1-of-2/state/a")],
    "piece missing": [member("pieces/0-of-2/state/a")],
    "piece over a file": [member(f"state/{KEY}/a"), member(f"pieces/0-of-1/state/{KEY}/a")],
    "state without a key": [member("state/evil/a")],
    "broken bundle": [member(f"bundles/ab/{KEY}/attempt/bundle.json", b"{}")],
}


@pytest.mark.parametrize("how", MALICIOUS)
def test_a_malicious_archive_is_refused_whole(tmp_path, how):
    good = member(f"state/{KEY}/good")
    archive, back = tar(tmp_path / "evil.tar", good, *MALICIOUS[how]), BundleStore(tmp_path / "in" / "back")
    with pytest.raises(ArchiveError) as caught:
        unpack(archive, back)
    assert str(archive) in str(caught.value) and "\x1b" not in str(caught.value)
    assert contents(tmp_path) == {"evil.tar": archive.read_bytes()}


def test_a_bundle_is_only_taken_where_its_key_lies(store, tmp_path):
    bundle = store.load_all()[0][0]
    files = [member(f"bundles/ab/{KEY}/attempt/{p.name}", p.read_bytes()) for p in bundle.path.iterdir()]
    with pytest.raises(ArchiveError, match="not where a bundle of key"):
        unpack(tar(tmp_path / "a.tar", *files), BundleStore(tmp_path / "back"))


@pytest.mark.parametrize("data", [b"", b"no tar" * 1000, b"\x1f\x8b" + b"z" * 5000])
def test_what_is_no_tar_file_is_refused(tmp_path, data):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ArchiveError, match="tar file"):
        unpack(tmp_path / "a.tar", BundleStore(tmp_path / "back"))


def test_a_truncated_archive_is_refused(store, tmp_path):
    (path,) = pack(store, None, tmp_path / "out.tar")
    whole = path.read_bytes()
    for cut in (511, 5000, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArchiveError):
            unpack(path, BundleStore(tmp_path / "back"))


def test_no_time_limit_is_needed_for_a_sparse_bomb(tmp_path):
    """A GNU sparse member claims a terabyte in a kilobyte of archive."""
    info = tarfile.TarInfo("state/bomb")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410], header[483:495] = b"%011o\0" % 0, b"%011o\0" % 512, b"%011o\0" % ((1 << 33) - 1)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"\0" * 512 * 20)
    with pytest.raises(ArchiveError):
        unpack(tmp_path / "a.tar", BundleStore(tmp_path / "back"))
    assert shutil.disk_usage(tmp_path).free > 0 and not list((tmp_path / "back").rglob("*"))


def test_packed_bundles_are_valid_where_they_arrive(store, tmp_path):
    unpack(pack(store, None, tmp_path / "out.tar", SMALL_PART), back := BundleStore(tmp_path / "back"))
    assert sorted(read_bundle(p).id for p in back.folders()) == sorted(b.id for b in store.load_all()[0])


# ---------------------------------------------------------------------------------------------- renewing one


@pytest.fixture
def out(store, tmp_path) -> Path:
    """An archive of an earlier state of the store, in a folder of its own."""
    path = tmp_path / "out" / "a.tar"
    path.parent.mkdir()
    assert len(replace_archive(store, path, max_part_bytes=SMALL_PART)) > 3
    write(store, 9, Result(arrays={"x": noise(90_000, 9)}))
    return path


def test_an_archive_is_replaced_by_what_pack_would_write(store, out, tmp_path):
    for limit in (SMALL_PART, PART_BYTES):  # more parts than before, then fewer
        parts = replace_archive(store, out, max_part_bytes=limit)
        alone = tmp_path / str(limit)
        alone.mkdir()
        pack(store, None, alone / "a.tar", limit)
        assert contents(out.parent) == contents(alone) and parts == parts_of(out)


def test_what_is_not_written_in_time_leaves_the_earlier_archive_whole(store, out, monkeypatch):
    before = contents(out.parent)
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(60))
    start = time.monotonic()
    with pytest.raises(TooSlow), time_limit(0.2):
        replace_archive(store, out, max_part_bytes=SMALL_PART)
    assert time.monotonic() - start < 30 and contents(out.parent) == before


def test_an_error_while_packing_leaves_the_earlier_archive_whole(store, out, monkeypatch):
    before, fsync, calls = contents(out.parent), os.fsync, []

    def full(fd):
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        replace_archive(store, out, max_part_bytes=SMALL_PART)
    assert contents(out.parent) == before


def test_without_states_the_keys_that_have_one_are_left_out(store, tmp_path):
    paused = store.load_all()[0][0]
    store.state_dir(paused.key).mkdir(parents=True)
    (store.state_dir(paused.key) / "half.bin").write_bytes(b"x")
    report = unpack(replace_archive(store, tmp_path / "out.tar", states=False), back := BundleStore(tmp_path / "back"))
    assert (len(report.bundles), len(report.states)) == (5, 0) and paused.id not in {b.id for b in back.load_all()[0]}


def test_a_rescue_that_cannot_write_says_so_and_hides_nothing(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RESCUE_S", 0.2)
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(60))
    RunArchive(str(tmp_path / "out.tar"), store).rescue()
    RunArchive(str(tmp_path / "nowhere" / "out.tar"), store).rescue()
    assert capsys.readouterr().err.count("was not renewed") == 2 and not list(tmp_path.glob("*out.tar*"))
    RunArchive(None, store).rescue()


def test_nothing_is_packed_while_a_cell_is_timed(tmp_path):
    """The driver's checkpoint waits for exclusive cells, as its tracker does."""
    running: list = []

    class Executor:
        waits = 0

        def can_start(self, needs):
            return not running

        def start(self, job):
            running.append(job)

        def wait(self, timeout_s):
            self.waits += 1
            return [] if self.waits % 3 else [Done(job=running.pop(), status="DIED", message="", duration_s=0.0)]

    seen: list[bool] = []
    cells = [Cell(study="toy", measure="tests.toy.cells:answer", params={"n": n}, needs=Needs(exclusive=n == 1)) for n in (1, 2)]
    machine = Machine(cpu_model="a cpu", cores=2, memory_gib=8.0, torch="2.11.0", triton="3.6.0", driver="", gpus=())
    plan = make_plan("toy", "smoke", cells, bundles=[], machine=machine, versions=lambda d: {}, asset_sha256=str)
    run_plan(plan, executor=Executor(), store=BundleStore(tmp_path), conditions=Conditions(environment=lambda d: {}, commit="c", dirty=False),
             checkpoint=lambda: seen.append(any(job.needs["exclusive"] for job in running)))  # fmt: skip
    assert len(seen) == 4 and not any(seen)  # after the timed cell, at two waits of the other, and after it


# ---------------------------------------------------------------------------------------------- whole commands


def stored(checkout) -> set[str]:
    """Ids of the bundles that have their final name."""
    return {b.id for b in BundleStore(checkout.state).load_all()[0]}


def slow_run(checkout, *arguments: str):
    """A run that has finished at least two cells and has more to do."""
    run = checkout.start("run", "toy", "--preset", "slow", *arguments)
    until = time.monotonic() + 60
    while len(stored(checkout)) < 2:
        assert time.monotonic() < until and run.poll() is None, "the run never got so far"
        time.sleep(0.02)
    return run


def patch(checkout, pattern: str, replacement: str) -> None:
    """Change the checkout's copy of the command."""
    path = checkout.path / "suite/commands/archive.py"
    text, n = re.subn(pattern, replacement, path.read_text())
    assert n == 1
    path.write_text(text)


def unpacked(checkout, name: str) -> set[str]:
    """Ids of the bundles in an archive."""
    back = BundleStore(checkout.path / f".back-{name}")
    unpack(checkout.path / name, back)
    return {read_bundle(p).id for p in back.folders()}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_packs_its_finished_cells_first(checkout, sent):
    run = slow_run(checkout, "--archive", "out.tar")
    assert not (checkout.path / "out.tar").exists()
    run.send_signal(sent)
    start = time.monotonic()
    out, _ = run.communicate(timeout=60)
    assert time.monotonic() - start < END_S and run.returncode == cli.EXIT_INTERRUPTED, out
    finished = stored(checkout)
    assert 2 <= len(finished) < 16 and unpacked(checkout, "out.tar") == finished and "packed out.tar" in out


def test_a_second_sigterm_does_not_cut_the_archive_short(checkout):
    patch(checkout, r"(    new\.mkdir\(\))", r"\1\n    time.sleep(1.0)")
    run = slow_run(checkout, "--archive", "out.tar")
    for _ in range(6):
        run.send_signal(signal.SIGTERM)  # a process that has ended gets none
        time.sleep(0.1)
    run.communicate(timeout=60)
    assert unpacked(checkout, "out.tar") == stored(checkout)


def test_a_run_that_is_killed_leaves_the_archive_that_it_renewed_between_cells(checkout):
    patch(checkout, r"EVERY_S = [0-9.]+", "EVERY_S = 0.1")
    run = slow_run(checkout, "--archive", "out.tar")
    while not (checkout.path / "out.tar").exists() and run.poll() is None:
        time.sleep(0.02)
    run.kill()
    run.communicate()
    assert len(stored(checkout)) < 16, "it packed at its end alone"
    assert unpacked(checkout, "out.tar") <= stored(checkout) and unpacked(checkout, "out.tar")


def test_the_archive_command_packs_what_is_there_and_starts_nothing(checkout):
    checkout.suite("run", "toy", "--preset", "faults")
    attempts = len(checkout.bundles())
    done = checkout.suite("archive", "out.tar")
    assert done.returncode == 0 and "packed out.tar" in done.stdout and f"{attempts} bundles" in done.stdout
    assert len(checkout.bundles()) == attempts == len(unpacked(checkout, "out.tar"))


def test_the_archive_command_needs_a_store_and_a_name(checkout):
    absent = checkout.suite("archive", "out.tar")
    assert absent.returncode == cli.EXIT_USAGE and "SUITE_STATE" in absent.stderr and not checkout.state.exists()
    checkout.state.mkdir()
    for name in ("out.gz", "out.2.tar", "nowhere/out.tar"):
        done = checkout.suite("archive", name)
        assert done.returncode == cli.EXIT_USAGE and name in done.stderr
        assert checkout.suite("run", "toy", "--archive", name).returncode == cli.EXIT_USAGE
    with locks.hold(checkout.state / "driver.lock", what="the test"):
        assert checkout.suite("archive", "out.tar").returncode == cli.EXIT_HELD
