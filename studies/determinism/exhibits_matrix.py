"""The matrix of linear layers: which implementation has equal bits on which device and schedule, and how far off the others are.

    matrices(view)          # [Matrix, ...]: at most MAX_COLUMNS columns each, a device never split

An implementation is judged only where its authors promise equal bits; elsewhere its cell reads "not claimed" and carries what was
measured. An exact family is compared with its CPU oracle. The others are compared with their own result for 64 rows: on the same GPU
where their authors speak of GPUs alone, else on the CPU at hand, or on the same device where they were not run on that CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from studies.determinism.bits import FAMILIES, equal_operators, oracle_digests
from studies.determinism.shown import STALE, TITLES, by_device, counted
from suite.claims import Row, View
from suite.exhibit import Column, Matrix, MatrixCell, Prose, Table

# implementation -> devices on which its authors promise bits that no batch size and no schedule changes; LayerCast's also across GPUs
CLAIMS = {
    "fma": ("cpu", "cuda"), "integer": ("cpu", "cuda"), "integer-b9": ("cpu", "cuda"), "layercast": ("cuda",), "batch-invariant": ("cuda",),
    "sgemm": (), "tf32": (), "bf16": (),
}  # fmt: skip
TITLE = "Do the bits of a linear layer depend on the device, the batch or the schedule?"
MAX_COLUMNS = 10
_FIELDS = ("rows", "chunk_rows", "threads")
NOTE = (
    "Operators are linear layers with real weights and activations, and ragged shapes; for fma also RMSNorm, SiLU and SwiGLU. An exact "
    "family is compared with its CPU oracle. "
    "LayerCast, whose authors claim GPUs, and the batch-invariant GEMM, whose authors claim batch sizes on one GPU, are compared with their "
    "own result for 64 rows on that GPU. "
    "Not claimed: the authors promise nothing there; the figure is what was measured, against the implementation's own result for 64 rows on "
    "this CPU, or on the same device where it was not run on this CPU. "
    "Figures: equal operators of those that have a reference here, and of all where some have none. "
    "Reference: what the implementation's other cells are compared with."
)
Belongs = Callable[[Row], bool]
Digests = Mapping[str, Mapping[str, str]]


def matrices(view: View) -> list:
    rows = view.rows(measure="operators")
    if not rows:
        return [Prose(heading=TITLE, text="NOT MEASURED HERE: no implementation was compared with the CPU oracle.")]
    cpu = next(
        (r.device for r in rows if r.params["device"] == "cpu" and r.origin == "here"),
        next((r.device for r in rows if r.params["device"] == "cpu"), ""),
    )
    packs = packed([(device, columns(found)) for device, found in _cpus_first(rows)])
    return [_matrix(view, pack, cpu, f"{TITLE} ({i} of {len(packs)})" if len(packs) > 1 else TITLE) for i, pack in enumerate(packs, 1)]


def _cpus_first(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Devices with their rows: the CPU at hand, other CPUs, GPUs."""
    return sorted(by_device(rows), key=lambda item: (item[1][0].params["device"] != "cpu", item[1][0].origin != "here", item[0]))


def columns(rows: Sequence[Row]) -> list[tuple[str, Belongs]]:
    """(label, which rows) of one device: every schedule of the study, and last all of the kernels' own schedules together."""
    out: dict[str, Belongs] = {}
    for row in sorted((r for r in rows if not r.params["kernel"]), key=lambda r: [r.params[k] for k in ("chunk_rows", "threads", "rows")]):
        p = row.params
        words = (
            f"batch {p['rows']}"
            + (f" in pieces of {p['chunk_rows']}" if p["chunk_rows"] else "")
            + (f", {p['threads']} thread" if p["threads"] else "")
        )
        out.setdefault(f"{row.device}, {words}", _same_schedule(row))
    own = [r for r in rows if r.params["kernel"]]
    if own:
        device = own[0].device
        out[f"{device}, kernel schedules"] = lambda r: r.device == device and bool(r.params["kernel"])
    return list(out.items())


def _same_schedule(row: Row) -> Belongs:
    wanted = [row.params[k] for k in _FIELDS]
    return lambda r: r.device == row.device and not r.params["kernel"] and [r.params[k] for k in _FIELDS] == wanted


def packed(devices: Iterable[tuple[str, list]]) -> list[list]:
    """Columns of whole devices, joined while at most MAX_COLUMNS stand side by side; a device with more is cut."""
    packs: list[list] = [[]]
    for _, found in devices:
        pieces = [found[i : i + MAX_COLUMNS] for i in range(0, len(found), MAX_COLUMNS)]
        for piece in pieces:
            if packs[-1] and len(packs[-1]) + len(piece) > MAX_COLUMNS:
                packs.append([])
            packs[-1] += piece
    return [p for p in packs if p]


def _matrix(view: View, shown: Sequence[tuple[str, Belongs]], cpu: str, title: str) -> Matrix:
    rows = view.rows(measure="operators")
    cells, used = [], []
    for impl in CLAIMS:
        line = []
        for _, belongs in shown:
            found = [r for r in rows if r.params["impl"] == impl and belongs(r)]
            source, digests = reference(view, impl, found[0].device, cpu) if found else (None, {})
            used += [r for r in (source, *found) if r is not None and r not in used]
            line.append(cell(found, impl, source, digests))
        cells.append(line)
    return Matrix(
        title=title, row_labels=[TITLES[i] for i in CLAIMS], column_labels=[label for label, _ in shown], cells=cells, note=NOTE, sources=used
    )


def cell(rows: Sequence[Row], impl: str, source: Row | None, digests: Digests) -> MatrixCell:
    """One implementation on one column's rows (several for kernel schedules), against `digests` of the row `source`."""
    if not rows:
        return counted(0, 0, 0, None)
    equal, compared, absent = (sum(x) for x in zip(*(equal_operators(r, digests) for r in rows), strict=True))
    runs = f"in {len(rows)} runs, " if len(rows) > 1 else ""
    oldest = next((r for r in (*rows, source) if r is not None and r.stale), rows[0])
    found = counted(equal, compared, absent, oldest, f"{runs}at most {max(r.metrics['max_ulp'] for r in rows):.0f} ULP from the oracle")
    if list(rows) == [source]:
        found = replace(found, text="reference" + STALE * source.stale)
    claimed = rows[0].params["device"] in CLAIMS[impl]
    return found if claimed or found.state == "not_measured" else replace(found, state="not_claimed")


def reference(view: View, impl: str, device: str, cpu: str) -> tuple[Row | None, Digests]:
    """The row that the implementation is compared with on this device, and its operator -> {rows: digest}."""
    if impl in FAMILIES:
        return oracle_digests(view, impl)
    plain = {"impl": impl, "rows": 64, "chunk_rows": 0, "threads": 0, "kernel": {}}
    own = {r.device: r for r in reversed(view.rows(measure="operators", where=plain))}
    chosen = own.get(device) if CLAIMS[impl] and device != cpu else own.get(cpu) or own.get(device)
    return chosen, {r["operator"]: r["digests"] for r in chosen.record("operators")} if chosen else {}


# ---- the tables under it -------------------------------------------------------------------------------------------------------


def differences(view: View) -> list:
    """Against the exact result: how far each implementation is off, by device."""
    rows = []
    for impl, title in TITLES.items():
        for device, found in by_device(view.rows(measure="operators", where={"impl": impl})):
            total = {name: int(sum(r.metrics[name] for r in found)) for name in ("operators", "equal_operators", "differing", "elements")}
            rows.append((title, device, len(found), *total.values(), int(max(r.metrics["max_ulp"] for r in found))))
    if not rows:
        return []
    names = ("implementation", "device", "schedules", "results", "equal", "differing elements", "elements", "max ULP")
    return [
        Table(
            title="Against the exact CPU oracle, over all schedules",
            columns=[Column(name=n) for n in names],
            rows=rows,
            sources=view.rows(measure="operators"),
            note="Each exact family against its own oracle, the others against fma's. 16-bit results are compared after rounding the oracle "
            "to bf16; its ULP is 65,536 times larger than fp32's.",
        )
    ]


def schedules(view: View) -> list:
    """The exact families under every schedule that their kernels have."""
    found = [r for r in view.rows(measure="operators") if r.params["kernel"] and r.params["impl"] in CLAIMS]
    if not found:
        return []
    several, rows = len({r.device for r in found}) > 1, []
    for r in sorted(found, key=lambda r: (list(CLAIMS).index(r.params["impl"]), r.params["kernel"]["kind"], r.params["rows"], r.label, r.device)):
        choices = ", ".join(f"{k} {v}" if not isinstance(v, bool) else k if v else f"no {k}" for k, v in r.params["kernel"].items() if k != "kind")
        line = (TITLES[r.params["impl"]], r.params["kernel"]["kind"].replace("_", " "), r.params["rows"], choices, *([r.device] if several else []))
        rows.append((*line, int(r.metrics["operators"]), int(r.metrics["equal_operators"]), int(r.metrics["max_ulp"])))
    names = ("family", "kernel", "M", "schedule", *(["device"] if several else []), "operators", "equal", "max ULP")
    return [Table(title="The exact families under every kernel schedule", columns=[Column(name=n) for n in names], rows=rows, sources=found)]
