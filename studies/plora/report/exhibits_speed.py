"""Time: the ladder of ways to run k adapters, the surface of gains with its caps, kernels alone, and eager PEFT. One GPU model at a time.

    speeds(view)            # [Table, Curves, ...]; one sentence where nothing was timed

Ratios are read inside one contest; intervals are over process starts, and what one process timed has none. Where packing gains nothing stands as plainly
as where it gains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from studies.plora.report.findings import by_process, groups, metric
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table
from suite.stats import ratio_interval

NO_GAIN = 1.1  # below, a gain is said to be none
LENGTHS = 3  # of one figure, each with its cap: seven curves can be told apart
LADDER_POINT = ("model", "tokens", "batch", "k", "rank")
Number = float | tuple[float, float, float] | None


def speeds(view: View) -> list:
    parts = [*ladders(view), *surfaces(view), *saturations(view), *eager(view), *kernels(view), *memories(view)]
    return parts or [Prose(heading="Time", text="NOT MEASURED HERE: timing needs a GPU, and no published timing of this code is present.")]


def times(logs: Sequence[float]) -> Number:
    """exp of ln ratios: with its interval over two processes or more, plain for one, None for none."""
    if len(logs) < 2:
        return math.exp(logs[0]) if logs else None
    i = ratio_interval(logs)
    return i.value, i.low, i.high


def of_metric(rows: Sequence[Row], name: str) -> Number:
    return times(by_process(rows, metric(name)))


def mean(values: Iterable[float | None]) -> float | None:
    kept = [v for v in values if v is not None]
    return sum(kept) / len(kept) if kept else None


# ---- ladder --------------------------------------------------------------------------------------------------------------------


def ladders(view: View) -> list:
    out = []
    for (device, model, tokens, batch, k, rank), rows in groups(view.rows(measure="ladder"), *LADDER_POINT).items():
        found: dict[str, list[dict]] = {}
        for r in rows:
            for line in r.record("variants"):
                found.setdefault(line["variant"], []).append(line)
        lines = [
            (name, lines[0]["adapters"], mean(x["us"] for x in lines) / 1e3, mean(x["tokens_per_s"] for x in lines), mean(x["mfu"] for x in lines), times([x["log_speedup"] for x in lines]))
            for name, lines in found.items()
        ]  # fmt: skip
        cap = of_metric(rows, "log_pack_cap")
        columns = [Column(name="how"), Column(name="adapters"), Column(name="step", unit="ms"), Column(name="real tokens", unit="/s"), Column(name="MFU"), Column(name="an adapter, over the best B1", unit="x")]
        out.append(Table(title=f"Ladder, {device}: {model}, {tokens} tokens, batch {batch}, k = {k}, rank {rank}", columns=columns, rows=lines, sources=rows,
                         note=f"{len(rows)} processes; rows are full, so no token is padding. The cap eta_max / eta_1 is {_said(cap)}: one adapter on as many tokens as keep the GPU busy, over B1. "
                              "MFU counts the model's FLOPs at the dense bf16 peak."))  # fmt: skip
    return out


def _said(value: Number) -> str:
    if value is None:
        return "not known"
    return f"{value:.2f}x" if isinstance(value, float) else f"{value[0]:.2f}x ({value[1]:.2f} to {value[2]:.2f})"


# ---- surface -------------------------------------------------------------------------------------------------------------------


def surfaces(view: View) -> list:
    """Gains over k, a figure for each model, batch and few lengths, with each length's cap beside; and the points where nothing is gained."""
    out: list = []
    rows = view.rows(measure="surface")
    for (device, model, batch), found in groups(rows, "model", "batch").items():
        by_length = sorted(found, key=lambda r: r.params["tokens"])
        for part in (by_length[i : i + LENGTHS] for i in range(0, len(by_length), LENGTHS)):
            shown = ", ".join(str(r.params["tokens"]) for r in part)
            series = [s for r in part for s in _with_cap(r)]
            out.append(Curves(title=f"Gain of packing, {device}: {model}, batch {batch}, {shown} tokens", x_label="adapters in the pack", y_label="an adapter's time alone, captured, over its time in the pack",
                              series=series, log_x=True, log_y=True, reference=(1.0, "no gain"), sources=part, note="Over the best single captured adapter (B1) of the same process; a cap is eta_max / eta_1 of its contest."))  # fmt: skip
    return out + _no_gain(rows)


def _with_cap(row: Row) -> list[Series]:
    gains, tokens = _gains(row), row.params["tokens"]
    return [Series(name=f"{tokens} tokens", x=list(gains), y=list(gains.values())), Series(name=f"cap, {tokens} tokens", x=[min(gains), max(gains)], y=[math.exp(row.metrics["log_pack_cap"])] * 2)]


def _gains(row: Row) -> dict[int, float]:
    return {v["adapters"]: math.exp(v["log_speedup"]) for v in row.record("variants") if v["variant"].startswith("k=")}


def _no_gain(rows: Sequence[Row]) -> list:
    lines = [(r.params["model"], r.params["tokens"], r.params["batch"], max(_gains(r)), _gains(r)[max(_gains(r))], math.exp(r.metrics["log_pack_cap"]), r.metrics.get("mfu_single"), r.device) for r in rows]
    lines.sort(key=lambda x: x[4])
    none = sum(x[4] < NO_GAIN for x in lines)
    columns = [Column(name=n) for n in ("model", "tokens", "batch", "adapters")] + [Column(name="gain", unit="x"), Column(name="cap", unit="x"), Column(name="MFU of one adapter"), Column(name="device")]
    return [Table(title="Where packing gains, and where it does not", columns=columns, rows=lines, sources=rows,
                  note=f"At {none} of {len(lines)} points the largest pack gains less than {NO_GAIN - 1:.0%} over one captured adapter. Least gain first; one process a point.")] if lines else []  # fmt: skip


def saturations(view: View) -> list:
    lines, rows = [], view.rows(measure="saturation")
    for (device, model, k, tokens), found in groups(rows, "model", "k", "tokens").items():
        lines.append((model, f"{k} x {tokens}", mean(r.metrics.get("mfu_pack") for r in found), mean(r.metrics.get("mfu_max") for r in found), of_metric(found, "log_saturation_share"), len(found), device))
    columns = [Column(name=n) for n in ("model", "adapters x tokens", "MFU, packed", "MFU, the best of one adapter", "share", "processes", "device")]
    return [Table(title="Saturation: packed against the best that the same stack does", columns=columns, rows=lines, sources=rows)] if lines else []


# ---- baselines -----------------------------------------------------------------------------------------------------------------


def eager(view: View) -> list:
    rows, lines = view.rows(measure="peft_eager"), []
    for (device, model, tokens, rank, lengths), found in groups(rows, "model", "tokens", "rank", "lengths").items():
        ratios = (of_metric(found, name) for name in ("log_pack_over_peft", "log_pack_over_peft_bf16"))
        lines.append((model, tokens, lengths or "full", rank, *ratios, mean(r.metrics.get("host_us_per_op") for r in found), mean(r.metrics.get("padding_share") for r in found), len(found), device))
    columns = [*(Column(name=n) for n in ("model", "tokens", "lengths", "rank")), Column(name="over PEFT as it comes", unit="x"), Column(name="over PEFT, bf16 adapters", unit="x"),
               Column(name="host an operation", unit="us"), Column(name="padding share"), Column(name="processes"), Column(name="device")]  # fmt: skip
    out = [Table(title="Our pack over eager PEFT, one adapter after another", columns=columns, rows=lines, sources=rows,
                 note="Context, not proof: eager PEFT is bound by the host's launches, and one adapter in a CUDA graph beats it many times without packing.")] if lines else []  # fmt: skip
    several = view.rows(measure="processes")
    shown = [(model, tokens, of_metric(found, "log_processes_over_graphed"), len(found), device) for (device, model, tokens), found in groups(several, "model", "tokens").items()]
    columns = [Column(name="model"), Column(name="tokens"), Column(name="best number of processes over one", unit="x"), Column(name="process starts"), Column(name="device")]
    return out + ([Table(title="Several processes on one GPU (B2)", columns=columns, rows=shown, sources=several)] if shown else [])


# ---- kernels and memory --------------------------------------------------------------------------------------------------------


def kernels(view: View) -> list:
    out = []
    rows = view.rows(measure="kernels")
    for (device, which), found in groups(rows, "which").items():
        lines = []
        for (_, d, tokens, slots, rank), same in sorted(groups(found, "d", "tokens", "slots", "rank").items(), key=lambda x: x[0][1:]):
            names = ("log_kernel_speedup", "log_kernel_over_eager", "log_kernel_cap_share", "log_kernel_roofline_share")
            others = {line["path"]: line["us"] for line in same[0].record("variants")}
            lines.append((d, tokens, f"{slots} x r {rank}", mean(r.metrics["kernel_us"] for r in same), *(others.get(p) for p in ("looped", "padded", "grouped")), *(of_metric(same, n) for n in names), len(same)))
        columns = [Column(name="d"), Column(name="tokens an adapter"), Column(name="adapters"), *(Column(name=n, unit="us") for n in ("ours", "looped, graphed", "padded", "grouped_mm")),
                   Column(name="over the graphed loop", unit="x"), Column(name="over the eager loop", unit="x"), Column(name="share of the byte time"), Column(name="share of the roofline"), Column(name="processes")]  # fmt: skip
        out.append(Table(title=f"LoRA's grouped products alone, {device}: {which}", columns=columns, rows=lines, sources=found, note="Every tensor counted once, at the bandwidth of a copy in the same contest; inputs rotate through three L2s."))
    return out


def memories(view: View) -> list:
    rows = view.rows(measure="largest")
    lines = [(r.params["model"], x["limit_bytes"] / 1e9, f"rank {r.params['rank']}, {r.params['tokens']} tokens", x["predicted"], x["k"], r.device) for r in rows for x in r.record("largest")]
    columns = [Column(name="model"), Column(name="memory", unit="GB"), *(Column(name=n) for n in ("slots", "most adapters, foretold", "most adapters, found", "device"))]
    return [Table(title="The largest pack that fits", columns=columns, rows=lines, sources=rows)] if lines else []
