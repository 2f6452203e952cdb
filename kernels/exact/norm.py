"""RMSNorm from IEEE-754 operations only, with an explicit order for the sum of squares.

    >>> import torch
    >>> from kernels.exact.norm import rmsnorm_ref
    >>> rmsnorm_ref(torch.ones(1, 64), torch.ones(64), eps=0.0)[0, 0].item()
    1.0

    order (a function of K alone): lane j of LANES = 1024 is one FMA chain from +0 over x_k^2 with k = j, j + 1024, ... ascending; the
    1024 lanes are added in a balanced tree of neighbours (2i with 2i+1, ten levels); missing elements count as +0.
    y = ((x * r) * w), r = div_rn(1, sqrt_rn(div_rn(sum, K) + eps)), each operation rounded to float32, one rounding to `out_dtype`.

It differs from the order of the linear layers on purpose: a row has one sum, so its lanes must be short to be fast. No bias, no
LayerNorm, no gradient.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.exact.ieee import assert_subnormals_kept, fma_f32

__all__ = ["LANES", "rmsnorm", "rmsnorm_ref", "sum_of_squares_ref"]

LANES = 1024
_LANES = tl.constexpr(LANES)


def _check(x_MK: torch.Tensor, w_K: torch.Tensor, eps: float) -> None:
    if x_MK.ndim != 2 or w_K.shape != x_MK.shape[1:] or x_MK.shape[1] == 0:
        raise ValueError(f"need x_MK and w_K with one K > 0; got {tuple(x_MK.shape)=} {tuple(w_K.shape)=}; flatten the tokens")
    if not eps >= 0:
        raise ValueError(f"eps is added to a mean square and cannot be negative; got {eps=}; use 1e-6 or 0")


def sum_of_squares_ref(x_MK: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row in the order above -> [M] float32."""
    m, k = x_MK.shape
    steps = -(-k // LANES)
    x_MSL = torch.nn.functional.pad(x_MK.float(), (0, steps * LANES - k)).view(m, steps, LANES)
    acc = torch.zeros((m, LANES))
    for s in range(steps):
        acc = fma_f32(x_MSL[:, s], x_MSL[:, s], acc)
    while acc.shape[1] > 1:
        acc = acc[:, 0::2] + acc[:, 1::2]
    return acc[:, 0]


def rmsnorm_ref(x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Exact oracle on the CPU. x, w: bf16, fp16 or fp32; `eps` is rounded to float32; result in `out_dtype` (default x's).

    Measured: 2.9 ulp against float64 at K = 3000 (float32 output).
    """
    _check(x_MK, w_K, eps)
    assert_subnormals_kept()
    x = x_MK.detach().cpu().float()
    mean = sum_of_squares_ref(x) / torch.tensor(float(x.shape[1]))
    # correctly rounded by IEEE-754: numpy's sqrt, and division by a tensor, are the hardware's instructions
    root = torch.from_numpy(np.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).numpy()))
    r = torch.ones_like(root) / root
    return ((x * r[:, None]) * w_K.detach().cpu().float()).to(out_dtype or x_MK.dtype)


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
def rmsnorm_kernel(x_ptr, w_ptr, y_ptr, K, count, eps, STEPS: tl.constexpr):
    """One program a row; must be compiled with enable_fp_fusion=False. `count` is K as float32."""
    row = tl.program_id(0).to(tl.int64) * K
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((_LANES,), tl.float32)
    for s in range(STEPS):
        k = s * _LANES + lane
        x = tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32)
        acc = tl.fma(x, x, acc)
    total = tl.reshape(tree_sum(acc, _LANES), (1,))
    r = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(tl.div_rn(total, tl.full((1,), count, tl.float32)) + eps))
    for s in range(STEPS):
        k = s * _LANES + lane
        x = tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + k, ((x * r) * w).to(y_ptr.dtype.element_ty), mask=k < K)


def rmsnorm(x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None, num_warps: int = 4) -> torch.Tensor:
    """`rmsnorm_ref` on a GPU; any `num_warps` gives the same bits."""
    _check(x_MK, w_K, eps)
    x_MK, (m, k) = x_MK.contiguous(), x_MK.shape
    y_MK = torch.empty_like(x_MK, dtype=out_dtype or x_MK.dtype)
    if m:
        rmsnorm_kernel[(m,)](
            x_MK, w_K.contiguous(), y_MK, k, float(k), eps, STEPS=triton.cdiv(k, LANES), num_warps=num_warps, enable_fp_fusion=False
        )
    return y_MK
