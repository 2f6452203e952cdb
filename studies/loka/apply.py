"""Apply: a model whose sites run in the recipes of a plan, with the same parameters.

    fast = apply(model, read_plan("plan.json"), *model.example(batch=8, seed=0))
    fast.state_dict().keys() == model.state_dict().keys()      # and the values are the same tensors
    torch.compile(fast)                                        # apply first, then compile

What the plan does not name stays as it was written. A module that was applied before is taken back to its own forward first, so applying a plan twice is
applying it once, and the empty plan gives the model back. Any batch size runs; other ranks of inputs need another example.
`rewrite` is the means: it hands each chosen product to a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from kernels.fp8 import autograd
from kernels.fp8.recipes import PASSES, Recipe
from studies.loka.products import Form, Multiply
from studies.loka.registry import Registry, trace
from studies.loka.sharing import shared_copy, with_forward
from studies.loka.site import Plan

__all__ = ["apply", "recipe_of", "rewrite"]


def apply(model: nn.Module, plan: Plan, *example: object) -> nn.Module:
    """A module of the model's class and parameters that runs `plan`; `model` itself stays as it is.

    Raises ValueError for a site that the model does not have, naming those near it, and as `trace` does.
    """
    registry = trace(model, *example)
    for name in plan.recipes:
        registry.site(name)
    return rewrite(registry, {name: _in_recipe(recipe_of(plan, name)) for name in plan.recipes})


def recipe_of(plan: Plan, site: str) -> Recipe:
    """A site's three products as one recipe, named by them."""
    products = {which: plan.recipe(site, which) for which in PASSES}
    return Recipe(name="/".join(p.name for p in products.values()), **products)


def rewrite(registry: Registry, functions: Mapping[str, Multiply]) -> nn.Module:
    """A module of the model's class and parameters in which function(x, w, bias), x [..., K], w [N, K] or [..., N, K], computes each named site.

    The registry's graph stays as it is, and serves once more.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(registry.graph, copies))
    for name, function in functions.items():
        product = registry.products[registry.site(name).name]
        node = copies[product.node]
        with graph.inserting_before(node):
            arguments = fx.node.map_arg(product.arguments, lambda n: copies[n])
            new = graph.call_function(_call(product.form, function), tuple(arguments))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        copies[product.node] = new
    return with_forward(shared_copy(registry.root), graph)


def _call(form: Form, function: Multiply) -> Callable[..., torch.Tensor]:
    def site(*arguments: torch.Tensor) -> torch.Tensor:
        return form.evaluate(arguments, function)

    return site


def _in_recipe(recipe: Recipe) -> Multiply:
    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return autograd.linear(x, w, bias, recipe) if w.ndim == 2 else autograd.matmul(x, w.mT, recipe)

    return multiply
