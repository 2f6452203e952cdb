"""`suite verify-determinism`: does this device give the golden bits? PASS or FAIL for every operator, and a file to contribute.

    python -m suite verify-determinism                    # the GPU if there is one, else this CPU; offline, about a minute
    python -m suite verify-determinism --device cpu --json

One ordinary cell, run by the ordinary driver into an ordinary bundle; a second call finds the bundle (`--rerun` measures again). It needs
torch, triton and numpy, neither MLflow nor a network. Exit codes: 0 all equal, 1 an operator differs or the cell died, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.determinism.contribution import MEASURE, known_binaries, pack_bundle
from studies.determinism.golden_manifest import Manifest, ManifestError, read
from suite import cli, locks, plan as planning
from suite.bundle import Bundle, load_record
from suite.cell import Cell, Needs
from suite.machine import gpus_wanted, refusal
from suite.session import Session
from suite.study import load_study
from suite.text import clean

DEVICES = ("cpu", "cuda")


def verify_cell(device: str) -> Cell:
    """The question: the manifest's questions on this device. Raises ManifestError."""
    return Cell(study="determinism", measure=MEASURE, params={"device": device, "questions": read().digest}, label=f"verify {device}",
                needs=Needs(device=device, memory_gib=1, gpu_memory_gib=1 if device == "cuda" else 0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", *DEVICES), default="auto", help="auto: the GPU if there is one that torch can use, else the CPU")
    parser.add_argument("--out", metavar="FOLDER", help="where the contribution file goes (default: <state>/contributions)")
    parser.add_argument("--rerun", action="store_true", help="measure again, also where this device has answered with this code and toolchain")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def command(args: argparse.Namespace) -> int:
    manifest = read()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    session = Session.here()
    device = args.device if args.device != "auto" else "cpu" if refusal(Needs(device="cuda"), session.machine) else "cuda"
    session.state_dir.mkdir(parents=True, exist_ok=True)
    with locks.hold(session.state_dir / "driver.lock", what=f"the store {session.state_dir}"):
        bundle, fresh, why = measure(session, device, args.rerun)
    if bundle is None:
        return refused(why)
    if bundle.status != "OK":
        return died(bundle, why)
    path = pack_bundle(bundle, Path(args.out) if args.out else session.state_dir / "contributions")
    report = judged(bundle, manifest)
    if args.json:
        print(json.dumps({**report, "contribution": str(path)}, indent=1, allow_nan=False))
    else:
        show(report, manifest, path, fresh)
    return 0 if report["equal"] == len(report["operators"]) else cli.EXIT_FAILED


def measure(session: Session, device: str, rerun: bool) -> tuple[Bundle | None, bool, str]:
    """(the bundle that answers, whether it was measured just now, why there is none or why it failed)."""
    from suite.driver import run_plan
    from suite.executors.local import LocalExecutor

    session.store.remove_leftovers()
    bundles, _ = session.store.load_all()
    plan = session.plan(load_study("determinism"), "verify", planning.Options(rerun=rerun, only=verify_cell(device).label), bundles)
    entry, = plan.entries
    if entry.state == planning.DONE:
        return entry.bundle, False, ""
    if entry.state == planning.UNAVAILABLE:
        return None, False, f"--device {device} is not possible here: {entry.reason}"
    print(f"asking {device} {len(read().questions)} golden questions ...", file=sys.stderr, flush=True)
    with LocalExecutor(gpus=gpus_wanted([entry.cell.needs], session.machine)) as executor:
        if executor.left_out:
            print(f"the worker starts without {', '.join(map(clean, executor.left_out))} of your environment: they steer numbers", file=sys.stderr)
        report = run_plan(plan, executor=executor, store=session.store, conditions=session.conditions())
    bundle = report.added[-1]
    return bundle, True, report.reasons[bundle.point]


def refused(why: str) -> int:
    print(f"suite: {clean(why)}", file=sys.stderr)
    return cli.EXIT_USAGE


def died(bundle: Bundle, why: str) -> int:
    """The cell gave no answer: a refused manifest, or a crash with its log."""
    name, _, reason = why.partition(": ")
    if name.endswith(ManifestError.__name__):
        return refused(reason)
    print(f"suite: the cell {bundle.status}: {clean(why)}; see `python -m suite show {bundle.id[:12]}`", file=sys.stderr)
    return cli.EXIT_FAILED


def judged(bundle: Bundle, manifest: Manifest) -> dict[str, Any]:
    """The bundle's digests against the manifest's, by operator; plain JSON."""
    records = {(r["operator"], r["case"]): r for r in load_record(bundle.path, "golden")}
    operators = [_operator(name, [(q, records[name, q.case]) for q in manifest.questions if q.operator == name]) for name in manifest.operators()]
    env = bundle.data["environment"]
    binaries = known_binaries(load_record(bundle.path, "kernels"), manifest.cubins)
    toolchain = f"torch {env['torch']}, triton {env['triton']}, driver {env['driver'] or '-'}"
    return {"device": env["device_model"], "toolchain": toolchain, "manifest": manifest.digest, "versions": dict(manifest.versions), "operators": operators,
            "equal": sum(o["verdict"] == "PASS" for o in operators), "binaries": None if binaries is None else list(binaries), "bundle": bundle.id,
            "commit": bundle.data["commit"], "dirty": bundle.data.get("dirty", True), "started_at": bundle.started_at, "duration_s": bundle.data["duration_s"]}


def _operator(name: str, asked: list[tuple[Any, Mapping[str, Any]]]) -> dict[str, Any]:
    wrong = [r for q, r in asked if r["output_digest"] != q.output_digest]
    first = wrong[0] if wrong else {}
    distance = f"{first['differing']} of {first['elements']} elements differ, by up to {first['max_ulp']} ULP" if "differing" in first else ""
    return {"operator": name, "family": asked[0][0].family, "cases": len(asked), "equal": len(asked) - len(wrong), "verdict": "FAIL" if wrong else "PASS",
            "first": first.get("case", ""), "why": first.get("error") or first.get("note") or distance}


def show(report: Mapping[str, Any], manifest: Manifest, path: Path, fresh: bool) -> None:
    """The table and what may be done with it."""
    from suite.commands.look import print_table

    versions = ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items()))
    print(f"golden manifest {manifest.digest[:12]} ({versions}), made with torch {manifest.made_with.get('torch', '?')}")
    print(f"device {clean(report['device'])}, {clean(report['toolchain'])}")
    rows = [(o["operator"], o["family"], f"{o['equal']}/{o['cases']}", o["verdict"], o["first"], o["why"]) for o in report["operators"]]
    failed = report["equal"] < len(rows)
    print_table("operators", ("operator", "family", "equal", "", *(("first that differs", "how") if failed else ())), [r if failed else r[:4] for r in rows])
    if report["binaries"]:
        print(f"{report['binaries'][0]} of {report['binaries'][1]} kernel binaries have the digests that the manifest lists for this compiler")
    if not fresh:
        print(f"measured {report['started_at'][:19]} UTC with this code and toolchain; --rerun measures again")
    print(f"{report['equal']} of {len(rows)} operators equal to the golden manifest on {clean(report['device'])} ({report['duration_s']:.0f} s)")
    print(f"contribution file {path}")
    print("To contribute this row: `python -m suite publish FILE` in a clean checkout puts it under reports/published/determinism/; "
          "open a pull request that adds that folder. `python -m suite ingest FILE` shows it as a column of the matrix on any machine.")
