"""Fuse: norm, activation and quantising in front of a site as one operator, differentiable.

    plan = fused(plan, model, *example)                            # with all sites fused that can be
    why_not_fused(registry, "over.3:linear", gemm("rowwise"))      # "" or the reason in words
    y_MN = fused_linear(x_MK, norm_weight, norm_bias, w_NK, bias_N, fusion, recipe)

What it is worth: a norm that writes bf16 and a quantising that reads it again move 2 + 2 + 2 + 1 bytes an element, one kernel 2 + 1
(kernels.fp8.norm_quantise). For training it also writes y = activation(norm(x)) in x's dtype, 2 bytes, from which the weight's gradient is
quantised along M. Kept for backward: x, y, statistics of a row; no FP8.
y is rounded to x's dtype before it is quantised, as if it had been written, so fusing rounds nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from kernels.fp8.autograd import linear_backward, product
from kernels.fp8.epilogue import ACTIVATIONS
from kernels.fp8.norm_backward import norm_backward
from kernels.fp8.norm_quantise import MAX_K, Saved, norm_quantise, norm_quantise_ref
from kernels.fp8.quantise import Quantised
from kernels.fp8.recipes import GemmRecipe, OperandRecipe, Recipe, gemm
from kernels.fp8.scaling import scale_shape
from studies.loka.site import Plan
from studies.loka.sites.chains import NORMS, Step, chain
from studies.loka.sites.registry import Registry, trace

__all__ = ["Fusion", "fused", "fused_linear", "fusion_of", "norm_gradient", "why_not_fused"]


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The operators in front of a product. `eps` of None is the machine epsilon of x's dtype, as F.rms_norm has it."""

    norm: str = "none"
    activation: str = "identity"
    eps: float | None = 1e-5
    block: int = 256


def why_not_fused(registry: Registry, site: str, recipe: GemmRecipe) -> str:
    """Why the producers of a site cannot be fused with quantising for a forward product in `recipe`; "" where they can."""
    found, row = registry.site(site), registry.products[registry.site(site).name]
    if found.op != "linear" or not row.form.keeps_rows or found.batch != 1:
        return "the fused product is a linear layer's, of rows by one weight"
    steps = chain(row.form.operands(row.arguments)[0])
    if not steps:
        return "no norm or activation stands right in front, read by this product alone"
    if unknown := [s.name for s in steps if s.name not in (*NORMS, *ACTIVATIONS)]:
        return f"the kernel has the activations {ACTIVATIONS}, not {unknown[0]}"
    if not recipe.is_fp8 or recipe.a.granularity not in ("row", "block"):
        return f"a row's program knows scales of rows and of 128 in a row, not those of {recipe.name}"
    if found.k > MAX_K:
        return f"a program holds a whole row, at most {MAX_K} features, not {found.k}"
    block = fusion_of(steps).block
    return f"blocks of BlockNorm are powers of two from 16 on, not {block}" if block < 16 or block & (block - 1) else ""


def fused(plan: Plan, model: nn.Module, *example: object) -> Plan:
    """`plan` with every site fused that can be in its forward recipe."""
    registry = trace(model, *example)
    sites = [name for name in plan.recipes if not why_not_fused(registry, name, plan.recipe(name, "forward"))]
    return replace(plan, fused=tuple(sites))


def fusion_of(steps: tuple[Step, ...]) -> Fusion:
    """What `chain` found, as the kernel names it. A BlockNorm of one block is an RMSNorm."""
    named = {"activation": s.name for s in steps if s.name not in NORMS}
    for s in steps:
        if s.name == "blocknorm" and s.block != _features(s.last):
            named |= {"norm": "blocknorm", "eps": s.eps, "block": s.block}
        elif s.name in NORMS:
            named |= {"norm": "rmsnorm" if s.name == "blocknorm" else s.name, "eps": s.eps}
    return Fusion(**named)


def fused_linear(
    x: torch.Tensor, norm_weight_K: torch.Tensor | None, norm_bias_K: torch.Tensor | None, w_NK: torch.Tensor, bias_N: torch.Tensor | None, fusion: Fusion, recipe: Recipe
) -> torch.Tensor:
    """activation(norm(x)) w^T + bias in x's dtype, its products in `recipe`; x [..., K]."""
    x_MK = x.reshape(-1, x.shape[-1])
    eps = torch.finfo(x.dtype).eps if fusion.eps is None else fusion.eps
    y_MN = _Fused.apply(
        x_MK, norm_weight_K, norm_bias_K, w_NK, bias_N, fusion.norm, fusion.activation, eps, fusion.block, recipe.forward.name, recipe.dgrad.name, recipe.wgrad.name
    )
    return y_MN.reshape(*x.shape[:-1], w_NK.shape[0])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, norm_weight, norm_bias, w_NK, bias_N, norm, activation, eps, block, forward, dgrad, wgrad):
        f = gemm(forward)
        needs = ctx.needs_input_grad
        data, scale, y, mean, rstd = _norm_quantise(x_MK, norm_weight, norm_bias, norm, activation, eps, block, f.a.fmt, f.a.granularity, f.a.power_of_two, any(needs[:4]))
        ctx.save_for_backward(x_MK, norm_weight, norm_bias, w_NK, y if needs[3] else None, mean, rstd)
        ctx.how, ctx.recipes, ctx.bias_dtype = (norm, activation, eps, block), (dgrad, wgrad), None if bias_N is None else bias_N.dtype
        return product(Quantised(data, scale, f.a), w_NK, f, x_MK.dtype, bias=bias_N)

    @staticmethod
    def backward(ctx, dy_MN):
        x, norm_weight, norm_bias, w, y, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d, g = (gemm(name) for name in ctx.recipes)
        norm, activation, eps, block = ctx.how
        da, dw = linear_backward(dy_MN, y, w, d, g, x.dtype if any(needs[:3]) else None, w.dtype if needs[3] else None)
        dx = dnorm_weight = dnorm_bias = None
        if da is not None:
            dx, dnorm_weight, dnorm_bias = _norm_backward(da, x, norm_weight, norm_bias, mean, rstd, norm, activation, eps, block)
        dbias = dy_MN.sum(0, dtype=torch.promote_types(dy_MN.dtype, torch.float32)).to(ctx.bias_dtype) if needs[4] else None
        kept = lambda gradient, of, i: gradient.to(of.dtype) if needs[i] else None  # noqa: E731
        return kept(dx, x, 0), kept(dnorm_weight, norm_weight, 1), kept(dnorm_bias, norm_bias, 2), dw, dbias, *[None] * 7


# ---- operators that torch.compile sees whole -------------------------------------------------------------------------------------
# They return tensors only, row-major: what a norm does not have is empty.


@torch.library.custom_op("loka::norm_quantise", mutates_args=())
def _norm_quantise(
    x_MK: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: str, activation: str, eps: float, block: int,
    fmt: str, granularity: str, power_of_two: bool, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    operand = OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two)
    run = norm_quantise if x_MK.is_cuda else norm_quantise_ref
    q, saved = run(x_MK.contiguous(), norm, activation, operand, weight, bias, eps, block, keep)
    kept = (saved.y_MK, saved.mean, saved.rstd) if keep else (None, None, None)
    return q.data_RC, q.scale, *(x_MK.new_empty(0) if v is None else v for v in kept)


@_norm_quantise.register_fake
def _(x_MK, weight, bias, norm, activation, eps, block, fmt, granularity, power_of_two, keep):
    m, k = x_MK.shape
    format = OperandRecipe(fmt=fmt, granularity=granularity).format
    groups = {"none": None, "blocknorm": -(-k // block)}.get(norm, 1)
    statistic = lambda n: x_MK.new_empty((m, n), dtype=torch.float32) if keep and n else x_MK.new_empty(0)  # noqa: E731
    scale = x_MK.new_empty(scale_shape((m, k), granularity), dtype=torch.float32)
    y = torch.empty_like(x_MK, memory_format=torch.contiguous_format) if keep else x_MK.new_empty(0)
    return x_MK.new_empty((m, k), dtype=format.dtype), scale, y, statistic(1 if norm == "layernorm" else None), statistic(groups)


@torch.library.custom_op("loka::norm_backward", mutates_args=())
def _norm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    norm: str, activation: str, eps: float, block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    run = norm_backward if x_MK.is_cuda else norm_gradient
    saved = Saved(y_MK=x_MK, mean=mean if norm == "layernorm" else None, rstd=rstd if norm != "none" else None)
    found = run(dy_MK.contiguous(), x_MK.contiguous(), saved, norm, activation, weight, bias, eps, block)
    return tuple(x_MK.new_empty(0) if v is None else v for v in found)


@_norm_backward.register_fake
def _(dy_MK, x_MK, weight, bias, mean, rstd, norm, activation, eps, block):
    like = lambda v: x_MK.new_empty(0) if v is None else v.new_empty(v.shape, dtype=torch.float32)  # noqa: E731
    return torch.empty_like(x_MK, memory_format=torch.contiguous_format), like(weight), like(bias)


def norm_gradient(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, saved: Saved | None, norm: str, activation: str, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, block: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`norm_backward` on any device, in float64, by its formulas: inside an operator there is no autograd to differentiate the reference."""
    x, dy, k = x_MK.double(), dy_MK.double(), x_MK.shape[-1]
    block = block if norm == "blocknorm" else k
    mean = lambda v: torch.cat([b.mean(-1, keepdim=True).expand_as(b) for b in v.split(block, -1)], -1)  # noqa: E731
    centred = x - mean(x) if norm == "layernorm" else x
    r = torch.ones_like(x) if norm == "none" else torch.rsqrt(mean(centred.square()) + eps)
    n = centred * r
    t = n if weight is None else n * weight.double()
    t = t if bias is None else t + bias.double()
    dt = dy * _slope(t, activation)
    dn = dt if weight is None else dt * weight.double()
    dx = dn if norm == "none" else r * (dn - (mean(dn) if norm == "layernorm" else 0) - n * mean(dn * n))
    dw, db = (dt * n).sum(0), dt.sum(0)
    return dx.to(x_MK.dtype), None if weight is None else dw.float(), None if bias is None else db.float()


def _slope(t: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        s = torch.sigmoid(t)
        return s * (1 + t * (1 - s))
    return torch.ones_like(t) if activation == "identity" else torch.where(t <= -3, 0.0, torch.where(t >= 3, 1.0, t / 3 + 0.5))


def _features(node: fx.Node) -> int:
    return node.meta["example"].shape[-1]
