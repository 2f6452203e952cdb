"""Measure functions of the search: arms replayed on a recorded grid, live searches, and what Optuna's own pruners do to a pack.

    replayed(ctx, sampler="tpe", arm="packed+prune+refill", trials=64, slots=[64] * 16, looks=16, shares=[0.125, 0.25, 0.5], eta=2)    # inputs "grid", "times"
    live(ctx, model="smollm2", task={"name": "banking77", "rows": [None, 400, 1000]}, tokens=64, space={"learning_rate": {"low": 2e-5, "high": 2e-3, "log": True}, ...},
         budget_tokens=200_000, sampler="tpe", arm="packed+prune+refill", trials=64, slots=[64] * 16, looks=16, shares=[...], eta=2)
    pruners(ctx, trials=8, steps=16)

`slots`: rank capacities of a packed arm; sequential arms train one adapter at a time in packs that suit it (studies.plora.search.single). `looks`: of a
trial over its budget, more than there are rungs. A search's seed is the cell's: of its sampler, and of which recorded seed a configuration gets.

Records: "trials" (the search, replayed into MLflow and Optuna at ingest), "progress" (lines of device seconds, best finished validation score and its
test score, at each improvement), "winner" (the best adapter). Metrics: best_score on the validation rows, on which it was selected; test_score on
rows that no search sees; search_s, device seconds; trials, trained (not answered by a trial of the same proposal), pruned, tokens (real ones
trained on). A search pauses with its pack, and goes on as an unbroken one would.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.plora.adapter import AdapterConfig, Pack, PackShape, SlotShape
from studies.plora.measures.live import Finished, Setting, finished, setting_of
from studies.plora.search.arms import ARMS, Arm
from studies.plora.search.driver import Found, drive, search_of
from studies.plora.search.pruner import Halving
from studies.plora.search.recorded import Curve, RecordedPack, StepTimes, read_curves, space_of
from studies.plora.search.single import OneAtATime
from studies.plora.search.space import Choice, Float, Levels, Space
from suite.measure import Context, Result
from suite.search import SearchRun

__all__ = ["live", "replayed", "space_from"]

MOST_ROWS = 32


def replayed(
    ctx: Context, *, sampler: str, arm: str, trials: int, slots: Sequence[int], looks: int, shares: Sequence[float], eta: int,
) -> Result:  # fmt: skip
    """A search over recorded adapters. Also gap: the best mean score (over seeds) of the grid less that of the configuration that was found."""
    curves = read_curves(ctx.input_record("grid", "curves"))
    times = StepTimes.from_json(ctx.input_record("times", "times"))
    space, any_adapter, seeds = space_of(curves), next(iter(curves)), sorted({a.seed for a in curves})
    mean_tokens = sum(c.tokens_a_sequence for c in curves.values()) / len(curves)

    def adapter_of(params: Mapping[str, Any]) -> AdapterConfig:
        drawn = int.from_bytes(hashlib.sha256(json.dumps([ctx.seed, sorted(params.items())]).encode()).digest()[:4], "big")
        return space.adapter(params, budget_tokens=any_adapter.budget_tokens, seed=seeds[drawn % len(seeds)])

    way = _arm(arm)
    pack = _pack(way, slots, tokens=1, rank=space.largest_rank, pack_of=lambda shape: RecordedPack(curves, shape, times))  # its tokens a sequence are the curves'
    found = _searched(ctx, space, sampler, trials, pack, adapter_of, way, looks, Halving(shares=tuple(shares), eta=eta), mean_tokens, any_adapter.budget_tokens)
    test = {t.number: curves[t.adapter].test_score for t in found.trials}
    result = _result(found, test, kind="replayed")
    means = _mean_scores(curves)
    best = replace(found.best.adapter, seed=0)
    return replace(result, metrics={**result.metrics, "gap": max(means.values()) - means[best]})


def _mean_scores(curves: Mapping[AdapterConfig, Curve]) -> dict[AdapterConfig, float]:
    """Configuration (seed 0 stands for all) -> mean final score over its seeds; a diverged one is the worst."""
    scores: dict[AdapterConfig, list[float]] = {}
    for adapter, curve in curves.items():
        scores.setdefault(replace(adapter, seed=0), []).append(curve.scores[-1] if math.isfinite(curve.scores[-1]) else -math.inf)
    return {adapter: sum(s) / len(s) for adapter, s in scores.items()}


def live(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, space: Mapping[str, Any], budget_tokens: int, sampler: str, arm: str, trials: int, slots: Sequence[int], looks: int,
    shares: Sequence[float], eta: int, path: str = "triton", single_path: str = "looped", checkpoint_s: float = 60.0,
) -> Result:  # fmt: skip
    """A search that trains. test_score: of the winner, trained once more alone after the search, which `search_s` does not count; winner_score: of
    that training on the validation rows, beside the best_score of the search. checkpoint_s: a kill costs at most so much training.
    """  # fmt: skip
    setting, searched_space, way = setting_of(ctx, model=model, task=task, tokens=tokens), space_from(space), _arm(arm)
    one_path = path if way.packed else single_path
    pack = _pack(way, slots, tokens=tokens, rank=searched_space.largest_rank, pack_of=lambda shape: setting.pack(shape, path=one_path))
    adapter_of = lambda params: searched_space.adapter(params, budget_tokens=budget_tokens, seed=ctx.seed)  # noqa: E731
    found = _searched(ctx, searched_space, sampler, trials, pack, adapter_of, way, looks, Halving(shares=tuple(shares), eta=eta), setting.tokens_a_sequence, budget_tokens, checkpoint_s)
    winner = _alone(setting, found.best.adapter, single_path)
    result = _result(found, {found.best.number: winner.test.score}, kind="measured")
    return replace(result, metrics={**result.metrics, "winner_score": winner.looks[-1].score})


def _alone(setting: Setting, adapter: AdapterConfig, path: str) -> Finished:
    """The adapter trained in a pack of its own and tested."""
    shape = PackShape(tokens=setting.tokens, slots=(SlotShape(rank=adapter.rank),))
    return finished(setting.pack(shape, path=path), {0: adapter}, tested=setting.tested)[0]


def space_from(axes: Mapping[str, Any]) -> Space:
    """From JSON: {"low", "high", "log"} is a Float, a rising list of numbers Levels, another list a Choice, one value is fixed."""
    made: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, axis in axes.items():
        if isinstance(axis, Mapping):
            made[name] = Float(**axis)
        elif isinstance(axis, Sequence) and not isinstance(axis, str):
            numbers = all(isinstance(v, (int, float)) for v in axis)
            made[name] = Levels(values=tuple(axis)) if numbers else Choice(options=tuple(axis))
        else:
            fixed[name] = axis
    return Space(axes=made, fixed=fixed)


def _arm(name: str) -> Arm:
    if name not in ARMS:
        raise ValueError(f"an arm is one of {list(ARMS)}, got {name!r}; choose one")
    return ARMS[name]


def _pack(arm: Arm, slots: Sequence[int], *, tokens: int, rank: int, pack_of: Callable[[PackShape], Pack]) -> Pack:
    if arm.packed:
        return pack_of(PackShape(tokens=tokens, slots=tuple(SlotShape(rank=r) for r in slots)))
    return OneAtATime(tokens=tokens, rank=rank, pack_of=pack_of, most_rows=MOST_ROWS)


def _searched(
    ctx: Context, space: Space, sampler: str, trials: int, pack: Pack, adapter_of: Callable[[Mapping[str, Any]], AdapterConfig], arm: Arm, looks: int, rule: Halving,
    tokens_a_sequence: float, budget_tokens: int, checkpoint_s: float = 60.0,
) -> Found:  # fmt: skip
    if looks <= len(rule.shares):
        raise ValueError(f"a trial is looked at more often than it has rungs, got {looks=} for {rule.shares}; raise looks")
    micro_steps = max(1, math.ceil(budget_tokens / tokens_a_sequence / looks))
    search = search_of(space, name=sampler, sampler=sampler, sampler_seed=ctx.seed, trials=trials, slots=len(pack.shape.slots))
    with SearchRun(search, ctx.state_dir) as run:
        found = drive(run, pack, adapter_of, arm.strategy(rule, micro_steps=micro_steps, checkpoint_s=checkpoint_s), ctx.state_dir, pause=ctx.time_is_up)
    if found.best is None:
        raise ValueError(f"some trial of a search ends with a finite score, got none of {len(found.trials)}; lower the learning rates")
    return found


def _result(found: Found, test: Mapping[int, float], kind: str) -> Result:
    trained = [t for t in found.trials if t.twin_of is None]
    scores = {t.score: t.number for t in reversed(found.trials) if t.state == "COMPLETE"}
    progress = [{"device_s": s, "score": score, "test_score": _finite(test.get(scores[score]))} for s, score in found.progress]
    metrics = {"best_score": found.best.score, "search_s": found.seconds, "trials": len(found.trials), "trained": len(trained), "pruned": sum(t.state == "PRUNED" for t in trained)}
    if math.isfinite(test_score := test[found.best.number]):
        metrics["test_score"] = test_score
    adapters = [{"number": t.number, "adapter": t.adapter.to_json(), "state": t.state, "score": _finite(t.score), "twin_of": t.twin_of} for t in found.trials]
    winner = {"adapter": found.best.adapter.to_json(), "number": found.best.number, "score": found.best.score}
    return Result(metrics={k: float(v) for k, v in metrics.items()}, kind=kind, records={"trials": dict(found.record), "progress": progress, "adapters": adapters, "winner": winner})


def _finite(x: float | None) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None
