"""Is an arm neutral? Paired two one-sided tests at 0.02% of log-loss, over training runs, with a pilot that says how many are needed.

    neutrality(ours, bf16, perturbed=again, planted_bad=bad)       # each {seed: log-loss}
    pairs_needed(spread=0.0003)                                     # 20

A pair is two runs of one seed: the same initial values, the same examples in the same order. Their relative difference is the sampled unit; rows of
one test set are not, for a single run that drifted is wrong on all of them.

The pilot is bf16 against bf16 with initial values perturbed by 2^-20: what chaos alone does to a pair. Its standard deviation s sets the number of
pairs, n = (z(0.95) + z(0.90))^2 (s / margin)^2 = 8.6 (s / 0.02%)^2, with which an arm that is truly equal passes in four cases of five. A verdict
needs that many; over 60 it stays UNDECIDED. It also needs a test that can fail: the planted-bad arm must lie beyond the margin.
"Not different" is never read as equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from suite.stats import Equivalence, Interval, tost

__all__ = ["FEWEST_PAIRS", "MARGIN", "MOST_PAIRS", "PILOT_PAIRS", "Neutrality", "neutrality", "pairs_needed", "relative_changes"]

MARGIN = 0.0002  # Wukong (arXiv 2403.02545, section 7.1.2) and LoKA: a relative change of 0.02% is significant
PILOT_PAIRS = 8
FEWEST_PAIRS, MOST_PAIRS = 5, 60
PAIRS_FACTOR = 8.6  # (1.645 + 1.282)^2

Losses = Mapping[int, float]  # seed -> log-loss of the run; one that diverged is NaN or infinite


@dataclass(frozen=True, kw_only=True)
class Neutrality:
    """`verdict` on an arm; `change` is the 90% interval of its mean relative change, None where no two pairs are finite. `why` is for people."""

    verdict: Equivalence
    change: Interval | None
    pairs: int
    diverged: int  # pairs whose arm gave no finite loss where bf16 did
    needed: int | None  # pairs, by the pilot; None without one
    spread: float | None  # the pilot's standard deviation
    valid: bool  # the planted-bad arm was rejected
    why: str


def relative_changes(arm: Losses, base: Losses) -> dict[int, float]:
    """seed -> (arm - base) / base for the seeds that both have, in their order; NaN where the arm's loss is not finite.

    Raises ValueError for a base that is not finite and positive: it is what arms are compared with.
    """
    common = sorted(set(arm) & set(base))
    for seed in common:
        if not (math.isfinite(base[seed]) and base[seed] > 0):
            raise ValueError(f"a baseline's log-loss is finite and positive, got {base[seed]} at {seed=}; lower its learning rate")
    return {seed: (arm[seed] - base[seed]) / base[seed] if math.isfinite(arm[seed]) else math.nan for seed in common}


def pairs_needed(spread: float, margin: float = MARGIN) -> int:
    """Pairs with which an equal arm passes with a probability of 80%, when differences within a pair have the standard deviation `spread`."""
    if not (math.isfinite(spread) and spread >= 0 and margin > 0):
        raise ValueError(f"a spread is a number >= 0 and a margin one above 0, got {spread=} {margin=}; take it from a pilot")
    return max(FEWEST_PAIRS, math.ceil(PAIRS_FACTOR * (spread / margin) ** 2))


def neutrality(arm: Losses, base: Losses, *, perturbed: Losses, planted_bad: Losses, margin: float = MARGIN) -> Neutrality:
    """EQUIVALENT within `margin`, DIFFERENT from it, or UNDECIDED: see the module's docstring for what each needs."""
    changes = relative_changes(arm, base)
    finite = [c for c in changes.values() if math.isfinite(c)]
    test = tost(finite, margin) if len(finite) >= 2 else None
    pilot = _finite(perturbed, base)
    spread = float(np.std(pilot, ddof=1)) if len(pilot) >= PILOT_PAIRS else None
    needed = None if spread is None else pairs_needed(spread, margin)
    valid, diverged = _rejected(planted_bad, base, margin), len(changes) - len(finite)
    if diverged or (valid and test and test.verdict is Equivalence.DIFFERENT):
        verdict, why = Equivalence.DIFFERENT, f"{diverged} of {len(changes)} runs diverged" if diverged else f"beyond {margin:.2%}"
    elif missing := _missing(len(pilot), needed, len(finite), valid):
        verdict, why = Equivalence.UNDECIDED, missing
    else:
        verdict, why = test.verdict, f"{len(finite)} pairs, {needed} needed"
        if verdict is Equivalence.UNDECIDED:  # an arm may spread more than the pilot does
            why += f"; the arm's own spread asks for {pairs_needed(float(np.std(finite, ddof=1)), margin)}"
    return Neutrality(verdict=verdict, change=test.interval if test else None, pairs=len(finite), diverged=diverged, needed=needed, spread=spread, valid=valid, why=why)


def _missing(pilot: int, needed: int | None, pairs: int, valid: bool) -> str:
    """What a verdict lacks, or nothing."""
    if needed is None:
        return f"the pilot has {pilot} of {PILOT_PAIRS} pairs"
    if needed > MOST_PAIRS:
        return f"the pilot asks for {needed} pairs, more than {MOST_PAIRS}"
    if pairs < needed:
        return f"{pairs} of {needed} pairs were run"
    return "" if valid else "the planted-bad arm was not rejected, so the test could not have failed"


def _rejected(planted_bad: Losses, base: Losses, margin: float) -> bool:
    """Worse by more than the margin, with its whole interval, or unable to train at all."""
    changes = relative_changes(planted_bad, base)
    finite = [c for c in changes.values() if math.isfinite(c)]
    if len(finite) < 2:
        return len(changes) >= 2
    return tost(finite, margin).interval.low > margin


def _finite(arm: Losses, base: Losses) -> list[float]:
    return [c for c in relative_changes(arm, base).values() if math.isfinite(c)]
