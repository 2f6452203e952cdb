"""Findings of the claims about time: ratios read inside one contest, one number a process start, Student-t over processes.

    decode_vs_layercast(view)       # the worst of M = 1, 2, 4, 8 at both shapes

A claim over several contests takes the smallest value and, as its interval, the smallest low and high bounds: it holds where all of them
do. Where both exact families were timed it is read for each and the better family is taken whole, for a model runs in one; a family that
lacks a comparison never wins over one that has them all. Timings of older code are left out of a comparison that today's code made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from studies.determinism import presets
from studies.determinism.fresh import fresh
from suite.claims import Finding, Row, View
from suite.stats import ratio_interval

GPU = "H200"
DECODE_SHAPES = ((4096, 4096), (14336, 4096))
SMALL_BATCHES = (1, 2, 4, 8)
COMPILED_CELL = ({"rows": 1, "n": 14336, "k": 4096},)
PREFILL_CELL = ({"rows": 4096, "n": 4096, "k": 4096},)
EXACT = ("fma", "integer")
Logs = Callable[[Row], float | None]  # ln(baseline / ours) of one process
Comparison = tuple[str, Sequence[Row], Logs]  # its name, its rows, and what is read of each
OfFamily = Callable[[str], list[Comparison]]  # a claim's comparisons for a family
ONE_FAMILY = "a model runs in one family"


def decode_contests(rows: Sequence[int], shapes: Sequence[tuple[int, int]] = DECODE_SHAPES) -> list[dict]:
    return [{"rows": m, "n": n, "k": k} for m in rows for n, k in shapes]


def by_process(rows: Sequence[Row], logs: Logs) -> list[float]:
    """One value a process start; a process that measured twice counts once."""
    found = {r.environment.get("process", r.bundle_id): logs(r) for r in rows}
    return [v for v in found.values() if v is not None]


def worst(measured: Sequence[tuple[str, list[float]]], rows: Sequence[Row], missing: int = 0) -> Finding:
    """The smallest of several ratios, each (name, ln ratio of each process)."""

    def at(confidence: float) -> tuple[float, float]:
        intervals = [ratio_interval(values, confidence) for _, values in measured]
        return min(i.low for i in intervals), min(i.high for i in intervals)

    name, values = min(measured, key=lambda m: ratio_interval(m[1]).value)
    low, high = at(0.95)
    note = f"smallest at {name}" if len(measured) > 1 else f"at {name}"
    return Finding(value=ratio_interval(values).value, low=low, high=high, n=min(len(v) for _, v in measured), rows=rows, missing=missing, interval_at=at, note=note)


def smallest(comparisons: Sequence[Comparison]) -> Finding | None:
    """`worst` of several comparisons; one without two processes is missing."""
    measured = [(name, values) for name, rows, logs in comparisons if len(values := by_process(rows, logs)) >= 2]
    used = list({r.bundle_id: r for _, rows, _ in comparisons for r in rows}.values())
    return worst(measured, used, len(comparisons) - len(measured)) if measured else None


def better(of_family: OfFamily) -> tuple[str, Finding] | None:
    """`smallest` for each exact family, and the family with the fewest comparisons missing, then the larger value."""
    found = [(family, f) for family in EXACT if (f := smallest(of_family(family))) is not None]
    return max(found, key=lambda item: (-item[1].missing, item[1].value)) if found else None


def better_family(claim: str, view: View) -> Finding | None:
    """The finding of one of FAMILY_CLAIMS; its note names the family."""
    found = better(FAMILY_CLAIMS[claim](view))
    return found and replace(found[1], note=f"judged for {found[0]} ({ONE_FAMILY}), {found[1].note}")


def families(view: View, claims: Sequence[str]) -> str:
    """A sentence for a report: which family each of these claims is judged for."""
    found = [(claim, found[0]) for claim in claims if (found := better(FAMILY_CLAIMS[claim](view)))]
    return f"Each claim is judged for the better family, whole, for {ONE_FAMILY}: {', '.join(f'{claim} for {family}' for claim, family in found)}." if found else ""


# ---- one linear layer ----------------------------------------------------------------------------------------------------------


def is_compiled(row: Row) -> bool:
    """A contest of programs that torch compiled: one of its own, for a compiler's cache is no part of the others."""
    return "layercast_compiled" in row.params["variants"]


def contests(view: View, where: Sequence[dict], compiled: bool = False) -> list[tuple[str, list[Row]]]:
    """The rows of each contest on the reference GPU, of today's code where there are any."""
    found = [r for r in view.rows(measure="linear", device=GPU) if is_compiled(r) == compiled]
    return [(f"M={w['rows']}, {w['n']}x{w['k']}", fresh(r for r in found if all(r.params[k] == v for k, v in w.items()))) for w in where]


def comparisons(found: Sequence[tuple[str, list[Row]]], logs: Logs) -> list[Comparison]:
    return [(name, rows, logs) for name, rows in found]


def against(baselines: Sequence[str]) -> Callable[[str], Logs]:
    """family -> ln(the fastest of `baselines` that the contest read / the family), from its ratios to fma."""

    def logs_of(family: str) -> Logs:
        def logs(row: Row) -> float | None:
            own = 0.0 if family == "fma" else row.metrics.get(f"log_ratio_{family}")
            known = [row.metrics[f"log_ratio_{b}"] for b in baselines if f"log_ratio_{b}" in row.metrics]
            return None if own is None or not known else min(known) - own

        return logs

    return logs_of


def decode(rows: Sequence[int], baselines: Sequence[str], view: View) -> OfFamily:
    """Decode of so many tokens at both shapes."""
    found, logs_of = contests(view, decode_contests(rows)), against(baselines)
    return lambda family: comparisons(found, logs_of(family))


def decode_against_bf16(view: View) -> OfFamily:
    """The plain contests, and that of compiled programs where the family was timed in it."""
    plain = decode(SMALL_BATCHES, ("bf16", "bf16_padded", "bf16_compiled"), view)
    found, logs_of = [(f"{name}, compiled", rows) for name, rows in contests(view, COMPILED_CELL, compiled=True)], against(("bf16_compiled",))
    return lambda family: [*plain(family), *(c for c in comparisons(found, logs_of(family)) if by_process(c[1], c[2]))]


def decode_vs_compiled(view: View) -> Finding | None:
    return smallest(comparisons(contests(view, COMPILED_CELL, compiled=True), against(("layercast_compiled",))("fma")))


def decode_bandwidth(view: View) -> Finding | None:
    return smallest(comparisons(contests(view, decode_contests((1,), shapes=((14336, 4096),))), lambda r: r.metrics.get("log_bandwidth_share")))


def prefill(family: str, view: View) -> Finding | None:
    return smallest(comparisons(contests(view, PREFILL_CELL), against(("sgemm",))(family)))


prefill_fma_vs_sgemm, prefill_integer_vs_sgemm, prefill_b9_vs_sgemm = (partial(prefill, family) for family in ("fma", "integer", "integer-b9"))


def weight_bytes(view: View) -> Finding | None:
    """Bytes a weight as the profiler counted them: one count, no sample."""
    rows = fresh(view.rows(measure="weight_bytes", device=GPU))
    if not rows:
        return None
    value = max(r.metrics["bytes_fma"] for r in rows)
    return Finding(value=value, low=value, high=value, n=len(rows), rows=rows, note="counted by the profiler, one call")


# ---- the whole decoder ---------------------------------------------------------------------------------------------------------


def phase_of(row: Row, kind: str, batch: int, tokens: int) -> dict | None:
    """The record of one phase."""
    return next((p for p in row.record("phases") if (p["phase"], p["batch"], p["tokens"]) == (kind, batch, tokens)), None)


def of_phase(rows: Sequence[Row], kind: str, batch: int, tokens: int) -> list[Row]:
    """The rows that timed a phase, of today's code where there are any."""
    return fresh(r for r in rows if phase_of(r, kind, batch, tokens))


def phase_logs(kind: str, batch: int, tokens: int, baseline: str, family: str) -> Logs:
    """ln(baseline / family) of one phase."""

    def logs(row: Row) -> float | None:
        p = phase_of(row, kind, batch, tokens)
        ratio = {"fma": 0.0, **p["log_ratio"]} if p else {}
        return ratio[baseline] - ratio[family] if baseline in ratio and family in ratio else None

    return logs


def end_to_end(kind: str, baseline: str, least_tokens: int, view: View) -> OfFamily:
    """Decode at every batch timed, or prefill of every prompt of `least_tokens` and more; those of the preset gpu are missing where not timed."""
    rows = view.rows(measure="serving", device=GPU)
    timed = {(p["batch"], p["tokens"]) for r in rows for p in r.record("phases") if p["phase"] == kind}
    asked = presets.gpu().serving
    planned = {(b, asked.context) for b in asked.batches} if kind == "decode" else {(1, t) for t in asked.prompts}
    phases = sorted((b, t) for b, t in timed | planned if t >= least_tokens)
    return lambda family: [(f"batch {b}, {t} tokens", of_phase(rows, kind, b, t), phase_logs(kind, b, t, baseline, family)) for b, t in phases]


def exactness_cost(view: View) -> Finding | None:
    """Time over bf16 serving, minus one, at the worst batch."""
    speed = better_family("exactness_cost", view)
    if speed is None:
        return None
    flip = lambda low_high: tuple(1.0 / v - 1.0 for v in reversed(low_high))  # noqa: E731  (a larger ratio is a smaller cost)
    low, high = flip((speed.low, speed.high))
    return replace(speed, value=1.0 / speed.value - 1.0, low=low, high=high, interval_at=lambda c: flip(speed.interval_at(c)))


# claim -> its comparisons, which are read for each exact family
FAMILY_CLAIMS: Mapping[str, Callable[[View], OfFamily]] = {
    "decode_vs_layercast": partial(decode, SMALL_BATCHES, ("layercast",)),
    "decode_vs_fp32_stored": partial(decode, (1,), ("sgemm",)),
    "decode_vs_bf16": decode_against_bf16,
    "decode_end_to_end": partial(end_to_end, "decode", "layercast", 0),
    "decode_end_to_end_stored": partial(end_to_end, "decode", "sgemm", 0),
    "prefill_end_to_end": partial(end_to_end, "prefill", "layercast", 2048),
    "exactness_cost": partial(end_to_end, "decode", "bf16", 0),
}
decode_vs_layercast, decode_vs_fp32_stored, decode_vs_bf16 = (partial(better_family, name) for name in ("decode_vs_layercast", "decode_vs_fp32_stored", "decode_vs_bf16"))
decode_end_to_end, decode_end_to_end_stored, prefill_end_to_end = (partial(better_family, name) for name in ("decode_end_to_end", "decode_end_to_end_stored", "prefill_end_to_end"))
