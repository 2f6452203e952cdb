"""Intervals and the verdicts read from them: a claim is judged by where its whole interval lies, never by a point.

    from suite.stats import judge, ratio_interval
    speed_up = ratio_interval([0.42, 0.40, 0.43, 0.41, 0.42])     # one ln(time baseline / time ours) per fresh process
    print(speed_up, judge(speed_up, target=1.4))

The sampled unit is the caller's to name: rounds of one process are not processes, tokens of one prompt are not prompts.
A verdict may be UNDECIDED. It does not say which claims there are (`suite.claims`) and measures nothing (`suite.timing`).
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from suite.timing import ContestResult

__all__ = [
    "Comparison",
    "Difference",
    "Equivalence",
    "Interval",
    "TostResult",
    "Verdict",
    "bootstrap_interval",
    "compare",
    "holm",
    "holm_confidences",
    "judge",
    "mean_interval",
    "median_interval",
    "p_by_inversion",
    "paired_difference_interval",
    "proportion_interval",
    "ratio_interval",
    "tost",
]

_SMALLEST_P = 1e-9


class Verdict(enum.StrEnum):
    """What the evidence says of a claim."""

    EXCEEDED = "EXCEEDED"
    REPRODUCED = "REPRODUCED"
    NOT_REPRODUCED = "NOT REPRODUCED"
    UNDECIDED = "UNDECIDED"
    NOT_MEASURED_HERE = "NOT MEASURED HERE"


class Equivalence(enum.StrEnum):
    """What two one-sided tests say of a difference."""

    EQUIVALENT = "EQUIVALENT"
    DIFFERENT = "DIFFERENT"
    UNDECIDED = "UNDECIDED"


class Difference(enum.StrEnum):
    """What one contest says of two of its variants."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    NO_DIFFERENCE = "NO DIFFERENCE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value between its confidence bounds, from `n` sampled units. Raises ValueError unless finite low <= value <= high."""

    low: float
    value: float
    high: float
    n: int
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.low, self.value, self.high))) or not self.low <= self.value <= self.high:
            raise ValueError(
                f"an interval needs finite low <= value <= high, got {self.low=}, {self.value=}, {self.high=}; "
                "report what could not be measured apart"
            )
        if self.n < 1:
            raise ValueError(f"an interval needs at least one sampled unit, got {self.n=}; count units")
        _check_confidence(self.confidence)

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] ({self.confidence:.0%}, n={self.n})"


@dataclass(frozen=True, kw_only=True)
class TostResult:
    """Verdict of an equivalence test and the (1 - 2 alpha) interval of the mean difference that it was read from."""

    verdict: Equivalence
    interval: Interval
    margin: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Verdict on two variants of one contest, the interval of time a / time b, and the A/A noise floor as a ratio (>= 1)."""

    verdict: Difference
    ratio: Interval
    noise_floor_ratio: float


# ---------------------------------------------------------------------------------------------- intervals


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student-t interval of the mean of independent `values` (at least 2). Raises ValueError for NaN, infinity or fewer."""
    from scipy.stats import t

    x = _finite(values, "values", at_least=2)
    _check_confidence(confidence)
    mean = float(np.mean(x))
    half = float(t.ppf((1 + confidence) / 2, x.size - 1) * np.std(x, ddof=1) / math.sqrt(x.size))
    return Interval(low=mean - half, value=mean, high=mean + half, n=x.size, confidence=confidence)


def ratio_interval(log_ratios_per_process: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval of a ratio: Student-t over natural-log ratios, one per fresh process, exponentiated.

    One number per process, because processes differ by more than rounds within one do (address layout, clocks, heat):
    pooling rounds makes intervals several times too narrow. Needs at least 2 processes; a ratio behind a claim needs 5.
    Raises ValueError for NaN, infinity or fewer. Source: Kalibera and Jones, ISMM 2013 (variance at the top level).
    """
    log = mean_interval(log_ratios_per_process, confidence)
    return _exponentiated(log)


def paired_difference_interval(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student-t interval of the mean of a - b over pairs (same seed, same prompt). Raises ValueError for unequal lengths."""
    x, y = _finite(a, "a", at_least=2), _finite(b, "b", at_least=2)
    if x.size != y.size:
        raise ValueError(f"pairs need equal lengths, got {x.size=} and {y.size=}; drop the units that only one side has")
    return mean_interval(x - y, confidence)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval of the median from order statistics (the sign test inverted): no distribution assumed, never too narrow.

    Raises ValueError where `values` are too few for `confidence` (95% needs 6).
    Source: Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2.
    """
    from scipy.stats import binom

    x = np.sort(_finite(values, "values", at_least=1))
    _check_confidence(confidence)
    # Largest k with P(Binomial(n, 1/2) < k) <= alpha / 2: the k-th smallest and k-th largest are the bounds.
    k = int(np.sum(binom.cdf(np.arange(x.size), x.size, 0.5) <= (1 - confidence) / 2))
    if k < 1:
        needed = math.ceil(1 - math.log2(1 - confidence))
        raise ValueError(f"a median interval at {confidence=} needs {needed} values, got {x.size}; measure more")
    return Interval(low=float(x[k - 1]), value=float(np.median(x)), high=float(x[-k]), n=x.size, confidence=confidence)


def proportion_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Clopper-Pearson (exact) interval of a proportion; covers "all equal, n of n", whose lower bound is below 1.

    Raises ValueError unless 0 <= successes <= trials and trials >= 1. Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    from scipy.stats import beta

    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"a proportion needs 0 <= successes <= trials and trials >= 1, got {successes=}, {trials=}; count again")
    _check_confidence(confidence)
    tail, failures = (1 - confidence) / 2, trials - successes
    low = float(beta.ppf(tail, successes, failures + 1)) if successes else 0.0
    high = float(beta.isf(tail, successes + 1, failures)) if failures else 1.0
    return Interval(low=low, value=successes / trials, high=high, n=trials, confidence=confidence)


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[np.ndarray], float],
    *,
    rng: np.random.Generator,
    unit: Sequence | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """BCa bootstrap interval of `statistic` (1-D array to float), resampling whole units.

    unit: one label per value (prompt, seed, process); values of one label are drawn together and `n` counts labels. By
        default each value is a unit of its own. rng: a seeded generator. Fewer than about 20 units under-cover.
    A sample on which the statistic never varies gives an interval of width 0.
    Raises ValueError for NaN, infinity, fewer than 2 units, or a statistic for which BCa is undefined.
    Source: Efron, JASA 82 (1987); scipy.stats.bootstrap.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap

    x = _finite(values, "values", at_least=2)
    _check_confidence(confidence)
    labels = np.arange(x.size) if unit is None else np.asarray(unit)
    if labels.shape != x.shape:
        raise ValueError(f"unit needs one label per value, got {labels.shape=} for {x.shape=}; repeat the label of each value")
    groups = [x[labels == label] for label in np.unique(labels)]
    if len(groups) < 2:
        raise ValueError(f"a bootstrap needs at least 2 units, got {len(groups)}; measure more or name another unit")

    def of_units(drawn: np.ndarray) -> float:
        return float(statistic(np.concatenate([groups[index] for index in drawn])))

    everything = np.arange(len(groups))
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # judged below, by the distribution itself
        done = bootstrap((everything,), of_units, n_resamples=resamples, confidence_level=confidence, method="BCa",
                         vectorized=False, rng=rng)  # fmt: skip
    value, (low, high) = of_units(everything), done.confidence_interval
    if np.ptp(done.bootstrap_distribution) == 0:
        low = high = value
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"BCa needs a statistic that varies smoothly over units, got {low=}, {high=} for {value=}; use another one")
    # BCa's bounds are quantiles of the resamples and can miss the estimate itself by a hair.
    return Interval(low=min(float(low), value), value=value, high=max(float(high), value), n=len(groups), confidence=confidence)


# ---------------------------------------------------------------------------------------------- tests and families


def tost(differences: Sequence[float], margin: float, confidence: float = 0.95) -> TostResult:
    """Equivalence of a mean difference to 0 within `margin` (its unit is that of the differences).

    EQUIVALENT where the (1 - 2 alpha) Student-t interval, alpha = 1 - confidence, lies wholly within +-margin; DIFFERENT
    where it lies wholly outside; else UNDECIDED. Either error has a rate of at most alpha. Raises ValueError for a margin
    that is not positive, NaN, infinity, or fewer than 2. Source: Schuirmann, J. Pharmacokin. Biopharm. 15 (1987).
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"an equivalence margin needs to be finite and positive, got {margin=}; state what difference matters")
    if not 0.5 < confidence < 1:
        raise ValueError(f"two one-sided tests need a confidence between 0.5 and 1, got {confidence=}; 0.95 is usual")
    interval = mean_interval(differences, 1 - 2 * (1 - confidence))
    if -margin < interval.low and interval.high < margin:
        verdict = Equivalence.EQUIVALENT
    elif interval.low > margin or interval.high < -margin:
        verdict = Equivalence.DIFFERENT
    else:
        verdict = Equivalence.UNDECIDED
    return TostResult(verdict=verdict, interval=interval, margin=margin)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values in the order given. Raises ValueError unless all lie in [0, 1].

    Source: Holm, Scand. J. Stat. 6 (1979) 65-70.
    """
    p = _probabilities(p_values)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * (p.size - np.arange(p.size)))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def holm_confidences(p_values: Sequence[float], confidence: float = 0.95) -> np.ndarray:
    """Confidence level at which each claim's own interval is judged, in the order given, so that a family keeps `confidence`.

    The k-th smallest of m p-values (k from 0) gets 1 - alpha / (m - k), until the first that is not below its level; all
    from there on keep that one. An interval at its level leaves out the target exactly where Holm rejects it. The
    verdicts hold jointly; bounds meant to hold jointly need the Bonferroni level 1 - alpha / m for all.
    """
    p = _probabilities(p_values)
    _check_confidence(confidence)
    alpha, levels, step = 1 - confidence, np.empty_like(p), 0
    for index in np.argsort(p, kind="stable"):
        levels[index] = alpha / (p.size - step)
        if p[index] <= levels[index]:
            step += 1
        else:
            rest = p >= p[index]
            levels[rest] = levels[index]
            break
    return 1 - levels


def p_by_inversion(interval_at: Callable[[float], Interval], target: float) -> float:
    """The p-value of `target` that belongs to a family of intervals: 1 - the largest confidence whose interval leaves it out.

    interval_at: confidence to Interval, e.g. `lambda level: ratio_interval(logs, level)`. To an absolute error of 1e-9, which
    is also the smallest p-value. Raises ValueError for a target that is not finite.
    """
    if not math.isfinite(target):
        raise ValueError(f"a target needs to be finite, got {target=}; give the number claimed")

    def leaves_out(p: float) -> bool:
        interval = interval_at(1 - p)
        return not interval.low <= target <= interval.high

    included, left_out = 0.0, 1.0 - _SMALLEST_P
    if not leaves_out(left_out):
        return 1.0
    while left_out - included > _SMALLEST_P:
        middle = (included + left_out) / 2
        included, left_out = (included, middle) if leaves_out(middle) else (middle, left_out)
    return left_out


# ---------------------------------------------------------------------------------------------- verdicts


def judge(interval: Interval | None, target: float, direction: str = "higher", margin: float = 0.05) -> Verdict:
    """The verdict on a claim that a value is at least (`direction` "higher") or at most ("lower") `target`.

    EXCEEDED where the whole interval lies beyond target plus margin (a fraction of |target|, away from it in the claim's
    direction), REPRODUCED where it lies at or beyond the target, NOT REPRODUCED where it lies short of it, else UNDECIDED;
    NOT MEASURED HERE for None (no run exists). "All n equal" is no interval's business: compare the counts.
    Raises ValueError for a target that is not finite, an unknown direction or a negative margin.
    """
    if not math.isfinite(target):
        raise ValueError(f"a target needs to be finite, got {target=}; give the number claimed")
    if direction not in ("higher", "lower"):
        raise ValueError(f"a direction needs to be 'higher' or 'lower', got {direction=}; say which way is better")
    if not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"a margin needs to be finite and not negative, got {margin=}; it is a fraction of the target")
    if interval is None:
        return Verdict.NOT_MEASURED_HERE
    sign = 1 if direction == "higher" else -1
    worst, best = sorted((sign * interval.low, sign * interval.high))
    goal = sign * target
    if worst > goal + margin * abs(target):
        return Verdict.EXCEEDED
    if worst >= goal:
        return Verdict.REPRODUCED
    return Verdict.NOT_REPRODUCED if best < goal else Verdict.UNDECIDED


def compare(result: ContestResult, a: str, b: str, *, confidence: float = 0.95, margin: float = 0.03) -> Comparison:
    """Whether `a` ran faster than `b` in this one process, from paired rounds and the contest's A/A control.

    FASTER or SLOWER where the interval of the median log ratio leaves out 0 and the ratio exceeds the noise floor (how much
    one program differed from itself); NO DIFFERENCE where it is below that floor or not told from 0, the interval lies
    within a factor 1 + margin, and so does the control's own ratio; else UNDECIDED. Identical programs are called
    different at most at the rate 1 - confidence. It speaks of this process: a claim needs `ratio_interval` over five.
    Raises ValueError for unknown names, fewer rounds than `median_interval` needs, or a margin that is not positive.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin needs to be finite and positive, got {margin=}; state what ratio matters")
    log = median_interval(result.round_ratios(a, b), confidence)
    limit = math.log1p(margin)
    if (log.low > 0 or log.high < 0) and abs(log.value) > result.noise_floor:
        verdict = Difference.SLOWER if log.low > 0 else Difference.FASTER
    elif -limit < log.low and log.high < limit and abs(result.control_log_ratio) < limit:
        verdict = Difference.NO_DIFFERENCE
    else:
        verdict = Difference.UNDECIDED
    return Comparison(verdict=verdict, ratio=_exponentiated(log), noise_floor_ratio=math.exp(result.noise_floor))


def _exponentiated(log: Interval) -> Interval:
    return Interval(low=math.exp(log.low), value=math.exp(log.value), high=math.exp(log.high), n=log.n, confidence=log.confidence)


def _finite(values: Sequence[float], name: str, *, at_least: int) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size < at_least:
        raise ValueError(f"{name} needs to be one-dimensional with at least {at_least} numbers, got {x.shape=}; measure more units")
    if not np.all(np.isfinite(x)):
        bad = x[~np.isfinite(x)].tolist()[:3]
        raise ValueError(f"{name} needs finite numbers, got {bad=} among {x.size}; report failures apart, as a count")
    return x


def _probabilities(p_values: Sequence[float]) -> np.ndarray:
    p = _finite(p_values, "p_values", at_least=1)
    if np.any((p < 0) | (p > 1)):
        raise ValueError(f"p_values need to lie in [0, 1], got {p.min()=}, {p.max()=}; are these p-values?")
    return p


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence needs to lie between 0 and 1, got {confidence=}; 0.95 is usual")
