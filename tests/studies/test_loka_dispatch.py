"""Dispatch: rises only on proof and after a rest, falls at once, and changes nothing while readings stay within the margin."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.loka.site import Plan
from studies.loka.sites.dispatch import Dispatch, Reading, Rules

THRESHOLD, MARGIN, DWELL = 25.0, 1.0, 100
RULES = Rules(threshold_db=THRESHOLD, thresholds_db={("head:linear", "forward"): 33.0}, margin_db=MARGIN, dwell=DWELL)
PLAN = Plan(
    recipes={"a:linear": {"forward": "rowwise-fast", "wgrad": "rowwise-p2"}, "b:linear": {"forward": "blockwise"}, "head:linear": {"forward": "rowwise"}},
    fused=("a:linear",), made_by="a test",
)  # fmt: skip
START = Dispatch(plan=PLAN, rules=RULES)
KEYS = [(site, which) for site, passes in PLAN.recipes.items() for which in passes]


def reading(key=("a:linear", "forward"), low=30.0, high=None, speedup=1.2, recipe=None) -> Reading:
    site, which = key
    return Reading(site=site, which=which, recipe=recipe or PLAN.recipes[site][which], sqnr_low_db=low, sqnr_high_db=max(low, 60.0) if high is None else high, speedup_low=speedup)


def up(dispatch: Dispatch) -> set:
    return {(s, w) for s, passes in dispatch.running.recipes.items() for w in passes}


def test_everything_starts_in_bf16_whatever_the_plan_says():
    assert START.running.recipes == {} and START.running.fused == ()


# (SQNR low, high, speed-up low) -> whether a product that runs in bf16 rises, and whether one that runs in FP8 stays
CASES = {
    "safe and faster": (25.0, 40.0, 1.01, True, True),
    "undecided by less than the margin": (24.9, 40.0, 1.5, False, True),
    "undecided by the margin": (24.0, 40.0, 1.5, False, True),
    "undecided by more": (23.9, 40.0, 1.5, False, False),
    "certainly below the threshold": (24.5, 24.9, 1.5, False, False),
    "as fast as bf16": (30.0, 40.0, 1.0, False, False),
    "slower than bf16": (30.0, 40.0, 0.8, False, False),
    "speed unknown": (30.0, 40.0, math.nan, False, False),
    "SQNR unknown": (math.nan, math.nan, 1.5, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reading_raises_keeps_or_drops_a_product(case):
    low, high, speedup, rises, stays = CASES[case]
    key = ("a:linear", "forward")
    new = [reading(key, low, high, speedup)]
    assert (key in up(START.after(step=1, readings=new))) is rises
    assert (key in up(START.after(step=1, readings=[reading(key)]).after(step=2, readings=new))) is stays


def test_the_head_needs_its_own_threshold():
    head = ("head:linear", "forward")
    assert up(START.after(step=1, readings=[reading(head, 32.9)])) == set() and up(START.after(step=1, readings=[reading(head, 33.0)])) == {head}


def test_a_product_that_fell_rests_before_it_rises_again_and_others_do_not():
    a, b = ("a:linear", "forward"), ("b:linear", "forward")
    fallen = START.after(step=10, readings=[reading(a)]).after(step=20, readings=[reading(a, 10.0)])
    assert [c.recipe for c in fallen.changes] == ["bf16"] and "10.0" in fallen.changes[0].why
    early = fallen.after(step=20 + DWELL - 1, readings=[reading(a), reading(b)])
    assert up(early) == {b}
    assert up(early.after(step=20 + DWELL, readings=[reading(a)])) == {a, b}


def test_a_drift_alarm_drops_all_passes_of_its_site_at_once_and_starts_a_rest():
    everything = START.after(step=1, readings=[reading(k, 40.0) for k in KEYS])
    assert up(everything) == set(KEYS) and everything.running.fused == ("a:linear",)
    rang = everything.after(step=2, readings=[reading(k, 40.0) for k in KEYS], alarms=["a:linear"])
    assert up(rang) == {k for k in KEYS if k[0] != "a:linear"} and rang.running.fused == ()
    again = rang.after(step=50, alarms=["a:linear"])
    assert up(again.after(step=50 + DWELL - 1, readings=[reading()])) == up(rang), "an alarm of a site that is down starts its rest anew"
    assert ("a:linear", "forward") in up(again.after(step=50 + DWELL, readings=[reading()]))


def test_readings_of_what_the_plan_does_not_have_change_nothing():
    strangers = [reading(recipe="blockwise"), Reading(site="z:linear", which="forward", recipe="rowwise", sqnr_low_db=40.0, sqnr_high_db=50.0, speedup_low=2.0)]
    assert up(START.after(step=1, readings=strangers)) == set()
    assert up(Dispatch(plan=Plan(recipes={"a:linear": {"forward": "bf16"}}), rules=RULES).after(step=1, readings=[reading(recipe="bf16")])) == set()


HISTORY = st.lists(st.tuples(st.integers(1, 60), st.dictionaries(st.sampled_from(KEYS), st.tuples(st.floats(0, 60), st.floats(0.5, 2.0))), st.sets(st.sampled_from(sorted(PLAN.recipes)), max_size=1)), max_size=30)


def replay(history):
    """(dispatch, step, readings by key, alarms) after each step of a history."""
    dispatch, step = START, 0
    for gap, found, alarms in history:
        step += gap
        dispatch = dispatch.after(step=step, readings=[reading(k, low, speedup=s) for k, (low, s) in found.items()], alarms=alarms)
        yield dispatch, step, found, alarms


@settings(max_examples=150, deadline=None)
@given(HISTORY)
def test_no_product_runs_in_fp8_whose_last_reading_was_slower_than_bf16_or_unsafe(history):
    last = {}
    for dispatch, _, found, alarms in replay(history):
        last |= found
        last = {k: v for k, v in last.items() if k[0] not in alarms}
        for key in up(dispatch):
            assert key in last, "nothing runs in FP8 without a reading since its last alarm"
            low, speedup = last[key]
            assert speedup > 1.0 and low >= RULES.of(key) - MARGIN


@settings(max_examples=150, deadline=None)
@given(HISTORY)
def test_two_rises_of_a_product_lie_a_dwell_apart_and_each_change_is_told(history):
    rose, before = {}, set()
    for dispatch, step, _, _ in replay(history):
        assert {(c.site, c.which) for c in dispatch.changes} == up(dispatch) ^ before
        for key in up(dispatch) - before:
            assert step - rose.get(key, -DWELL) >= DWELL
            rose[key] = step
        before = up(dispatch)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(1, 500), st.floats(THRESHOLD - MARGIN, THRESHOLD, exclude_max=True), st.floats(1.001, 2.0)), max_size=30))
def test_readings_within_the_margin_never_change_anything(starts_up, history):
    key = ("a:linear", "forward")
    first = dispatch = START.after(step=0, readings=[reading(key, 40.0)] if starts_up else [])
    step = 0
    for gap, low, speedup in history:
        step += gap
        dispatch = dispatch.after(step=step, readings=[reading(key, low, speedup=speedup)])
        assert dispatch.changes == () and up(dispatch) == up(first)


WRONG = {
    "an interval the wrong way round": (lambda: reading(low=30.0, high=20.0), "low end is not above"),
    "an unknown recipe": (lambda: reading(recipe="fp4"), "recipe is one of"),
    "an unknown pass": (lambda: Reading(site="a", which="sideways", recipe="rowwise", sqnr_low_db=1.0, sqnr_high_db=2.0, speedup_low=1.0), "a pass is one of"),
    "no margin": (lambda: Rules(threshold_db=25.0, margin_db=0.0), "margin > 0"),
    "no dwell": (lambda: Rules(threshold_db=25.0, dwell=0), "dwell of at least one"),
    "a step back": (lambda: START.after(step=5).after(step=4), "steps go on"),
    "an alarm of a stranger": (lambda: START.after(step=1, alarms=["z:linear"]), r"got \['z:linear'\]"),
    "two readings of one product": (lambda: START.after(step=1, readings=[reading(), reading(low=20.0)]), "one reading of a recipe"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused_in_words(case):
    do, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        do()
