"""Time of one linear layer: decode by batch with its floors, prefill, calls without graphs, and bytes by the profiler. One GPU model at a time.

    decode(view)            # [Table, Curves, ...] for each GPU model; one sentence where nothing was timed

Ratios are read inside one process and their intervals are over process starts. A floor is what a variant must move over the bandwidth of a
copy measured in the same contest; it is read from fma's share of that bandwidth, so it needs no data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.determinism.fresh import fresh
from studies.determinism.shown import TITLES, Ratio, by_device, middle, of_device, over_processes, processes
from studies.determinism.speed import DECODE_SHAPES, by_process, families, is_compiled
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table

FLOOR_BYTES = {
    "fma": 2,
    "integer": 2,
    "layercast": 10,
    "sgemm": 4,
    "bf16": 2,
    "bf16_padded": 2,
    "bf16_compiled": 2,
}  # a weight in decode; a test holds them to contests.BYTES
OTHERS = tuple(v for v in FLOOR_BYTES if v != "fma")
DECODE_ROWS, PREFILL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 1024, 2048, 4096, 8192)
EAGER = ("fma", "layercast", "sgemm", "bf16")
PREFILL = ("fma", "integer", "integer-b9", "layercast", "sgemm", "bf16")
ERRORS = ("fma", "integer", "sgemm")  # whose error a contest reads
EXACT_SUMS = "inputs whose sums are exact"
Group = tuple[int, list[Row]]  # M and its contests
COMPILED = ("layercast_compiled", "bf16_compiled")


def contests(view: View, compiled: bool = False) -> list[tuple[str, list[Row]]]:
    """(GPU model, its contests); those of compiled programs are contests of their own."""
    return by_device([r for r in view.rows(measure="linear") if is_compiled(r) == compiled])


def of_shape(rows: Sequence[Row], m: int, n: int, k: int) -> list[Row]:
    """The contests of a shape, of today's code where there are any."""
    return fresh(r for r in rows if (r.params["rows"], r.params["n"], r.params["k"]) == (m, n, k))


def log_ratio(variant: str, baseline: str):
    """ln(time of `variant` / time of `baseline`) of one row; contests keep ratios to fma."""

    def value(row: Row) -> float | None:
        logs = {"fma": 0.0, **{v: row.metrics.get(f"log_ratio_{v}") for v in row.params["variants"] if v != "fma"}}
        a, b = logs.get(variant), logs.get(baseline)
        return None if a is None or b is None else a - b

    return value


def time_us(variant: str):
    return lambda row: row.metrics.get(f"{variant}_us")


def floor_us(variant: str):
    """What the variant must move, at the bandwidth of the copy in the same contest."""

    def value(row: Row) -> float | None:
        share, us = row.metrics.get("log_bandwidth_share"), row.metrics.get("fma_us")
        return None if share is None or us is None else us * math.exp(share) * FLOOR_BYTES[variant] / FLOOR_BYTES["fma"]

    return value


# ---- decode --------------------------------------------------------------------------------------------------------------------


def decode(view: View) -> list:
    devices = contests(view)
    judged = families(view, ("decode_vs_layercast", "decode_vs_fp32_stored", "decode_vs_bf16"))
    out = [part for device, rows in devices for n, k in DECODE_SHAPES for part in _decode_shape(device, rows, n, k, devices, judged)]
    return out or [
        Prose(heading="Time of one linear layer", text="NOT MEASURED HERE: timing needs a GPU, and no published timing of this code is present.")
    ]


def _decode_shape(device: str, rows: Sequence[Row], n: int, k: int, devices: Sequence, judged: str) -> list:
    groups = [(m, found) for m in DECODE_ROWS if (found := of_shape(rows, m, n, k))]
    if not groups:
        return []
    used = [r for _, found in groups for r in found]
    known = [v for v in OTHERS if any(v in r.params["variants"] for r in used)]
    prefix = of_device(f"Decode, weights {n}x{k}", device, devices)
    return [
        _times(f"{prefix}: time", groups, ("fma", *known), used),
        _ratios(f"{prefix}: time of the others over fma", groups, known, used, judged),
        *_ratio_curve(f"{prefix}: how much faster fma is, by batch", groups, known, used),
    ]


def _times(title: str, groups: Sequence[Group], known: Sequence[str], used: Sequence[Row]) -> Table:
    """Times by batch under their floors, and how near fma comes to its own."""
    lines = [("floor", *(middle(groups[0][1], floor_us(v)) for v in known), "1", "-")]
    lines += [
        (
            str(m),
            *(middle(found, time_us(v)) for v in known),
            over_processes(found, lambda r: r.metrics.get("log_bandwidth_share")),
            str(processes(found)),
        )
        for m, found in groups
    ]
    more = ", ".join(f"{FLOOR_BYTES[v]} for {TITLES[v]}" for v in known if FLOOR_BYTES[v] != 2)
    return Table(
        title=title,
        rows=lines,
        sources=used,
        columns=[
            Column(name="M"),
            *(Column(name=TITLES[v], unit="us") for v in known),
            Column(name="fma's share of copy bandwidth"),
            Column(name="processes"),
        ],
        note="Medians over processes; weights rotated past the L2, CUDA graphs. "
        f"Floor: 2 bytes a weight{f' ({more})' if more else ''} at the bandwidth of a copy in the same contest (M = {groups[0][0]}).",
    )


def _ratios(title: str, groups: Sequence[Group], known: Sequence[str], used: Sequence[Row], judged: str) -> Table:
    lines = [(str(m), *(over_processes(found, log_ratio(v, "fma")) for v in known)) for m, found in groups]
    return Table(
        title=title,
        columns=[Column(name="M"), *(Column(name=TITLES[v], unit="x") for v in known)],
        rows=lines,
        sources=used,
        note=f"Above 1: fma is faster. 95% intervals over the process starts of the table of times, Student-t. {judged}".strip(),
    )


def _ratio_curve(title: str, groups: Sequence[Group], known: Sequence[str], used: Sequence[Row]) -> list:
    lines: dict[str, list[tuple[int, Ratio]]] = {}
    for m, found in groups:
        for v in known:
            if ratio := over_processes(found, log_ratio(v, "fma")):
                lines.setdefault(v, []).append((m, ratio))
    if not lines:
        return []
    series = [
        Series(name=TITLES[v], x=[m for m, _ in p], y=[r[0] for _, r in p], low=[r[1] for _, r in p], high=[r[2] for _, r in p])
        for v, p in lines.items()
    ]
    floors = "; ".join(f"{TITLES[v]} {FLOOR_BYTES[v] / FLOOR_BYTES['fma']:g}" for v in known)
    return [
        Curves(
            title=title,
            x_label="tokens M",
            y_label="time ratio to fma",
            series=series,
            log_x=True,
            log_y=True,
            reference=(1.0, "parity"),
            sources=used,
            note=f"Ratios of the floors, by bytes a weight: {floors}.",
        )
    ]


def eager(view: View) -> list:
    """The same programs launched call by call: what a user without CUDA graphs sees, launch costs included."""
    out, devices = [], contests(view)
    for device, rows in devices:
        groups = [(f"{n}x{k}", found) for n, k in DECODE_SHAPES if (found := [r for r in of_shape(rows, 1, n, k) if "fma_eager_us" in r.metrics])]
        if groups:
            table = [(shape, *(middle(found, time_us(f"{v}_eager")) for v in EAGER), processes(found)) for shape, found in groups]
            out.append(
                Table(
                    title=of_device("Decode at M = 1 without CUDA graphs", device, devices),
                    columns=[Column(name="shape NxK"), *(Column(name=TITLES[v], unit="us") for v in EAGER), Column(name="processes")],
                    rows=table,
                    sources=[r for _, found in groups for r in found],
                    note="Medians over processes. One call on an idle device pays for its launch, so that a kernel of a few microseconds "
                    "needs a graph.",
                )
            )
    return out


def compiled(view: View) -> list:
    """LayerCast through torch.compile, which fuses the upcast: the nearest thing to fma's floor."""
    lines, used = [], []
    for device, rows in contests(view, compiled=True):
        for m, n, k in sorted({(r.params["rows"], r.params["n"], r.params["k"]) for r in rows}):
            found = of_shape(rows, m, n, k)
            used += found
            lines += [
                (
                    TITLES[v],
                    device,
                    m,
                    f"{n}x{k}",
                    middle(found, time_us(v)),
                    middle(found, time_us("fma")),
                    over_processes(found, log_ratio(v, "fma")) if by_process(found, log_ratio(v, "fma")) else "not read",
                    next((r.facts[f"kernels_{v}"] for r in found if f"kernels_{v}" in r.facts), None),
                    processes(found),
                )
                for v in COMPILED
                if any(v in r.params["variants"] for r in found)
            ]
    names = (
        Column(name="program"),
        Column(name="device"),
        Column(name="M"),
        Column(name="shape NxK"),
        Column(name="time", unit="us"),
        Column(name="fma", unit="us"),
        Column(name="time over fma", unit="x"),
        Column(name="kernels a call"),
        Column(name="processes"),
    )
    if not lines:
        return [Prose(heading="Decode against compiled programs", text="NOT MEASURED HERE: LayerCast compiled by torch was not timed.")]
    return [
        Table(
            title="Decode against compiled programs",
            columns=names,
            rows=lines,
            sources=used,
            note='torch.compile of "upcast, then multiply", in an order of its own that no one promises.',
        )
    ]


# ---- prefill -------------------------------------------------------------------------------------------------------------------


def prefill(view: View) -> list:
    out, devices = [], contests(view)
    for device, rows in devices:
        lines, used = [], []
        for m in PREFILL_ROWS:
            found = of_shape(rows, m, 4096, 4096)
            used += found
            lines += [_prefill_line(found, m, v) for v in PREFILL if any(v in r.params["variants"] for r in found)]
        if lines:
            columns = (
                Column(name="M"),
                Column(name="implementation"),
                Column(name="time", unit="us"),
                Column(name="speed", unit="TFLOP/s"),
                Column(name="speed over SGEMM", unit="x"),
                Column(name="mean error"),
                Column(name="processes"),
            )
            out.append(
                Table(
                    title=of_device("Prefill, 4096x4096 weights", device, devices),
                    columns=columns,
                    rows=lines,
                    sources=used,
                    note="TFLOP/s: 2MNK over the median time, the integer family's slicing of activations included. Mean error: |error| / "
                    "(|x||w|) over a corner of the result, against float64.",
                )
            )
    return out or [Prose(heading="Prefill", text="NOT MEASURED HERE: no prefill was timed.")]


def _prefill_line(rows: Sequence[Row], m: int, variant: str) -> tuple:
    us = middle(rows, time_us(variant))
    speed = None if us is None else 2 * m * 4096 * 4096 / us / 1e6
    ratio = "1" if variant == "sgemm" else over_processes(rows, log_ratio("sgemm", variant))
    error = _error(rows, variant) if variant in ERRORS else "not read"
    return m, TITLES[variant], us, speed, ratio, error, processes(rows)


def _error(rows: Sequence[Row], variant: str) -> float | str | None:
    """The mean error; where no variant of any contest errs, its inputs had sums that fp32 holds, and nothing was learnt."""
    told = [r.metrics[f"error_{v}"] for r in rows for v in ERRORS if f"error_{v}" in r.metrics]
    return EXACT_SUMS if told and not any(told) else middle(rows, lambda r: r.metrics.get(f"error_{variant}"))


# ---- bytes ---------------------------------------------------------------------------------------------------------------------


def bytes_moved(view: View) -> list:
    """What the profiler counted."""
    found = by_device(view.rows(measure="weight_bytes"))
    if not found:
        return [
            Prose(
                heading="Bytes a weight, by the profiler",
                text="NOT MEASURED HERE: the profiler's counters were not read; they need a GPU and `ncu` with the right to read them.",
            )
        ]
    lines, used = [], []
    for device, rows in found:
        shapes = dict.fromkeys((r.params["rows"], r.params["n"], r.params["k"]) for r in rows)
        for r in (r for shape in shapes for r in of_shape(rows, *shape)):
            used.append(r)
            shape = f"M={r.params['rows']}, {r.params['n']}x{r.params['k']}"
            lines += [
                (TITLES[t["variant"]], device, shape, t["read"] / 1e6, t["written"] / 1e6, t["per_weight"], FLOOR_BYTES[t["variant"]], t["kernels"])
                for t in r.record("traffic")
                if t["variant"] in FLOOR_BYTES
            ]
    columns = (
        Column(name="implementation"),
        Column(name="device"),
        Column(name="shape NxK"),
        Column(name="read", unit="MB"),
        Column(name="written", unit="MB"),
        Column(name="bytes a weight"),
        Column(name="floor"),
        Column(name="kernels"),
    )
    return [
        Table(
            title="Bytes a weight, by the profiler",
            columns=columns,
            rows=lines,
            sources=used,
            note="Memory traffic of one call, all its kernels, after other weights have passed through the L2.",
        )
    ]
