"""Attention for few query rows per key head (decode), near the speed at which memory delivers the cache; and the append kernel.

    o_BTHD = decode_attention(q_BTHD, cache.k, cache.v, start_B, count_B, max_tokens, scale, torch.float32, None)      # attention.py calls it

Two launches. `decode_scores_kernel`: a block of 64 keys for all query heads of its group, K read once; scores and the block's maximum
go to scratch. `decode_values_kernel`: p = exp(s - m) for all keys of a row, then one FMA chain over each block's 64 keys per output
column, W blocks side by side in the threads of a CTA, whose sums are added left to right; last the division.
Legend: B batch rows, T new tokens, H query heads, G key heads, D head_dim, N blocks in the cache; a row r of key head g is query head
g * (H/G) + r % (H/G) of token r // (H/G). Tensors stand as [L lanes, W blocks, R rows, J per thread], see `_chains.py`.

Bound by memory where a row is long and by latency where it is short; many rows (prefill) belong to `attention_prefill.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact._chains import load8, split4, unpack8
from kernels.exact.activations import exp_f32

__all__ = ["AttentionDecodeSchedule", "append_tokens", "decode_attention", "decode_schedule", "decode_schedules"]

KEYS = tl.constexpr(64)
MOST_BLOCKS = 65535  # a grid's second and third axis


@dataclass(frozen=True, kw_only=True)
class AttentionDecodeSchedule:
    """How the work is cut; any valid value gives the same bits.

    score_keys: keys per thread of the first kernel (1, 2, 4, 8), score_blocks: blocks per CTA there (1 to 16), score_unroll: rows of K in
    flight (8 to 128); columns: output columns per CTA of the second kernel (8 to 256), per_thread: of one thread (1 to 8), blocks: blocks of
    keys side by side (1 to 16), unroll: rows of V in flight (4 to 64); rows: query rows per CTA at most (1 to 32).
    """

    score_keys: int = 2
    score_blocks: int = 4
    score_unroll: int = 32
    columns: int = 32
    per_thread: int = 2
    blocks: int = 8
    unroll: int = 16
    rows: int = 8

    def __post_init__(self) -> None:
        allowed = {
            "score_keys": (1, 2, 4, 8), "score_blocks": (1, 2, 4, 8, 16), "score_unroll": (8, 16, 32, 64, 128), "columns": (8, 16, 32, 64, 128, 256),
            "per_thread": (1, 2, 4, 8), "blocks": (1, 2, 4, 8, 16), "unroll": (4, 8, 16, 32, 64), "rows": (1, 2, 4, 8, 16, 32),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of decode_schedules()")
        for threads in (self.score_lanes * self.score_blocks, self.columns // self.per_thread * self.blocks):
            if not 32 <= threads <= 1024:
                raise ValueError(f"a CTA has 32 to 1024 threads; got {threads=} of {self}; change blocks or columns")

    @property
    def score_lanes(self) -> int:
        return 64 // self.score_keys


@triton.jit
def append_kernel(
    k_ptr, v_ptr, to_k_ptr, to_v_ptr, start_ptr, count_ptr, T, CAPACITY, N, K_B, K_T, K_G, K_D, V_B, V_T, V_G, V_D,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one token of one row: K goes to [B, G, N, D, 64], V to [B, G, N * 64, D]."""
    b, t = tl.program_id(0) // T, tl.program_id(0) % T
    position = tl.load(start_ptr + b) + t
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, d = i // D, i % D
    keep = (i < G * D) & (t < tl.load(count_ptr + b)) & (position >= 0) & (position < CAPACITY)
    k = tl.load(k_ptr + tl.cast(b, tl.int64) * K_B + tl.cast(t, tl.int64) * K_T + g * K_G + d * K_D, mask=keep, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + tl.cast(b, tl.int64) * V_B + tl.cast(t, tl.int64) * V_T + g * V_G + d * V_D, mask=keep, other=0.0).to(tl.float32)
    block = (tl.cast(b, tl.int64) * G + g) * N + position // KEYS
    inside = position % KEYS
    tl.store(to_k_ptr + (block * D + d) * KEYS + inside, k.to(to_k_ptr.dtype.element_ty), mask=keep)
    tl.store(to_v_ptr + (block * KEYS + inside) * D + d, v.to(to_v_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "N", "NB"])
def decode_scores_kernel(
    q_ptr, k_ptr, s_ptr, max_ptr, start_ptr, count_ptr, T, N, NB, scale,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, L: tl.constexpr, W: tl.constexpr, R: tl.constexpr, J: tl.constexpr,
    UNROLL: tl.constexpr, Q_WIDE: tl.constexpr,
):  # fmt: skip
    """W blocks of keys x R rows of one key head. s [B * G, rows, NB * 64], max [B * G, rows, NB]. Grid: key heads, block groups, row tiles."""
    bg, tile = tl.program_id(0), tl.program_id(2)
    b, g = bg // G, bg % G
    start, count = tl.load(start_ptr + b), tl.minimum(tl.load(count_ptr + b), T)
    rows = T * GROUP
    if (count > 0) & (tl.program_id(1) * W * KEYS <= start + count - 1):
        lane = tl.arange(0, L)[:, None, None, None]
        w = tl.arange(0, W)[None, :, None, None]
        r = tile * R + tl.arange(0, R)[None, None, :, None]
        j = tl.arange(0, J)[None, None, None, :]
        n = tl.program_id(1) * W + w
        token = r // GROUP
        limit = tl.where(token < count, start + token, -1)
        # the zero terms give both operands the full [L, W] of threads; a row or block too many reads the last one
        place = tl.minimum(token, T - 1) * (G * GROUP) + g * GROUP + r % GROUP
        q_pointers = q_ptr + ((tl.cast(b, tl.int64) * T * (G * GROUP) + place + (lane + w) * 0) * D)[:, :, :, :, None]
        k_pointers = k_ptr + ((tl.cast(bg, tl.int64) * N + tl.minimum(n, NB - 1)) * (D * KEYS) + lane * J + j)
        acc = tl.zeros((L, W, R, J), tl.float32)
        slots = ()
        for u in tl.static_range(UNROLL):
            slots = slots + (tl.load(k_pointers + u * KEYS, eviction_policy="evict_first"),)
        q_next = load8(q_pointers, True, Q_WIDE, False)
        for d in range(0, D, UNROLL):
            filled = ()
            for e in tl.static_range(UNROLL // 8):
                q8 = unpack8(q_next, Q_WIDE, L, W, R, 1)
                q_next = load8(q_pointers + d + (e * 8 + 8), d + (e * 8 + 8) < D, Q_WIDE, False)
                for i in tl.static_range(8):
                    acc = tl.fma(tl.broadcast_to(q8[i], (L, W, R, J)), tl.broadcast_to(slots[e * 8 + i].to(tl.float32), (L, W, R, J)), acc)
                    # a slot is loaded again right after its use: UNROLL rows of K are in flight all the time
                    ahead = d + (UNROLL + e * 8 + i)
                    filled = filled + (tl.load(k_pointers + ahead * KEYS, mask=ahead < D, eviction_policy="evict_first"),)
            slots = filled
        s = acc * scale
        key = n * KEYS + lane * J + j
        inside = (r < rows) & (n < NB)
        at = tl.cast(bg, tl.int64) * rows + r
        tl.store(s_ptr + at * NB * KEYS + key, s, mask=inside & (key <= limit))
        # a NaN need not reach the maximum: it reaches every sum through its own p
        seen = tl.max(tl.max(tl.where(key <= limit, s, float("-inf")), 3), 0)
        r2, n2 = tile * R + tl.arange(0, R)[None, :], tl.program_id(1) * W + tl.arange(0, W)[:, None]
        tl.store(max_ptr + (tl.cast(bg, tl.int64) * rows + r2) * NB + n2, seen, mask=(r2 < rows) & (n2 < NB))


@triton.jit
def unstack(v, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """[A, B, C, W] -> W tensors [A, B, C] in ascending order."""
    if W == 1:
        parts = (tl.reshape(v, (A, B, C)),)
    else:
        left, right = tl.split(tl.reshape(v, (A, B, C, W // 2, 2)))
        even, odd = unstack(left, A, B, C, W // 2), unstack(right, A, B, C, W // 2)
        parts = ()
        for i in tl.static_range(W // 2):
            parts = parts + (even[i], odd[i])
    return parts


@triton.jit
def value_chains(
    p_pointers, v_pointers, key, limit, last, D: tl.constexpr, L: tl.constexpr, W: tl.constexpr, R: tl.constexpr, J: tl.constexpr,
    UNROLL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(acc [L, W, R, J], l [L, W, R, 1]): chains over the 64 keys from `key` [1, W, 1, 1] on; MASKED skips keys above `limit` [1, 1, R, 1]."""
    acc = tl.zeros((L, W, R, J), tl.float32)
    total = tl.zeros((L, W, R, 1), tl.float32)
    four = tl.arange(0, 4)[None, None, None, None, :]
    end = last - key if MASKED else tl.full((1, W, 1, 1), KEYS, tl.int32)
    end5 = end[:, :, :, :, None]
    slots = ()
    for u in tl.static_range(UNROLL):
        slots = slots + (tl.load(v_pointers + u * D, mask=u <= end, eviction_policy="evict_first"),)
    p_next = tl.load(p_pointers + four, mask=0 <= end5)
    for k in range(0, KEYS, UNROLL):
        filled = ()
        for e in tl.static_range(UNROLL // 4):
            p4 = split4(p_next, L, W, R, 1)
            next4 = k + (e * 4 + 4)
            p_next = tl.load(p_pointers + next4 + four, mask=(next4 < KEYS) & (next4 <= end5))
            for i in tl.static_range(4):
                add = tl.fma(tl.broadcast_to(p4[i], (L, W, R, J)), tl.broadcast_to(slots[e * 4 + i].to(tl.float32), (L, W, R, J)), acc)
                more = total + p4[i]
                if MASKED:
                    visible = key + (k + (e * 4 + i)) <= limit
                    acc = tl.where(tl.broadcast_to(visible, (L, W, R, J)), add, acc)
                    total = tl.where(tl.broadcast_to(visible, (L, W, R, 1)), more, total)
                else:
                    acc, total = add, more
                ahead = k + (UNROLL + e * 4 + i)
                filled = filled + (tl.load(v_pointers + ahead * D, mask=(ahead < KEYS) & (ahead <= end), eviction_policy="evict_first"),)
        slots = filled
    return acc, total


@triton.jit(do_not_specialize=["T", "N", "NB"])
def decode_values_kernel(
    s_ptr, max_ptr, p_ptr, v_ptr, o_ptr, start_ptr, count_ptr, T, N, NB,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, L: tl.constexpr, W: tl.constexpr, R: tl.constexpr, J: tl.constexpr,
    UNROLL: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """L * J output columns of R rows of one key head, all keys. Grid: key heads, column tiles, row tiles. p: scratch as s; all column
    tiles of a row write the same values there, and each reads what it wrote itself."""
    bg, tile = tl.program_id(0), tl.program_id(2)
    b, g = bg // G, bg % G
    start, count = tl.load(start_ptr + b), tl.minimum(tl.load(count_ptr + b), T)
    rows = T * GROUP
    last = tl.minimum(start + tl.minimum(count, (tile * R + R - 1) // GROUP + 1), NB * KEYS) - 1  # the last key that any row here sees
    last = tl.where(count > (tile * R) // GROUP, last, -1)
    blocks = (last + KEYS) // KEYS
    r2 = tile * R + tl.arange(0, R)[:, None]
    limit2 = tl.minimum(start + r2 // GROUP, last)
    at = tl.cast(bg, tl.int64) * rows + tl.minimum(r2, rows - 1)
    part = tl.arange(0, WEIGHTS)[None, :]
    highest = tl.full((R, WEIGHTS), float("-inf"), tl.float32)
    for n in range(0, blocks, WEIGHTS):
        highest = tl.maximum(highest, tl.load(max_ptr + at * NB + n + part, mask=n + part < blocks, other=float("-inf")))
    m = tl.max(highest, 1)[:, None]
    for key in range(0, last + 1, WEIGHTS):
        s = tl.load(s_ptr + at * NB * KEYS + key + part, mask=key + part <= limit2, other=0.0)
        tl.store(p_ptr + at * NB * KEYS + key + part, exp_f32(s - m), mask=key + part <= limit2)
    tl.debug_barrier()

    lane = tl.arange(0, L)[:, None, None, None]
    w = tl.arange(0, W)[None, :, None, None]
    r = tile * R + tl.arange(0, R)[None, None, :, None]
    column = tl.program_id(1) * (L * J) + lane * J + tl.arange(0, J)[None, None, None, :]
    limit = tl.minimum(start + r // GROUP, last)
    p_pointers = p_ptr + (((tl.cast(bg, tl.int64) * rows + tl.minimum(r, rows - 1)) * NB + w + lane * 0) * KEYS)[:, :, :, :, None]
    v_pointers = v_ptr + (tl.cast(bg, tl.int64) * N + w) * (KEYS * D) + column
    out = tl.zeros((L, R, J), tl.float32)
    total = tl.zeros((L, R, 1), tl.float32)
    for n in range(0, blocks, W):
        first = (n + w) * KEYS
        if (n + W) * KEYS - 1 <= start + (tile * R) // GROUP:
            acc, sums = value_chains(p_pointers + n * KEYS, v_pointers + tl.cast(n, tl.int64) * (KEYS * D), first, limit, last, D, L, W, R, J, UNROLL, False)
        else:
            acc, sums = value_chains(p_pointers + n * KEYS, v_pointers + tl.cast(n, tl.int64) * (KEYS * D), first, limit, last, D, L, W, R, J, UNROLL, True)
        # a block that a row does not see adds +0 to a sum that is never -0
        accs = unstack(tl.permute(acc, (0, 2, 3, 1)), L, R, J, W)
        all_sums = unstack(tl.permute(sums, (0, 2, 3, 1)), L, R, 1, W)
        for i in tl.static_range(W):
            out = out + accs[i]
            total = total + all_sums[i]
    r3 = tile * R + tl.arange(0, R)[None, :, None]
    c3 = tl.program_id(1) * (L * J) + tl.arange(0, L)[:, None, None] * J + tl.arange(0, J)[None, None, :]
    o = tl.where(r3 // GROUP < count, tl.div_rn(out, tl.broadcast_to(total, (L, R, J))), 0.0)
    place = (tl.cast(b, tl.int64) * T + r3 // GROUP) * (G * GROUP) + g * GROUP + r3 % GROUP
    tl.store(o_ptr + place * D + c3, o.to(o_ptr.dtype.element_ty), mask=r3 < rows)


@on_gpu("attention")
def append_tokens(k: torch.Tensor, v: torch.Tensor, capacity: int, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor) -> None:
    """Writes the new tokens into the cache's k [B, G, N, D, 64] and v [B, G, N * 64, D]; positions outside the cache are not written."""
    batch, tokens, groups, dim = k_BTGD.shape
    if k_BTGD.numel() == 0:
        return
    block = min(1024, triton.next_power_of_2(groups * dim))
    grid = (batch * tokens, triton.cdiv(groups * dim, block))
    append_kernel[grid](
        k_BTGD, v_BTGD, k, v, start_B, count_B, tokens, capacity, k.shape[2], *k_BTGD.stride(), *v_BTGD.stride(), G=groups, D=dim, BLOCK=block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def decode_schedules() -> tuple[AttentionDecodeSchedule, ...]:
    """Every schedule that a study should sweep."""
    return tuple(
        AttentionDecodeSchedule(score_keys=keys, score_blocks=score_blocks, score_unroll=score_unroll, columns=columns, per_thread=per, blocks=blocks,
                                unroll=unroll, rows=rows)
        for keys, score_blocks, score_unroll, columns, per, blocks, unroll, rows in (
            (2, 4, 32, 32, 2, 8, 16, 8), (2, 2, 64, 32, 2, 8, 32, 8), (2, 1, 64, 16, 2, 8, 32, 8), (1, 4, 32, 32, 2, 8, 16, 4), (4, 4, 32, 64, 4, 8, 16, 8),
            (8, 8, 16, 128, 8, 8, 8, 8), (2, 4, 32, 64, 4, 16, 16, 8), (2, 4, 32, 128, 8, 16, 8, 8), (2, 8, 16, 16, 2, 16, 16, 2), (2, 4, 64, 32, 2, 16, 16, 1),
        )
    )  # fmt: skip


def decode_schedule(batch_groups: int, rows: int, dim: int, max_tokens: int) -> AttentionDecodeSchedule:
    """The schedule used by default: a function of shapes only (so far not of rows and dim). Few key heads want many small CTAs, many want wide loads."""
    if batch_groups * max_tokens >= 1 << 17:
        return AttentionDecodeSchedule(columns=64, per_thread=4, blocks=16, rows=4 if batch_groups < 128 else 8)
    return AttentionDecodeSchedule(score_blocks=2, score_unroll=64, unroll=32, rows=2 if batch_groups <= 8 else 4)


@on_gpu("attention")
def decode_attention(
    q_BTHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor, max_tokens: int, scale: float,
    out_dtype: torch.dtype, schedule: AttentionDecodeSchedule | None,
) -> torch.Tensor:  # fmt: skip
    """o_BTHD; k and v as a `KVCache` holds them; start + count of a row is at most `max_tokens`."""
    batch, tokens, heads, dim = q_BTHD.shape
    groups, blocks = k.shape[1], triton.cdiv(max_tokens, 64)
    group, rows = heads // groups, tokens * (heads // groups)
    schedule = schedule or decode_schedule(batch * groups, rows, dim, max_tokens)
    r = min(schedule.rows, triton.next_power_of_2(rows))
    q_BTHD, tiles = q_BTHD.contiguous(), triton.cdiv(rows, r)
    if tiles > MOST_BLOCKS:
        raise ValueError(f"the decode kernels take at most {MOST_BLOCKS} tiles of query rows; got {rows=} {r=}; take an AttentionPrefillSchedule")
    scratch = torch.empty((2, batch * groups, rows, blocks * 64), dtype=torch.float32, device=q_BTHD.device)
    highest = torch.empty((batch * groups, rows, blocks), dtype=torch.float32, device=q_BTHD.device)
    o_BTHD = torch.empty(q_BTHD.shape, dtype=out_dtype, device=q_BTHD.device)
    shape = dict(G=groups, GROUP=group, D=dim, R=r, enable_fp_fusion=False)
    lanes, w = schedule.score_lanes, schedule.score_blocks
    decode_scores_kernel[(batch * groups, triton.cdiv(blocks, w), tiles)](
        q_BTHD, k, scratch[0], highest, start_B, count_B, tokens, k.shape[2], blocks, scale, L=lanes, W=w, J=schedule.score_keys,
        UNROLL=dividing(schedule.score_unroll, dim), Q_WIDE=q_BTHD.dtype == torch.float32, num_warps=lanes * w // 32, **shape,
    )  # fmt: skip
    columns = dividing(schedule.columns, dim)
    lanes, w = columns // schedule.per_thread, schedule.blocks
    decode_values_kernel[(batch * groups, dim // columns, tiles)](
        scratch[0], highest, scratch[1], v, o_BTHD, start_B, count_B, tokens, k.shape[2], blocks, L=lanes, W=w, J=schedule.per_thread,
        UNROLL=schedule.unroll, WEIGHTS=512 // r if r < 8 else 64, num_warps=max(1, lanes * w // 32), **shape,
    )  # fmt: skip
    return o_BTHD


def dividing(most: int, dim: int) -> int:
    """The largest power of two up to `most` that divides head_dim."""
    while dim % most:
        most //= 2
    return most
