"""torch's own scaled product (cuBLASLt on Hopper) on operands as kernels.fp8 quantises them: padding and scale layouts.

    out_RS = cublas_scaled_mm(a, b, recipe, torch.bfloat16, None)

It asks for C and S divisible by 16, b column-major, and in blocks for scales with the outer axis contiguous: [R, ceil(C/128)] with strides
(1, R), and 128 x 128 ones as [ceil(C/128) rounded up to 4, ceil(S/128)] with strides (1, that) (torch's ScaledBlas.cpp, 2.10 and later). What
does not divide is padded with zeros by a copy, which is part of the time: K = 13 of DLRM-v2 becomes 16. 1 x 128 blocks pad R to 16, too.
`fast_accum` is handed on; in blocks partial sums leave the accumulator anyway and it is off. `why_not` says what torch cannot run.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.fp8.quantise import Quantised
from kernels.fp8.recipes import GemmRecipe

__all__ = ["ALIGN", "cublas_operands", "cublas_scaled_mm", "why_not"]

ALIGN = 16


def why_not(recipe: GemmRecipe, batch: int, out_dtype: torch.dtype = torch.bfloat16) -> str:
    """Why torch cannot run this product on sm_90, or "". In words for a table."""
    kinds = (recipe.a.granularity, recipe.b.granularity)
    if batch != 1:
        return f"torch's scaled product has two axes, not a batch of {batch}"
    if kinds not in (("tensor", "tensor"), ("row", "row"), ("block", "square"), ("square", "block"), ("block", "block")):
        return f"torch's scaled product has no recipe {kinds[0]} by {kinds[1]}"
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"torch's scaled product gives bf16, fp16 or fp32, not {out_dtype}"
    return ""


def _up(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


def _pad(x_RC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    r, c = x_RC.shape
    if (r, c) == (rows, columns):
        return x_RC.contiguous()
    return functional.pad(x_RC.view(torch.uint8), (0, columns - c, 0, rows - r)).view(x_RC.dtype)  # 0 is +0 in both formats


def _scale(q: Quantised, rows: int) -> torch.Tensor:
    """The operand's scales as [rows, ...], padded with 1."""
    scale, kind = q.scale, q.operand.granularity
    if kind == "tensor":
        return scale
    if kind == "square":
        blocks = scale.shape[1]
        return _outer_major(functional.pad(scale, (0, _up(blocks, 4) - blocks), value=1.0))  # [blocks up to 4, rows / 128]
    scale = functional.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)
    return scale if kind == "row" else _outer_major(scale.t())  # [rows, blocks]


def _outer_major(scale: torch.Tensor) -> torch.Tensor:
    """The transpose, with strides (1, its first axis) also where an axis is 1 long: torch compares strides, and leaves those as they come."""
    scale = scale.contiguous()
    return scale.as_strided(scale.shape, (scale.shape[1], 1)).t()


def cublas_operands(a: Quantised, b: Quantised) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a [R', C'] row-major, b [C', S'] column-major, their scales) in the layouts above."""
    r, s, c = a.data_RC.shape[0], _up(b.data_RC.shape[0]), _up(a.data_RC.shape[1])
    r = _up(r) if "block" in (a.operand.granularity, b.operand.granularity) else r
    sb = _scale(b, s)
    return _pad(a.data_RC, r, c), _pad(b.data_RC, s, c).t(), _scale(a, r), sb.t() if b.operand.granularity == "row" else sb


def cublas_scaled_mm(a: Quantised, b: Quantised, recipe: GemmRecipe, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """out [R, S]. The caller has asked `why_not`. A bias that torch cannot add in its epilogue (float32 output) is added behind it."""
    r, s = a.data_RC.shape[0], b.data_RC.shape[0]
    a_RC, b_CS, sa, sb = cublas_operands(a, b)
    inside = None
    if bias is not None and out_dtype != torch.float32:
        inside = functional.pad(bias.to(out_dtype), (0, b_CS.shape[1] - s))
    if a.operand.granularity in ("tensor", "row"):
        out = torch._scaled_mm(a_RC, b_CS, sa, sb, bias=inside, out_dtype=out_dtype, use_fast_accum=recipe.fast_accum)
    else:
        kind = {"block": functional.ScalingType.BlockWise1x128, "square": functional.ScalingType.BlockWise128x128}
        ka, kb = kind[a.operand.granularity], kind[b.operand.granularity]
        out = functional.scaled_mm(a_RC, b_CS, sa, ka, sb, kb, bias=inside, output_dtype=out_dtype)
    out = out[:r, :s].contiguous() if out.shape != (r, s) else out
    return out + bias.float() if bias is not None and inside is None else out
