"""Coverage and error rates over thousands of simulated contests, processes included: the long form of the fast tests.

    python -m pytest tests/soak/test_coverage.py -m soak

Each simulated claim is five processes; each process is one whole contest on a machine with a drift and per-process
factors of its own. Real machines are not simulated in their tails (a neighbour that steals a whole round).
"""

import math

import numpy as np
import pytest
from scipy.stats import binom

from suite.stats import Difference, Equivalence, bootstrap_interval, compare, mean_interval, ratio_interval, tost
from suite.timing import ContestResult, contest
from suite.timing._simulated import SimulatedMachine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SEED = 4242
CLAIMS, PROCESSES = 600, 5
ROUNDS, LAUNCHES = 12, 10
CALL_S, TRUTH = 1e-4, 1.10
PROCESS_NOISE = 0.02  # per variant, so a ratio differs by sqrt(2) times that between processes
CONTESTS = 2000
DRAWS = 20_000

TOLERANCE = {
    # 99.99% binomial bands of misses at 5%.
    "claims": (int(binom.ppf(1e-4, CLAIMS, 0.05)), int(binom.ppf(1 - 1e-4, CLAIMS, 0.05))),
    "contests": int(binom.ppf(1 - 1e-4, CONTESTS, 0.05)),
    "draws": (int(binom.ppf(1e-4, DRAWS, 0.05)), int(binom.ppf(1 - 1e-4, DRAWS, 0.05))),
    # Pooled rounds: standard error 2.83% / sqrt(60) where it is 2.83% / sqrt(5); 2.0 / sqrt(12) = 0.58 deviations, 44%.
    "naive_coverage": 0.6,
    "power": math.ceil(0.95 * CONTESTS),
    # Cluster bootstrap of 20 units: percentile-type intervals of a mean of n units are short by sqrt((n - 1) / n) and use
    # normal for t quantiles, 1.96 * 0.975 / 2.09: coverage 92%. 1000 simulations at 91% reach up to:
    "cluster_misses": int(binom.ppf(1 - 1e-4, 1000, 0.09)),
    "cluster_naive_coverage": 0.75,
}


def one_process(seed: int, factor: float, process_noise: float, rounds: int = ROUNDS, launches: int = LAUNCHES) -> ContestResult:
    machine = SimulatedMachine(np.random.default_rng(seed), process_noise=process_noise)
    variants = [machine.variant("a", CALL_S), machine.variant("b", factor * CALL_S)]
    return contest(variants, device="cpu", rounds=rounds, launches_per_round=launches, warmup_s=0.0, clock=machine.clock)


def test_claims_over_five_processes_cover_and_pooled_rounds_do_not():
    misses, naive_hits = 0, 0
    for claim in range(CLAIMS):
        results = [one_process(SEED + claim * PROCESSES + process, TRUTH, PROCESS_NOISE) for process in range(PROCESSES)]
        interval = ratio_interval([result.log_ratio("b", "a") for result in results])
        naive = ratio_interval(np.concatenate([result.round_ratios("b", "a") for result in results]))
        misses += not interval.low <= TRUTH <= interval.high
        naive_hits += naive.low <= TRUTH <= naive.high
    fewest, most = TOLERANCE["claims"]
    assert fewest <= misses <= most
    assert naive_hits / CLAIMS < TOLERANCE["naive_coverage"]


def test_identical_programs_keep_their_false_alarm_rate_and_three_percent_is_found():
    alarms = found = 0
    for index in range(CONTESTS):
        same = compare(one_process(SEED + index, 1.0, 0.0, 20, 30), "b", "a").verdict
        slow = compare(one_process(SEED - index - 1, 1.03, 0.0, 20, 30), "b", "a").verdict
        alarms += same in (Difference.FASTER, Difference.SLOWER)
        found += slow is Difference.SLOWER
    assert alarms <= TOLERANCE["contests"]
    assert found >= TOLERANCE["power"]


@pytest.mark.parametrize("n", [3, 5, 20], ids=lambda n: f"n={n}")
def test_mean_intervals_cover_and_tost_keeps_its_errors_at_the_border(n):
    rng, misses, equal, different = np.random.default_rng(SEED + n), 0, 0, 0
    for _ in range(DRAWS):
        values = 1.0 + 0.3 * rng.standard_normal(n)
        interval, verdict = mean_interval(values), tost(values, 1.0).verdict
        misses += not interval.low <= 1.0 <= interval.high
        equal += verdict is Equivalence.EQUIVALENT
        different += verdict is Equivalence.DIFFERENT
    fewest, most = TOLERANCE["draws"]
    assert fewest <= misses <= most
    assert equal <= most and different <= most


def test_the_bootstrap_over_units_covers_and_over_values_does_not():
    """20 prompts of 10 tokens, prompts differing twice as much as tokens within one."""
    rng, misses, naive_hits = np.random.default_rng(SEED), 0, 0
    unit = np.repeat(np.arange(20), 10)
    for _ in range(1000):
        values = (2.0 * rng.standard_normal((20, 1)) + rng.standard_normal((20, 10))).ravel()
        interval = bootstrap_interval(values, np.mean, rng=rng, unit=unit, resamples=400)
        naive = bootstrap_interval(values, np.mean, rng=rng, resamples=400)
        misses += not interval.low <= 0.0 <= interval.high
        naive_hits += naive.low <= 0.0 <= naive.high
    assert misses <= TOLERANCE["cluster_misses"]
    assert naive_hits / 1000 < TOLERANCE["cluster_naive_coverage"]
