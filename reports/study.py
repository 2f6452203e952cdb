"""A study's report: its claims and exhibits as blocks, in the order a reader asks for them.

    report = study_report(study, view, judged, plan_counts, commit="0123abcd")
    write(report, "out")

A pure function of its arguments: the same rows give the same bytes. It draws what `suite.exhibit`
describes and judges nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from reports import blocks, figures
from reports.format import NOT_MEASURED_HERE, Interval, clean, short_digest
from suite import exhibit
from suite.claims import Judged, Row, View, kind_of
from suite.identity import sha256_json
from suite.machine import short_model
from suite.study import Study


def study_report(study: Study, view: View, judged: Sequence[Judged], plan_counts: Mapping[str, int], commit: str, soak: Mapping | None = None) -> blocks.Report:
    """The whole report of one study. `plan_counts` is Plan.counts() of the invocation at hand, `soak` the record of the long tests."""
    shown = study.exhibits(view)
    parts: list = [blocks.Prose(text=study.summary), key_facts(view, plan_counts, soak)]
    first = [e for e in shown if isinstance(e, exhibit.Matrix)]
    parts += [drawn for e in first for drawn in draw(e, commit)]
    parts += ledger(study, judged, commit)
    parts += [drawn for e in shown if e not in first for drawn in draw(e, commit)]
    parts.append(provenance(study, view))
    return blocks.Report(title=study.title, subtitle=f"Study: {study.name}", blocks=tuple(parts), generated_from=snapshot_digest(view), commit=commit)


def snapshot_digest(view: View) -> str:
    """What the report is a function of: the bundles behind it, in order."""
    return sha256_json(sorted([r.bundle_id for r in view.rows_]))


def key_facts(view: View, plan_counts: Mapping[str, int], soak: Mapping | None) -> blocks.KeyFacts:
    """The first page at a glance."""
    machines = Counter(r.device for r in view.rows_)
    kinds = Counter(r.kind for r in view.rows_)
    origins = Counter(r.origin for r in view.rows_)
    planned = ", ".join(f"{n} {state.lower()}" for state, n in sorted(plan_counts.items()))
    return blocks.KeyFacts(items=(
        blocks.KeyFact(label="Cells planned here", value=str(sum(plan_counts.values())), detail=planned),
        blocks.KeyFact(label="Results shown", value=str(len(view.rows_)), detail=", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))),
        blocks.KeyFact(label="Where from", value=", ".join(f"{n} {o}" for o, n in sorted(origins.items())) or "none"),
        _soak_fact(soak),
        *(blocks.KeyFact(label="Machine", value=clean(device), detail=f"{n} results") for device, n in sorted(machines.items())),
    ))


def _soak_fact(soak: Mapping | None) -> blocks.KeyFact:
    """How old the harness's last long test is: a reader may weigh the numbers by it."""
    if soak is None:
        return blocks.KeyFact(label="Long tests", value="never recorded")
    outcomes = Counter(t["outcome"] for t in soak["tests"].values())
    return blocks.KeyFact(label="Long tests", value=", ".join(f"{n} {o}" for o, n in sorted(outcomes.items())), detail=f"{soak['date']}, commit {short_digest(soak['commit'])}")


def ledger(study: Study, judged: Sequence[Judged], commit: str) -> list:
    directions = {c.id: c.direction for c in study.claims}
    rows = tuple(claim_row(j, directions[j.id]) for j in judged)
    if not rows:
        return []
    out: list = [blocks.Heading(level=2, text="Claims"), blocks.ClaimLedger(rows=rows)]
    drawable = [j for j in judged if j.value is not None and j.value > 0 and j.low is not None and j.low > 0 and j.bar]
    run_ids = tuple(dict.fromkeys(i for j in drawable for i in j.run_ids))
    if drawable and run_ids:
        plot = figures.claims_plot(blocks.ClaimLedger(rows=tuple(claim_row(j, directions[j.id]) for j in drawable)), caption="Claims against our bar: right of 1 is better", run_ids=run_ids, commit=commit)
        out.append(plot)
    return out


def claim_row(j: Judged, direction: str) -> blocks.ClaimRow:
    """A judged claim as the ledger prints it."""
    measured = j.value is not None
    return blocks.ClaimRow(study=j.study, id=j.id, statement=j.statement, verdict=j.verdict, command=j.command or f"suite run {j.study}", target=j.target, bar=j.bar,
                           bar_met=j.bar_met, value=j.value, low=j.low, high=j.high, unit=j.unit, n=j.n if measured else None, kind=j.kind if measured else "",
                           machine=", ".join(map(short_model, j.machine.split(", "))) if measured else "", commit=j.commit if measured else "", stale=j.stale, direction=direction)


# ---------------------------------------------------------------- exhibits


def draw(item, commit: str) -> list:
    """One exhibit as blocks."""
    if isinstance(item, exhibit.Prose):
        return [*([blocks.Heading(level=2, text=item.heading)] if item.heading else []), blocks.Prose(text=item.text)]
    sources = list(item.sources)
    heading = [blocks.Heading(level=2, text=item.title)]
    if isinstance(item, exhibit.Matrix):
        return heading + [_matrix(item, sources, commit)]
    if isinstance(item, exhibit.Curves):
        note = [blocks.Prose(text=item.note)] if item.note else []
        return [*heading, _curves(item, sources, commit), *note]
    if isinstance(item, exhibit.Table):
        return heading + [_table(item, sources)]
    raise ValueError(f"an exhibit is one of suite.exhibit, got {type(item).__name__}")


def _run_ids(sources: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.run_id for r in sources))


def _commits(sources: Sequence[Row], commit: str) -> str:
    """The commits that measured: one, or all of them where rows of several are shown side by side."""
    found = sorted({f"{r.commit}-dirty" if r.dirty else r.commit for r in sources})
    return ", ".join(found) or commit


def _machines(sources: Sequence[Row]) -> str:
    return ", ".join(sorted({r.device for r in sources}))


def _matrix(item: exhibit.Matrix, sources: Sequence[Row], commit: str) -> blocks.Matrix:
    kind = kind_of(sources)
    groups = [label.partition(", ") for label in item.column_labels]
    runs: list[list] = []
    for device, _, _ in groups:
        if runs and runs[-1][0] == device:
            runs[-1][1] += 1
        else:
            runs.append([device, 1])
    return blocks.Matrix(caption=item.title, row_labels=item.row_labels, column_labels=[schedule or device for device, _, schedule in groups],
                         cells=[[blocks.MatrixCell(state=c.state, text=c.text, detail=c.detail) for c in row] for row in item.cells],
                         column_kinds=[kind] * len(item.column_labels), column_groups=[blocks.Group(label=d, size=n) for d, n in runs],
                         run_ids=_run_ids(sources), commit=_commits(sources, commit), note=item.note)


def _curves(item: exhibit.Curves, sources: Sequence[Row], commit: str) -> blocks.Figure:
    source = figures.Source(run_ids=_run_ids(sources), commit=_commits(sources, commit), kind=kind_of(sources), machine=_machines(sources))
    series = [figures.Series(label=s.name, x=s.x, y=_y(s)) for s in item.series]
    alt = f"{item.y_label} over {item.x_label}: " + "; ".join(f"{s.name} from {s.y[0]:.3g} to {s.y[-1]:.3g}" for s in item.series)
    return figures.line_curves(caption=item.title, alt=alt, series=series, x_label=item.x_label, y_label=item.y_label, source=source, log_y=item.log_y, reference=item.reference)


def _y(series: exhibit.Series) -> tuple:
    if not series.low:
        return tuple(series.y)
    return tuple(Interval(value=v, low=a, high=b) for v, a, b in zip(series.y, series.low, series.high, strict=True))


def _table(item: exhibit.Table, sources: Sequence[Row]) -> blocks.Table:
    rows = [[_cell(value) for value in row] for row in item.rows]
    numeric = [any(isinstance(row[i], (int, float, Interval)) for row in rows) for i in range(len(item.columns))]
    columns = [blocks.Column(name=c.name, unit=c.unit or None, align="right" if n else "left") for c, n in zip(item.columns, numeric, strict=True)]
    return blocks.Table(caption=item.title, columns=columns, rows=rows, kind=kind_of(sources), machine=_machines(sources), note=item.note)


def _cell(value):
    if value is None:
        return NOT_MEASURED_HERE
    if isinstance(value, tuple):
        v, low, high = value
        return Interval(value=v, low=low, high=high)
    return value


def provenance(study: Study, view: View) -> blocks.Provenance:
    machines, packages = {}, {}
    for row in view.rows_:
        e = row.environment
        machines[row.device] = f"driver {e['driver']}" if e.get("driver") else str(e.get("os", ""))
        packages.setdefault("torch", set()).add(str(e.get("torch", "?")))
        packages.setdefault("triton", set()).add(str(e.get("triton", "?")))
        packages.setdefault("Python", set()).add(str(e.get("python", "?")))
    return blocks.Provenance(commands=(f"python -m suite run {study.name}", f"python -m suite report {study.name}"),
                             packages=tuple((name, ", ".join(sorted(v))) for name, v in sorted(packages.items())), machines=tuple(sorted(machines.items())))
