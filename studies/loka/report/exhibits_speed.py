"""Time: the crossover map, fused quantising, whole models, and a layer in all combinations of LoKA's Mods. One GPU model at a time.

    speeds(view)            # [Table, Curves, ...]; one sentence where nothing was timed

Ratios are read inside one process; intervals are over process starts, and a shape that was timed once has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.loka.report.findings_speed import by_process, metric
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table
from suite.stats import ratio_interval

WORKS = {"whole": "quantised both", "frozen": "weight before", "product": "product alone", "fused": "with norm, fused"}
GRID = "grid"


def speeds(view: View) -> list:
    parts = [*crossover(view), *bandwidth(view), *steps(view), *arms(view), *layers(view)]
    return parts or [Prose(heading="Time", text="NOT MEASURED HERE: timing needs a GPU, and no published timing of this code is present.")]


def times_faster(rows: Sequence[Row], name: str) -> float | tuple[float, float, float] | None:
    """exp of a metric: with its interval over two processes or more, plain for one, None where it is absent."""
    values = by_process(rows, metric(name))
    if len(values) < 2:
        return math.exp(values[0]) if values else None
    i = ratio_interval(values)
    return i.value, i.low, i.high


# ---- single products -----------------------------------------------------------------------------------------------------------


def crossover(view: View) -> list:
    rows = sorted(view.rows(measure="crossover"), key=lambda r: (r.device, r.params["which"], r.params["m"] * r.params["n"] * r.params["k"]))
    out: list = []
    for device, which in dict.fromkeys((r.device, r.params["which"]) for r in rows):
        found = [r for r in rows if (r.device, r.params["which"]) == (device, which)]
        title = f"Crossover map, {device}: {which}"
        out += [*(_curve(title, found) if which == "forward" else []), _shapes(title, found)]
    return out


def _curve(title: str, rows: Sequence[Row]) -> list:
    """Best speed-up by size: medians over shapes of a power of four in FLOPs."""
    series = []
    for work, name in WORKS.items():
        bins: dict[int, list[float]] = {}
        for r in rows:
            if (value := r.metrics.get(f"log_speedup_{work}")) is not None:
                bins.setdefault(round(math.log(2 * r.params["m"] * r.params["n"] * r.params["k"], 4)), []).append(value)
        if bins:
            at = sorted(bins)
            series.append(Series(name=name, x=[4.0**b / 1e9 for b in at], y=[math.exp(sorted(bins[b])[len(bins[b]) // 2]) for b in at]))
    return [Curves(title=f"{title}, by size", x_label="GFLOP of the product", y_label="bf16's time over FP8's", series=series, log_x=True, reference=(1.0, "bf16"), sources=rows,
                   note="The fastest recipe and backend of each shape; medians over shapes of one power of four.")] if series else []  # fmt: skip


def _shapes(title: str, rows: Sequence[Row]) -> Table:
    works = [w for w in WORKS if any(f"log_speedup_{w}" in r.metrics for r in rows)]
    lines = [(_size(r), r.metrics["bf16_us"], *(times_faster([r], f"log_speedup_{w}") for w in works), _fastest(r)) for r in rows]
    columns = [Column(name="M x K x N"), Column(name="bf16", unit="us"), *(Column(name=WORKS[w], unit="x") for w in works), Column(name="fastest of those quantised both")]
    return Table(title=title, columns=columns, rows=lines, sources=rows, note="bf16's time over that of the fastest FP8 recipe and backend, one process; above 1 FP8 is faster.")


def _size(row: Row) -> str:
    return " x ".join(f"{row.params[k]:,}" for k in ("m", "k", "n"))


def _fastest(row: Row) -> str:
    whole = [v for v in row.record("variants") if v["work"] == "whole"]
    best = max(whole, key=lambda v: v["log_speedup"], default=None)
    return f"{best['recipe']} {best['backend']}" if best else "none runs"


def bandwidth(view: View) -> list:
    rows = view.rows(measure="fused_quantise")
    lines = []
    for device, m, k, norm, activation in dict.fromkeys((r.device, *(r.params[x] for x in ("m", "k", "norm", "activation"))) for r in rows):
        found = [r for r in rows if (r.device, *(r.params[x] for x in ("m", "k", "norm", "activation"))) == (device, m, k, norm, activation)]
        ratios = (times_faster(found, name) for name in ("log_bandwidth_share", "log_speedup_over_compiled", "log_speedup_over_separate"))
        lines.append((f"{m:,} x {k:,}", f"{norm}, {activation}", device, sum(r.metrics["fused_us"] for r in found) / len(found), *ratios, len(found)))
    names = ("rows x features", "norm, activation", "device", "time", "share of copy bandwidth", "over one compiled function", "over norm, then quantise", "processes")
    columns = [Column(name=n, unit="us" if n == "time" else "x" if n.startswith("over") else "") for n in names]
    return [Table(title="Norm, activation and quantising in one kernel", columns=columns, rows=lines, sources=rows, note="2 bytes read and 1 written a number, and scales.")] if lines else []


# ---- whole models --------------------------------------------------------------------------------------------------------------


def steps(view: View) -> list:
    rows = view.rows(measure="dense_step")
    lines, gains = [], {True: [], False: []}
    keys = ("model", "size", "mods", "batch", "training")
    for device, *where in dict.fromkeys((r.device, *(r.params[k] for k in keys)) for r in rows):
        found = [r for r in rows if [r.device, *(r.params[k] for k in keys)] == [device, *where]]
        model, size, mods, batch, training = where
        ratios = [times_faster(found, f"log_speedup_{v}") for v in ("torchao", "single", "dispatch")]
        gains[training] += by_process(found, metric("log_speedup_dispatch"))[:1] if mods else []
        whole = _whole_step(found)
        cap = next((r.metrics["amdahl_cap"] for r in found if "amdahl_cap" in r.metrics), None)
        lines.append((f"{model} {size}", mods.replace("+", ", ") or "as published", f"{batch:,}", "training" if training else "inference", sum(r.metrics["step_us"] for r in found) / len(found) / 1e3,
                      *ratios, cap, whole, len(found)))  # fmt: skip
    if not lines:
        return []
    names = ("model", "Mods, of bf16 too", "batch", "step", "bf16", "torchao on every linear", "fastest single recipe", "dispatched", "Amdahl's cap", "dispatched, whole step", "processes")
    units = {"bf16": "ms", "torchao on every linear": "x", "fastest single recipe": "x", "dispatched": "x", "Amdahl's cap": "x", "dispatched, whole step": "x"}
    means = [f"{'training' if t else 'inference'} {math.exp(sum(g) / len(g)):.2f}x" for t, g in gains.items() if len(g) > 1]
    note = "Dense part, compiled and captured in a CUDA graph; x: bf16's time over the variant's. Whole step: with embeddings and optimizers, in a sum of times. " + (f"Geometric mean of dispatched over models with the Mods: {', '.join(means)}." if means else "")
    return [Table(title="Whole models: a step of the dense part", columns=[Column(name=n, unit=units.get(n, "")) for n in names], rows=lines, sources=rows, note=note)]


def arms(view: View) -> list:
    """Every variant of every contest of whole models: the baselines beside ours."""
    rows = view.rows(measure="dense_step")
    logs: dict[tuple, list[float]] = {}
    for r in rows:
        step = "training" if r.params["training"] else "inference"
        for v in r.record("variants") if "variants.json" in r.files else ():
            logs.setdefault((f"{r.params['model']} {r.params['size']}", r.params["mods"].replace("+", ", ") or "as published", step, v["variant"], v["fp8_products"]), []).append(v["log_speedup"])
        for v in r.record("unsupported") if "unsupported.json" in r.files else ():
            logs.setdefault((f"{r.params['model']} {r.params['size']}", r.params["mods"].replace("+", ", ") or "as published", step, v["variant"], v["why"]), [])
    lines = [(*key, _ratio(values) if values else None) for key, values in logs.items()]
    columns = [*(Column(name=n) for n in ("model", "Mods", "step", "variant", "products in FP8")), Column(name="over bf16", unit="x")]
    return [Table(title="Whole models: every variant", columns=columns, rows=lines, sources=rows, note="bf16's time over the variant's, inside one contest.")] if lines else []


def _whole_step(rows: Sequence[Row]) -> float | tuple[float, float, float] | str:
    """By the plan, embeddings and optimizers beside it; "-" where they were not timed."""
    logs = [more["log_speedup_step_dispatch"] for r in rows if "more.json" in r.files and "log_speedup_step_dispatch" in (more := r.record("more"))]
    return _ratio(logs) if logs else "-"


def layers(view: View) -> list:
    rows = view.rows(measure="mods_latency")
    if not rows:
        return []
    found: dict[str, list[float]] = {}
    for r in rows:
        for line in r.record("mods"):
            found.setdefault(line["mods"] or "as published", []).append(line["log_speedup"])
    lines = [(name, _ratio(values)) for name, values in found.items()]
    return [Table(title="A layer of Wukong-5.6 in each combination of Mods, bf16", columns=[Column(name="Mods"), Column(name="times as fast", unit="x")], rows=lines, sources=rows,
                  note=f"{len(rows)} processes.")]  # fmt: skip


def _ratio(logs: Sequence[float]) -> float | tuple[float, float, float]:
    if len(logs) < 2:
        return math.exp(logs[0])
    i = ratio_interval(logs)
    return i.value, i.low, i.high
