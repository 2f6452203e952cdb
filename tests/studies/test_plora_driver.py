"""A search over a pack: what it asks, tells, prunes and refills; and that neither a kill nor a fault at any moment changes what it finds."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import optuna
import pytest

from studies.plora.adapter import PackShape, SlotShape
from studies.plora.search import driver, saved
from studies.plora.search.driver import Strategy, drive, search_of
from studies.plora.search.pruner import NO_PRUNING
from studies.plora.search.recorded import RecordedPack
from studies.plora.search.space import Choice, Levels, Space
from suite.identity import ROOT
from suite.measure import Pause
from suite.search import SearchRun
from tests.studies.plora_grid import BUDGET, PRUNE, SPACE, TIMES, adapter_of, curve, final_score, grid, pack, searched

KILLS = 3
OP_FINISH = 6  # optuna's JournalOperation.SET_TRIAL_STATE_VALUES


@pytest.fixture(autouse=True)
def no_storage_from_outside(monkeypatch):
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)


class Watched(RecordedPack):
    """Remembers who was in which slot when."""

    def __init__(self, *args):
        super().__init__(*args)
        self.history = []

    def admit(self, slot, adapter):
        super().admit(slot, adapter)
        self.history.append(("admit", slot, adapter))

    def release(self, slot):
        self.history.append(("release", slot, self._slots[slot][0]))
        return super().release(slot)

    def advance(self, micro_steps):
        self.history.append(("advance", len(self._slots), None))
        return super().advance(micro_steps)


# ---------------------------------------------------------------- what a search does


def test_a_sequential_search_costs_the_sum_of_its_trainings(tmp_path):
    found = searched(tmp_path, slots=1, trials=12, sampler="random", prune=NO_PRUNING)
    trained = [t for t in found.trials if t.twin_of is None]
    micro_steps = next(n for n in range(10_000) if int(n * 21.5) >= BUDGET)
    assert found.seconds == pytest.approx(len(trained) * (micro_steps * 0.004 + 0.05), rel=1e-9)
    assert [t.state for t in found.trials] == ["COMPLETE"] * 12 and all(t.score == final_score(t.adapter) * (curve(t.adapter).scores[-1] / final_score(t.adapter)) for t in trained)
    assert found.best.score == max(t.score for t in found.trials) == found.progress[-1][1]
    assert [s for s, _ in found.progress] == sorted(s for s, _ in found.progress) and found.progress[-1][0] <= found.seconds


def test_losers_leave_and_their_slots_are_refilled_before_the_next_step(tmp_path):
    watched = pack(8, Watched)
    with SearchRun(search_of(SPACE, name="toy", sampler="tpe", sampler_seed=3, trials=24, slots=8), tmp_path) as run:
        found = drive(run, watched, adapter_of, Strategy(prune=PRUNE), tmp_path)
    live = [n for what, n, _ in watched.history if what == "advance"]
    last_ask = max(i for i, (what, _, _) in enumerate(watched.history) if what == "admit")
    full = [n for i, (what, n, _) in enumerate(watched.history) if what == "advance" and i < last_ask]
    assert full == [8] * len(full) and live[-1] < 8  # never a free slot while there was something to ask
    pruned = [t for t in found.trials if t.state == "PRUNED" and t.twin_of is None]
    assert pruned and len(found.trials) == 24 and Counter(t.state for t in found.trials).keys() == {"PRUNED", "COMPLETE"}
    assert all(t.score == pytest.approx(list(t.reports.values())[-1]) and max(t.reports) < BUDGET for t in pruned)
    kept = min(t.score for t in found.trials if t.state == "COMPLETE")
    assert all(len(t.reports) == 3 for t in found.trials if t.state == "COMPLETE") and kept > min(final_score(t.adapter) for t in pruned)


def test_without_refill_a_pack_is_finished_before_the_next_one_starts(tmp_path):
    watched = pack(8, Watched)
    with SearchRun(search_of(SPACE, name="toy", sampler="tpe", sampler_seed=3, trials=20, slots=8), tmp_path) as run:
        drive(run, watched, adapter_of, Strategy(prune=PRUNE, refill=False), tmp_path)
    taken, blocks = 0, []
    for what, _, _ in watched.history:
        if what == "admit":
            if not blocks or blocks[-1][1]:
                assert taken == 0
                blocks.append([0, False])
            blocks[-1][0] += 1
        elif what == "advance":
            blocks[-1][1] = True
        taken += {"admit": 1, "release": -1}.get(what, 0)
    assert [n for n, _ in blocks][:2] == [8, 8] and sum(n for n, _ in blocks) <= 20


def test_packing_and_halving_each_save_device_seconds_at_like_quality(tmp_path):
    """Made-up times: eight adapters step in twice the time of one. 24 proposals of one random sequence, so quality may differ by pruning alone."""
    arms = {"sequential": (1, NO_PRUNING, True), "packed": (8, NO_PRUNING, False), "pruned": (8, PRUNE, False), "refilled": (8, PRUNE, True)}
    found = {name: searched(tmp_path / name, slots=slots, prune=prune, refill=refill, sampler="random") for name, (slots, prune, refill) in arms.items()}
    seconds = {name: f.seconds for name, f in found.items()}
    assert seconds["sequential"] > 2.5 * seconds["packed"] and seconds["packed"] > seconds["pruned"] > seconds["refilled"]
    assert {f.best.adapter for f in found.values()} == {found["sequential"].best.adapter}  # these curves never cross: halving loses nothing


def test_optuna_reads_the_study_as_the_driver_told_it(tmp_path):
    found = searched(tmp_path)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(next(tmp_path.glob("*.journal")))))
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert [(t.number, t.state.name, t.value, t.intermediate_values) for t in study.trials] == [(t.number, t.state, t.score, t.reports) for t in found.trials]
    assert study.best_trial.number == found.best.number and study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert {step for t in study.trials for step in t.intermediate_values} == {2500, 5000, 10_000}  # tokens of the rungs, the same for every trial


def test_a_proposal_that_was_trained_is_answered_without_training(tmp_path):
    space = Space(axes={"rank": Levels(values=(8, 16)), "batch": Choice(options=(1, 8))}, fixed={"learning_rate": 8e-5, "alpha_ratio": 1.0})
    made = lambda params: space.adapter(params, budget_tokens=BUDGET, seed=0)  # noqa: E731
    with SearchRun(search_of(space, name="toy", sampler="random", sampler_seed=0, trials=30, slots=2), tmp_path) as run:
        found = drive(run, RecordedPack(grid(), PackShape(tokens=32, slots=(SlotShape(rank=64),) * 2), TIMES), made, Strategy(prune=PRUNE), tmp_path)
    trained = {t.number: t for t in found.trials if t.twin_of is None}
    assert len(trained) == 4 and len(found.trials) == 30
    for t in found.trials:
        if t.twin_of is not None:
            twin = trained[t.twin_of]
            assert (t.adapter, t.state, t.score) == (twin.adapter, twin.state, twin.score)


def test_a_rank_takes_the_narrowest_slot_that_holds_it_and_waits_for_a_wide_one(tmp_path):
    shape = PackShape(tokens=32, slots=(SlotShape(rank=64), SlotShape(rank=16), SlotShape(rank=16)))
    watched = Watched(grid(), shape, TIMES)
    with SearchRun(search_of(SPACE, name="toy", sampler="random", sampler_seed=1, trials=20, slots=3), tmp_path) as run:
        found = drive(run, watched, adapter_of, Strategy(prune=PRUNE), tmp_path)
    assert all(t.state in ("COMPLETE", "PRUNED") for t in found.trials)
    admitted = [(slot, a.rank) for what, slot, a in watched.history if what == "admit"]
    assert all(rank <= shape.slots[slot].rank for slot, rank in admitted) and {slot for slot, rank in admitted if rank <= 16} >= {1, 2}


def test_every_finished_adapter_is_kept_with_its_weights(tmp_path):
    kept = {}
    found = searched(tmp_path, keep=lambda number, adapter, evaluation, weights: kept.__setitem__(number, (adapter, evaluation.score, weights.adapter)))
    assert kept == {t.number: (t.adapter, t.score, t.adapter) for t in found.trials if t.state == "COMPLETE" and t.twin_of is None}


def test_views_show_where_every_slot_is(tmp_path):
    views = []
    found = searched(tmp_path, listen=views.append)
    assert all(set(v.live) <= set(range(8)) and v.slots == 8 and v.trials <= v.budget == 24 for v in views)
    assert views[-1].live == {} and views[-1].seconds == found.seconds and views[-1].best == (found.best.number, found.best.score)
    assert (views[-1].finished, views[-1].pruned) == tuple(sum(t.state == s and t.twin_of is None for t in found.trials) for s in ("COMPLETE", "PRUNED"))


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_searched_is_refused(tmp_path):
    narrow = search_of(SPACE, name="narrow", sampler="random", sampler_seed=1, trials=20, slots=2)
    with SearchRun(narrow, tmp_path) as run:
        with pytest.raises(ValueError, match="as many trials in flight as its empty pack has slots"):
            drive(run, pack(8), adapter_of, Strategy(), tmp_path)
        with pytest.raises(ValueError, match="some slot holds every rank"):
            drive(run, RecordedPack(grid(), PackShape(tokens=32, slots=(SlotShape(rank=8),) * 2), TIMES), adapter_of, Strategy(), tmp_path)
    with SearchRun(replace(narrow, name="budgets"), tmp_path) as run, pytest.raises(ValueError, match="have one budget"):
        drive(run, pack(2), lambda params: replace(adapter_of(params), budget_tokens=BUDGET + params["learning_rate_level"]), Strategy(), tmp_path)
    with pytest.raises(ValueError, match="a sampler is one of"):
        search_of(SPACE, name="x", sampler="cmaes", sampler_seed=0, trials=1, slots=1)


def test_a_search_goes_on_as_it_began(tmp_path):
    searched(tmp_path, trials=8)
    with pytest.raises(ValueError, match="a search goes on as it began"):
        searched(tmp_path, trials=9, refill=False)


# ---------------------------------------------------------------- kills, faults and pauses


def table(found):
    return [(t.number, t.adapter, t.state, t.score, dict(t.reports)) for t in found.trials], found.seconds, found.progress


def finishes(home):
    journal = next(home.glob("*.journal")).read_text().splitlines()
    return [op["trial_id"] for op in map(json.loads, journal) if op["op_code"] == OP_FINISH]


@pytest.mark.parametrize("sampler", ["tpe", "gp"])  # both look at trials that run; GP at finished ones alone, so it needs some
def test_a_search_paused_after_every_cycle_finds_what_an_unbroken_one_finds(tmp_path, sampler):
    options = {"trials": 12, "sampler": sampler, "prune": PRUNE if sampler == "tpe" else NO_PRUNING, "slots": 3}
    expected, pauses = searched(tmp_path / "unbroken", **options), 0
    while True:
        try:
            found = searched(tmp_path / "broken", pause=lambda: True, **options)
            break
        except Pause:
            pauses += 1
    assert table(found) == table(expected) and pauses > 20
    assert searched(tmp_path / "broken", **options).trials == found.trials  # a finished search is not searched again
    assert not list((tmp_path / "broken").glob("*.npz"))


class Fault(Exception):
    """Stands for a kill in the middle of a call."""


def breaking(monkeypatch, at):
    """Every call that leaves something on disk or in the pack counts; before and after the `at`-th there is a fault."""
    count = iter(range(1_000_000))

    def wrapped(function):
        def call(*args, **options):
            n = next(count)
            if 2 * n == at:
                raise Fault
            result = function(*args, **options)
            if 2 * n + 1 == at:
                raise Fault
            return result

        return call

    for owner, name in ((saved.EventLog, "append"), (SearchRun, "report"), (SearchRun, "tell_value"), (SearchRun, "_ask"), (RecordedPack, "admit"), (RecordedPack, "release"), (driver, "save_state")):
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    return count


def test_a_fault_before_or_after_any_write_changes_nothing(tmp_path, monkeypatch):
    """A fault at every ninth place of a small search; the writes between two places are of the same few kinds. A checkpoint after every cycle."""
    options = {"slots": 3, "trials": 7, "sampler": "random", "checkpoint_s": 0.0}
    expected = table(searched(tmp_path / "unbroken", **options))
    with monkeypatch.context() as patch:
        count = breaking(patch, -1)
        searched(tmp_path / "counted", **options)
        writes = next(count)
    assert writes > 60
    for at in range(0, 2 * writes, 9):  # an odd stride: befores and afters alike
        home = tmp_path / str(at)
        with monkeypatch.context() as patch:
            breaking(patch, at)
            with pytest.raises(Fault):
                searched(home, **options)
        found = searched(home, **options)
        trials, seconds, progress = table(found)
        numbers = {t[0]: i for i, t in enumerate(trials)}
        assert [t[1:] for t in trials] == [t[1:] for t in expected[0]], at
        assert (seconds, progress) == expected[1:] and len(numbers) == 7, at
        told = finishes(home)
        assert len(told) == len(set(told)), at


CHILD = """
import sys, time
from pathlib import Path
from studies.plora.search.recorded import RecordedPack
from tests.studies.plora_grid import searched

class Slow(RecordedPack):
    def advance(self, micro_steps):
        time.sleep(0.002)
        print("cycle", flush=True)
        return super().advance(micro_steps)

searched(Path(sys.argv[1]), trials=24, kind=Slow, checkpoint_s=0.05, micro_steps=8)
"""


def start(home):
    return subprocess.Popen([sys.executable, "-c", CHILD, str(home)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def test_after_sigkills_no_trial_is_lost_none_is_told_twice_and_the_search_is_the_unbroken_one(tmp_path):
    moments = random.Random(5)
    for kill in range(KILLS):
        with start(tmp_path / "killed") as child:
            for _ in range(moments.randint(20, 60)):
                assert child.stdout.readline(), f"the search ended before kill {kill}"
            time.sleep(moments.uniform(0, 0.02))
            child.send_signal(signal.SIGKILL)
    found, expected = (searched(tmp_path / name, trials=24, micro_steps=8) for name in ("killed", "unbroken"))
    assert [row[1:] for row in table(found)[0]] == [row[1:] for row in table(expected)[0]]
    assert table(found)[1:] == table(expected)[1:]
    told = finishes(tmp_path / "killed")
    assert len(told) == len(set(told)) == 24 + sum(t["state"] == "FAIL" for t in found.record["trials"])
