"""RMSNorm (alone, or behind a residual addition) and LayerNorm from IEEE-754 operations only, with an explicit order for every sum.

    >>> import torch
    >>> from kernels.exact.norm import rmsnorm_ref
    >>> rmsnorm_ref(torch.ones(1, 64), torch.ones(64), eps=0.0)[0, 0].item()
    1.0

Legend: M rows, K elements of a row. The order of a row's sum, a function of K alone: lane j of LANES = 1024 is one chain from +0 over
k = j, j + 1024, ... ascending; the 1024 lanes are added in a balanced tree of neighbours (2i with 2i+1, ten levels); missing elements
count as +0. A chain over squares is one FMA a step. Each operation below is rounded to float32, the result once more to `out_dtype`.

    rmsnorm(x):        y = (x r) w, r = div_rn(1, sqrt_rn(div_rn(sum of x^2, K) + eps))
    add_rmsnorm(h, d): h' = h + d, y = rmsnorm(h'), in one launch
    layernorm(x):      c = x - div_rn(sum of x, K), then y = (c r) w (+ b) with the r of c: two passes, no E[x^2] - E[x]^2

It differs from the order of the linear layers on purpose: a row has one sum, so its lanes must be short to be fast. A row with a NaN or
an infinity becomes NaN where IEEE arithmetic says so. No gradient.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.ieee import assert_subnormals_kept, fma_f32

__all__ = [
    "LANES", "add_rmsnorm", "add_rmsnorm_ref", "lane_sum_ref", "layernorm", "layernorm_ref", "rmsnorm", "rmsnorm_ref", "sum_of_squares_ref", "tree_sum",
]  # fmt: skip

LANES = 1024
_LANES = tl.constexpr(LANES)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_norm(x_MK: torch.Tensor, w_K: torch.Tensor, eps: float, out_dtype: torch.dtype | None, others: tuple[torch.Tensor, ...] = ()) -> None:
    if x_MK.ndim != 2 or w_K.shape != x_MK.shape[1:] or x_MK.shape[1] == 0:
        raise ValueError(f"need x_MK and w_K with one K > 0; got {tuple(x_MK.shape)=} {tuple(w_K.shape)=}; flatten the tokens")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is added to a mean square: it cannot be negative and must be finite; got {eps=}; use 1e-6 or 0")
    if any(part.dtype not in _FLOATS for part in (x_MK, w_K, *others)) or (out_dtype or x_MK.dtype) not in _FLOATS:
        raise ValueError(f"operands and results are float32, bfloat16 or float16; got {x_MK.dtype=} {w_K.dtype=} {out_dtype=}; convert them first")


def check_delta(h_MK: torch.Tensor, delta_MK: torch.Tensor) -> None:
    if h_MK.shape != delta_MK.shape:
        raise ValueError(f"h and delta have one shape; got {tuple(h_MK.shape)=} {tuple(delta_MK.shape)=}; broadcast them yourself")


def _check_bias(w_K: torch.Tensor, b_K: torch.Tensor | None) -> None:
    if b_K is not None and b_K.shape != w_K.shape:
        raise ValueError(f"the bias has the weight's shape; got {tuple(b_K.shape)=} {tuple(w_K.shape)=}; pass None for no bias")


# ---- references ----------------------------------------------------------------------------------------------------------------


def _lanes(x_MK: torch.Tensor) -> torch.Tensor:
    m, k = x_MK.shape
    steps = -(-k // LANES)
    return torch.nn.functional.pad(x_MK.float(), (0, steps * LANES - k)).view(m, steps, LANES)


def _tree(acc_ML: torch.Tensor) -> torch.Tensor:
    while acc_ML.shape[1] > 1:
        acc_ML = acc_ML[:, 0::2] + acc_ML[:, 1::2]
    return acc_ML[:, 0]


def lane_sum_ref(x_MK: torch.Tensor) -> torch.Tensor:
    """Sum of each row in the order above -> [M] float32."""
    x_MSL = _lanes(x_MK)
    acc = torch.zeros((len(x_MSL), LANES), dtype=torch.float32, device="cpu")
    for s in range(x_MSL.shape[1]):
        acc = acc + x_MSL[:, s]
    return _tree(acc)


def sum_of_squares_ref(x_MK: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row in the order above -> [M] float32."""
    x_MSL = _lanes(x_MK)
    acc = torch.zeros((len(x_MSL), LANES), dtype=torch.float32, device="cpu")
    for s in range(x_MSL.shape[1]):
        acc = fma_f32(x_MSL[:, s], x_MSL[:, s], acc)
    return _tree(acc)


def _scaled(x: torch.Tensor, w_K: torch.Tensor, eps: float) -> torch.Tensor:
    """(x r) w in float32."""
    mean = sum_of_squares_ref(x) / torch.tensor(float(x.shape[1]), dtype=torch.float32, device="cpu")
    # correctly rounded by IEEE-754: numpy's sqrt, and division by a tensor, are the hardware's instructions
    root = torch.from_numpy(np.sqrt((mean + torch.tensor(eps, dtype=torch.float32, device="cpu")).numpy()))
    r = torch.ones_like(root) / root
    return (x * r[:, None]) * w_K.detach().cpu().float()


def rmsnorm_ref(x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Exact oracle on the CPU. x, w: bf16, fp16 or fp32; `eps` is rounded to float32; result in `out_dtype` (default x's).

    Measured: 2.9 ulp against float64 at K = 3000 (float32 output).
    """
    check_norm(x_MK, w_K, eps, out_dtype)
    assert_subnormals_kept()
    return _scaled(x_MK.detach().cpu().float(), w_K, eps).to(out_dtype or x_MK.dtype)


def add_rmsnorm_ref(
    h_MK: torch.Tensor, delta_MK: torch.Tensor, w_K: torch.Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta in h's dtype, its rmsnorm in `out_dtype`, default h's) on the CPU. The norm reads the rounded sum."""
    check_norm(h_MK, w_K, eps, out_dtype, (delta_MK,))
    check_delta(h_MK, delta_MK)
    assert_subnormals_kept()
    h_new = (h_MK.detach().cpu().float() + delta_MK.detach().cpu().float()).to(h_MK.dtype)
    return h_new, rmsnorm_ref(h_new, w_K, eps=eps, out_dtype=out_dtype)


def layernorm_ref(
    x_MK: torch.Tensor, w_K: torch.Tensor, b_K: torch.Tensor | None = None, *, eps: float = 1e-5, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Exact oracle on the CPU: mean, then variance of the differences, then weight and bias, each rounded.

    Error: the mean's, at most (ceil(K / 1024) + 11) 2^-24 mean|x|, times r w, beside the relative one of rmsnorm: large means cost digits.
    """
    check_norm(x_MK, w_K, eps, out_dtype, () if b_K is None else (b_K,))
    _check_bias(w_K, b_K)
    assert_subnormals_kept()
    x = x_MK.detach().cpu().float()
    y = _scaled(x - (lane_sum_ref(x) / torch.tensor(float(x.shape[1]), dtype=torch.float32, device="cpu"))[:, None], w_K, eps)
    return (y if b_K is None else y + b_K.detach().cpu().float()).to(out_dtype or x_MK.dtype)


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def tree_sum(v, WIDTH: tl.constexpr):
    """Balanced tree of neighbours over a power-of-two vector: explicit, because the order of `tl.sum` depends on num_warps."""
    if WIDTH == 1:
        total = v
    else:
        left, right = tl.split(tl.reshape(v, (WIDTH // 2, 2)))
        total = tree_sum(left + right, WIDTH // 2)
    return total


@triton.jit
def reciprocal_root(acc, count, eps):
    """r from the lanes of a sum of squares, as [1]."""
    total = tl.reshape(tree_sum(acc, _LANES), (1,))
    return tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(tl.div_rn(total, tl.full((1,), count, tl.float32)) + eps))


@triton.jit
def normalised_row(x_ptr, w_ptr, row, K, count, eps, STEPS: tl.constexpr, delta_ptr, h_ptr):
    """(x r) w of the row that starts at element `row`, in float32: STEPS blocks of LANES elements, read once into registers.

    With delta_ptr, x + delta, rounded to h's type, is stored to h_ptr and takes the place of x. `count` is K as float32.
    """
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((_LANES,), tl.float32)
    xs = ()
    ws = ()
    ys = ()
    for s in tl.static_range(STEPS):
        k = s * _LANES + lane
        x = tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32)
        if delta_ptr is not None:
            h = (x + tl.load(delta_ptr + row + k, mask=k < K, other=0.0).to(tl.float32)).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row + k, h, mask=k < K)
            x = h.to(tl.float32)
        xs = xs + (x,)
        ws = ws + (tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32),)
    for s in tl.static_range(STEPS):
        acc = tl.fma(xs[s], xs[s], acc)
    r = reciprocal_root(acc, count, eps)
    for s in tl.static_range(STEPS):
        ys = ys + ((xs[s] * r) * ws[s],)
    return ys


@triton.jit
def rmsnorm_kernel(x_ptr, w_ptr, y_ptr, K, count, eps, STEPS: tl.constexpr, delta_ptr=None, h_ptr=None):
    """One program a row, see `normalised_row`; must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64) * K
    ys = normalised_row(x_ptr, w_ptr, row, K, count, eps, STEPS, delta_ptr, h_ptr)
    for s in tl.static_range(STEPS):
        k = s * _LANES + tl.arange(0, _LANES)
        tl.store(y_ptr + row + k, ys[s].to(y_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def layernorm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, K, count, eps, STEPS: tl.constexpr):
    """One program a row, read once into registers; b_ptr may be None. Must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64) * K
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((_LANES,), tl.float32)
    xs = ()
    for s in tl.static_range(STEPS):
        xs = xs + (tl.load(x_ptr + row + s * _LANES + lane, mask=s * _LANES + lane < K, other=0.0).to(tl.float32),)
    for s in tl.static_range(STEPS):
        acc = acc + xs[s]
    mean = tl.div_rn(tl.reshape(tree_sum(acc, _LANES), (1,)), tl.full((1,), count, tl.float32))
    acc = tl.zeros((_LANES,), tl.float32)
    for s in tl.static_range(STEPS):
        c = tl.where(s * _LANES + lane < K, xs[s] - mean, 0.0)  # a missing element counts as +0, not as -mean
        acc = tl.fma(c, c, acc)
    r = reciprocal_root(acc, count, eps)
    for s in tl.static_range(STEPS):
        k = s * _LANES + lane
        y = ((xs[s] - mean) * r) * tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y = y + tl.load(b_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + k, y.to(y_ptr.dtype.element_ty), mask=k < K)


def options(k: int, num_warps: int | None) -> dict:
    """More warps for longer rows, which are kept in registers: 64 of a thread's up to K = 8,192 (4 warps) and 32,768 (16)."""
    steps = triton.cdiv(k, LANES)
    return dict(STEPS=steps, num_warps=num_warps or (4 if steps <= 8 else 8 if steps <= 16 else 16), enable_fp_fusion=False)


@on_gpu("rmsnorm")
def rmsnorm(
    x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None, num_warps: int | None = None
) -> torch.Tensor:
    """`rmsnorm_ref` on a GPU; any `num_warps` gives the same bits."""
    check_norm(x_MK, w_K, eps, out_dtype)
    x_MK, (m, k) = x_MK.contiguous(), x_MK.shape
    y_MK = torch.empty_like(x_MK, dtype=out_dtype or x_MK.dtype)
    if m:
        rmsnorm_kernel[(m,)](x_MK, w_K.contiguous(), y_MK, k, float(k), eps, **options(k, num_warps))
    return y_MK


@on_gpu("add_rmsnorm")
def add_rmsnorm(
    h_MK: torch.Tensor, delta_MK: torch.Tensor, w_K: torch.Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None,
    *, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`add_rmsnorm_ref` on a GPU in one launch -> (h_new, y), both new tensors; any `num_warps` gives the same bits."""
    check_norm(h_MK, w_K, eps, out_dtype, (delta_MK,))
    check_delta(h_MK, delta_MK)
    h_MK, delta_MK, (m, k) = h_MK.contiguous(), delta_MK.contiguous(), h_MK.shape
    h_new, y_MK = torch.empty_like(h_MK), torch.empty_like(h_MK, dtype=out_dtype or h_MK.dtype)
    if m:
        rmsnorm_kernel[(m,)](h_MK, w_K.contiguous(), y_MK, k, float(k), eps, delta_ptr=delta_MK, h_ptr=h_new, **options(k, num_warps))
    return h_new, y_MK


@on_gpu("layernorm")
def layernorm(
    x_MK: torch.Tensor, w_K: torch.Tensor, b_K: torch.Tensor | None = None, *, eps: float = 1e-5, out_dtype: torch.dtype | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`layernorm_ref` on a GPU; any `num_warps` gives the same bits."""
    check_norm(x_MK, w_K, eps, out_dtype, () if b_K is None else (b_K,))
    _check_bias(w_K, b_K)
    x_MK, b_K, (m, k) = x_MK.contiguous(), None if b_K is None else b_K.contiguous(), x_MK.shape
    y_MK = torch.empty_like(x_MK, dtype=out_dtype or x_MK.dtype)
    if m:
        layernorm_kernel[(m,)](x_MK, w_K.contiguous(), b_K, y_MK, k, float(k), eps, **options(k, num_warps))
    return y_MK
