"""Commands that only look: list, plan, status, show, doctor.

    python -m suite show "fma cpu threads=1"
"""

from __future__ import annotations

import shlex
import sys

from suite import plan as planning
from suite.bundle import Bundle, origin_of, trust
from suite.progress import read_status
from suite.session import Session
from suite.study import load_study, study_names
from suite.text import clean


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple], whole: int = 0) -> None:
    """A table on standard output: rich where it imports and on a terminal, aligned text elsewhere. The first `whole` columns are never wrapped."""
    cells = [[clean(str(c)) for c in row] for row in rows]
    try:
        import rich.box
        import rich.console
        import rich.table
        import rich.text
    except ImportError:
        widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
        print(title)
        for row in [list(columns), *cells]:
            print("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip())
        return
    console = rich.console.Console(width=None if sys.stdout.isatty() else 140)
    table = rich.table.Table(title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, overflow="fold", min_width=max(len(r[i]) for r in [columns, *cells]) if i < whole else None)
    for row in cells:
        table.add_row(*(rich.text.Text(c) for c in row))
    console.print(table)


def list_command(args) -> int:
    rows = []
    for name in study_names():
        study = load_study(name)
        rows.append((name, study.title, ", ".join(study.presets), len(study.claims)))
    print_table("studies", ("name", "title", "presets", "claims"), rows)
    return 0


def plan_command(args) -> int:
    session, study = Session.here(), load_study(args.study)
    preset, why = session.preset(study, args.preset)
    options = planning.Options(rerun=args.rerun, keep_failed=args.keep_failed, reuse=args.reuse, only=args.only)
    plan = session.plan(study, preset, options)
    print(f"study {study.name}, preset {preset} ({why})")
    print_table("cells", ("state", "cell", "key", "why"), [(e.state, e.cell.label, e.key[:12], e.reason) for e in plan.entries])
    print(", ".join(f"{n} {state}" for state, n in sorted(plan.counts().items())))
    return 0


def status_command(args) -> int:
    session = Session.here()
    status = read_status(session.state_dir / "status.json")
    if status is None:
        print(f"nothing runs on {session.state_dir}")
        return 0
    print(f"{status['study']} (process {status['pid']}): {clean(status['line'])}")
    return 0


def show_command(args) -> int:
    """Everything that is known of one cell's newest attempt."""
    bundle = _find(Session.here(), args.cell)
    d = bundle.data
    print_table("cell", ("", ""), [("label", d["cell"]["label"]), ("study", d["cell"]["study"]), ("measure", d["cell"]["measure"]), ("status", d["status"]), ("kind", d["kind"]),
                                   ("bundle", bundle.id), ("key", d["key"]), ("commit", d["commit"] + (" (dirty)" if d["dirty"] else "")), ("machine", d["environment"].get("device_model", "?")),
                                   ("started", d["started_at"]), ("took", f"{d['duration_s']:.2f} s"), ("folder", bundle.path)])
    print_table("parameters", ("name", "value"), sorted({**d["cell"]["params"], "seed": d["cell"]["seed"], "replicate": d["cell"]["replicate"]}.items()))
    print_table("result", ("name", "value"), sorted({**bundle.metrics, **bundle.facts}.items()))
    if d["error"]:
        print("error\n" + clean(d["error"]))
    log = bundle.path / "log.txt"
    if log.is_file():
        print("log\n" + clean(log.read_text()[-4000:]))
    preset = _preset_of(bundle)
    print(f"\nrepeat it with\n  python -m suite run {clean(d['cell']['study'])}{f' --preset {preset}' if preset else ''} --only {shlex.quote(clean(d['cell']['label']))} --rerun")
    return 0


def _preset_of(bundle: Bundle) -> str:
    """A preset that asks this cell's question; '' where none does today."""
    study = load_study(bundle.data["cell"]["study"])
    for name, preset in study.presets.items():
        if any(c.point == bundle.point for c in planning.ordered(study.cells(preset()))):
            return name
    return ""


def _find(session: Session, name: str) -> Bundle:
    bundles, _ = session.store.load_all()
    found = [b for b in bundles if name in (b.data["cell"]["label"], b.id) or (len(name) >= 6 and name.isalnum() and (b.point.startswith(name) or b.key.startswith(name) or b.id.startswith(name)))]
    if not found:
        labels = sorted({b.data["cell"]["label"] for b in bundles})[:5]
        raise ValueError(f"a cell is named by its label or by 6 or more digits of its point, key or bundle, got {name!r}; labels here begin {labels}")
    return max(found, key=lambda b: (trust(origin_of(b.path)), b.started_at))


def doctor_command(args) -> int:
    from suite.machine import doctor

    session = Session.here()
    mark = {True: "yes", False: "NO", None: "note"}
    print_table("what this machine can measure", ("topic", "", "in plain words"), [(topic, mark[ok], text) for topic, ok, text in doctor(session.machine)])
    return 0
