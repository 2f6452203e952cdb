"""Causal grouped-query attention for training, forward and backward: a sequence's bits are its own, whatever else is in the batch.

    o_BTHD = causal_attention(q_BTHD, k_BTGD, v_BTGD, lengths_B)                # differentiable; on the CPU causal_attention_ref
    o, lse = attention_forward(q, k, v, lengths);  dq, dk, dv = attention_backward(do, o, lse, q, k, v, lengths)

Legend: B sequences, T positions (query t sees keys j <= t), H query heads in groups of H / G over G key heads, D head_dim. Sequence b has
`lengths_B[b]` tokens (int32, read on the device; None: all T); what lies behind them is never read, and o, dq, dk, dv are zeros there.

    s_tj = q_t k_j / sqrt(D);  lse_t = log2 sum_j 2^(s log2 e);  p_tj = 2^(s log2 e - lse);  o_t = sum_j p_tj v_j
    delta_t = do_t o_t;  ds_tj = p_tj (do_t v_j - delta_t);  dq_t = sum_j ds_tj k_j / sqrt(D);  dk_j = sum_t ds_tj q_t / sqrt(D);  dv_j = sum_t p_tj do_t

Online softmax over tiles of keys (FlashAttention-2, Dao 2023). One program owns a tile of queries (o, then delta and dq) or of keys (dk and
dv: the heads of its group in ascending order, queries ascending), so there are no atomics and no order that a scheduler could change; tiles
are counted from the first token of a sequence, so neither neighbours, nor B, nor T decide a bit. Products in the operands' type (p and ds are
rounded to it), sums in float32. On fp32 operands products are fp32 too, and slow: that is for comparing, not for speed.

Made for training at T <= 2048 (longer works): no cache, no dropout, no other mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu

__all__ = ["HEAD_DIMS", "AttentionSchedule", "attention_backward", "attention_forward", "causal_attention", "causal_attention_ref"]

HEAD_DIMS = (16, 32, 64, 128)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionSchedule:
    """Tiles of one of the three kernels. Another choice may change bits, so a comparison keeps one."""

    queries: int
    keys: int
    warps: int
    stages: int


def schedules(head_dim: int, dtype: torch.dtype) -> dict[str, AttentionSchedule]:
    """Of "forward", "query" (dq) and "key" (dk and dv). Depends on nothing that a batch decides."""
    wide = head_dim == 128
    if dtype == torch.float32:
        return {
            "forward": AttentionSchedule(queries=16 if wide else 32, keys=32, warps=8 if wide else 4, stages=1),
            "query": AttentionSchedule(queries=16, keys=32, warps=4, stages=2 if wide else 1),
            "key": AttentionSchedule(queries=32, keys=32, warps=8 if wide else 4, stages=1),
        }
    return {
        "forward": AttentionSchedule(queries=64, keys=64, warps=4, stages=2 if wide else 3),
        "query": AttentionSchedule(queries=64, keys=64, warps=4, stages=2),
        "key": AttentionSchedule(queries=32, keys=64, warps=8 if wide else 4, stages=2),
    }


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q is [B, T, H, D], k and v [B, T, G, D], and G divides H, got {shapes=}; reshape them so")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f"q, k and v have one dtype, got {q.dtype} {k.dtype} {v.dtype}; cast them")
    if lengths is not None and (lengths.shape != (q.shape[0],) or lengths.dtype != torch.int32):
        raise ValueError(f"lengths are int32 [B], got {tuple(lengths.shape)} {lengths.dtype} for B = {q.shape[0]}; give one a sequence")


# ---- reference -----------------------------------------------------------------------------------------------------------------


def causal_attention_ref(
    q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, lengths_B: torch.Tensor | None = None
) -> torch.Tensor:
    """o_BTHD in the operands' type on any device, one sequence after another; differentiable. 16-bit operands: in float64, one rounding.

    Every sequence is computed from its own tokens alone, in shapes that no other decides. Raises ValueError where shapes or dtypes do not fit.
    """
    _check(q_BTHD, k_BTGD, v_BTGD, lengths_B)
    (_, tokens, heads, dim), groups = q_BTHD.shape, k_BTGD.shape[2]
    lengths = [tokens] * len(q_BTHD) if lengths_B is None else lengths_B.tolist()
    work = q_BTHD.dtype if q_BTHD.dtype in (torch.float32, torch.float64) else torch.float64
    rows = []
    for b, n in enumerate(lengths):
        q, k, v = (x[b, :n].to(work).transpose(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        k, v = (x.repeat_interleave(heads // groups, dim=0) for x in (k, v))
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        p = ((q @ k.transpose(1, 2)) / math.sqrt(dim)).masked_fill(hidden, -torch.inf).softmax(2)
        rows.append(torch.nn.functional.pad((p @ v).transpose(0, 1), (0, 0, 0, 0, 0, tokens - n)))
    return torch.stack(rows).to(q_BTHD.dtype) if rows else torch.zeros_like(q_BTHD)


# ---- kernels -------------------------------------------------------------------------------------------------------------------
# One compiled kernel serves every T, so that no other code, with other fusions, can serve the same sequence in another batch.


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, length_ptr, T, H, G, scale, q_batch, q_step, q_head, k_batch, k_step, k_head, v_batch, v_step, v_head,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, D] and lse [B, H, T] of QUERIES queries of one head; lse is inf behind the sequence. grid (query tiles x B H), tiles fastest, late ones first."""
    tiles = tl.cdiv(T, QUERIES)
    tile, unit = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (unit // H).to(tl.int64), (unit % H).to(tl.int64)
    length = T if length_ptr is None else tl.load(length_ptr + b)
    t, d = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    k_ptr += b * k_batch + h // (H // G) * k_head
    v_ptr += b * v_batch + h // (H // G) * v_head
    q = tl.load(q_ptr + b * q_batch + h * q_head + t[:, None] * q_step + d[None, :], mask=(t < length)[:, None], other=0.0)
    acc = tl.zeros((QUERIES, D), tl.float32)
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    stop = tl.where(tile * QUERIES < length, tl.minimum((tile + 1) * QUERIES, length), 0)
    for first in tl.range(0, stop, KEYS, num_stages=STAGES):
        j = first + tl.arange(0, KEYS)
        k = tl.load(k_ptr + j[:, None] * k_step + d[None, :], mask=(j < length)[:, None], other=0.0)
        v = tl.load(v_ptr + j[:, None] * v_step + d[None, :], mask=(j < length)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.where(j[None, :] <= t[:, None], s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        kept = tl.exp2(m - higher)
        total = total * kept + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision=PRECISION)
        m = higher
    there = t < length
    total = tl.where(there, total, 1.0)
    place = ((b * T + t) * H + h)[:, None] * D + d[None, :]
    tl.store(o_ptr + place, tl.where(there[:, None], acc / total[:, None], 0.0).to(o_ptr.dtype.element_ty), mask=(t < T)[:, None])
    tl.store(lse_ptr + (b * H + h) * T + t, tl.where(there, m + tl.log2(total), float("inf")), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def query_gradient_kernel(
    do_ptr, o_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, delta_ptr, length_ptr, T, H, G, scale, unit_scale,
    q_batch, q_step, q_head, k_batch, k_step, k_head, v_batch, v_step, v_head,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, D] and delta [B, H, T] of QUERIES queries of one head; do and o are [B, T, H, D]. grid as forward."""
    tiles = tl.cdiv(T, QUERIES)
    tile, unit = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (unit // H).to(tl.int64), (unit % H).to(tl.int64)
    length = T if length_ptr is None else tl.load(length_ptr + b)
    t, d = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    there = (t < length)[:, None]
    k_ptr += b * k_batch + h // (H // G) * k_head
    v_ptr += b * v_batch + h // (H // G) * v_head
    place = ((b * T + t) * H + h)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + b * q_batch + h * q_head + t[:, None] * q_step + d[None, :], mask=there, other=0.0)
    do = tl.load(do_ptr + place, mask=there, other=0.0)
    o = tl.load(o_ptr + place, mask=there, other=0.0)
    lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=t < T, other=float("inf"))
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + (b * H + h) * T + t, delta, mask=t < T)
    dq = tl.zeros((QUERIES, D), tl.float32)
    stop = tl.where(tile * QUERIES < length, tl.minimum((tile + 1) * QUERIES, length), 0)
    for first in tl.range(0, stop, KEYS, num_stages=STAGES):
        j = first + tl.arange(0, KEYS)
        k = tl.load(k_ptr + j[:, None] * k_step + d[None, :], mask=(j < length)[:, None], other=0.0)
        v = tl.load(v_ptr + j[:, None] * v_step + d[None, :], mask=(j < length)[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        p = tl.where(j[None, :] <= t[:, None], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + place, tl.where(there, dq * unit_scale, 0.0).to(dq_ptr.dtype.element_ty), mask=(t < T)[:, None])


@triton.jit(do_not_specialize=["T"])
def key_gradient_kernel(
    do_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, length_ptr, T, H, G, scale, unit_scale,
    q_batch, q_step, q_head, k_batch, k_step, k_head, v_batch, v_step, v_head,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv [B, T, G, D] of KEYS keys of one key head, heads of its group one after another. grid (key tiles x B G), tiles fastest: early ones are the longest."""
    tiles = tl.cdiv(T, KEYS)
    tile, unit = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, g = (unit // G).to(tl.int64), (unit % G).to(tl.int64)
    length = T if length_ptr is None else tl.load(length_ptr + b)
    j, d = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    there = (j < length)[:, None]
    k = tl.load(k_ptr + b * k_batch + g * k_head + j[:, None] * k_step + d[None, :], mask=there, other=0.0)
    v = tl.load(v_ptr + b * v_batch + g * v_head + j[:, None] * v_step + d[None, :], mask=there, other=0.0)
    dk, dv = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    begin = tile * KEYS // QUERIES * QUERIES
    stop = tl.where(tile * KEYS < length, length, 0)
    for r in range(H // G):
        h = g * (H // G) + r
        q_at, do_at, row = q_ptr + b * q_batch + h * q_head, do_ptr + (b * T * H + h) * D, (b * H + h) * T
        for first in tl.range(begin, stop, QUERIES, num_stages=STAGES):
            t = first + tl.arange(0, QUERIES)
            q = tl.load(q_at + t[:, None] * q_step + d[None, :], mask=(t < length)[:, None], other=0.0)
            do = tl.load(do_at + t[:, None] * (H * D) + d[None, :], mask=(t < length)[:, None], other=0.0)
            lse = tl.load(lse_ptr + row + t, mask=t < length, other=float("inf"))
            delta = tl.load(delta_ptr + row + t, mask=t < length, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
            p = tl.where(j[:, None] <= t[None, :], p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    place = ((b * T + j) * G + g)[:, None] * D + d[None, :]
    tl.store(dk_ptr + place, tl.where(there, dk * unit_scale, 0.0).to(dk_ptr.dtype.element_ty), mask=(j < T)[:, None])
    tl.store(dv_ptr + place, tl.where(there, dv, 0.0).to(dv_ptr.dtype.element_ty), mask=(j < T)[:, None])


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


def _check_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None) -> None:
    _check(q, k, v, lengths)
    if q.dtype not in _FLOATS or q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"the kernels take bf16, fp16 and fp32 and a head_dim of {HEAD_DIMS}, got {q.dtype} {q.shape[3]}; call causal_attention_ref")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Whose last axis is side by side; the other strides are free."""
    return x if x.stride(3) == 1 else x.contiguous()


def _tiles(head_dim: int, dtype: torch.dtype, kernel: str) -> tuple[AttentionSchedule, dict[str, object]]:
    plan = schedules(head_dim, dtype)[kernel]
    fixed = dict(D=head_dim, QUERIES=plan.queries, KEYS=plan.keys, PRECISION="ieee", STAGES=plan.stages, num_warps=plan.warps)
    return plan, fixed


@on_gpu("attention_forward")
def attention_forward(
    q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, lengths_B: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_BTHD in the operands' type, lse_BHT float32 to base 2). Raises ValueError for shapes, types or head dims that it does not serve."""
    _check_gpu(q_BTHD, k_BTGD, v_BTGD, lengths_B)
    q, k, v = (_rows(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    batch, tokens, heads, dim = q.shape
    o = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if o.numel():
        plan, fixed = _tiles(dim, q.dtype, "forward")
        forward_kernel[(triton.cdiv(tokens, plan.queries) * batch * heads,)](
            q, k, v, o, lse, lengths_B, tokens, heads, k.shape[2], _LOG2_E / math.sqrt(dim), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], **fixed,
        )  # fmt: skip
    return o, lse


@on_gpu("attention_backward")
def attention_backward(
    do_BTHD: torch.Tensor, o_BTHD: torch.Tensor, lse_BHT: torch.Tensor, q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor,
    lengths_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq_BTHD, dk_BTGD, dv_BTGD) in the operands' type, from what `attention_forward` gave."""
    _check_gpu(q_BTHD, k_BTGD, v_BTGD, lengths_B)
    if do_BTHD.shape != q_BTHD.shape or o_BTHD.shape != q_BTHD.shape or lse_BHT.shape != (q_BTHD.shape[0], q_BTHD.shape[2], q_BTHD.shape[1]):
        raise ValueError(f"do and o are like q and lse is [B, H, T], got {tuple(do_BTHD.shape)} {tuple(o_BTHD.shape)} {tuple(lse_BHT.shape)}; keep what forward gave")
    q, k, v = (_rows(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    do, o, lse = do_BTHD.contiguous(), o_BTHD.contiguous(), lse_BHT.contiguous()
    (batch, tokens, heads, dim), groups = q.shape, k.shape[2]
    dq = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty((batch, tokens, groups, dim), dtype=q.dtype, device=q.device) for _ in range(2))
    delta = torch.empty_like(lse)
    if q.numel():
        scales = (_LOG2_E / math.sqrt(dim), 1.0 / math.sqrt(dim))
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        plan, fixed = _tiles(dim, q.dtype, "query")
        query_gradient_kernel[(triton.cdiv(tokens, plan.queries) * batch * heads,)](
            do, o, lse, q, k, v, dq, delta, lengths_B, tokens, heads, groups, *scales, *strides, **fixed,
        )  # fmt: skip
        plan, fixed = _tiles(dim, q.dtype, "key")
        key_gradient_kernel[(triton.cdiv(tokens, plan.keys) * batch * groups,)](
            do, lse, delta, q, k, v, dk, dv, lengths_B, tokens, heads, groups, *scales, *strides, **fixed,
        )  # fmt: skip
    return dq, dk, dv


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths):  # noqa: ANN001, ANN205
        o, lse = attention_forward(q, k, v, lengths)
        ctx.save_for_backward(q, k, v, lengths, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):  # noqa: ANN001, ANN205
        q, k, v, lengths, o, lse = ctx.saved_tensors
        return *attention_backward(do, o, lse, q, k, v, lengths), None


def causal_attention(
    q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, lengths_B: torch.Tensor | None = None
) -> torch.Tensor:
    """`attention_forward`'s o, differentiable in q, k and v by `attention_backward`. Saves q, k, v, o and 4 bytes a query head and token."""
    return _CausalAttention.apply(q_BTHD, k_BTGD, v_BTGD, lengths_B)
