"""What every executor promises, over every executor: a cell costs only itself, and is reported exactly once."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from suite import identity
from suite.bundle import load_arrays, read_bundle
from suite.cell import Cell, Needs
from suite.executors._environment import worker_environment
from suite.executors.local import LocalExecutor
from suite.job import Job
from suite.locks import Held
from suite.machine import Gpu, Machine
from suite.worker import read_log

EXECUTORS = {"local": LocalExecutor}
WAIT_S = 90.0  # for one cell on a loaded machine
GONE_S = 2.0  # a killed process is gone when the kernel next runs it


@pytest.fixture(params=sorted(EXECUTORS))
def executor(request, tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    with EXECUTORS[request.param](jobs=1) as made:
        yield made


def job(tmp_path: Path, function: str, needs: Needs = Needs(), stop_in_s: float | None = None, replicate: int = 0, **params) -> Job:
    cell = Cell(study="toy", measure=f"tests.toy.cells:{function}", params=params, needs=needs, replicate=replicate)
    description = {"study": "toy", "label": cell.label, "measure": cell.measure, "params": params, "seed": 0, "replicate": replicate, "needs": needs.to_json(), "inputs": {}, "assets": {}}
    return Job(cell=description, point=cell.point, key=cell.point, code="0" * 64, modules=tuple(identity.reached_modules(cell.module)), store=str(tmp_path / "store"),
               stop_at=None if stop_in_s is None else time.time() + stop_in_s)


def finish(executor, *jobs: Job) -> list:
    """Start all as the executor lets us, return what it reported."""
    todo, done = list(jobs), []
    until = time.monotonic() + WAIT_S
    while len(done) < len(jobs):
        assert time.monotonic() < until, f"waited for {len(jobs)} cells, got {done}"
        if todo and executor.can_start(todo[0].needs):
            executor.start(todo.pop(0))
            continue
        done += executor.wait(1.0)
    assert executor.wait(0.0) == []
    return done


def test_a_cell_leaves_a_bundle_with_its_arrays(executor, tmp_path):
    (done,) = finish(executor, job(tmp_path, "answer", n=4))
    bundle = read_bundle(Path(done.path))
    assert (done.status, bundle.metrics["square"], list(load_arrays(bundle.path)["numbers"])) == ("OK", 16.0, [0, 1, 2, 3])


@pytest.mark.parametrize("how, status, words", [("raise", "FAILED", ""), ("exit", "DIED", "status 3"), ("kill", "DIED", "SIGKILL"), ("segfault", "DIED", "SIGSEGV")])
def test_a_cell_that_dies_costs_only_itself(executor, tmp_path, how, status, words):
    bad, good = finish(executor, job(tmp_path, "fault", how=how), job(tmp_path, "answer", n=2))
    assert (bad.status, good.status) == (status, "OK")
    assert words in bad.message


def test_a_raised_error_is_in_the_bundle_with_the_log(executor, tmp_path):
    (done,) = finish(executor, job(tmp_path, "fault", how="raise"))
    bundle = read_bundle(Path(done.path))
    assert "planned fault" in bundle.data["error"] and "about to: raise" in (bundle.path / "log.txt").read_text()


def test_a_hanging_cell_is_ended_at_its_limit(executor, tmp_path):
    bad, good = finish(executor, job(tmp_path, "fault", Needs(time_limit_s=2.0), how="hang"), job(tmp_path, "answer", n=2))
    assert (bad.status, good.status) == ("TIMED OUT", "OK") and "2 s" in bad.message


def test_children_of_a_killed_worker_are_gone(executor, tmp_path):
    (done,) = finish(executor, job(tmp_path, "fault", Needs(time_limit_s=3.0), how="child"))
    assert done.status == "TIMED OUT"
    until = time.monotonic() + GONE_S
    while alive_children("sleep", "3600") and time.monotonic() < until:
        time.sleep(0.02)
    assert alive_children("sleep", "3600") == []


def alive_children(*words: str) -> list[str]:
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if [w.encode() for w in words[:2]] == command[:2]:
            out.append(path.parent.name)
    return out


def test_changed_global_state_replaces_the_worker(executor, tmp_path):
    left, after = finish(executor, job(tmp_path, "fault", how="leave state"), job(tmp_path, "answer", n=2))
    assert "TOY_LEFT_BEHIND" in left.message
    processes = [json.loads((Path(d.path) / "bundle.json").read_text())["environment"]["process"] for d in (left, after)]
    assert processes[0] != processes[1]


def test_a_warm_worker_serves_many_cells_and_a_fresh_one_only_where_asked(executor, tmp_path):
    done = finish(executor, job(tmp_path, "answer", n=1), job(tmp_path, "answer", n=2), job(tmp_path, "answer", Needs(fresh_process=True), n=3),
                  job(tmp_path, "answer", Needs(exclusive=True), n=4), job(tmp_path, "answer", Needs(exclusive=True), replicate=1, n=4))
    a, b, fresh, same, replicate = (json.loads((Path(d.path) / "bundle.json").read_text())["environment"]["process"] for d in done)
    assert a == b != fresh == same != replicate


def test_code_outside_the_digest_fails_the_cell(executor, tmp_path):
    (done,) = finish(executor, job(tmp_path, "fault", how="foreign import"))
    assert done.status == "FAILED" and "suite.plan" in read_bundle(Path(done.path)).data["error"]


def test_what_an_earlier_cell_loaded_is_no_licence_for_the_next(executor, tmp_path):
    needed = identity.reached_modules("suite.plan")
    first = job(tmp_path, "fault", how="foreign import")
    allowed = replace(first, modules=(*first.modules, *needed))
    second = job(tmp_path, "fault", replicate=1, how="foreign import")
    done = finish(executor, allowed, replace(second, key="2" * 64), replace(allowed, key="3" * 64))
    assert [d.status for d in done] == ["OK", "FAILED", "OK"]
    bundles = [read_bundle(Path(d.path)) for d in done]
    assert "suite.plan" in bundles[1].data["error"] and len({b.data["environment"]["process"] for b in bundles}) == 1


def test_a_declared_package_costs_the_next_cell_nothing(executor, tmp_path):
    done = finish(executor, job(tmp_path, "fault", Needs(packages=("optuna",)), how="optuna"), job(tmp_path, "answer", n=2), job(tmp_path, "fault", how="optuna"))
    assert [d.status for d in done] == ["OK", "OK", "FAILED"] and "package optuna" in done[0].message


def test_ranks_load_no_code_outside_the_digest_either_and_a_result_of_theirs_that_is_no_json_is_one_line(executor, tmp_path):
    foreign, odd = finish(executor, job(tmp_path, "ranks", Needs(ranks=2), how="foreign import"), job(tmp_path, "ranks", Needs(ranks=2), how="odd record"))
    errors = [read_bundle(Path(d.path)).data["error"] for d in (foreign, odd)]
    assert [foreign.status, odd.status] == ["FAILED", "FAILED"]
    assert "suite.plan" in errors[0] and errors[1].startswith("a result holds") and "\n" not in errors[1]


def test_what_ranks_of_a_killed_attempt_left_is_not_taken_for_this_ones(executor, tmp_path):
    asked = job(tmp_path, "ranks", Needs(ranks=2), how="sum")
    asked.state_dir.mkdir(parents=True)
    np.savez(asked.state_dir / "rank0.npz", old=np.ones(3))
    (asked.state_dir / "error.1.txt").write_text("an old error")
    (done,) = finish(executor, asked)
    bundle = read_bundle(Path(done.path))
    assert bundle.metrics == {"sum": 3.0} and "arrays.npz" not in bundle.data["files"] and list(asked.state_dir.glob("rank0*")) == []


def test_a_cell_that_answers_at_the_last_moment_is_reported_once_with_its_answer(tmp_path, monkeypatch):
    """The reply arrives after the executor looked for one, and before it looks at the clock."""
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    with LocalExecutor() as executor:
        executor.start(job(tmp_path, "answer", n=3))
        (slot,) = executor._slots
        assert select.select([slot.reply], [], [], WAIT_S)[0]  # it has answered
        done = executor._time_out(slot)
        assert (done.status, read_bundle(Path(done.path)).metrics["square"], executor.wait(0.0)) == ("OK", 9.0, [])
        (after,) = finish(executor, job(tmp_path, "answer", n=2))
        assert after.status == "OK"


def test_a_long_cell_pauses_and_goes_on_to_the_digest_of_an_unbroken_run(executor, tmp_path):
    (unbroken,) = finish(executor, job(tmp_path / "a", "long", steps=30, step_s=0.02))
    pieces = []
    while not pieces or pieces[-1].status == "PAUSED":
        pieces += finish(executor, job(tmp_path / "b", "long", stop_in_s=0.25, steps=30, step_s=0.02))
        assert len(pieces) < 20
    last = read_bundle(Path(pieces[-1].path))
    assert len(pieces) > 1 and last.facts["digest"] == read_bundle(Path(unbroken.path)).facts["digest"]
    assert last.data["duration_s"] > 30 * 0.02


def test_ranks_run_under_torchrun_and_a_dead_one_ends_the_group(executor, tmp_path):
    good, bad, after = finish(executor, job(tmp_path, "ranks", Needs(ranks=2), how="sum"), job(tmp_path, "ranks", Needs(ranks=2), how="dead rank"), job(tmp_path, "answer", n=1))
    assert (good.status, bad.status, after.status) == ("OK", "FAILED", "OK")
    assert read_bundle(Path(good.path)).metrics["sum"] == 3.0


def test_a_hanging_rank_costs_that_cell(executor, tmp_path):
    bad, after = finish(executor, job(tmp_path, "ranks", Needs(ranks=2, time_limit_s=12.0), how="hanging rank"), job(tmp_path, "answer", n=1))
    assert (bad.status, after.status) == ("TIMED OUT", "OK")
    until = time.monotonic() + GONE_S
    while ranks_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert ranks_of(tmp_path) == []


def ranks_of(tmp_path: Path) -> list[str]:
    """Living rank processes of this test's jobs: their command names the job file."""
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"suite.rank" in command and str(tmp_path).encode() in command:
            out.append(path.parent.name)
    return out


def test_a_second_driver_is_told_who_holds_the_device(executor, tmp_path):
    with pytest.raises(Held, match=f"process {os.getpid()}"):
        type(executor)(jobs=1)


def test_an_exclusive_cell_runs_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    with LocalExecutor(jobs=2) as executor:
        executor.start(job(tmp_path, "slow", seconds=0.5, n=1))
        assert executor.can_start(Needs().to_json())
        assert not executor.can_start(Needs(exclusive=True).to_json())
        while not executor.wait(1.0):
            pass
        executor.start(job(tmp_path, "slow", Needs(exclusive=True), seconds=0.5, n=2))
        assert not executor.can_start(Needs().to_json())
        while not executor.wait(1.0):
            pass


def test_a_cell_of_two_gpus_takes_both_and_their_locks(tmp_path, monkeypatch):
    """Two GPU slots on any machine: the cell only reads which devices its worker was given."""
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    with LocalExecutor(gpus=(0, 3)) as executor:
        executor.start(job(tmp_path, "visible_devices", Needs(device="cuda", gpus=2)))
        assert not executor.can_start(Needs(device="cuda").to_json()) and executor.can_start(Needs().to_json())
        done = []
        while not done:
            done = executor.wait(1.0)
        assert read_bundle(Path(done[0].path)).facts["devices"] == "0,3"
        (one,) = finish(executor, job(tmp_path, "visible_devices", Needs(device="cuda")))
        assert read_bundle(Path(one.path)).facts["devices"] == "0"
        with pytest.raises(Held, match="device cuda3"):
            LocalExecutor(gpus=(3,)) if not (tmp_path / "locks" / "cpu.lock").unlink() else None


UNSTORABLE = {
    "nan in a record": "strict JSON", "a set in a record": "strict JSON", "mixed keys": "strict JSON", "deep record": "strict JSON", "record named bundle": "named 'bundle'",
    "many files": "at most 64 files", "one file too many": "64 files", "array named file": "named 'file'", "fact is a number": "fact is not a string",
    "metric is text": "a metric is a number", "metric is huge": "a metric is a number", "metric is an array": "a metric is a number", "header over its limit": "over 4194304 bytes",
    "long record name": "not plain",
}  # fmt: skip


def test_workers_do_not_inherit_what_steers_numbers_and_keep_the_users_python_path(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    steering = {"TRITON_INTERPRET": "1", "NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUDA_LAUNCH_BLOCKING": "1",
                "PYTORCH_TUNABLEOP_ENABLED": "1"}  # fmt: skip
    kept = {"TRITON_CACHE_DIR": "/tmp/x", "SUITE_DATA": "/tmp/data"}
    for name, value in {**steering, **kept, "MLFLOW_TRACKING_URI": "http://me:pw@host", "PYTHONPATH": f"/opt/one:{identity.ROOT}:/opt/two"}.items():
        monkeypatch.setenv(name, value)
    with LocalExecutor() as executor:
        assert set(steering) <= set(executor.left_out) and not {*kept, "MLFLOW_TRACKING_URI", "PYTHONPATH"} & set(executor.left_out)
        (done,) = finish(executor, job(tmp_path, "inherited", names=[*steering, *kept, "MLFLOW_TRACKING_URI", "PYTHONPATH"]))
    facts = read_bundle(Path(done.path)).facts
    assert facts == {**kept, "PYTHONPATH": f"{identity.ROOT}:/opt/one:/opt/two"}


def test_a_log_names_files_of_the_checkout_without_saying_where_it_lies(tmp_path):
    (tmp_path / "log").write_text(f"{identity.ROOT}/suite/cell.py:1: FutureWarning\n")
    assert read_log(tmp_path / "log") == "suite/cell.py:1: FutureWarning\n"


def test_workers_are_told_where_triton_s_cache_lies_unless_the_user_says():
    """Else torch's compiler moves it in the processes that use it, away from what `suite warm` compiled."""
    assert worker_environment({}, threads=1)[0]["TRITON_CACHE_DIR"].endswith("/.triton/cache")
    assert worker_environment({"TRITON_CACHE_DIR": "/tmp/x"}, threads=1)[0]["TRITON_CACHE_DIR"] == "/tmp/x"
    assert "TRITON_CACHE_DIR" not in worker_environment({"TRITON_HOME": "/tmp/x"}, threads=1)[0]


def test_workers_use_the_cores_that_the_driver_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        with LocalExecutor() as executor:
            (done,) = finish(executor, job(tmp_path, "inherited", names=["OMP_NUM_THREADS"]))
    finally:
        os.sched_setaffinity(0, mine)
    assert read_bundle(Path(done.path)).facts == {"OMP_NUM_THREADS": "1"}


def test_on_a_mixed_host_a_cell_gets_gpus_of_the_model_that_fits_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_LOCK_DIR", str(tmp_path / "locks"))
    gpus = tuple(Gpu(index=i, name=name, memory_gib=gib) for i, (name, gib) in enumerate([("NVIDIA A100", 40.0), ("NVIDIA H200", 139.0), ("NVIDIA H200", 139.0)]))
    mixed = Machine(cpu_model="a cpu", cores=2, memory_gib=8.0, gpus=gpus)
    asked = {"0": Needs(device="cuda"), "1": Needs(device="cuda", gpu_model="H200"), "1,2": Needs(device="cuda", gpus=2)}
    with LocalExecutor(gpus=(0, 1, 2), machine=mixed) as executor:
        for devices, needs in asked.items():
            (done,) = finish(executor, job(tmp_path, "visible_devices", needs))
            assert read_bundle(Path(done.path)).facts["devices"] == devices
        assert not executor.can_start(Needs(device="cuda", gpu_model="B200").to_json()) and not executor.can_start(Needs(device="cuda", gpus=3).to_json())


def test_a_result_that_no_bundle_can_hold_is_a_failed_bundle_with_one_line_and_costs_no_worker(executor, tmp_path):
    done = finish(executor, *(job(tmp_path, "unstorable", how=how) for how in ["fine", *UNSTORABLE]), job(tmp_path, "answer", n=2))
    bundles = [read_bundle(Path(d.path)) for d in done]
    assert [b.status for b in bundles] == ["OK", *["FAILED"] * len(UNSTORABLE), "OK"] == [d.status for d in done]
    for bundle, (how, words) in zip(bundles[1:-1], UNSTORABLE.items(), strict=True):
        assert words in bundle.data["error"] and "\n" not in bundle.data["error"] and bundle.data["files"].keys() <= {"log.txt"}, how
    assert len({b.data["environment"]["process"] for b in bundles}) == 1


def test_an_error_of_many_megabytes_is_cut_and_keeps_its_end(executor, tmp_path):
    (done,) = finish(executor, job(tmp_path, "shout", chars=6 << 20))
    error = read_bundle(Path(done.path)).data["error"]
    assert done.status == "FAILED" and len(error) < 1 << 20 and error.strip().endswith("the end")


def test_a_full_disk_is_reported_and_leaves_no_half_bundle(executor, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "bundles").write_text("a file where the folder should be")
    (done,) = finish(executor, job(tmp_path, "answer", n=1))
    assert done.status == "NOT STORED" and "bundles" in done.message


def test_workers_import_neither_trackers_nor_plotters():
    code = "import sys, suite.worker, suite.rank, suite.timing; print([m for m in ('mlflow','optuna','matplotlib','pandas','ray','scipy','rich') if m in sys.modules])"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=identity.ROOT).stdout.strip() == "[]"
