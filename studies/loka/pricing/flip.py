"""Flips: what one product in FP8 does to a model's logits, and to its loss. The rest of the model stays as it was.

    registry = trace(model, *inputs)
    for site, recipe, logits_B in flips(registry, inputs, {"over.0:linear": ["rowwise", "blockwise"]}): ...
    measured_change(losses(flipped, p), losses(logits, p))                  # Change(value, error, excluded): nats

One run of the graph serves all flips of a batch: what does not hang on the flipped product is not computed again. A flip gives the bits that
studies.loka.sites.apply gives for a plan of that one product. The graph must not change its values in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kernels.fp8.autograd import product
from kernels.fp8.recipes import GemmRecipe, gemm
from studies.loka.sites.registry import Registry

__all__ = ["Change", "flips", "in_recipe", "measured_change"]

CLEAR = 2.0  # standard errors: a change below is noise


@dataclass(frozen=True, kw_only=True)
class Change:
    """A mean change of the loss over paired examples, in nats, with its standard error."""

    value: float
    error: float

    @property
    def excluded(self) -> bool:
        """Too small to be told from noise on these examples."""
        return abs(self.value) < CLEAR * self.error


def measured_change(flipped_B: torch.Tensor, base_B: torch.Tensor) -> Change:
    """From the losses of the same examples. Raises ValueError for other numbers of them, or fewer than two."""
    if flipped_B.shape != base_B.shape or len(base_B) < 2:
        raise ValueError(f"a paired change needs the same two examples or more on both sides, got {tuple(flipped_B.shape)} and {tuple(base_B.shape)}")
    change = flipped_B.double() - base_B.double()
    return Change(value=float(change.mean()), error=float(change.std()) / math.sqrt(len(change)))


def in_recipe(recipe: GemmRecipe):
    """multiply(x, w, bias) of a site in `recipe`, forward only."""

    def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if w.ndim == 2:
            return product(x.reshape(-1, x.shape[-1]), w, recipe, x.dtype, bias=bias).reshape(*x.shape[:-1], w.shape[0])
        batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        return product(x.expand(*batch, *x.shape[-2:]), w.expand(*batch, *w.shape[-2:]), recipe, x.dtype, bias=bias)

    return multiply


@torch.no_grad()
def flips(registry: Registry, inputs: Sequence[torch.Tensor], recipes: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(site, recipe, logits) of each flip, and first ("", "", logits) of the model as it is. Raises ValueError for an unknown site or recipe."""
    chosen = {registry.site(site).name: [gemm(r) for r in names] for site, names in recipes.items()}
    whole = fx.Interpreter(registry.root, garbage_collect_values=False, graph=registry.graph)
    yield "", "", whole.run(*inputs)
    for site, gemms in chosen.items():
        found = registry.products[site]
        behind = _behind(found.node)
        kept = {node: value for node, value in whole.env.items() if node not in behind}
        arguments = fx.node.map_arg(found.arguments, lambda n: whole.env[n])
        for recipe in gemms:
            flipped = found.form.evaluate(arguments, in_recipe(recipe))
            # a fresh dict a run: the interpreter drops what it has used
            yield site, recipe.name, fx.Interpreter(registry.root, graph=registry.graph).run(*inputs, initial_env={**kept, found.node: flipped})


def _behind(node: fx.Node) -> set[fx.Node]:
    """The nodes that hang on `node`, itself among them."""
    found, open_nodes = {node}, [node]
    while open_nodes:
        new = [user for user in open_nodes.pop().users if user not in found]
        found.update(new)
        open_nodes += new
    return found
