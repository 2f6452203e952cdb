"""Prices: the change of log-loss that a product's rounding will cost, predicted from one backward pass, without running the model in FP8.

    taps = tap(registry, inputs)                                        # x, w and d logit / d y of every site, of one batch
    price(taps.sites["over.0:linear"], gemm("rowwise"), taps.logits)    # Price(loss=3.1e-06, error=...) in nats

An error e of a site's output moves the logit of example i by s_i = sum_j J_ij e_ij, J = d logit / d y. Rounding has no preferred direction, so
what is left of the loss is its second order, with the logistic curvature p (1 - p) and p the model's own probability:

    dL = 1/2 mean_i p_i (1 - p_i) s_i^2

A head has J = 1: the formula itself. Four ways to s_i^2, `how`:

    error     the product is emulated and e taken as it is. What is common to all examples, the weights' rounding, is in it as it will be.
    operands  sum of (d logit / d x)^2 (dx)^2 and (d logit / d w)^2 (dw)^2 over the elements of x and w, dx and dw their roundings: these are
              independent from element to element, whereas outputs share those of x. From variances alone (studies.loka.probing.predict) it needs no product.
    outputs   sum_j J_ij^2 e_ij^2, as if outputs were independent: they are not, and it shows
    variances the same with each output's expected square (studies.loka.pricing.noise) in e's place: no cast and no product in FP8

First-order change, sum of (p - truth) s_i, is zero in the mean where the model is calibrated; a model far from its optimum moves by it as well,
up or down, and no price of noise foretells that. Examples share no value; they are the first axis of their number's size, or several rows each,
one after the other, along the first axis.
Legend: B examples, R rows of an example at a site, N and K as in kernels.fp8.recipes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import GemmRecipe, OperandRecipe
from studies.loka.pricing.flip import in_recipe
from studies.loka.pricing.noise import known, output_variance
from studies.loka.sites.apply import replacement, rewrite
from studies.loka.sites.products import multiply
from studies.loka.sites.registry import Registry

__all__ = ["HOW", "Price", "Tap", "Taps", "backward_product", "noise_to_signal", "price", "relative_errors", "tap"]

HOW = ("error", "operands", "outputs", "variances")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tap:
    """One site in one batch: x [..., K], w [N, K] or [..., N, K], y [..., N] without bias, jacobian d logit / d y of y's shape."""

    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    jacobian: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Taps:
    logits: torch.Tensor  # [B]
    sites: Mapping[str, Tap]


@dataclass(frozen=True, kw_only=True)
class Price:
    """A predicted change of log-loss in nats, with the standard error of its mean over examples."""

    loss: float
    error: float


def tap(registry: Registry, inputs: Sequence[torch.Tensor]) -> Taps:
    """Runs the model forward and backward once. Raises ValueError where it does not give one logit an example."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def watch(name: str):
        def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if w.ndim > 2:
                batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
                x, w = x.expand(*batch, *x.shape[-2:]), w.expand(*batch, *w.shape[-2:])
            y = multiply(x, w, None)
            seen[name] = (x, w, y)
            return y if bias is None else y + bias

        return product

    examples = len(inputs[0])
    with torch.enable_grad():
        # a leaf among the inputs, so that gradients reach sites that no parameter lies in front of
        watched = rewrite(registry, [replacement(registry, s.name, watch(s.name)) for s in registry.sites])
        logits = watched(*(x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs))
        if logits.shape != (examples,):
            raise ValueError(f"a price needs one logit an example, got {tuple(logits.shape)} for {examples} examples")
        jacobians = torch.autograd.grad(logits.sum(), [y for _, _, y in seen.values()], allow_unused=True)
    sites = {
        name: Tap(x=x.detach(), w=w.detach(), y=y.detach(), jacobian=torch.zeros_like(y) if j is None else j)
        for (name, (x, w, y)), j in zip(seen.items(), jacobians, strict=True)
    }
    return Taps(logits=logits.detach(), sites=sites)


def price(site: Tap, recipe: GemmRecipe, logits_B: torch.Tensor, how: str = "error") -> Price:
    """The forward product in `recipe`. Raises ValueError for another `how`, and for operands without quantising where they are asked for."""
    if how not in HOW:
        raise ValueError(f"a price is reckoned by one of {HOW}, got {how=}")
    examples = len(logits_B)
    match how:
        case "operands":
            squares_B = _by_operands(site, recipe, examples)
        case "variances":
            squares_B = _by_variances(site, recipe, examples)
        case _:
            squares_B = _by_error(site, recipe, examples, how)
    p = torch.sigmoid(logits_B.double())
    each_B = 0.5 * p * (1 - p) * squares_B
    return Price(loss=float(each_B.mean()), error=float(each_B.std()) / math.sqrt(len(each_B)))


def noise_to_signal(site: Tap, recipe: GemmRecipe) -> float:
    """Sum of squared errors over that of squares of the output: what a rule without a model of the loss would look at."""
    error = _error(site, recipe)
    return float(error.square().sum() / site.y.double().square().sum())


def relative_errors(site: Tap, recipe: GemmRecipe) -> tuple[float, float]:
    """LoKA's mean elementwise relative error in both readings: (mean of |e| / |y|, sum of |e| over sum of |y|). The first may be infinite."""
    error, y = _error(site, recipe).abs(), site.y.double().abs()
    return float((error / y)[(error > 0) | (y > 0)].mean()), float(error.sum() / y.sum())


def backward_product(site: Tap, dlogits_B: torch.Tensor, which: str) -> Tap:
    """The site's dgrad or wgrad as a product of its own, for `noise_to_signal` and `relative_errors`; dlogits: d loss / d logit. Its jacobian is empty."""
    axis = _axis(site.jacobian.shape, len(dlogits_B))
    each = dlogits_B.repeat_interleave(site.jacobian.shape[axis] // len(dlogits_B))
    dy = site.jacobian * each.reshape([-1 if i == axis else 1 for i in range(site.jacobian.ndim)])
    x, w = site.x, site.w
    if w.ndim == 2:
        dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    a, b = (dy, w.mT) if which == "dgrad" else (dy.mT, x.mT)
    return Tap(x=a, w=b, y=a @ b.mT, jacobian=a[..., :0])


def _error(site: Tap, recipe: GemmRecipe) -> torch.Tensor:
    return in_recipe(recipe)(site.x, site.w, None).double() - site.y.double()


def _by_error(site: Tap, recipe: GemmRecipe, examples: int, how: str) -> torch.Tensor:
    shifts = _by_example(site.jacobian.double() * _error(site, recipe), examples)
    return shifts.sum(1).square() if how == "error" else shifts.square().sum(1)


def _by_operands(site: Tap, recipe: GemmRecipe, examples: int) -> torch.Tensor:
    if not recipe.is_fp8:
        raise ValueError(f"operands are priced where they are quantised, got recipe {recipe.name!r}; use how='error'")
    jacobian, x, w = site.jacobian.double(), site.x.double(), site.w.double()
    flat = site.x if w.ndim > 2 else site.x.reshape(-1, x.shape[-1])  # as the product takes it
    of_x = _by_example((jacobian @ w).square() * _rounding(flat, recipe.a).reshape(x.shape), examples).sum(1)
    dw = _rounding(site.w, recipe.b)
    if w.ndim > 2 and _axis(x.shape, examples) < x.ndim - 2:  # w is of the example too: each of its elements is rounded once
        return of_x + _by_example((jacobian.mT @ x).square() * dw, examples).sum(1)
    if w.ndim > 2 or x.numel() == examples * x.shape[-1]:  # one row an example meets each weight
        return of_x + _by_example((jacobian.square() @ dw) * x.square(), examples).sum(1)
    j_BRN, x_BRK = (_by_example(t, examples).reshape(examples, -1, t.shape[-1]) for t in (jacobian, x))
    return of_x + ((j_BRN.mT @ x_BRK).square() * dw).sum((1, 2))


def _by_variances(site: Tap, recipe: GemmRecipe, examples: int) -> torch.Tensor:
    flat = site.x if site.w.ndim > 2 else site.x.reshape(-1, site.x.shape[-1])
    variance = output_variance(known(flat), known(site.w), recipe).reshape(site.y.shape)
    return _by_example(site.jacobian.double().square() * variance, examples).sum(1)


def _rounding(x: torch.Tensor, operand: OperandRecipe) -> torch.Tensor:
    """Squared rounding errors, element by element."""
    return (quantise_ref(x, operand).dequantise().double() - x.double()).square()


def _axis(shape: torch.Size, examples: int) -> int:
    """The axis of the examples."""
    found = next((i for i, size in enumerate(shape[:-1]) if size == examples), 0)
    if shape[found] % examples:
        raise ValueError(f"a site's operands have an axis of the examples, or rows of each along the first, got {tuple(shape)} for {examples} examples")
    return found


def _by_example(values: torch.Tensor, examples: int) -> torch.Tensor:
    """[B, all the rest]."""
    return values.movedim(_axis(values.shape, examples), 0).reshape(examples, -1)
