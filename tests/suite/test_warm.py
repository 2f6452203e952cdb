"""`suite warm` fills caches in parallel, and nothing else: no bundle, no cell that depends on it, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from suite import cli, locks
from suite.commands.warm import Tally, run_tasks
from suite.executors._environment import worker_environment
from suite.study import WarmTask

FAULTS = {"raise": "RuntimeError: planned fault", "exit": "ended with status 3", "kill": "killed by SIGKILL", "absent": "AttributeError"}
TASKS = '''
import os, signal, time
from pathlib import Path

def note(device, *, out, n):
    time.sleep(0.3)
    with open(Path(out) / "ran", "a") as f:
        f.write(f"{n} {os.getpid()} {device}\\n")

def fault(device, *, how):
    if how == "raise":
        raise RuntimeError("planned fault\\nand more")
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

def hang(device):
    time.sleep(3600)

def compiled(device):
    """A kernel as a cell's own launch compiles it, and as code of another architecture."""
    import torch, triton
    from kernels.exact.audit.specimen import captured, compile_specimen, source_class, target_of
    from kernels.exact.norm import rmsnorm
    (s,) = captured("rmsnorm", lambda: rmsnorm(torch.ones(4, 64), torch.ones(64)), family="elementwise")
    place = target_of("sm_90")
    options, signature, constants, attrs, _ = s.packed(place)
    triton.compile(source_class(s.kernel)(s.kernel, signature, constants, attrs), target=place, options=options.__dict__)
    compile_specimen(s, "sm_80")
'''
WORKER = '''
from triton import knobs
from studies.toy.warm_tasks import compiled
found = []
knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
compiled("cpu")
print(found)
'''


def task(function: str, device: str = "cpu", **params) -> str:
    return f"WarmTask(label={' '.join([function, *map(str, params.values())][:2])!r}, run='studies.toy.warm_tasks:{function}', params={params!r}, device={device!r})"


@pytest.fixture
def warm(checkout, tmp_path):
    """warm(tasks, *arguments) -> the command's end, in a checkout whose toy lists these tasks."""
    (checkout.path / "studies/toy/warm_tasks.py").write_text(TASKS)
    study = checkout.path / "studies/toy/study.py"
    text = study.read_text().replace("from suite.study import Metric, Study", "from suite.study import Metric, Study, WarmTask")

    def run(tasks: list[str], *arguments: str, start: bool = False, **env: str):
        study.write_text(text.replace("    searches=searches,\n", f"    searches=searches,\n    warm=lambda config: [{', '.join(tasks)}],\n"))
        call = checkout.start if start else checkout.suite
        return call("warm", "toy", "--preset", "smoke", *arguments, TRITON_CACHE_DIR=str(tmp_path / "triton"), **env)

    return run


def ran(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "ran").read_text().splitlines()]


def test_every_task_runs_once_in_several_processes_and_nothing_is_stored(warm, checkout, tmp_path):
    done = warm([task("note", n=n, out=str(tmp_path)) for n in range(6)], "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(int(n) for n, _, _ in ran(tmp_path)) == list(range(6)) and len({pid for _, pid, _ in ran(tmp_path)}) == 2
    assert "0 kernels compiled" in done.stdout and "by 6 tasks (0 failed) in 2 processes" in done.stdout
    assert checkout.bundles() == [] and not (checkout.state / "bundles").exists()


def test_only_runs_the_tasks_that_the_globs_name_and_refuses_one_that_names_none(warm, tmp_path):
    tasks = [task("note", n=n, out=str(tmp_path)) for n in range(4)]
    done = warm(tasks, "--jobs", "1", "--only", "note 1", "note [23]")
    assert done.returncode == 0 and [n for n, _, _ in ran(tmp_path)] == ["1", "2", "3"], done.stderr
    refused = warm(tasks, "--only", "note 1", "nothing*")
    assert refused.returncode == cli.EXIT_USAGE and "--only must name at least one task, got 'nothing*'" in refused.stderr and len(ran(tmp_path)) == 3


def test_what_goes_wrong_in_a_task_is_one_line_and_stops_no_other(warm, tmp_path):
    bad = [task("fault", how=how) if how != "absent" else task("absent") for how in FAULTS]
    done = warm([*bad, task("note", n=1, out=str(tmp_path))], "--jobs", "1")
    assert done.returncode == cli.EXIT_FAILED and "5 tasks (4 failed)" in done.stdout and len(ran(tmp_path)) == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 4 and all(text in line for text, line in zip(FAULTS.values(), lines, strict=True)), done.stderr


def test_without_a_gpu_its_tasks_are_left_out_with_one_clear_line(warm, checkout, tmp_path):
    if "1 UNAVAILABLE" not in checkout.suite("plan", "toy", "--preset", "gpu", CUDA_VISIBLE_DEVICES="").stdout:
        pytest.skip("this machine has a GPU")
    done = warm([task("note", "cuda", n=1, out=str(tmp_path))])
    assert done.returncode == 0 and done.stderr == "" and not (tmp_path / "ran").exists()
    assert [line for line in done.stdout.splitlines() if "left out" in line] == ["1 tasks are left out, and nothing is compiled ahead for a GPU: it needs a CUDA device, and this machine has none"]


def test_a_study_without_a_list_has_nothing_to_warm(checkout):
    done = checkout.suite("warm", "toy", "--preset", "smoke")
    assert done.returncode == 0 and "0 tasks" in done.stdout


def test_kernels_compiled_ahead_are_found_by_a_worker(warm, checkout, tmp_path):
    """Cache keys hold the settings that steer the compiler: a warm process has a worker's, whatever the user's are."""
    first = warm([task("compiled")], TRITON_DISABLE_LINE_INFO="0")
    assert "2 kernels compiled" in first.stdout and ", 0 found" in first.stdout, first.stdout + first.stderr
    again = warm([task("compiled")])
    assert "0 kernels compiled" in again.stdout and ", 2 found" in again.stdout
    env, _ = worker_environment({**checkout.env, "TRITON_CACHE_DIR": str(tmp_path / "triton")}, threads=1)
    env["PYTHONPATH"] = str(checkout.path)
    done = subprocess.run([sys.executable, "-c", WORKER], cwd=checkout.path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[True, True]", done.stderr


def test_a_task_that_hangs_costs_itself():
    said: list[str] = []
    env, _ = worker_environment(os.environ, threads=1)
    tasks = [WarmTask(label="hang", run="tests.suite.test_warm:hang", device="cpu"), WarmTask(label="fine", run="os:fspath", device="cpu")]
    tally = run_tasks(tasks, jobs=1, environment=env, say=said.append, limit_s=6.0)
    assert tally.failed == 1 and said == ["suite: hang: it ran past its limit of 6 s"]


def hang(device: str) -> None:
    time.sleep(3600)


def test_it_waits_for_the_devices_or_names_the_holder(warm, tmp_path):
    with locks.hold(tmp_path / "locks" / "cpu.lock", what="the test"):
        done = warm([task("note", n=1, out=str(tmp_path))])
    assert done.returncode == cli.EXIT_HELD and f"process {os.getpid()}" in done.stderr and not (tmp_path / "ran").exists()


def test_an_interrupt_leaves_no_process(warm, checkout):
    from tests.suite.test_faults import assert_nothing_left, processes_of, wait_for

    run = warm([task("hang")], start=True)
    wait_for(lambda: len(processes_of(checkout)) >= 3)  # the command, the process and its reaper
    run.send_signal(signal.SIGTERM)
    run.communicate()
    assert run.returncode == cli.EXIT_INTERRUPTED
    assert_nothing_left(checkout)


def test_a_kernel_that_two_processes_compiled_is_counted_once():
    tally = Tally()
    for n, reply in enumerate(({"compiled": ["a", "b"], "found": [], "error": ""}, {"compiled": ["b"], "found": ["a", "c"], "error": "x"})):
        tally.add(WarmTask(label=f"t{n}", run="a:b"), reply, float(n))
    assert tally.summary(2, 2).startswith("2 kernels compiled (1 more than once), 1 found in the cache, by 2 tasks (1 failed)")


@pytest.mark.parametrize("fields", [{"run": "no function"}, {"run": "a:b", "device": "tpu"}, {"run": "a:b.c"}])
def test_a_task_names_a_function_and_a_device(fields):
    with pytest.raises(ValueError, match="module:function"):
        WarmTask(label="x", **fields)
