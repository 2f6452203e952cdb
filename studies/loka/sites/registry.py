"""The site registry: every matrix product of a model, found by tracing it with torch.fx, not by a list of module classes.

    registry = trace(model, *model.example(batch=8, seed=0))
    [site.name for site in registry.sites]         # ["bottom.0:linear", ..., "cross.0.v:linear", ..., "over.4:linear"]
    registry.unsupported                           # {"attention.out_proj": "attention (MultiheadAttention) is torch.nn's own ...", ...}

A site is named by the module whose forward has the product: "<module path>:<op>", with "#2", "#3" behind its later ones in the order of the graph, so a
name stays while the module stays. Sizes come from one run on the example, without gradients and without dropout; on the meta device it costs nothing.

What studies.loka.sites.tracing keeps whole stays as it is: its linear layers are named in `unsupported`, and the rest of the model goes on.
Not done: products inside a model's own autograd functions.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from studies.loka.site import Site
from studies.loka.sites.chains import consumers, producers, reaches_output
from studies.loka.sites.products import Form, form_of, multiply
from studies.loka.sites.tracing import modes_kept, traced

__all__ = ["Product", "Registry", "trace"]

TABLES = (nn.Embedding, nn.EmbeddingBag)
INSIDE = "{} is torch.nn's own and kept whole, its products out of sight"


@dataclass(frozen=True, kw_only=True)
class Product:
    """Where a site is in the graph: `node`, whose arguments, in the order of `form.evaluate`, are `arguments`."""

    node: fx.Node
    form: Form
    arguments: tuple


@dataclass(frozen=True, kw_only=True, eq=False)
class Registry:
    """`sites` in the order of the graph, which runs on `root`: a module that shares the model's parameters and buffers.

    A node's `meta["example"]` is a meta tensor of what it gave on the example.
    """

    sites: tuple[Site, ...]
    graph: fx.Graph
    root: nn.Module
    products: Mapping[str, Product]  # by the site's name
    unsupported: Mapping[str, str]  # module or product -> why it is no site

    def site(self, name: str) -> Site:
        """Raises ValueError with near names, and with the reason where the name stands in `unsupported`."""
        if name not in self.products:
            near = difflib.get_close_matches(name, self.products, n=3, cutoff=0.5)
            why = f": {self.unsupported[name]}" if name in self.unsupported else ""
            raise ValueError(f"a site is one of the {len(self.sites)} that trace found, got {name!r}{why}; near it: {near or list(self.products)[:3]}")
        return next(s for s in self.sites if s.name == name)


def trace(model: nn.Module, *example: object) -> Registry:
    """The products of `model(*example)`. A parameter of `forward` that the example leaves out keeps its default.

    `Site.trains_x` counts an input of the example as trained where it requires a gradient. Raises ValueError for a model that was
    compiled before, for an example that does not fit, and where the model's own forward, outside its submodules, cannot be traced.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise ValueError(f"a model is traced as it was written, a torch.nn.Module before torch.compile or torch.jit, got {type(model).__name__}; compile what apply gives")
    if plain := [x for x in example if isinstance(x, (bool, int, float, str, type(None)))]:
        raise ValueError(f"an example holds tensors, or collections of them, got {plain[0]!r}; fix such an argument in the model, by a module around it")
    root, graph, closed = traced(model, example)
    _measure(root, graph, example)
    products, unsupported = _products(root, graph)
    needs_grad = _needs_grad(root, graph, example)
    sites = tuple(_site(name, product, root, needs_grad) for name, product in products.items())
    return Registry(sites=sites, graph=graph, root=root, products=products, unsupported=unsupported | _unseen(root, graph, closed))


# ---- sizes -----------------------------------------------------------------------------------------------------------------------


class _Sizes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        n.meta["example"] = tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else None, result)
        return result


def _measure(root: nn.Module, graph: fx.Graph, example: Sequence[object]) -> None:
    """Notes what each node gives on the example, in evaluation mode, so that no running statistic and no random state moves."""
    with modes_kept(root), torch.no_grad():
        _Sizes(root.eval(), graph=graph).run(*example)


# ---- products --------------------------------------------------------------------------------------------------------------------


def _products(root: nn.Module, graph: fx.Graph) -> tuple[dict[str, Product], dict[str, str]]:
    """By name in the order of the graph: products that are sites, and why the others are none."""
    products, unsupported, seen, given = {}, {}, Counter(), _of_inputs(graph)
    for node in graph.nodes:
        found = form_of(node, lambda arg: isinstance(arg, fx.Node) and arg not in given) if node.op in ("call_function", "call_method") else None
        if found is None:
            continue
        reason = found if isinstance(found, str) else _misfit(*found)
        label = f"{_module_path(node)}:{_label(node) if reason else found[0].op}"
        seen[label] += 1
        name = label if seen[label] == 1 else f"{label}#{seen[label]}"
        if reason:
            unsupported[name] = reason
        else:
            products[name] = Product(node=node, form=found[0], arguments=found[1])
    return products, unsupported


def _of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the model's inputs. The others are parameters and what is made of them: a product's weight."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _label(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def _module_path(node: fx.Node) -> str:
    """Of the module whose forward made the call; "" is the model itself."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def _misfit(form: Form, arguments: Sequence[object]) -> str:
    """Why a product of these sizes and types is no site."""
    x, w = (operand.meta["example"] for operand in form.operands(arguments)[:2])
    if x.ndim < 2 or w.ndim < 2:
        return f"a product of a vector has no rows to quantise, got {tuple(x.shape)} and {tuple(w.shape)}; give it an axis of 1"
    if not (x.is_floating_point() and w.is_floating_point()):
        return f"a site multiplies floating-point numbers, got {x.dtype} and {w.dtype}"
    if form.kind == "einsum" and not form.fits(x.shape, w.shape):
        return f"an einsum that broadcasts an axis of 1 is no product, got {form.equation!r} of {tuple(x.shape)} and {tuple(w.shape)}; expand it"
    return ""


def _needs_grad(root: nn.Module, graph: fx.Graph, example: Sequence[object]) -> set[fx.Node]:
    """Nodes whose gradient training computes."""
    inputs = iter(example)
    needing: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            needs = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(next(inputs)))
        elif node.op == "get_attr":
            needs = getattr(operator.attrgetter(node.target)(root), "requires_grad", False)
        else:
            trained = node.op == "call_module" and any(p.requires_grad for p in root.get_submodule(node.target).parameters())
            floating = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves(node.meta["example"]))
            needs = floating and node.target not in ("detach", torch.detach) and (trained or any(i in needing for i in node.all_input_nodes))
        if needs:
            needing.add(node)
    return needing


def _site(name: str, product: Product, root: nn.Module, needs_grad: set[fx.Node]) -> Site:
    sizes: dict[str, int] = {}

    def measure(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if w.ndim == 2:
            sizes.update(batch=1, m=math.prod(x.shape[:-1]))
        else:
            sizes.update(batch=math.prod(torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])), m=x.shape[-2])
        sizes.update(n=w.shape[-2], k=w.shape[-1])
        return multiply(x, w, bias)

    product.form.evaluate([a.meta["example"] if isinstance(a, fx.Node) else a for a in product.arguments], measure)
    x = product.form.operands(product.arguments)[0]
    rows = product.form.keeps_rows
    return Site(
        name=name, op=product.form.op, **sizes, producer=producers(x) if rows else (), consumer=consumers(product.node) if rows else (),
        head=reaches_output(product.node, root.get_submodule), trains_x=x in needs_grad,
    )  # fmt: skip


def _unseen(root: nn.Module, graph: fx.Graph, closed: Mapping[str, str]) -> dict[str, str]:
    """Linear layers inside modules that were kept whole, and such modules with matrices of their own; tables of embeddings multiply nothing."""
    found, given = {}, _of_inputs(graph)
    for path in {n.target: None for n in graph.nodes if n.op == "call_module" and n in given}:
        kept = root.get_submodule(path)
        kind = type(kept).__name__
        linears = [f"{path}.{name}".rstrip(".") for name, m in kept.named_modules() if isinstance(m, nn.Linear)]
        why = f"inside {path} ({kind}), which cannot be traced: {closed[path]}" if path in closed else INSIDE.format(f"{path} ({kind})")
        found |= dict.fromkeys(linears, why)
        if not linears and not isinstance(kept, TABLES) and any(p.ndim > 1 for p in kept.parameters()):
            found[path] = f"{kind} cannot be traced: {closed[path]}" if path in closed else INSIDE.format(kind)
    return found
