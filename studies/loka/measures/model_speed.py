"""Whole models on a GPU: a step of the dense part, compiled and captured, in bf16 and in plans, all in one contest.

    dense_step(ctx, model="wukong", size="5.6", mods="nobias+blocknorm+hardswish", batch=6144, training=True,
               variants=["bf16", "single rowwise", "dispatch", "dispatch fused"], rounds=6, launches=4, warmup_s=1.0)

    bf16               the model as it is, parameters and activations in bf16: the baseline has the same Mods and the same compiler
    single RECIPE      one layer recipe (kernels.fp8.recipes.RECIPES) at every site but heads; the fastest of those entered is the best single one
    dispatch           the fastest plan that the times of the input cell "times" allow (studies.loka.measures.site_times)
    planner NAME       that planner's plan of the input cell "planners" (record "plans"; studies.loka.measures.pricing): LoKA's rule, ours, the oracle
    ... fused          the same with norm, activation and quantising in one kernel wherever a site's producers allow it
    ... epilogues      inference only: that, and products that norm, activate and quantise for the product behind them (blockwise forward recipes)
    torchao            torchao's tensorwise training on every nn.Linear whose sizes it takes; recorded as absent where it does not import

Training: logits, binary cross-entropy, gradients of all parameters and of the embedded features; weights are quantised in every step. Otherwise
inference: logits, weights in FP8 beforehand (studies.loka.sites.frozen). With `table_rows` the rest of a training step, which is the same for all arms, is
timed in the same contest (studies.loka.measures.step_rest), and whole steps are compared as sums of the two. Communication is outside.
A step moves far more than the L2 holds, so one set of inputs serves; each variant is one captured graph (studies.loka.measures.replay). Every variant's loss and gradients are compared with bf16's: the bar finds
what is broken, the numbers themselves are in the record. The input "times" also gives each product its faster backend, and Amdahl's cap.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product as combinations

import torch
import torch._dynamo  # not imported by torch itself
import torch.nn.functional as F
from torch import nn

from kernels.fp8.autograd import Wanted
from kernels.fp8.autograd import backends as using
from kernels.fp8.recipes import PASSES, RECIPES
from studies.loka.learning.training import MODS, mods_named
from studies.loka.measures.assembler import one_assembler
from studies.loka.measures.contest_inputs import Sink, snr_db
from studies.loka.measures.contests import conditions
from studies.loka.measures.replay import Replayed, replayed_variant, shared_pool
from studies.loka.measures.site_times import backends_of, built, fastest, predicted
from studies.loka.measures.step_rest import rest_of
from studies.loka.site import Plan
from studies.loka.sites.apply import apply
from studies.loka.sites.epilogues import edges
from studies.loka.sites.frozen import frozen
from studies.loka.sites.fuse import why_not_fused
from studies.loka.sites.registry import Registry, trace
from studies.models.recommenders import PUBLISHED
from studies.models.recommenders.inputs import example_inputs
from studies.models.recommenders.mods import build
from studies.models.recommenders.wukong import WUKONG_SIZES, Layer
from suite.measure import Context, Result
from suite.timing import Variant, contest

__all__ = ["dense_step", "mods_latency", "single"]

# Errors add up over a model's products: what is only inexact stays far above these, what is broken falls below.
LEAST_COSINE = 0.5  # of a variant's gradient and bf16's
LEAST_DB = {True: 0.0, False: 15.0}  # of a variant's logits against bf16's: of FP8, of bf16 compiled
DISPATCH = "dispatch"
EPILOGUES = "epilogues"
REST = "rest"
Step = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is stepped: the model in bf16, its inputs and labels, and what is known of its sites."""

    module: nn.Module
    example: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    registry: Registry
    training: bool
    times: Sequence[Mapping] = ()
    plans: Mapping[str, Mapping] = field(default_factory=dict)  # by planner: {"recipes": ..., "made_by": ...}
    chosen: Mapping[Wanted | None, str] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.training else PASSES[:1]


@one_assembler()
def dense_step(
    ctx: Context, *, model: str, size: str, mods: str, batch: int, training: bool, variants: Sequence[str], rounds: int, launches: int, warmup_s: float,
    table_rows: int = 0,
) -> Result:  # fmt: skip
    """Step times by variant: record "variants", with speed-ups over bf16, errors against it, and the plan of each."""
    torch.compiler.reset()
    subject = subject_of(ctx, model, size, mods, batch, training)
    plans = {v: planned(subject, v) for v in variants if v not in ("bf16", "torchao")}
    refused = {"torchao": why} if "torchao" in variants and (why := torchao_absent()) else {}
    entered = ["bf16", *(v for v in variants if v != "bf16" and v not in refused)]
    steps = {v: step_of(subject, v, plans.get(v)) for v in entered}
    want = [t.clone() for t in run_step(subject, subject.module)]  # not compiled
    errors: dict[str, dict] = {}
    touched = sum(t.nbytes for t in (*subject.module.parameters(), *subject.example))
    pool = shared_pool(ctx.device)
    with torch._dynamo.config.patch(recompile_limit=len(entered) + 8):  # arms share code, which torch else runs uncompiled from the ninth on
        made = [replayed_variant(v, Replayed(steps[v], ctx.device, pool), checker(v, want, errors), touched=touched) for v in entered]
    if table_rows:
        made.append(rest_variant(subject, table_rows, ctx, pool))
    result = contest(made, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, mode="eager", control="bf16")
    lines = [{"variant": v, "us": result.median_s(v) * 1e6, "log_speedup": result.log_ratio("bf16", v), "low": result.log_ratio("bf16", v) - result.noise_floor, **errors[v],
              "fp8_products": sum(map(len, plans[v].recipes.values())) if v in plans else 0, "fused_sites": len(plans[v].fused) if v in plans else 0, "joined_sites": len(edges(subject.registry, plans[v])) if v.endswith(EPILOGUES) else 0} for v in entered]  # fmt: skip
    cap = predicted(subject.registry.sites, subject.times, plans[DISPATCH], result.median_s("bf16") * 1e6, subject.passes) if subject.times and DISPATCH in plans else {}
    return Result(
        metrics=summary(result, entered) | cap | conditions(result), arrays=result.to_arrays(),
        records={"variants": lines, "unsupported": [{"variant": v, "why": why} for v, why in refused.items()], "conditions": result.conditions, "telemetry": result.telemetry,
                 "plans": {v: {"recipes": {s: dict(r) for s, r in p.recipes.items()}, "fused": list(p.fused), "made_by": p.made_by} for v, p in plans.items()}},
        facts={"throttle": ",".join(result.throttle_reasons) or "none", "sites": str(len(subject.registry.sites)), "hidden": str(len(subject.registry.unsupported))},
    )  # fmt: skip


def summary(result, entered: Sequence[str]) -> dict[str, float]:
    """Of this process: ln(time of bf16 / time of the fastest single recipe, of the plan, of the plan or single with fusion, of torchao)."""
    kinds = {"single": [v for v in entered if v.startswith("single")], DISPATCH: [v for v in entered if v.startswith(DISPATCH)], "torchao": [v for v in entered if v == "torchao"]}
    out = {"step_us": result.median_s("bf16") * 1e6}
    rest_s = result.median_s(REST) if REST in result.names else None
    fast = {kind: max((v for v in names), key=lambda v: result.log_ratio("bf16", v)) for kind, names in kinds.items() if names}
    out |= {f"log_speedup_{kind}": result.log_ratio("bf16", v) for kind, v in fast.items()}
    if rest_s is not None:
        out |= {"rest_us": rest_s * 1e6} | {f"log_speedup_step_{k}": math.log((result.median_s("bf16") + rest_s) / (result.median_s(v) + rest_s)) for k, v in fast.items()}
    if DISPATCH in fast and "single" in fast:
        out["log_dispatch_over_single"] = result.log_ratio(fast["single"], fast[DISPATCH])
    return out


# ---- what is stepped -----------------------------------------------------------------------------------------------------------


def subject_of(ctx: Context, model: str, size: str, mods: str, batch: int, training: bool) -> Subject:
    module, example = built(model, size, mods, batch, ctx.device, ctx.seed)
    labels = (torch.arange(batch, device=ctx.device) % 4 == 0).float()
    subject = Subject(module=module, example=example, labels=labels, registry=trace(module, *example), training=training)
    if "times" in ctx.inputs:
        times = ctx.input_record("times", "times" if training else "serving")
        subject = replace(subject, times=times, chosen=backends_of(subject.registry.sites, times))
    if "planners" in ctx.inputs:
        subject = replace(subject, plans=ctx.input_record("planners", "plans"))
    return subject


def single(registry: Registry, recipe: str, passes: Sequence[str] = PASSES) -> Plan:
    """One layer recipe at every site but heads. Raises ValueError for a recipe that RECIPES does not hold."""
    if recipe not in RECIPES:
        raise ValueError(f"a layer's recipe is one of {sorted(RECIPES)}, got {recipe!r}")
    sites = {s.name: {w: RECIPES[recipe].of(w).name for w in s.passes if w in passes} for s in registry.sites if not s.head}
    return Plan(recipes=sites, made_by=f"single {recipe}")


def planned(subject: Subject, name: str) -> Plan:
    """The plan of a variant's name. Raises ValueError for a name that is none, and for "dispatch" without the inputs it needs."""
    words = name.split()
    if words[-1] == EPILOGUES and subject.training:
        raise ValueError(f"an epilogue keeps nothing for a backward pass, got {name!r} for training; ask for 'fused'")
    fused = words[-1] in ("fused", EPILOGUES)
    if words[0] == "single" and len(words) == 2 + fused:
        plan = single(subject.registry, words[1], subject.passes)
    elif words[0] == DISPATCH and len(words) == 1 + fused:
        if not subject.times:
            raise ValueError("a dispatched plan needs the input cell 'times', got none; give the cell one of site_times for this model, size and batch")
        plan = fastest(subject.registry.sites, subject.times, passes=subject.passes)[0]
    elif words[0] == "planner" and len(words) == 2 + fused:
        if words[1] not in subject.plans:
            raise ValueError(f"a planner's plan is one of the input cell 'planners', which has {sorted(subject.plans)}, got {words[1]!r}")
        plan = Plan(recipes=subject.plans[words[1]]["recipes"], made_by=subject.plans[words[1]]["made_by"])
    else:
        raise ValueError(f"a variant is 'bf16', 'torchao', 'single RECIPE', 'planner NAME' or 'dispatch', the last three also with ' fused' or ' epilogues', got {name!r}")
    if not subject.training:
        plan = replace(plan, recipes={s: {w: r for w, r in p.items() if w == "forward"} for s, p in plan.recipes.items() if "forward" in p}, fused=tuple(f for f in plan.fused if "forward" in plan.recipes[f]))
    able = [s for s in plan.recipes if not why_not_fused(subject.registry, s, plan.recipe(s, "forward"))] if fused else []
    return replace(plan, fused=tuple(able)) if fused else plan


def torchao_absent() -> str:
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed here"


def converted(module: nn.Module) -> nn.Module:
    """torchao's default float8 training on a copy of the model: every nn.Linear whose sizes 16 divides, heads included."""
    float8 = importlib.import_module("torchao.float8")
    takes = lambda m, path: not isinstance(m, nn.Linear) or (m.in_features % 16 == 0 and m.out_features % 16 == 0)  # noqa: E731
    return float8.convert_to_float8_training(copy.deepcopy(module), module_filter_fn=takes)


def run_step(subject: Subject, module: Callable) -> list[torch.Tensor]:
    """[logits] of inference, or [logits, loss, gradients]; parameters in the order of the model, then the largest input."""
    if not subject.training:
        with torch.no_grad():
            return [module(*subject.example)]
    logits_B = module(*subject.example)
    loss = F.binary_cross_entropy_with_logits(logits_B.float(), subject.labels)
    owner = getattr(module, "_orig_mod", module)
    wanted = [*owner.parameters(), *(x for x in subject.example if x.requires_grad)]
    return [logits_B.detach(), loss.detach(), *torch.autograd.grad(loss, wanted)]


def step_of(subject: Subject, name: str, plan: Plan | None) -> Step:
    if name == "torchao":
        module = converted(subject.module)
    elif plan is None:
        module = subject.module
    elif subject.training:
        module = apply(subject.module, plan, *subject.example)
    else:
        module = frozen(subject.module, plan, *subject.example, epilogues=name.endswith(EPILOGUES))
    compiled = torch.compile(module, dynamic=False)

    def step() -> list[torch.Tensor]:
        with using(subject.chosen):
            return run_step(subject, compiled)

    return step


def checker(name: str, want: Sequence[torch.Tensor], errors: dict[str, dict]) -> Callable[[Sequence[torch.Tensor]], None]:
    """`want`: what the model gives in bf16, not compiled."""
    least_db = LEAST_DB[name != "bf16"]

    def check(y: Sequence[torch.Tensor]) -> None:
        db = snr_db(y[0], want[0].double())
        assert db >= least_db, f"{name}'s logits are {db:.1f} dB from bf16's, at least {least_db} are asked for"
        errors[name] = {"logits_db": db}
        if len(y) > 1:
            cosine = gradient_cosine(y[2:], want[2:])
            assert cosine >= LEAST_COSINE, f"{name}'s gradient has a cosine of {cosine:.3f} with bf16's, at least {LEAST_COSINE} is asked for"
            errors[name] |= {"gradient_cosine": cosine, "relative_loss": float(y[1] / want[1]) - 1.0}

    return check


def rest_variant(subject: Subject, table_rows: int, ctx: Context, pool: tuple[int, int] | None) -> Variant:
    rest = rest_of(subject.module, subject.example, table_rows=table_rows, seed=ctx.seed)
    want = rest().clone()

    def check(y: Sequence[torch.Tensor]) -> None:
        assert torch.equal(y[0], want), "rows that were looked up are not the tables'"

    touched = sum(8 * p.numel() for p in subject.module.parameters())
    return replayed_variant(REST, Replayed(lambda: [rest()], ctx.device, pool), check, touched=touched)


def gradient_cosine(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Of two lists of tensors as one vector each."""
    dot = lambda u, v: math.fsum(float((x.float().flatten() @ y.float().flatten()).double()) for x, y in zip(u, v, strict=True))  # noqa: E731
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


# ---- Mods ----------------------------------------------------------------------------------------------------------------------


@one_assembler()
def mods_latency(ctx: Context, *, size: str, batch: int, training: bool, rounds: int, launches: int, warmup_s: float) -> Result:
    """One inner layer of Wukong in bf16, compiled, with each of the 2^3 combinations of LoKA's Mods: record "mods", a line for each."""
    torch.compiler.reset()
    config = WUKONG_SIZES[size]
    n = config.inputs[1]
    _, x_BND = example_inputs(batch=batch, dense=1, fields=n, dim=config.dim, seed=ctx.seed, device=ctx.device, dtype=torch.bfloat16)
    x_BND.requires_grad_(training)
    names = ["+".join(m for m, on in zip(MODS, chosen, strict=True) if on) for chosen in combinations((False, True), repeat=len(MODS))]
    errors: dict[str, dict] = {}
    variants = []
    for name in names:
        layer = build(partial(Layer, n, config, mods_named(name, PUBLISHED["wukong"])), seed=ctx.seed, device=ctx.device).to(torch.bfloat16)
        want = run_layer(layer, layer, x_BND, training)
        step = partial(run_layer, layer, torch.compile(layer, dynamic=False), x_BND, training)
        variants.append(variant_of_layer(name or "none", step, want, errors, sum(t.nbytes for t in layer.parameters()) + 2 * x_BND.nbytes))
    with torch._dynamo.config.patch(recompile_limit=2 * len(names)):
        result = contest(variants, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, control="none")
    lines = [{"mods": name, "us": result.median_s(name or "none") * 1e6, "log_speedup": result.log_ratio("none", name or "none"), **errors[name or "none"]} for name in names]
    return Result(metrics={"layer_us": result.median_s("none") * 1e6, "log_speedup_mods": lines[-1]["log_speedup"]} | conditions(result), arrays=result.to_arrays(),
                  records={"mods": lines, "conditions": result.conditions, "telemetry": result.telemetry}, facts={"throttle": ",".join(result.throttle_reasons) or "none"})  # fmt: skip


def run_layer(layer: nn.Module, call: Callable, x_BND: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """[outputs], and gradients of their mean square when training."""
    if not training:
        with torch.no_grad():
            return [call(x_BND)]
    y_BND = call(x_BND)
    return [y_BND.detach(), *torch.autograd.grad(y_BND.float().square().mean(), [*layer.parameters(), x_BND])]


def variant_of_layer(name: str, step: Step, want: Sequence[torch.Tensor], errors: dict[str, dict], touched: int) -> Variant:
    sink = Sink(1, lambda _: step())

    def check() -> None:
        for y in sink.written():
            db = snr_db(y[0], want[0].double())
            assert db >= LEAST_DB[False], f"a compiled layer with {name} is {db:.1f} dB from itself uncompiled, at least {LEAST_DB[False]} are asked for"
            errors[name] = {"output_db": db}

    return Variant(name=name, calls=sink.calls, check=check, poison=sink.poison, bytes_moved=touched)
