"""Linears of the base with adapters on them, several that read the same x at a time, as one step of autograd.

    y, z = linears(x_MK, (gate, up), frame, products)

It keeps x and each site's s = x A^T, nothing of the base. Gradients of A and B are added to their float32 buffers in place; backward returns the
gradient of x alone, and not even that where x learns nothing (the first layer). `Products` says what multiplies: the base's two products, and the
adapters' (an entry of kernels.lora.paths, or the packed kernels with two of them in one launch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.lora.dropout import Dropout
from kernels.lora.paths import Path
from kernels.lora.segments import Segments
from studies.plora.engine.operators import Adapted, Frame

__all__ = ["Products", "by_path", "linears"]


@dataclass(frozen=True, kw_only=True)
class Products:
    """linear(x, w, bias, frame) -> y. add_dgrad(dx or None, dy, w, frame) -> dx + dy w. shrink(x, a, seg, dropout) -> s; expand(y, s, b, seg) adds in place.

    grad_sb(dy, s, b, seg) -> ds, adding to b.grad; grad_ax(dx or None, ds, x, a, seg, dropout) adds to a.grad, and to dx in place.
    """

    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Frame], torch.Tensor]
    add_dgrad: Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, Frame], torch.Tensor]
    shrink: Callable[..., torch.Tensor]
    expand: Callable[..., None]
    grad_sb: Callable[..., torch.Tensor]
    grad_ax: Callable[..., None]


def by_path(path: Path, *, linear: Callable, add_dgrad: Callable) -> Products:
    def grad_sb(dy, s, b, seg: Segments):  # noqa: ANN001
        path.grad_b(s, dy, seg, b.grad)
        return path.grad_s(dy, b.compute, seg)

    def grad_ax(dx, ds, x, a, seg: Segments, dropout):  # noqa: ANN001
        path.grad_a(ds, x, seg, a.grad, dropout=dropout)
        if dx is not None:
            path.grad_x(dx, ds, a.compute, seg, dropout=dropout)

    return Products(
        linear=linear, add_dgrad=add_dgrad, shrink=lambda x, a, seg, dropout: path.shrink(x, a.compute, seg, dropout=dropout),
        expand=lambda y, s, b, seg: path.expand(y, s, b.compute, seg), grad_sb=grad_sb, grad_ax=grad_ax,
    )  # fmt: skip


def linears(x_MK: torch.Tensor, sites: Sequence[Adapted], frame: Frame, products: Products) -> tuple[torch.Tensor, ...]:
    """y_MN of each site. With gradients enabled its backward runs even where x itself needs none."""
    anchor = torch.empty(0, device=x_MK.device, requires_grad=torch.is_grad_enabled())
    return _Linears.apply(x_MK, anchor, tuple(sites), frame, products)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, sites, frame, products):  # noqa: ANN001, ANN205
        ys, kept = [], []
        for site in sites:
            y = products.linear(x, site.frozen.w_NK, site.frozen.bias_N, frame)
            s = products.shrink(x, site.a, frame.seg, _dropout(frame, site))
            products.expand(y, s, site.b, frame.seg)
            ys.append(y)
            kept.append(s)
        ctx.save_for_backward(x, *kept)
        ctx.rest = sites, frame, products
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):  # noqa: ANN002, ANN205
        (x, *kept), (sites, frame, products) = ctx.saved_tensors, ctx.rest
        dx = None
        for site, s, dy in zip(sites, kept, dys, strict=True):
            dy = dy.contiguous()
            ds = products.grad_sb(dy, s, site.b, frame.seg)
            if ctx.needs_input_grad[0]:
                dx = products.add_dgrad(dx, dy, site.frozen.w_NK, frame)
            products.grad_ax(dx, ds, x, site.a, frame.seg, _dropout(frame, site))
        return dx, None, None, None, None


def _dropout(frame: Frame, site: Adapted) -> Dropout | None:
    """Sites count from 1 here: 0 is where an adapter's A was drawn, under the same seed."""
    return None if frame.streams is None else Dropout(p_S=frame.streams[0], seed_S=frame.streams[1], step_S=frame.streams[2], site=site.site + 1)
