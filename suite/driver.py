"""Driver: runs a plan. It hands cells to an executor, stores what dead workers could not, and feeds the tracker.

    report = run_plan(plan, executor=executor, store=store, conditions=conditions, ingest=feed)

One driver a store (its lock names the holder). The tracker is fed behind the measuring and waits while
an exclusive cell runs. It decides order and retries; it knows neither studies nor how a cell is run.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from suite import identity
from suite.bundle import Bundle, BundleStore, read_bundle
from suite.executors._base import Done, Executor
from suite.job import Job
from suite.plan import DONE, TO_RUN, Entry, Plan, last_line
from suite.worker import draft

PAUSED, FAILED, TIMED_OUT = "PAUSED", "FAILED", "TIMED OUT"
RETRIES_OF_A_KILLED_WORKER = 1


class StoreFull(Exception):
    """Bundles can no longer be written: nothing more can be measured. What was written stays."""


@dataclass
class Progress:
    """What a live line shows; listeners get it after each event."""

    total: int = 0
    done: int = 0
    failed: int = 0
    cached: int = 0
    paused: int = 0
    running: dict[str, float] = field(default_factory=dict)  # label -> start (monotonic)
    messages: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class RunReport:
    """How a run ended: final state per point, bundles that this run added, why it stopped."""

    states: dict[str, str]
    added: list[Bundle]
    reasons: dict[str, str]
    answers: dict[str, str] = field(default_factory=dict)  # point -> id of the OK bundle that answers it
    tracking_error: str = ""
    stopped: bool = False  # by --stop-after, with cells left


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a bundle says of where and from what it was made."""

    environment: Callable[..., dict]  # suite.machine.environment
    commit: str
    dirty: bool


class Driver:
    """State of one run. Use run_plan."""

    def __init__(self, plan: Plan, *, executor: Executor, store: BundleStore, conditions: Conditions, ingest: Callable[[Bundle], None] | None,
                 listener: Callable[[Progress], None], stop_at: float | None, sources: tuple = (), checkpoint: Callable[[], None] = lambda: None):
        self.executor, self.store, self.conditions = executor, store, conditions
        self.ingest, self.listener, self.stop_at, self.sources, self.checkpoint = ingest, listener, stop_at, sources, checkpoint
        self.entries = {e.cell.point: e for e in plan.entries}
        self.states = {p: e.state for p, e in self.entries.items()}
        self.reasons = {p: e.reason for p, e in self.entries.items()}
        self.paths: dict[str, Path] = {p: e.bundle.path for p, e in self.entries.items() if e.bundle}
        self.answers = {p: e.bundle.id for p, e in self.entries.items() if e.bundle and e.state == DONE}
        self.running: dict[str, Entry] = {}
        self.died: dict[str, int] = {}
        self.there: dict[str, set[Path]] = {}  # attempts that lay in the store before the running one
        self.added: list[Bundle] = []
        self.backlog: list[Bundle] = []
        self.tracking_error = ""
        self.progress = Progress(total=len(self.entries), cached=sum(s == DONE for s in self.states.values()))

    def run(self) -> RunReport:
        self.listener(self.progress)
        while True:
            self._start_what_can()
            if not self.running:
                break
            for done in self.executor.wait(0.5):
                self._finish(done)
            self._feed_tracker()
            if not self._timing():
                self.checkpoint()
            self.listener(self.progress)
        self._feed_tracker(all_of_it=True)
        for point in [p for p, s in self.states.items() if s == TO_RUN and not self._past_stop()]:
            self.reasons[point] = self.reasons[point] or "no worker of this run offers what it needs"
        left = any(s in (TO_RUN, PAUSED) for s in self.states.values())
        return RunReport(states=self.states, added=self.added, reasons=self.reasons, answers=self.answers, tracking_error=self.tracking_error, stopped=left and self._past_stop())

    # ------------------------------------------------------------ starting

    def _past_stop(self) -> bool:
        return self.stop_at is not None and time.time() >= self.stop_at

    def _start_what_can(self) -> None:
        if self._past_stop():
            return
        for source in self.sources:
            for entry in source.new_entries():
                self._adopt(entry)
        for point, entry in list(self.entries.items()):
            if self.states[point] != TO_RUN or point in self.running or not self._inputs_ready(entry):
                continue
            if self.executor.can_start(entry.cell.needs.to_json()):
                self.there[point] = set(self.store.attempts(entry.key))
                self.executor.start(self._job(entry))
                self.running[point] = entry
                self.progress.running[entry.cell.label] = time.monotonic()
                self.listener(self.progress)

    def _adopt(self, entry: Entry) -> None:
        """A search asked for a cell: it joins the plan, unless the plan has it."""
        point = entry.cell.point
        if point not in self.entries:
            self.entries[point], self.states[point], self.reasons[point] = entry, entry.state, entry.reason
            self.progress.total += 1
            self.progress.cached += entry.state == DONE
        if entry.bundle is not None:
            self.paths[point], self.answers[point] = entry.bundle.path, entry.bundle.id
        if self.states[point] == DONE:
            self._tell_sources(point)

    def _inputs_ready(self, entry: Entry) -> bool:
        for role, cell in entry.cell.inputs.items():
            state = self.states[cell.point]
            if state == DONE:
                continue
            if state not in (TO_RUN, PAUSED):
                self.states[entry.cell.point] = "BLOCKED"
                self.reasons[entry.cell.point] = f"its input {role!r} ({cell.label}) is {state}"
            return False
        return True

    def _job(self, entry: Entry) -> Job:
        cell = entry.cell
        return Job(cell=entry.describe(), point=cell.point, key=entry.key, code=entry.code, modules=tuple(sorted(identity.reached_modules(cell.module, identity.ROOT))),
                   store=str(self.store.root), inputs={role: str(self.paths[c.point]) for role, c in cell.inputs.items()}, stop_at=self.stop_at,
                   environment=self._environment(entry), commit=self.conditions.commit, dirty=self.conditions.dirty)

    def _environment(self, entry: Entry) -> dict:
        on_gpu = entry.cell.needs.device == "cuda"
        return self.conditions.environment(entry.cell.needs.device, gpu_model=entry.device_model) if on_gpu else self.conditions.environment("cpu")

    # ------------------------------------------------------------ finishing

    def _finish(self, done: Done) -> None:
        point = done.job.point
        entry = self.running.pop(point)
        self.progress.running.pop(entry.cell.label, None)
        if done.status == "NOT STORED":
            raise StoreFull(done.message)
        stored = self._stored_by_the_dead(done, entry)
        if stored is not None:
            self._account(entry, stored, done)
            return
        if done.killed and self.died.get(point, 0) < RETRIES_OF_A_KILLED_WORKER:
            self.died[point] = self.died.get(point, 0) + 1
            self.progress.messages.append(f"{entry.cell.label}: {done.message}; trying once more")
            return
        bundle = read_bundle(Path(done.path), verify_files=False) if done.path else self._write_for_the_dead(done)
        self._account(entry, bundle, done)

    def _stored_by_the_dead(self, done: Done, entry: Entry) -> Bundle | None:
        """The attempt of a worker that ended after it stored its bundle and before it said so: it counts, and nothing is measured twice."""
        if done.path:
            return None
        new = [p for p in self.store.attempts(entry.key) if p not in self.there.get(done.job.point, set())]
        return read_bundle(new[-1], verify_files=False) if new else None

    def _write_for_the_dead(self, done: Done) -> Bundle:
        status = TIMED_OUT if done.status == TIMED_OUT else FAILED
        started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=done.duration_s)
        try:
            return self.store.write(draft(done.job, status=status, error=done.message, started=started.isoformat(timespec="microseconds"), duration_s=done.duration_s))
        except OSError as error:
            raise StoreFull(f"{error.strerror or error}: {error.filename or self.store.root}") from error

    def _account(self, entry: Entry, bundle: Bundle, done: Done) -> None:
        point = entry.cell.point
        self.added.append(bundle)
        self.backlog.append(bundle)
        self.states[point] = DONE if bundle.status == "OK" else bundle.status
        if bundle.status == "OK":
            self.paths[point], self.answers[point] = bundle.path, bundle.id
            self.progress.done += 1
            shutil.rmtree(done.job.state_dir, ignore_errors=True)
        elif bundle.status == PAUSED:
            self.progress.paused += 1
        else:
            self.progress.failed += 1
            self.reasons[point] = last_line(bundle.data["error"]) or bundle.status
            self.progress.messages.append(f"{entry.cell.label}: {bundle.status}: {self.reasons[point]}")
        if done.message and bundle.status == "OK":
            self.progress.messages.append(f"{entry.cell.label}: {done.message}")
        self._tell_sources(point, bundle)

    def _tell_sources(self, point: str, bundle: Bundle | None = None) -> None:
        for source in self.sources:
            source.tell(point, bundle or read_bundle(self.paths[point], verify_files=False))

    def _timing(self) -> bool:
        """An exclusive cell runs: nothing else may."""
        return any(e.cell.needs.exclusive for e in self.running.values())

    def _feed_tracker(self, all_of_it: bool = False) -> None:
        """Bundles go to the tracker behind the measuring; never while an exclusive cell is timing."""
        if self.ingest is None or self.tracking_error:
            return
        if not all_of_it and self._timing():
            return
        from suite.tracking import TrackingError

        while self.backlog:
            try:
                self.ingest(self.backlog[0])
            except TrackingError as error:
                self.tracking_error = str(error)
                self.progress.messages.append(f"tracking stopped: {error}; bundles are kept")
                return
            self.backlog.pop(0)
            if not all_of_it:
                return


def run_plan(plan: Plan, *, executor: Executor, store: BundleStore, conditions: Conditions, ingest: Callable[[Bundle], None] | None = None,
             listener: Callable[[Progress], None] = lambda progress: None, stop_at: float | None = None, sources: tuple = (),
             checkpoint: Callable[[], None] = lambda: None) -> RunReport:
    """Run every TO RUN entry. `stop_at` is a time.time() past which nothing starts and long cells pause.

    `sources` give further cells as results come in (searches): objects with `new_entries() -> [Entry]`
    and `tell(point, bundle)`. `checkpoint` is called again and again, never while a cell is timed. Raises StoreFull when bundles cannot be written.
    """
    return Driver(plan, executor=executor, store=store, conditions=conditions, ingest=ingest, listener=listener, stop_at=stop_at, sources=sources, checkpoint=checkpoint).run()
