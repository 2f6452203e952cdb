"""What the determinism report shows: the matrix, what differs by how much, and the timing curves.

An implementation is judged only on the devices for which its authors promise equal bits; elsewhere its
cell reads "not claimed" and carries what was measured. Its reference is its own result for 64 rows: on
the same GPU where its authors claim GPUs alone, on this CPU in every other cell.
"""

from __future__ import annotations

from collections.abc import Callable

from studies.determinism.bits import oracle_digests
from studies.determinism.speed import decode_contests
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Matrix, MatrixCell, Prose, Series, Table
from suite.stats import ratio_interval

# name, title, devices across which its authors promise equal bits (at any batch size)
IMPLEMENTATIONS = (("fma", "fma (ours)", ("cpu", "cuda")), ("layercast", "LayerCast", ("cuda",)), ("sgemm", "fp32 SGEMM", ()), ("bf16", "bf16 GEMM", ()))
CPU_FAMILIES = ("Xeon", "EPYC", "Ryzen", "Core", "Threadripper")


def exhibits(view: View) -> list:
    return [*matrix(view), *differences(view), *schedules(view), *decode(view), *eager(view), *prefill(view)]


# ---------------------------------------------------------------- the matrix


def columns(view: View) -> list[tuple[str, Callable[[Row], bool]]]:
    """(label, which rows) for each device and schedule that was run without kernel choices."""
    out: dict[str, Callable[[Row], bool]] = {}
    for row in sorted(view.rows(measure="operators"), key=lambda r: (r.params["device"], r.device, r.params["chunk_rows"], r.params["threads"], r.params["rows"])):
        if row.params["kernel"]:
            continue
        p = row.params
        label = f"{short(row)}, batch {p['rows']}" + (f" in pieces of {p['chunk_rows']}" if p["chunk_rows"] else "") + (f", {p['threads']} thread" if p["threads"] else "")
        out.setdefault(label, _same_column(row))
    return list(out.items())


def _same_column(row: Row) -> Callable[[Row], bool]:
    keys = ("device", "rows", "chunk_rows", "threads")
    wanted = [row.params[k] for k in keys]
    return lambda r: r.device == row.device and not r.params["kernel"] and [r.params[k] for k in keys] == wanted


def short(row: Row) -> str:
    """A device's name as a column can show it."""
    if row.params.get("device") == "cuda":
        return row.device.replace("NVIDIA ", "")
    if row.origin == "here":
        return "this CPU"
    return next((name for name in CPU_FAMILIES if name in row.device), "other")


def references(view: View, impl: str, device: str) -> dict[str, dict[str, str]]:
    """operator -> {rows: digest} of the implementation itself at 64 rows on this device."""
    for row in view.rows(measure="operators", where={"impl": impl, "rows": 64, "chunk_rows": 0, "threads": 0, "kernel": {}}):
        if row.device == device:
            return {r["operator"]: r["digests"] for r in row.record("operators")}
    return {}


def matrix(view: View) -> list:
    shown, rows = columns(view), view.rows(measure="operators")
    if not shown:
        return []
    cpu = next((r.device for r in rows if r.params["device"] == "cpu" and r.origin == "here"), next((r.device for r in rows if r.params["device"] == "cpu"), ""))
    cells, used = [], []
    for impl, _, claims in IMPLEMENTATIONS:
        line = []
        for _, belongs in shown:
            row = next((r for r in rows if r.params["impl"] == impl and belongs(r)), None)
            used += [row] if row else []
            line.append(cell(view, row, impl, claims, cpu))
        cells.append(line)
    note = ("Each cell compares every operator (linear layers with real weights and activations, ragged shapes) with the same implementation's own result for 64 rows on this CPU; "
            "for LayerCast on a GPU, whose authors claim GPUs alone, with its result on that GPU. Not claimed: its authors promise nothing there; the figure is what was measured, equal operators of all.")
    return [Matrix(title="Do the bits depend on the device, the batch or the schedule?", row_labels=[t for _, t, _ in IMPLEMENTATIONS], column_labels=[label for label, _ in shown], cells=cells, note=note, sources=used)]


def cell(view: View, row: Row | None, impl: str, claims: tuple[str, ...], cpu: str) -> MatrixCell:
    if row is None:
        return MatrixCell(state="not_measured", text="", detail="no run")
    claimed = row.params["device"] in claims
    reference = oracle_digests(view)[1] if impl == "fma" else references(view, impl, row.device if claimed and "cpu" not in claims else cpu)
    if not reference:
        return MatrixCell(state="not_measured", detail="there is nothing to compare with: its reference was not run")
    rows, records = str(row.params["rows"]), row.record("operators")
    equal = sum(reference.get(r["operator"], {}).get(rows) == r["digest"] for r in records)
    text, detail = f"{equal}/{len(records)}", f"{equal} of {len(records)} operators equal, largest distance to the oracle {row.metrics['max_ulp']:.0f} ULP"
    if not claimed:
        return MatrixCell(state="not_claimed", text=text, detail=detail)
    state = "equal" if equal == len(records) else "partial" if equal else "differs"
    return MatrixCell(state=state, text=text, detail=detail)


def differences(view: View) -> list:
    """Against the exact result: how far each implementation is off, by device."""
    rows = []
    for impl, title, _ in IMPLEMENTATIONS:
        for device in sorted({r.device for r in view.rows(measure="operators", where={"impl": impl})}):
            found = [r for r in view.rows(measure="operators", where={"impl": impl}) if r.device == device]
            total = lambda name: sum(r.metrics[name] for r in found)  # noqa: E731
            rows.append((title, short(found[0]), len(found), int(total("operators")), int(total("equal_operators")), int(total("differing")), int(total("elements")), int(max(r.metrics["max_ulp"] for r in found))))
    if not rows:
        return []
    names = ("implementation", "device", "schedules", "results", "equal", "differing elements", "elements", "max ULP")
    return [Table(title="Against the exact CPU oracle, over all schedules", columns=[Column(name=n) for n in names], rows=rows, sources=view.rows(measure="operators"),
                  note="bf16 results are compared after rounding the oracle to bf16; its ULP is 65,536 times larger than fp32's.")]


def schedules(view: View) -> list:
    found = [r for r in view.rows(measure="operators", where={"impl": "fma"}) if r.params["kernel"]]
    if not found:
        return []
    rows = []
    for r in sorted(found, key=lambda r: (r.params["kernel"]["kind"], r.params["rows"], r.label)):
        choices = ", ".join(f"{k} {v}" if not isinstance(v, bool) else k for k, v in r.params["kernel"].items() if k != "kind")
        rows.append((r.params["kernel"]["kind"], r.params["rows"], choices, short(r), int(r.metrics["operators"]), int(r.metrics["equal_operators"]), int(r.metrics["max_ulp"])))
    names = ("kernel", "M", "schedule", "device", "operators", "equal", "max ULP")
    return [Table(title="fma under every kernel schedule", columns=[Column(name=n) for n in names], rows=rows, sources=found)]


# ---------------------------------------------------------------- timing


def contest_rows(view: View, where: dict) -> list[Row]:
    return view.rows(measure="linear", where=where)


def over_processes(rows: list[Row], metric: str) -> tuple[float, float, float] | None:
    values = list({r.environment.get("process", r.bundle_id): r.metrics[metric] for r in rows if metric in r.metrics}.values())
    if len(values) < 2:
        return None
    i = ratio_interval(values)
    return i.value, i.low, i.high


def median_us(rows: list[Row], variant: str) -> float | None:
    values = sorted(r.metrics[f"{variant}_us"] for r in rows if f"{variant}_us" in r.metrics)
    return values[len(values) // 2] if values else None


def decode(view: View) -> list:
    table, series, used = [], {}, []
    for where in decode_contests((1, 2, 4, 8, 16)):
        rows = contest_rows(view, where)
        if not rows:
            continue
        used += rows
        shape = f"{where['n']}x{where['k']}"
        ratios = {v: over_processes(rows, f"log_ratio_{v}") for v in ("layercast", "sgemm", "bf16")}
        table.append((shape, where["rows"], median_us(rows, "fma"), over_processes(rows, "log_bandwidth_share"), ratios["layercast"], ratios["sgemm"], ratios["bf16"], len(rows)))
        for v, ratio in ratios.items():
            if ratio:
                series.setdefault(f"{v}, {shape}", []).append((where["rows"], *ratio))
    if not table:
        return [Prose(heading="Timing", text="NOT MEASURED HERE: timing needs a GPU, and no published timing of this code is present.")]
    names = (Column(name="shape NxK"), Column(name="M"), Column(name="fma", unit="us"), Column(name="share of copy bandwidth"), Column(name="LayerCast / fma", unit="x"), Column(name="SGEMM / fma", unit="x"),
             Column(name="bf16 / fma", unit="x"), Column(name="processes"))
    curves = [Series(name=name, x=[p[0] for p in points], y=[p[1] for p in points], low=[p[2] for p in points], high=[p[3] for p in points]) for name, points in series.items()]
    return [Table(title="Decode: y = x W, weights rotated past the L2, CUDA graphs", columns=names, rows=table, sources=used, note="A ratio above 1: fma is faster. Intervals over process starts, Student-t."),
            Curves(title="How much faster than the others, by batch", x_label="tokens M", y_label="time ratio to fma", series=curves, log_x=True, log_y=True, reference=(1.0, "parity"), sources=used)]


def eager(view: View) -> list:
    """The same programs launched call by call: what a user without CUDA graphs sees, launch costs included."""
    table, used = [], []
    for where in decode_contests((1,)):
        rows = [r for r in contest_rows(view, where) if "fma_eager_us" in r.metrics]
        if rows:
            used += rows
            table.append((f"{where['n']}x{where['k']}", *(median_us(rows, f"{v}_eager") for v in ("fma", "layercast", "sgemm", "bf16")), len(rows)))
    if not table:
        return []
    names = (Column(name="shape NxK"), *(Column(name=n, unit="us") for n in ("fma", "LayerCast", "fp32 SGEMM", "bf16")), Column(name="processes"))
    return [Table(title="Decode at M = 1 without CUDA graphs", columns=names, rows=table, sources=used,
                  note="Medians over processes. One call on an idle device pays for its launch; the Triton launcher costs fma more than its kernel takes, so use CUDA graphs.")]


def prefill(view: View) -> list:
    table, used = [], []
    for m in (512, 4096):
        rows = contest_rows(view, {"rows": m, "n": 4096, "k": 4096})
        if not rows:
            continue
        used += rows
        us = median_us(rows, "fma")
        table.append((m, us, 2 * m * 4096 * 4096 / us / 1e6, *(over_processes(rows, f"log_ratio_{v}") for v in ("sgemm", "layercast", "bf16"))))
    if not table:
        return []
    names = (Column(name="M"), Column(name="fma", unit="us"), Column(name="fma", unit="TFLOP/s"), Column(name="SGEMM / fma", unit="x"), Column(name="LayerCast / fma", unit="x"), Column(name="bf16 / fma", unit="x"))
    return [Table(title="Prefill, 4096x4096 weights", columns=names, rows=table, sources=used, note="Below 1: the other is faster.")]
