"""Live makespans: the same adapters trained by packs with refill, and one after another, on one GPU or on two of a host.

    makespan(ctx, model="smollm2", tasks=[{"name": "banking77", "rows": [None, 200, 500]}, {"name": "clinc150", "rows": [None, 200, 500]}],
             tokens=48, configurations=120, budget_tokens=20_000, slots=40, chunk=32, single_paths=["looped", "triton"])
    same_adapters(ctx, model="smollm2", task={...}, tokens=48, configurations=8, budget_tokens=4_000)

Both arms stand in one cell: the ratio is read inside one bundle. Work is PLoRA's 120 configurations (studies.plora.planning.design), divided evenly among
the tasks, then among the ranks of the cell: by length for adapters alone, task by task for packs where there are as many. A packed arm keeps slots of fixed capacities and gives a free one to the next adapter it holds; the
other arm (B1) trains adapters alone, each in a pack of its own rank that passes whole batches, captured in a CUDA graph, by the fastest of
`single_paths` as timed here. Every adapter is evaluated once on the validation rows when it is done. Makespan: wall clock from the first admission to
the last evaluation, of the slower rank. Adapters alone need a captured graph for each rank and batch, packs one in all; since a user could keep
those, the speed-up is of the walls less the time in which packs were built, captured and first run. With it, the ratio is `speedup_wall`.

Both arms train the same adapters: same start, data order, dropout. They differ by the rounding of other kernels, so finished scores are compared in
pairs. `same_adapters` trains some in the deterministic mode, packed and alone, and counts those whose bits are equal: all, or the engine is wrong.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, SlotShape
from studies.plora.measures.live import CHUNK, Setting, finished, setting_of, slots_for
from studies.plora.planning.design import paper_configurations
from studies.plora.search.single import OneAtATime
from suite.measure import Context, Result
from suite.stats import paired_difference_interval

__all__ = ["makespan", "same_adapters"]

MOST_ROWS = 32  # of an adapter alone: the largest batch of the configurations
TRIED_STEPS = 30


def chosen(count: int, budget_tokens: int, seed: int) -> list[AdapterConfig]:
    """`count` of the paper's 120 configurations, evenly spread over their list. Raises ValueError for more."""
    every = paper_configurations(budget_tokens=budget_tokens, seed=seed)
    if not 1 <= count <= len(every):
        raise ValueError(f"from 1 to {len(every)} configurations can be taken, got {count=}; take fewer")
    return [every[i * len(every) // count] for i in range(count)]


@dataclass(kw_only=True)
class Arm:
    """What one way of training gave. built_s: of the wall time, making packs and their first steps."""

    wall_s: float = 0.0
    built_s: float = 0.0
    device_s: float = 0.0
    tokens: int = 0  # real ones trained on
    sequences: int = 0
    scores: dict[str, Evaluation] = field(default_factory=dict)  # by name of the adapter


def makespan(
    ctx: Context, *, model: str, tasks: Sequence[Mapping[str, Any]], tokens: int, configurations: int, budget_tokens: int, slots: int, chunk: int, single_paths: Sequence[str], path: str = "triton",
) -> Result:  # fmt: skip
    """Metrics: makespan_s, sequential_s (walls), speedup (without building), speedup_wall, tokens_per_s (packed), padding_share (of the positions of rows),
    score_difference (packed less alone, mean) with score_difference_low and _high, gpus, adapters, diverged.
    """
    work = [(i % len(tasks), adapter) for i, adapter in enumerate(chosen(configurations, budget_tokens, ctx.seed))]
    with _ranks(ctx) as together:
        settings = [setting_of(ctx, model=model, task=task, tokens=tokens) for task in tasks]
        mine = _share(work, ctx.rank, ctx.world_size)
        packs = _whole_tasks(work, len(tasks), ctx.rank, ctx.world_size) or mine
        packed = _arm(settings, packs, lambda setting, adapters, arm: _packed(setting, adapters, arm, slots=slots, chunk=chunk, path=path), together)
        fastest = together(_fastest(settings[0], mine[0][1], single_paths))[0]
        alone = _arm(settings, mine, lambda setting, adapters, arm: _alone(setting, adapters, arm, path=fastest, chunk=chunk), together)
        every = together((packed, alone))
    return _compared(ctx, [p for p, _ in every], [a for _, a in every], settings, fastest)


def _share(work: Sequence[tuple[int, AdapterConfig]], rank: int, ranks: int) -> list[tuple[int, AdapterConfig]]:
    """This rank's part: longest first to the rank with the least, by micro-steps of an adapter alone (Graham 1969), so that neither arm is uneven."""
    loads = [0.0] * ranks
    parts: list[list[tuple[int, AdapterConfig]]] = [[] for _ in loads]
    for task, adapter in sorted(work, key=lambda w: (w[1].batch, -w[1].rank)):
        least = loads.index(min(loads))
        parts[least].append((task, adapter))
        loads[least] += 1.0 / adapter.batch
    return parts[rank]


def _whole_tasks(work: Sequence[tuple[int, AdapterConfig]], tasks: int, rank: int, ranks: int) -> list[tuple[int, AdapterConfig]]:
    """This rank's part where ranks share tasks evenly: a pack reads one task, and an adapter of batch 1 sets how long it lasts, however few it holds."""
    return [] if tasks % ranks else [(task, adapter) for task, adapter in work if task % ranks == rank]


@contextmanager
def _ranks(ctx: Context) -> Iterator[Callable[[Any], list[Any]]]:
    """A function that gives each rank's value to all, and so lets them wait for each other."""
    if ctx.world_size == 1:
        yield lambda value: [value]
        return
    if ctx.device.startswith("cuda"):
        torch.cuda.set_device(ctx.device)
    dist.init_process_group("gloo")

    def together(value: Any) -> list[Any]:
        got: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(got, value)
        return got

    try:
        yield together
    finally:
        dist.destroy_process_group()


def _arm(settings: Sequence[Setting], mine: Sequence[tuple[int, AdapterConfig]], train: Callable[[Setting, list[AdapterConfig], Arm], None], together: Callable[[Any], list[Any]]) -> Arm:  # fmt: skip
    arm = Arm()
    together(None)  # all begin at once
    start = time.perf_counter()
    for i, setting in enumerate(settings):
        if adapters := [adapter for task, adapter in mine if task == i]:
            train(setting, adapters, arm)
    arm.wall_s = time.perf_counter() - start  # every evaluation has ended on the device: its scores were read
    gc.collect()  # packs refer to themselves by their captured functions
    return arm


def _name(setting: Setting, adapter: AdapterConfig) -> str:
    return f"{setting.task.name} rank {adapter.rank} batch {adapter.batch} rate {adapter.learning_rate:.3g} alpha {adapter.alpha:g} seed {adapter.seed}"


def _packed(setting: Setting, adapters: list[AdapterConfig], arm: Arm, *, slots: int, chunk: int, path: str) -> None:
    """Slots of fixed capacities; the widest waiting adapter first, each into the narrowest free slot that holds it."""
    shape = PackShape(tokens=setting.tokens, slots=slots_for(tuple(a.rank for a in adapters), slots))
    built = time.perf_counter()
    pack = setting.pack(shape, path=path)
    waiting = sorted(adapters, key=lambda a: -a.rank)
    _fill(pack, waiting)
    arm.device_s += pack.advance(1) + pack.evaluate()[1]  # captured here
    arm.built_s += time.perf_counter() - built
    while pack.live():
        arm.device_s += pack.advance(chunk)
        done = [slot for slot, p in pack.live().items() if p.done]
        if done and (len(done) == len(pack.live()) or waiting):
            _judge(setting, pack, done, arm)
            _fill(pack, waiting)


def _fill(pack: Pack, waiting: list[AdapterConfig]) -> None:
    """Narrow slots are kept for narrow adapters: a slot takes the widest adapter that it holds."""
    free = sorted(set(range(len(pack.shape.slots))) - set(pack.live()), key=lambda i: (pack.shape.slots[i].rank, i))
    for slot in free:
        fitting = [a for a in waiting if a.rank <= pack.shape.slots[slot].rank]
        if fitting:
            pack.admit(slot, fitting[0])
            waiting.remove(fitting[0])


def _judge(setting: Setting, pack: Pack, done: Sequence[int], arm: Arm) -> None:
    found, spent_s = pack.evaluate()
    arm.device_s += spent_s
    for slot in done:
        progress = pack.live()[slot]
        arm.scores[_name(setting, progress.adapter)] = found[slot]
        arm.tokens += progress.tokens_seen
        arm.sequences += progress.optimizer_steps * progress.adapter.batch
        pack.release(slot)


def _alone(setting: Setting, adapters: list[AdapterConfig], arm: Arm, *, path: str, chunk: int) -> None:
    seen: set[tuple[int, int]] = set()
    pack = OneAtATime(tokens=setting.tokens, rank=max(a.rank for a in adapters), pack_of=lambda shape: setting.pack(shape, path=path), most_rows=MOST_ROWS)
    for adapter in adapters:
        began = time.perf_counter()
        pack.admit(0, adapter)
        arm.device_s += pack.advance(1)
        if (adapter.rank, adapter.batch) not in seen:
            arm.device_s += pack.evaluate()[1]
            arm.built_s += time.perf_counter() - began
            seen.add((adapter.rank, adapter.batch))
        while not pack.live()[0].done:
            arm.device_s += pack.advance(min(chunk, CHUNK) * adapter.batch)
        _judge(setting, pack, [0], arm)


def _fastest(setting: Setting, adapter: AdapterConfig, paths: Sequence[str]) -> str:
    """The path whose micro-steps of one adapter take least, each timed after its first steps."""
    if not paths:
        raise ValueError("an adapter alone runs by some path, got none; name one")
    seconds = {}
    for path in paths:
        pack = setting.pack(PackShape(tokens=setting.tokens, slots=(SlotShape(rank=adapter.rank, rows=1),)), path=path)
        pack.admit(0, replace(adapter, batch=1, budget_tokens=2**60))
        pack.advance(TRIED_STEPS)
        seconds[path] = statistics.median(pack.advance(TRIED_STEPS) for _ in range(3))
    return min(seconds, key=seconds.get)


def _compared(ctx: Context, packed: Sequence[Arm], alone: Sequence[Arm], settings: Sequence[Setting], fastest: str) -> Result:
    theirs = {name: e for arm in alone for name, e in arm.scores.items()}
    ours = {name: e for arm in packed for name, e in arm.scores.items()}
    assert ours.keys() == theirs.keys(), f"both arms trained the same adapters, got {len(ours)} and {len(theirs)}"
    pairs = [(ours[n].score, theirs[n].score) for n in sorted(ours)]
    sound = [(a, b) for a, b in pairs if np.isfinite(a) and np.isfinite(b)]
    took, alone_took = max(arm.wall_s for arm in packed), max(arm.wall_s for arm in alone)
    ready, alone_ready = max(arm.wall_s - arm.built_s for arm in packed), max(arm.wall_s - arm.built_s for arm in alone)
    metrics = {"makespan_s": took, "sequential_s": alone_took, "speedup": alone_ready / ready, "speedup_wall": alone_took / took,
               "tokens_per_s": sum(arm.tokens for arm in packed) / took,
               "padding_share": 1 - sum(arm.tokens for arm in packed) / (sum(arm.sequences for arm in packed) * settings[0].tokens), "gpus": float(ctx.world_size), "adapters": float(len(ours)), "diverged": float(len(pairs) - len(sound))}  # fmt: skip
    if len(sound) > 1:
        difference = paired_difference_interval([a for a, _ in sound], [b for _, b in sound])
        metrics |= {"score_difference": difference.value, "score_difference_low": difference.low, "score_difference_high": difference.high}
    lines = [{"adapter": n, "score": _none(ours[n].score), "alone": _none(theirs[n].score), "tokens": ours[n].tokens_seen, "tokens_alone": theirs[n].tokens_seen} for n in sorted(ours)]
    arms = {what: [{"wall_s": arm.wall_s, "built_s": arm.built_s, "device_s": arm.device_s, "tokens": arm.tokens} for arm in arms] for what, arms in (("packed", packed), ("alone", alone))}
    return Result(metrics=metrics, facts={"single_path": fastest}, records={"adapters": lines, "arms": arms, "dropped": {s.task.name: dict(s.task.dropped) for s in settings}})


def _none(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def same_adapters(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, configurations: int, budget_tokens: int, path: str = "triton",
) -> Result:  # fmt: skip
    """Metrics: adapters, equal (whose weights have the same bits packed and alone), equal_share. Deterministic mode, one sequence a micro-step."""
    setting = setting_of(ctx, model=model, task=task, tokens=tokens)
    adapters = chosen(configurations, budget_tokens, ctx.seed)
    slots = tuple(SlotShape(rank=a.rank) for a in adapters)
    packed = finished(setting.pack(PackShape(tokens=tokens, slots=slots), path=path, deterministic=True), dict(enumerate(adapters)))
    digests = []
    for slot, adapter in enumerate(adapters):
        alone = finished(setting.pack(PackShape(tokens=tokens, slots=(slots[slot],)), path=path, deterministic=True), {0: adapter})[0]
        digests.append((_digest(packed[slot].weights), _digest(alone.weights)))
    equal = sum(a == b for a, b in digests)
    lines = [{"adapter": _name(setting, a), "packed": p, "alone": q} for a, (p, q) in zip(adapters, digests, strict=True)]
    return Result(metrics={"adapters": float(len(digests)), "equal": float(equal), "equal_share": equal / len(digests)}, records={"digests": lines})


def _digest(weights: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name], dtype=np.float32)
        digest.update(f"{name}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
