"""Times of a model's own products: every site and pass in bf16 and in FP8 recipes, and the fastest plan that they allow.

    site_times(ctx, model="wukong", size="5.6", mods="nobias+blocknorm+hardswish", batch=6144, recipes={"forward": ["rowwise-fast"], ...}, ...)
    plan, backends = fastest(sites, record["times"])              # or of record["serving"], with passes=("forward",)

Equal shapes are timed once. FP8 times have the quantising of both operands in them, so what a step shares (one quantisation of a gradient for
two products) is not credited. `log_speedup_low` is ln(bf16's time / this one's) less the contest's noise floor: a recipe is taken where it is
above 0, and a plan so found knows nothing of errors: what may be taken is the caller's `recipes` to say. A pause keeps what was timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from kernels.fp8.autograd import Wanted
from kernels.fp8.recipes import PASSES, gemm
from studies.loka.learning.training import mods_named
from studies.loka.measures.contests import conditions, entered, line_of, make_operands, variant_of
from studies.loka.site import BASE, Plan, Site
from studies.loka.sites.registry import trace
from studies.models.recommenders import MODELS, PUBLISHED
from suite.measure import Context, Pause, Result
from suite.timing import contest

__all__ = ["built", "distinct", "fastest", "predicted", "site_times"]

STATE = "site_times.json"
Line = Mapping[str, object]


def built(model: str, size: str, mods: str, batch: int, device: str, seed: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model in bf16, and a batch; the largest input, that of embeddings, needs a gradient."""
    module = MODELS[model](mods_named(mods, PUBLISHED[model]), size, seed=seed, device=device).to(torch.bfloat16)
    example = module.example(batch=batch, seed=seed, device=device, dtype=torch.bfloat16)
    max(example, key=torch.numel).requires_grad_()
    return module, example


def distinct(sites: Sequence[Site]) -> list[tuple[Site, str]]:
    """A site and pass for each product that differs in its sizes, the pass or the way it is stored, in the order of the model."""
    found: dict[tuple, tuple[Site, str]] = {}
    for s in sites:
        for which in s.passes:
            found.setdefault((which, s.batch, s.m, s.n, s.k), (s, which))
    return list(found.values())


def site_times(
    ctx: Context, *, model: str, size: str, mods: str, batch: int, recipes: Mapping[str, Sequence[str]], backends: Sequence[str], rounds: int, launches: int,
    warmup_s: float,
) -> Result:  # fmt: skip
    """Record "times": a line for each product, recipe and backend; "serving": the same of forward products, with weights quantised beforehand.

    Raises Pause with what was timed kept, and goes on from there.
    """
    module, example = built(model, size, mods, batch, ctx.device, ctx.seed)
    sites = trace(module, *example).sites
    del module, example
    state = ctx.state_dir / STATE
    done = json.loads(state.read_text()) if state.exists() else []
    wanted = distinct(sites)
    for site, which in wanted[len(done) :]:
        if ctx.time_is_up():
            raise Pause
        done.append(_timed(ctx, site, which, recipes.get(which, ()), backends, rounds, launches, warmup_s))
        ctx.state_dir.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(done))
    times, serving = ([line for product in done for line in product[name]] for name in ("times", "serving"))
    plan, _ = fastest(sites, times)
    worst = max(product["noise_floor"] for product in done)
    return Result(
        metrics={"products": float(len(done)), "fp8_products": float(len({_shape(x) for x in times if x["recipe"] != BASE and x["log_speedup_low"] > 0})), "noise_floor": worst},
        records={"times": times, "serving": serving, "unsupported": [u for product in done for u in product["unsupported"]], "plan": {s: dict(p) for s, p in plan.recipes.items()}},
    )


def _timed(ctx: Context, site: Site, which: str, recipes: Sequence[str], backends: Sequence[str], rounds: int, launches: int, warmup_s: float) -> dict:
    operands = make_operands(site, which, ctx.device, seed=400 + ctx.seed)
    works = ("whole", "frozen") if site.op == "linear" else ("whole",)
    entries, refused = entered(operands, recipes, backends, (), ctx.device, works=works)
    errors: dict[str, float] = {}
    variants = [variant_of(e, operands, errors, "none", "identity") for e in entries]
    result = contest(variants, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, control="bf16")
    found = conditions(result)
    where = {"batch": site.batch, "m": site.m, "n": site.n, "k": site.k, "which": which}
    lines = [where | line_of(e, result, operands, errors) for e in entries]
    low = lambda x: x["log_speedup"] - (found["noise_floor"] if x["recipe"] != BASE else 0.0)  # noqa: E731
    lines = [x | {"log_speedup_low": low(x)} for x in lines]
    of = lambda work: [x for x in lines if x["work"] in ("bf16", work)]  # noqa: E731
    return found | {"times": of("whole"), "serving": of(works[-1]) if which == "forward" else [], "unsupported": [where | u for u in refused]}


def _shape(line: Line) -> tuple:
    return (line["which"], line["batch"], line["m"], line["n"], line["k"])


def fastest(sites: Sequence[Site], times: Sequence[Line], *, passes: Sequence[str] = PASSES, keep: Sequence[str] = ()) -> tuple[Plan, dict[Wanted | None, str]]:
    """The fastest recipe whose `log_speedup_low` is above 0 for each site and pass of `passes`, heads and `keep` left in bf16; and each product's backend.

    Raises ValueError where a product of a site was not timed.
    """
    recipes: dict[str, dict[str, str]] = {}
    chosen: dict[Wanted | None, str] = {}
    for s in sites:
        for which in [p for p in s.passes if p in passes]:
            lines = [x for x in times if _shape(x) == (which, s.batch, s.m, s.n, s.k)]
            if not lines:
                raise ValueError(f"every product is timed, got no time of the {which} of {s.name}: batch {s.batch}, m {s.m}, n {s.n}, k {s.k}; run site_times for this model, size and batch")
            best = max((x for x in lines if x["recipe"] != BASE), key=lambda x: x["log_speedup"], default=None)
            if best is None or best["log_speedup_low"] <= 0 or s.head or s.name in keep:
                continue
            recipes.setdefault(s.name, {})[which] = best["recipe"]
            chosen[_wanted(s, which, best["recipe"])] = best["backend"]
    return Plan(recipes=recipes, made_by="fastest: measured, above the noise floor"), chosen


def _wanted(site: Site, which: str, recipe: str) -> Wanted:
    size = site.gemm(which)
    return (gemm(recipe).name, size.batch, size.r, size.s, size.c)


def backends_of(sites: Sequence[Site], times: Sequence[Line]) -> dict[Wanted | None, str]:
    """The faster backend of every recipe at every product that was timed: what a single recipe for all sites gets, too."""
    best: dict[Wanted, Line] = {}
    for s in sites:
        for which in s.passes:
            for x in times:
                if x["recipe"] != BASE and _shape(x) == (which, s.batch, s.m, s.n, s.k):
                    key = _wanted(s, which, x["recipe"])
                    best[key] = x if key not in best or x["us"] < best[key]["us"] else best[key]
    return {key: x["backend"] for key, x in best.items()}


def predicted(sites: Sequence[Site], times: Sequence[Line], plan: Plan, step_us: float, passes: Sequence[str] = PASSES) -> dict[str, float]:
    """Amdahl's cap of a plan: products take a share f of a bf16 step of `step_us`, the plan makes them s times as fast, so 1 / ((1 - f) + f / s).

    Products are those of `passes`; what a plan has no time for is counted as bf16.
    """
    base = planned = 0.0
    for s in sites:
        for which in [p for p in s.passes if p in passes]:
            lines = [x for x in times if _shape(x) == (which, s.batch, s.m, s.n, s.k)]
            bf16 = next(x["us"] for x in lines if x["recipe"] == BASE)
            name = plan.recipe(s.name, which).name
            base += bf16
            planned += min((x["us"] for x in lines if x["recipe"] == name), default=bf16)
    share = min(base / step_us, 1.0)
    speed = base / planned if planned else 1.0
    return {"product_share": share, "product_speedup": speed, "amdahl_cap": 1.0 / ((1.0 - share) + share / speed)}
