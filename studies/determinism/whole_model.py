"""Measure functions over the whole decoder: SmolLM2-135M-Instruct writes texts, and every logit on the way is hashed.

    generation(ctx, family="fma", device="cuda", prompts=50, new_tokens=16, batch=8, chunk=16, pad_to=0, cache=True, graph=True, sampled=False, ranks=1)

A prompt's digest is over the tokens and the logits of each of its steps, so a bit that differs in one logit of one step shows, and one
digest a prompt serves every schedule, device and number of ranks. Weights are the model's own, rounded to bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from studies.models.decoder import Sampling
from studies.models.generation import Generation, Schedule, generate
from studies.models.llama import load_smollm2
from studies.models.parallel import SINGLE, Parallel, join
from studies.models.prepared import prepare
from suite.assets import chat_text, load_tokenizer, prompts as asset_prompts
from suite.measure import Context, Result

SAMPLING = Sampling(seed=2026, temperature=0.8)


def generation(
    ctx: Context, *, family: str, device: str, prompts: int, new_tokens: int, batch: int, chunk: int, pad_to: int, cache: bool, graph: bool, sampled: bool, ranks: int
) -> Result:
    """Texts of the first `prompts` of our own prompts, in the model's chat form, without an early end: every prompt makes `new_tokens`."""
    ids = chat_prompts(prompts)
    with process_group(ctx) as parallel:
        model = prepare(load_smollm2(), family=family, device=ctx.device, parallel=parallel)
        schedule = Schedule(batch=batch, chunk=chunk, pad_to=pad_to, cache=cache, graph=graph)
        made = generate(model, ids, new_tokens=new_tokens, schedule=schedule, sampling=SAMPLING if sampled else None)
    return Result(records={"texts": records(made)}, facts={"digest": made.digest(0)[:16]}, metrics={"tokens": float(len(ids) * new_tokens)})


def chat_prompts(count: int) -> list[list[int]]:
    """Token ids of the first `count` of our own prompts as one user turn each."""
    tokenizer = load_tokenizer()
    return [tokenizer.encode(chat_text(text)) for text in asset_prompts(count, source="own-prompts").texts]


def records(made: Generation) -> list[dict]:
    return [{"prompt": i, "tokens": list(tokens), "digest": made.digest(i), "first_logits": made.logits[i][0]} for i, tokens in enumerate(made.tokens)]


@contextmanager
def process_group(ctx: Context) -> Iterator[Parallel]:
    """The ranks of this cell: nccl on GPUs, gloo on CPUs; nothing to set up for one."""
    if ctx.world_size == 1:
        yield SINGLE
        return
    gpu = ctx.device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield join(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
