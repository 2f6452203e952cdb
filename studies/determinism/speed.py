"""Findings of the claims about time: ratios read inside one contest, one number a process start, Student-t over processes.

    decode_vs_layercast(view)       # the worst of M = 1, 2, 4, 8 at both shapes

A claim over several contests takes the smallest value and, as its interval, the smallest low and high bounds: it holds where all of them
do. Where both exact families were timed it is read for each and the better family is taken whole, for a model runs in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from suite.claims import Finding, Row, View
from suite.stats import ratio_interval

GPU = "H200"
DECODE_SHAPES = ((4096, 4096), (14336, 4096))
SMALL_BATCHES = (1, 2, 4, 8)
PREFILL_CELL = ({"rows": 4096, "n": 4096, "k": 4096},)
EXACT = ("fma", "integer")
Logs = Callable[[Row], float | None]  # ln(baseline / ours) of one process


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
    return Finding(value=ratio_interval(values).value, low=low, high=high, n=min(len(v) for _, v in measured), rows=rows, missing=missing, interval_at=at, note=f"smallest at {name}")


def smallest(groups: Sequence[tuple[str, Sequence[Row]]], logs: Logs) -> Finding | None:
    """`worst` of several comparisons, each (name, its rows); one without two processes is missing."""
    measured = [(name, values) for name, rows in groups if len(values := by_process(rows, logs)) >= 2]
    return worst(measured, [r for _, rows in groups for r in rows], len(groups) - len(measured)) if measured else None


def better_family(groups: Sequence[tuple[str, Sequence[Row]]], logs_of: Callable[[str], Logs]) -> Finding | None:
    """`smallest` for each exact family, and of these the larger."""
    found = [(family, f) for family in EXACT if (f := smallest(groups, logs_of(family))) is not None]
    if not found:
        return None
    family, best = max(found, key=lambda item: (-item[1].missing, item[1].value))
    return replace(best, note=f"{family}, {best.note}")


# ---- one linear layer ----------------------------------------------------------------------------------------------------------


def contests(view: View, where: Sequence[dict]) -> list[tuple[str, list[Row]]]:
    """The rows of each contest on the reference GPU; those of compiled programs are contests of their own."""
    plain = [r for r in view.rows(measure="linear", device=GPU) if "layercast_compiled" not in r.params["variants"]]
    return [(f"M={w['rows']}, {w['n']}x{w['k']}", [r for r in plain if all(r.params[k] == v for k, v in w.items())]) for w in where]


def against(baselines: Sequence[str]) -> Callable[[str], Logs]:
    """ln(the fastest of `baselines` / the family), from the contest's ratios to fma."""

    def logs_of(family: str) -> Logs:
        def logs(row: Row) -> float | None:
            own = 0.0 if family == "fma" else row.metrics.get(f"log_ratio_{family}")
            known = [row.metrics[f"log_ratio_{b}"] for b in baselines if f"log_ratio_{b}" in row.metrics]
            return None if own is None or not known else min(known) - own

        return logs

    return logs_of


def decode_vs_layercast(view: View) -> Finding | None:
    return better_family(contests(view, decode_contests(SMALL_BATCHES)), against(("layercast",)))


def decode_vs_fp32_stored(view: View) -> Finding | None:
    return better_family(contests(view, decode_contests((1,))), against(("sgemm",)))


def decode_vs_bf16(view: View) -> Finding | None:
    return better_family(contests(view, decode_contests(SMALL_BATCHES)), against(("bf16", "bf16_padded")))


def decode_vs_compiled(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="linear", device=GPU) if "layercast_compiled" in r.params["variants"]]
    return smallest([("M=1, 14336x4096", rows)], against(("layercast_compiled",))("fma"))


def decode_bandwidth(view: View) -> Finding | None:
    return smallest(contests(view, decode_contests((1,), shapes=((14336, 4096),))), lambda r: r.metrics.get("log_bandwidth_share"))


def prefill(family: str, view: View) -> Finding | None:
    return smallest(contests(view, PREFILL_CELL), against(("sgemm",))(family))


prefill_fma_vs_sgemm, prefill_integer_vs_sgemm, prefill_b9_vs_sgemm = (partial(prefill, family) for family in ("fma", "integer", "integer-b9"))


def weight_bytes(view: View) -> Finding | None:
    """Bytes a weight as the profiler counted them: one count, no sample."""
    rows = view.rows(measure="weight_bytes", device=GPU)
    if not rows:
        return None
    value = max(r.metrics["bytes_fma"] for r in rows)
    return Finding(value=value, low=value, high=value, n=len(rows), rows=rows, note="counted by the profiler, one call")


# ---- the whole decoder ---------------------------------------------------------------------------------------------------------


def phase_logs(kind: str, batch: int, tokens: int, baseline: str, family: str) -> Logs:
    """ln(baseline / family) of one phase."""

    def logs(row: Row) -> float | None:
        for p in row.record("phases"):
            if (p["phase"], p["batch"], p["tokens"]) == (kind, batch, tokens):
                ratio = {"fma": 0.0, **p["log_ratio"]}
                return ratio[baseline] - ratio[family] if baseline in ratio and family in ratio else None
        return None

    return logs


def end_to_end(kind: str, baseline: str, least_tokens: int, view: View) -> Finding | None:
    """The worst phase of the better family: decode at every batch timed, or prefill of every prompt of `least_tokens` and more."""
    rows = view.rows(measure="serving", device=GPU)
    phases = sorted({(p["batch"], p["tokens"]) for r in rows for p in r.record("phases") if p["phase"] == kind and p["tokens"] >= least_tokens})
    found = []
    for family in EXACT:
        per_phase = [(f"batch {b}, {t} tokens", by_process(rows, phase_logs(kind, b, t, baseline, family))) for b, t in phases]
        measured = [(name, values) for name, values in per_phase if len(values) >= 2]
        found += [(family, worst(measured, rows, len(phases) - len(measured)))] if measured else []
    if not found:
        return None
    family, best = max(found, key=lambda item: item[1].value)
    return replace(best, note=f"{family}, {best.note}")


decode_end_to_end = partial(end_to_end, "decode", "layercast", 0)
decode_end_to_end_stored = partial(end_to_end, "decode", "sgemm", 0)
prefill_end_to_end = partial(end_to_end, "prefill", "layercast", 2048)


def exactness_cost(view: View) -> Finding | None:
    """Time over bf16 serving, minus one, at the worst batch."""
    speed = end_to_end("decode", "bf16", 0, view)
    if speed is None:
        return None
    flip = lambda low_high: tuple(1.0 / v - 1.0 for v in reversed(low_high))  # noqa: E731  (a larger ratio is a smaller cost)
    low, high = flip((speed.low, speed.high))
    return replace(speed, value=1.0 / speed.value - 1.0, low=low, high=high, interval_at=lambda c: flip(speed.interval_at(c)))
