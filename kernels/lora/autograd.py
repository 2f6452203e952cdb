"""A frozen linear layer with packed adapters, differentiable in x; the adapters' gradients go straight into their own buffers.

    a, b = Factor(compute=a_TK, grad=a_grad_TK), Factor(compute=b_TN, grad=b_grad_TN)          # grads float32, added to
    y_MN = lora_linear(x_MK, w_NK, bias_N, a, b, seg)
    y_MN.sum().backward()                                                                      # x.grad, a.grad, b.grad

y = x w^T + bias, and in every slot's own rows += scale (dropout(x) A^T) B. Kept for backward: x and s, nothing else (w, A, B are there anyway). A and B
are no autograd leaves: their gradients are sums over micro-steps in float32, which the packed optimizer reads and zeroes. Backward runs
although x needs no gradient (a first layer); then dx is not computed.

path: "triton" (kernels.lora.forward and backward on a GPU, their references on a CPU), "reference", another name of kernels.lora.paths.PATHS, or an object with the
six functions. base: (forward(x, w, bias) -> y, dgrad(dy, w) -> dx) of the frozen product, torch's unless given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import torch

from kernels.lora import backward as packed_backward
from kernels.lora import forward as packed_forward
from kernels.lora.dropout import Dropout
from kernels.lora.segments import Segments

__all__ = ["BaseProduct", "Factor", "Functions", "TORCH_BASE", "lora_linear"]

BaseProduct = tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
TORCH_BASE: BaseProduct = (torch.nn.functional.linear, torch.matmul)
_ANCHOR = torch.empty(0, requires_grad=True)  # makes a layer whose x needs no gradient part of the graph; never gets a gradient


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A ([T, K]) or B ([T, N]) of all slots. compute: in x's dtype. grad: of compute's shape; float32, or float64 beside float64."""

    compute: torch.Tensor
    grad: torch.Tensor

    def __post_init__(self) -> None:
        wide = torch.float64 if self.compute.dtype == torch.float64 else torch.float32
        if self.compute.ndim != 2 or self.grad.shape != self.compute.shape or self.grad.dtype != wide or self.grad.device != self.compute.device:
            raise ValueError(f"a factor has a gradient of its shape in {wide} on its device, got {tuple(self.compute.shape)} and {tuple(self.grad.shape)} {self.grad.dtype}; make it torch.zeros of that")


class Functions(Protocol):
    """One way to compute packed adapters; kernels.lora.paths.Path is one."""

    shrink: Callable[..., torch.Tensor]
    expand: Callable[..., None]
    grad_s: Callable[..., torch.Tensor]
    grad_b: Callable[..., None]
    grad_a: Callable[..., None]
    grad_x: Callable[..., None]


def lora_linear(
    x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, a: Factor, b: Factor, seg: Segments, *, path: str | Functions = "triton",
    dropout: Dropout | None = None, base: BaseProduct | None = None, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """y_MN in x's dtype. deterministic: bits that do not depend on other slots (then `base` must not either: kernels.lora.fixed_gemm).

    Raises ValueError for shapes or dtypes that do not fit, an unknown path, and deterministic with a path that has no such mode.
    """
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1] or (bias_N is not None and bias_N.shape != w_NK.shape[:1]):
        raise ValueError(f"a layer has x [M, K], w [N, K] and bias [N] or None, got {tuple(x_MK.shape)=} {tuple(w_NK.shape)=} bias={None if bias_N is None else tuple(bias_N.shape)}")
    wanted = ((seg.rank_rows, w_NK.shape[1]), (seg.rank_rows, w_NK.shape[0]))
    if (a.compute.shape, b.compute.shape) != wanted or {a.compute.dtype, b.compute.dtype, w_NK.dtype} != {x_MK.dtype}:
        raise ValueError(f"adapters are A {wanted[0]} and B {wanted[1]} in x's {x_MK.dtype}, as w is; got {tuple(a.compute.shape)}, {tuple(b.compute.shape)}, {a.compute.dtype}, {b.compute.dtype}, {w_NK.dtype}")
    if dropout is not None:
        dropout.check(seg)
    return _Packed.apply(x_MK, _ANCHOR, w_NK, bias_N, a, b, seg, _functions(path, x_MK.is_cuda, deterministic), dropout, base or TORCH_BASE)


def _functions(path: str | Functions, on_gpu: bool, deterministic: bool) -> Functions:
    if path == "reference" or (path == "triton" and not on_gpu):
        return _REFERENCE
    if path == "triton":
        return _TRITON[deterministic]
    if deterministic:
        raise ValueError(f"only the paths 'triton' and 'reference' have a deterministic mode, got {path!r}; choose one of them")
    if not isinstance(path, str):
        return path
    from kernels.lora.paths import PATHS

    if path not in PATHS:
        raise ValueError(f"a path is 'reference' or one of {sorted(PATHS)}, got {path!r}")
    return PATHS[path]


def _chosen(deterministic: bool) -> SimpleNamespace:
    names = {n: getattr(packed_forward, n) for n in ("shrink", "expand")} | {n: getattr(packed_backward, n) for n in ("grad_s", "grad_b", "grad_a", "grad_x", "grad_sb", "grad_ax")}
    return SimpleNamespace(**{n: functools.partial(f, deterministic=deterministic) for n, f in names.items()})


_TRITON = {d: _chosen(d) for d in (False, True)}
_REFERENCE = SimpleNamespace(
    shrink=packed_forward.shrink_ref, expand=packed_forward.expand_ref,
    **{n: getattr(packed_backward, f"{n}_ref") for n in ("grad_s", "grad_b", "grad_a", "grad_x")},
)  # fmt: skip


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, anchor, w_NK, bias_N, a, b, seg, functions, dropout, base):
        y_MN = base[0](x_MK, w_NK, bias_N)
        s_MR = functions.shrink(x_MK, a.compute, seg, **_dropped(dropout))
        functions.expand(y_MN, s_MR, b.compute, seg)
        ctx.save_for_backward(x_MK, s_MR)
        ctx.rest = (w_NK, a, b, seg, functions, dropout, base)
        return y_MN

    @staticmethod
    def backward(ctx, dy_MN):
        (x_MK, s_MR), (w_NK, a, b, seg, f, dropout, base) = ctx.saved_tensors, ctx.rest
        dy_MN = dy_MN.contiguous()
        dx_MK = base[1](dy_MN, w_NK) if ctx.needs_input_grad[0] else None
        if hasattr(f, "grad_sb"):
            ds_MR = f.grad_sb(dy_MN, s_MR, b.compute, seg, b.grad)
            f.grad_ax(dx_MK, ds_MR, x_MK, a.compute, seg, a.grad, dropout=dropout)
        else:
            ds_MR = f.grad_s(dy_MN, b.compute, seg)
            f.grad_b(s_MR, dy_MN, seg, b.grad)
            f.grad_a(ds_MR, x_MK, seg, a.grad, **_dropped(dropout))
            if dx_MK is not None:
                f.grad_x(dx_MK, ds_MR, a.compute, seg, **_dropped(dropout))
        return dx_MK, *[None] * 9


def _dropped(dropout: Dropout | None) -> dict[str, Dropout]:
    """Paths without dropout need not know of it."""
    return {} if dropout is None else {"dropout": dropout}
