"""Stopping errs as rarely as it says, at every stopping time, and decides soon; drift alarms seldom without cause and soon with one."""

import functools
import math

import numpy as np
import pytest
import torch

from studies.loka.probing.readings import Readings, SiteReading
from studies.loka.probing.sequential import DECISION, REFERENCE, Drift, Stopping, drifted
from studies.loka.probing.sketch import Sketch, sketch
from studies.loka.site import Site

ALPHA, STREAMS, STEPS, ROWS = 0.05, 200, 20, 200
# Of 200 streams at most alpha err in expectation: 10, standard deviation sqrt(200 x 0.05 x 0.95) = 3.1, four of them above.
ERRORS = 10 + 4 * 3.1
# A bet without failures grows by 1 / 0.99 a row; two of six bets do so, hence (1/3) 0.99^-n = 20 and n = 408, less what the others win.
SAFE_WITHOUT_FAILURES = (299, 408)
# Siegmund (Sequential Analysis, 1985): run length (e^(2 k b) - 2 k b - 1) / (2 k^2), b = h + 1.166, of one direction, half of it for two.
B = DECISION + 1.166
RUN_LENGTH = (math.exp(2 * REFERENCE * B) - 2 * REFERENCE * B - 1) / (2 * REFERENCE**2) / 2
# A shift of d standard deviations is seen after (h + 1.166) / (d - k) values on average; self-starting adds the learning of the new level: double it.
SHIFT = 3.0
DELAY = 2 * B / (SHIFT - REFERENCE)


def streams(share: float, seed: int) -> list[Stopping]:
    rng, out = np.random.default_rng(seed), []
    for _ in range(STREAMS):
        stop = Stopping(alpha=ALPHA)
        for below in rng.binomial(ROWS, share, STEPS):
            stop.update(rows_below=int(below), rows=ROWS)
        out.append(stop)
    return out


@pytest.mark.parametrize(("share", "wrong"), [(0.01, "safe"), (0.01, "unsafe"), (0.012, "safe"), (0.008, "unsafe")])
def test_a_wrong_verdict_at_any_time_is_as_rare_as_alpha(share, wrong):
    assert sum(s.verdict == wrong for s in streams(share, seed=1)) <= ERRORS


@pytest.mark.parametrize("share", [0.002, 0.01, 0.2])  # rare, at the limit, common
def test_bounds_hold_for_all_times_at_once(share):
    """Bounds only ever shrink, so one that missed at any time misses at the end; two sides, alpha each."""
    missed = sum(not low <= share <= high for low, high in (s.bounds for s in streams(share, seed=2)))
    assert missed <= 2 * ERRORS


@pytest.mark.parametrize(("share", "verdict", "decided"), [(0.0, "safe", 1.0), (0.001, "safe", 0.9), (0.03, "unsafe", 0.9), (0.2, "unsafe", 1.0)])
def test_shares_that_are_clear_are_decided_within_4000_rows(share, verdict, decided):
    found = streams(share, seed=3)
    assert sum(s.verdict == verdict for s in found) >= decided * STREAMS


def test_without_failures_it_stops_soon():
    stop = Stopping(alpha=ALPHA)
    while stop.verdict == "undecided" and stop.units < 1000:
        stop.update(rows_below=0, rows=1)
    assert SAFE_WITHOUT_FAILURES[0] <= stop.units <= SAFE_WITHOUT_FAILURES[1] and stop.verdict == "safe"


def test_a_verdict_stays():
    stop = Stopping().update(rows_below=0, rows=500)
    assert stop.verdict == "safe" and stop.update(rows_below=500, rows=500).verdict == "safe" and stop.units == 1000


def test_steps_that_are_bad_together_need_steps_as_units():
    """One step in 50 has half of its rows below: 1% in all. Rows as units say safe too often, steps as units do not."""
    rng, rows_wrong, steps_wrong = np.random.default_rng(4), 0, 0
    for _ in range(25):
        by_rows, by_steps = Stopping(alpha=ALPHA), Stopping(alpha=ALPHA)
        for bad in rng.random(300) < 0.02:
            by_rows.update(rows_below=50 * bool(bad), rows=100)
            by_steps.update_step(0.5 * bool(bad))
        rows_wrong += by_rows.verdict == "safe"
        steps_wrong += by_steps.verdict == "safe"
    assert rows_wrong > 12 and steps_wrong <= 1.25 + 4 * math.sqrt(25 * 0.05 * 0.95)


def test_drift_alarms_as_rarely_as_its_formula_says():
    """In 150 runs of 200 values an alarm each RUN_LENGTH values: a Poisson number, four standard deviations above."""
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(150):
        drift = Drift()
        for value in rng.normal(10, 0.7, 200):
            drift.update(value)
        alarms += drift.alarmed
    expected = 150 * 200 / RUN_LENGTH
    assert alarms <= expected + 4 * math.sqrt(expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_drift_of_three_deviations_is_seen_within_a_few_readings(sign):
    rng = np.random.default_rng(6)
    delays = []
    for _ in range(200):
        drift = Drift()
        for value in rng.normal(-3, 0.25, 50):
            drift.update(value)
        if drift.alarmed:
            continue
        n = 0
        while not drift.alarmed and n < 50:
            drift.update(rng.normal(-3 + sign * SHIFT * 0.25, 0.25))
            n += 1
        delays.append(n)
    assert len(delays) > 190 and np.mean(delays) <= DELAY and max(delays) < 50


def test_a_slow_ramp_is_seen():
    """A tenth of a standard deviation a reading: after 40 of them the level has moved by 4."""
    rng, drift = np.random.default_rng(7), Drift()
    for i in range(100):
        drift.update(rng.normal(0.1 * max(0, i - 40), 1))
    assert drift.alarmed and drift.up > drift.down


def test_one_wild_reading_or_a_constant_is_no_drift():
    drift = Drift()
    for value in [4.0] * 30:
        drift.update(value)
    assert not drift.alarmed and drift.up == 0
    assert not drift.update(9.0).alarmed


def test_the_sites_whose_operands_moved_are_named():
    """40 steps; of one site x grows by 2^4 after the 30th, of another the rows shrink beside one that keeps the amax, the third stays, zeros included."""
    rng = np.random.default_rng(8)

    def reading(name: str, scale, keep_amax: bool = False) -> SiteReading:
        parts = []
        for step in range(40):
            x = torch.from_numpy(rng.normal(size=(8, 16)) * scale(step)).float()
            if keep_amax:
                x[0, 0] = 100.0 * (1 + 0.1 * rng.random())
            parts.append(sketch(x, step=step, items=4))
        whole = functools.reduce(Sketch.merge, parts)
        return SiteReading(site=Site(name=name, op="linear", batch=1, m=8, n=4, k=16), x=whole, w=sketch(torch.ones(4, 16), step=0, parameter=True))

    jump = lambda step: 16.0 if step >= 30 else 1.0  # noqa: E731
    sites = [reading("grew", jump), reading("shrank", lambda step: 1 / jump(step), keep_amax=True), reading("stayed", lambda step: float(step != 5))]
    readings = Readings(sites={r.site.name: r for r in sites}, unsupported={})
    assert drifted(readings) == ("grew", "shrank") and drifted(readings, since=31) == ()


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: Stopping(limit=0.0), "between 0 and 1"),
        (lambda: Stopping().update(rows_below=3, rows=2), "some of the rows"),
        (lambda: Stopping().update_step(1.5), "between 0 and 1"),
        (lambda: Drift().update(-math.inf), "all zero"),
        (lambda: Drift(decision=0.0), "above 0"),
    ],
)
def test_what_is_no_reading_is_refused(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
