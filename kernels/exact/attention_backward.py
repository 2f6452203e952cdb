"""Gradients of causal grouped-query attention with an explicit order for every sum, the same bits on a GPU and on the CPU.

    dq_BTHD, dk_BTGD, dv_BTGD = attention_backward_ref(do_BTHD, o_BTHD, q_BTHD, k_BTGD, v_BTGD)          # float32

Legend: B sequences, T tokens (query t sees keys j <= t), H query heads in groups of H / G over G key heads, D head_dim. The order:
    s_tj  = chain over D of q_t k_j from +0, ascending, times the float32 constant 1 / sqrt(D); m_t = max over visible j
    l_t   = sum over visible j of exp(s - m): chains inside blocks of 64 keys counted from position 0, block sums added left to right
    p_tj  = div_rn(exp(s_tj - m_t), l_t)                                     (s, m and l are the forward pass's bits)
    dp_tj = chain over D of do_t v_j;  delta_t = chain over D of do_t o_t;  ds_tj = (p_tj (dp_tj - delta_t)) / sqrt(D), as a product
    dq_t  = chains over visible keys j of ds_tj k_j in blocks of 64 from position 0, block sums added left to right from +0
    dk_j  = chains over the queries t >= j of ds_tj q_t in blocks of 64 from position 0, block sums added left to right from +0, for
            each query head; then the heads of the group are added in ascending order, beginning with the first. dv_j likewise (p, do).
What a query may not see is skipped, never multiplied by 0; nothing depends on the batch, and no atomics are used.

It serves whole sequences of one length, as training reads them: no cache, no padding, no dropout. s, dp, p and ds of some heads stand in
a workspace of 4 T T floats a head; how many heads at a time changes no bits. delta needs o, the forward pass's output.
"""

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.activations import exp_ref
from kernels.exact.attention import BLOCK_KEYS, score_scale
from kernels.exact.elementary import exp_f32
from kernels.exact.ieee import assert_subnormals_kept, fma_f32

__all__ = ["attention_backward", "attention_backward_ref"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST, _WIDEST = 1 << 17, 256  # the workspace of one head is 256 GB there, and a grid has at most 65,535 blocks of tokens


def _check(do: torch.Tensor, o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (do, o, q, k, v)]
    if q.ndim != 4 or k.ndim != 4 or not do.shape == o.shape == q.shape or v.shape != k.shape:
        raise ValueError(f"do, o and q are [B, T, H, D], k and v [B, T, G, D]; got {shapes=}; keep them as the forward pass had them")
    (b, t, h, d), (b_k, t_k, g, d_k) = q.shape, k.shape
    if (b, t, d) != (b_k, t_k, d_k) or g == 0 or h % g or not 0 < d <= _WIDEST or t > _LONGEST:
        raise ValueError(f"q and k agree in B, T <= {_LONGEST} and 0 < D <= {_WIDEST}, and G divides H; got {shapes=}; group the query heads over the key heads")
    if any(x.dtype not in _FLOATS for x in (do, o, q, k, v)):
        raise ValueError(f"operands are bf16, fp16 or fp32; got {[x.dtype for x in (do, o, q, k, v)]}; cast them")


# ---- reference -----------------------------------------------------------------------------------------------------------------


def attention_backward_ref(
    do_BTHD: torch.Tensor, o_BTHD: torch.Tensor, q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_BTHD, dk_BTGD, dv_BTGD) in float32 on the CPU, in the order above. Raises ValueError where shapes or dtypes do not fit."""
    _check(do_BTHD, o_BTHD, q_BTHD, k_BTGD, v_BTGD)
    assert_subnormals_kept()
    group = q_BTHD.shape[2] // k_BTGD.shape[2]
    do, o, q, k, v = (x.detach().cpu().float().transpose(1, 2) for x in (do_BTHD, o_BTHD, q_BTHD, k_BTGD, v_BTGD))
    k_BHTD, v_BHTD = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if q.numel() == 0:
        return tuple(torch.zeros_like(x).transpose(1, 2) for x in (q, k, v))
    p, ds = _weights_ref(do, o, q, k_BHTD, v_BHTD)
    dq = _blocked_ref(ds, k_BHTD, from_diagonal=False)
    per_head = (_blocked_ref(left.transpose(2, 3), right, from_diagonal=True) for left, right in ((ds, q), (p, do)))
    dk, dv = (_add_group(x, group) for x in per_head)
    return tuple(x.transpose(1, 2).contiguous() for x in (dq, dk, dv))


def _chain_ref(a_BHTD: torch.Tensor, b_BHTD: torch.Tensor) -> torch.Tensor:
    """[B, H, T, T]: one chain over D for each pair of tokens."""
    acc = torch.zeros(*a_BHTD.shape[:3], b_BHTD.shape[2], dtype=torch.float32, device="cpu")
    for d in range(a_BHTD.shape[3]):
        acc = fma_f32(a_BHTD[..., :, None, d], b_BHTD[..., None, :, d], acc)
    return acc


def _weights_ref(do, o, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """p and ds [B, H, query, key]; entries above the diagonal are garbage that nobody reads."""
    tokens, scale = q.shape[2], score_scale(q.shape[3])
    s = _chain_ref(q, k) * scale
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu(1)
    m = s.masked_fill(hidden, -torch.inf).amax(dim=3, keepdim=True)
    e = exp_ref(torch.where(hidden, 0.0, s - m))
    total = torch.zeros(*q.shape[:3], dtype=torch.float32, device="cpu")
    for start in range(0, tokens, BLOCK_KEYS):
        block = torch.zeros_like(total)
        for j in range(start, min(start + BLOCK_KEYS, tokens)):
            block[..., j:] = block[..., j:] + e[..., j:, j]
        total[..., start:] = total[..., start:] + block[..., start:]
    p = e / total[..., None]
    delta = torch.zeros(*q.shape[:3], dtype=torch.float32, device="cpu")
    for d in range(q.shape[3]):
        delta = fma_f32(do[..., d], o[..., d], delta)
    return p, (p * (_chain_ref(do, v) - delta[..., None])) * scale


def _blocked_ref(left_BHRC: torch.Tensor, right_BHCD: torch.Tensor, *, from_diagonal: bool) -> torch.Tensor:
    """out_r = sum over c of left_rc right_c, c <= r (or c >= r `from_diagonal`), in blocks of 64 from position 0."""
    tokens = right_BHCD.shape[2]
    out = torch.zeros_like(right_BHCD)
    for start in range(0, tokens, BLOCK_KEYS):
        stop = min(start + BLOCK_KEYS, tokens)
        acc = torch.zeros_like(out)
        for c in range(start, stop):
            rows = slice(0, c + 1) if from_diagonal else slice(c, tokens)
            acc[:, :, rows] = fma_f32(left_BHRC[:, :, rows, c, None], right_BHCD[:, :, c, None], acc[:, :, rows])
        rows = slice(0, stop) if from_diagonal else slice(start, tokens)
        out[:, :, rows] = out[:, :, rows] + acc[:, :, rows]
    return out


def _add_group(x_BHTD: torch.Tensor, group: int) -> torch.Tensor:
    """[B, H, T, D] -> [B, G, T, D]: heads of a group in ascending order."""
    x_BGRTD = x_BHTD.unflatten(1, (-1, group))
    total = x_BGRTD[:, :, 0]
    for r in range(1, group):
        total = total + x_BGRTD[:, :, r]
    return total


# ---- kernels -------------------------------------------------------------------------------------------------------------------
# The workspaces hold [head, key, query], so that lanes along queries touch consecutive floats. Heads are those of one launch.


@triton.jit(do_not_specialize=["first"])
def scores_kernel(
    q_ptr, k_ptr, do_ptr, v_ptr, s_ptr, dp_ptr, first, T, H, G, D, scale, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """s and dp of one tile of QUERIES x KEYS of head `first + program 0`; tiles above the diagonal are left as they are."""
    head = (first + tl.program_id(0)).to(tl.int64)
    b, h = head // H, head % H
    t = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    j = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(2) * KEYS <= tl.program_id(1) * QUERIES + (QUERIES - 1):
        row_q = ((b * T + t) * H + h) * D
        row_k = ((b * T + j) * G + h // (H // G)) * D
        s = tl.zeros((KEYS, QUERIES), tl.float32)
        dp = tl.zeros((KEYS, QUERIES), tl.float32)
        for d in range(D):
            q = tl.load(q_ptr + row_q + d, mask=t < T, other=0.0).to(tl.float32)
            do = tl.load(do_ptr + row_q + d, mask=t < T, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + row_k + d, mask=j < T, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + row_k + d, mask=j < T, other=0.0).to(tl.float32)
            s = tl.fma(tl.broadcast_to(q[None, :], (KEYS, QUERIES)), tl.broadcast_to(k[:, None], (KEYS, QUERIES)), s)
            dp = tl.fma(tl.broadcast_to(do[None, :], (KEYS, QUERIES)), tl.broadcast_to(v[:, None], (KEYS, QUERIES)), dp)
        place = (tl.program_id(0).to(tl.int64) * T + j[:, None]) * T + t[None, :]
        keep = (j < T)[:, None] & (t < T)[None, :]
        tl.store(s_ptr + place, s * scale, mask=keep)
        tl.store(dp_ptr + place, dp, mask=keep)


@triton.jit(do_not_specialize=["first"])
def weights_kernel(
    do_ptr, o_ptr, s_ptr, dp_ptr, p_ptr, ds_ptr, first, T, H, D, scale, QUERIES: tl.constexpr, PER_BLOCK: tl.constexpr = BLOCK_KEYS
):
    """For QUERIES queries of one head, one a lane: m, l and delta, then p and ds."""
    head = (first + tl.program_id(0)).to(tl.int64)
    t = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    stop = tl.minimum((tl.program_id(1) + 1) * QUERIES, T)  # keys that some query of this program sees
    row = ((head // H * T + t) * H + head % H) * D
    column = tl.program_id(0).to(tl.int64) * T * T + t
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    for j in range(stop):
        s = tl.load(s_ptr + column + tl.cast(j, tl.int64) * T, mask=(t < T) & (j <= t), other=float("-inf"))
        m = tl.where(s > m, s, m)
    total = tl.zeros((QUERIES,), tl.float32)
    block = tl.zeros((QUERIES,), tl.float32)
    for j in range(stop):
        seen = (t < T) & (j <= t)
        s = tl.load(s_ptr + column + tl.cast(j, tl.int64) * T, mask=seen, other=0.0)
        block = tl.where(seen, block + exp_f32(s - m), block)
        if ((j + 1) % PER_BLOCK == 0) | (j + 1 == stop):
            total = total + block
            block = tl.zeros((QUERIES,), tl.float32)
    delta = tl.zeros((QUERIES,), tl.float32)
    for d in range(D):
        do = tl.load(do_ptr + row + d, mask=t < T, other=0.0).to(tl.float32)
        delta = tl.fma(do, tl.load(o_ptr + row + d, mask=t < T, other=0.0).to(tl.float32), delta)
    for j in range(stop):
        seen = (t < T) & (j <= t)
        place = column + tl.cast(j, tl.int64) * T
        p = tl.div_rn(exp_f32(tl.load(s_ptr + place, mask=seen, other=0.0) - m), total)
        dp = tl.load(dp_ptr + place, mask=seen, other=0.0)
        tl.store(p_ptr + place, p, mask=seen)
        tl.store(ds_ptr + place, (p * (dp - delta)) * scale, mask=seen)


@triton.jit(do_not_specialize=["first"])
def query_gradient_kernel(
    ds_ptr, k_ptr, dq_ptr, first, T, H, G, D, QUERIES: tl.constexpr, DIM: tl.constexpr, PER_BLOCK: tl.constexpr = BLOCK_KEYS
):
    """dq of QUERIES queries of one head: keys ascending in blocks of 64. DIM: D rounded up to a power of two."""
    head = (first + tl.program_id(0)).to(tl.int64)
    b, h = head // H, head % H
    t = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, DIM)
    stop = tl.minimum((tl.program_id(1) + 1) * QUERIES, T)
    out = tl.zeros((QUERIES, DIM), tl.float32)
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    for j in range(stop):
        seen = (t < T) & (j <= t)
        ds = tl.load(ds_ptr + (tl.program_id(0).to(tl.int64) * T + j) * T + t, mask=seen, other=0.0)
        k = tl.load(k_ptr + ((b * T + j) * G + h // (H // G)) * D + d, mask=d < D, other=0.0).to(tl.float32)
        added = tl.fma(tl.broadcast_to(ds[:, None], (QUERIES, DIM)), tl.broadcast_to(k[None, :], (QUERIES, DIM)), acc)
        acc = tl.where(tl.broadcast_to(seen[:, None], (QUERIES, DIM)), added, acc)
        if ((j + 1) % PER_BLOCK == 0) | (j + 1 == stop):
            out = out + acc
            acc = tl.zeros((QUERIES, DIM), tl.float32)
    tl.store(dq_ptr + (((b * T + t) * H + h) * D)[:, None] + d[None, :], out, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["first"])
def key_gradient_kernel(
    p_ptr, ds_ptr, q_ptr, do_ptr, dk_ptr, dv_ptr, first, T, H, G, D, KEYS: tl.constexpr, DIM: tl.constexpr, PER_BLOCK: tl.constexpr = BLOCK_KEYS
):
    """dk and dv of KEYS keys of one key head: query heads ascending, queries ascending in blocks of 64 from position 0."""
    group = H // G
    pair = (first // group + tl.program_id(0)).to(tl.int64)  # b * G + g
    b, g = pair // G, pair % G
    j = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, DIM)
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    for r in range(group):
        out_k, acc_k = tl.zeros((KEYS, DIM), tl.float32), tl.zeros((KEYS, DIM), tl.float32)
        out_v, acc_v = tl.zeros((KEYS, DIM), tl.float32), tl.zeros((KEYS, DIM), tl.float32)
        for t in range(tl.program_id(1) * KEYS, T):  # earlier queries see none of these keys
            seen = (j < T) & (j <= t)
            place = (((tl.program_id(0) * group + r).to(tl.int64) * T) + j) * T + t
            row = ((b * T + t) * H + g * group + r) * D + d
            ds = tl.load(ds_ptr + place, mask=seen, other=0.0)
            p = tl.load(p_ptr + place, mask=seen, other=0.0)
            q = tl.load(q_ptr + row, mask=d < D, other=0.0).to(tl.float32)
            do = tl.load(do_ptr + row, mask=d < D, other=0.0).to(tl.float32)
            added_k = tl.fma(tl.broadcast_to(ds[:, None], (KEYS, DIM)), tl.broadcast_to(q[None, :], (KEYS, DIM)), acc_k)
            added_v = tl.fma(tl.broadcast_to(p[:, None], (KEYS, DIM)), tl.broadcast_to(do[None, :], (KEYS, DIM)), acc_v)
            acc_k = tl.where(tl.broadcast_to(seen[:, None], (KEYS, DIM)), added_k, acc_k)
            acc_v = tl.where(tl.broadcast_to(seen[:, None], (KEYS, DIM)), added_v, acc_v)
            if ((t + 1) % PER_BLOCK == 0) | (t + 1 == T):
                out_k, acc_k = out_k + acc_k, tl.zeros((KEYS, DIM), tl.float32)
                out_v, acc_v = out_v + acc_v, tl.zeros((KEYS, DIM), tl.float32)
        dk = tl.where(r == 0, out_k, dk + out_k)
        dv = tl.where(r == 0, out_v, dv + out_v)
    place = (((b * T + j) * G + g) * D)[:, None] + d[None, :]
    keep = (j < T)[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + place, dk, mask=keep)
    tl.store(dv_ptr + place, dv, mask=keep)


@on_gpu("attention_backward")
def attention_backward(
    do_BTHD: torch.Tensor, o_BTHD: torch.Tensor, q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, *,
    block: int = 32, workspace_bytes: int = 1 << 28, num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention_backward_ref` on a GPU. `block` (tokens a program), `num_warps` and `workspace_bytes` (how many heads
    are computed at a time; one group always is) change time, never bits."""
    _check(do_BTHD, o_BTHD, q_BTHD, k_BTGD, v_BTGD)
    if block not in (8, 16, 32, 64, 128):
        raise ValueError(f"a program takes 8, 16, 32, 64 or 128 tokens; got {block=}; leave it at 32")
    do, o, q, k, v = (x.detach().contiguous() for x in (do_BTHD, o_BTHD, q_BTHD, k_BTGD, v_BTGD))
    (batch, tokens, heads, dim), kv_heads = q.shape, k.shape[2]
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    if q.numel() == 0:
        return dq, dk, dv
    group = heads // kv_heads
    at_once = min(batch * heads, max(1, workspace_bytes // (16 * tokens * tokens * group)) * group)
    s, dp, p, ds = (torch.empty((at_once, tokens, tokens), dtype=torch.float32, device=q.device) for _ in range(4))
    blocks, options, d = triton.cdiv(tokens, block), dict(num_warps=num_warps, enable_fp_fusion=False), triton.next_power_of_2(dim)
    rows = min(block, max(1, 1024 // d))  # tokens of a tile of gradients: two tiles of sums a program, or four, stay in registers
    tiles, sizes = triton.cdiv(tokens, rows), (tokens, heads, kv_heads, dim)
    for first in range(0, batch * heads, at_once):
        n = min(at_once, batch * heads - first)
        scores_kernel[(n, blocks, blocks)](q, k, do, v, s, dp, first, *sizes, score_scale(dim), QUERIES=block, KEYS=block, **options)
        weights_kernel[(n, blocks)](do, o, s, dp, p, ds, first, tokens, heads, dim, score_scale(dim), QUERIES=block, **options)
        query_gradient_kernel[(n, tiles)](ds, k, dq, first, *sizes, QUERIES=rows, DIM=d, **options)
        key_gradient_kernel[(n // group, tiles)](p, ds, q, do, dk, dv, first, *sizes, KEYS=rows, DIM=d, **options)
    return dq, dk, dv
