"""A decoder of the shape of Llama-2-7B, end to end: how long a decode step and a prefill take, by family, in one process.

    serving(ctx, batches=[1, 8], context=1024, prompts=[2048], variants=["fma", "integer", "layercast", "sgemm", "bf16"], rounds=4)

One step is what a server runs for every token: all layers, the cache read at `context` tokens, logits and argmax, as one CUDA graph.
Weights are random (seeded, normal), so texts mean nothing and times do not depend on them. "bf16" is the same decoder with cuBLAS's
bf16 linears and torch's attention over the same bf16 cache; LayerCast and "sgemm" (weights stored in fp32) keep an fp32 cache.
Floors: a step reads every weight once (13.2 GB in 16 bits: 3.1 ms at 4.25 TB/s; LayerCast moves 10 bytes a weight); a prefill of T tokens
needs 2 * 6.6e9 * T flops in the linears.
"""

from __future__ import annotations

from functools import partial

import torch

from studies.models.config import LLAMA2_7B
from studies.models.decoder import Decoder
from studies.models.prepared import Model, prepare
from studies.models.synthetic import random_weights
from suite.measure import Context, Result
from suite.timing import Variant, contest

FAMILY = {"fma": "fma", "integer": "integer", "layercast": "layercast", "sgemm": "sgemm", "bf16": "bf16-serving"}
EXACT = ("fma", "integer")


def serving(ctx: Context, *, batches: list[int], context: int, prompts: list[int], variants: list[str], rounds: int) -> Result:
    """Record "phases": one entry a phase (decode at a batch, prefill of a prompt) with the median time of each variant and ln ratios to fma."""
    weights = random_weights(LLAMA2_7B, seed=ctx.seed, device=ctx.device)
    models = {v: prepare(weights, family=FAMILY[v], device=ctx.device) for v in variants}
    phases, arrays = [], {}
    for batch in batches:
        result = _contest(ctx, {v: _decode(v, m, batch, context, ctx) for v, m in models.items()}, rounds, 2, graph=True)
        phases.append(_phase("decode", batch, context, result, variants))
        arrays |= {f"decode{batch}.{v}": result.samples[v] for v in variants}
    some = [v for v in variants if v != "sgemm"]  # LayerCast's arithmetic without its upcasts, which take a hundredth of a prefill
    for tokens in prompts:
        ids = torch.randint(LLAMA2_7B.vocabulary, (tokens,), generator=torch.Generator().manual_seed(ctx.seed)).tolist()
        result = _contest(ctx, {v: _prefill(v, models[v], ids) for v in some}, 2, 1, graph=False)
        phases.append(_phase("prefill", 1, tokens, result, some))
        arrays |= {f"prefill{tokens}.{v}": result.samples[v] for v in some}
    return Result(records={"phases": phases}, arrays=arrays)


def _contest(ctx: Context, variants: dict[str, Variant], rounds: int, launches: int, *, graph: bool):
    """The control is the faster exact family: a program that is timed twice need not be a slow one."""
    return contest(list(variants.values()), device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=0.5, mode="graph" if graph else "eager",
                   control="integer" if "integer" in variants else next(iter(variants)))


def _decode(name: str, model: Model, batch: int, context: int, ctx: Context) -> Variant:
    """One step over a full cache, again and again."""
    decoder = Decoder(model, batch=batch, capacity_tokens=context)
    decoder.pretend(context - 1, torch.Generator(device=ctx.device).manual_seed(ctx.seed))
    decoder.repeat_step()
    logits_BV = decoder.logits_BV
    return Variant(name=name, calls=(decoder.repeat_step,), check=partial(_same, name, decoder, logits_BV.clone()), poison=partial(logits_BV.fill_, float("nan")))


def _prefill(name: str, model: Model, ids: list[int]) -> Variant:
    decoder = Decoder(model, batch=1, capacity_tokens=len(ids))
    expected = decoder.prefill([ids]).clone()
    return Variant(name=name, calls=(partial(decoder.prefill, [ids]),), check=partial(_same, name, decoder, expected), poison=partial(decoder.logits_BV.fill_, float("nan")))


def _same(name: str, decoder: Decoder, expected_BV: torch.Tensor) -> None:
    """Exact families give the first pass's bits again. The others promise none: their logits are finite, and as large as at first."""
    found_BV = decoder.logits_BV
    if name in EXACT:
        assert torch.equal(found_BV, expected_BV), f"{name} gave other bits than its first pass"
    else:
        assert bool(torch.isfinite(found_BV).all()) and 0.5 < float(found_BV.norm() / expected_BV.norm()) < 2.0, f"{name} is far from its first pass"


def _phase(kind: str, batch: int, tokens: int, result, variants: list[str]) -> dict:
    return {"phase": kind, "batch": batch, "tokens": tokens, "ms": {v: result.median_s(v) * 1e3 for v in variants},
            "log_ratio": {v: result.log_ratio(v, "fma") for v in variants if v != "fma"}, "log_control": result.control_log_ratio}
