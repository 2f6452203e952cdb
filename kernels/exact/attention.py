"""Causal attention over a KV cache with an explicit order for every sum: one set of bits on every GPU and on the CPU.

    >>> import torch
    >>> from kernels.exact.attention import append, attention_ref, make_cache
    >>> cache = make_cache(batch=1, tokens=128, kv_heads=1, head_dim=64)
    >>> start_B, count_B = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> append(cache, torch.ones(1, 3, 1, 64), torch.ones(1, 3, 1, 64), start_B, count_B)
    >>> attention_ref(torch.ones(1, 3, 2, 64), cache, start_B, count_B).shape
    torch.Size([1, 3, 2, 64])

Legend: B batch rows, T new tokens a row, H query heads in groups over G key heads, D head_dim, N blocks of 64 keys. `attention` runs on a
GPU, `attention_ref` is its exact oracle on the CPU. The order, a function of a token's position alone:

    s_j = (FMA chain over d from +0 of q_d k_jd) * fp32(1/sqrt(D))      m = max of s_j over the visible keys j
    p_j = exp(s_j - m)                                                  (activations.py)
    l, acc_d: FMA chains from +0 over p_j and p_j v_jd inside blocks of 64 keys counted from cache position 0; block sums are added
    left to right from +0                                               o_d = div_rn(acc_d, l)

A key that a token may not see is skipped, never multiplied by 0, so batch, padding, chunked prefill and what lies behind a sequence in the
cache cannot change bits. A NaN score, a +inf score or a row of -inf scores makes the whole row NaN; a visible key with p = 0 still
multiplies its v. It has no window, no bias, no dropout and no gradient.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact import _attention_c
from kernels.exact.activations import exp_ref
from kernels.exact.attention_decode import MOST_BLOCKS, AttentionDecodeSchedule, append_tokens, decode_attention
from kernels.exact.attention_prefill import AttentionPrefillSchedule, prefill_attention
from kernels.exact.ieee import assert_subnormals_kept, fma_f32

__all__ = ["BLOCK_KEYS", "KVCache", "append", "attention", "attention_ref", "causal_attention_ref", "make_cache", "score_scale"]

BLOCK_KEYS = 64
MOST_DIM = 256
MOST_TOKENS = MOST_BLOCKS * BLOCK_KEYS  # of a row: blocks of keys are the second axis of a grid
DECODE_ROWS = 32  # up to as many query rows per key head (tokens x heads of a group) the decode kernels, above them the prefill kernels
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """k [B, G, N, D, 64] (64 keys side by side: lanes run along keys), v [B, G, N * 64, D] (lanes run along d); made by `make_cache`.

    tokens: capacity of a row. The cache holds no lengths: the caller keeps them and passes `start_B`.
    """

    k: torch.Tensor
    v: torch.Tensor
    tokens: int

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype


def make_cache(
    batch: int, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> KVCache:
    """An empty cache of `tokens` positions a row. Raises ValueError for sizes or a dtype that no kernel serves."""
    if batch < 0 or not 1 <= tokens <= MOST_TOKENS or kv_heads < 1 or not 1 <= head_dim <= MOST_DIM:
        raise ValueError(f"a cache has batch >= 0, 1 <= tokens <= {MOST_TOKENS}, kv_heads >= 1 and head_dim 1 to {MOST_DIM}; "
                         f"got {batch=} {tokens=} {kv_heads=} {head_dim=}; pass the model's sizes")
    if dtype not in DTYPES:
        raise ValueError(f"a cache holds bf16, fp16 or fp32; got {dtype=}; take bf16")
    blocks = -(-tokens // BLOCK_KEYS)
    k = torch.zeros((batch, kv_heads, blocks, head_dim, BLOCK_KEYS), dtype=dtype, device=device)
    v = torch.zeros((batch, kv_heads, blocks * BLOCK_KEYS, head_dim), dtype=dtype, device=device)
    return KVCache(k=k, v=v, tokens=tokens)


def score_scale(head_dim: int) -> float:
    """fp32 1/sqrt(D): sqrt and division are IEEE operations, so the constant is the same everywhere."""
    return float(np.float32(1) / np.sqrt(np.float32(head_dim)))


def append(cache: KVCache, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor) -> None:
    """Writes token t of row b at position start_B[b] + t for t < count_B[b], rounded once to the cache's dtype.

    On the CPU a position outside the cache raises ValueError; on a GPU, where the lengths are not known to the host, it is not written.
    """
    for name, x in (("k_BTGD", k_BTGD), ("v_BTGD", v_BTGD)):
        if x.ndim != 4 or x.shape[0] != cache.batch or x.shape[2:] != (cache.kv_heads, cache.head_dim) or x.shape != k_BTGD.shape:
            raise ValueError(f"{name} is [B, T, G, D] of the cache, k and v alike; got {tuple(k_BTGD.shape)=} {tuple(v_BTGD.shape)=} for "
                             f"B = {cache.batch}, G = {cache.kv_heads}, D = {cache.head_dim}; reshape it")
    _check_common(cache, k_BTGD, start_B, count_B)
    if v_BTGD.dtype not in DTYPES or v_BTGD.device != k_BTGD.device:
        raise ValueError(f"v is bf16, fp16 or fp32 on k's device; got {v_BTGD.dtype=} {v_BTGD.device=} {k_BTGD.device=}; cast or move it")
    if cache.k.is_cuda:
        append_tokens(cache.k, cache.v, cache.tokens, k_BTGD, v_BTGD, start_B, count_B)
        return
    starts, counts = _host_lengths(cache, k_BTGD, start_B, count_B)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        position = torch.arange(start, start + count, device="cpu")
        cache.v[b, :, start : start + count] = v_BTGD[b, :count].transpose(0, 1).to(cache.dtype)
        cache.k[b, :, position // BLOCK_KEYS, :, position % BLOCK_KEYS] = k_BTGD[b, :count].to(cache.dtype)


def attention(
    q_BTHD: torch.Tensor, cache: KVCache, start_B: torch.Tensor, count_B: torch.Tensor, out_dtype: torch.dtype = torch.float32, *,
    max_tokens: int | None = None, schedule: AttentionDecodeSchedule | AttentionPrefillSchedule | None = None,
) -> torch.Tensor:  # fmt: skip
    """`attention_ref` on a GPU, bit for bit; nothing is read back to the host, so it can be captured in a CUDA graph.

    max_tokens: the caller's bound on start_B + count_B (default: the capacity), which sizes the grid and the scratch. schedule: without one
    the kernel follows from the shapes alone. head_dim is a multiple of 8. Lengths are trusted: a row whose start + count exceeds the bound
    or whose start is negative means nothing, but reads nothing outside the cache.
    """
    _check_query(q_BTHD, cache, start_B, count_B, out_dtype)
    if cache.head_dim % 8:
        raise ValueError(f"the kernels read 8 elements at once: head_dim is a multiple of 8; got {cache.head_dim=}; pad q, k and v with zeros")
    if max_tokens is not None and not 1 <= max_tokens <= cache.tokens:
        raise ValueError(f"max_tokens is between 1 and the cache's capacity; got {max_tokens=} {cache.tokens=}; leave it out")
    if schedule is not None and not isinstance(schedule, (AttentionDecodeSchedule, AttentionPrefillSchedule)):
        raise ValueError(f"attention takes an AttentionDecodeSchedule or AttentionPrefillSchedule; got {schedule=}; leave it out")
    if q_BTHD.numel() == 0:
        return torch.zeros(q_BTHD.shape, dtype=out_dtype, device=q_BTHD.device)
    rows = q_BTHD.shape[1] * (q_BTHD.shape[2] // cache.kv_heads)
    many = isinstance(schedule, AttentionPrefillSchedule) or (schedule is None and q_BTHD.shape[1] > 1 and rows > DECODE_ROWS)
    run = prefill_attention if many else decode_attention
    bound = cache.tokens if max_tokens is None else max_tokens
    return run(q_BTHD, cache.k, cache.v, start_B, count_B, bound, score_scale(cache.head_dim), out_dtype, schedule)


def attention_ref(
    q_BTHD: torch.Tensor, cache: KVCache, start_B: torch.Tensor, count_B: torch.Tensor, out_dtype: torch.dtype = torch.float32, *, engine: str = "auto"
) -> torch.Tensor:
    """Exact oracle on the CPU -> o_BTHD in `out_dtype` (one rounding from float32). q: bf16, fp16 or fp32; the cache on the CPU.

    Row b's token t < count_B[b] stands at position start_B[b] + t and sees positions 0 to its own, which `append` has written; rows
    t >= count_B[b] are zeros. engine: "c" (compiled), "torch" (no compiler needed), "auto" (c where a compiler is at hand): the same
    bits. Raises ValueError where shapes, dtypes or lengths do not fit.
    """
    _check_query(q_BTHD, cache, start_B, count_B, out_dtype)
    if engine not in ("auto", "torch", "c"):
        raise ValueError(f"engine is auto, torch or c; got {engine=}; leave it at auto")
    if engine == "c" and not _attention_c.available():
        raise ValueError(f"engine c needs a C compiler; got {_attention_c.why()!r}; use engine='auto'")
    if cache.k.device.type != "cpu":
        raise ValueError(f"the oracle reads a cache on the CPU; got {cache.k.device=}; make one there, or call attention")
    assert_subnormals_kept()
    starts, counts = _host_lengths(cache, q_BTHD, start_B, count_B)
    q_BTHD = q_BTHD.detach().float().contiguous()
    if engine == "c" or (engine == "auto" and _attention_c.available()):
        k, v = (part if part.dtype == torch.bfloat16 else part.float() for part in (cache.k, cache.v))
        o_BTHD = _attention_c.attention(q_BTHD, k.contiguous(), v.contiguous(), starts, counts, score_scale(cache.head_dim))
    else:
        o_BTHD = torch.zeros(q_BTHD.shape, dtype=torch.float32, device="cpu")
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                o_BTHD[b, :count] = _row_torch(q_BTHD[b, :count], cache, b, start)
    return o_BTHD.to(out_dtype)


def causal_attention_ref(q_HTD: torch.Tensor, k_GTD: torch.Tensor, v_GTD: torch.Tensor) -> torch.Tensor:
    """o_HTD in fp32 for one whole sequence: `attention_ref` with a cache of its own, in k's dtype, that starts empty.

    Raises ValueError where the shapes do not fit.
    """
    heads, tokens, dim = q_HTD.shape
    if k_GTD.shape != v_GTD.shape or k_GTD.shape[1:] != (tokens, dim) or k_GTD.dtype != v_GTD.dtype:
        raise ValueError(f"need k and v of one shape [G, T, D] and dtype with G dividing H, got {tuple(q_HTD.shape)=} {tuple(k_GTD.shape)=} "
                         f"{tuple(v_GTD.shape)=} {k_GTD.dtype=} {v_GTD.dtype=}; pass one sequence")
    cache = make_cache(batch=1, tokens=max(1, tokens), kv_heads=k_GTD.shape[0], head_dim=dim, dtype=k_GTD.dtype)
    start_B, count_B = torch.zeros(1, dtype=torch.int32, device="cpu"), torch.full((1,), tokens, dtype=torch.int32, device="cpu")
    append(cache, k_GTD.transpose(0, 1)[None], v_GTD.transpose(0, 1)[None], start_B, count_B)
    return attention_ref(q_HTD.transpose(0, 1)[None], cache, start_B, count_B)[0].transpose(0, 1)


# ---- torch engine --------------------------------------------------------------------------------------------------------------


def _row_torch(q_THD: torch.Tensor, cache: KVCache, b: int, start: int) -> torch.Tensor:
    """o_THD of one batch row whose token 0 stands at position `start`."""
    tokens, heads, dim = q_THD.shape
    keys = start + tokens
    group = heads // cache.kv_heads
    k_GND = cache.k[b].transpose(2, 3).flatten(1, 2)[:, :keys]
    k_HND, v_HND = (part.float().repeat_interleave(group, dim=0) for part in (k_GND, cache.v[b, :, :keys]))
    q_HTD = q_THD.transpose(0, 1)
    p_HTK = _weights(_scores(q_HTD, k_HND), start)
    out, total = torch.zeros(heads, tokens, dim, dtype=torch.float32, device="cpu"), torch.zeros(heads, tokens, 1, dtype=torch.float32, device="cpu")
    for first in range(0, keys, BLOCK_KEYS):
        acc, sums = torch.zeros_like(out), torch.zeros_like(total)
        for key in range(first, min(first + BLOCK_KEYS, keys)):
            t = max(0, key - start)  # tokens before t do not see `key`
            p = p_HTK[:, t:, key, None]
            sums[:, t:] = sums[:, t:] + p
            acc[:, t:] = fma_f32(p, v_HND[:, key, None], acc[:, t:])
        t = max(0, first - start)
        out[:, t:] = out[:, t:] + acc[:, t:]
        total[:, t:] = total[:, t:] + sums[:, t:]
    return (out / total).transpose(0, 1)


def _scores(q_HTD: torch.Tensor, k_HKD: torch.Tensor) -> torch.Tensor:
    """s_HTK, one chain over D; entries that a token may not see are computed and never read."""
    acc = torch.zeros(q_HTD.shape[0], q_HTD.shape[1], k_HKD.shape[1], dtype=torch.float32, device="cpu")
    for d in range(q_HTD.shape[2]):
        acc = fma_f32(q_HTD[:, :, None, d], k_HKD[:, None, :, d], acc)
    return acc * score_scale(q_HTD.shape[2])


def _weights(s_HTK: torch.Tensor, start: int) -> torch.Tensor:
    """p = exp(s - m), m over visible keys."""
    hidden = torch.ones(s_HTK.shape[1:], dtype=torch.bool, device="cpu").triu(1 + start)
    m = s_HTK.masked_fill(hidden, -torch.inf).amax(dim=2, keepdim=True)
    return exp_ref(torch.where(hidden, 0.0, s_HTK - m))


# ---- checks --------------------------------------------------------------------------------------------------------------------


def _check_common(cache: KVCache, x: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor) -> None:
    """Dtypes, devices and the two length tensors."""
    for name, length in (("start_B", start_B), ("count_B", count_B)):
        if length.shape != (cache.batch,) or length.dtype != torch.int32 or length.device != cache.k.device:
            raise ValueError(f"{name} is int32 [B] on the cache's device; got {tuple(length.shape)=} {length.dtype=} {length.device=} for "
                             f"B = {cache.batch} on {cache.k.device}; cast or move it")
    if x.dtype not in DTYPES or x.device != cache.k.device:
        raise ValueError(f"operands are bf16, fp16 or fp32 on the cache's device; got {x.dtype=} {x.device=} {cache.k.device=}; cast or move it")


def _check_query(q_BTHD: torch.Tensor, cache: KVCache, start_B: torch.Tensor, count_B: torch.Tensor, out_dtype: torch.dtype) -> None:
    fits = q_BTHD.ndim == 4 and q_BTHD.shape[0] == cache.batch and q_BTHD.shape[3] == cache.head_dim
    if not fits or q_BTHD.shape[2] % cache.kv_heads or q_BTHD.shape[2] == 0:
        raise ValueError(f"q_BTHD has the cache's B and D and a multiple of its G as H; got {tuple(q_BTHD.shape)=} for B = {cache.batch}, "
                         f"G = {cache.kv_heads}, D = {cache.head_dim}; reshape it")
    if out_dtype not in DTYPES:
        raise ValueError(f"the output is bf16, fp16 or fp32; got {out_dtype=}; take fp32")
    _check_common(cache, q_BTHD, start_B, count_B)


def _host_lengths(cache: KVCache, x_BTXD: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor) -> tuple[list[int], list[int]]:
    """CPU lengths as integers. Raises ValueError where a row leaves the cache or has more tokens than T."""
    starts, counts, tokens = start_B.tolist(), count_B.tolist(), x_BTXD.shape[1]
    for start, count in zip(starts, counts, strict=True):
        if start < 0 or not 0 <= count <= tokens or start + count > cache.tokens:
            raise ValueError(f"need start >= 0, 0 <= count <= T and start + count <= the cache's tokens; got {start=} {count=}, T = {tokens}, "
                             f"{cache.tokens=}; make a larger cache or pass fewer tokens")
    return starts, counts
