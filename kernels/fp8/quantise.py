"""Quantise: numbers to FP8 with a scale for the tensor, each row, each 128 of a row, or each 128 x 128.

    q = quantise_ref(torch.randn(4, 256), OperandRecipe(fmt="e4m3", granularity="row"))
    q.data_RC.dtype, q.scale.shape                     # torch.float8_e4m3fn, [4, 1]
    q.dequantise()                                     # float32 [4, 256], within 2^-4 of x in every element that is not tiny

R rows, C elements of a row, the axis that a product contracts; axes in front of them are a batch. The scale rule is kernels.fp8.scaling's,
and `scale` is the one to multiply with: x ~ data * scale. `transpose=True` quantises x^T: groups run along the columns of x.
No gradient: kernels.fp8.autograd has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8.formats import cast
from kernels.fp8.recipes import OperandRecipe
from kernels.fp8.scaling import amax_ref, expand_scale, scale_rule_ref, scale_shape

__all__ = ["Quantised", "quantise_ref"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Quantised:
    """An operand in FP8: data_RC [..., R, C] in the recipe's format, float32 `scale` of `scale_shape` (tensor [], row [..., R, 1], ...)."""

    data_RC: torch.Tensor
    scale: torch.Tensor
    operand: OperandRecipe

    def __post_init__(self) -> None:
        want = scale_shape(tuple(self.data_RC.shape), self.operand.granularity)
        if tuple(self.scale.shape) != want or self.data_RC.dtype != self.operand.format.dtype:
            raise ValueError(
                f"{self.operand} of {tuple(self.data_RC.shape)} has {self.operand.format.dtype} and scales {want}, "
                f"got {self.data_RC.dtype} and {tuple(self.scale.shape)}; make it with quantise or quantise_ref"
            )

    @property
    def device(self) -> torch.device:
        return self.data_RC.device

    def dequantise(self) -> torch.Tensor:
        """float32 [..., R, C]: data times scale, one rounding each."""
        return self.data_RC.float() * expand_scale(self.scale, tuple(self.data_RC.shape), self.operand.granularity)


def _check(x_RC: torch.Tensor, operand: OperandRecipe) -> None:
    if x_RC.ndim < 2:
        raise ValueError(f"an operand is [..., R, C], got {tuple(x_RC.shape)=}; add the missing axis")
    if x_RC.dtype not in _FLOATS:
        raise ValueError(f"an operand is bfloat16, float16 or float32, got {x_RC.dtype}; convert it first")
    if not isinstance(operand, OperandRecipe):
        raise ValueError(f"an operand's recipe is an OperandRecipe, got {operand!r}; products in bf16 or tf32 have none: multiply without quantising")


def quantise_ref(x_RC: torch.Tensor, operand: OperandRecipe, *, transpose: bool = False) -> Quantised:
    """x [..., R, C] (bf16, fp16, fp32; any strides; any device) in FP8 by the rule, in float32 operations of torch.

    transpose: quantise x^T instead, [..., C, R]. Raises ValueError for fewer than two axes and for another dtype.
    """
    _check(x_RC, operand)
    x = (x_RC.mT if transpose else x_RC).detach().float().contiguous()
    scale, r = scale_rule_ref(amax_ref(x, operand.granularity), operand.format, operand.power_of_two)
    return Quantised(cast(x * expand_scale(r, tuple(x.shape), operand.granularity), operand.format), scale, operand)
