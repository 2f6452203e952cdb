"""Frozen: a model for inference whose planned sites hold their weights in FP8, quantised once.

    serving = frozen(model, plan, *model.example(batch=8, seed=0))
    with torch.no_grad():
        logits_B = torch.compile(serving)(*inputs)

Its numbers are those of `apply(model, plan, ...)` in the forward pass, bit for bit; what it saves is quantising the weights in every call. With
`epilogues` products also norm, activate and quantise for the product behind them where they can (studies.loka.sites.epilogues), which rounds less often.
Sites of a plan whose forward stays in bf16 are left as they are. Weights that change afterwards are not seen: freeze again. Training is
studies.loka.sites.apply's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from kernels.fp8.autograd import linear, matmul, product, quantised
from kernels.fp8.epilogue import Epilogue
from kernels.fp8.quantise import Quantised
from kernels.fp8.recipes import GemmRecipe, Recipe
from studies.loka.site import Plan
from studies.loka.sites.apply import Replacement, apply, recipe_of, replacement, rewrite
from studies.loka.sites.chains import NORMS, chain
from studies.loka.sites.epilogues import Edge, edges, joined_product
from studies.loka.sites.fuse import Fusion, fusion_of
from studies.loka.sites.products import Form
from studies.loka.sites.registry import Registry, trace

__all__ = ["frozen"]


def frozen(model: nn.Module, plan: Plan, *example: torch.Tensor, epilogues: bool = False) -> nn.Module:
    """A module that shares `model`'s parameters and runs the forward products of `plan` on weights quantised now.

    Raises ValueError as `apply` does. Products of two activations have no weight to freeze: both are quantised in every call.
    """
    apply(model, plan, *example)  # its rules are these
    registry = trace(model, *example)
    planned = [name for name in plan.recipes if plan.recipe(name, "forward").is_fp8]
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        rewrite(registry, [replacement(registry, name, _recording(weights, name)) for name in planned])(*example)
    joined = edges(registry, plan) if epilogues else {}
    ends = {edge.producer: edge.epilogue for edge in joined.values()}
    order = {node: i for i, node in enumerate(registry.graph.nodes)}
    planned.sort(key=lambda name: order[registry.products[name].node])  # a product in front of those that read it
    return rewrite(registry, [_frozen(registry, plan, name, weights[name], joined.get(name), ends.get(name)) for name in planned])


def _recording(weights: dict[str, torch.Tensor], name: str) -> Callable:
    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weights[name] = w.detach()
        y = x @ w.mT
        return y if bias is None else y + bias

    return multiply


def _frozen(registry: Registry, plan: Plan, name: str, w: torch.Tensor, edge: Edge | None, end: Epilogue | None) -> Replacement:
    recipe, place = recipe_of(plan, name), registry.products[name]
    f = recipe.forward
    if registry.site(name).op != "linear":
        return replacement(registry, name, lambda x, w, bias: matmul(x, w.mT, recipe))
    held = quantised(w, f.b)
    x, w_node, bias = place.form.operands(place.arguments)
    if edge:
        source = registry.products[edge.producer].node
        return Replacement(node=place.node, run=_joined(held, f, end, lambda pair: Quantised(*pair, f.a)), arguments=(source, bias))
    if name not in plan.fused and end is None:
        return replacement(registry, name, _in_recipe(held, recipe))
    if name not in plan.fused:
        return Replacement(node=place.node, run=_joined(held, f, end, lambda x: quantised(x, f.a)), arguments=(x, bias))
    steps = chain(x)
    norm = next((s for s in steps if s.name in NORMS), None)
    run = _fused(place.form, fusion_of(steps), held, f, end)
    return Replacement(node=place.node, run=run, arguments=(steps[0].source, norm and norm.weight, norm and norm.bias, w_node, bias))


def _joined(held: Quantised, f: GemmRecipe, end: Epilogue | None, operand: Callable[..., Quantised]) -> Callable:
    """A site of rows [M, K] whose operand is made of what it reads, and whose result is FP8 for the site behind it where it has an `end`."""

    def site(read: torch.Tensor | tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return _multiplied(operand(read), held, f, bias, end)

    return site


def _multiplied(a: Quantised, held: Quantised, f: GemmRecipe, bias: torch.Tensor | None, end: Epilogue | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return product(a, held, f, torch.bfloat16, bias=bias) if end is None else joined_product(a, held, f, bias, end)


def _in_recipe(held: Quantised, recipe: Recipe) -> Callable:
    """Of one weight, or of a batch of them that x's batch equals or is broadcast to."""

    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if w.ndim == 2:
            return linear(x, held, bias, recipe)
        if x.shape[:-2] != w.shape[:-2]:
            return matmul(x, w.mT, recipe)
        return product(x, held, recipe.forward, x.dtype, bias=bias)

    return multiply


def _fused(form: Form, fusion: Fusion, held: Quantised, f: GemmRecipe, end: Epilogue | None) -> Callable:
    """The site from the source of its norm on; nothing is kept for a backward pass."""

    def site(source: torch.Tensor, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        def multiply(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            x_MK = x.reshape(-1, x.shape[-1])
            eps = torch.finfo(x.dtype).eps if fusion.eps is None else fusion.eps
            how = (fusion.norm, fusion.activation, eps, fusion.block, f.a.fmt, f.a.granularity, f.a.power_of_two, False)
            data, scale, *_ = torch.ops.loka.norm_quantise(x_MK, norm_weight, norm_bias, *how)
            if end is not None:
                return _multiplied(Quantised(data, scale, f.a), held, f, bias, end)
            y_MN = product(Quantised(data, scale, f.a), held, f, x.dtype, bias=bias)
            return y_MN.reshape(*x.shape[:-1], held.data_RC.shape[0])

        return form.evaluate(form.arguments(source, w, bias), multiply)

    return site
