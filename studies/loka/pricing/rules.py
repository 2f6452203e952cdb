"""The planners that ours is compared with, each from the same candidates to a `Plan`.

    loka(candidates)                              # fastest recipe a product with MERE < 0.2 and a speed-up > 1.05
    best_single(candidates)                       # one layer recipe for all sites, the fastest
    torchao_filter(model, sites, "tensorwise")    # what torchao's automatic filter converts
    oracle(measured, budget=9e-5)                 # the allocation that measured losses would have given

LoKA's rule is restated from reading notes of arXiv 2605.10886 (section on Dispatch), torchao's filter from torchao/float8/float8_linear_utils.py
(`_auto_filter_for_rowwise`, `_auto_filter_for_tensorwise`) of version 0.18.0, where N is out_features and K in_features; earlier versions had
the two the other way round. Neither package is imported. None of the rules prices an error in log-loss except `oracle`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from kernels.fp8.recipes import RECIPES
from studies.loka.pricing.allocate import Allocation, Candidate, allocate, chosen, grouped
from studies.loka.site import BASE, Plan, Site

__all__ = ["best_single", "converts", "loka", "oracle", "torchao_all", "torchao_filter", "uniform"]

MERE_BELOW, SPEEDUP_ABOVE = 0.2, 1.05
# What torchao calls a recipe, and ours of the same products.
TORCHAO = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise-hp-wgrad"}


def loka(candidates: Iterable[Candidate], *, mere_below: float = MERE_BELOW, speedup_above: float = SPEEDUP_ABOVE) -> Plan:
    """LoKA's Dispatch: per product the fastest recipe whose MERE and speed-up pass. An unknown MERE (NaN) does not pass."""
    choice = {}
    for key, group in grouped(candidates).items():
        base = next(c for c in group if c.recipe == BASE)
        passing = [c for c in group if c.mere < mere_below and base.time_us > speedup_above * c.time_us]
        choice[key] = min([base, *passing], key=lambda c: (c.time_us, c.recipe))
    return chosen(choice, f"LoKA: MERE < {mere_below}, speed-up > {speedup_above}")


def uniform(candidates: Iterable[Candidate], recipe: str, *, keep: Collection[str] = ()) -> Plan:
    """The layer recipe of that name at every site but those of `keep`; a product without that candidate stays in bf16."""
    if recipe not in RECIPES:
        raise ValueError(f"a layer's recipe is one of {sorted(RECIPES)}, got {recipe=}")
    choice = {}
    for (site, which), group in grouped(candidates).items():
        wanted = BASE if site in keep else RECIPES[recipe].of(which).name
        choice[site, which] = next((c for c in group if c.recipe == wanted), next(c for c in group if c.recipe == BASE))
    return chosen(choice, f"{recipe} everywhere" + (f" but {sorted(keep)}" if keep else ""))


def best_single(candidates: Sequence[Candidate], *, keep: Collection[str] = (), budget: float | None = None) -> Plan:
    """The fastest of `uniform` over all recipes, of those within `budget` nats if one is given: bf16 everywhere always is."""
    times = {(c.site, c.which, c.recipe): c for c in candidates}

    def cost(plan: Plan) -> tuple[float, float]:
        of = [times[site, which, plan.recipe(site, which).name] for site, which in grouped(candidates)]
        return sum(c.time_us for c in of), sum(c.price for c in of)

    plans = {name: uniform(candidates, name, keep=keep) for name in RECIPES}
    fitting = [name for name, plan in plans.items() if budget is None or name == BASE or cost(plan)[1] <= budget]
    best = min(fitting, key=lambda name: (cost(plans[name])[0], name != BASE, name))
    return Plan(recipes=plans[best].recipes, made_by=f"best single recipe: {best}")


def oracle(measured: Iterable[Candidate], *, budget: float, min_gain: float = 1.0) -> Allocation:
    """The exact optimum over all sites, passes and recipes for losses that were measured: what no predictor can beat within the budget."""
    found = allocate(measured, budget=budget, min_gain=min_gain)
    plan = Plan(recipes=found.plan.recipes, made_by=f"oracle: measured losses, at most {budget:.3g} nats")
    return Allocation(plan=plan, time_us=found.time_us, base_time_us=found.base_time_us, loss=found.loss, budget=budget)


def torchao_all(model: nn.Module, sites: Iterable[Site], recipe: str = "tensorwise") -> Plan:
    """torchao's convert_to_float8_training without a filter: every `nn.Linear`, head included, whatever its size; nothing else."""
    return _converted(model, sites, recipe, lambda site: True, f"torchao {recipe}, every nn.Linear")


def torchao_filter(model: nn.Module, sites: Iterable[Site], recipe: str = "tensorwise") -> Plan:
    """torchao's automatic filter: every `nn.Linear` that `converts` takes, by the sizes of its site."""
    return _converted(model, sites, recipe, lambda site: converts(site.n, site.k, recipe), f"torchao {recipe}, automatic filter")


def converts(n: int, k: int, recipe: str) -> bool:
    """Whether torchao's automatic filter converts a layer of n outputs and k inputs: sizes alone decide, the batch and the device do not."""
    _of_torchao(recipe)
    if k % 16 or n % 16:
        return False
    if recipe == "tensorwise":
        return not (k <= 4096 and n <= 1024)
    return not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


def _converted(model: nn.Module, sites: Iterable[Site], recipe: str, wanted, made_by: str) -> Plan:
    modules = dict(model.named_modules())
    layer = _of_torchao(recipe)
    recipes = {}
    for site in sites:
        module = modules.get(site.name.split(":")[0])
        if site.op == "linear" and isinstance(module, nn.Linear) and wanted(site):
            recipes[site.name] = {which: layer.of(which).name for which in site.passes if layer.of(which).name != BASE}
    return Plan(recipes=recipes, made_by=made_by)


def _of_torchao(recipe: str):
    if recipe not in TORCHAO:
        raise ValueError(f"torchao's recipe is one of {sorted(TORCHAO)}, got {recipe=}")
    return RECIPES[TORCHAO[recipe]]
