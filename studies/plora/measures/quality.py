"""Quality of finished adapters: with seeds and intervals, chosen on validation rows, reported on test rows; the winner alone; and PEFT's.

    quality(ctx, model="smollm2", task={"name": "banking77", "rows": [None, 770, None]}, tokens=64,
            adapters=[{"rank": 16, "alpha": 32, "learning_rate": 2e-4, "batch": 4}], seeds=5, budget_tokens=400_000, looks=8)
    winner(ctx, ..., adapter=None, seeds=3, neighbours=15)                     # the adapter that the input cell "search" found, or one given
    against_peft(ctx, ..., adapter={...}, seeds=5, budget_tokens=100_000)

A score is the accuracy of the argmax over the classes' answer tokens, or minus the answer loss where a task has none (GSM8K, SVAMP: a model of
135M parameters does not solve their problems, and nothing here says that it does). The unit of every interval is the training seed: Student-t over
seeds, at least two. What adapters start from, the base with B = 0, is scored beside them. Numbers of SmolLM2 are of its dequantised 4-bit
weights rounded to bf16: never compare them with published ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, SlotShape
from studies.plora.measures.live import Finished, Setting, finished, setting_of
from suite.measure import Context, Result
from suite.stats import mean_interval, paired_difference_interval

__all__ = ["against_peft", "quality", "winner"]


def quality(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, adapters: Sequence[Mapping[str, Any]], seeds: int, budget_tokens: int, looks: int, path: str = "triton",
) -> Result:  # fmt: skip
    """All adapters under all seeds in one pack. Metrics: score with score_low and score_high (test rows, mean over seeds, of the adapter whose mean
    validation score is highest), validation_score (its own), base_score (test rows, untrained), chance, seeds. Record "quality": a line an adapter.
    """
    setting = setting_of(ctx, model=model, task=task, tokens=tokens)
    asked = [AdapterConfig(**{**spec, "budget_tokens": budget_tokens, "seed": seed}) for spec in adapters for seed in range(seeds)]
    shape = PackShape(tokens=tokens, slots=tuple(SlotShape(rank=a.rank) for a in asked))
    every = max(1, math.ceil(budget_tokens / setting.tokens_a_sequence / looks))
    done = finished(setting.pack(shape, path=path), dict(enumerate(asked)), every=every, tested=setting.tested)
    lines = [_line(spec, [done[i * seeds + seed] for seed in range(seeds)]) for i, spec in enumerate(adapters)]
    sound = [line for line in lines if line["test"] is not None]
    if not sound:
        raise ValueError(f"some adapter ends with finite scores under every seed, got none of {len(lines)}; lower the learning rates")
    best = max(sound, key=lambda line: line["validation"][1])
    low, mean, high = best["test"]
    return Result(
        metrics={"score": mean, "score_low": low, "score_high": high, "validation_score": best["validation"][1], "base_score": _base_score(setting, path), "chance": _chance(setting), "seeds": float(seeds)},
        records={"quality": lines, "chosen": best["adapter"], "task": {"name": setting.task.name, "citation": setting.task.citation, "dropped": dict(setting.task.dropped)}},
    )  # fmt: skip


def _line(spec: Mapping[str, Any], runs: Sequence[Finished]) -> dict[str, Any]:
    curves = [[[e.tokens_seen, _finite(e.score), _finite(e.loss)] for e in run.looks] for run in runs]
    return {"adapter": dict(spec), "validation": _interval([run.looks[-1].score for run in runs]), "test": _interval([run.test.score for run in runs]),
            "test_scores": [_finite(run.test.score) for run in runs], "curves": curves}  # fmt: skip


def _interval(scores: Sequence[float]) -> list[float] | None:
    """[low, mean, high] over seeds; None where a seed diverged: its configuration is no candidate."""
    if not np.isfinite(scores).all():
        return None
    found = mean_interval(scores)
    return [found.low, found.value, found.high]


def _base_score(setting: Setting, path: str) -> float:
    """Of the base on the test rows: an adapter before its first step changes nothing."""
    pack = setting.pack(PackShape(tokens=setting.tokens, slots=(SlotShape(rank=1),)), path=path)
    pack.admit(0, AdapterConfig(rank=1, alpha=1.0, learning_rate=1e-4, batch=1, budget_tokens=1))
    return setting.tested(pack)[0].score


def _chance(setting: Setting) -> float:
    """Accuracy of always answering the class that is most frequent in the training rows; NaN where there are no classes."""
    if not setting.task.classes:
        return math.nan
    frequent = np.bincount(setting.task.train.labels).argmax()
    return float((setting.task.test.labels == frequent).mean())


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def winner(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, adapter: Mapping[str, Any] | None, seeds: int, neighbours: int, path: str = "triton", single_path: str = "looped",
) -> Result:  # fmt: skip
    """Train the winner again, alone and among `neighbours` others, under the same seeds; its own seed is the first.

    Metrics: alone_score and packed_score (test rows, means over seeds), score_difference with _low and _high (packed less alone, pairs of one seed),
    search_score (validation rows, as the search saw it, where an input gives it) and alone_validation (the same rows, trained alone, same seed): what
    the search saw and what a user gets.
    """
    found = {"adapter": adapter} if adapter is not None else ctx.input_record("search", "winner")
    config, setting = AdapterConfig.from_json(found["adapter"]), setting_of(ctx, model=model, task=task, tokens=tokens)
    runs = [AdapterConfig(**{**config.to_json(), "seed": config.seed + i}) for i in range(seeds)]
    alone, packed = [], []
    for run in runs:
        alone.append(_trained(setting, [run], single_path))
        packed.append(_trained(setting, [run, *_neighbours(run, neighbours)], path))
    difference = paired_difference_interval([p.test.score for p in packed], [a.test.score for a in alone])
    metrics = {"alone_score": _mean(alone), "packed_score": _mean(packed), "score_difference": difference.value, "score_difference_low": difference.low, "score_difference_high": difference.high,
               "alone_validation": alone[0].looks[-1].score, "seeds": float(seeds)}  # fmt: skip
    if found.get("score") is not None:
        metrics["search_score"] = float(found["score"])
    lines = [{"seed": a.adapter.seed, "alone": a.test.score, "packed": p.test.score, "weights_gap": _gap(p.weights, a.weights)} for a, p in zip(alone, packed, strict=True)]
    return Result(metrics=metrics, records={"adapter": config.to_json(), "seeds": lines})


def _trained(setting: Setting, adapters: Sequence[AdapterConfig], path: str) -> Finished:
    """The first of these, trained in one pack to its budget; the others have its budget and are trained as far."""
    shape = PackShape(tokens=setting.tokens, slots=tuple(SlotShape(rank=a.rank) for a in adapters))
    return finished(setting.pack(shape, path=path), dict(enumerate(adapters)), tested=setting.tested)[0]


def _neighbours(adapter: AdapterConfig, count: int) -> list[AdapterConfig]:
    """Others of the same budget: ranks and batches go round, learning rates are near and far."""
    return [
        AdapterConfig(rank=(8, 16, 32, 64)[i % 4], alpha=(8.0, 32.0, 64.0)[i % 3], learning_rate=adapter.learning_rate * (0.25, 0.5, 2.0)[i % 3], batch=(1, 2, 4, 8)[i // 2 % 4],
                      budget_tokens=adapter.budget_tokens, seed=10_000 + i)
        for i in range(count)
    ]  # fmt: skip


def _mean(runs: Sequence[Finished]) -> float:
    return float(np.mean([run.test.score for run in runs]))


def _gap(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Norm of the difference of all weights over the norm of theirs."""
    apart = sum(float(((ours[n].astype(np.float64) - theirs[n]) ** 2).sum()) for n in theirs)
    return math.sqrt(apart / sum(float((theirs[n].astype(np.float64) ** 2).sum()) for n in theirs))


def against_peft(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, adapter: Mapping[str, Any], seeds: int, budget_tokens: int, path: str = "triton",
) -> Result:  # fmt: skip
    """The same configuration under `seeds` seeds by us, in one pack, and by PEFT with torch's AdamW, one after another, from the same starts over the same
    rows in the same order.

    Metrics: score, peft_score (test rows, means), score_difference with _low and _high (ours less PEFT's, Student-t over pairs of one seed), seed_spread
    (standard deviation of PEFT's scores over seeds), differences_in_spreads (|score_difference| over seed_spread), weights_gap (largest over seeds:
    norm of the difference of the finished weights over the norm of PEFT's).
    """
    from studies.plora.measures.peft_training import causal_lm, train_by_peft

    setting = setting_of(ctx, model=model, task=task, tokens=tokens)
    asked = [AdapterConfig(**{**adapter, "budget_tokens": budget_tokens, "seed": seed}) for seed in range(seeds)]
    pack = setting.pack(PackShape(tokens=tokens, slots=tuple(SlotShape(rank=a.rank) for a in asked)), path=path)
    starts = [_start(pack, slot, a) for slot, a in enumerate(asked)]
    done = finished(pack, dict(enumerate(asked)), tested=setting.tested)
    lm = causal_lm(setting.base)
    theirs = [train_by_peft(lm, setting.task, config, tokens, start) for config, start in zip(asked, starts, strict=True)]
    ours, peft = [done[i].test.score for i in range(seeds)], [t.score for t in theirs]
    gaps = [_gap(done[i].weights, t.weights) for i, t in enumerate(theirs)]
    apart, spread = paired_difference_interval(ours, peft), float(np.std(peft, ddof=1))
    return Result(
        metrics={"score": float(np.mean(ours)), "peft_score": float(np.mean(peft)), "score_difference": apart.value, "score_difference_low": apart.low, "score_difference_high": apart.high,
                 "seed_spread": spread, "differences_in_spreads": _in_spreads(apart.value, spread), "weights_gap": max(gaps), "seeds": float(seeds)},
        records={"seeds": [{"seed": i, "ours": a, "peft": b, "weights_gap": g} for i, (a, b, g) in enumerate(zip(ours, peft, gaps, strict=True))]},
    )  # fmt: skip


def _in_spreads(difference: float, spread: float) -> float:
    """|difference| in units of the spread; equal scores are no units apart, whatever the spread."""
    return 0.0 if difference == 0 else abs(difference) / spread if spread else math.inf


def _start(pack: Pack, slot: int, adapter: AdapterConfig) -> Mapping[str, np.ndarray]:
    """What the adapter is before its first step."""
    pack.admit(slot, adapter)
    return pack.release(slot)
