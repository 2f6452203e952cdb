"""Successive halving of packs: what it keeps depends on the standings alone."""

import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from studies.plora.adapter import Evaluation
from studies.plora.search.pruner import NO_PRUNING, Halving, Rungs

BUDGET = 1000
RULE = Halving(shares=(0.1, 0.5), eta=2)


def evaluation(score, tokens=100, loss=1.0):
    return Evaluation(tokens_seen=tokens, score=score, loss=loss)


def fresh(*cohorts, rule=RULE):
    rungs = Rungs(rule, BUDGET)
    for ranks in cohorts:
        rungs.admit(ranks)
    return rungs


@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=12), order=st.randoms(use_true_random=False), eta=st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_the_order_of_reporting_decides_nothing_and_the_best_share_is_kept(scores, order, eta):
    rule = Halving(shares=(0.1,), eta=eta)
    ranks = {n: 8 << (n % 3) for n in range(len(scores))}
    shuffled = list(range(len(scores)))
    order.shuffle(shuffled)
    looks = [fresh({n: ranks[n] for n in numbers}, rule=rule).look({n: evaluation(scores[n] / 5) for n in numbers}) for numbers in (range(len(scores)), shuffled)]
    assert looks[0] == looks[1]
    kept = set(ranks) - looks[0].losers
    assert len(kept) == math.ceil(len(scores) / eta)
    assert all((scores[a], -ranks[a], -a) > (scores[b], -ranks[b], -b) for a in kept for b in looks[0].losers)


@given(scores=st.permutations([i / 10 for i in range(8)]), steps=st.lists(st.integers(90, 130), min_size=8, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_cohort_is_judged_together_however_its_members_straggle(scores, steps):
    """Members pass the rung at looks of their own; the losers are those of the same scores at one look."""
    together = fresh(dict.fromkeys(range(8), 8)).look({n: evaluation(s) for n, s in enumerate(scores)}).losers
    rungs, losers = fresh(dict.fromkeys(range(8), 8)), set()
    for extra in range(0, 40, 10):
        living = set(range(8)) - losers
        losers |= rungs.look({n: evaluation(scores[n], steps[n] + extra) for n in living}).losers
    assert losers == together


def test_a_latecomer_competes_with_finished_and_pruned_trials():
    rungs = fresh({0: 8, 1: 8, 2: 8, 3: 8})
    assert rungs.look({n: evaluation(n / 10) for n in range(4)}).losers == {0, 1}
    rungs.leave(frozenset({3}))  # finished
    rungs.admit({4: 8})
    assert rungs.look({2: evaluation(0.2, 200), 4: evaluation(0.05)}).losers == {4}  # fourth of five standings, three are kept
    rungs.admit({5: 8})
    assert rungs.look({2: evaluation(0.2, 210), 5: evaluation(0.15)}).losers == frozenset()  # third of six
    rungs.admit({6: 8})
    assert rungs.look({6: evaluation(0.12)}).losers == frozenset()  # fourth of seven: the finished one counts, and so do the pruned


def test_a_trial_without_company_is_kept_and_a_worse_second_is_not():
    rungs = fresh({0: 8})
    assert rungs.look({0: evaluation(0.1)}).losers == frozenset()
    rungs.admit({1: 8})
    assert rungs.look({1: evaluation(0.05)}).losers == {1}


def test_equal_scores_keep_the_smaller_rank_then_the_older_trial():
    assert fresh({0: 64, 1: 8, 2: 16, 3: 8}).look({n: evaluation(0.5) for n in range(4)}).losers == {0, 2}
    assert fresh({0: 8, 1: 8}).look({n: evaluation(0.5) for n in range(2)}).losers == {1}


def test_standings_are_the_first_score_at_or_after_a_rung_and_steps_are_its_tokens():
    rungs = fresh({0: 8, 1: 8})
    assert not rungs.due({0: 99, 1: 40}) and rungs.due({0: 100, 1: 40})
    assert rungs.look({0: evaluation(0.9, 130), 1: evaluation(0.4, 60)}).reached == ((0, 100, 0.9),)
    look = rungs.look({0: evaluation(0.1, 300), 1: evaluation(0.8, 110)})
    assert look.reached == ((1, 100, 0.8),) and look.losers == {1}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("rule", [RULE, NO_PRUNING])  # a trial that diverged ends in every strategy
def test_a_diverged_trial_ends_at_once_and_stands_last_at_the_rung_it_headed_for(loss, rule):
    rungs = fresh({0: 8, 1: 8, 2: 8}, rule=rule)
    look = rungs.look({0: evaluation(0.9, 20, loss), 1: evaluation(0.5, 20), 2: evaluation(0.6, 20)})
    assert look.diverged == {0} and look.losers == frozenset()
    assert look.reached == ((0, 100 if rule.shares else BUDGET, -math.inf),)
    assert rungs.look({1: evaluation(0.5), 2: evaluation(0.6)}).losers == frozenset()  # ceil(3 / 2) of three standings


def test_without_rungs_nothing_is_pruned_and_nothing_due():
    rungs = fresh({0: 8, 1: 8}, rule=NO_PRUNING)
    assert not rungs.due({0: 999, 1: 999}) and rungs.look({0: evaluation(0.1, 999), 1: evaluation(0.9, 999)}).losers == frozenset()


@pytest.mark.parametrize("bad", [{"shares": (0.5, 0.1)}, {"shares": (0.0, 0.5)}, {"shares": (0.5, 1.0)}, {"shares": (0.1, 0.1)}, {"eta": 1}])
def test_a_wrong_rule_is_refused(bad):
    with pytest.raises(ValueError, match="got"):
        Halving(**bad)


def test_permuting_slots_permutes_nothing_else():
    """All 24 orders of four trials in two cohorts: the same losers at both rungs."""
    seen = set()
    for order in itertools.permutations(range(4)):
        rungs = fresh({n: 8 for n in order if n < 2}, {n: 8 for n in order if n >= 2})
        first = rungs.look({n: evaluation(n / 4) for n in order}).losers
        second = rungs.look({n: evaluation(n / 4, 500) for n in order if n not in first}).losers
        seen.add((first, second))
    assert seen == {(frozenset({0, 1}), frozenset({2}))}
