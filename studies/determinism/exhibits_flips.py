"""The flip study: where an implementation's texts and labels change with the batch alone. One GPU model at a time.

flips(view)             # [Table, Curves, Table, Table]; one sentence where it was not run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from studies.determinism import flip_stats
from studies.determinism.fresh import fresh
from studies.determinism.shown import TITLES, by_device, known, of_device
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table
from suite.stats import bootstrap_interval, proportion_interval

TITLE = "Where texts change with the batch"
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Runs = Mapping[int, Row]  # batch -> its run


def flips(view: View) -> list:
    texts, labels = (known(view.rows(measure=m), "impl") for m in ("texts", "labels"))
    out: list = (
        []
        if texts
        else [
            Prose(
                heading=TITLE, text="NOT MEASURED HERE: the flip study writes thousands of texts and needs a GPU; no published run of it is present."
            )
        ]
    )
    devices = by_device(texts)
    out += [part for device, rows in devices for part in _texts(rows, lambda t, device=device: of_device(t, device, devices))]
    out += labels_table(labels) if labels else [Prose(heading="Labels by batch", text="NOT MEASURED HERE: no labels were read at several batches.")]
    return out


def by_implementation(rows: Sequence[Row]) -> dict[str, Runs]:
    """implementation -> batch -> run, of the largest question that was asked (prompts, steps); an implementation's batches share one code's rows."""
    size = lambda r: (r.params.get("prompts", r.params.get("sentences")), r.params.get("new_tokens", 0))  # noqa: E731
    largest = max(map(size, rows))
    kept = sorted((r for r in rows if size(r) == largest), key=lambda r: (list(TITLES).index(r.params["impl"]), r.params["batch"]))
    runs = {impl: fresh(r for r in kept if r.params["impl"] == impl) for impl in dict.fromkeys(r.params["impl"] for r in kept)}
    return {impl: {r.params["batch"]: r for r in found} for impl, found in runs.items()}


def behind(found: Mapping[str, Runs]) -> list[Row]:
    """Every run of `by_implementation`."""
    return [r for runs in found.values() for r in runs.values()]


# ---- texts ---------------------------------------------------------------------------------------------------------------------


def _texts(rows: Sequence[Row], title) -> list:
    found = by_implementation(rows)
    rows = behind(found)
    arrays = {impl: {batch: r.arrays() for batch, r in runs.items()} for impl, runs in found.items()}
    pairs = [(impl, a, b) for impl, runs in arrays.items() for a, b in combinations(runs, 2)]
    if not pairs:
        return [Prose(heading=title(TITLE), text="NOT MEASURED HERE: each implementation was run at one batch alone.")]
    lines = [_pair_line(impl, a, b, flip_stats.compared(arrays[impl][a], arrays[impl][b])) for impl, a, b in pairs]
    columns = (
        Column(name="implementation"),
        Column(name="batches"),
        Column(name="texts that diverge", unit="%"),
        Column(name="of prompts"),
        Column(name="median Div_Index", unit="tokens"),
        Column(name="top-2 gap at the flip, median", unit="nats"),
        Column(name="90%", unit="nats"),
        Column(name="gap over all tokens, median", unit="nats"),
    )
    note = (
        "Greedy texts on GSM8K questions; Div_Index: equal tokens before the first that differs, over texts that diverge, up to the earlier "
        "end. Gaps: between the two highest logits, at the smaller batch. "
        "95% Clopper-Pearson intervals over prompts."
    )
    return [
        Table(title=title(TITLE), columns=columns, rows=lines, note=note, sources=rows),
        *_curve(arrays, rows, title),
        *_top1(arrays, rows, title),
    ]


def _pair_line(impl: str, a: int, b: int, pair: flip_stats.Pair) -> tuple:
    share = proportion_interval(pair.diverged, pair.prompts)
    value = lambda x: "no flip" if not pair.diverged else x  # noqa: E731
    return (
        TITLES[impl],
        f"{a} and {b}",
        tuple(100 * x for x in (share.value, share.low, share.high)),
        pair.prompts,
        value(pair.median_div_index),
        value(pair.median_gap_at_flip),
        value(pair.gap_at_flip_90),
        pair.median_gap,
    )


def _curve(arrays: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], rows: Sequence[Row], title) -> list:
    """The share of prompts still equal, at the widest pair of batches that the most implementations ran."""
    counts = [pair for runs in arrays.values() for pair in combinations(runs, 2)]
    a, b = max(counts, key=lambda p: (counts.count(p), p[1] - p[0]))
    series = []
    for impl, runs in arrays.items():
        if a in runs and b in runs:
            found = flip_stats.first_flips(runs[a]["tokens"], runs[b]["tokens"], runs[a]["ends"], runs[b]["ends"])
            positions = [n for n in POSITIONS if n <= runs[a]["tokens"].shape[1]]
            series.append(Series(name=TITLES[impl], x=positions, y=[100 * y for y in flip_stats.still_equal(found, positions)]))
    return [
        Curves(
            title=title(f"Texts still equal, batch {a} and {b}"),
            x_label="tokens written",
            y_label="prompts whose texts are equal so far (%)",
            series=series[:7],
            log_x=True,
            sources=rows,
        )
    ]


def _top1(arrays: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], rows: Sequence[Row], title) -> list:
    lines = []
    for impl, runs in arrays.items():
        if len(runs) < 2:
            continue
        steps = flip_stats.compared_steps([r["tokens"] for r in runs.values()], [r["ends"] for r in runs.values()])
        per_prompt = flip_stats.std_of_top1([r["top1"] for r in runs.values()], steps)
        lines.append((TITLES[impl], ", ".join(map(str, runs)), len(per_prompt), _mean(per_prompt)))
    columns = (Column(name="implementation"), Column(name="batches"), Column(name="prompts"), Column(name="Avg_Std@top1_prob"))
    return (
        [
            Table(
                title=title("How far the highest probability moves with the batch"),
                columns=columns,
                rows=lines,
                sources=rows,
                note="Standard deviation over batches of the highest probability, mean over steps before texts part, then over prompts; 95% "
                "bootstrap intervals over prompts. 0 is equality in every bit of it.",
            )
        ]
        if lines
        else []
    )


def _mean(values: np.ndarray):
    """Mean over prompts with its BCa interval; a constant, as of an exact family, has an interval of no width."""
    if len(values) < 2 or np.ptp(values) == 0:
        return (float(values[0]),) * 3 if len(values) else None
    i = bootstrap_interval(values, lambda x: float(np.mean(x)), rng=np.random.default_rng(2026), resamples=1000)
    return i.value, i.low, i.high


# ---- labels --------------------------------------------------------------------------------------------------------------------


def labels_table(rows: Sequence[Row]) -> list:
    devices, lines, used = by_device(rows), [], []
    several_devices = len(devices) > 1
    for device, asked in devices:
        found = by_implementation(asked)
        used += behind(found)
        for impl, runs in found.items():
            margins = [r.arrays()["margin"] for r in runs.values()]
            accuracies = [100 * r.metrics["accuracy"] for r in runs.values()]
            several = len(runs) > 1
            changed = flip_stats.labels_that_change(margins)
            lines.append(
                (
                    TITLES[impl],
                    *([device] if several_devices else []),
                    ", ".join(map(str, runs)),
                    ", ".join(f"{a:.2f}" for a in accuracies),
                    flip_stats.std_of_accuracy(accuracies) if several else None,
                    changed if several else None,
                    len(margins[0]),
                    flip_stats.largest_change(margins) if several else None,
                )
            )
    columns = (
        Column(name="implementation"),
        *([Column(name="device")] if several_devices else []),
        Column(name="batches"),
        Column(name="accuracy", unit="%"),
        Column(name="Std@Acc", unit="%"),
        Column(name="labels that change"),
        Column(name="of sentences"),
        Column(name="largest change of a margin", unit="nats"),
    )
    return [
        Table(
            title="Labels by batch",
            columns=columns,
            rows=lines,
            sources=used,
            note="SST-2 sentences, labelled by the larger of two logits. Std@Acc: standard deviation of the accuracy over batches.",
        )
    ]
