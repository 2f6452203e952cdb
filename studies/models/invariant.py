"""A batch-invariant 16-bit linear in the manner of batch_invariant_ops (Thinking Machines Lab, 2025): one tile for every shape.

    y_MN = linear_invariant(x_MK, w_NK)                     # on a GPU, bf16 or fp16 in, fp32 accumulators out

Legend: M tokens, N outputs, K inputs. A CTA computes 64 x 128 outputs over the whole of K in steps of 64 with `tl.dot` on tensor cores,
so a row's bits do not depend on how many rows stand beside it. They do depend on the architecture's tensor cores and on the compiler:
it is a baseline of the study, not an exact operator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["linear_invariant"]

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 64, 128, 64, 8


@triton.jit(do_not_specialize=["M"])
def invariant_kernel(
    x_ptr, w_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """One tile of y; tiles are walked in bands of GROUP_M so that a band's x stays in L2."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * blocks_n)
    m = (band * GROUP_M + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    w_pointers = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        left = k < K - first
        x = tl.load(x_pointers + first, mask=(m < M)[:, None] & left[None, :], other=0.0)
        w = tl.load(w_pointers + first, mask=(n < N)[None, :] & left[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def linear_invariant(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """y_MN fp32. Raises ValueError for operands that are not bf16 matrices of one K on one device."""
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1] or x_MK.device != w_NK.device:
        raise ValueError(f"need x_MK and w_NK of one K on one device, got {tuple(x_MK.shape)=} {tuple(w_NK.shape)=} {x_MK.device=} {w_NK.device=}; "
                         "flatten or move them")
    if x_MK.dtype not in (torch.bfloat16, torch.float16) or x_MK.dtype != w_NK.dtype:
        raise ValueError(f"operands are both bf16 or both fp16, got {x_MK.dtype=} {w_NK.dtype=}; cast them")
    x_MK, w_NK, (m, k), n = x_MK.contiguous(), w_NK.contiguous(), x_MK.shape, w_NK.shape[0]
    y_MN = torch.empty((m, n), dtype=torch.float32, device=x_MK.device)
    if m * n:
        grid = (triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)
        invariant_kernel[grid](
            x_MK, w_NK, y_MN, m, n, k, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=4, num_stages=3
        )
    return y_MN
