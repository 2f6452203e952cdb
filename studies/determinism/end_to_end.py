"""A decoder of the shape of Llama-2-7B, end to end: how long a decode step and a prefill take, by family, in one process.

    serving(ctx, batches=[1, 8], context=1024, prompts=[2048], variants=["fma", "integer", "layercast", "sgemm", "bf16"], rounds=4)

One step is what a server runs for every token: all layers, the cache read at `context` tokens, logits and argmax, as one CUDA graph.
Weights are random (seeded, normal), so texts mean nothing and times do not depend on them. "bf16" is the same decoder with cuBLAS's
bf16 linears and torch's attention over the same bf16 cache; LayerCast and "sgemm" (weights stored in fp32) keep an fp32 cache.
Floors stand in each phase: the bytes of weights and cache that a decode step moves, the flops of a prefill's linears; beside a step's time
the number of kernels that it launches.

Memory, in GB, at batches 1 and 8 and 1024 tokens: fma 13.2, integer 33.0 (bf16 and three digits a weight), sgemm 26.4, bf16 13.2 which
LayerCast shares, the embedding 0.3 once: 86.1. Caches at batch 8: three in bf16 of 4.3, two in fp32 of 8.6: 30.1. Together 116.2, and a
step's own tensors, below 2. The weights as made, 13.5, are gone before there is a cache.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from studies.determinism.witness import kernels_launched
from studies.models.config import LLAMA2_7B
from studies.models.decoder import Decoder
from studies.models.families import FAMILIES
from studies.models.operators import operators
from studies.models.prepared import Model, prepare
from studies.models.synthetic import random_weights, tensor_shapes
from suite.measure import Context, Result
from suite.timing import ContestResult, Variant, contest

FAMILY = {"fma": "fma", "integer": "integer", "layercast": "layercast", "sgemm": "sgemm", "bf16": "bf16-serving"}
WEIGHT_BYTES = {"fma": 2, "integer": 2, "layercast": 10, "sgemm": 4, "bf16": 2}  # moved a weight in a decode step; LayerCast reads 2, writes 4, reads 4
EXACT = ("fma", "integer")


def serving(ctx: Context, *, batches: list[int], context: int, prompts: list[int], variants: list[str], rounds: int) -> Result:
    """Record "phases": one entry a phase (decode at a batch, prefill of a prompt) with the median time of each variant and ln ratios to fma."""
    gpu = ctx.device.startswith("cuda")
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    models, phases, arrays = prepared(variants, ctx), [], {}
    for batch in batches:
        entered = {v: _decode(v, m, batch, context, ctx) for v, m in models.items()}
        result = _contest(ctx, entered, rounds, 2, graph=True)
        launched = {v: kernels_launched(entered[v].calls[0]) for v in variants} if gpu else {}
        phases.append(_phase("decode", batch, context, result, variants) | {"floor_bytes": {v: floor_bytes(v, batch, context) for v in variants}, "kernels": launched})
        del entered  # and its caches
        arrays |= {f"decode{batch}.{v}": result.samples[v] for v in variants}
    some = [v for v in variants if v != "sgemm"]  # LayerCast's arithmetic without its upcasts, which take a hundredth of a prefill
    for tokens in prompts:
        ids = torch.randint(LLAMA2_7B.vocabulary, (tokens,), generator=torch.Generator().manual_seed(ctx.seed)).tolist()
        result = _contest(ctx, {v: _prefill(v, models[v], ids) for v in some}, 1, 2, graph=False)
        phases.append(_phase("prefill", 1, tokens, result, some) | {"floor_flops": 2 * (weights_in_linears() - LLAMA2_7B.vocabulary * LLAMA2_7B.hidden) * tokens})
        arrays |= {f"prefill{tokens}.{v}": result.samples[v] for v in some}
    return Result(records={"phases": phases}, arrays=arrays, facts={"peak_gb": f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"} if gpu else {})


def prepared(variants: list[str], ctx: Context) -> dict[str, Model]:
    """Each variant's model; the weights as made are gone with this call.

    LayerCast's model is bf16's with another family: both read the bf16 matrices as they are, so one copy serves both.
    """
    weights = random_weights(LLAMA2_7B, seed=ctx.seed, device=ctx.device)
    made = {v: prepare(weights, family=FAMILY[v], device=ctx.device) for v in variants if v != "layercast"}
    if "layercast" in variants:
        plain, family = made.get("bf16") or prepare(weights, family=FAMILY["bf16"], device=ctx.device), FAMILIES[FAMILY["layercast"]]
        made["layercast"] = replace(plain, family=family, operators=operators(family.operators, plain.device))
    return {v: made[v] for v in variants}


def weights_in_linears() -> int:
    """Elements of all matrices but the embedding, whose rows are looked up."""
    return sum(math.prod(shape) for name, shape in tensor_shapes(LLAMA2_7B).items() if len(shape) == 2 and not name.startswith("embed_tokens"))


def floor_bytes(variant: str, batch: int, context: int) -> int:
    """Bytes that one decode step of the variant moves at least: its weights, and the keys and values of every row."""
    config = LLAMA2_7B
    cached = 2 * config.layers * batch * context * config.kv_heads * config.head_dim
    return WEIGHT_BYTES[variant] * weights_in_linears() + cached * FAMILIES[FAMILY[variant]].kv.itemsize


def _contest(ctx: Context, variants: dict[str, Variant], rounds: int, launches: int, *, graph: bool) -> ContestResult:
    """The control is the faster exact family: a program that is timed twice need not be a slow one.

    A prefill needs no warm-up of its own: before the first round each one has run more than ten times, which takes seconds.
    """
    return contest(list(variants.values()), device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=0.5 if graph else 0.0, mode="graph" if graph else "eager",
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


def _phase(kind: str, batch: int, tokens: int, result: ContestResult, variants: list[str]) -> dict:
    return {"phase": kind, "batch": batch, "tokens": tokens, "ms": {v: result.median_s(v) * 1e3 for v in variants},
            "log_ratio": {v: result.log_ratio(v, "fma") for v in variants if v != "fma"}, "log_control": result.control_log_ratio}
