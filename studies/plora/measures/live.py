"""What cells of real training run on: a base, a task that it can read, packs over both, and adapters trained to their budgets.

    setting = setting_of(ctx, model="smollm2", task={"name": "banking77", "rows": [None, 400, 1000]}, tokens=64)
    pack = setting.pack(shape)
    done = finished(pack, {0: adapter, 1: other}, every=200, tested=setting.tested)     # slot -> its looks, weights and test score

A model is "smollm2" (SmolLM2-135M-Instruct, bf16 on a GPU) or "tiny" (two random layers, for CPUs). A task is a set's name or "synthetic",
with `rows`: how many of training, validation and test (None: all). Rows longer than `tokens` are dropped; their count stands in the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from studies.models.config import LlamaConfig
from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, SlotShape
from studies.plora.data.planted import synthetic
from studies.plora.data.sets import load_task
from studies.plora.data.task import Task
from studies.plora.engine.base import Base
from studies.plora.engine.evaluation import Judge
from studies.plora.engine.pack import EnginePack
from suite.measure import Context

__all__ = ["CHUNK", "TINY", "Finished", "Setting", "add_looks", "base_of", "finished", "setting_of", "slots_for", "task_of"]

TINY = LlamaConfig(layers=2, hidden=128, intermediate=256, heads=2, kv_heads=1, vocabulary=256, context_tokens=256, rope_base=1e4, rms_eps=1e-5)
MODELS = ("smollm2", "tiny")
CHUNK = 256  # micro-steps planned at a time


def base_of(ctx: Context, model: str) -> Base:
    if model not in MODELS:
        raise ValueError(f"a model that learns is one of {MODELS}, got {model=}; random shapes are for timing alone")
    dtype = torch.bfloat16 if ctx.device.startswith("cuda") else torch.float32
    if model == "tiny":
        return Base.random(TINY, seed=0, device=ctx.device, dtype=dtype)
    return Base.smollm2(device=ctx.device, dtype=dtype)


def task_of(spec: Mapping[str, Any], tokens: int) -> Task:
    """spec: name, rows (three numbers or None), and of the synthetic task its classes and share of wrong answers."""
    rows = tuple(spec.get("rows", (None, None, None)))
    if spec["name"] != "synthetic":
        return load_task(spec["name"], tokens=tokens, drop_longer=True, rows=rows)
    return synthetic(vocabulary=TINY.vocabulary, classes=spec["classes"], rows=rows, tokens=(min(6, tokens), tokens), wrong=spec.get("wrong", 0.0))


@dataclass(frozen=True, kw_only=True)
class Setting:
    base: Base
    task: Task
    tokens: int

    def pack(self, shape: PackShape, *, path: str = "triton", deterministic: bool = False) -> EnginePack:
        """Evaluated on the validation rows; captured in CUDA graphs on a GPU."""
        return EnginePack(self.base, shape, self.task, path=path, deterministic=deterministic)

    def tested(self, pack: EnginePack) -> dict[int, Evaluation]:
        """All live adapters on the test rows, in one packed pass, eagerly: it happens once a pack."""
        judge = Judge(pack.base, pack.adapters, pack.ops, self.task.test, scales=pack.seg.scales, graphed=False)
        return judge.looks({slot: p.tokens_seen for slot, p in pack.live().items()})

    @cached_property
    def tokens_a_sequence(self) -> float:
        """Mean real tokens of a training row."""
        return float(self.task.train.lengths.mean())


def setting_of(ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int) -> Setting:
    return Setting(base=base_of(ctx, model), task=task_of(task, tokens), tokens=tokens)


def slots_for(ranks: tuple[int, ...], slots: int, rows: int = 1) -> tuple[SlotShape, ...]:
    """`slots` capacities that serve adapters of these ranks in equal shares, widest first: sorted ranks are cut into runs, a slot is as wide as its run."""
    ordered = sorted(ranks, reverse=True)
    return tuple(SlotShape(rank=ordered[i * len(ordered) // min(slots, len(ordered))], rows=rows) for i in range(min(slots, len(ordered))))


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An adapter at its end. looks: rising tokens seen. weights: PEFT's names to float32 arrays; test: on the test rows, None where not asked."""

    adapter: AdapterConfig
    looks: tuple[Evaluation, ...]
    optimizer_steps: int
    weights: Mapping[str, Any] = field(repr=False)
    test: Evaluation | None = None


def finished(
    pack: Pack, adapters: Mapping[int, AdapterConfig], *, every: int | None = None, tested: Callable[[Pack], dict[int, Evaluation]] | None = None,
) -> dict[int, Finished]:  # fmt: skip
    """Train these from their start to their budgets; a look after every `every` micro-steps (None: one at the end); the slots are empty after."""
    for slot, adapter in adapters.items():
        pack.admit(slot, adapter)
    looks: dict[int, list[Evaluation]] = {slot: [] for slot in adapters}
    while not all(p.done for p in pack.live().values()):
        pack.advance(every or CHUNK)
        if every is not None or all(p.done for p in pack.live().values()):
            add_looks(looks, pack.evaluate()[0])
    steps = {slot: p.optimizer_steps for slot, p in pack.live().items()}
    test = tested(pack) if tested else {}
    return {
        slot: Finished(adapter=adapter, looks=tuple(looks[slot]), optimizer_steps=steps[slot], weights=pack.release(slot), test=test.get(slot))
        for slot, adapter in adapters.items()
    }


def add_looks(looks: Mapping[int, list[Evaluation]], found: Mapping[int, Evaluation]) -> None:
    """Those of adapters that have seen more tokens since their last: an adapter that waits at its budget is not looked at twice."""
    for slot, kept in looks.items():
        if found[slot].tokens_seen > (kept[-1].tokens_seen if kept else 0):
            kept.append(found[slot])
