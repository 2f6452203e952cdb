"""Commands on the stores: ingest, claims, export, clean.

    python -m suite ingest results.tar
    python -m suite claims determinism --json
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

from suite import cli, locks
from suite.bundle import origin_of
from suite.claims import Judged, judge_all
from suite.commands.look import print_table
from suite.machine import short_model
from suite.plan import Options, Plan
from suite.session import Session
from suite.study import Study, load_study, study_names
from suite.text import clean, masked


def ingest_command(args) -> int:
    from suite.ingest import adopt_paths, track

    session = Session.here()
    print(f"store {session.store_name()}")
    with locks.hold(session.state_dir / "driver.lock", what=f"the store {session.state_dir}"):
        metrics = {name: load_study(name).metric_names() for name in study_names()}
        taken = adopt_paths([Path(p) for p in args.paths], session.store, metrics)  # first: a tracker that is away costs no bundle
        report = track(taken, session.open_tracker(), metrics)
    print(f"{len(report.new)} new, {len(report.known)} known, {len(report.skipped)} skipped")
    for path, reason in report.skipped:
        print(f"suite: skipped {clean(str(path))}: {clean(str(reason))}", file=sys.stderr)
    return cli.EXIT_FAILED if report.skipped else 0


def claims_command(args) -> int:
    session = Session.here()
    out: list[dict] = []
    if not args.json:
        print(f"store {session.store_name()}")
    for name in [args.study] if args.study else study_names():
        study, plan, tracker = ledger_plan(session, name, args.preset)
        judged = judge_all(study, session.view(study, plan, tracker))
        if args.json:
            out += [j.to_json() for j in judged]
        else:
            print_judged(study, judged)
    if args.json:
        print(json.dumps(out, indent=1, allow_nan=False))
    return 0


def _tracker(session: Session):
    tracker = session.open_tracker()
    if tracker is None:
        raise ValueError("claims are judged where mlflow is installed; take the bundles there with `suite ingest PATH`")
    return tracker


def ledger_plan(session: Session, name: str, preset: str | None) -> tuple[Study, Plan, object]:
    """The study, the plan that its claims are judged against (the last run's preset by default), and the tracker."""
    study, tracker = load_study(name), _tracker(session)
    preset = preset or session.last_preset(name) or session.preset(study, None)[0]
    with contextlib.suppress(locks.Held):  # a driver that runs takes them in itself
        with locks.hold(session.state_dir / "driver.lock", what="the store"):
            session.adopt_published(study)
            take_in(session, study, tracker)
    return study, session.plan(study, preset, Options(keep_failed=True)), tracker


def take_in(session: Session, study: Study, tracker) -> list[str]:
    """Bring the tracker up to the bundle store; returns what it refused. Raises TrackingError.

    These are attempts of earlier runs, so they get no parent: an invocation holds what it measured itself.
    """
    from suite.tracking import Refused

    refused = []
    known = tracker.run_ids_by_bundle(study.name)
    for bundle in session.store.load_all()[0]:
        if bundle.data["cell"]["study"] != study.name or bundle.id in known:
            continue
        try:
            tracker.ingest(bundle, None, study.metric_names(), origin_of(bundle.path))
        except Refused as error:
            refused.append(str(error))
    return refused


def print_judged(study: Study, judged: list[Judged]) -> None:
    """The claim ledger as a table in the terminal."""
    print_table(f"claims of {study.name}", ("claim", "verdict", "value [95%]", "target", "bar", "met", "n", "kind", "machine"), [_ledger_row(j) for j in judged], whole=1)


def _ledger_row(j: Judged) -> tuple:
    met = {True: "yes", False: "NO", None: "-"}[j.bar_met]
    value = "-" if j.value is None else f"{_number(j.value)} [{_number(j.low)}, {_number(j.high)}] {j.unit}".rstrip()
    verdict = j.verdict + (" (STALE)" if j.stale else "")
    return (j.id, verdict, value, "-" if j.target is None else _number(j.target), "-" if j.bar is None else _number(j.bar), met, j.n, j.kind if j.value is not None else "-", ", ".join(map(short_model, j.machine.split(", "))) or "-")


def _number(x: float) -> str:
    return f"{x:.4g}"


def export_command(args) -> int:
    from suite.export import export_csv

    session = Session.here()
    rows = _tracker(session).rows(load_study(args.study).name)
    export_csv(rows, Path(args.csv))
    print(f"{len(rows)} runs written to {args.csv}")
    return 0


def clean_command(args) -> int:
    """Failed and superseded own attempts older than the age go, by the time that they name; an OK answer that stands is never deleted."""
    session = Session.here()
    with locks.hold(session.state_dir / "driver.lock", what=f"the store {session.state_dir}"):
        bundles, _ = session.store.load_all()
        own = [b for b in bundles if origin_of(b.path) == "here"]
        newest = {b.key: b for b in sorted(own, key=lambda b: b.started_at) if b.status == "OK"}
        limit = time.time() - args.older_than
        gone = [b for b in own if newest.get(b.key) is not b and b.ended() < limit]
        for bundle in gone:
            shutil.rmtree(bundle.path)
        side = [p for folder in ("logs", "state") for p in (session.state_dir / folder).glob("*") if p.stat().st_mtime < limit]
        for path in side:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(f"deleted {len(gone)} attempts, {len(side)} logs and states; {len(newest)} answers kept")
    return 0


def ui_command(args) -> int:
    """Become the MLflow server, on loopback; with a server configured there is nothing to start."""
    session = Session.here()
    if session.uri and session.uri.startswith("http"):
        print(f"the runs are on {masked(session.uri)}")
        return 0
    _tracker(session)
    print(f"MLflow UI on http://127.0.0.1:{args.port} for {session.store_name()}; Ctrl-C ends it", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(args.port)]
    os.execve(sys.executable, command, {**os.environ, "MLFLOW_BACKEND_STORE_URI": session.store_uri()})  # not in the arguments: every user of the host can read those
