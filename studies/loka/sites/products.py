"""Products: the matrix products that a graph's calls hide, each brought to one form, y = x w^T (+ bias), and back.

    form, arguments = form_of(node, is_weight)   # of a call in a torch.fx graph; a str says why it is no site
    y = form.evaluate(arguments, multiply)       # multiply(x, w, bias): x [..., K], w [N, K] or a batch [..., N, K] -> [..., N]

`multiply` sees each of these the same way, with w the parameter where there is one:

    F.linear(x, w, b)          x [..., K]  w [N, K]            torch.addmm(b, x, w_KN)    x [M, K]      w_KN^T
    x @ w_KN                   x [..., K]  w_KN^T              w_MK @ x_KN                x_KN^T        w_MK, and the result transposed
    x @ y                      x [..., M, K]  y^T [..., N, K]
    einsum("bnd,bdk->bnk")     axes that both operands and the result have are the batch, those that the result lacks are K

Sizes are read from the tensors when the product runs, so that another batch size needs no second graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

__all__ = ["Form", "Multiply", "argument", "form_of", "multiply"]

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

MATMULS = {operator.matmul, torch.matmul, torch.mm, torch.bmm, "matmul", "mm", "bmm", "__matmul__", "__rmatmul__"}
NO_SITES = {  # products that this study does not take apart
    torch.baddbmm: "baddbmm adds inside the product; write it as bmm and +",
    "baddbmm": "baddbmm adds inside the product; write it as bmm and +",
    F.bilinear: "a bilinear layer contracts three operands; write it as two products",
    F.scaled_dot_product_attention: "attention in one kernel hides its two products; write them as matmul",
    F.conv1d: "convolutions are no sites", F.conv2d: "convolutions are no sites", F.conv3d: "convolutions are no sites",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a call's arguments stand as x and w."""

    kind: str  # "linear", "addmm", "matmul" or "einsum"
    op: str  # of Site: "linear" where w is a parameter, else "bmm"
    swapped: bool = False  # the second operand is x, the first w
    equation: str = ""  # of einsum, without spaces, with "->"

    @property
    def keeps_rows(self) -> bool:
        """Whether the operands' and the result's last axes, as the graph has them, are K, K and N: what operators around it can be fused with."""
        return self.kind in ("linear", "addmm") or (self.kind == "matmul" and not self.swapped)

    def evaluate(self, arguments: Sequence[torch.Tensor], multiply: Multiply) -> torch.Tensor:
        """The call's result with `multiply` as its product. arguments: (x, w, bias) | (bias, x, w_KN) | (first, second)."""
        match self.kind:
            case "linear":
                return multiply(*arguments)
            case "addmm":
                bias, x_MK, w_KN = arguments
                in_epilogue = bias.ndim == 1 and bias.shape[0] == w_KN.shape[1]
                y_MN = multiply(x_MK, w_KN.mT, bias if in_epilogue else None)
                return y_MN if in_epilogue else y_MN + bias
            case "matmul":
                first, second = arguments
                return multiply(second.mT, first, None).mT if self.swapped else multiply(first, second.mT, None)
        return self._einsum(*arguments, multiply)

    def operands(self, arguments: Sequence) -> tuple:
        """The arguments behind x, w and bias."""
        match self.kind:
            case "linear":
                return tuple(arguments)
            case "addmm":
                return arguments[1], arguments[2], arguments[0]
        first, second = arguments
        return (second, first, None) if self.swapped else (first, second, None)

    def arguments(self, x: object, w: object, bias: object) -> tuple:
        """The inverse of `operands`."""
        if self.kind in ("linear", "addmm"):
            return (x, w, bias) if self.kind == "linear" else (bias, x, w)
        return (w, x) if self.swapped else (x, w)

    def fits(self, x_shape: Sequence[int], w_shape: Sequence[int]) -> bool:
        """Whether an einsum's axes have one size each."""
        left, right, _ = _axes(self.equation)
        pairs = list(zip((right + left) if self.swapped else (left + right), (*x_shape, *w_shape)))
        return len(dict(pairs)) == len(set(pairs))

    def _einsum(self, first: torch.Tensor, second: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        left, right, out = _axes(self.equation)
        if self.swapped:
            first, second, left, right = second, first, right, left
        batch = [a for a in left if a in right and a in out]
        summed = [a for a in left if a in right and a not in out]
        rows, columns = [a for a in left if a not in right], [a for a in right if a not in left]
        size = dict(zip(left + right, (*first.shape, *second.shape)))
        total = lambda axes: math.prod(size[a] for a in axes)  # noqa: E731
        shape = (total(batch),) if batch else ()
        x = first.permute([left.index(a) for a in batch + rows + summed]).reshape(*shape, total(rows), total(summed))
        w = second.permute([right.index(a) for a in batch + columns + summed]).reshape(*shape, total(columns), total(summed))
        y = multiply(x, w, None).reshape([size[a] for a in batch + rows + columns])
        return y.permute([(batch + rows + columns).index(a) for a in out])


def form_of(node: fx.Node, is_weight: Callable[[object], bool]) -> tuple[Form, tuple] | str | None:
    """The form of a call and its arguments in the order that `Form.evaluate` takes; why it is no site; or None for what is no product."""
    target = node.target
    if target in NO_SITES:
        return NO_SITES[target]
    if target is F.linear:
        x, w, bias = (argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        return Form(kind="linear", op="linear" if is_weight(w) else "bmm"), (x, w, bias)
    if target in (torch.addmm, "addmm"):
        if any(node.kwargs.get(name, 1) != 1 for name in ("beta", "alpha")):
            return "addmm with beta or alpha scales its sum; write it as a product, * and +"
        bias, x, w = (argument(node, i, name) for i, name in enumerate(("input", "mat1", "mat2")))
        return Form(kind="addmm", op="linear" if is_weight(w) else "bmm"), (bias, x, w)
    if target in MATMULS:
        first, second = argument(node, 0, "input"), argument(node, 1, "mat2" if target in (torch.mm, torch.bmm, "mm", "bmm") else "other")
        if target == "__rmatmul__":
            first, second = second, first
        swapped = is_weight(first) and not is_weight(second)
        return Form(kind="matmul", op="linear" if swapped or is_weight(second) else "bmm", swapped=swapped), (first, second)
    return _einsum_form(node, is_weight) if target is torch.einsum else None


def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x w^T (+ bias) as torch does it."""
    return F.linear(x, w, bias) if w.ndim == 2 else x @ w.mT


def argument(node: fx.Node, position: int, name: str, default: object = None) -> object:
    """An argument of a call, by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _einsum_form(node: fx.Node, is_weight: Callable[[object], bool]) -> tuple[Form, tuple] | str:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return f"an einsum is a site with an equation and two operands, got {len(operands)}; write it as products of two"
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        return f"an einsum is a site where it names all axes and those of its result, got {equation!r}"
    left, right, out = _axes(equation)
    if any(len(set(axes)) != len(axes) for axes in (left, right, out)):
        return f"an einsum with a diagonal is no product, got {equation!r}"
    if lonely := [a for a in left + right if (a in left) != (a in right) and a not in out]:
        return f"an einsum that sums {lonely[0]!r} of one operand alone is no product, got {equation!r}; sum it first"
    if all(a in out for a in left if a in right):
        return f"an einsum that contracts nothing is no product, got {equation!r}"
    swapped = is_weight(operands[0]) and not is_weight(operands[1])
    op = "linear" if swapped or is_weight(operands[1]) else "bmm"
    return Form(kind="einsum", op=op, swapped=swapped, equation=equation), tuple(operands)


def _axes(equation: str) -> tuple[list[str], list[str], list[str]]:
    operands, out = equation.split("->")
    left, right = operands.split(",")
    return list(left), list(right), list(out)
