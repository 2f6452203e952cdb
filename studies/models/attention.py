"""Causal attention with an explicit order for every sum: the CPU oracle of the exact families.

    o_HTD = attention_ref(q_HTD, k_GTD, v_GTD)              # fp32; H query heads in groups over G key heads, T tokens, D head_dim

Each score is one FMA chain over D from +0 in ascending order, times the fp32 constant 1/sqrt(D); m is the exact maximum over visible keys;
p = exp(s - m); l and P V are FMA chains from +0 inside blocks of 64 keys counted from the sequence's first token, and block sums are
added left to right from +0; o = acc / l. A key that a token may not see is skipped, never multiplied by 0. So the result for a token
depends on the tokens before it and on nothing else: no batch, no padding, no split over processors.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.exact import exp_ref, fma_f32

BLOCK_KEYS = 64


def attention_ref(q_HTD: torch.Tensor, k_GTD: torch.Tensor, v_GTD: torch.Tensor) -> torch.Tensor:
    """o_HTD in fp32 for one sequence whose first token sees itself alone. q, k, v: bf16, fp16 or fp32.

    Raises ValueError where the shapes do not fit.
    """
    heads, tokens, dim = q_HTD.shape
    if k_GTD.shape != v_GTD.shape or k_GTD.shape[1:] != (tokens, dim) or heads % k_GTD.shape[0]:
        raise ValueError(f"need k and v of one shape [G, T, D] with G dividing H, got {tuple(q_HTD.shape)=} {tuple(k_GTD.shape)=} "
                         f"{tuple(v_GTD.shape)=}; pass one sequence")
    group = heads // k_GTD.shape[0]
    q = q_HTD.float()
    k, v = (part.float().repeat_interleave(group, dim=0) for part in (k_GTD, v_GTD))
    p_HTK = _weights(_scores(q, k))
    out, total = torch.zeros_like(q), torch.zeros(heads, tokens, 1)
    for start in range(0, tokens, BLOCK_KEYS):
        acc, sums = torch.zeros_like(q), torch.zeros(heads, tokens, 1)
        for key in range(start, min(start + BLOCK_KEYS, tokens)):
            p = p_HTK[:, key:, key, None]  # tokens before `key` do not see it
            sums[:, key:] = sums[:, key:] + p
            acc[:, key:] = fma_f32(p, v[:, key, None], acc[:, key:])
        # Only tokens that see a key of this block: adding +0 to the others would be harmless, but they are skipped.
        out[:, start:] = out[:, start:] + acc[:, start:]
        total[:, start:] = total[:, start:] + sums[:, start:]
    return out / total


def _scores(q_HTD: torch.Tensor, k_HTD: torch.Tensor) -> torch.Tensor:
    """s_HTK, one chain over D; entries above the diagonal are computed and never read."""
    acc = torch.zeros(q_HTD.shape[0], q_HTD.shape[1], k_HTD.shape[1])
    for d in range(q_HTD.shape[2]):
        acc = fma_f32(q_HTD[:, :, None, d], k_HTD[:, None, :, d], acc)
    # sqrt and division are IEEE operations: the constant is the same everywhere
    return acc * float(np.float32(1) / np.sqrt(np.float32(q_HTD.shape[2])))


def _weights(s_HTK: torch.Tensor) -> torch.Tensor:
    """p = exp(s - m), m over visible keys."""
    hidden = torch.ones(s_HTK.shape[1:], dtype=torch.bool).triu(1)
    m = s_HTK.masked_fill(hidden, -torch.inf).amax(dim=2, keepdim=True)
    return exp_ref(torch.where(hidden, 0.0, s_HTK - m))
