"""Which adapters of a pack to give up: synchronous successive halving on the axis of tokens seen.

    rungs = Rungs(Halving(shares=(0.125, 0.25, 0.5), eta=2), budget_tokens=100_000)
    rungs.admit({0: 16, 1: 64, 2: 16})                         # trials that start together, with their ranks: one cohort
    seen = rungs.look({0: evaluation, 1: evaluation, 2: evaluation})
    seen.losers                                                # trials to end now

A rung is a number of tokens. A trial's standing at a rung is its first score at or after it. A cohort is judged at a rung at once, when all
its living members stand there: each member keeps its slot if it is among the best ceil(n / eta) of all n standings at that rung, those of
finished and of pruned trials included. So neither the order in which trials are reported nor the slots in which they lie decide anything
(Jamieson and Talwalkar 2016, made to wait; ASHA, Li et al. 2020, decides trial by trial and prunes by order). Equal scores: the smaller
rank is kept, then the older trial. Steps are no axis: the batch is tuned, so equal steps are unequal training.

A score that is not finite ends its trial at once: weights that are NaN stay NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from studies.plora.adapter import Evaluation

__all__ = ["NO_PRUNING", "Halving", "Look", "Rungs"]


@dataclass(frozen=True, kw_only=True)
class Halving:
    """shares: of the budget, where trials are compared; eta: of n standings the best ceil(n / eta) go on."""

    shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    eta: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(self.shares))
        if list(self.shares) != sorted(set(self.shares)) or not all(0 < s < 1 for s in self.shares):
            raise ValueError(f"shares lie between 0 and 1 in rising order, got {self.shares=}; the end of the budget is no rung")
        if self.eta < 2:
            raise ValueError(f"eta is at least 2, got {self.eta=}; with shares=() nothing is pruned")

    def kept(self, standings: Mapping[int, Standing]) -> frozenset[int]:
        """The trials that are among the best: a function of the set alone."""
        best = sorted(standings, key=lambda n: (-standings[n].score, standings[n].rank, n))
        return frozenset(best[: math.ceil(len(best) / self.eta)])


NO_PRUNING = Halving(shares=())


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A trial at a rung. score: -inf where it diverged."""

    score: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look decided. reached: (trial, tokens of the rung, score) of every new standing; losers: pruned now; diverged: ended now."""

    reached: tuple[tuple[int, int, float], ...]
    losers: frozenset[int]
    diverged: frozenset[int]


@dataclass
class Rungs:
    """All standings of a search. Rebuilt by repeating its calls, so that a log of evaluations is enough to resume it."""

    rule: Halving
    budget_tokens: int
    _standings: list[dict[int, Standing]] = field(init=False)
    _ranks: dict[int, int] = field(init=False, default_factory=dict)  # of living trials
    _cohorts: list[set[int]] = field(init=False, default_factory=list)  # living members of each
    _judged: set[tuple[int, int]] = field(init=False, default_factory=set)  # (rung, cohort)

    def __post_init__(self) -> None:
        self.tokens = tuple(math.ceil(share * self.budget_tokens) for share in self.rule.shares)
        self._standings = [{} for _ in self.tokens]

    def admit(self, ranks: Mapping[int, int]) -> None:
        """A new cohort: trials that start now, with their ranks."""
        self._ranks |= ranks
        self._cohorts.append(set(ranks))

    def due(self, tokens_seen: Mapping[int, int]) -> bool:
        """Whether a living trial has passed a rung at which it does not stand yet."""
        return any(seen >= at and n not in standings for at, standings in zip(self.tokens, self._standings) for n, seen in tokens_seen.items())

    def look(self, evaluations: Mapping[int, Evaluation]) -> Look:
        """Take the scores of all living trials and judge every cohort that is complete at a rung."""
        reached: list[tuple[int, int, float]] = []
        losers: set[int] = set()
        diverged = {n for n, e in evaluations.items() if not (math.isfinite(e.score) and math.isfinite(e.loss))}
        fall_at = {n: next((i for i, s in enumerate(self._standings) if n not in s), None) for n in diverged}  # the rung that it was heading for
        for rung, (at, standings) in enumerate(zip(self.tokens, self._standings)):
            for n, e in evaluations.items():
                if n not in standings and n not in losers and (fall_at[n] == rung if n in diverged else e.tokens_seen >= at):
                    standings[n] = Standing(score=-math.inf if n in diverged else e.score, rank=self._ranks[n])
                    reached.append((n, at, standings[n].score))
            losers |= self._judge(rung, standings, losers | diverged)
        reached += [(n, self.budget_tokens, -math.inf) for n, rung in fall_at.items() if rung is None]
        self.leave(losers | diverged)
        return Look(reached=tuple(sorted(reached)), losers=frozenset(losers), diverged=frozenset(diverged))

    def leave(self, numbers: set[int] | frozenset[int]) -> None:
        """These trials live no longer: their cohorts wait for them no more."""
        for cohort in self._cohorts:
            cohort -= numbers
        for n in numbers:
            self._ranks.pop(n, None)

    def _judge(self, rung: int, standings: dict[int, Standing], gone: set[int]) -> set[int]:
        """The losers of every cohort that is complete at the rung and was not judged there."""
        members: set[int] = set()
        for i, cohort in enumerate(self._cohorts):
            living = cohort - gone
            if living and (rung, i) not in self._judged and living <= standings.keys():
                self._judged.add((rung, i))
                members |= living
        return members - self.rule.kept(standings) if members else set()
