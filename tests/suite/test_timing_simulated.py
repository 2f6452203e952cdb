"""A contest on a machine of known truth: false alarms, a planted slow-down, and what pairing and interleaving are for.

    python -m pytest tests/suite/test_timing_simulated.py

The machine's clock moves only when its calls run, so every number here is exact for its seed. It says nothing of a real
machine's noise.
"""

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom

from suite.stats import Difference, compare
from suite.timing import ContestResult, Variant, contest
from suite.timing._entry import orders
from suite.timing._simulated import SimulatedMachine

CONTESTS = 200
ROUNDS, LAUNCHES = 20, 30  # what the docs recommend; the power below is stated for these
CALL_S = 1e-4
PLANTED = 1.03
MARGIN = 0.03
CONFIDENCE = 0.95
SEED = 20240611

# Expected noise: call noise 2% -> median of 30 launches 1.25 * 2% / sqrt(30) = 0.46%, a ratio sqrt(2) times that = 0.65%,
# the shared drift within a round (10% with a memory of 2000 calls) adds about as much again between neighbours.
# Median of 20 rounds: about 1.25 * 0.9% / sqrt(20) = 0.25%.
TOLERANCE = {
    # At most alpha of identical pairs are called different; the count may reach the 99.99% quantile of that binomial.
    "false_alarms": int(binom.ppf(0.9999, CONTESTS, 1 - CONFIDENCE)),
    "found": math.ceil(0.95 * CONTESTS),  # power at the planted 3%, as stated
    "no_difference": math.ceil(0.95 * CONTESTS),
    "log_ratio": 5 * 0.0025,  # five standard errors from above
    "interval_misses": int(binom.ppf(0.9999, CONTESTS, 1 - CONFIDENCE)),
}


def simulated(seed: int, factor: float, *, rounds: int = ROUNDS, launches: int = LAUNCHES, **noise: float) -> ContestResult:
    """One contest of "a" against "b", which takes `factor` times as long."""
    machine = SimulatedMachine(np.random.default_rng(seed), **noise)
    variants = [machine.variant("a", CALL_S), machine.variant("b", factor * CALL_S)]
    return contest(variants, device="cpu", rounds=rounds, launches_per_round=launches, warmup_s=0.0, clock=machine.clock)


@pytest.fixture(scope="module")
def identical() -> list[ContestResult]:
    return [simulated(SEED + index, 1.0) for index in range(CONTESTS)]


@pytest.fixture(scope="module")
def slowed() -> list[ContestResult]:
    return [simulated(SEED + CONTESTS + index, PLANTED) for index in range(CONTESTS)]


def verdicts(results: list[ContestResult]) -> list[Difference]:
    return [compare(result, "b", "a", confidence=CONFIDENCE, margin=MARGIN).verdict for result in results]


def test_identical_programs_are_called_different_at_most_at_the_stated_rate(identical):
    found = verdicts(identical)
    assert sum(verdict in (Difference.FASTER, Difference.SLOWER) for verdict in found) <= TOLERANCE["false_alarms"]


def test_identical_programs_give_no_difference(identical):
    assert verdicts(identical).count(Difference.NO_DIFFERENCE) >= TOLERANCE["no_difference"]


def test_the_interval_of_one_contest_covers_the_truth_at_its_rate(identical, slowed):
    for results, truth in ((identical, 1.0), (slowed, PLANTED)):
        intervals = [compare(result, "b", "a", confidence=CONFIDENCE).ratio for result in results]
        assert sum(not i.low <= truth <= i.high for i in intervals) <= TOLERANCE["interval_misses"]


def test_a_planted_slow_down_of_3_percent_is_found(slowed):
    assert verdicts(slowed).count(Difference.SLOWER) >= TOLERANCE["found"]


def test_the_same_slow_down_seen_from_the_other_side_is_faster(slowed):
    seen = [compare(result, "a", "b").verdict for result in slowed]
    assert seen.count(Difference.FASTER) >= TOLERANCE["found"]


def test_log_ratios_are_the_planted_ones_although_the_machine_drifts_by_ten_percent(slowed):
    for result in slowed:
        assert abs(result.log_ratio("b", "a") - math.log(PLANTED)) < TOLERANCE["log_ratio"]
        assert abs(result.control_log_ratio) < TOLERANCE["log_ratio"]
    drift = np.std([math.log(result.median_s("a") / CALL_S) for result in slowed])
    assert drift > TOLERANCE["log_ratio"], "the machine must drift, or the test above shows nothing about pairing"


def test_a_difference_below_the_control_spread_is_not_called_one():
    """The control differs from itself by 5% in every round, b from a by 1% in every round: significant, and still noise."""
    base = np.full((ROUNDS, LAUNCHES), CALL_S)
    result = handmade({"a": base, "b": 1.01 * base, "a [A/A]": 1.05 * base})
    comparison = compare(result, "b", "a")
    assert comparison.ratio.low > 1
    assert comparison.verdict is Difference.UNDECIDED, "nor is it no difference: the contest cannot tell within its margin"


def test_a_difference_above_the_control_spread_is_called_one():
    base = np.full((ROUNDS, LAUNCHES), CALL_S)
    result = handmade({"a": base, "b": 1.06 * base, "a [A/A]": 1.05 * base})
    assert compare(result, "b", "a").verdict is Difference.SLOWER


def test_a_contest_noisier_than_the_margin_is_undecided():
    result = simulated(SEED, 1.0, rounds=8, launches=3, call_noise=0.30)
    assert compare(result, "b", "a", margin=MARGIN).verdict is Difference.UNDECIDED


def test_the_noise_floor_is_the_upper_quantile_of_the_control_s_round_ratios():
    """20 rounds whose control ratios are 1%, 2%, ... 20% in log: the 95% quantile, taken at the upper neighbour, is 20%."""
    base = np.full((ROUNDS, LAUNCHES), CALL_S)
    steps = np.arange(1, ROUNDS + 1)[:, None] / 100
    result = handmade({"a": base, "a [A/A]": base * np.exp(steps)})
    assert result.noise_floor == pytest.approx(0.20)
    assert result.control_log_ratio == pytest.approx(0.105)


def test_too_few_rounds_for_a_verdict_are_refused():
    with pytest.raises(ValueError, match="needs 6 values, got 5"):
        compare(simulated(SEED, 1.0, rounds=5, launches=2), "b", "a")


def test_every_launch_visits_every_entry_once_and_orders_rotate():
    machine = SimulatedMachine(np.random.default_rng(SEED))
    variants = [machine.variant(name, CALL_S) for name in "abc"]
    launches = 8
    contest(variants, device="cpu", rounds=2, launches_per_round=launches, warmup_s=0.0, clock=machine.clock)
    timed = machine.visits[-2 * launches * 4 :]
    sweeps = [tuple(timed[start : start + 4]) for start in range(0, len(timed), 4)]
    assert all(sorted(sweep) == ["a", "a", "b", "c"] for sweep in sweeps), "the control is the first variant again"
    assert {sweep[0] for sweep in sweeps} == {"a", "b", "c"}, "each comes first at some time"
    followed_by_b = {sweep[sweep.index("b") - 1] for sweep in sweeps if sweep.index("b")}
    assert followed_by_b == {"a", "c"}, "b comes after each other variant at some time"


@pytest.mark.parametrize("num_entries", [2, 3, 4, 5, 8], ids=lambda n: f"{n} entries")
def test_a_period_of_orders_balances_places_and_predecessors(num_entries):
    """Even and odd numbers of entries are built differently; 2 is the smallest contest."""
    period = orders(num_entries)
    places = Counter((place, entry) for order in period for place, entry in enumerate(order))
    followers = Counter(pair for order in period for pair in zip(order, order[1:]))
    assert len(places) == num_entries**2 and len(set(places.values())) == 1
    assert len(followers) == num_entries * (num_entries - 1) and len(set(followers.values())) == 1


def test_the_orders_run_on_from_round_to_round():
    """One launch a round still visits the entries in more than one order."""
    machine = SimulatedMachine(np.random.default_rng(SEED))
    rounds = 6
    contest(
        [machine.variant(name, CALL_S) for name in "ab"],
        device="cpu", rounds=rounds, launches_per_round=1, warmup_s=0.0, clock=machine.clock,
    )  # fmt: skip
    timed = machine.visits[-rounds * 3 :]
    assert len({tuple(timed[start : start + 3]) for start in range(0, len(timed), 3)}) > 1


def test_time_is_per_call_of_the_rotation():
    machine = SimulatedMachine(np.random.default_rng(SEED), call_noise=0.0, drift=0.0)
    variant = machine.variant("a", CALL_S, num_calls=7, bytes_moved=1000, flops=2000)
    result = contest([variant], device="cpu", rounds=1, launches_per_round=2, warmup_s=0.0, clock=machine.clock)
    assert result.median_s("a") == pytest.approx(CALL_S)
    assert result.gbps("a") == pytest.approx(1000 / CALL_S / 1e9)
    assert result.tflops("a [A/A]") == pytest.approx(2000 / CALL_S / 1e12)
    assert result.calls_per_launch == {"a": 7, "a [A/A]": 7}


def test_warm_up_lasts_as_long_as_asked_on_the_contest_s_own_clock():
    machine = SimulatedMachine(np.random.default_rng(SEED))
    warmup_s = 50 * CALL_S
    result = contest([machine.variant("a", CALL_S)], device="cpu", rounds=1, launches_per_round=1,
                     warmup_s=warmup_s, clock=machine.clock)  # fmt: skip
    assert result.conditions["warmup"]["seconds"] >= warmup_s


def handmade(samples: dict[str, np.ndarray]) -> ContestResult:
    """A result whose samples are given; the control is ("a", "a [A/A]")."""
    nothing = dict.fromkeys(samples)
    return ContestResult(samples=samples, control=("a", "a [A/A]"), device="cpu", mode="eager", calls_per_launch=dict.fromkeys(samples, 1),
                         bytes_moved=nothing, flops=nothing, telemetry=[], conditions={})  # fmt: skip


def test_a_clock_too_coarse_for_a_launch_is_an_error_not_a_zero():
    stopped = Variant(name="a", calls=(lambda: None,))
    with pytest.raises(ValueError, match="above 0 s"):
        contest([stopped], device="cpu", rounds=1, launches_per_round=1, warmup_s=0.0, clock=lambda: 0)
