"""Measure functions of pricing: a model trained on planted truth, predicted against measured losses of single products, all planners side by side.

    trained(ctx, training={"steps": 400, "batch": 1024}, data={"largest": 50})       # leaves the parameters
    flips(ctx, training=..., data=..., recipes=["rowwise-fast"], rows=32768, calibration=4096, chunk=4096)          # input "trained"
    gradients(ctx, training=..., data=..., products={"wgrad": ["rowwise-p2"]}, batches=4, batch=1024, rate=1e-3)    # input "trained"
    planners(ctx, training=..., data=..., rows=32768, chunk=4096, budget=2e-4, examples=8192, width=32)  # and "flips", "gradients"

Training is on known probabilities in the place of labels: the mean over infinitely many labels, which brings a small model near the optimum that
prices assume (first-order changes vanish there) in few steps. Losses are expectations under the generator's known p, on the same rows for all.
On a CPU products are emulated, on a GPU they are the real kernels; times of `planners` are simulated (studies.loka.pricing.roofline).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from kernels.fp8.recipes import gemm
from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted
from studies.loka.learning.training import Learner, Training, train
from studies.loka.pricing.allocate import Candidate, allocate, greedy
from studies.loka.pricing.flip import flips as flipped_logits
from studies.loka.pricing.flip import measured_change
from studies.loka.pricing.gradient_price import adam_preconditioner, gradient_errors
from studies.loka.pricing.metrics import losses, relative_change
from studies.loka.pricing.price import HOW, Tap, Taps, backward_product, noise_to_signal, price, relative_errors, tap
from studies.loka.pricing.roofline import time_us
from studies.loka.pricing.rules import best_single, loka, oracle, torchao_all, torchao_filter
from studies.loka.site import BASE, Plan, Site
from studies.loka.sites.apply import apply
from studies.loka.sites.registry import Registry, trace
from suite.measure import Context, Result, weakest
from suite.stats import Interval

__all__ = ["calibration_of", "flips", "gradients", "planners", "restored", "summary", "trained"]

Clock = Callable[..., float | None]
FEWEST = 4  # points that have a rank correlation


def trained(ctx: Context, *, training: dict, data: dict) -> Result:
    """Metrics log_loss and bayes_log_loss, in nats, over 16,384 fresh rows. Arrays: parameters, Adam's second moments as its weights."""
    learner, planted = Learner(Training(**training), seed=ctx.seed, device=ctx.device), Planted(seed=ctx.seed, **data)
    train(learner, lambda i: _soft(planted.batch(i, learner.config.batch)), ctx)
    rows = [planted.batch(i, 4096, part="test").to(ctx.device) for i in range(4)]
    with torch.no_grad():
        loss = torch.cat([losses(learner.logits(b), b.p) for b in rows]).mean()
    bayes, _ = planted.bayes_log_loss(16384)
    weights = adam_preconditioner(learner.adam)
    arrays = {f"model.{n}": p for n, p in learner.model.named_parameters()} | {f"adam.{n}": weights[p] for n, p in learner.model.named_parameters()}
    return Result(metrics={"log_loss": float(loss), "bayes_log_loss": bayes}, kind=_kind(ctx),
                  arrays={n: a.detach().cpu().numpy() for n, a in arrays.items()} | {"table": learner.tables.table.detach().cpu().numpy()})  # fmt: skip


def flips(ctx: Context, *, training: dict, data: dict, recipes: list[str], rows: int, calibration: int, chunk: int) -> Result:
    """Each site in each recipe, forward: predicted, measured, and what noise alone would say.

    Metrics (`summary`) and the record "points": one a flip, with its predicted changes of log-loss in all ways of studies.loka.pricing.price, the measured one and
    its error, and beside them the change that would have been measured if the model's own probabilities were the truth (measured_if_calibrated): what
    lies between the two is the first order, which no price of noise foretells.
    """
    learner, planted = restored(ctx, training, data)
    registry, taps = calibration_of(learner, planted.batch(0, calibration, part="calibration").to(ctx.device))
    points = []
    for site in registry.sites:
        for name in recipes:
            at, recipe = taps.sites[site.name], gemm(name)
            points.append({
                "site": site.name, "recipe": name, "head": site.head, "noise_to_signal": noise_to_signal(at, recipe), **_mere(at, name),
                **{how: price(at, recipe, taps.logits, how).loss for how in HOW},
            })  # fmt: skip
    base, changes = measured(learner, registry, planted, {s.name: recipes for s in registry.sites}, rows, chunk)
    for point in points:
        truly, own = (measured_change(change, torch.zeros(rows, dtype=torch.float64)) for change in changes[point["site"], point["recipe"]])
        point |= {"measured": truly.value, "standard_error": truly.error, "excluded": truly.excluded, "measured_if_calibrated": own.value}
    return Result(metrics={**summary(points), "log_loss": float(base.mean())}, records={"points": points}, kind=_kind(ctx))


def summary(points: Sequence[dict]) -> dict[str, float]:
    """Of the points whose measured change is clear of its noise: Spearman's rank correlation of predicted with measured, pooled and the lowest within a
    recipe, that of noise over signal, and the log-log slope.

    points, excluded, negative: clear ones, those left out, clear ones below zero, which have no logarithm.
    """
    clear = [p for p in points if not p["excluded"]]
    counts = {"points": float(len(clear)), "excluded": float(len(points) - len(clear)), "negative": float(sum(p["measured"] < 0 for p in clear))}
    if len(clear) < FEWEST:
        return counts
    groups = [[p for p in clear if p["recipe"] == r] for r in sorted({p["recipe"] for p in clear})]
    return counts | {
        "rank_correlation": _rank(clear, "error"), "rank_within": min((_rank(g, "error") for g in groups if len(g) >= FEWEST), default=0.0),
        "rank_noise": _rank(clear, "noise_to_signal"), "slope": _slope(clear),
    }  # fmt: skip


def gradients(ctx: Context, *, training: dict, data: dict, products: dict, batches: int, batch: int, rate: float) -> Result:
    """Every site's dgrad and wgrad in the recipes of `products` (pass -> names): error, bias and price in nats at `rate`.

    Metrics: gradient_error and gradient_bias, the largest |.| of them. Record "errors": one a product.
    """
    learner, planted = restored(ctx, training, data)
    parts = [_inputs(learner, _soft(planted.batch(i, batch, part="calibration").to(ctx.device))) for i in range(batches)]
    registry = trace(learner.model, *parts[0][:2])
    asked = [(s.name, which, name) for s in registry.sites for which, names in products.items() if which in s.passes for name in names]
    stored = ctx.input_arrays("trained")
    weights = {p: torch.from_numpy(stored[f"adam.{n}"]).to(ctx.device) for n, p in registry.root.named_parameters()}
    errors = gradient_errors(registry, lambda z, b: F.binary_cross_entropy_with_logits(z, b[2]), parts, asked, weights)
    taps = tap(registry, parts[0][:2])
    dlogits_B = (torch.sigmoid(taps.logits) - parts[0][2]) / batch
    return Result(
        metrics={"gradient_error": max(e.relative for e in errors), "gradient_bias": max(abs(e.bias) for e in errors)}, kind=_kind(ctx),
        records={"errors": [{**asdict(e), "price": e.price(rate), **_mere(backward_product(taps.sites[e.site], dlogits_B, e.which), e.recipe)} for e in errors]},
    )  # fmt: skip


def planners(ctx: Context, *, training: dict, data: dict, rows: int, chunk: int, budget: float, examples: int, width: int = 1) -> Result:
    """Every planner's plan for a training step of `examples`, from the same candidates: time, predicted and measured change of log-loss.

    Times are those of the input cell "times" (studies.loka.measures.site_times of this model, size and batch) where it is given, else simulated, for sites `width`
    times as wide as the model's, so that a small model stands for a large one of its shape. The measured change is that of the forward products,
    relative to the log-loss, on `rows` paired rows; gradients' prices are predicted only. Records: "planners", one a planner; "plans", by planner.
    Metrics, of ours: plan_speedup over bf16, plan_over_single over the best single recipe within the budget, plan_products in FP8, plan_loss_change
    with its 95% upper bound.
    """
    learner, planted = restored(ctx, training, data)
    registry = trace(learner.model, *_inputs(learner, planted.batch(0, 64).to(ctx.device))[:2])
    clock, kind = _clock(ctx)
    sites = [_widened(s, examples / 64, width) for s in registry.sites]
    points, errors = ctx.input_record("flips", "points"), ctx.input_record("gradients", "errors")
    batches = list(_test_part(planted, rows, chunk))
    base = _losses(learner, learner.model, batches)
    plans = _plans(learner, sites, points, errors, clock, budget * float(base.mean()))
    prices = {(p["site"], "forward", p["recipe"]): p["error"] for p in points} | {(e["site"], e["which"], e["recipe"]): e["price"] for e in errors}
    found, seen = [], {}
    for name, plan in plans.items():
        forward = {s: {"forward": r["forward"]} for s, r in plan.recipes.items() if "forward" in r}
        if str(forward) not in seen:
            model = apply(learner.model, Plan(recipes=forward), *_inputs(learner, batches[0].to(ctx.device))[:2])
            seen[str(forward)] = relative_change(_losses(learner, model, batches), base) if forward else None
        found.append(_line(name, plan, sites, clock, prices, float(base.mean()), seen[str(forward)]) | {"time_kind": kind})
    of = {f["planner"]: f for f in found}
    ours = of["ours"]
    return Result(
        metrics={"plan_speedup": ours["speedup"], "plan_over_single": ours["speedup"] / of["best-single-in-budget"]["speedup"], "plan_products": float(ours["products"]),
                 "plan_loss_change": ours["measured"], "plan_loss_high": ours["high"]},
        records={"planners": found, "plans": {name: {"recipes": plan.recipes, "made_by": plan.made_by} for name, plan in plans.items()}},
        kind=weakest([kind, _kind(ctx)]),
    )  # fmt: skip


def _clock(ctx: Context) -> tuple[Clock, str]:
    """(us(site, pass, recipe, sure), the kind of those times); None for what was not timed, and with `sure` for what is not clearly faster than bf16."""
    if "times" not in ctx.inputs:
        return lambda site, which, recipe, sure=False: time_us(site.gemm(which), gemm(recipe)), "simulated"
    of: dict[tuple, list[dict]] = {}
    for line in ctx.input_record("times", "times"):
        of.setdefault((line["which"], line["batch"], line["m"], line["n"], line["k"], line["recipe"]), []).append(line)

    def measured_us(site: Site, which: str, recipe: str, sure: bool = False) -> float | None:
        lines = of.get((which, site.batch, site.m, site.n, site.k, recipe), [])
        if recipe == BASE and not lines:
            raise ValueError(f"every product has a time in {BASE}, got none of the {which} of {site}; run site_times for this model, size and batch")
        return min((x["us"] for x in lines if recipe == BASE or not sure or x["log_speedup_low"] > 0), default=None)

    return measured_us, "measured"


def _plans(learner: Learner, sites: Sequence[Site], points: Sequence[dict], errors: Sequence[dict], clock: Clock, budget: float) -> dict[str, Plan]:
    candidates = _candidates(sites, points, errors, clock, "error", "mere")
    return {
        "bf16": Plan(made_by="bf16"),
        "torchao": torchao_all(learner.model, sites, "tensorwise"),
        "torchao-filter": torchao_filter(learner.model, sites, "tensorwise"),
        "best-single": best_single(candidates),
        "best-single-in-budget": best_single(candidates, budget=budget),
        "loka": loka(candidates),
        "loka-sums": loka(_candidates(sites, points, errors, clock, "error", "mere_of_sums")),
        "greedy": greedy(candidates, budget=budget).plan,
        "ours": allocate(candidates, budget=budget).plan,
        "oracle": oracle(_candidates(sites, points, errors, clock, "measured", "mere"), budget=budget).plan,
    }


def _candidates(sites: Sequence[Site], points: Sequence[dict], errors: Sequence[dict], clock: Clock, loss: str, mere: str) -> list[Candidate]:
    """bf16 for each product of a step, and what was priced and is surely timed: forward products by `loss`, the others by their price."""
    of = {s.name: s for s in sites}
    asked = [(of[p["site"]], "forward", p["recipe"], p[loss], p[mere]) for p in points] + [(of[e["site"]], e["which"], e["recipe"], e["price"], e[mere]) for e in errors]
    found = [Candidate(site=s.name, which=which, recipe=BASE, time_us=clock(s, which, BASE), loss=0.0, mere=0.0) for s in sites for which in s.passes]
    for site, which, recipe, cost, error in asked:
        if which in site.passes and (us := clock(site, which, recipe, sure=True)) is not None:
            found.append(Candidate(site=site.name, which=which, recipe=recipe, time_us=us, loss=cost, mere=math.inf if error is None else error))
    return found


def _line(name: str, plan: Plan, sites: Sequence[Site], clock: Clock, prices: dict, log_loss: float, change: Interval | None) -> dict:
    """What the table says of one planner; a time or price is None where one of its products was not timed or priced. Losses are relative."""
    asked = [(s, which, recipe) for s, passes in plan.recipes.items() for which, recipe in passes.items()]
    times = [clock(s, which, plan.recipe(s.name, which).name) for s in sites for which in s.passes]
    base_us = sum(clock(s, which, BASE) for s in sites for which in s.passes)
    step_us = None if None in times else sum(times)
    known = all(a in prices for a in asked)
    return {
        "planner": name, "made_by": plan.made_by, "products": len(asked), "heads": sum(s.head and "forward" in plan.recipes.get(s.name, {}) for s in sites),
        "step_us": step_us, "speedup": base_us / step_us if step_us else None,
        "predicted": sum(max(prices[a], 0.0) for a in asked) / log_loss if known else None,
        "predicted_forward": sum(max(prices[a], 0.0) for a in asked if a[1] == "forward") / log_loss if known else None,
        **({"measured": change.value, "low": change.low, "high": change.high} if change else {"measured": 0.0, "low": 0.0, "high": 0.0}),
    }  # fmt: skip


def _widened(site: Site, examples: float, width: int) -> Site:
    """The site for so many times the examples, with inner sizes times `width`; a size of 1 stays."""
    n, k = (size * width if size > 1 else size for size in (site.n, site.k))
    if site.op == "linear":
        return replace(site, m=round(site.m * examples), n=n, k=k)
    return replace(site, batch=round(site.batch * examples), m=site.m * width, n=n, k=k)


@torch.no_grad()
def _losses(learner: Learner, model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    moved = (b.to(learner.device) for b in batches)
    return torch.cat([losses(model(*_inputs(learner, b)[:2]), b.p).cpu() for b in moved])


def _mere(product: Tap, recipe: str) -> dict:
    """Both readings of LoKA's error; JSON has no infinity."""
    mean_of_ratios, ratio_of_sums = relative_errors(product, gemm(recipe))
    return {"mere": mean_of_ratios if math.isfinite(mean_of_ratios) else None, "mere_of_sums": ratio_of_sums}


# ---- shared by the cells -------------------------------------------------------------------------------------------------------------


def restored(ctx: Context, training: dict, data: dict) -> tuple[Learner, Planted]:
    """The model of the input cell "trained". Raises ValueError where its parameters are those of another model."""
    learner, stored = Learner(Training(**training), seed=ctx.seed, device=ctx.device), ctx.input_arrays("trained")
    names = dict(learner.model.named_parameters())
    if {f"model.{n}" for n in names} != {n for n in stored if n.startswith("model.")}:
        raise ValueError(f"pricing asks for the model that was trained, got {training=}; give both cells the same")
    with torch.no_grad():
        for name, p in names.items():
            p.copy_(torch.from_numpy(stored[f"model.{name}"]))
        learner.tables.table.copy_(torch.from_numpy(stored["table"]))
    return learner, Planted(seed=ctx.seed, **data)


def calibration_of(learner: Learner, batch: Batch) -> tuple[Registry, Taps]:
    """(registry, taps) on one batch of the calibration part, which no measured loss reads."""
    inputs = _inputs(learner, batch)[:2]
    registry = trace(learner.model, *inputs)
    return registry, tap(registry, inputs)


def measured(learner: Learner, registry: Registry, planted: Planted, recipes: dict, rows: int, chunk: int) -> tuple[torch.Tensor, dict]:
    """(losses of the model as it is [rows], (site, recipe) -> changes of each row's loss, by the known p and by the model's own), first `rows` of the test part."""
    base, changes = [], {}
    for batch in _test_part(planted, rows, chunk):
        batch = batch.to(learner.device)
        for site, recipe, logits in flipped_logits(registry, _inputs(learner, batch)[:2], recipes):
            if not site:
                truths = batch.p, torch.sigmoid(logits.double())
                plain = [losses(logits, p) for p in truths]
                base.append(plain[0].cpu())
                continue
            for k in (0, 1):
                changes.setdefault((site, recipe), ([], []))[k].append((losses(logits, truths[k]) - plain[k]).cpu())
    return torch.cat(base), {key: tuple(map(torch.cat, parts)) for key, parts in changes.items()}


def _test_part(planted: Planted, rows: int, chunk: int) -> Iterator[Batch]:
    for i in range(-(-rows // chunk)):
        yield planted.batch(i, chunk, part="test")[: rows - i * chunk]


def _inputs(learner: Learner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The dense part's inputs, and the target."""
    dense = F.pad(batch.dense, (0, learner.dense - batch.dense.shape[1]))
    with torch.no_grad():
        return dense, learner.tables(learner.columns(batch.ids)), batch.y


def _soft(batch: Batch) -> Batch:
    return replace(batch, y=batch.p.float())


def _rank(points: Sequence[dict], predicted: str) -> float:
    """Spearman's; 0 where one side is constant, for then it ranks nothing."""
    from scipy.stats import spearmanr

    a, b = [p[predicted] for p in points], [p["measured"] for p in points]
    return float(spearmanr(a, b).statistic) if len(set(a)) > 1 < len(set(b)) else 0.0


def _slope(points: Sequence[dict]) -> float:
    """Of log measured on log predicted, least squares; 0 where there is none."""
    above = [p for p in points if p["measured"] > 0]
    x, y = (np.log([p[k] for p in above]) for k in ("error", "measured"))
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else 0.0


def _kind(ctx: Context) -> str:
    return "emulated" if ctx.device == "cpu" else "measured"
