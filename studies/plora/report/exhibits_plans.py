"""Plans: the cost model's residuals, memory, planners' regret and gaps, makespans from step times, clusters that are not here.

    plans(view)             # [Table, ...]; one sentence where nothing was planned

Simulated and replayed numbers stand in tables of their own, each with its kind in the title.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from suite.claims import Row, View
from suite.exhibit import Column, Prose, Table

PLANNERS = ("exact", "chunks", "lpt", "fifo", "dtm", "sequential")


def plans(view: View) -> list:
    parts = [*residuals(view), *regrets(view), *gaps(view), *makespans(view), *clusters(view)]
    return parts or [Prose(heading="Plans", text="NOT MEASURED HERE: no planner was run.")]


def _model(row: Row) -> str:
    """The row's model by its label's last word: params hold its whole shape."""
    return row.label.split()[-1]


def residuals(view: View) -> list:
    out: list = []
    for row in view.rows(measure="cost_model"):
        lines = sorted(row.record("residuals"), key=lambda x: (x["part"] != "holdout", x["measured_s"]))
        shown = [("held out" if x["part"] == "holdout" else "fitted", x["tokens"], _slots(x["slots"]), x["measured_s"] * 1e3, x["predicted_s"] * 1e3, x["error"]) for x in lines]
        columns = [Column(name="part"), Column(name="tokens"), Column(name="slots: rank x rows"), Column(name="measured", unit="ms"), Column(name="predicted", unit="ms"), Column(name="predicted over measured, less 1")]
        out.append(Table(title=f"Cost model of {_model(row)}: residuals", columns=columns, rows=shown, sources=[row], note=f"Mean absolute error of held-out compositions {row.metrics['mape']:.1%}."))
    rows = view.rows(measure="memory_model")
    lines = [(_model(r), r.metrics["memory_mape"], r.device) for r in rows if "memory_mape" in r.metrics]
    out += [Table(title="Memory model on held-out compositions", columns=[Column(name="model"), Column(name="mean absolute error"), Column(name="device")], rows=lines, sources=rows)] if lines else []
    return out


def _slots(slots: Sequence[Sequence[int]]) -> str:
    """Equal slots together: "4 of 64 x 2, 1 of 8 x 1"."""
    counts = Counter(tuple(s) for s in slots)
    return ", ".join(f"{n} of {rank} x {rows}" for (rank, rows), n in counts.items())


def regrets(view: View) -> list:
    out = []
    for row in view.rows(measure="regret"):
        lines = row.record("planners")
        shown = [(line["case"], line["gpus"], line["limit_bytes"] / 1e9, line["planner"], "does not fit" if line["regret"] is None else line["regret"], line["gap"], line["plans"]) for line in lines]
        columns = [Column(name="case"), Column(name="GPUs"), Column(name="memory", unit="GB"), Column(name="planner"), Column(name="regret", unit="x"), Column(name="predicted above the exact plan's"), Column(name="plans")]
        out.append(Table(title=f"Planners' regret on measured step times, {_model(row)}, {row.kind}", columns=columns, rows=shown, sources=[row], note="The chosen plan's time over the best of all plans', both by measured step times."))
    return out


def gaps(view: View) -> list:
    rows = view.rows(measure="gaps")
    lines = []
    for row in rows:
        found: dict[str, list[dict]] = {}
        for line in row.record("planners"):
            found.setdefault(line["planner"], []).append(line)
        lines += [(_model(row), planner, sum(x["gap"] for x in of) / len(of), max(x["gap"] for x in of), max(x["bound_ratio"] for x in of), len(of)) for planner, of in found.items()]
    columns = [Column(name=n) for n in ("model", "planner", "above the exact plan, mean", "the most", "over the lower bound, the most", "cases")]
    return [Table(title="Planners under one cost model, simulated", columns=columns, rows=lines, sources=rows, note=_assumed(rows))] if lines else []


def _assumed(rows: Sequence[Row]) -> str:
    return "Under an assumed H200 of data-sheet rates; it says how planners differ, not how long training takes." if any("assumed" in r.label for r in rows) else ""


def makespans(view: View) -> list:
    rows = view.rows(measure="makespan")
    lines = [(r.label.split()[-1], arm["arm"], arm["makespan_s"], arm.get("busy_share"), arm["makespan_s"] / r.metrics["makespan_s"]) for r in rows for arm in r.record("makespans")]
    columns = [Column(name="rows of"), Column(name="arm"), Column(name="makespan", unit="s"), Column(name="busy share"), Column(name="over packed", unit="x")]
    return [Table(title="The paper's 120 configurations, 8 GPUs, simulated from measured step times", columns=columns, rows=lines, sources=rows)] if lines else []


def clusters(view: View) -> list:
    out = []
    for row in view.rows(measure="clusters"):
        lines = [(x["gpus"], x["planner"], x["tail"], x["makespan_s"], x["over_sequential"], x["busy_share"]) for x in row.record("planners")]
        columns = [Column(name="GPUs"), Column(name="planner"), Column(name="an adapter that is done"), Column(name="makespan", unit="s"), Column(name="faster than one a job", unit="x"), Column(name="busy share")]
        out.append(Table(title=f"Clusters that are not here, {_model(row)}, simulated", columns=columns, rows=lines, sources=[row], note=_assumed([row])))
    return out
