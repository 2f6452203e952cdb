"""How near packs come to the best that the same stack does: MFU of k adapters over that of one adapter on as many sequences as help.

    saturation(ctx, model="0.5b", tokens=128, rank=16, k=64, singles=[8192, 16384, 32768], answer_tokens=32, rounds=6, launches=2, warmup_s=1.0)

MFU_max is the best of one captured adapter over the sizes of `singles` (tokens of a step); the pack has k adapters with one sequence each. FLOPs are those of
the model (studies.plora.measures.flops), so on equal kernels the share would be 1: what is missing is what packing costs. All in one contest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from studies.plora.measures.flops import peak_flops
from studies.plora.measures.subjects import subject_of, uniform
from suite.measure import Context, Result
from suite.timing import Variant, contest

__all__ = ["saturation"]

PACK = "pack"


def saturation(ctx: Context, *, model: str, tokens: int, rank: int, k: int, singles: Sequence[int], answer_tokens: int, rounds: int, launches: int, warmup_s: float) -> Result:
    """Record "variants": FLOP/s and, where the device's peak is known, MFU of each. `log_saturation_share`: ln(the pack's FLOP/s / the best single one's)."""
    cuda = ctx.device.startswith("cuda")
    subject = subject_of(ctx, model, tokens=tokens, answer_tokens=answer_tokens)
    shapes = {PACK: uniform(tokens, slots=k, rank=rank)} | {f"one adapter, {n} tokens": uniform(tokens, slots=1, rank=rank, rows=max(1, n // tokens)) for n in singles}
    packs = {v: subject.pack(shape, graphed=cuda) for v, shape in shapes.items()}
    result = contest([Variant(name=v, calls=(subject.step(p),)) for v, p in packs.items()], device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, mode="eager", control=PACK)
    work = {v: subject.flops(shape) for v, shape in shapes.items()}
    rates = {v: work[v] / subject.step_s(result, v) for v in shapes}
    best = max((v for v in shapes if v != PACK), key=rates.get)
    peak = peak_flops(torch.cuda.get_device_name(ctx.device)) if cuda else None
    lines = [{"variant": v, "tokens": tokens * sum(s.rows for s in shape.slots), "us": subject.step_s(result, v) * 1e6, "tflops": rates[v] / 1e12, "mfu": rates[v] / peak if peak else None} for v, shape in shapes.items()]
    share = result.log_ratio(best, PACK) + math.log(work[PACK] / work[best])
    metrics = {"log_saturation_share": share, "log_control": result.control_log_ratio, "noise_floor": result.noise_floor, "step_ms": subject.step_s(result, PACK) * 1e3}
    mfu = {"mfu_pack": rates[PACK] / peak, "mfu_max": rates[best] / peak} if peak else {}
    return Result(metrics=metrics | mfu, arrays=result.to_arrays(), records={"variants": lines, "conditions": result.conditions, "telemetry": result.telemetry},
                  facts={"throttle": ",".join(result.throttle_reasons) or "none", "best": best})  # fmt: skip
