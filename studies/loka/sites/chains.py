"""Chains: the norms and activations around a product, recognised in a graph, whether called or written out.

    step = step_at(node)                           # Step(name="layernorm", first=..., source=...) or None
    producers(x), consumers(node)                  # ("blocknorm", "hardswish"): what could be fused in front of, and behind, a product

A step counts where nothing else reads what is inside the chain; asking for a shape is no reading. Recognised:

    layernorm   F.layer_norm over the last axis
    rmsnorm     F.rms_norm over the last axis; x * rsqrt(mean(x^2, -1) + eps), times a weight or not
    blocknorm   reshape to blocks, F.rms_norm without a weight, reshape back; also as one block
    silu, hardswish, relu   F's; x * sigmoid(x); x * relu6(x + 3) / 6
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from studies.loka.sites.products import argument

__all__ = ["NORMS", "Step", "asks_shape", "chain", "consumers", "producers", "reaches_output", "step_at"]

NORMS = ("layernorm", "rmsnorm", "blocknorm")
ACTIVATIONS = {F.silu: "silu", F.hardswish: "hardswish", F.relu: "relu", torch.relu: "relu", "relu": "relu"}
RESHAPES = {torch.reshape, torch.flatten, "reshape", "view", "flatten", "unflatten", torch.unflatten}
SHAPE_QUERIES = {"size", "dim", "ndimension", "numel", "is_floating_point"}
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
MULTIPLY, ADD, DIVIDE, SIGMOID = {operator.mul, torch.mul, "mul"}, {operator.add, torch.add, "add"}, {operator.truediv, torch.div, "div"}, {torch.sigmoid, F.sigmoid, "sigmoid"}
# what keeps a logit a logit, or makes it a probability: elementwise operators and rearrangements
TO_OUTPUT = RESHAPES | MULTIPLY | ADD | DIVIDE | SIGMOID | {
    operator.imul, operator.iadd, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute, torch.tanh, torch.sub, torch.neg, torch.clamp, torch.exp, torch.stack,
    torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, F.logsigmoid, operator.sub, operator.isub, operator.neg, operator.getitem, "squeeze", "unsqueeze",
    "transpose", "permute", "t", "tanh", "sub", "neg", "clamp", "exp", "softmax", "log_softmax", "float", "to", "type_as", "double", "bfloat16", "half", "contiguous",
}  # fmt: skip
TO_OUTPUT_MODULES = (torch.nn.Sigmoid, torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.LogSigmoid, torch.nn.Tanh, torch.nn.Flatten, torch.nn.Unflatten)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One norm or activation: nodes from `source` (its input, outside) to `last` (its result)."""

    name: str
    source: fx.Node
    last: fx.Node
    first: fx.Node  # the first reader of `source`
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    eps: float | None = None  # of a norm; None: the dtype's machine epsilon, as F.rms_norm has it
    block: int | None = None  # of a blocknorm


def chain(x: fx.Node) -> tuple[Step, ...]:
    """The steps that end in `x` and could be fused with quantising it: an activation, a norm, or a norm and then an activation."""
    last = step_at(x) if len(readers(x)) == 1 else None
    if last is None:
        return ()
    if last.name in NORMS or len(readers(last.source)) != _reads(last):
        return (last,)
    before = step_at(last.source)
    return (before, last) if before is not None and before.name in NORMS else (last,)


def producers(x: fx.Node) -> tuple[str, ...]:
    """Names of `chain`, nearest last."""
    return tuple(step.name for step in chain(x))


def consumers(node: fx.Node) -> tuple[str, ...]:
    """Names of the norm, the activation, or both in this order, that alone read `node`, nearest first."""
    found: list[str] = []
    while (step := _step_from(node)) is not None and (step.name not in NORMS or not found):
        found.append(step.name)
        node = step.last
        if step.name not in NORMS:
            break
    return tuple(found)


def reaches_output(node: fx.Node, module: Callable[[str], torch.nn.Module]) -> bool:
    """Whether a model's output is `node` up to elementwise operators and rearrangements."""
    for user in node.users:
        if user.op == "output":
            return True
        passes = user.target in TO_OUTPUT if user.op != "call_module" else isinstance(module(user.target), TO_OUTPUT_MODULES)
        if passes and not asks_shape(user) and reaches_output(user, module):
            return True
    return False


def readers(node: fx.Node) -> list[fx.Node]:
    """Users that read the numbers of `node`."""
    return [u for u in node.users if not asks_shape(u)]


def step_at(node: fx.Node) -> Step | None:
    """The norm or activation whose result is `node`."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target in ACTIVATIONS:
        return Step(name=ACTIVATIONS[node.target], source=argument(node, 0, "input"), last=node, first=node)
    for match in (_norm, _block_norm, _written_silu, _written_hardswish, _written_rms_norm):
        if (step := match(node)) is not None:
            return step
    return None


def asks_shape(user: fx.Node) -> bool:
    """Whether a node reads a tensor's shape, dtype or device, not its numbers."""
    return user.target in SHAPE_QUERIES or (user.target is getattr and user.args[1] in SHAPE_ATTRIBUTES)


def _reads(step: Step) -> int:
    """How many readers of its source belong to the step: a written-out one reads it twice."""
    return sum(1 for u in readers(step.source) if u is step.first or u is step.last or _leads_to(u, step.last, 6))


def _leads_to(node: fx.Node, last: fx.Node, steps: int) -> bool:
    return node is last or (steps > 0 and len(readers(node)) == 1 and _leads_to(readers(node)[0], last, steps - 1))


def _step_from(node: fx.Node) -> Step | None:
    """The step that all readers of `node` belong to."""
    seen, frontier = set(), readers(node)
    for _ in range(7):  # the longest written-out step has seven calls
        for user in frontier:
            step = step_at(user)
            if step is not None and step.source is node and _reads(step) == len(readers(node)):
                return step
        seen.update(frontier)
        frontier = [u for f in frontier for u in readers(f) if u not in seen]
    return None


def _norm(node: fx.Node) -> Step | None:
    if node.target not in (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm):
        return None
    source, shape = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
    if len(shape) != 1:
        return None
    weight = argument(node, 2, "weight")
    if node.target in (F.rms_norm, torch.rms_norm):
        return Step(name="rmsnorm", source=source, last=node, first=node, weight=weight, eps=argument(node, 3, "eps"))
    return Step(name="layernorm", source=source, last=node, first=node, weight=weight, bias=argument(node, 3, "bias"), eps=argument(node, 4, "eps", 1e-5))


def _block_norm(node: fx.Node) -> Step | None:
    """reshape(rms_norm(reshape(x, -1, block), (block,)), x.shape), where a block lies within a row of x."""
    inner = argument(node, 0, "input") if node.target in RESHAPES else None
    step = _norm(inner) if isinstance(inner, fx.Node) and inner.op == "call_function" else None
    if step is None or step.name != "rmsnorm" or step.weight is not None or len(readers(inner)) != 1:
        return None
    first = step.source
    if first.target not in RESHAPES or len(readers(first)) != 1:
        return None
    source, block = argument(first, 0, "input"), argument(inner, 1, "normalized_shape")[0]
    shape = _shape(source)
    if shape != _shape(node) or not shape or shape[-1] % block:
        return None
    return Step(name="blocknorm", source=source, last=node, first=first, eps=step.eps, block=block)


def _written_silu(node: fx.Node) -> Step | None:
    """x * sigmoid(x)."""
    for x, gate in _factors(node):
        if _input(gate, SIGMOID) is x and len(readers(gate)) == 1:
            return Step(name="silu", source=x, last=node, first=gate)
    return None


def _written_hardswish(node: fx.Node) -> Step | None:
    """x * relu6(x + 3) / 6, where either the gate or the whole is divided."""
    whole = _sixth(node)
    for x, gate in _factors(node if whole is None else whole):
        clipped = gate if whole is not None else _sixth(gate)
        shifted = _input(clipped, {F.relu6})
        if shifted is not None and _number(shifted, ADD) == (x, 3):
            return Step(name="hardswish", source=x, last=node, first=shifted)
    return None


def _written_rms_norm(node: fx.Node) -> Step | None:
    """[w *] (x * rsqrt(mean(x^2, -1, keepdim) + eps))."""
    for weight, normed in [(None, node), *_factors(node)]:
        if weight is not None and (weight.op != "get_attr" or _shape(weight) != _shape(normed)[-1:] or len(readers(normed)) != 1):
            continue
        for x, rstd in _factors(normed):
            mean, eps = _number(_input(rstd, {torch.rsqrt, "rsqrt"}), ADD)
            over_last = mean is not None and mean.target in (torch.mean, "mean") and argument(mean, 1, "dim") in (-1, (-1,), [-1]) and argument(mean, 2, "keepdim") is True
            if over_last and _is_square(argument(mean, 0, "input"), x):
                return Step(name="rmsnorm", source=x, last=node, first=argument(mean, 0, "input"), weight=weight, eps=float(eps))
    return None


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    return _input(node, {torch.square, "square"}) is x or _number(node, {torch.pow, operator.pow, "pow"}) == (x, 2) or (x, x) in _factors(node)


def _sixth(node: fx.Node) -> fx.Node | None:
    x, number = _number(node, DIVIDE)
    return x if number == 6 else None


def _input(node: fx.Node | None, targets: set) -> fx.Node | None:
    """The operand of an operator of one, called with no other argument but `inplace`."""
    plain = node is not None and node.target in targets and len(node.args) == 1 and not set(node.kwargs) - {"inplace"}
    return node.args[0] if plain else None


def _number(node: fx.Node | None, targets: set) -> tuple[fx.Node | None, float]:
    """(x, number) of a binary operator, in this order."""
    if node is not None and node.target in targets and len(node.args) == 2 and not node.kwargs:
        x, number = node.args
        if isinstance(x, fx.Node) and isinstance(number, (int, float)):
            return x, number
    return None, 0.0


def _factors(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(a, b) and (b, a) of a product of two tensors."""
    if node.target not in MULTIPLY or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return []
    return [tuple(node.args), tuple(node.args[::-1])]


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    example = node.meta.get("example")
    return tuple(example.shape) if isinstance(example, torch.Tensor) else None
