"""Findings of the claims about time: ratios read inside one contest, one number a process start, Student-t over processes.

    training_speedup(view)      # Finding | None

All of it is measured on a GPU. Numbers of one process never mix with those of another; a claim over several models is a claim each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from studies.loka.presets import ALL_MODS
from studies.loka.report.findings import counted, missing
from suite.claims import Finding, Row, View
from suite.stats import ratio_interval

WUKONG = {"model": "wukong", "size": "5.6"}
LARGE = {"m": 65536, "k": 4096, "norm": "blocknorm", "activation": "hardswish", "granularity": "row", "keep": False}  # beyond three L2s of any GPU
Logs = Callable[[Row], float | None]


def by_process(rows: Sequence[Row], logs: Logs) -> list[float]:
    """One value a process start; a process that measured twice counts once."""
    found = {r.environment.get("process", r.bundle_id): logs(r) for r in rows}
    return [v for v in found.values() if v is not None]


def ratio(rows: Sequence[Row], logs: Logs, absent: int = 0, note: str = "") -> Finding | None:
    """A ratio from one ln ratio each process; None for fewer than two."""
    values = by_process(rows, logs)
    if len(values) < 2:
        return None

    def at(confidence: float) -> tuple[float, float]:
        i = ratio_interval(values, confidence)
        return i.low, i.high

    i = ratio_interval(values)
    return Finding(value=i.value, low=i.low, high=i.high, n=i.n, rows=rows, missing=absent, note=note, interval_at=at)


def metric(name: str, sign: float = 1.0) -> Logs:
    return lambda row: sign * row.metrics[name] if name in row.metrics else None


def _steps(view: View, name: str, sign: float = 1.0, **where) -> Finding | None:
    where = {**WUKONG, **where}
    rows = [r for r in view.rows(measure="dense_step", where=where) if name in r.metrics]
    return ratio(rows, metric(name, sign), missing(view, "dense_step", where))


dispatch_vs_bf16 = partial(_steps, name="log_speedup_dispatch", mods="", training=True)
dispatch_vs_single = partial(_steps, name="log_dispatch_over_single", mods="", training=True)
naive_fp8_speed = partial(_steps, name="log_speedup_torchao", sign=-1.0, mods="", training=True)
training_speedup = partial(_steps, name="log_speedup_dispatch", mods=ALL_MODS, training=True)
inference_speedup = partial(_steps, name="log_speedup_dispatch", mods=ALL_MODS, training=False)


def of_amdahl(view: View) -> Finding | None:
    """The smaller of training's and inference's share of what its products' own times allow."""
    found = []
    for training in (True, False):
        rows = [r for r in view.rows(measure="dense_step", where={**WUKONG, "mods": ALL_MODS, "training": training}) if r.metrics.get("amdahl_cap")]
        share = ratio(rows, lambda r: r.metrics["log_speedup_dispatch"] - math.log(r.metrics["amdahl_cap"]), note="training" if training else "inference")
        found += [share] if share else []
    return min(found, key=lambda f: f.value) if len(found) == 2 else None


def mods_latency(view: View) -> Finding | None:
    return ratio(view.rows(measure="mods_latency"), metric("log_speedup_mods"), missing(view, "mods_latency"))


def fused_quantise_bandwidth(view: View) -> Finding | None:
    return ratio(view.rows(measure="fused_quantise", where=LARGE), metric("log_bandwidth_share"), missing(view, "fused_quantise", LARGE))


def crossover_map(view: View) -> Finding | None:
    """The share of the planned shapes that were timed."""
    rows = view.rows(measure="crossover")
    absent = missing(view, "crossover")
    return counted(rows, [True] * len(rows) + [False] * absent, 0, f"{len(rows)} shapes and passes timed")
