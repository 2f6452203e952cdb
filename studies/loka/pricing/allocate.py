"""Allocation: which recipe each product runs in, so that a step is fastest within a budget of log-loss.

    candidates = [Candidate(site="top.0:linear", which="forward", recipe="bf16", time_us=20.0, loss=0.0),
                  Candidate(site="top.0:linear", which="forward", recipe="rowwise", time_us=12.0, loss=3e-6)]
    allocate(candidates, budget=0.0002 * 0.45).plan          # 0.02% of a log-loss of 0.45

One candidate is chosen for every (site, pass). Losses are absolute changes in nats and add up over sites, times too: a multiple-choice
knapsack, solved exactly as an integer program (scipy.optimize.milp). A price below zero is sampling noise and counts as zero. Where times
come from, and of which kind they are, is the caller's to say; a caller who wants only certain gains passes each time's upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.fp8.recipes import PASSES, gemm
from studies.loka.site import BASE, Plan

__all__ = ["Allocation", "Candidate", "allocate", "chosen", "greedy", "grouped"]

Choice = dict[tuple[str, str], "Candidate"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe for one product of training."""

    site: str
    which: str  # a pass of PASSES
    recipe: str  # a product's recipe by name
    time_us: float
    loss: float  # change of log-loss against bf16, in nats, predicted or measured; what the budget is spent on
    mere: float = math.nan  # mean elementwise relative error, which LoKA's rule asks for

    def __post_init__(self) -> None:
        gemm(self.recipe)
        if self.which not in PASSES:
            raise ValueError(f"a pass is one of {PASSES}, got {self.which=} at {self.site}")
        if not (math.isfinite(self.time_us) and self.time_us > 0) or not math.isfinite(self.loss):
            raise ValueError(f"a candidate has a finite time > 0 and a finite loss, got {self.time_us=} {self.loss=} at {self.site}; leave out what failed")

    @property
    def price(self) -> float:
        return max(self.loss, 0.0)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A plan with what it costs. `time_us` and `loss` are sums over the products, `base_time_us` that of bf16 everywhere."""

    plan: Plan
    time_us: float
    base_time_us: float
    loss: float
    budget: float

    @property
    def speedup(self) -> float:
        return self.base_time_us / self.time_us if self.time_us else 1.0


def allocate(candidates: Iterable[Candidate], *, budget: float, min_gain: float = 1.0) -> Allocation:
    """The fastest choice with a summed price of at most `budget` nats; of equally fast ones, the one with the smallest price.

    A candidate other than bf16 is considered where bf16's time is more than `min_gain` times its own. Raises ValueError where a product has
    no bf16 candidate or a recipe twice, for a negative budget, and where no choice fits the budget (bf16 having a price too).
    """
    groups = _considered(candidates, budget, min_gain)
    if not groups:
        return _allocation({}, {}, budget, "allocate")
    least = math.fsum(min(c.price for c in group) for group in groups.values())
    if least > budget:
        raise ValueError(f"no choice fits the budget: the smallest summed price is {least:.3g} nats, got {budget=}; raise the budget or add candidates")
    flat = [c for group in groups.values() for c in group]
    fastest = _solve(groups, flat, [c.time_us for c in flat], [c.price for c in flat], budget)
    cheapest = _solve(groups, flat, [c.price for c in flat], [c.time_us for c in flat], _time(fastest))
    better = _time(cheapest) <= _time(fastest) and _price(cheapest) <= _price(fastest)
    return _allocation(groups, cheapest if better else fastest, budget, f"allocate: at most {budget:.3g} nats")


def greedy(candidates: Iterable[Candidate], *, budget: float, min_gain: float = 1.0) -> Allocation:
    """As `allocate` by the usual heuristic: from bf16, again and again the step with the most time saved per nat that still fits."""
    groups = _considered(candidates, budget, min_gain)
    choice = {key: next(c for c in group if c.recipe == BASE) for key, group in groups.items()}
    while True:
        spent = _price(choice)
        steps = [(choice[key], c) for key, group in groups.items() for c in group if c.time_us < choice[key].time_us and spent + c.price - choice[key].price <= budget]
        if not steps:
            return _allocation(groups, choice, budget, f"greedy: at most {budget:.3g} nats")
        _, best = max(steps, key=lambda step: ((step[0].time_us - step[1].time_us) / max(step[1].price - step[0].price, 1e-300), step[1].recipe))
        choice[best.site, best.which] = best


def grouped(candidates: Iterable[Candidate]) -> dict[tuple[str, str], list[Candidate]]:
    """Candidates by (site, pass), in a fixed order. Raises ValueError where bf16 is missing or a recipe stands twice."""
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for c in sorted(candidates, key=lambda c: (c.site, PASSES.index(c.which), c.recipe)):
        groups.setdefault((c.site, c.which), []).append(c)
    for key, group in groups.items():
        names = [c.recipe for c in group]
        if names.count(BASE) != 1 or len(set(names)) != len(names):
            raise ValueError(f"a product has one {BASE} candidate and each recipe once, got {names} at {key}")
    return groups


def chosen(choice: Choice, made_by: str) -> Plan:
    """The plan of one candidate a product; what stays in bf16 is not named."""
    recipes: dict[str, dict[str, str]] = {}
    for (site, which), c in choice.items():
        if c.recipe != BASE:
            recipes.setdefault(site, {})[which] = c.recipe
    return Plan(recipes=recipes, made_by=made_by)


def _considered(candidates: Iterable[Candidate], budget: float, min_gain: float) -> dict[tuple[str, str], list[Candidate]]:
    """`grouped` without slow candidates and without those that another one beats in time and price alike."""
    if not budget >= 0:
        raise ValueError(f"a budget is a number of nats >= 0, got {budget=}")
    kept = {}
    for key, group in grouped(candidates).items():
        base = next(c for c in group if c.recipe == BASE)
        fast = [c for c in group if c is base or base.time_us > min_gain * c.time_us]
        kept[key] = [c for c in fast if c is base or not any(_beats(other, c) for other in fast)]
    return kept


def _beats(a: Candidate, b: Candidate) -> bool:
    """Equal in both: the name that sorts first, so that one of them stays."""
    return (a.time_us, a.price) != (b.time_us, b.price) and a.time_us <= b.time_us and a.price <= b.price or (
        (a.time_us, a.price) == (b.time_us, b.price) and a.recipe < b.recipe
    )


def _solve(groups: dict, flat: Sequence[Candidate], minimise: Sequence[float], bounded: Sequence[float], bound: float) -> Choice:
    """One candidate a group with the smallest sum of `minimise` and a sum of `bounded` of at most `bound`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    one_each = np.zeros((len(groups), len(flat)))
    for row, key in enumerate(groups):
        one_each[row, [i for i, c in enumerate(flat) if (c.site, c.which) == key]] = 1
    objective, weights = np.asarray(minimise, float), np.asarray(bounded, float)
    possible = Bounds(0, (weights <= bound).astype(float))  # one alone above the bound is out, to the last bit; with a bound of 0 this is all
    choice: Choice = {}
    # The solver keeps constraints to 1e-6 of their scale: where that let a sum slip above the bound, the bound is drawn in by as much.
    for slack in (0.0, 2e-6):
        limit = LinearConstraint(weights[None] / (bound or math.inf), -np.inf, 1.0 - slack)
        found = milp(
            objective / (objective.max() or 1.0), integrality=np.ones(len(flat)), bounds=possible,
            constraints=[LinearConstraint(one_each, 1, 1), limit], options={"mip_rel_gap": 0.0},
        )  # fmt: skip
        if not found.success:
            break
        choice = {(flat[i].site, flat[i].which): flat[i] for i in np.flatnonzero(found.x > 0.5)}
        if math.fsum(w for w, x in zip(weights, found.x, strict=True) if x > 0.5) <= bound * (1 + 1e-12):
            break
    assert len(choice) == len(groups), f"the integer program has a solution, but the solver says: {found.message}"
    return choice


def _time(choice: Choice) -> float:
    return math.fsum(c.time_us for c in choice.values())


def _price(choice: Choice) -> float:
    return math.fsum(c.price for c in choice.values())


def _allocation(groups: dict, choice: Choice, budget: float, made_by: str) -> Allocation:
    base = math.fsum(c.time_us for group in groups.values() for c in group if c.recipe == BASE)
    return Allocation(plan=chosen(choice, made_by), time_us=_time(choice), base_time_us=base, loss=_price(choice), budget=budget)
