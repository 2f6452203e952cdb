"""Time of the 7B-shaped decoder: decode and prefill by implementation, the cost of exactness, and mixes of the two.

    serving(view)           # [Table, Table, Table, Curves] for each GPU model; one sentence where it was not timed

A mix (a prompt of P tokens, T tokens written) is derived, not measured: the prefill of P plus T decode steps at the context that was timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.determinism.fresh import fresh
from studies.determinism.shown import TITLES, Value, by_device, middle, of_device, over_processes, processes
from studies.determinism.speed import families, of_phase
from studies.determinism.speed import phase_of as phase
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table

TITLE = "A 7B-shaped decoder"
NAMES = ("fma", "integer", "layercast", "sgemm", "bf16")
EXACT = ("fma", "integer")
BASELINES = ("layercast", "sgemm", "bf16")
OUTPUTS = (1, 16, 64, 256, 1024, 4096)
MIXES = (64, 256, 1024)  # outputs of the table


def serving(view: View) -> list:
    devices = by_device(view.rows(measure="serving"))
    if not devices:
        return [Prose(heading=TITLE, text="NOT MEASURED HERE: the decoder needs a GPU with 130 GiB, and no published timing of it is present.")]
    return [part for device, rows in devices for part in _of(view, rows, lambda t, device=device: of_device(t, device, devices))]


def title_of(variant: str) -> str:
    return TITLES["bf16-serving" if variant == "bf16" else variant]


def phases(rows: Sequence[Row], kind: str) -> list[tuple[int, int]]:
    """(batch, tokens) of the phases of a kind."""
    return sorted({(p["batch"], p["tokens"]) for r in rows for p in r.record("phases") if p["phase"] == kind})


def ms(kind: str, batch: int, tokens: int, variant: str) -> Value:
    return lambda row: (p := phase(row, kind, batch, tokens)) and p["ms"].get(variant)


def log_ratio(kind: str, batch: int, tokens: int, variant: str, baseline: str) -> Value:
    """ln(time of `variant` / time of `baseline`) of one phase."""

    def value(row: Row) -> float | None:
        p = phase(row, kind, batch, tokens)
        logs = {"fma": 0.0, **p["log_ratio"]} if p else {}
        return logs[variant] - logs[baseline] if variant in logs and baseline in logs else None

    return value


def _of(view: View, rows: Sequence[Row], title) -> list:
    known = [v for v in NAMES if any(v in r.params["variants"] for r in rows)]
    out = []
    for kind, unit in (("decode", "ms/token"), ("prefill", "ms")):
        found = phases(rows, kind)
        if not found:
            continue
        claims = ("decode_end_to_end", "decode_end_to_end_stored", "exactness_cost") if kind == "decode" else ("prefill_end_to_end",)
        out += [_times(rows, kind, unit, found, known, title), _ratios(rows, kind, found, known, title, families(view, claims))]
    return out + mixes(rows, known, title)


def _behind(rows: Sequence[Row], kind: str, found: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows of a table of phases, each once."""
    return list({r.bundle_id: r for b, t in found for r in of_phase(rows, kind, b, t)}.values())


def _times(rows: Sequence[Row], kind: str, unit: str, found: Sequence[tuple[int, int]], known: Sequence[str], title) -> Table:
    groups = [(b, t, of_phase(rows, kind, b, t)) for b, t in found]
    lines = [(b, t, *(middle(same, ms(kind, b, t, v)) for v in known), processes(same)) for b, t, same in groups]
    note = (
        "A step for the whole batch as one CUDA graph, at this many tokens in the cache."
        if kind == "decode"
        else "One prompt, launched call by call."
    )
    return Table(
        title=title(f"{TITLE}: {kind}"),
        columns=[
            Column(name="batch"),
            Column(name="context" if kind == "decode" else "prompt", unit="tokens"),
            *(Column(name=title_of(v), unit=unit) for v in known),
            Column(name="processes"),
        ],
        rows=lines,
        sources=_behind(rows, kind, found),
        note=f"Medians over processes; random weights, so texts mean nothing. {note}",
    )


def _ratios(rows: Sequence[Row], kind: str, found: Sequence[tuple[int, int]], known: Sequence[str], title, judged: str) -> Table:
    """Speed of each exact family over the baselines, and its cost in time over bf16 serving."""
    lines = []
    for b, t in found:
        same = of_phase(rows, kind, b, t)
        for family in (f for f in EXACT if f in known):
            ratios = [over_processes(same, log_ratio(kind, b, t, base, family)) for base in BASELINES[:2]]
            cost = over_processes(same, log_ratio(kind, b, t, family, "bf16"))
            lines.append((b, t, TITLES[family], *ratios, cost and tuple(100 * (x - 1) for x in cost)))
    columns = [
        Column(name="batch"),
        Column(name="tokens"),
        Column(name="family"),
        *(Column(name=f"faster than {title_of(b)}", unit="x") for b in BASELINES[:2]),
        Column(name="cost over bf16 serving", unit="%"),
    ]
    return Table(
        title=title(f"{TITLE}: {kind}, ratios"),
        columns=columns,
        rows=lines,
        sources=_behind(rows, kind, found),
        note=f"95% intervals over process starts, Student-t. Cost: additional time over the same decoder in bf16 with a bf16 cache. {judged}".strip(),
    )


# ---- mixes ---------------------------------------------------------------------------------------------------------------------


def log_mix(prompt: int, outputs: int, context: int, variant: str, baseline: str) -> Value:
    """ln(time of `variant` / time of `baseline`) for one request, derived from one process's phases."""

    def value(row: Row) -> float | None:
        times = [_seconds(row, prompt, outputs, context, v) for v in (variant, baseline)]
        return None if None in times else math.log(times[0] / times[1])

    return value


def _seconds(row: Row, prompt: int, outputs: int, context: int, variant: str) -> float | None:
    first, step = ms("prefill", 1, prompt, variant)(row), ms("decode", 1, context, variant)(row)
    return None if first is None or step is None else (first + outputs * step) / 1e3


def mixes(rows: Sequence[Row], known: Sequence[str], title) -> list:
    """Requests of one user: prompt and output lengths combined from the measured phases."""
    contexts = [t for b, t in phases(rows, "decode") if b == 1]
    prompts = [t for b, t in phases(rows, "prefill") if b == 1]
    if not contexts or not prompts:
        return []
    context = contexts[-1]
    both = {p: fresh(r for r in rows if phase(r, "prefill", 1, p) and phase(r, "decode", 1, context)) for p in prompts}
    used = list({r.bundle_id: r for found in both.values() for r in found}.values())
    lines = [(p, n, *(middle(both[p], lambda r, p=p, n=n, v=v: _seconds(r, p, n, context, v)) for v in known),
              *(over_processes(both[p], log_mix(p, n, context, "layercast", f)) for f in EXACT if f in known)) for p in prompts for n in MIXES]  # fmt: skip
    columns = [
        Column(name="prompt", unit="tokens"),
        Column(name="output", unit="tokens"),
        *(Column(name=title_of(v), unit="s") for v in known),
        *(Column(name=f"LayerCast over {TITLES[f]}", unit="x") for f in EXACT if f in known),
    ]
    note = f"Derived: the measured prefill of the prompt plus the output's number of measured decode steps, batch 1, each at {context} tokens of context."
    table = Table(title=title(f"{TITLE}: mixes (derived)"), columns=columns, rows=lines, sources=used, note=note)
    series = []
    for p in prompts:
        for base, family in ((b, f) for b in BASELINES[:1] for f in EXACT if f in known):
            points = [(n, r) for n in OUTPUTS if (r := over_processes(both[p], log_mix(p, n, context, base, family)))]
            if points:
                series.append(
                    Series(
                        name=f"{TITLES[family]}, prompt {p}",
                        x=[n for n, _ in points],
                        y=[r[0] for _, r in points],
                        low=[r[1] for _, r in points],
                        high=[r[2] for _, r in points],
                    )
                )
    curve = Curves(
        title=title(f"{TITLE}: speed-up over LayerCast by length of the output (derived)"),
        x_label="tokens written",
        y_label="time of LayerCast over ours",
        series=series[:7],
        log_x=True,
        reference=(1.0, "parity"),
        note=note,
        sources=used,
    )
    return [table, curve] if series else [table]
