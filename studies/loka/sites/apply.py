"""Apply: a model whose sites run in the recipes of a plan, with the same parameters.

    fast = apply(model, read_plan("plan.json"), *model.example(batch=8, seed=0))
    fast.state_dict().keys() == model.state_dict().keys()      # and the values are the same tensors
    torch.compile(fast)                                        # apply first, then compile

What the plan does not name stays as it was written. A module that was applied before is taken back to its own forward first, so applying a plan twice is
applying it once, and the empty plan gives the model back. Any batch size runs; other ranks of inputs need another example.
`replacement` and `rewrite` are the means: they hand a site's product to any function of (x, w, bias), a probe's for example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from kernels.fp8 import autograd
from kernels.fp8.recipes import PASSES, Recipe
from studies.loka.site import Plan
from studies.loka.sites.chains import NORMS, chain
from studies.loka.sites.fuse import Fusion, fused_linear, fusion_of, why_not_fused
from studies.loka.sites.products import Form, Multiply
from studies.loka.sites.registry import Registry, trace
from studies.loka.sites.sharing import shared_copy, with_forward

__all__ = ["Replacement", "apply", "recipe_of", "replacement", "rewrite"]


def apply(model: nn.Module, plan: Plan, *example: object) -> nn.Module:
    """A module of the model's class and parameters that runs `plan`; `model` itself stays as it is.

    Raises ValueError for a site that the model does not have, naming those near it, for a fused site that cannot be fused, and as `trace` does.
    """
    registry = trace(model, *example)
    for name in plan.recipes:
        registry.site(name)
    for name in plan.fused:
        if why := why_not_fused(registry, name, plan.recipe(name, "forward")):
            raise ValueError(f"{name} cannot be fused: {why}; take it out of the plan's fused sites")
    return rewrite(registry, [_planned(registry, plan, name) for name in plan.recipes])


def recipe_of(plan: Plan, site: str) -> Recipe:
    """A site's three products as one recipe, named by them."""
    products = {which: plan.recipe(site, which) for which in PASSES}
    return Recipe(name="/".join(p.name for p in products.values()), **products)


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """`run(*arguments)` in place of `node`."""

    node: fx.Node
    run: Callable[..., torch.Tensor]
    arguments: Sequence[object]


def replacement(registry: Registry, site: str, function: Multiply) -> Replacement:
    """function(x, w, bias), x [..., K], w [N, K] or [..., N, K], in place of a site's product."""
    product = registry.products[registry.site(site).name]
    return Replacement(node=product.node, run=_evaluating(product.form, function), arguments=product.arguments)


def rewrite(registry: Registry, replacements: Sequence[Replacement]) -> nn.Module:
    """A module of the model's class and parameters with these calls replaced. The registry's graph stays as it is, and serves once more."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(registry.graph, copies))
    for r in replacements:
        old = copies[r.node]
        with graph.inserting_before(old):
            copies[r.node] = graph.call_function(r.run, fx.node.map_arg(tuple(r.arguments), lambda n: copies[n]))
        old.replace_all_uses_with(copies[r.node])
        _erase_unread([old])
    return with_forward(shared_copy(registry.root), graph)


def _planned(registry: Registry, plan: Plan, site: str) -> Replacement:
    recipe = recipe_of(plan, site)
    if site not in plan.fused:
        return replacement(registry, site, _in_recipe(recipe))
    product = registry.products[site]
    x, w, bias = product.form.operands(product.arguments)
    steps = chain(x)
    norm = next((s for s in steps if s.name in NORMS), None)
    arguments = (steps[0].source, norm and norm.weight, norm and norm.bias, w, bias)
    return Replacement(node=product.node, run=_fused(product.form, fusion_of(steps), recipe), arguments=arguments)


def _evaluating(form: Form, function: Multiply) -> Callable[..., torch.Tensor]:
    def site(*arguments: torch.Tensor) -> torch.Tensor:
        return form.evaluate(arguments, function)

    return site


def _in_recipe(recipe: Recipe) -> Multiply:
    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return autograd.linear(x, w, bias, recipe) if w.ndim == 2 else autograd.matmul(x, w.mT, recipe)

    return multiply


def _fused(form: Form, fusion: Fusion, recipe: Recipe) -> Callable[..., torch.Tensor]:
    """The product of a source with the operators behind it; the form says how the weight stands in the call."""

    def site(source: torch.Tensor, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return fused_linear(x, norm_weight, norm_bias, w, bias, fusion, recipe)

        return form.evaluate(form.arguments(source, w, bias), multiply)

    return site


def _erase_unread(nodes: Sequence[fx.Node]) -> None:
    """Erases operators that nothing reads any more, and then what only they read: the norm and activation that a fused site computes itself."""
    for node in nodes:
        if not node.users and node.op != "placeholder":
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(inputs)
