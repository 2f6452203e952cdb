"""`suite run`: plan, measure, ingest, judge.

    python -m suite run determinism --preset smoke

The order matters for what a crash can lose: bundles are on disk before anything reads them, and the
tracker only ever follows the bundles. `--archive FILE.tar` is renewed every few minutes between cells, and once more
at the end, also where the end is SIGTERM or Ctrl-C: then workers are killed first, and finished cells are packed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

from suite import cli, locks, plan as planning
from suite.bundle import Bundle, origin_of
from suite.commands.archive import RunArchive, check_name
from suite.commands.look import print_table
from suite.commands.store import print_judged, take_in
from suite.driver import RunReport, run_plan
from suite.executors.local import LocalExecutor
from suite.machine import gpus_wanted
from suite.progress import Display
from suite.session import Session
from suite.sources import sources_for
from suite.study import Study, load_config, load_study
from suite.text import clean, masked


def run_command(args) -> int:
    study = load_study(args.study)
    if args.executor not in cli.EXECUTORS:
        raise ValueError(f"an executor is one of {list(cli.EXECUTORS)}, got {args.executor!r}")
    if args.archive:
        check_name(args.archive)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    session = Session.here()
    with locks.hold(_writable(session.state_dir) / "driver.lock", what=f"the store {session.state_dir}", wait_s=args.wait):
        return _run(args, study, session)


def _writable(state_dir: Path) -> Path:
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        (state_dir / ".writable").write_text("")
    except OSError as error:
        from suite.driver import StoreFull

        raise StoreFull(f"{error.strerror}: {state_dir}") from error
    return state_dir


def _run(args, study: Study, session: Session) -> int:
    preset, why = session.preset(study, args.preset)
    session.store.remove_leftovers()
    problems = _bring_in(args, study, session)
    options = planning.Options(rerun=args.rerun, keep_failed=args.keep_failed, reuse=args.reuse, only=args.only)
    bundles, broken = session.store.load_all()
    problems += [str(b) for b in broken]
    plan = session.plan(study, preset, options, bundles)
    _refuse_shared_timing(plan, args.jobs)
    session.remember_preset(study.name, preset)
    print(f"study {study.name}, preset {preset} ({why})")
    print(f"store {session.store_name()}")
    print("plan  " + ", ".join(f"{n} {state}" for state, n in sorted(plan.counts().items())), flush=True)
    feed, archive = Feed(session, study), RunArchive(args.archive, session.store)
    feed.open(plan)
    try:
        report = _measure(args, study, session, plan, feed, bundles, archive)
        archive.finish()
    except BaseException as error:
        try:
            archive.rescue()
        finally:
            feed.abandon("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    feed.close(plan, report)
    return _conclude(args, study, session, plan, report, problems, feed)


def _bring_in(args, study: Study, session: Session) -> list[str]:
    if args.resume_from:
        from suite.archive import unpack

        unpack([Path(p) for p in args.resume_from], session.store)
    return session.adopt_published(study)


def _refuse_shared_timing(plan: planning.Plan, jobs: int) -> None:
    alone = [e.cell.label for e in plan.entries if e.cell.needs.exclusive and e.state == planning.TO_RUN]
    if jobs > 1 and alone:
        raise ValueError(f"a timing cell runs alone, so --jobs is 1 while one is planned, got --jobs {jobs} and {alone[0]!r}; use --only to leave it out")


def _measure(args, study: Study, session: Session, plan: planning.Plan, feed: Feed, bundles: list[Bundle], archive: RunArchive | None = None) -> RunReport:
    stop_at = None if args.stop_after is None else time.time() + args.stop_after
    searches = study.searches(load_config(study, plan.preset))
    sources = sources_for(searches, entries_of=lambda cell: session.entries(study, cell, bundles), storage_dir=session.state_dir / "searches")
    to_run = [e for e in plan.entries if e.state == planning.TO_RUN]
    asked = planning.ordered([s.make_cell(s.corner()) for s in searches if s.make_cell is not None])
    gpus = gpus_wanted([c.needs for c in (*(e.cell for e in to_run), *asked)], session.machine)
    display = Display(status_path=session.state_dir / "status.json", expected_s=expected_s(to_run, bundles), study=study.name)
    closing = contextlib.ExitStack()
    for source in sources:
        closing.callback(source.close)
    with closing, LocalExecutor(gpus=gpus, jobs=args.jobs, wait_s=args.wait) as executor, display:
        if executor.left_out:
            print(f"workers start without {', '.join(map(clean, executor.left_out))} of your environment: they steer numbers or times, and no bundle would say so", flush=True)
        return run_plan(plan, executor=executor, store=session.store, conditions=session.conditions(), ingest=feed.ingest if feed.tracker else None,
                        listener=display.update, stop_at=stop_at, sources=sources, checkpoint=archive.renew if archive else lambda: None)


def expected_s(to_run: list[planning.Entry], bundles: list[Bundle]) -> float | None:
    """Seconds that the cells should take, from earlier attempts at the same questions; None where one is unknown."""
    known = {b.point: b.data["duration_s"] for b in bundles if b.status == "OK"}
    if any(e.cell.point not in known for e in to_run):
        return None
    return sum(known[e.cell.point] for e in to_run)


class Feed:
    """The tracker as the driver sees it: absent, working, or stopped with a reason."""

    def __init__(self, session: Session, study: Study):
        self.session, self.study = session, study
        self.tracker, self.parent, self.error = None, None, ""
        self.refused: list[str] = []  # bundles that MLflow cannot hold as they are; the store itself is fine

    def open(self, plan: planning.Plan) -> None:
        if not self.session.has_tracker:
            return
        from suite.tracking import TrackingError

        conditions = self.session.conditions()
        try:
            self.tracker = self.session.open_tracker()
            self.parent = self.tracker.start_invocation(self.study.name, plan.to_json(), {"commit": conditions.commit, "dirty": str(conditions.dirty), "preset": plan.preset})
            self.refused += take_in(self.session, self.study, self.tracker)
        except TrackingError as error:
            self.tracker, self.error = None, str(error)
            print(f"suite: tracking is off: {clean(masked(str(error)))}; bundles are kept, `suite ingest` takes them in later", file=sys.stderr)

    def ingest(self, bundle: Bundle) -> None:
        from suite.tracking import Refused

        try:
            self.tracker.ingest(bundle, self.parent, self.study.metric_names(), origin_of(bundle.path))
        except Refused as error:
            self.refused.append(str(error))

    def abandon(self, status: str) -> None:
        """The run ends early (an interrupt, a full disk): its parent must not stay RUNNING. Never hides the reason."""
        if self.tracker is None or self.parent is None:
            return
        from suite.tracking import TrackingError

        with contextlib.suppress(TrackingError):
            self.tracker.end_invocation(self.parent, status, {})

    def close(self, plan: planning.Plan, report: RunReport) -> None:
        self.error = self.error or report.tracking_error
        if self.tracker is None or self.error:
            return
        from suite.tracking import TrackingError

        try:
            by_bundle = self.tracker.run_ids_by_bundle(self.study.name)
            runs = {point: by_bundle[bundle_id] for point, bundle_id in report.answers.items() if bundle_id in by_bundle}
            self.tracker.end_invocation(self.parent, "KILLED" if report.stopped else "FINISHED", runs)
        except TrackingError as error:
            self.error = str(error)


def _conclude(args, study: Study, session: Session, plan: planning.Plan, report: RunReport, problems: list[str], feed: Feed) -> int:
    problems = problems + feed.refused
    for problem in problems:
        print(f"suite: skipped: {clean(problem)}", file=sys.stderr)
    failed = [p for p, s in report.states.items() if s in ("FAILED", "TIMED OUT", "BLOCKED")]
    print("done  " + ", ".join(f"{list(report.states.values()).count(s)} {s}" for s in sorted(set(report.states.values()))))
    labels = {e.cell.point: e.cell.label for e in plan.entries}
    left = [] if report.stopped else [p for p, s in report.states.items() if s == planning.TO_RUN]
    for state in ("FAILED", "TIMED OUT", "BLOCKED", "UNAVAILABLE", *([planning.TO_RUN] if left else [])):
        shown = [(clean(labels.get(p, p[:12])), clean(report.reasons[p])) for p, s in report.states.items() if s == state]
        if shown:
            print_table(state, ("cell", "why"), shown)
    if feed.tracker is not None and not feed.error:
        from suite.claims import judge_all

        now = session.plan(study, plan.preset, planning.Options(reuse=args.reuse, keep_failed=True))
        print_judged(study, judge_all(study, session.view(study, now, feed.tracker)))
    if feed.error:
        return cli.EXIT_STORE
    if report.stopped or "PAUSED" in report.states.values():
        print("stopped at a checkpoint; run the same command again to go on")
        return cli.EXIT_PAUSED
    return cli.EXIT_FAILED if failed or problems or left else 0
