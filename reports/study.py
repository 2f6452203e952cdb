"""A study's report: its claims and exhibits as blocks, in the order a reader asks for them.

    report = study_report(study, view, judged, plan_counts, commit="0123abcd")
    write(report, "out")

A pure function of its arguments: the same rows give the same bytes. It draws what `suite.exhibit`
describes and judges nothing. Rows that other code measured are marked wherever they are shown. Devices
have their whole names in exhibits and short ones here: see `reports._devices`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from reports import blocks, figures
from reports._devices import device_names, shortened
from reports.format import NOT_MEASURED_HERE, Interval, clean, short_digest
from suite import exhibit
from suite.claims import Judged, Row, View, kind_of
from suite.identity import sha256_json
from suite.study import Study

STALE_MARK = "†"  # set by a study beside single results


def study_report(
    study: Study, view: View, judged: Sequence[Judged], plan_counts: Mapping[str, int], commit: str, soak: Mapping | None = None
) -> blocks.Report:
    """The whole report of one study. `plan_counts` is Plan.counts() of the invocation at hand, `soak` the record of the long tests."""
    shown, names = study.exhibits(view), device_names(view.rows_)
    parts: list = [blocks.Prose(text=study.summary), key_facts(view, plan_counts, soak)]
    leading = next(
        (i for i, e in enumerate(shown) if not isinstance(e, exhibit.Matrix)), len(shown)
    )  # the matrices that a study puts first stand above its claims
    parts += [drawn for e in shown[:leading] for drawn in draw(e, commit, names)]
    parts += ledger(study, judged, commit, names)
    parts += [drawn for e in shown[leading:] for drawn in draw(e, commit, names)]
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
    stale = sum(r.stale for r in view.rows_)
    planned = ", ".join(f"{n} {state.lower()}" for state, n in sorted(plan_counts.items()))
    return blocks.KeyFacts(
        items=(
            blocks.KeyFact(label="Cells planned here", value=str(sum(plan_counts.values())), detail=planned),
            blocks.KeyFact(
                label="Results shown",
                value=str(len(view.rows_)),
                detail=", ".join([f"{n} {k}" for k, n in sorted(kinds.items())] + [f"{stale} STALE: with other code"] * bool(stale)),
            ),
            blocks.KeyFact(label="Where from", value=", ".join(f"{n} {o}" for o, n in sorted(origins.items())) or "none"),
            _soak_fact(soak),
            *(blocks.KeyFact(label="Machine", value=clean(device), detail=f"{n} results") for device, n in sorted(machines.items())),
        )
    )


def _soak_fact(soak: Mapping | None) -> blocks.KeyFact:
    """How old the harness's last long test is: a reader may weigh the numbers by it."""
    if soak is None:
        return blocks.KeyFact(label="Long tests", value="never recorded")
    outcomes = Counter(t["outcome"] for t in soak["tests"].values())
    return blocks.KeyFact(
        label="Long tests",
        value=", ".join(f"{n} {o}" for o, n in sorted(outcomes.items())),
        detail=f"{soak['date']}, commit {short_digest(soak['commit'])}",
    )


def ledger(study: Study, judged: Sequence[Judged], commit: str, names: Mapping[str, str]) -> list:
    directions = {c.id: c.direction for c in study.claims}
    rows = tuple(claim_row(j, directions[j.id], names) for j in judged)
    if not rows:
        return []
    out: list = [blocks.Heading(level=2, text="Claims"), blocks.ClaimLedger(rows=rows)]
    drawable = [j for j in judged if j.value is not None and j.value > 0 and j.low is not None and j.low > 0 and j.bar]
    run_ids = tuple(dict.fromkeys(i for j in drawable for i in j.run_ids))
    if drawable and run_ids:
        plot = figures.claims_plot(
            blocks.ClaimLedger(rows=tuple(claim_row(j, directions[j.id], names) for j in drawable)),
            caption="Claims against our bar: right of 1 is better" + _mark(sum(j.stale for j in drawable), len(drawable)),
            run_ids=run_ids,
            commit=commit,
        )
        out.append(plot)
    return out


def claim_row(j: Judged, direction: str, names: Mapping[str, str]) -> blocks.ClaimRow:
    """A judged claim as the ledger prints it."""
    measured = j.value is not None
    return blocks.ClaimRow(
        study=j.study,
        id=j.id,
        statement=j.statement,
        verdict=j.verdict,
        command=j.command or f"suite run {j.study}",
        target=j.target,
        bar=j.bar,
        bar_met=j.bar_met,
        value=j.value,
        low=j.low,
        high=j.high,
        unit=j.unit,
        n=j.n if measured else None,
        kind=j.kind if measured else "",
        machine=", ".join(names.get(m, m) for m in j.machine.split(", ")) if measured else "",
        commit=j.commit if measured else "",
        stale=j.stale,
        direction=direction,
        note=j.note,
    )


# ---------------------------------------------------------------- exhibits


def draw(item, commit: str, names: Mapping[str, str]) -> list:
    """One exhibit as blocks. `names`: the short name of each device."""
    if isinstance(item, exhibit.Prose):
        return [*([blocks.Heading(level=2, text=item.heading)] if item.heading else []), blocks.Prose(text=item.text)]
    sources = list(item.sources)
    heading = [blocks.Heading(level=2, text=shortened(item.title, names))]
    if isinstance(item, exhibit.Matrix):
        return heading + [_matrix(item, sources, commit, names)]
    if isinstance(item, exhibit.Curves):
        note = " ".join(filter(None, (item.note, stale_note(sources))))
        return [*heading, _curves(item, sources, commit, names), *([blocks.Prose(text=note)] if note else [])]
    if isinstance(item, exhibit.Table):
        return heading + [_table(item, sources, names)]
    raise ValueError(f"an exhibit is one of suite.exhibit, got {type(item).__name__}")


# ---------------------------------------------------------------- what other code measured


def stale_note(sources: Sequence[Row], marked: bool = False) -> str:
    """How many of the results behind an exhibit were measured with other code than today's; "" for none. `marked`: its cells say which."""
    stale = sum(r.stale for r in sources)
    mark = f", those of the cells marked {STALE_MARK}" if marked else ""
    return f"STALE: {stale} of the {len(sources)} results behind it were measured with other code than today's{mark}." if stale else ""


def _mark(stale: int, of: int) -> str:
    """What a caption says of it."""
    return "" if not stale else " (STALE)" if stale == of else " (STALE in part)"


def _caption(title: str, sources: Sequence[Row], names: Mapping[str, str]) -> str:
    return shortened(title, names) + _mark(sum(r.stale for r in sources), len(sources))


def _run_ids(sources: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.run_id for r in sources))


def _commits(sources: Sequence[Row], commit: str) -> str:
    """The commits that measured: one, or all of them where rows of several are shown side by side."""
    found = sorted({f"{r.commit}-dirty" if r.dirty else r.commit for r in sources})
    return ", ".join(found) or commit


def _machines(sources: Sequence[Row], names: Mapping[str, str]) -> str:
    return ", ".join(sorted({names.get(r.device, r.device) for r in sources}))


def _matrix(item: exhibit.Matrix, sources: Sequence[Row], commit: str, names: Mapping[str, str]) -> blocks.Matrix:
    kind = kind_of(sources)
    groups = [(names.get(device, device), comma, schedule) for device, comma, schedule in (label.partition(", ") for label in item.column_labels)]
    runs: list[list] = []
    for device, _, _ in groups:
        if runs and runs[-1][0] == device:
            runs[-1][1] += 1
        else:
            runs.append([device, 1])
    marked = any(STALE_MARK in c.text for row in item.cells for c in row)
    note = " ".join(filter(None, (item.note, stale_note(sources, marked))))
    return blocks.Matrix(
        caption=_caption(item.title, sources, names),
        row_labels=item.row_labels,
        column_labels=[schedule or device for device, _, schedule in groups],
        cells=[[blocks.MatrixCell(state=c.state, text=c.text, detail=c.detail) for c in row] for row in item.cells],
        column_kinds=[kind] * len(item.column_labels),
        column_groups=[blocks.Group(label=d, size=n) for d, n in runs],
        run_ids=_run_ids(sources),
        commit=_commits(sources, commit),
        note=note,
        legend=tuple(item.legend.items()),
        counted=item.counted,
    )


def _curves(item: exhibit.Curves, sources: Sequence[Row], commit: str, names: Mapping[str, str]) -> blocks.Figure:
    source = figures.Source(run_ids=_run_ids(sources), commit=_commits(sources, commit), kind=kind_of(sources), machine=_machines(sources, names))
    series = [figures.Series(label=s.name, x=s.x, y=_y(s)) for s in item.series]
    alt = f"{item.y_label} over {item.x_label}: " + "; ".join(f"{s.name} from {s.y[0]:.3g} to {s.y[-1]:.3g}" for s in item.series)
    return figures.line_curves(
        caption=_caption(item.title, sources, names),
        alt=alt,
        series=series,
        x_label=item.x_label,
        y_label=item.y_label,
        source=source,
        log_y=item.log_y,
        reference=item.reference,
    )


def _y(series: exhibit.Series) -> tuple:
    if not series.low:
        return tuple(series.y)
    return tuple(Interval(value=v, low=a, high=b) for v, a, b in zip(series.y, series.low, series.high, strict=True))


def _table(item: exhibit.Table, sources: Sequence[Row], names: Mapping[str, str]) -> blocks.Table:
    rows = [[_cell(value, names) for value in row] for row in item.rows]
    numeric = [any(isinstance(row[i], (int, float, Interval)) for row in rows) for i in range(len(item.columns))]
    columns = [blocks.Column(name=c.name, unit=c.unit or None, align="right" if n else "left") for c, n in zip(item.columns, numeric, strict=True)]
    marked = any(isinstance(value, str) and STALE_MARK in value for row in item.rows for value in row)
    note = " ".join(filter(None, (item.note, stale_note(sources, marked))))
    return blocks.Table(
        caption=_caption(item.title, sources, names),
        columns=columns,
        rows=rows,
        kind=kind_of(sources) if sources or any(numeric) else "",
        machine=_machines(sources, names),
        note=note,
    )


def _cell(value, names: Mapping[str, str]):
    if value is None or value == "NOT MEASURED HERE":
        return NOT_MEASURED_HERE
    if isinstance(value, tuple):
        v, low, high = value
        return Interval(value=v, low=low, high=high)
    return names.get(value, value) if isinstance(value, str) else value


def provenance(study: Study, view: View) -> blocks.Provenance:
    machines, packages = {}, {}
    for row in view.rows_:
        e = row.environment
        machines[row.device] = f"driver {e['driver']}" if e.get("driver") else str(e.get("os") or "?")
        packages.setdefault("torch", set()).add(str(e.get("torch", "?")))
        packages.setdefault("triton", set()).add(str(e.get("triton", "?")))
        packages.setdefault("Python", set()).add(str(e.get("python", "?")))
    return blocks.Provenance(
        commands=(f"python -m suite run {study.name}", f"python -m suite report {study.name}"),
        packages=tuple((name, ", ".join(sorted(v))) for name, v in sorted(packages.items())),
        machines=tuple(sorted(machines.items())),
    )
