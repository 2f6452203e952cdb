"""Quality: what an arithmetic costs in log-loss when a model is trained and evaluated in it. One cell is one run of one arm and one seed.

    quality(ctx, arm="naive", model="wukong", size="small", mods="", data="planted", steps=100, batch=512, test_rows=65536)

Arms, by the plan that they run (head included where not said):

    bf16             every product in bfloat16: the baseline
    bf16-perturbed   the same, initial values perturbed by 2^-20: the pilot, what chaos does to a pair
    naive            tensorwise FP8 at every site and pass
    planted-bad      E5M2 in the forward pass of every site: a test that passes it is no test
    others           the plan of that name ("loka", "ours") in the record "plans" of the input cell "planners"

Runs of one seed have the same initial values, the same examples in the same order, and all runs share one teacher and one set of test rows. The
loss of planted data is the expectation under its known probabilities, without the labels' noise; that of real data is over labels. Pairs are
formed and judged elsewhere (tost.neutrality). Master weights, activations between products and optimizers are float32 in every arm.
On a CPU the products are emulated; on a GPU they are the real kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from kernels.fp8.recipes import RECIPES
from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted
from studies.loka.data.real import movielens_1m, movielens_100k
from studies.loka.data.table import Table
from studies.loka.learning.training import AHEAD, Learner, Training, in_order, perturb, train
from studies.loka.pricing.metrics import auc, losses, normalised_entropy
from studies.loka.site import BASE, Plan, Site
from studies.loka.sites.apply import apply
from studies.loka.sites.registry import trace
from suite.measure import Context, Result

__all__ = ["UNIFORM", "Source", "arm_plan", "evaluate", "planted_source", "quality", "source_named", "table_source", "uniform_plan"]

UNIFORM = {"bf16": "bf16", "bf16-perturbed": "bf16", "naive": "tensorwise", "planted-bad": "planted-bad"}  # arm -> the layer recipe of every site
PERTURBED = "bf16-perturbed"
TEST_BATCH = 4096
RATES = {"small": (2e-3, 0.2)}  # size -> Adam's rate and the tables'
LARGE_RATES = (1e-4, 0.01)  # Adam moves every weight alike, and a product adds those steps up over thousands of inputs; so do 760 tables
TEACHER = 1000  # the seed of the planted teacher, one for all runs


@dataclass(frozen=True, kw_only=True)
class Source:
    """Batches by index: `train` without end, `test` for `test_batches` of them."""

    train: Callable[[int], Batch]
    test: Callable[[int], Batch]
    test_batches: int


def quality(
    ctx: Context, *, arm: str, model: str, size: str, mods: str, data: str, steps: int, batch: int, test_rows: int, table_rows: int = 1000,
    dense_rate: float | None = None, table_rate: float | None = None,
) -> Result:  # fmt: skip
    """Metrics: log_loss (nats, lower is better), normalised_entropy, auc, bayes_log_loss (what no model can beat on these rows, where it is known),
    and diverged, 1 where logits are not finite. Array train_loss: one a step. Record plan. Rates not given are the size's in RATES.

    Raises ValueError for an arm, a model, a size, Mods or data of another name, and for sizes that make no sense.
    """
    dense, table = RATES.get(size, LARGE_RATES)
    config = Training(model=model, size=size, mods=mods, steps=steps, batch=batch, table_rows=table_rows,
                      dense_rate=dense if dense_rate is None else dense_rate, table_rate=table if table_rate is None else table_rate)  # fmt: skip
    source = source_named(data, batch=batch, first=ctx.seed * steps, test_rows=test_rows)
    learner = Learner(config, seed=ctx.seed, device=ctx.device)
    if arm == PERTURBED:
        perturb(learner.model, seed=ctx.seed + 1)
    plans: list[Plan] = []

    def planned(dense_part: nn.Module, example: tuple) -> nn.Module:
        sites = trace(dense_part, *example).sites
        plans.append(arm_plan(arm, sites, ctx))
        return apply(dense_part, plans[0], *example)

    learner.transform(planned)
    train(learner, source.train, ctx)
    curve = torch.stack(learner.losses).double().cpu().numpy()
    return Result(metrics=evaluate(learner, source), arrays={"train_loss": curve}, kind="emulated" if ctx.device == "cpu" else "measured",
                  records={"plan": {"made_by": plans[0].made_by, "recipes": {s: dict(r) for s, r in plans[0].recipes.items()}}})  # fmt: skip


# ---- arms ------------------------------------------------------------------------------------------------------------------------


def arm_plan(arm: str, sites: tuple[Site, ...], ctx: Context) -> Plan:
    """The arm's plan with every site and pass named: what a planner left out runs in bf16, not in the model's float32."""
    if arm in UNIFORM:
        return uniform_plan(UNIFORM[arm], sites)
    if "planners" not in ctx.inputs:
        raise ValueError(f"an arm is one of {list(UNIFORM)}, or has its plan in the input cell 'planners', got {arm=} without that input")
    plans = ctx.input_record("planners", "plans")
    if arm not in plans:
        raise ValueError(f"an arm is one of {list(UNIFORM)} or of the planners' {sorted(plans)}, got {arm=}")
    known = {s.name for s in sites}
    if strangers := sorted(set(plans[arm]["recipes"]) - known):
        raise ValueError(f"a plan names sites of the model that is trained, got {strangers} in {arm!r}; plan for this model and size")
    plan = Plan(recipes=plans[arm]["recipes"], made_by=plans[arm].get("made_by", arm))
    return replace(plan, recipes={s.name: {which: plan.recipe(s.name, which).name for which in s.passes} for s in sites})


def uniform_plan(recipe: str, sites: tuple[Site, ...]) -> Plan:
    """One layer recipe at every site and pass, head included."""
    layer = RECIPES[recipe]
    return Plan(recipes={s.name: {which: layer.of(which).name for which in s.passes} for s in sites}, made_by=f"{recipe} everywhere" if recipe != BASE else BASE)


# ---- data ------------------------------------------------------------------------------------------------------------------------


def source_named(data: str, *, batch: int, first: int, test_rows: int) -> Source:
    """`first`: the index of the run's first batch; runs with `first` a run's steps apart share no planted example.

    "planted" has a base rate of 0.26, "planted-rare" one of 0.037, as Criteo's two sets have; "ml-1m" and "ml-100k" are read, and end.
    """
    if test_rows < 1:
        raise ValueError(f"a loss needs test rows, got {test_rows=}")
    match data:
        case "planted":
            return planted_source(Planted(seed=TEACHER), batch=batch, first=first, test_rows=test_rows)
        case "planted-rare":
            return planted_source(Planted(seed=TEACHER, base_rate=0.037), batch=batch, first=first, test_rows=test_rows)
        case "ml-1m":
            return table_source(movielens_1m(seed=0), batch=batch, first=first, test_rows=test_rows)
        case "ml-100k":
            return table_source(movielens_100k(seed=0), batch=batch, first=first, test_rows=test_rows)
    raise ValueError(f"data are 'planted', 'planted-rare', 'ml-1m' or 'ml-100k', got {data=}")


def planted_source(planted: Planted, *, batch: int, first: int, test_rows: int) -> Source:
    return Source(
        train=lambda i: planted.batch(first + i, batch),
        test=lambda i: planted.batch(i, TEST_BATCH, part="test")[: test_rows - i * TEST_BATCH],
        test_batches=math.ceil(test_rows / TEST_BATCH),
    )


def table_source(table: Table, *, batch: int, first: int, test_rows: int) -> Source:
    """The first `test_rows` of the log's test part, or as many as it has."""
    rows = min(test_rows, table.rows("test"))
    return Source(
        train=lambda i: table.batch(first + i, batch),
        test=lambda i: table.batch(i, TEST_BATCH, part="test")[: rows - i * TEST_BATCH],
        test_batches=math.ceil(rows / TEST_BATCH),
    )


# ---- evaluation ------------------------------------------------------------------------------------------------------------------


def evaluate(learner: Learner, source: Source) -> dict[str, float]:
    """The metrics of `quality`, by forward passes in the learner's own arithmetic; a run without finite logits has `diverged` alone."""
    found = list(_predictions(learner, source))
    logits_B, y_B = (torch.cat([pair[i] for pair in found]) for i in (0, 1))
    if not torch.isfinite(logits_B).all():
        return {"diverged": 1.0}
    metrics = {"diverged": 0.0, "normalised_entropy": normalised_entropy(torch.sigmoid(logits_B.double()), y_B), "auc": auc(logits_B, y_B)}
    if found[0][2] is None:
        return metrics | {"log_loss": float(losses(logits_B, y_B).mean())}
    p_B = torch.cat([p for _, _, p in found])
    entropy_B = torch.special.entr(p_B) + torch.special.entr(1 - p_B)
    return metrics | {"log_loss": float(losses(logits_B, p_B).mean()), "bayes_log_loss": float(entropy_B.mean())}


def _predictions(learner: Learner, source: Source) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(logits, labels, known probabilities) of each test batch, on the CPU."""
    ahead = AHEAD if learner.device.type == "cuda" else 0
    with torch.no_grad():
        for batch in in_order(source.test, range(source.test_batches), ahead=ahead):
            yield learner.logits(batch.to(learner.device)).float().cpu(), batch.y, batch.p
