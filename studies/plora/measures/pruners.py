"""What pruners do to a pack in lock-step: Optuna's own beside ours, each told the same scores in several orders.

    pruners(ctx, trials=8, steps=16)

Trials are asked together and reach every step together; trial i is always better than trial i - 1. At each step all living trials report, then
each is asked in the same order whether it should end. Record "pruners": a line for each pruner and order: how many were pruned, whether the best
one was, and whether what is left depends on the order. The median and Wilcoxon pruners look at finished trials alone, of which a pack has
none; successive halving and Hyperband compare a trial with those that reported before it (optuna 5.0.0). Ours decides for all at once.

Metrics: sound_pruners (pruners that prune, spare the best trial and leave the same trials in every order), ours_kept (trials that ours leaves).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from studies.plora.adapter import Evaluation
from studies.plora.search.pruner import Halving, Rungs
from suite.measure import Context, Result
from suite.search import import_optuna

__all__ = ["orders_of", "pruners", "survivors", "survivors_of_ours"]


def pruners(ctx: Context, *, trials: int, steps: int) -> Result:
    lines = []
    kept: dict[str, list[frozenset[int]]] = {}
    for name, of in (*_optunas(trials, steps).items(), ("plora: synchronous halving", None)):
        for order_name, order in orders_of(trials, ctx.seed).items():
            with warnings.catch_warnings():  # the Wilcoxon pruner is experimental
                warnings.simplefilter("ignore")
                left = survivors(of(), order, steps) if of else survivors_of_ours(order, steps)
            kept.setdefault(name, []).append(left)
            lines.append({"pruner": name, "order": order_name, "pruned": trials - len(left), "best_pruned": trials - 1 not in left})
    free = {name: len(set(sets)) == 1 for name, sets in kept.items()}
    sound = [name for name, sets in kept.items() if free[name] and trials - 1 in sets[0] and len(sets[0]) < trials]
    for line in lines:
        line["order_free"] = free[line["pruner"]]
    ours = kept["plora: synchronous halving"]
    return Result(metrics={"sound_pruners": float(len(sound)), "ours_kept": float(len(ours[0]))}, records={"pruners": lines}, facts={"optuna": import_optuna().__version__})


def orders_of(trials: int, seed: int) -> dict[str, list[int]]:
    shuffled = list(range(trials))
    random.Random(seed).shuffle(shuffled)
    return {"best first": list(range(trials))[::-1], "worst first": list(range(trials)), "shuffled": shuffled}


def _optunas(trials: int, steps: int) -> dict[str, Callable[[], Any]]:
    made = import_optuna().pruners
    return {
        "optuna: median": lambda: made.MedianPruner(n_startup_trials=0, n_warmup_steps=0),
        "optuna: Wilcoxon": lambda: made.WilcoxonPruner(n_startup_steps=0),
        "optuna: successive halving": lambda: made.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        "optuna: successive halving, bootstrap 4": lambda: made.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2, bootstrap_count=trials // 2),
        "optuna: Hyperband": lambda: made.HyperbandPruner(min_resource=1, max_resource=steps, reduction_factor=2),
    }


def _score(trial: int, step: int) -> float:
    """Better with each trial, and with each step."""
    return trial + step / 1000


def survivors(pruner: Any, order: Sequence[int], steps: int) -> frozenset[int]:
    """Trials that the pruner leaves, told in this order at every step."""
    optuna = import_optuna()
    study = optuna.create_study(study_name="pack", direction="maximize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    trials = {i: study.ask() for i in range(len(order))}
    living = list(order)
    for step in range(1, steps + 1):
        for i in living:
            trials[i].report(_score(i, step), step)
        for i in [i for i in living if trials[i].should_prune()]:
            study.tell(trials[i], state=optuna.trial.TrialState.PRUNED)
            living.remove(i)
    return frozenset(living)


def survivors_of_ours(order: Sequence[int], steps: int) -> frozenset[int]:
    """The same for studies.plora.search.pruner, with rungs at an eighth, a quarter and a half."""
    rungs, living = Rungs(Halving(), steps), list(order)
    rungs.admit({i: 16 for i in order})
    for step in range(1, steps + 1):
        gone = rungs.look({i: Evaluation(tokens_seen=step, score=_score(i, step), loss=1.0) for i in living}).losers
        living = [i for i in living if i not in gone]
    return frozenset(living)
