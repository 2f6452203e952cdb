"""RMSNorm and SwiGLU whose result is sliced where it arises: what a linear of the integer family reads, without a launch that slices it.

    >>> import torch
    >>> from kernels.exact.sliced import rmsnorm_sliced_ref
    >>> x = rmsnorm_sliced_ref(torch.ones(1, 64), torch.ones(64), eps=0.0)     # all ones, |1| < 2^1: 1 = 64 * 2^16 * 2^(1 - 23)
    >>> x.planes[:, 0, 0].tolist(), x.ex_R.tolist()
    ([64, 0, 0], [1])

    x = rmsnorm_sliced(h_MK, w_K)                     # on a GPU; `linear_integer` takes x in place of x_MK, as many linears as read it
    q_MN, gate_MN = linear_integer(x, w_q), linear_integer(x, w_gate)

By definition `op_sliced(...)` is `sliced_ref(op(...))`: the result is rounded to `out_dtype` as ever (default: the input's) and that value is
sliced, so a linear gives the same bits by either way. A row lies in one program, which keeps it in registers from its first read to its
digits. Legend: M rows, K elements of a row. It slices no row that is cut over programs or GPUs: its exponent would not be known.
"""

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.activations import check_floats, check_pair, gated_f32, swiglu, swiglu_ref
from kernels.exact.norm import LANES, add_rmsnorm_ref, check_delta, check_norm, normalised_row, options, rmsnorm_ref
from kernels.exact.slices import Sliced, empty_sliced, slice_rows, sliced_ref, store_sliced

__all__ = ["add_rmsnorm_sliced", "add_rmsnorm_sliced_ref", "rmsnorm_sliced", "rmsnorm_sliced_ref", "swiglu_sliced", "swiglu_sliced_ref"]

_LANES = tl.constexpr(LANES)
_LONGEST_GATED = 16384  # elements of a row that a program of SwiGLU keeps: 4 blocks of 4096
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- references ----------------------------------------------------------------------------------------------------------------


def rmsnorm_sliced_ref(x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> Sliced:
    """`rmsnorm_ref`, then `sliced_ref`."""
    return sliced_ref(rmsnorm_ref(x_MK, w_K, eps=eps, out_dtype=out_dtype))


def add_rmsnorm_sliced_ref(
    h_MK: torch.Tensor, delta_MK: torch.Tensor, w_K: torch.Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, Sliced]:
    """`add_rmsnorm_ref`, its norm through `sliced_ref`."""
    h_new, y_MK = add_rmsnorm_ref(h_MK, delta_MK, w_K, eps, out_dtype)
    return h_new, sliced_ref(y_MK)


def swiglu_sliced_ref(gate_MK: torch.Tensor, up_MK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> Sliced:
    """`swiglu_ref` of two matrices, then `sliced_ref`."""
    return sliced_ref(swiglu_ref(gate_MK, up_MK, out_dtype=out_dtype))


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def rmsnorm_sliced_kernel(
    x_ptr, w_ptr, planes_ptr, ex_ptr, K, KP, plane, count, eps, STEPS: tl.constexpr, DTYPE: tl.constexpr, delta_ptr=None, h_ptr=None
):  # fmt: skip
    """One program a row; `plane` elements from one plane of digits to the next. Must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64)
    ys = normalised_row(x_ptr, w_ptr, row * K, K, count, eps, STEPS, delta_ptr, h_ptr)
    store_sliced(ys, planes_ptr, ex_ptr, row, K, KP, plane, STEPS, _LANES, DTYPE)


@triton.jit
def swiglu_sliced_kernel(
    gate_ptr, up_ptr, planes_ptr, ex_ptr, K, KP, plane, gate_stride, up_stride, STEPS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """One program a row of gate and of up, which lie a stride apart. Must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64)
    gates = ()
    ups = ()
    ys = ()
    for s in tl.static_range(STEPS):
        k = s * BLOCK + tl.arange(0, BLOCK)
        gates = gates + (tl.load(gate_ptr + row * gate_stride + k, mask=k < K, other=0.0).to(tl.float32),)
        ups = ups + (tl.load(up_ptr + row * up_stride + k, mask=k < K, other=0.0).to(tl.float32),)
    for s in tl.static_range(STEPS):
        ys = ys + (gated_f32(gates[s], gates[s]) * ups[s],)
    store_sliced(ys, planes_ptr, ex_ptr, row, K, KP, plane, STEPS, BLOCK, DTYPE)


def _launch(x_MK: torch.Tensor, w_K: torch.Tensor, eps: float, dtype: torch.dtype, num_warps: int | None, **more: torch.Tensor) -> Sliced:
    m, k = x_MK.shape
    made = empty_sliced(m, k, x_MK.device)
    if m:
        rmsnorm_sliced_kernel[(m,)](
            x_MK, w_K.contiguous(), made.planes, made.ex_R, k, made.planes.shape[2], made.planes.stride(0), float(k), eps, DTYPE=_TYPES[dtype],
            **options(k, num_warps), **more,
        )  # fmt: skip
    return made


@on_gpu("rmsnorm_sliced")
def rmsnorm_sliced(
    x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None, num_warps: int | None = None
) -> Sliced:
    """`rmsnorm_sliced_ref` on a GPU in one launch; any `num_warps` gives the same bits."""
    check_norm(x_MK, w_K, eps, out_dtype)
    return _launch(x_MK.contiguous(), w_K, eps, out_dtype or x_MK.dtype, num_warps)


@on_gpu("add_rmsnorm_sliced")
def add_rmsnorm_sliced(
    h_MK: torch.Tensor, delta_MK: torch.Tensor, w_K: torch.Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None,
    *, num_warps: int | None = None,
) -> tuple[torch.Tensor, Sliced]:  # fmt: skip
    """`add_rmsnorm_sliced_ref` on a GPU in one launch -> (h_new, sliced norm); any `num_warps` gives the same bits."""
    check_norm(h_MK, w_K, eps, out_dtype, (delta_MK,))
    check_delta(h_MK, delta_MK)
    h_MK = h_MK.contiguous()
    h_new = torch.empty_like(h_MK)
    return h_new, _launch(h_MK, w_K, eps, out_dtype or h_MK.dtype, num_warps, delta_ptr=delta_MK.contiguous(), h_ptr=h_new)


@on_gpu("swiglu_sliced")
def swiglu_sliced(gate_MK: torch.Tensor, up_MK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> Sliced:
    """`swiglu_sliced_ref` on a GPU: one launch up to K = 16,384, two beyond. The halves of one [M, 2 K] tensor are read where they lie."""
    check_pair(gate_MK, up_MK)
    check_floats(gate_MK, out_dtype)
    if gate_MK.ndim != 2:
        raise ValueError(f"rows to slice are a matrix; got {tuple(gate_MK.shape)=}; flatten the tokens")
    m, k = gate_MK.shape
    if k > _LONGEST_GATED:
        planes, ex_M = slice_rows(swiglu(gate_MK, up_MK, out_dtype=out_dtype))
        return Sliced(planes=planes, ex_R=ex_M, k=k)
    gate_MK, up_MK = (part if part.stride(1) == 1 else part.contiguous() for part in (gate_MK, up_MK))
    made = empty_sliced(m, k, gate_MK.device)
    if m:
        kp = made.planes.shape[2]
        block = min(triton.next_power_of_2(max(kp, 128)), 4096)  # 4 elements a thread: a row has one SM, so all of its warps
        swiglu_sliced_kernel[(m,)](
            gate_MK, up_MK, made.planes, made.ex_R, k, kp, made.planes.stride(0), gate_MK.stride(0), up_MK.stride(0), STEPS=max(triton.cdiv(kp, block), 1),
            BLOCK=block, DTYPE=_TYPES[out_dtype or gate_MK.dtype], num_warps=block // 128, enable_fp_fusion=False,
        )  # fmt: skip
    return made
