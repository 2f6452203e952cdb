"""Tracing: a model as a torch.fx graph down to its functions, as far as that goes.

    root, graph, closed = traced(model, example)           # closed: paths of modules that are kept whole -> why

`root` shares the model's parameters and buffers, so the model itself gets no attribute. What differs from torch.fx's own tracer:

    modules      torch.nn's layers, norms and activations (OPEN) are traced into, its others, such as dropout and attention, are kept whole.
                 A module whose forward cannot be traced, for it decides by its input's values, is kept whole, and the rest goes on.
    conditions   on shapes, dtypes and devices are decided by the example; the graph checks that they come out the same, and says so if not
    `training`   is read when the graph runs, so a mode may change; a module that branches on it is kept whole
    buffers      are read when the graph runs
    arguments    that the example leaves out keep their defaults
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn

from studies.loka.sites.chains import asks_shape
from studies.loka.sites.sharing import shared_copy

__all__ = ["OPEN", "is_mode", "modes_kept", "same_branch", "traced"]

OPEN = (nn.Linear, nn.Sequential, nn.Identity, nn.Flatten, nn.LayerNorm, nn.RMSNorm, nn.SiLU, nn.Hardswish, nn.ReLU, nn.Bilinear)


def traced(model: nn.Module, example: Sequence[object]) -> tuple[nn.Module, fx.Graph, dict[str, str]]:
    """(root, its graph, why modules were kept whole). Raises ValueError for an example that does not fit, and for a forward of the model's own
    that cannot be traced."""
    closed: dict[str, str] = {}
    while True:  # once more for each module that cannot be traced
        root = shared_copy(model)
        names = _argument_names(root, len(example))
        try:
            return root, _Tracer(names, example, closed).trace(root), closed
        except _Untraceable as found:
            if not found.path:
                raise ValueError(f"the forward of {type(root).__name__} itself cannot be traced: {found.reason}; move that part into a submodule, which then stays as it is") from found
            closed[found.path] = found.reason


def is_mode(node: fx.Node) -> bool:
    """Whether a node reads a module's `training`."""
    return node.op == "get_attr" and node.target.split(".")[-1] == "training"


@contextmanager
def modes_kept(root: nn.Module) -> Iterator[None]:
    """Gives every module its `training` back, whatever it is."""
    modes = {module: module.__dict__["training"] for module in root.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.__dict__["training"] = mode


def same_branch(found: object, taken: bool) -> None:
    """In the graph where a forward decided by a shape. Raises ValueError where it would decide otherwise now."""
    if bool(found) != taken:
        raise ValueError(f"a condition on shapes that was {taken} for the example is {bool(found)} for these inputs; trace, or apply the plan, with such an example")


class _Untraceable(Exception):
    def __init__(self, path: str, error: Exception) -> None:
        self.path, self.reason = path, (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
        super().__init__(path, self.reason)


class _Tracer(fx.Tracer):
    def __init__(self, names: Sequence[str], example: Sequence[object], closed: Mapping[str, str]) -> None:
        super().__init__()
        self.names, self.example, self.closed = names, example, closed
        self.proxy_buffer_attributes, self.running = True, False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.closed or (type(m).__module__.startswith("torch.nn") and not isinstance(m, OPEN))

    def create_args_for_root(self, root_fn: Callable, is_module: bool, concrete_args: object = None) -> tuple[Callable, list]:
        """One placeholder an argument of the example; and, so that `training` is read late, a node for that attribute of every module."""
        arguments = [self.create_proxy("placeholder", name, (), {}) for name in self.names]
        for path, module in self.root.named_modules():
            module.__dict__["training"] = self.create_proxy("get_attr", f"{path}.training".lstrip("."), (), {})
        return root_fn, [self.root, *arguments]

    def trace(self, root: nn.Module) -> fx.Graph:
        try:
            with modes_kept(root):
                graph = super().trace(root)
        except _Untraceable:
            raise
        except Exception as error:  # a stranger's forward under proxies may raise anything; run for real it says so itself
            raise _Untraceable("", error) from error
        for node in [n for n in graph.nodes if is_mode(n) and not n.users]:
            graph.erase_node(node)
        return graph

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> object:
        if self.running:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Untraceable:
            raise
        except Exception as error:
            raise _Untraceable(self.path_of_module(m), error) from error

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict) -> object:
        return attr_val if self.running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if not _of_shapes(obj.node):
            return super().to_bool(obj)
        taken = bool(self._value(obj.node))
        self.create_proxy("call_function", same_branch, (obj, taken), {})
        return taken

    def _value(self, node: fx.Node) -> object:
        """What a node gives on the example, by running the part of the graph that leads to it."""
        needed, frontier = set(), [node]
        while frontier:
            needed.add(found := frontier.pop())
            frontier += [i for i in found.all_input_nodes if i not in needed]
        part, copies = fx.Graph(), {}
        for n in self.graph.nodes:
            if n in needed or n.op == "placeholder":
                copies[n] = part.node_copy(n, copies.__getitem__)
        part.output(copies[node])
        self.running = True
        try:
            with modes_kept(self.root), torch.no_grad():
                return fx.Interpreter(self.root.eval(), graph=part).run(*self.example)
        finally:
            self.running = False


def _of_shapes(node: fx.Node) -> bool:
    """Whether a value is made of shapes, dtypes and devices alone."""
    return asks_shape(node) or (node.op == "call_function" and bool(node.all_input_nodes) and all(_of_shapes(i) for i in node.all_input_nodes))


def _argument_names(model: nn.Module, count: int) -> list[str]:
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in parameters if p.name in names)
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        names += [f"argument_{i}" for i in range(len(names), count)]
    if not least <= count <= len(names):
        raise ValueError(f"the forward of {type(model).__name__} takes {least} to {len(names)} arguments by position, got an example of {count}; give those of one call, in order")
    return names[:count]
