"""Real activations: a model trained here, and every product of its next training step held to float64 in every recipe.

    captured(ctx, model="wukong", size="small", mods="", steps=100, batch=512, examples=512)

The operands of a site are what the product saw: x and w forward, dy and w^T, dy^T and x^T backward, in bfloat16. Rows are cut to ROWS, columns to
safety_map.OUTPUTS; a site with fewer columns gets more of them by flipping the signs of its second operand at random, which keeps its
scales. Rows of a weight's gradient are features: where a site has few of them, those of up to BATCHES batches are pooled. Thresholds and verdicts are those of the safety map. Data are planted (studies.loka.data.planted), so the activations are those of
a trained model and of no production log.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted
from studies.loka.learning.training import Learner, Training, train
from studies.loka.measures.safety_map import GRADIENT_DB, HEAD_DB, INNER_DB, OUTPUTS, hardware, judged, kind
from studies.loka.sites.apply import replacement, rewrite
from studies.loka.sites.products import Multiply, multiply
from studies.loka.sites.registry import trace
from suite.measure import Context, Result

__all__ = ["captured", "operands_of", "seen"]

ROWS, FEWEST_ROWS, BATCHES = 512, 16, 10
TEACHER = 1000
Operands = dict[str, tuple[torch.Tensor, torch.Tensor]]  # pass -> (a [..., R, C], b [..., S, C])


def captured(ctx: Context, *, model: str, size: str, mods: str, steps: int, batch: int, examples: int) -> Result:
    """Record "sites": one object for each site and pass. Metrics: safe recipes of all inner forward sites together, and the worst site's 1st percentile."""
    learner = Learner(Training(model=model, size=size, mods=mods, steps=steps, batch=batch), seed=ctx.seed, device=ctx.device)
    data = Planted(seed=TEACHER)
    train(learner, lambda i: data.batch(i, batch), ctx)
    batches = [seen(learner, data.batch(i, examples, part="test")) for i in range(BATCHES)]
    records = []
    for site in trace(learner.model, *learner.model.example(2, 0, device=ctx.device)).sites:
        for which in (p for p in site.passes if p in batches[0][site.name]):
            draws = [cut(*b[site.name][which], ctx.seed) for b in batches]
            enough = -(-ROWS // draws[0][0].shape[:-1].numel())
            threshold = GRADIENT_DB if which != "forward" else HEAD_DB if site.head else INNER_DB
            records.append({"site": site.name, "op": site.op, "which": which, "head": site.head, "threshold_db": threshold,
                            "recipes": judged(draws[:enough], threshold, ctx.device)})  # fmt: skip
    inner = [{v["recipe"]: v for v in r["recipes"]} for r in records if r["which"] == "forward" and not r["head"]]
    metrics = {"safe_recipes": float(sum(v["verdict"] == "safe" and v["fp8"] for verdicts in inner for v in verdicts.values()))}
    metrics |= {f"p01_db_{name}": min(verdicts[name]["p01_db"] for verdicts in inner) for name in ("tensorwise", "rowwise")}
    return Result(metrics=metrics | hardware([v for r in records for v in r["recipes"]]), records={"sites": records}, kind=kind(ctx.device))


def seen(learner: Learner, batch: Batch) -> dict[str, Operands]:
    """What the products of every site saw in one training step on `batch`; products of few rows are left out."""
    batch = batch.to(learner.device)
    registry = trace(learner.model, *learner.model.example(2, 0, device=learner.device))
    tensors: dict[str, dict[str, torch.Tensor]] = {site.name: {} for site in registry.sites}
    learner.run = rewrite(registry, [replacement(registry, name, watch(found)) for name, found in tensors.items()])
    F.binary_cross_entropy_with_logits(learner.logits(batch), batch.y).backward()
    return {name: operands_of(found) for name, found in tensors.items()}


def watch(tensors: dict[str, torch.Tensor]) -> Multiply:
    """A product that leaves its x, w and dy in `tensors`."""

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = multiply(x, w, bias)
        tensors.update(x=x.detach(), w=w.detach())
        y.register_hook(lambda dy: tensors.update(dy=dy.detach()))
        return y

    return product


def operands_of(t: dict[str, torch.Tensor]) -> Operands:
    """The three products of y = x w^T with these tensors, as pairs whose last axis is contracted."""
    x, w, dy = t["x"], t["w"], t["dy"]
    if w.ndim == 2:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    pairs = {"forward": (x, w), "dgrad": (dy, w.mT), "wgrad": (dy.mT, x.mT)}
    return {which: (a, b) for which, (a, b) in pairs.items() if a.shape[-2] >= FEWEST_ROWS}


def cut(a: torch.Tensor, b: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands in bfloat16: at most ROWS rows over all products, exactly OUTPUTS columns."""
    if a.ndim > 2:
        a, b = a.flatten(0, -3), b.expand(*a.shape[:-2], *b.shape[-2:]).flatten(0, -3)
        products = max(1, ROWS // a.shape[-2])
        a, b = a[:products], b[:products]
    a, columns = a[..., :ROWS, :], b.shape[-2]
    if columns < OUTPUTS:
        b = torch.cat([b] * -(-OUTPUTS // columns), dim=-2)
        coin = torch.randint(2, b.shape, generator=torch.Generator().manual_seed(seed)).to(b.device) * 2 - 1
        coin[..., :columns, :] = 1
        b = b * coin
    return a.to(torch.bfloat16), b[..., :OUTPUTS, :].to(torch.bfloat16)
