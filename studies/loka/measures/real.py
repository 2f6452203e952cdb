"""Measure function on real logs: what FP8 in every forward product changes on a log's test part, and what change that log could show at all.

    real_change(ctx, data="movielens-100k", training={"steps": 300, "batch": 512}, recipe="rowwise", heads=False, rows=20000, chunk=4096)

The same trained model is read twice on the same rows, so differences are paired and training's chaos is out of them; intervals are over what was
sampled, users where a log has them, for rows of one user share much. Labels are all a log has: a
change is decided by its interval, and `detectable` says which one these rows would show with 80% power. For a change of 0.02% only MovieLens-1M has
the rows; on the others an interval that spans it is UNDECIDED, whatever its middle.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.fp8.recipes import RECIPES
from studies.loka.data.real import TABLES
from studies.loka.data.table import Table
from studies.loka.learning.training import Learner, Training, train
from studies.loka.pricing.metrics import auc, detectable_change, losses, normalised_entropy, relative_change
from studies.loka.site import Plan
from studies.loka.sites.apply import apply
from studies.loka.sites.registry import trace
from suite.measure import Context, Result

__all__ = ["real_change"]

MARGIN = 2e-4  # the change of log-loss that matters


def real_change(ctx: Context, *, data: str, training: dict, recipe: str, heads: bool, rows: int, chunk: int) -> Result:
    """Metrics: loss_change with loss_low and loss_high (95%), relative to the log-loss; detectable, likewise; rows; normalised_entropy and auc of the model.

    Facts: the data's digest, and the verdict on 0.02%: "within", "beyond" or "undecided". Raises ValueError for an unknown log or recipe.
    """
    if data not in TABLES or recipe not in RECIPES:
        raise ValueError(f"a log is one of {sorted(TABLES)} and a recipe one of {sorted(RECIPES)}, got {data=} {recipe=}")
    table, learner = TABLES[data](ctx.seed), Learner(Training(**training), seed=ctx.seed, device=ctx.device)
    train(learner, lambda i: table.batch(i, learner.config.batch), ctx)
    asked = min(rows, table.rows("test"))
    y = torch.cat([table.batch(i, chunk, part="test").y for i in range(-(-asked // chunk))])[:asked]
    base = _logits(learner, table, asked, chunk)

    def in_fp8(model: torch.nn.Module, example: tuple) -> torch.nn.Module:
        sites = [s for s in trace(model, *example).sites if heads or not s.head]
        return apply(model, Plan(recipes={s.name: {"forward": RECIPES[recipe].forward.name} for s in sites}), *example)

    learner.transform(in_fp8)
    flipped, plain = (_summed(losses(z, y), table.units("test")[:asked]) for z in (_logits(learner, table, asked, chunk), base))
    change = relative_change(flipped, plain)
    verdict = "within" if -MARGIN < change.low and change.high < MARGIN else "beyond" if change.low > MARGIN or change.high < -MARGIN else "undecided"
    return Result(
        metrics={"loss_change": change.value, "loss_low": change.low, "loss_high": change.high, "detectable": detectable_change(flipped, plain), "rows": float(asked),
                 "normalised_entropy": normalised_entropy(torch.sigmoid(base.double()), y), "auc": auc(base, y)},
        facts={"source": table.source, "verdict": verdict}, kind="emulated" if ctx.device == "cpu" else "measured",
    )  # fmt: skip


def _summed(losses_B: torch.Tensor, units_B: np.ndarray) -> torch.Tensor:
    """Losses summed by unit: their ratio is that of the rows' means, and its error that over units."""
    _, unit = np.unique(units_B, return_inverse=True)
    return torch.zeros(unit.max() + 1, dtype=torch.float64).index_add(0, torch.from_numpy(unit), losses_B)


@torch.no_grad()
def _logits(learner: Learner, table: Table, rows: int, chunk: int) -> torch.Tensor:
    parts = (table.batch(i, chunk, part="test").to(learner.device) for i in range(-(-rows // chunk)))
    return torch.cat([learner.logits(b).cpu() for b in parts])[:rows]
