"""Findings of the claims about throughput and kernels.

    throughput(view, model="0.5b")      # k one-adapter steps of the best of B1 and B2, over the pack's step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from studies.plora.presets import HEADLINE, KERNEL_HEADLINE, MODELS
from studies.plora.report.findings import by_process, groups, metric, missing, ratio, smallest
from suite.claims import Finding, Row, View

CACHES = 3.0


def of_model(view: View, measure: str, model: str, tokens: int | None = None) -> list[Row]:
    """Rows at the point that the claims are about: batch 1, 128 tokens."""
    return view.rows(measure=measure, where={"model": model, "tokens": tokens or HEADLINE["tokens"], "batch": HEADLINE["batch"]})


def processes_gain(view: View, model: str) -> dict[int, float]:
    """ln(tokens a second of the best number of processes on one GPU / those of one captured process) by replicate."""
    return {r.replicate: r.metrics["log_processes_over_graphed"] for r in of_model(view, "processes", model) if "log_processes_over_graphed" in r.metrics}


def over_best(view: View, rows: Sequence[Row], model: str) -> tuple[list[float], str]:
    """ln of the pack's gain over the better of B1 and B2, a process each, and a word on B2."""
    gains = processes_gain(view, model)
    if not gains:
        return by_process(rows, metric("log_pack_speedup")), "several processes on one GPU (B2) were not measured"
    mean = sum(gains.values()) / len(gains)
    logs = by_process(rows, lambda r: r.metrics["log_pack_speedup"] - max(0.0, gains.get(r.replicate, mean)))
    return logs, f"the best number of processes on one GPU (B2) is {math.exp(mean):.2f}x of B1"


def throughput(view: View, model: str) -> Finding | None:
    rows = of_model(view, "ladder", model)
    logs, word = over_best(view, rows, model)
    shares = by_process(rows, lambda r: r.metrics["log_pack_speedup"] - r.metrics["log_pack_cap"])
    cap = by_process(rows, metric("log_pack_cap"))
    where = {"model": model, "tokens": HEADLINE["tokens"], "batch": HEADLINE["batch"]}
    note = f"cap eta_max/eta_1 {math.exp(sum(cap) / len(cap)):.2f}x, share of it {math.exp(sum(shares) / len(shares)):.2f}; {word}" if cap else ""
    return ratio(rows, logs, missing(view, "ladder", where) + missing(view, "processes", where), note)


def throughput_of_cap(view: View) -> Finding | None:
    """The least share of the printed cap over the three models: what packing gains over B1, of what it could."""
    found = []
    for model in MODELS:
        rows = of_model(view, "ladder", model)
        f = ratio(rows, by_process(rows, lambda r: r.metrics["log_pack_speedup"] - r.metrics["log_pack_cap"]), missing(view, "ladder", {"model": model, "tokens": HEADLINE["tokens"]}), f"the least, at {model}")
        found.append(f)
    return smallest(found)


def throughput_paper(view: View) -> Finding | None:
    """The best ratio to eager PEFT over the points of the paper's regime; PEFT as it comes (fp32 adapters)."""
    found = [(ratio(rows, by_process(rows, metric("log_pack_over_peft"))), key, rows) for key, rows in groups([r for r in view.rows(measure="peft_eager", where={"batch": 1}) if r.params["lengths"]], "model", "tokens", "rank", "lengths").items()]
    found = [(f, key, rows) for f, key, rows in found if f]
    if not found:
        return None
    best, (_, model, tokens, rank, lengths), rows = max(found, key=lambda x: x[0].value)
    host = [r.metrics["host_us_per_op"] for r in rows if "host_us_per_op" in r.metrics]
    said = f"the best of {len(found)} points: {model}, {tokens} tokens, rank {rank}, lengths of {lengths}" + (f"; eager PEFT spends {sum(host) / len(host):.1f} us of the host an operation" if host else "")
    return replace(best, missing=missing(view, "peft_eager"), note=f"{said}: mostly launch overhead, which a CUDA graph of one adapter takes away without packing")


def saturation_share(view: View) -> Finding | None:
    """The least over the models."""
    found = [ratio(rows, by_process(rows, metric("log_saturation_share")), missing(view, "saturation"), f"the least, at {model}") for (_, model), rows in groups(view.rows(measure="saturation"), "model").items()]
    return smallest(found)


def kernels(rows: Sequence[Row], name: str, absent: int) -> list[tuple[Finding, tuple]]:
    """A metric at every (pass, d, tokens) that was timed in two processes or more."""
    pairs = [(ratio(same, by_process(same, metric(name)), absent), key[1:]) for key, same in groups(rows, "which", "d", "tokens").items()]
    return [(f, key) for f, key in pairs if f]


def worst_kernel(view: View, name: str, *, beyond_cache: bool = False, **where) -> Finding | None:
    """beyond_cache: of shapes one call of which moves more than three L2s."""
    rows = view.rows(measure="kernels", where=where)
    rows = [r for r in rows if not beyond_cache or r.record("more")["over_cache"] >= CACHES]
    found = kernels(rows, name, missing(view, "kernels", where))
    if not found:
        return None
    f, (which, d, tokens) = min(found, key=lambda x: x[0].value)
    return replace(f, note=f"the least of {len(found)}: {which}, d = {d}, {tokens} tokens an adapter")


kernel_vs_graphed = partial(worst_kernel, name="log_kernel_speedup", **KERNEL_HEADLINE)
kernel_of_cap = partial(worst_kernel, name="log_kernel_cap_share")
kernel_roofline = partial(worst_kernel, name="log_kernel_roofline_share", beyond_cache=True)
