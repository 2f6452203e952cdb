"""What `suite run` asks of the executor, and what it says where cells are left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from suite import cli
from suite.bundle import BundleStore, Draft
from suite.cell import Cell, Needs
from suite.commands import run as command
from suite.driver import Conditions, RunReport, StoreFull, run_plan
from suite.executors._base import Done
from suite.job import Job
from suite.locks import Held
from suite.machine import Gpu, Machine
from suite.plan import Plan, make_plan
from suite.search import Float, Search
from suite.session import Session
from suite.study import Study
from suite.worker import draft

H200S = Machine(cpu_model="a cpu", cores=2, memory_gib=8.0, torch="2.11.0+cu130", triton="3.6.0", driver="580",
                gpus=tuple(Gpu(index=i, name="NVIDIA H200", memory_gib=139.0) for i in range(4)))  # fmt: skip


def gpu_cell(params: dict) -> Cell:
    return Cell(study="toy", measure="tests.toy.cells:objective", params=params, needs=Needs(device="cuda", gpus=2))


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("SUITE_NO_TRACKING", "1")
    return Session(state_dir=tmp_path, store=BundleStore(tmp_path), machine=H200S, uri=None)


def study(**fields) -> Study:
    return Study(**{"name": "toy", "title": "t", "summary": "s", "presets": {"smoke": dict}, "cells": lambda config: [], **fields})


def test_gpu_cells_of_a_search_get_slots(session, monkeypatch):
    seen = {}

    class Executor:
        left_out = ()

        def __init__(self, **fields):
            seen.update(fields)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(command, "LocalExecutor", Executor)
    monkeypatch.setattr(command, "run_plan", lambda *a, **k: None)
    search = Search(name="s", study="toy", space={"x": Float(low=0.0, high=1.0)}, sampler="random", sampler_seed=1, sampler_flags={}, direction="minimize", objective="loss", budget=2, make_cell=gpu_cell)
    args = SimpleNamespace(stop_after=None, jobs=1, wait=0.0)
    feed = SimpleNamespace(tracker=None, ingest=None)
    command._measure(args, study(searches=lambda config: [search]), session, Plan(study="toy", preset="smoke", entries=()), feed, [])
    assert seen["gpus"] == (0, 1)
    command._measure(args, study(searches=lambda config: [search]), session, Plan(study="toy", preset="smoke", entries=()), feed, [])  # the first run let its journal go


def test_a_cell_that_no_worker_can_take_is_left_with_a_reason(session):
    class Nothing:
        def can_start(self, needs):
            return False

        def wait(self, timeout_s):
            return []

    cell = Cell(study="toy", measure="tests.toy.cells:answer", params={"n": 1})
    plan = make_plan("toy", "smoke", [cell], bundles=[], machine=H200S, versions=lambda d: {}, asset_sha256=str)
    report = run_plan(plan, executor=Nothing(), store=session.store, conditions=Conditions(environment=lambda d: {}, commit="c", dirty=False))
    assert report.states == {cell.point: "TO RUN"} and "no worker" in report.reasons[cell.point] and not report.stopped


@pytest.mark.parametrize("status, killed", [("DIED", True), ("TIMED OUT", False), ("DIED", False)])
def test_a_worker_that_ends_after_it_stored_its_bundle_has_answered(session, status, killed):
    """The reply was lost, the answer was not: one bundle, no second try."""

    class LosesReplies:
        started, ended = 0, []

        def can_start(self, needs):
            return True

        def start(self, job):
            self.started += 1
            session.store.write(draft(job, status="OK", error="", started="2026-01-01T00:00:00+00:00", duration_s=1.0))
            self.ended.append(Done(job=job, status=status, killed=killed))

        def wait(self, timeout_s):
            ended, self.ended = self.ended, []
            return ended

    cell = Cell(study="toy", measure="tests.toy.cells:answer", params={"n": 1})
    plan = make_plan("toy", "smoke", [cell], bundles=[], machine=H200S, versions=lambda d: {}, asset_sha256=str)
    session.store.write(draft(Job(cell=plan.entries[0].describe(), point=cell.point, key=plan.entries[0].key, code=plan.entries[0].code, modules=(), store=str(session.store.root)),
                              status="FAILED", error="an older attempt", started="2025-01-01T00:00:00+00:00", duration_s=1.0))  # fmt: skip
    executor = LosesReplies()
    report = run_plan(plan, executor=executor, store=session.store, conditions=Conditions(environment=lambda d: {}, commit="c", dirty=False))
    assert (report.states, executor.started) == ({cell.point: "DONE"}, 1)
    assert [b.status for b in session.store.load_all()[0]].count("OK") == 1 and len(report.added) == 1


class Tracker:
    """What a run tells its tracker."""

    def __init__(self):
        self.parents, self.ended = [], []

    def start_invocation(self, study, plan_json, tags):
        return "the parent"

    def end_invocation(self, parent, status, runs):
        self.ended.append((parent, status))

    def run_ids_by_bundle(self, study):
        return {}

    def ingest(self, bundle, parent, metrics, origin):
        self.parents.append(parent)

    def rows(self, study):
        return []


@pytest.fixture
def tracker(session, monkeypatch):
    monkeypatch.delenv("SUITE_NO_TRACKING")
    tracker = Tracker()
    monkeypatch.setattr(Session, "open_tracker", lambda self: tracker)
    return tracker


ARGS = SimpleNamespace(preset="smoke", resume_from=None, rerun=False, keep_failed=False, reuse=False, only="", jobs=1, archive=None)


@pytest.mark.parametrize("error, status", [(StoreFull("no space"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (Held("a device"), "FAILED")])
def test_a_run_that_ends_early_leaves_no_parent_running(session, tracker, monkeypatch, error, status):
    monkeypatch.setattr(command, "_measure", lambda *a: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        command._run(ARGS, study(), session)
    assert tracker.ended == [("the parent", status)]


def test_attempts_of_earlier_runs_are_not_filed_under_todays_invocation(session, tracker, monkeypatch):
    cell = Cell(study="toy", measure="tests.toy.cells:answer", params={"n": 1})
    entry = make_plan("toy", "smoke", [cell], bundles=[], machine=H200S, versions=lambda d: {}, asset_sha256=str).entries[0]
    header = Draft(cell=entry.describe(), point=cell.point, key=entry.key, code=entry.code, environment={}, commit="c", dirty=False, started_at="2026-01-01", duration_s=1.0, status="OK")
    session.store.write(header)
    monkeypatch.setattr(command, "_measure", lambda *a: RunReport(states={}, added=[], reasons={}))
    assert command._run(ARGS, study(), session) == 0
    assert tracker.parents == [None] and tracker.ended == [("the parent", "FINISHED")]


@pytest.mark.parametrize("states, stopped, code", [(["DONE"], False, 0), (["DONE", "TO RUN"], False, cli.EXIT_FAILED), (["DONE", "TO RUN"], True, cli.EXIT_PAUSED), (["UNAVAILABLE"], False, 0), (["BLOCKED"], False, cli.EXIT_FAILED)])
def test_a_run_that_leaves_cells_to_run_does_not_exit_0(session, states, stopped, code, capsys):
    points = {f"{i:064x}": s for i, s in enumerate(states)}
    report = RunReport(states=points, added=[], reasons={p: "because" for p in points}, stopped=stopped)
    feed = command.Feed(session, study())
    plan = Plan(study="toy", preset="smoke", entries=())
    assert command._conclude(SimpleNamespace(archive=None, reuse=False), study(), session, plan, report, [], feed) == code
    assert ("because" in capsys.readouterr().out) == (code == cli.EXIT_FAILED or "UNAVAILABLE" in states)
