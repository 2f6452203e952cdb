"""Epilogues: for inference, a product that norms, activates and quantises its own output for the product behind it.

    edges(registry, plan)                        # {"over.3:linear": Edge(producer="over.0:linear", ...)}: what may be joined
    data, scale = joined_product(a, b, recipe, bias, edge.epilogue)

Two linear sites are joined where nothing but BlockNorm over 256 features, an activation, or both stand between them, and the second reads its
input in blocks of 1 x 128: a tile of the first product holds whole blocks of either kind. The norm's input is then never rounded to bf16 and never
written. Nothing is kept for backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.fp8.epilogue import ACTIVATIONS, FEATURES, Epilogue
from kernels.fp8.gemm import scaled_gemm, scaled_gemm_ref
from kernels.fp8.quantise import Quantised
from kernels.fp8.recipes import GemmRecipe, OperandRecipe, gemm
from kernels.fp8.scaling import scale_shape
from studies.loka.site import Plan
from studies.loka.sites.chains import chain, consumers
from studies.loka.sites.fuse import fusion_of
from studies.loka.sites.registry import Registry

__all__ = ["Edge", "edges", "joined_product"]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """`producer`'s product ends in `epilogue`."""

    producer: str
    epilogue: Epilogue


def edges(registry: Registry, plan: Plan) -> Mapping[str, Edge]:
    """By the site that reads FP8, for sites whose forward products are FP8 in `plan`."""
    at = {registry.products[name].node: name for name in plan.recipes if _able(registry, plan, name)}
    found = {}
    for node, name in at.items():
        operand = plan.recipe(name, "forward").a
        if operand.granularity != "block":
            continue
        x = registry.products[name].form.operands(registry.products[name].arguments)[0]
        steps = chain(x)
        if not steps or steps[0].source not in at:
            continue
        source, fusion = steps[0].source, fusion_of(steps)
        alone = consumers(source)[: len(steps)] == tuple(s.name for s in steps)
        fits = fusion.norm == "none" or (fusion.norm == "blocknorm" and fusion.block == FEATURES)
        if alone and fits and fusion.activation in ACTIVATIONS:
            eps = torch.finfo(source.meta["example"].dtype).eps if fusion.eps is None else fusion.eps
            epilogue = Epilogue(norm=fusion.norm, activation=fusion.activation, requantise=operand, eps=eps)
            found[name] = Edge(producer=at[source], epilogue=epilogue)
    return found


def _able(registry: Registry, plan: Plan, name: str) -> bool:
    """A linear site of rows [M, N] with a bias in the epilogue or none."""
    site, place = registry.site(name), registry.products[name]
    if not plan.recipe(name, "forward").is_fp8 or site.op != "linear" or site.batch != 1 or not place.form.keeps_rows or place.node.meta["example"].ndim != 2:
        return False
    bias = place.form.operands(place.arguments)[2]
    return bias is None or bias.meta["example"].ndim == 1


def joined_product(a: Quantised, b: Quantised, recipe: GemmRecipe, bias: torch.Tensor | None, epilogue: Epilogue) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [M, N], scale) of the product behind its epilogue."""
    to = epilogue.requantise
    return _joined(a.data_RC, a.scale, b.data_RC, b.scale, recipe.name, bias, epilogue.norm, epilogue.activation, epilogue.eps, to.fmt, to.granularity, to.power_of_two)


@torch.library.custom_op("loka::joined_product", mutates_args=())
def _joined(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, recipe: str, bias: torch.Tensor | None, norm: str, activation: str, eps: float,
    fmt: str, granularity: str, power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    how = gemm(recipe)
    epilogue = Epilogue(norm=norm, activation=activation, eps=eps, requantise=OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two))
    run = scaled_gemm if a.is_cuda else scaled_gemm_ref
    q = run(Quantised(a, a_scale, how.a), Quantised(b, b_scale, how.b), how, bias=bias, epilogue=epilogue)
    return q.data_RC, q.scale


@_joined.register_fake
def _(a, a_scale, b, b_scale, recipe, bias, norm, activation, eps, fmt, granularity, power_of_two):
    shape = (a.shape[0], b.shape[0])
    dtype = OperandRecipe(fmt=fmt, granularity=granularity).format.dtype
    return a.new_empty(shape, dtype=dtype), a.new_empty(scale_shape(shape, granularity), dtype=torch.float32)
