"""Prices of dgrad and wgrad: the change of log-loss that noise and bias of gradients in FP8 will cost a training run.

    errors = gradient_errors(registry, loss, batches, [("over.0:linear", "wgrad", "rowwise")])
    errors[0].price(rate=1e-3)                              # nats at that learning rate

The model. Near an optimum with Hessian H, updates are -rate P (H t + n) with a diagonal preconditioner P (1 for plain SGD, 1 / sqrt(v) for Adam)
and noise n of covariance S. For small rates the stationary excess loss is

    E[1/2 t^T H t] = rate / 4 tr(P S)                        (P H C + C H P = rate P S P; multiply by P^-1 and take the trace)

FP8 adds its own error e to each gradient, and so rate / 4 sum_j P_j E[e_j^2]. A bias along the gradient, b = <g + e, g> / |g|^2 - 1 (flushed small
numbers make it negative), scales the rate by 1 + b, and so what the examples' own noise costs: rate / 4 sum_j P_j Var(g_j) |b|. Both enter the
same budget as forward prices. `rate` is that of the end of a schedule: with a rate that falls to zero the price does too. Not in it: a bias across
the gradient, which moves the optimum, and what happens far from an optimum, where losses fall for other reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kernels.fp8 import autograd
from kernels.fp8.recipes import Recipe, gemm
from studies.loka.sites.apply import replacement, rewrite
from studies.loka.sites.registry import Registry

__all__ = ["GradientError", "adam_preconditioner", "gradient_errors"]

BACKWARD = ("dgrad", "wgrad")
Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """What one product in FP8 does to the gradients of all parameters, over some batches."""

    site: str
    which: str
    recipe: str
    relative: float  # sqrt(E|e|^2 / E|g|^2), the preconditioner aside
    bias: float  # E<g + e, g> / E|g|^2 - 1
    noise: float  # sum_j P_j E[e_j^2]
    spread: float  # sum_j P_j Var(g_j), of a batch's gradient

    def price(self, rate: float) -> float:
        """Nats at that learning rate."""
        return rate / 4 * (self.noise + abs(self.bias) * self.spread)


def adam_preconditioner(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, torch.Tensor]:
    """1 / (sqrt(v) + eps) of each parameter that an Adam has updated. Raises ValueError for an optimizer without second moments."""
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg_sq" not in state:
                raise ValueError(f"a preconditioner is read from an Adam that has made a step, got {type(optimizer).__name__} without exp_avg_sq; train first")
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            found[p] = 1 / (v.sqrt() + group["eps"])
    return found


def gradient_errors(
    registry: Registry, loss: Callable[[torch.Tensor, Batch], torch.Tensor], batches: Sequence[Batch], products: Sequence[tuple[str, str, str]],
    preconditioner: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> list[GradientError]:  # fmt: skip
    """One `GradientError` for each (site, pass, recipe). A batch is the model's inputs and then what `loss(logits, batch)` reads besides.

    Only that product is in FP8, all others are as the model has them, in float32 on a CPU. Raises ValueError for a forward pass, an unknown site
    or recipe, and fewer than two batches, which show no spread.
    """
    if len(batches) < 2:
        raise ValueError(f"the spread of a gradient needs two batches or more, got {len(batches)}")
    inputs = sum(n.op == "placeholder" for n in registry.graph.nodes)
    parameters = [p for p in registry.root.parameters() if p.requires_grad]
    weights = [torch.ones(()) if preconditioner is None or p not in preconditioner else preconditioner[p] for p in parameters]
    plain = [_gradients(rewrite(registry, []), loss, b, inputs, parameters) for b in batches]
    size = sum(_dot(g, g) for g in plain) / len(plain)
    spread = _spread(plain, weights)
    found = []
    for site, which, recipe in products:
        if which not in BACKWARD:
            raise ValueError(f"a gradient's error comes from a pass of {BACKWARD}, got {which=} at {site}; forward passes have studies.loka.pricing.price")
        model = rewrite(registry, [replacement(registry, site, _with(which, recipe))])
        rounded = [_gradients(model, loss, b, inputs, parameters) for b in batches]
        errors = [[r - g for r, g in zip(rs, gs, strict=True)] for rs, gs in zip(rounded, plain, strict=True)]
        found.append(GradientError(
            site=site, which=which, recipe=recipe, spread=spread,
            relative=math.sqrt(sum(_dot(e, e) for e in errors) / len(errors) / size) if size else 0.0,
            bias=sum(_dot(e, g) for e, g in zip(errors, plain, strict=True)) / len(errors) / size if size else 0.0,
            noise=sum(_dot(e, e, weights) for e in errors) / len(errors),
        ))  # fmt: skip
    return found


def _with(which: str, recipe: str):
    """multiply(x, w, bias) with one pass in `recipe`, the others in float32."""
    passes = {p: gemm(recipe) if p == which else gemm("fp32") for p in ("forward", *BACKWARD)}
    layer = Recipe(name=f"{which} {recipe}", **passes)

    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return autograd.linear(x, w, bias, layer) if w.ndim == 2 else autograd.matmul(x, w.mT, layer)

    return multiply


def _gradients(model: nn.Module, loss: Callable, batch: Batch, inputs: int, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    with torch.enable_grad():
        found = torch.autograd.grad(loss(model(*batch[:inputs]), batch), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None) -> float:
    each = zip(a, b, weights or [1.0] * len(a), strict=True)
    return sum(float((x.double() * y.double() * w).sum()) for x, y, w in each)


def _spread(gradients: Sequence[Sequence[torch.Tensor]], weights: Sequence[torch.Tensor]) -> float:
    """sum_j P_j Var(g_j) by the unbiased sample variance over batches."""
    return sum(float((torch.stack(g).double().var(dim=0) * w).sum()) for g, w in zip(zip(*gradients, strict=True), weights, strict=True))
