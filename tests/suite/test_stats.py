"""Intervals and verdicts against hand-worked answers, tables of quantiles, and simulated data of known truth.

    python -m pytest tests/suite/test_stats.py

Longer simulations stand in tests/soak/test_coverage.py.
"""

import math

import numpy as np
import pytest
from scipy.stats import binom

from suite.stats import (
    Equivalence,
    Interval,
    Verdict,
    bootstrap_interval,
    holm,
    holm_confidences,
    judge,
    mean_interval,
    median_interval,
    p_by_inversion,
    paired_difference_interval,
    proportion_interval,
    ratio_interval,
    tost,
)

SIMULATIONS = 1000
PROCESSES, ROUNDS = 5, 20
PROCESS_SD, ROUND_SD = 0.02, 0.01  # processes differ twice as much as rounds within one
SEED = 77
T_975_4, T_95_4 = 2.776445, 2.131847  # Student-t quantiles with 4 degrees of freedom, printed tables

TOLERANCE = {
    "table": 1e-6,  # the quantiles above are printed to six decimals; the intervals below are at most a few times wider
    "clopper": 5e-5,  # published to four decimals
    # 99.99% band of the number of intervals that miss the truth when each misses with probability 5%.
    "misses": (int(binom.ppf(0.0001, SIMULATIONS, 0.05)), int(binom.ppf(0.9999, SIMULATIONS, 0.05))),
    # Pooling 5 x 20 rounds takes the standard error as sqrt((s_p^2 + s_r^2) / 100) where it is sqrt(s_p^2 / 5 + s_r^2 / 100):
    # 0.0022 against 0.0090, so 1.98 x 0.0022 / 0.0090 = 0.49 standard deviations, a coverage of 38%. Half is far above it.
    "naive_coverage": 0.5,
    "errors": int(binom.ppf(0.9999, SIMULATIONS, 0.05)),  # error rate at most alpha = 5%
    "power": math.ceil(0.95 * SIMULATIONS),
    # BCa on 40 units covers 92 to 95% (Efron 1987, table 5 shows such shortfalls); 300 simulations at 92% reach up to:
    "bootstrap_misses": int(binom.ppf(0.9999, 300, 0.08)),
    "inversion": 1e-8,  # stated accuracy 1e-9
}


# ---------------------------------------------------------------------------------------------- intervals


def test_the_mean_interval_is_the_hand_worked_one():
    interval = mean_interval([1, 2, 3, 4, 5])
    half = T_975_4 * math.sqrt(2.5) / math.sqrt(5)
    assert interval.value == 3 and interval.n == 5 and interval.confidence == 0.95
    assert interval.low == pytest.approx(3 - half, abs=TOLERANCE["table"])
    assert interval.high == pytest.approx(3 + half, abs=TOLERANCE["table"])


def test_the_ratio_interval_is_the_exponentiated_mean_interval_of_logs():
    logs = [0.40, 0.42, 0.38, 0.41, 0.39]
    ratio, log = ratio_interval(logs), mean_interval(logs)
    assert (ratio.low, ratio.value, ratio.high) == (math.exp(log.low), math.exp(log.value), math.exp(log.high))


def test_swapping_the_two_sides_inverts_the_ratio_interval():
    logs = np.array([0.40, 0.42, 0.38, 0.41, 0.39])
    ours, theirs = ratio_interval(logs), ratio_interval(-logs)
    assert ours.low == pytest.approx(1 / theirs.high) and ours.high == pytest.approx(1 / theirs.low)


def test_paired_differences_use_the_pairs():
    """The pairs differ by exactly 1 although the units spread over 100: the interval has width 0 around 1."""
    b = np.arange(0.0, 100.0, 7.0)
    interval = paired_difference_interval(b + 1, b)
    assert interval.low == interval.value == interval.high == 1.0
    with pytest.raises(ValueError, match="equal lengths"):
        paired_difference_interval([1, 2, 3], [1, 2])


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (9, 2), (20, 6)], ids=lambda value: str(value))
def test_median_intervals_have_the_ranks_of_the_sign_test_tables(n, rank):
    """Bounds are the r-th smallest and largest; r from the printed two-sided 5% sign-test table plus one."""
    interval = median_interval(np.arange(1, n + 1))
    assert (interval.low, interval.high) == (rank, n + 1 - rank)
    assert interval.value == (n + 1) / 2


@pytest.mark.parametrize("confidence", [0.90, 0.95, 0.99])
def test_a_median_interval_names_the_number_it_needs(confidence):
    needed = math.ceil(1 - math.log2(1 - confidence))
    median_interval(np.arange(needed), confidence)
    with pytest.raises(ValueError, match=f"needs {needed} values, got {needed - 1}"):
        median_interval(np.arange(needed - 1), confidence)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(5, 10, 0.1871, 0.8129), (10, 10, 0.025 ** (1 / 10), 1.0), (0, 10, 0.0, 1 - 0.025 ** (1 / 10)), (1, 1, 0.025, 1.0)],
    ids=["half", "all equal", "none", "one of one"],
)
def test_proportion_intervals_are_clopper_and_pearson_s(successes, trials, low, high):
    interval = proportion_interval(successes, trials)
    assert interval.low == pytest.approx(low, abs=TOLERANCE["clopper"])
    assert interval.high == pytest.approx(high, abs=TOLERANCE["clopper"])
    assert interval.value == successes / trials and interval.n == trials


def test_the_bootstrap_is_repeatable_and_counts_units():
    values, unit = np.repeat([1.0, 2.0, 3.0, 5.0, 8.0], 4), np.repeat(list("abcde"), 4)
    first, second = (bootstrap_interval(values, np.mean, rng=np.random.default_rng(SEED), unit=unit) for _ in range(2))
    assert first == second
    assert first.n == 5
    alone = bootstrap_interval(values, np.mean, rng=np.random.default_rng(SEED))
    assert alone.n == 20
    assert alone.high - alone.low < first.high - first.low, "values of one unit are not independent evidence"


def test_the_bootstrap_covers_the_mean_of_a_skewed_unit():
    rng, misses = np.random.default_rng(SEED), 0
    for _ in range(300):
        interval = bootstrap_interval(rng.exponential(size=40), np.mean, rng=rng, resamples=300)
        misses += not interval.low <= 1.0 <= interval.high
    assert misses <= TOLERANCE["bootstrap_misses"]


def test_a_bootstrap_of_a_constant_has_width_zero_and_a_wrong_unit_is_refused():
    same = bootstrap_interval([2.0] * 9, np.mean, rng=np.random.default_rng(SEED))
    assert same.low == same.value == same.high == 2.0
    with pytest.raises(ValueError, match="one label per value"):
        bootstrap_interval([1.0, 2.0, 3.0], np.mean, rng=np.random.default_rng(SEED), unit=["a", "b"])
    with pytest.raises(ValueError, match="at least 2 units"):
        bootstrap_interval([1.0, 2.0, 3.0], np.mean, rng=np.random.default_rng(SEED), unit=["a", "a", "a"])


def test_intervals_over_processes_cover_and_pooled_rounds_do_not():
    """The truth is 0. Each process has its own offset; rounds within it share that offset."""
    rng, misses, naive_hits = np.random.default_rng(SEED), 0, 0
    for _ in range(SIMULATIONS):
        offsets = PROCESS_SD * rng.standard_normal((PROCESSES, 1))
        logs = offsets + ROUND_SD * rng.standard_normal((PROCESSES, ROUNDS))
        interval, naive = ratio_interval(np.median(logs, axis=1)), ratio_interval(logs.ravel())
        misses += not interval.low <= 1.0 <= interval.high
        naive_hits += naive.low <= 1.0 <= naive.high
    fewest, most = TOLERANCE["misses"]
    assert fewest <= misses <= most
    assert naive_hits / SIMULATIONS < TOLERANCE["naive_coverage"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "function",
    [
        mean_interval,
        ratio_interval,
        median_interval,
        lambda x: paired_difference_interval(x, [1.0] * len(x)),
        lambda x: bootstrap_interval(x, np.mean, rng=np.random.default_rng(SEED)),
        lambda x: tost(x, 1.0),
        holm,
        lambda x: judge(mean_interval([1, 2]), x[0]),
    ],
    ids=["mean", "ratio", "median", "paired", "bootstrap", "tost", "holm", "judge"],
)
def test_nan_and_infinity_are_refused(function, bad):
    with pytest.raises(ValueError, match="finite"):
        function([bad] + [0.5] * 9)


def test_one_value_has_no_interval():
    for function in (mean_interval, ratio_interval):
        with pytest.raises(ValueError, match="at least 2"):
            function([0.1])
    with pytest.raises(ValueError, match="successes=3, trials=2"):
        proportion_interval(3, 2)
    with pytest.raises(ValueError, match="low <= value <= high"):
        Interval(low=2.0, value=1.0, high=3.0, n=5)
    with pytest.raises(ValueError, match="confidence=95"):
        mean_interval([1, 2], 95)


# ---------------------------------------------------------------------------------------------- equivalence and families


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        # 90% half-width of five values one apart: T_95_4 * sqrt(2.5 / 5) = 1.5075; the 95% one would be 1.9633.
        ([-2, -1, 0, 1, 2], 1.51, Equivalence.EQUIVALENT),
        ([-2, -1, 0, 1, 2], 1.50, Equivalence.UNDECIDED),
        ([4, 5, 6, 7, 8], 4.49, Equivalence.DIFFERENT),
        ([4, 5, 6, 7, 8], 4.50, Equivalence.UNDECIDED),
        ([-4, -5, -6, -7, -8], 4.49, Equivalence.DIFFERENT),
        ([1.0, 1.0, 1.0, 1.0, 1.0001], 5.0, Equivalence.EQUIVALENT),  # surely not 0, and surely within the margin
    ],
)
def test_tost_verdicts_are_the_hand_worked_ones(differences, margin, verdict):
    result = tost(differences, margin)
    assert result.verdict is verdict
    assert result.interval.confidence == pytest.approx(0.90)
    assert result.interval.high - result.interval.value == pytest.approx(
        T_95_4 * np.std(differences, ddof=1) / math.sqrt(5), abs=TOLERANCE["table"]
    )


def test_absence_of_evidence_is_not_equivalence():
    """Two noisy values: a t-test would not reject (p > 0.05), and TOST does not call them equal."""
    assert tost([-30.0, 40.0], 1.0).verdict is Equivalence.UNDECIDED


def test_tost_error_rates_hold_at_the_border_and_it_has_power_inside():
    rng, n, margin = np.random.default_rng(SEED), 8, 1.0
    at_border = [tost(margin + 0.5 * rng.standard_normal(n), margin).verdict for _ in range(SIMULATIONS)]
    inside = [tost(0.5 * rng.standard_normal(n), margin).verdict for _ in range(SIMULATIONS)]
    outside = [tost(2 * margin + 0.5 * rng.standard_normal(n), margin).verdict for _ in range(SIMULATIONS)]
    assert at_border.count(Equivalence.EQUIVALENT) <= TOLERANCE["errors"]
    assert at_border.count(Equivalence.DIFFERENT) <= TOLERANCE["errors"]
    assert inside.count(Equivalence.EQUIVALENT) >= TOLERANCE["power"]
    assert outside.count(Equivalence.DIFFERENT) >= TOLERANCE["power"]


def test_a_margin_that_is_no_margin_is_refused():
    for margin in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="margin"):
            tost([1, 2, 3], margin)


def test_holm_is_the_hand_worked_example():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; the last is raised to 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([0.04]) == pytest.approx([0.04])
    with pytest.raises(ValueError, match="0, 1"):
        holm([0.5, 1.5])


def test_holm_confidences_are_the_hand_worked_example():
    """0.005 < 0.05 / 4 and 0.01 < 0.05 / 3 are rejected; 0.03 > 0.05 / 2 stops, and both that are left keep 0.05 / 2."""
    levels = holm_confidences([0.01, 0.04, 0.03, 0.005])
    assert levels == pytest.approx([1 - 0.05 / 3, 0.975, 0.975, 1 - 0.05 / 4])
    assert holm_confidences([0.2]) == pytest.approx([0.95])


def test_intervals_at_holm_levels_leave_out_the_target_exactly_where_holm_rejects():
    rng = np.random.default_rng(SEED)
    for _ in range(50):
        claims = [mu + rng.standard_normal(6) for mu in (0.0, 0.5, 1.5, 2.5, 2.5)]
        p = [p_by_inversion(lambda level, x=x: mean_interval(x, level), 0.0) for x in claims]
        intervals = [mean_interval(x, level) for x, level in zip(claims, holm_confidences(p))]
        left_out = [not interval.low <= 0.0 <= interval.high for interval in intervals]
        assert left_out == (holm(p) <= 0.05).tolist()


def test_p_by_inversion_is_the_t_test_s():
    from scipy.stats import ttest_1samp

    x = np.random.default_rng(SEED).standard_normal(7) + 0.8
    p = p_by_inversion(lambda level: mean_interval(x, level), 0.0)
    assert p == pytest.approx(ttest_1samp(x, 0.0).pvalue, abs=TOLERANCE["inversion"])
    assert p_by_inversion(lambda level: mean_interval([3.0, 3.0], level), 3.0) == 1.0


# ---------------------------------------------------------------------------------------------- verdicts


def between(low: float, high: float) -> Interval:
    return Interval(low=low, value=(low + high) / 2, high=high, n=5)


@pytest.mark.parametrize(
    ("low", "high", "target", "direction", "verdict"),
    [
        (2.11, 2.30, 2.0, "higher", Verdict.EXCEEDED),  # 2.0 plus 5% is 2.1
        (2.10, 2.30, 2.0, "higher", Verdict.REPRODUCED),  # at target plus margin is not beyond it
        (2.00, 2.30, 2.0, "higher", Verdict.REPRODUCED),  # at the target counts
        (1.99, 2.30, 2.0, "higher", Verdict.UNDECIDED),
        (1.90, 2.00, 2.0, "higher", Verdict.UNDECIDED),  # touches the target: not wholly short of it
        (1.90, 1.99, 2.0, "higher", Verdict.NOT_REPRODUCED),
        (1.70, 1.89, 2.0, "lower", Verdict.EXCEEDED),  # 2.0 minus 5% is 1.9
        (1.70, 1.90, 2.0, "lower", Verdict.REPRODUCED),
        (1.70, 2.00, 2.0, "lower", Verdict.REPRODUCED),
        (1.70, 2.01, 2.0, "lower", Verdict.UNDECIDED),
        (2.00, 2.10, 2.0, "lower", Verdict.UNDECIDED),
        (2.01, 2.10, 2.0, "lower", Verdict.NOT_REPRODUCED),
        (-1.9, -1.8, -2.0, "higher", Verdict.REPRODUCED),  # the margin is a fraction of |target|: -2.0 plus 0.1
        (-1.89, -1.8, -2.0, "higher", Verdict.EXCEEDED),
        (0.0, 0.0, 0.0, "lower", Verdict.REPRODUCED),  # an exact count of zero errors
        (0.0, 0.1, 0.0, "lower", Verdict.UNDECIDED),
    ],
)
def test_judge_follows_its_truth_table(low, high, target, direction, verdict):
    assert judge(between(low, high), target, direction) is verdict


def test_what_was_not_measured_is_said_to_be_so():
    assert judge(None, 2.0) is Verdict.NOT_MEASURED_HERE
    assert [str(verdict) for verdict in Verdict] == [
        "EXCEEDED", "REPRODUCED", "NOT REPRODUCED", "UNDECIDED", "NOT MEASURED HERE",
    ]  # fmt: skip


def test_judge_refuses_what_it_cannot_judge():
    with pytest.raises(ValueError, match="direction='up'"):
        judge(between(1, 2), 1.0, "up")
    with pytest.raises(ValueError, match="margin=-0.1"):
        judge(between(1, 2), 1.0, margin=-0.1)
