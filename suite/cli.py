"""The command line: `python -m suite COMMAND`. The one composition root of the tree.

    python -m suite list
    python -m suite run determinism --preset cpu
    python -m suite claims determinism --json

Exit codes: 0 all went well; 1 something failed (a cell, a bundle that could not be read, a check) or was left to run;
2 wrong usage (unknown study, preset, executor, expression); 3 a store or device is in use by another
process; 4 the tracking store or the disk refused (bundles written so far are kept); 75 stopped at a
checkpoint, run again to go on; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from suite.study import study_verbs
from suite.text import clean, masked

EXECUTORS = ("local",)
EXIT_FAILED, EXIT_USAGE, EXIT_HELD, EXIT_STORE, EXIT_PAUSED, EXIT_INTERRUPTED = 1, 2, 3, 4, 75, 130


def _duration_s(text: str) -> float:
    """'9m', '30s', '2h', '7d' or plain seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:], None)
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a duration is like 30s, 9m, 2h or 7d, got {text!r}")
    return seconds


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, got {text!r}")
    return int(text)


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The whole command line; of the commands that studies add, only the one that `argv` names has its options loaded."""
    p = argparse.ArgumentParser(prog="suite", description="Studies as cells, bundles, claims and reports.", epilog=__doc__.partition("\n\n")[2], formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, study: str = "") -> argparse.ArgumentParser:
        c = sub.add_parser(name, help=text, description=text)
        if study:
            c.add_argument("study", nargs=None if study == "one" else "?", help="name of a study (see `suite list`)")
        return c

    command("list", "studies, their presets and claims")
    _plan_options(command("plan", "the cells of a preset and where each stands", "one"))
    _run_options(command("run", "run a preset's cells, resume what is unfinished", "one"))
    _warm_options(command("warm", "compile ahead, in parallel, what a preset's cells would compile one after another; measures nothing", "one"))
    c = command("archive", "pack this store's bundles and states into files of at most 15 MiB; starts nothing")
    c.add_argument("file", metavar="FILE.tar")
    c.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait for a run on this store to end")
    c = command("ingest", "take bundles (folders or .tar archives) from elsewhere into the store")
    c.add_argument("paths", nargs="+")
    c = command("publish", "copy small bundles of committed code into reports/published/")
    c.add_argument("paths", nargs="+")
    c.add_argument("--only", default="", metavar="GLOB", help="a glob on labels")
    c = command("claims", "judge the claims", "any")
    c.add_argument("--json", action="store_true", help="one JSON object per claim")
    c.add_argument("--preset", help="judge against this preset's plan (default: the last run's)")
    c = command("report", "write the HTML and PDF report", "one")
    c.add_argument("--preset", help="judge against this preset's plan (default: the last run's)")
    c.add_argument("--out", default="", help="folder (default: <state>/reports/STUDY)")
    command("status", "what a run in another terminal is doing")
    command("show", "one cell: parameters, result, log, and the command that repeats it").add_argument("cell", help="a label, or the first digits of its point or key")
    c = command("export", "every run of a study as one CSV", "one")
    c.add_argument("--csv", required=True, metavar="FILE")
    c = command("clean", "delete failed and superseded attempts, logs and states")
    c.add_argument("--older-than", type=_duration_s, required=True, metavar="AGE", help="like 7d: only what is older goes; answers that stand are kept")
    command("doctor", "what this machine can and cannot measure, in plain words")
    c = command("ui", "serve the MLflow UI of the store on this machine's loopback")
    c.add_argument("--port", type=int, default=5000)
    _assets_verbs(command("assets", "data sets and models: state, licence, sources; pack and unpack carry one to a host without network"))
    for name, (module, text) in study_verbs().items():
        c = command(name, text)
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(c)
    return p


def _function(name: str) -> Callable[[argparse.Namespace], int]:
    """What a command runs: a study's own, the report's (composed here), or one of suite.commands."""
    from suite import commands

    verbs = study_verbs()
    if name in verbs:
        return importlib.import_module(verbs[name][0]).command
    return report_command if name == "report" else getattr(commands, f"{name}_command")


def _assets_verbs(c: argparse.ArgumentParser) -> None:
    verbs = c.add_subparsers(dest="verb", metavar="pack|unpack")
    text = "write an asset's file as shards, byte for byte"
    pack = verbs.add_parser("pack", help=text, description=text)
    pack.add_argument("names", nargs="+", metavar="NAME")
    pack.add_argument("--max-mib", type=float, default=48.0, help="largest shard (default: 48)")
    pack.add_argument("--to", default=".", metavar="FOLDER", help="where the shards go (default: here)")
    text = "take shards into the asset cache, all at once or one after another"
    verbs.add_parser("unpack", help=text, description=text).add_argument("shards", nargs="+", metavar="SHARD")


def _plan_options(c: argparse.ArgumentParser) -> None:
    c.add_argument("--preset", help="a preset's name or path/to/file.py:function (default: the best that this machine can measure)")
    c.add_argument("--only", default="", metavar="EXPR", help="'name=value[,name=value]' on parameters, or a glob on labels; inputs come along")
    c.add_argument("--rerun", action="store_true", help="measure again what is done")
    c.add_argument("--keep-failed", action="store_true", help="do not try failed cells again")
    c.add_argument("--reuse", action="store_true", help="bundles measured elsewhere with this code count as done")


def _run_options(c: argparse.ArgumentParser) -> None:
    _plan_options(c)
    c.add_argument("--executor", default="local", help=f"one of {', '.join(EXECUTORS)}")
    c.add_argument("--jobs", type=_count, default=1, help="CPU workers; refused where a cell must run alone")
    c.add_argument("--stop-after", type=_duration_s, metavar="DURATION", help="start nothing after this, pause long cells, exit 75")
    c.add_argument("--archive", metavar="FILE.tar", help="pack this store's bundles and states into files of at most 15 MiB: now and then, at the end, and when interrupted")
    c.add_argument("--resume-from", nargs="+", metavar="FILE.tar", help="first take bundles and states from archives")
    c.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait for another driver to end")


def _warm_options(c: argparse.ArgumentParser) -> None:
    c.add_argument("--preset", help="a preset's name or path/to/file.py:function (default: the best that this machine can measure)")
    c.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="globs on the tasks' labels, which begin with their cell's")
    c.add_argument("--jobs", type=_count, metavar="N", help="processes (default: one a core)")
    c.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait for a run on this machine to end")


def main(argv: list[str] | None = None) -> int:
    """Parse, run one command, return its exit code."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    argv = sys.argv[1:] if argv is None else argv
    args = parser(argv).parse_args(argv)
    from suite.driver import StoreFull
    from suite.locks import Held

    try:
        return _function(args.command)(args)
    except Held as error:
        return _say(error, EXIT_HELD)
    except StoreFull as error:
        return _say(f"cannot write bundles: {error}; what was written is kept, free some space and run again", EXIT_STORE)
    except ValueError as error:
        return _say(error, EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted; finished cells are kept, run again to go on", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        return _say(f"{error.strerror or error}: {error.filename or ''}; nothing that was stored is lost", EXIT_STORE)
    except Exception as error:
        if type(error).__name__ not in ("TrackingError", "AssetError"):
            raise
        return _say(error, EXIT_STORE)


def report_command(args) -> int:
    """Judge the study's claims and write the report from what the tracker holds."""
    from pathlib import Path

    from reports.build import write
    from reports.study import study_report
    from suite.claims import judge_all
    from suite.commands.store import ledger_plan
    from suite.session import Session

    session = Session.here()
    study, plan, tracker = ledger_plan(session, args.study, args.preset)
    view = session.view(study, plan, tracker)
    judged = judge_all(study, view)
    report = study_report(study, view, judged, plan.counts(), session.conditions().commit[:12], session.soak_record())
    out = Path(args.out) if args.out else session.state_dir / "reports" / study.name
    html, pdf = write(report, out)
    print(f"HTML   {html}")
    print(f"PDF    {pdf}")
    print(f"store  {session.store_name()}")
    print("MLflow UI: make ui, then open http://127.0.0.1:5000")
    return 0


def _say(message: object, code: int) -> int:
    print(clean(masked(f"suite: {message}")), file=sys.stderr)
    return code
