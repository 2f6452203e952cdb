"""Scaled products out_RS = a_RC b_SC^T of FP8 operands: a Triton kernel for Hopper, and torch's cuBLASLt beside it.

    a, b = quantise(x_MK, recipe.a), quantise(w_NK, recipe.b)
    y_MN = scaled_gemm(a, b, recipe)                                                   # bf16
    z = scaled_gemm(a, b, recipe, epilogue=Epilogue(norm="blocknorm", activation="hardswish", requantise=BY_BLOCK))      # a Quantised

Math: out = sum over c of (a scale_a)(b scale_b), + bias, then the epilogue, then one rounding. `scaled_gemm_ref` is that in float64.
Axes in front of R, C are a batch. Hopper's fp8 tensor core adds with about 14 bits (pytorch#147971), so hardware is compared by signal to
noise: at least `MIN_SQNR_DB` at C <= 4096 (derived in the tests). A recipe with fast_accum adds so along the whole of C; without, every
128 products leave for a float32 register. Inner scales (block, square) do that always.

Backends: "triton" (everything above; C padded by a copy where 16 does not divide it), "torch" (two axes, no epilogue; kernels.fp8.cublas).
`unsupported` says why one cannot. Floors on an H200: FLOPs 2 R S C at 1979 TFLOP/s (datasheet), bytes R C + S C + 2 R S at 4.19 TB/s.
No gradient: kernels.fp8.autograd has it, and an epilogue, which keeps nothing for backward, is for inference.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.device import on_gpu
from kernels.fp8._gemm_kernel import gemm_kernel, join_kernel
from kernels.fp8.cublas import ALIGN, cublas_scaled_mm, why_not
from kernels.fp8.emulate import multiply_ref
from kernels.fp8.epilogue import FEATURES, Epilogue, activate_ref, normalise_ref
from kernels.fp8.formats import E4M3
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import GemmRecipe
from kernels.fp8.scaling import scale_shape
from kernels.fp8.schedule import H200_SMS, STEP, GemmSchedule, c_each, schedules

__all__ = ["BACKENDS", "MIN_SQNR_DB", "MOST_BATCH", "Sizes", "kind_of", "scaled_gemm", "scaled_gemm_ref", "unsupported"]

BACKENDS = ("triton", "torch")
MIN_SQNR_DB = 45.0  # of hardware against float64, C <= 4096
MOST_BATCH = 65535  # CUDA's limit of a grid's third axis
_OUTER, _INNER = ("tensor", "row"), ("block", "square")
_OUT = (torch.bfloat16, torch.float16, torch.float32)


class Sizes(Protocol):
    """What `unsupported` asks of a product; studies.loka.site.Gemm is one."""

    batch: int
    r: int
    s: int
    c: int


def unsupported(recipe: GemmRecipe, gemm: Sizes, device: torch.device | str, *, backend: str = "triton") -> str:
    """Why `backend` cannot run this product on this device, in words; "" where it can. bf16, tf32 and fp32 products run everywhere."""
    if backend not in BACKENDS:
        raise ValueError(f"a backend is one of {BACKENDS}, got {backend!r}")
    if not recipe.is_fp8:
        return ""
    device = torch.device(device)
    if device.type != "cuda":
        return f"fp8 products run on a GPU, not on {device}; kernels.fp8.emulate has the same numbers"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"these fp8 kernels are for compute capability 9.0 (H100, H200), this is {capability[0]}.{capability[1]}"
    return unsupported_sizes(recipe, gemm, backend)


def unsupported_sizes(recipe: GemmRecipe, gemm: Sizes, backend: str) -> str:
    """The part of `unsupported` that no device decides."""
    if min(gemm.batch, gemm.r, gemm.s, gemm.c) < 1:
        return f"a product of {gemm.batch} x {gemm.r} x {gemm.s} x {gemm.c} has nothing to multiply"
    if max(gemm.batch * gemm.r, gemm.batch * gemm.s, gemm.c) >= 2**31:
        return "the copy engine counts rows in 32 bits"
    if backend == "triton" and gemm.batch > MOST_BATCH:
        return f"a grid's third axis, the batch, is at most {MOST_BATCH}, not {gemm.batch}"
    kinds = (recipe.a.granularity, recipe.b.granularity)
    if len({k in _INNER for k in kinds}) == 2:
        return f"scales are outside of the sum (tensor, row) for both operands or inside (block, square) for both, not {kinds[0]} by {kinds[1]}"
    return why_not(recipe, gemm.batch) if backend == "torch" else ""


def kind_of(recipe: GemmRecipe) -> str:
    """The kind of kernel (kernels.fp8.schedule) that a recipe needs."""
    kinds = (recipe.a.granularity, recipe.b.granularity)
    if kinds[0] in _INNER:
        return "square" if "square" in kinds else "block"
    return "fast" if recipe.fast_accum else "precise"


# ---- checks and reference ------------------------------------------------------------------------------------------------------


def _check(a: Quantised, b: Quantised, recipe: GemmRecipe, out_dtype: torch.dtype, bias: torch.Tensor | None, epilogue: Epilogue | None) -> None:
    if not recipe.is_fp8 or (a.operand, b.operand) != (recipe.a, recipe.b):
        raise ValueError(f"operands are quantised as the recipe says, got {a.operand} and {b.operand} for {recipe}; quantise with recipe.a and recipe.b")
    a_RC, b_SC = a.data_RC, b.data_RC
    if a_RC.shape[-1] != b_SC.shape[-1] or a_RC.shape[:-2] != b_SC.shape[:-2] or a_RC.shape[-1] == 0:
        raise ValueError(f"operands are a [..., R, C] and b [..., S, C] with one C > 0, got {tuple(a_RC.shape)} and {tuple(b_SC.shape)}; b is not transposed")
    if out_dtype not in _OUT:
        raise ValueError(f"a product is written in bf16, fp16 or fp32, got {out_dtype}; for FP8 pass an Epilogue with requantise")
    s = b_SC.shape[-2]
    if bias is not None and bias.shape != (s,):
        raise ValueError(f"a bias is [S], got {tuple(bias.shape)} for S = {s}")
    if epilogue and epilogue.requantise and epilogue.requantise.granularity == "row" and s > FEATURES:
        raise ValueError(f"an epilogue requantises by row up to {FEATURES} features, which one tile holds, got S = {s}; requantise by block")


def scaled_gemm_ref(
    a: Quantised, b: Quantised, recipe: GemmRecipe, *, out_dtype: torch.dtype = torch.bfloat16, bias: torch.Tensor | None = None, epilogue: Epilogue | None = None
) -> torch.Tensor | Quantised:
    """`scaled_gemm` in float64 on any device: exact products, sums to 2^-53, one rounding (to float32 in front of requantising)."""
    _check(a, b, recipe, out_dtype, bias, epilogue)
    out = multiply_ref(a, b, recipe)
    out = out if bias is None else out + bias.double()
    if epilogue:
        out = activate_ref(normalise_ref(out, epilogue.norm, eps=epilogue.eps), epilogue.activation)
        if epilogue.requantise:
            return quantise_ref(out.float(), epilogue.requantise)
    return out.to(out_dtype)


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


def _operand(q: Quantised) -> torch.Tensor:
    """[rows of all matrices, C up to a multiple of 16], at an address that the copy engine takes."""
    x = q.data_RC.contiguous().view(torch.uint8)
    x = x.view(-1, x.shape[-1])
    if short := -x.shape[-1] % ALIGN:
        x = torch.nn.functional.pad(x, (0, short))
    if x.data_ptr() % ALIGN:
        x = x.clone()
    return x.view(q.data_RC.dtype)


def _choose(recipe: GemmRecipe, batch: int, r: int, s: int, c: int, epilogue: Epilogue | None, device: torch.device) -> GemmSchedule:
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS
    whole = epilogue is not None and (epilogue.norm != "none" or epilogue.requantise is not None)
    found = schedules(r, s, c, batch=batch, kind=kind_of(recipe), whole_blocks=whole, sms=sms)
    return next(plan for plan in found if plan.split == 1 or epilogue is None)


@on_gpu("scaled_gemm")
def scaled_gemm(
    a: Quantised, b: Quantised, recipe: GemmRecipe, *, out_dtype: torch.dtype = torch.bfloat16, bias: torch.Tensor | None = None,
    epilogue: Epilogue | None = None, backend: str = "triton", schedule: GemmSchedule | None = None,
) -> torch.Tensor | Quantised:  # fmt: skip
    """a [..., R, C] times b [..., S, C] -> [..., R, S] in `out_dtype` (bf16, fp16, fp32), or a Quantised where the epilogue requantises.

    bias: [S], added in float32. backend: "triton" or "torch". Raises ValueError for operands that are not the recipe's, shapes that do not
    fit, and what `unsupported` names. No host synchronisation; equal calls give equal bits.
    """
    _check(a, b, recipe, out_dtype, bias, epilogue)
    *lead, r, c = a.data_RC.shape
    batch, s = torch.Size(lead).numel(), b.data_RC.shape[-2]
    if min(batch, r, s) == 0:
        return _empty(a, (*lead, r, s), out_dtype, epilogue)
    if why := unsupported_sizes(recipe, _Sizes(batch, r, s, c), backend):
        raise ValueError(f"{backend} cannot run this product: {why}")
    if backend == "torch":
        if epilogue:
            raise ValueError(f"torch's product has no epilogue, got {epilogue}; use backend='triton'")
        a2, b2 = (Quantised(q.data_RC.reshape(q.data_RC.shape[-2:]), q.scale.reshape(q.scale.shape[-2:]), q.operand) for q in (a, b))
        return cublas_scaled_mm(a2, b2, recipe, out_dtype, bias).view(*lead, r, s)
    plan = schedule or _choose(recipe, batch, r, s, c, epilogue, a.device)
    if epilogue and plan.split > 1:
        raise ValueError(f"a split product has no epilogue, its tiles are not whole, got {plan}; use split=1")
    return _launch(a, b, recipe, (*lead, r, s), batch, c, out_dtype, bias, epilogue, plan)


class _Sizes:
    def __init__(self, batch: int, r: int, s: int, c: int) -> None:
        self.batch, self.r, self.s, self.c = batch, r, s, c


def _empty(a: Quantised, shape: tuple[int, ...], out_dtype: torch.dtype, epilogue: Epilogue | None) -> torch.Tensor | Quantised:
    """Outputs to be filled (or with no elements)."""
    if epilogue is None or epilogue.requantise is None:
        return torch.empty(shape, dtype=out_dtype, device=a.device)
    to = epilogue.requantise
    scale = torch.empty(scale_shape(shape, to.granularity), dtype=torch.float32, device=a.device)
    return Quantised(torch.empty(shape, dtype=to.format.dtype, device=a.device), scale, to)


def _launch(
    a: Quantised, b: Quantised, recipe: GemmRecipe, shape: tuple[int, ...], batch: int, c: int, out_dtype: torch.dtype, bias: torch.Tensor | None,
    epilogue: Epilogue | None, plan: GemmSchedule,
) -> torch.Tensor | Quantised:  # fmt: skip
    r, s = shape[-2:]
    out, to = _empty(a, shape, out_dtype, epilogue), epilogue.requantise if epilogue else None
    written, scale = (out.data_RC.view(torch.uint8), out.scale) if to else (out, None)
    target = torch.empty((plan.split, batch, r, s), dtype=torch.float32, device=a.device) if plan.split > 1 else written
    sa, sb = a.scale.contiguous(), b.scale.contiguous()
    kinds = dict(A_SCALE=recipe.a.granularity, B_SCALE=recipe.b.granularity)
    tiles = triton.cdiv(r, plan.block_r) * triton.cdiv(s, plan.block_s)
    gemm_kernel[(tiles, plan.split, batch)](
        TensorDescriptor.from_tensor(_operand(a), [plan.block_r, STEP]), TensorDescriptor.from_tensor(_operand(b), [plan.block_s, STEP]),
        sa, sb, bias, target, scale, r, s, c, c_each(c, plan.split), epilogue.eps if epilogue else 0.0,
        **kinds, PRECISE=not recipe.fast_accum, SPLIT=plan.split > 1,
        NORM=epilogue.norm if epilogue else "none", ACTIVATION=epilogue.activation if epilogue else "identity",
        GRANULARITY=to.granularity if to else "", FP8=tl.float8e4nv if to is None or to.format is E4M3 else tl.float8e5,
        MAX=to.format.max if to else 448.0, POWER_OF_TWO=to.power_of_two if to else False,
        BLOCK_R=plan.block_r, BLOCK_S=plan.block_s, GROUP=plan.group, STAGES=plan.stages, num_warps=plan.num_warps,
    )  # fmt: skip
    if plan.split > 1:
        grid = (triton.cdiv(r, 8), triton.cdiv(s, 256), batch)
        join_kernel[grid](target, sa, sb, bias, written, plan.split, r, s, **kinds, ROWS=8, COLUMNS=256)
    return out
