"""The allocator is optimal, the rules beside it do what their sources say, and bad input is refused."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

from studies.loka.pricing.allocate import Candidate, allocate, greedy
from studies.loka.pricing.rules import best_single, converts, loka, oracle, torchao_all, torchao_filter, uniform
from studies.loka.site import Plan, Site
from studies.loka.sites.registry import trace
from studies.models.recommenders import MODELS

FP8 = ("tensorwise-fast", "rowwise-fast", "blockwise")
# Sums of at most 8 numbers in different orders: 8 roundings of 2^-53 each, with a factor of 100 to spare.
ROUNDING = 1e-13


def candidate(site="a:linear", recipe="bf16", time_us=10.0, loss=0.0, which="forward", mere=math.nan) -> Candidate:
    return Candidate(site=site, which=which, recipe=recipe, time_us=time_us, loss=loss, mere=mere)


def random_candidates(seed: int, sites: int) -> list[Candidate]:
    """Times and prices on coarse grids, so that ties happen."""
    draw = random.Random(seed)
    found = []
    for i in range(sites):
        which = draw.choice(["forward", "wgrad"])
        found.append(candidate(f"s{i}:linear", "bf16", draw.randint(5, 12), 0.0, which))
        found += [candidate(f"s{i}:linear", r, draw.randint(2, 14), draw.choice([-1, 0, 1, 2, 3, 5, 9]) * 1e-6, which) for r in FP8]
    return found


def brute_force(candidates: list[Candidate], budget: float) -> tuple[float, float]:
    """(time, price) of the fastest choice within the budget, the cheapest of the fastest, over all choices."""
    groups: dict = {}
    for c in candidates:
        groups.setdefault((c.site, c.which), []).append(c)
    sums = ((sum(c.time_us for c in pick), math.fsum(c.price for c in pick)) for pick in itertools.product(*groups.values()))
    return min((t, p) for t, p in sums if p <= budget)


def spent(plan: Plan, candidates: list[Candidate]) -> tuple[float, float]:
    of = [c for c in candidates if plan.recipe(c.site, c.which).name == c.recipe]
    return sum(c.time_us for c in of), math.fsum(c.price for c in of)


@pytest.mark.parametrize("seed", range(25))
def test_an_allocation_is_the_best_of_all_choices(seed):
    candidates = random_candidates(seed, sites=5)
    for budget in (0.0, 3e-6, 7.5e-6, 1.0):
        found = allocate(candidates, budget=budget)
        time, price = brute_force(candidates, budget)
        assert found.time_us == pytest.approx(time, rel=ROUNDING) and found.loss == pytest.approx(price, rel=ROUNDING, abs=0)
        assert spent(found.plan, candidates) == pytest.approx((found.time_us, found.loss), rel=ROUNDING)
        assert found.loss <= budget
        assert found.base_time_us == sum(c.time_us for c in candidates if c.recipe == "bf16")


@pytest.mark.parametrize("seed", range(25))
def test_greedy_fits_the_budget_and_is_never_faster_than_the_optimum(seed):
    candidates = random_candidates(seed, sites=5)
    for budget in (3e-6, 7.5e-6):
        found = greedy(candidates, budget=budget)
        assert allocate(candidates, budget=budget).time_us <= found.time_us * (1 + ROUNDING) <= found.base_time_us * (1 + ROUNDING)
        assert found.loss <= budget and spent(found.plan, candidates) == pytest.approx((found.time_us, found.loss), rel=ROUNDING)


def test_greedy_is_beaten_where_a_small_bargain_shuts_out_a_large_gain():
    candidates = [
        candidate("a:linear", time_us=10), candidate("a:linear", "blockwise", 8, 1e-6),
        candidate("b:linear", time_us=100), candidate("b:linear", "blockwise", 60, 30e-6),
    ]  # fmt: skip
    assert greedy(candidates, budget=30e-6).plan.recipes == {"a:linear": {"forward": "blockwise"}}
    assert allocate(candidates, budget=30e-6).plan.recipes == {"b:linear": {"forward": "blockwise"}}


def test_a_sum_of_prices_equal_to_the_budget_fits_and_one_a_millionth_above_does_not():
    """The solver's own tolerance is 1e-6 of the bound: it must not leak into plans."""
    candidates = [c for s in ("a:linear", "b:linear") for c in (candidate(s), candidate(s, "blockwise", 5, 4.5e-5))]
    assert len(allocate(candidates, budget=9e-5).plan.recipes) == 2
    assert len(allocate(candidates, budget=9e-5 * (1 - 5e-7)).plan.recipes) == 1


def test_forty_sites_with_three_passes_are_solved_exactly_to_the_bound_of_the_relaxation():
    draw = random.Random(0)
    candidates = [
        candidate(f"s{i}:linear", recipe, 10 * (1 if recipe == "bf16" else draw.uniform(0.4, 1.1)), 0.0 if recipe == "bf16" else draw.expovariate(1e6), which)
        for i in range(40) for which in ("forward", "dgrad", "wgrad") for recipe in ("bf16", *FP8)
    ]  # fmt: skip
    found = allocate(candidates, budget=2e-5)
    simple = greedy(candidates, budget=2e-5)
    assert found.loss <= 2e-5 and found.time_us <= simple.time_us
    assert found.time_us > simple.time_us - 6.0  # greedy loses at most one step, and no step saves more than 6 us


def test_candidates_slower_than_wanted_are_not_taken():
    candidates = [candidate(), candidate(recipe="blockwise", time_us=9.6)]
    assert allocate(candidates, budget=1.0).speedup == pytest.approx(10 / 9.6)
    assert not allocate(candidates, budget=1.0, min_gain=1.05).plan.recipes


def test_of_two_recipes_alike_in_all_one_is_taken_and_always_the_same():
    candidates = [candidate(), candidate(recipe="rowwise", time_us=5, loss=1e-6), candidate(recipe="blockwise", time_us=5, loss=1e-6)]
    plans = {str(allocate(order, budget=1e-6).plan.recipes) for order in itertools.permutations(candidates)}
    assert plans == {"{'a:linear': {'forward': 'blockwise'}}"}


def test_a_price_below_zero_buys_nothing_elsewhere():
    candidates = [candidate(), candidate(recipe="blockwise", time_us=5, loss=-1e-3), candidate("b:linear"), candidate("b:linear", "blockwise", 5, 1e-6)]
    found = allocate(candidates, budget=0.0)
    assert found.plan.recipes == {"a:linear": {"forward": "blockwise"}} and found.loss == 0.0


def test_no_candidates_give_an_empty_plan():
    found = allocate([], budget=1e-5)
    assert found.plan.recipes == {} and found.time_us == 0.0 and found.speedup == 1.0


@pytest.mark.parametrize(
    ("candidates", "budget", "rule"),
    [
        ([candidate(loss=5e-6), candidate(recipe="blockwise", loss=7e-6)], 1e-6, "smallest summed price is 5e-06"),
        ([candidate(recipe="blockwise")], 1.0, "one bf16 candidate"),
        ([candidate(), candidate()], 1.0, "each recipe once"),
        ([candidate()], -1.0, "budget is a number"),
        ([candidate()], math.nan, "budget is a number"),
    ],
)
def test_what_cannot_be_planned_is_refused(candidates, budget, rule):
    with pytest.raises(ValueError, match=rule):
        allocate(candidates, budget=budget)


@pytest.mark.parametrize("wrong", [{"time_us": 0.0}, {"time_us": math.inf}, {"loss": math.nan}, {"which": "backward"}, {"recipe": "int8"}])
def test_a_candidate_without_a_time_a_loss_a_pass_or_a_recipe_is_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        candidate(**wrong)


# ---- rules ----------------------------------------------------------------------------------------------------------------------


def test_loka_takes_the_fastest_recipe_whose_mere_and_speed_up_pass():
    plan = loka([
        candidate("a:linear"), candidate("a:linear", "blockwise", 5, mere=0.2), candidate("a:linear", "rowwise", 7, mere=0.19), candidate("a:linear", "tensorwise", 8, mere=0.1),
        candidate("b:linear"), candidate("b:linear", "blockwise", 10 / 1.05, mere=0.1),
        candidate("c:linear"), candidate("c:linear", "blockwise", 2),
    ])  # fmt: skip
    assert plan.recipes == {"a:linear": {"forward": "rowwise"}}  # a MERE of 0.2, a speed-up of 1.05 and an unknown MERE do not pass


def three_passes(site: str, times: dict[str, float], losses: dict[str, float]) -> list[Candidate]:
    from kernels.fp8.recipes import PASSES, RECIPES

    found = []
    for which in PASSES:
        found.append(candidate(site, which=which))
        names = {RECIPES[r].of(which).name: r for r in times}
        found += [candidate(site, name, times[r], losses[r], which) for name, r in names.items() if name != "bf16"]
    return found


def test_the_best_single_recipe_is_the_fastest_layer_recipe_and_keeps_what_it_is_told():
    candidates = three_passes("a:linear", {"tensorwise": 6.0, "blockwise": 8.0}, {"tensorwise": 1e-5, "blockwise": 1e-6})
    candidates += three_passes("head:linear", {"tensorwise": 9.0, "blockwise": 4.0}, {"tensorwise": 1e-5, "blockwise": 1e-4})
    assert best_single(candidates).made_by == "best single recipe: blockwise"  # 3 x (8 + 4) before 3 x (6 + 9)
    kept = best_single(candidates, keep=("head:linear",))
    assert kept.made_by == "best single recipe: tensorwise" and list(kept.recipes) == ["a:linear"]
    assert best_single(candidates, keep=("head:linear",), budget=5e-6).made_by == "best single recipe: blockwise"
    assert best_single(candidates, budget=0.0).recipes == {}
    assert uniform(candidates, "rowwise-hp-wgrad").recipes == {}  # no candidate of it was given


def test_a_uniform_plan_has_each_pass_s_own_recipe():
    plan = uniform(three_passes("a:linear", {"tensorwise": 6.0}, {"tensorwise": 1e-5}), "tensorwise")
    assert plan.recipes == {"a:linear": {"forward": "tensorwise-fast", "dgrad": "tensorwise-grad", "wgrad": "tensorwise-grad"}}
    with pytest.raises(ValueError, match="a layer's recipe"):
        uniform([], "int8")


def test_the_oracle_is_no_slower_than_any_plan_within_the_budget():
    for seed in range(10):
        measured = random_candidates(seed, sites=6)
        found = oracle(measured, budget=6e-6)
        plans = [greedy(measured, budget=6e-6).plan, best_single(measured, budget=6e-6)]
        assert all(found.time_us <= spent(plan, measured)[0] * (1 + ROUNDING) for plan in plans)
        assert found.plan.made_by.startswith("oracle")


# (out_features, in_features) on either side of each threshold of torchao 0.18.0's float8_linear_utils.py
@pytest.mark.parametrize(
    ("recipe", "n", "k", "taken"),
    [
        ("tensorwise", 1024, 4096, False), ("tensorwise", 1040, 16, True), ("tensorwise", 16, 4112, True), ("tensorwise", 1041, 4112, False),
        ("rowwise", 2048, 65536, False), ("rowwise", 8192, 1024, False), ("rowwise", 4096, 2048, False), ("rowwise", 4096, 2064, True),
        ("rowwise", 4112, 1040, True), ("rowwise", 4112, 1041, False),
    ],
)  # fmt: skip
def test_torchao_s_filter_at_its_thresholds(recipe, n, k, taken):
    assert converts(n, k, recipe) is taken


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_s_filter_converts_none_of_the_8_linear_layers_of_dlrm_v2(recipe):
    model = MODELS["dlrm_v2"](size="mlperf", device="meta")
    sites = trace(model, torch.empty(8, 13, device="meta"), torch.empty(8, 26, 128, device="meta")).sites
    assert len(sites) == 14  # with the 6 products of the cross network, which are parameters without a module of their own
    assert torchao_filter(model, sites, recipe).recipes == {}
    everything = torchao_all(model, sites, recipe).recipes
    assert len(everything) == 8 and not any(name.startswith("cross") for name in everything)


def test_torchao_s_plans_name_the_three_passes_and_leave_a_missing_dgrad_out():
    model = nn.Sequential(nn.Linear(4096, 8192, device="meta"))
    site = Site(name="0:linear", op="linear", batch=1, m=64, n=8192, k=4096, trains_x=False)
    assert torchao_filter(model, [site], "rowwise_with_gw_hp").recipes == {"0:linear": {"forward": "rowwise-fast"}}
    assert set(torchao_filter(model, [site], "tensorwise").recipes["0:linear"]) == {"forward", "wgrad"}
    with pytest.raises(ValueError, match="torchao's recipe"):
        torchao_filter(model, [site], "mxfp8")
