"""Whole runs under fault: nothing lost, nothing doubled, nothing left running.

Each test drives `python -m suite` in a checkout of its own, as a user would.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

KILLS = 5  # a small fixed sample; make soak does more
LEFT_RUNNING_S = 2.0


def processes_of(checkout) -> list[int]:
    """Living processes whose environment names this checkout."""
    out = []
    needle = f"PYTHONPATH={checkout.path}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if needle in path.read_bytes().split(b"\0") and "Z" not in (path.parent / "stat").read_text().rpartition(")")[2].split()[0]:
                out.append(int(path.parent.name))
        except OSError:
            continue
    return out


def assert_nothing_left(checkout) -> None:
    until = time.monotonic() + LEFT_RUNNING_S
    while processes_of(checkout) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(checkout) == []


def assert_whole(checkout, cells: int) -> None:
    """Every cell has exactly one OK bundle and no temp folder is left."""
    counts = Counter(b["point"] for b in checkout.bundles(status="OK"))
    assert sorted(counts.values()) == [1] * cells
    assert list(checkout.state.glob("bundles/??/*/.tmp-*")) == []


def test_a_run_measures_once_and_again_finds_everything_cached(checkout):
    first = checkout.suite("run", "toy", "--preset", "smoke", check=True)
    again = checkout.suite("run", "toy", "--preset", "smoke", check=True)
    assert "bundles only" in first.stdout and "suite ingest" in first.stdout
    assert "plan  4 TO RUN" in first.stdout and "plan  4 DONE" in again.stdout
    assert_whole(checkout, 4)


def test_failed_cells_are_reported_kept_and_tried_again(checkout):
    first = checkout.suite("run", "toy", "--preset", "faults")
    assert first.returncode == 1 and "planned fault" in first.stdout and "status 3" in first.stdout
    statuses = Counter(b["status"] for b in checkout.bundles())
    assert statuses == {"OK": 5, "FAILED": 2}  # kill-once came through at its second try
    assert first.stderr.count("trying once more") == 1  # an exit is the cell's own doing
    kept = checkout.suite("run", "toy", "--preset", "faults", "--keep-failed")
    assert kept.returncode == 1 and Counter(b["status"] for b in checkout.bundles()) == statuses
    checkout.suite("run", "toy", "--preset", "faults")
    assert Counter(b["status"] for b in checkout.bundles()) == {"OK": 5, "FAILED": 4}


@pytest.mark.parametrize("args, names", [(["run", "nothing"], "toy"), (["run", "toy", "--preset", "nothing"], "smoke"), (["run", "toy", "--executor", "nothing"], "local"),
                                         (["run", "toy", "--preset", "smoke", "--only", "nothing*"], "answer 1"), (["show", "nothing"], "label"), (["run", "toy", "--stop-after", "soon"], "9m")])
def test_wrong_usage_names_what_is_right_and_exits_2(checkout, args, names):
    done = checkout.suite(*args)
    assert done.returncode == 2 and names in done.stderr and "Traceback" not in done.stderr


def test_a_gpu_cell_on_a_cpu_machine_is_unavailable_and_leaves_no_bundle(checkout):
    done = checkout.suite("run", "toy", "--preset", "gpu", CUDA_VISIBLE_DEVICES="")
    if "1 UNAVAILABLE" not in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 0 and "on gpu" in done.stdout and len(checkout.bundles()) == 4


def test_only_takes_the_cells_named_and_their_inputs(checkout):
    done = checkout.suite("run", "toy", "--preset", "smoke", "--only", "total", check=True)
    assert "plan  4 TO RUN" in done.stdout
    other = checkout.suite("plan", "toy", "--preset", "smoke", "--only", "n=2", check=True)
    assert "1 DONE" in other.stdout


def test_rerun_measures_again_beside_the_old_answer(checkout):
    checkout.suite("run", "toy", "--preset", "smoke", "--only", "answer 1", check=True)
    checkout.suite("run", "toy", "--preset", "smoke", "--only", "answer 1", "--rerun", check=True)
    assert len(checkout.bundles(status="OK")) == 2


def test_order_shuffled_and_one_process_a_cell_give_equal_digests(checkout):
    digests = []
    for variant in ("plain", "shuffled", "fresh"):
        state = checkout.path / f".state-{variant}"
        checkout.suite("run", "toy", "--preset", str(variants_file(checkout, variant)), check=True, SUITE_STATE=str(state))
        found = [json.loads(p.read_text()) for p in state.glob("bundles/??/*/*/bundle.json")]
        digests.append({b["point"]: (b["facts"], b["metrics"], {n: f["sha256"] for n, f in b["files"].items() if n == "arrays.npz"}) for b in found})
    assert len(digests[0]) == 6 and digests[0] == digests[1] == digests[2]


def variants_file(checkout, variant: str) -> str:
    """A user's own preset file: the same cells in another order, or each in a fresh process."""
    path = checkout.path / "my_presets.py"
    path.write_text("from studies.toy.study import Config\ndef plain(): return Config(answers=5)\ndef shuffled(): return Config(answers=5, order=7)\ndef fresh(): return Config(answers=5, fresh=True)\n")
    return f"{path}:{variant}"


def test_two_drivers_on_one_store_take_turns_or_name_the_holder(checkout):
    first = checkout.start("run", "toy", "--preset", "slow")
    wait_for(lambda: (checkout.state / "status.json").exists())
    refused = checkout.suite("run", "toy", "--preset", "smoke")
    status = checkout.suite("status")
    waited = checkout.suite("run", "toy", "--preset", "smoke", "--wait", "60")
    first.communicate(timeout=60)
    assert refused.returncode == 3 and f"process {first.pid}" in refused.stderr
    assert f"process {first.pid}" in status.stdout
    assert (first.returncode, waited.returncode) == (0, 0)
    assert_whole(checkout, 16)


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


def kill_driver_episodes(checkout, kills: int, seed: int) -> None:
    """SIGKILL the driver at random moments until the run is through, then check that nothing is missing or doubled."""
    rng = random.Random(seed)
    for _ in range(kills):
        run = checkout.start("run", "toy", "--preset", "slow")
        time.sleep(rng.uniform(0.3, 2.5))
        run.kill()
        run.communicate()
        assert_nothing_left(checkout)
    checkout.suite("run", "toy", "--preset", "slow", check=True)
    assert_whole(checkout, 16)


def kill_worker_episodes(checkout, kills: int, seed: int) -> None:
    """SIGKILL the worker at random moments: its cell is tried once more; whatever failed comes back at the next run."""
    rng, hits = random.Random(seed), 0
    run = checkout.start("run", "toy", "--preset", "slow")
    for _ in range(kills):
        time.sleep(rng.uniform(0.2, 0.8))
        for pid in processes_of(checkout):
            if pid != run.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                    hits += 1
                except ProcessLookupError:
                    continue
    run.communicate(timeout=120)
    assert hits > 0
    assert_nothing_left(checkout)
    checkout.suite("run", "toy", "--preset", "slow", check=True)
    assert_whole(checkout, 16)


def test_killing_the_driver_loses_and_doubles_nothing(checkout):
    kill_driver_episodes(checkout, KILLS, seed=1)


def test_killing_workers_loses_and_doubles_nothing(checkout):
    kill_worker_episodes(checkout, KILLS, seed=2)


def test_an_interrupt_ends_the_workers_and_keeps_what_is_done(checkout):
    run = checkout.start("run", "toy", "--preset", "slow")
    wait_for(lambda: len(checkout.bundles()) >= 3)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=20)
    assert run.returncode == 130 and "run again" in output and "Traceback" not in output
    assert_nothing_left(checkout)


def test_stop_after_pauses_a_long_cell_exits_75_and_resumes_to_the_same_digest(checkout):
    unbroken = checkout.suite("run", "toy", "--preset", "long", check=True, SUITE_STATE=str(checkout.path / ".other"))
    assert unbroken.returncode == 0
    codes = []
    while not codes or codes[-1] == 75:
        codes.append(checkout.suite("run", "toy", "--preset", "long", "--stop-after", "1s").returncode)
        assert len(codes) < 12
    assert codes[0] == 75 and codes[-1] == 0
    (whole,) = checkout.bundles(status="OK")
    assert whole["duration_s"] > 40 * 0.05 > checkout.bundles(status="PAUSED")[0]["duration_s"]  # the sum of its pieces
    digest = [json.loads(p.read_text())["facts"]["digest"] for p in (checkout.path / ".other").glob("bundles/??/*/*/bundle.json")]
    assert [b["facts"]["digest"] for b in checkout.bundles(status="OK")] == digest


def test_archives_carry_bundles_and_paused_state_to_another_store(checkout):
    first = checkout.suite("run", "toy", "--preset", "long", "--stop-after", "1s", "--archive", "a.tar")
    assert first.returncode == 75 and (checkout.path / "a.tar").stat().st_size <= 15 << 20
    (paused,) = checkout.bundles(status="PAUSED")
    there = checkout.path / ".there"
    second = checkout.suite("run", "toy", "--preset", "long", "--resume-from", "a.tar", SUITE_STATE=str(there))
    (whole,) = [b for p in there.glob("bundles/??/*/*/bundle.json") if (b := json.loads(p.read_text()))["status"] == "OK"]
    assert second.returncode == 0 and 0 < whole["duration_s"] - paused["duration_s"] < 40 * 0.05  # it went on where the first piece stopped


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self/ns/mnt").exists(), reason="a read-only folder cannot be made")
def test_a_store_that_cannot_be_written_is_one_clear_line(checkout):
    blocked = checkout.path / "file"
    blocked.write_text("")
    done = checkout.suite("run", "toy", "--preset", "smoke", SUITE_STATE=str(blocked / "state"))
    assert done.returncode == 4 and "kept" in done.stderr and "Traceback" not in done.stderr


def test_a_corrupt_bundle_is_skipped_with_its_path_and_the_rest_is_used(checkout):
    checkout.suite("run", "toy", "--preset", "smoke", check=True)
    victim = sorted(checkout.state.glob("bundles/??/*/*/bundle.json"))[0]
    victim.write_text(victim.read_text()[:100])
    done = checkout.suite("run", "toy", "--preset", "smoke")
    assert done.returncode == 1 and str(victim.parent) in done.stderr and "JSON" in done.stderr
    assert len(checkout.bundles_ok_points()) == 4


def test_show_tells_all_of_a_cell_and_how_to_repeat_it(checkout):
    checkout.suite("run", "toy", "--preset", "faults")
    shown = checkout.suite("show", "fault raise", check=True).stdout
    assert "planned fault" in shown and "about to: raise" in shown


@pytest.mark.parametrize("label", ["total", "fault raise", "x=0.250000"])
def test_the_command_that_show_prints_repeats_the_cell(checkout, label):
    study = checkout.path / "studies" / "toy" / "study.py"
    study.write_text(study.read_text().replace('label=f"answer {n}", needs=needs)', 'label="x=0.250000" if n == 2 else f"answer {n}", needs=needs)'))
    checkout.suite("run", "toy", "--preset", "faults")
    before = len(checkout.bundles())
    command = checkout.suite("show", label, check=True).stdout.strip().splitlines()[-1]
    assert "--preset" in command
    checkout.suite(*shlex.split(command)[3:])
    again = checkout.bundles()[before:]
    assert label in {b["cell"]["label"] for b in again}


def test_clean_deletes_failed_attempts_and_keeps_answers(checkout):
    checkout.suite("run", "toy", "--preset", "faults")
    done = checkout.suite("clean", "--older-than", "0s", check=True)
    assert "deleted 2 attempts" in done.stdout
    assert Counter(b["status"] for b in checkout.bundles()) == {"OK": 5}


def test_a_search_runs_its_budget_and_a_second_run_adds_nothing(checkout):
    checkout.suite("run", "toy", "--preset", "search", check=True)
    again = checkout.suite("run", "toy", "--preset", "search", check=True)
    assert len(checkout.bundles(status="OK")) == 6 and "done  6 DONE" in again.stdout


def test_a_search_whose_journal_is_lost_takes_its_answers_from_bundles(checkout):
    checkout.suite("run", "toy", "--preset", "search", check=True)
    shutil.rmtree(checkout.state / "searches")
    again = checkout.suite("run", "toy", "--preset", "search", check=True)
    assert len(checkout.bundles(status="OK")) == 6 and "done  6 DONE" in again.stdout


def test_a_killed_search_goes_on_and_asks_nothing_twice(checkout):
    for wait_s in (0.9, 1.2, 1.5):
        run = checkout.start("run", "toy", "--preset", "search")
        time.sleep(wait_s)
        run.kill()
        run.communicate()
    checkout.suite("run", "toy", "--preset", "search", check=True)
    assert_whole(checkout, 6)
