"""Throughput of packs: the ladder of ways to run k adapters, and how the gain falls with the work that one adapter brings.

    ladder(ctx, model="0.5b", tokens=128, batch=1, k=64, rank=16, answer_tokens=32, saturated_tokens=32768, variants=list(LADDER), rounds=6, launches=2, warmup_s=1.0)
    surface(ctx, model="0.5b", tokens=128, batch=1, rank=16, ks=[2, 4, 8, 16, 32, 64], ...)

All variants of a comparison stand in one contest, interleaved. A step trains k adapters once: a micro-step of `batch` sequences each, then the optimizer.
A ratio is per adapter: k times the step of the fastest single adapter (captured in a CUDA graph, B1), over the pack's step. What that can gain is bounded:
the "saturated" variant trains one adapter on so many sequences that the GPU is busy, and its real tokens a second over those of B1 is the cap,
eta_max / eta_1, in the same contest. Eager PEFT (B0) and several processes (B2) have cells of their own (studies.plora.measures.baselines).

Before it is timed every variant trains the first adapter a few steps, and its B must point where that of the single one does, or nothing is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from studies.plora.adapter import PackShape
from studies.plora.engine.pack import EnginePack
from studies.plora.measures.flops import peak_flops
from studies.plora.measures.subjects import Subject, subject_of, uniform
from suite.measure import Context, Result
from suite.timing import ContestResult, Variant, contest

__all__ = ["LADDER", "ladder", "surface"]

TRIED_STEPS = 4  # before the contest
LEAST_COSINE = 0.9  # of an adapter's B and that of the same adapter run alone: bf16 and fp32 differ by 0.004 in two layers, another A gives 0.04
SATURATED = "saturated"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to run: adapters: 1 or all k of them; path of the adapters' products; captured in a CUDA graph or launched eagerly."""

    path: str
    graphed: bool
    packed: bool = True


LADDER: Mapping[str, Rung] = {
    "one eager": Rung(path="looped", graphed=False, packed=False),
    "B1 one graphed": Rung(path="looped", graphed=True, packed=False),
    "B1 one graphed, our kernels": Rung(path="triton", graphed=True, packed=False),
    "B3 looped": Rung(path="looped", graphed=False),
    "B3 looped, graphed": Rung(path="looped", graphed=True),
    "B4 padded": Rung(path="padded", graphed=False),
    "B5 grouped": Rung(path="grouped", graphed=False),
    "B6 ours": Rung(path="triton", graphed=False),
    "B7 ours, graphed": Rung(path="triton", graphed=True),
}
SINGLES, OURS = ("B1 one graphed", "B1 one graphed, our kernels"), "B7 ours, graphed"


def ladder(
    ctx: Context, *, model: str, tokens: int, batch: int, k: int, rank: int, answer_tokens: int, saturated_tokens: int, variants: Sequence[str], rounds: int, launches: int, warmup_s: float,
) -> Result:  # fmt: skip
    """Record "variants": a line for each rung and the saturated one. Raises ValueError for a rung that LADDER does not hold."""
    if unknown := [v for v in variants if v not in LADDER]:
        raise ValueError(f"a rung is one of {list(LADDER)}, got {unknown}; choose among them")
    subject = subject_of(ctx, model, tokens=tokens, answer_tokens=answer_tokens)
    one, pack = uniform(tokens, slots=1, rank=rank, rows=batch), uniform(tokens, slots=k, rank=rank, rows=batch)
    asked = {v: (pack if LADDER[v].packed else one, LADDER[v]) for v in dict.fromkeys((*SINGLES, OURS, *variants))}
    return _timed(ctx, subject, asked, saturated=saturated_tokens, ours=OURS, rank=rank, rounds=rounds, launches=launches, warmup_s=warmup_s)


def surface(
    ctx: Context, *, model: str, tokens: int, batch: int, rank: int, ks: Sequence[int], answer_tokens: int, saturated_tokens: int, rounds: int, launches: int, warmup_s: float,
) -> Result:  # fmt: skip
    """Record "variants": the captured pack at every k, beside the single adapter and the saturated one. `log_pack_speedup` is the largest k's."""
    subject = subject_of(ctx, model, tokens=tokens, answer_tokens=answer_tokens)
    one = uniform(tokens, slots=1, rank=rank, rows=batch)
    asked = {v: (one, LADDER[v]) for v in SINGLES} | {f"k={k}": (uniform(tokens, slots=k, rank=rank, rows=batch), LADDER[OURS]) for k in ks}
    return _timed(ctx, subject, asked, saturated=saturated_tokens, ours=f"k={max(ks)}", rank=rank, rounds=rounds, launches=launches, warmup_s=warmup_s)


def _timed(
    ctx: Context, subject: Subject, asked: Mapping[str, tuple[PackShape, Rung]], *, saturated: int, ours: str, rank: int, rounds: int, launches: int, warmup_s: float,
) -> Result:  # fmt: skip
    cuda = ctx.device.startswith("cuda")
    shapes = {v: shape for v, (shape, _) in asked.items()} | {SATURATED: uniform(subject.tokens, slots=1, rank=rank, rows=max(1, saturated // subject.tokens))}
    packs = {v: subject.pack(shape, path=rung.path, graphed=rung.graphed and cuda) for v, (shape, rung) in asked.items()}
    cosines = _cosines(packs)
    if wrong := {v: c for v, c in cosines.items() if not c >= LEAST_COSINE}:
        raise AssertionError(f"one adapter's B points the same way however it is run, cosines of at least {LEAST_COSINE}, got {wrong}; a path is broken")
    packs[SATURATED] = subject.pack(shapes[SATURATED], graphed=cuda)
    made = [Variant(name=v, calls=(subject.step(pack),)) for v, pack in packs.items()]
    result = contest(made, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, mode="eager", control=ours)
    for pack in packs.values():
        assert all(math.isfinite(p.loss) for p in pack.live().values()), "a timed adapter's loss is not finite"
    lines = _lines(ctx, subject, result, shapes, cosines)
    return Result(metrics=_summary(lines, ours) | {"log_control": result.control_log_ratio, "noise_floor": result.noise_floor} | _peak_gib(ctx), arrays=result.to_arrays(),
                  records={"variants": list(lines.values()), "conditions": result.conditions, "telemetry": result.telemetry},
                  facts={"throttle": ",".join(result.throttle_reasons) or "none"})  # fmt: skip


def _cosines(packs: Mapping[str, EnginePack]) -> dict[str, float]:
    """Of the first slot's B after TRIED_STEPS, which is the same adapter everywhere, with that of the single one."""
    found: dict[str, np.ndarray] = {}
    for name, pack in packs.items():
        pack.advance(TRIED_STEPS)
        weights = pack.weights(0)
        found[name] = np.concatenate([weights[n].ravel() for n in sorted(weights) if "lora_B" in n])
    want = found[SINGLES[0]]
    return {name: float(b @ want / (np.linalg.norm(b) * np.linalg.norm(want))) for name, b in found.items()}


def _lines(ctx: Context, subject: Subject, result: ContestResult, shapes: Mapping[str, PackShape], cosines: Mapping[str, float]) -> dict[str, dict]:
    """By variant: adapters, times, real tokens a second, MFU where the device's peak is known, ln of the gain a adapter over the fastest single one."""
    device = torch.cuda.get_device_name(ctx.device) if ctx.device.startswith("cuda") else ""
    peak = peak_flops(device)
    per_token = {v: subject.step_s(result, v) / _tokens(shapes[v]) for v in shapes}
    best = min(SINGLES, key=per_token.get)
    lines = {}
    for v, shape in shapes.items():
        seconds = subject.step_s(result, v)
        lines[v] = {"variant": v, "adapters": len(shape.slots), "tokens": _tokens(shape), "us": seconds * 1e6, "tokens_per_s": 1 / per_token[v], "mfu": subject.flops(shape) / seconds / peak if peak else None,
                    "log_speedup": result.log_ratio(best, v) + math.log(_tokens(shape) / _tokens(shapes[best])), "cosine": cosines.get(v)}  # fmt: skip
    return lines


def _tokens(shape: PackShape) -> int:
    """Real tokens of a micro-step: rows are as long as the slots."""
    return shape.tokens * sum(s.rows for s in shape.slots)


def _summary(lines: Mapping[str, dict], ours: str) -> dict[str, float]:
    single = max((lines[v] for v in SINGLES), key=lambda x: x["tokens_per_s"])
    out = {"log_pack_speedup": lines[ours]["log_speedup"], "log_pack_cap": lines[SATURATED]["log_speedup"], "tokens_per_s": lines[ours]["tokens_per_s"], "step_ms": lines[ours]["us"] / 1e3}
    shares = {"mfu_single": single["mfu"], "mfu_pack": lines[ours]["mfu"], "mfu_max": lines[SATURATED]["mfu"]}
    return out | {name: share for name, share in shares.items() if share is not None}


def _peak_gib(ctx: Context) -> dict[str, float]:
    """Of the whole contest: all variants' packs together."""
    return {"peak_gib": torch.cuda.max_memory_allocated(ctx.device) / 2**30} if ctx.device.startswith("cuda") else {}
