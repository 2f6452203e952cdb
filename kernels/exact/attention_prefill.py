"""Attention for many query tokens (prefill, chunked or whole), bound by the rate of FP32 FMA.

    o_BTHD = prefill_attention(q_BTHD, cache.k, cache.v, start_B, count_B, max_tokens, scale, torch.float32, None)     # attention.py calls it

Three launches over a scratch of scores that is kept transposed, [unit, key, token], a unit being one query head of one batch row:
`prefill_scores_kernel` (chains over d; maxima of each block of 64 keys), `prefill_weights_kernel` (p = exp(s - m) in place and the chain l of
each block), `prefill_values_kernel` (chains over a block's keys, block sums added in order, division). Both products are the same outer
product: a thread holds E columns x 4 A tokens, a step loads E of one operand and 4 A of the other, 64 FMA on 12 words. Blocks that a whole tile
sees need no mask; in the others an invisible key is skipped by a select. Chunks of tokens or units keep the scratch within `scratch_bytes`.
Legend: B batch rows, T tokens, H query heads, G key heads, D head_dim, N blocks of 64 keys, U units. Tensors stand as
[X lanes along columns, Y lanes along tokens, A, 4 tokens, E columns]: threads are handed out along X, then Y.

No tensor core, no shared-memory staging: the warps of a CTA meet in the L1 cache.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.activations import exp_f32

__all__ = ["AttentionPrefillSchedule", "prefill_attention", "prefill_schedules"]

KEYS = tl.constexpr(64)
TILE = 128  # tokens that the weights kernel takes; the tiles of the other two divide it
_TILE = tl.constexpr(TILE)


@dataclass(frozen=True, kw_only=True)
class AttentionPrefillSchedule:
    """How the work is cut; any valid value gives the same bits.

    score_keys, score_tokens: keys (2, 4, 8) and tokens (4, 8, 16) per thread of the scores; columns, tokens: output columns and tokens
    per thread of P V, likewise; score_warps, warps (1 to 8); unroll: steps in flight (1, 2, 4, 8); scratch_bytes: bound on scores held at once.
    """

    score_keys: int = 8
    score_tokens: int = 8
    score_warps: int = 4
    columns: int = 8
    tokens: int = 8
    warps: int = 4
    unroll: int = 2
    scratch_bytes: int = 1 << 29

    def __post_init__(self) -> None:
        allowed = {
            "score_keys": (2, 4, 8), "score_tokens": (4, 8, 16), "score_warps": (1, 2, 4, 8), "columns": (2, 4, 8), "tokens": (4, 8, 16),
            "warps": (1, 2, 4, 8), "unroll": (1, 2, 4, 8),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of prefill_schedules()")
        tile = self.score_warps * self.score_keys * self.score_tokens // 2
        if tile > TILE or self.score_keys * self.score_tokens > 64 or self.columns * self.tokens > 64 or self.scratch_bytes < 1:
            raise ValueError(f"a thread has at most 64 accumulators, a CTA's scores at most {TILE} tokens; got {tile=} {self}; lower one of them")


@triton.jit
def outer_chain(
    a_pointers, b_pointers, a_step, b_step, acc, X: tl.constexpr, Y: tl.constexpr, A: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc [X, Y, A, 4, E] = fma(a [.., A, 4, 1], b [.., 1, 1, E], acc) over STEPS rows in ascending order, UNROLL rows in flight."""
    slots = ()
    for u in tl.static_range(UNROLL):
        slots = slots + ((tl.load(a_pointers + u * a_step), tl.load(b_pointers + u * b_step)),)
    for k in range(0, STEPS, UNROLL):
        filled = ()
        for u in tl.static_range(UNROLL):
            a = tl.broadcast_to(slots[u][0], (X, Y, A, 4, E))
            b = tl.broadcast_to(slots[u][1].to(tl.float32), (X, Y, A, 4, E))
            ahead = k + (UNROLL + u)
            filled = filled + ((tl.load(a_pointers + ahead * a_step, mask=ahead < STEPS), tl.load(b_pointers + ahead * b_step, mask=ahead < STEPS)),)
            acc = tl.fma(a, b, acc)
        slots = filled
    return acc


@triton.jit(do_not_specialize=["T", "N", "NB", "u0"])
def prefill_scores_kernel(
    q_ptr, k_ptr, s_ptr, max_ptr, start_ptr, count_ptr, T, PADDED, N, NB, QC, t0, u0, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, A: tl.constexpr, E: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One block of 64 keys x Y * 4 * A tokens of one unit. q [B, H, D, PADDED] float32; s [U, NB * 64, QC], max [U, NB, QC]."""
    tiles = QC // (Y * 4 * A)
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    unit = u0 + tl.program_id(1)
    b, h = unit // H, unit % H
    start, count = tl.load(start_ptr + b), tl.minimum(tl.load(count_ptr + b), T)
    first = t0 + tile * (Y * 4 * A)
    if (first < count) & (n * KEYS <= start + tl.minimum(first + Y * 4 * A, count) - 1):
        x = tl.arange(0, X)[:, None, None, None, None]
        y = tl.arange(0, Y)[None, :, None, None, None]
        place = tile * (Y * 4 * A) + tl.arange(0, A)[None, None, :, None, None] * (Y * 4) + y * 4 + tl.arange(0, 4)[None, None, None, :, None]
        key = x * E + tl.arange(0, E)[None, None, None, None, :]
        # the zero terms give both operands the full [X, Y] of threads
        q_pointers = q_ptr + tl.cast(unit, tl.int64) * D * PADDED + (t0 + place + x * 0)
        k_pointers = k_ptr + ((tl.cast(b, tl.int64) * G + h // (H // G)) * N + n) * (D * KEYS) + (key + y * 0)
        acc = outer_chain(q_pointers, k_pointers, PADDED, KEYS, tl.zeros((X, Y, A, 4, E), tl.float32), X, Y, A, E, D, UNROLL)
        s = acc * scale
        at = tl.cast(tl.program_id(1), tl.int64) * NB * KEYS * QC
        tl.store(s_ptr + at + (n * KEYS + key) * tl.cast(QC, tl.int64) + place, s)
        # a NaN need not reach the maximum: it reaches every sum through its own p
        seen = tl.max(tl.max(tl.where(n * KEYS + key <= start + t0 + place, s, float("-inf")), 4), 0)
        place3 = tile * (Y * 4 * A) + tl.arange(0, A)[None, :, None] * (Y * 4) + tl.arange(0, Y)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
        tl.store(max_ptr + (tl.cast(tl.program_id(1), tl.int64) * NB + n) * QC + place3, seen)


@triton.jit(do_not_specialize=["T", "NB", "u0"])
def prefill_weights_kernel(s_ptr, max_ptr, l_ptr, start_ptr, count_ptr, T, NB, QC, t0, u0, H: tl.constexpr, UNROLL: tl.constexpr):
    """s becomes p for one block of 64 keys x 128 tokens of one unit; l [U, NB, QC]: the block's chain of p."""
    tiles = QC // _TILE
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b = (u0 + tl.program_id(1)) // H
    start, count = tl.load(start_ptr + b), tl.minimum(tl.load(count_ptr + b), T)
    first = t0 + tile * _TILE
    last = start + tl.minimum(first + _TILE, count) - 1
    if (first < count) & (n * KEYS <= last):
        place = tile * _TILE + tl.arange(0, _TILE)
        limit = tl.minimum(start + t0 + place, last)
        max_pointers = max_ptr + tl.cast(tl.program_id(1), tl.int64) * NB * QC + place
        m = tl.full((_TILE,), float("-inf"), tl.float32)
        for i in range(0, last // KEYS + 1, 4):
            for u in tl.static_range(4):
                m = tl.maximum(m, tl.load(max_pointers + tl.cast(i + u, tl.int64) * QC, mask=(i + u) * KEYS <= limit, other=float("-inf")))
        pointers = s_ptr + (tl.cast(tl.program_id(1), tl.int64) * NB + n) * KEYS * QC + place
        total = tl.zeros((_TILE,), tl.float32)
        for k in range(0, KEYS, UNROLL):
            s = ()
            for u in tl.static_range(UNROLL):
                s = s + (tl.load(pointers + (k + u) * tl.cast(QC, tl.int64)),)
            for u in tl.static_range(UNROLL):
                p = exp_f32(s[u] - m)
                visible = n * KEYS + (k + u) <= limit
                tl.store(pointers + (k + u) * tl.cast(QC, tl.int64), p, mask=visible)
                total = tl.where(visible, total + p, total)
        tl.store(l_ptr + (tl.cast(tl.program_id(1), tl.int64) * NB + n) * QC + place, total)


@triton.jit
def value_span(
    p_pointers, v_pointers, l_pointers, out, total, first, end, limit, p_step,
    D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, A: tl.constexpr, E: tl.constexpr, UNROLL: tl.constexpr, MASKED: tl.constexpr,
    KEYS: tl.constexpr = 64,
):  # fmt: skip
    """(out, total) plus the sums of the blocks of keys first to end - 1 (multiples of 64); MASKED skips keys above `limit` [1, Y, A, 4, 1]."""
    acc = tl.zeros((X, Y, A, 4, E), tl.float32)
    slots = ()
    for u in tl.static_range(UNROLL):
        row = tl.cast(first + u, tl.int64)
        slots = slots + ((tl.load(p_pointers + row * p_step, mask=first < end), tl.load(v_pointers + row * D, mask=first < end)),)
    for k in range(first, end, UNROLL):
        filled = ()
        for u in tl.static_range(UNROLL):
            p = tl.broadcast_to(slots[u][0], (X, Y, A, 4, E))
            v = tl.broadcast_to(slots[u][1].to(tl.float32), (X, Y, A, 4, E))
            ahead = k + (UNROLL + u)
            row = tl.cast(ahead, tl.int64)
            filled = filled + ((tl.load(p_pointers + row * p_step, mask=ahead < end), tl.load(v_pointers + row * D, mask=ahead < end)),)
            if MASKED:
                acc = tl.where(tl.broadcast_to(k + u <= limit, (X, Y, A, 4, E)), tl.fma(p, v, acc), acc)
            else:
                acc = tl.fma(p, v, acc)
        slots = filled
        if (k + UNROLL) % KEYS == 0:
            # a block that a token does not see adds +0 to a sum that is never -0
            out = out + acc
            total = total + tl.load(l_pointers + tl.cast(k // KEYS, tl.int64) * p_step)
            acc = tl.zeros((X, Y, A, 4, E), tl.float32)
    return out, total


@triton.jit(do_not_specialize=["T", "N", "NB", "u0"])
def prefill_values_kernel(
    p_ptr, l_ptr, v_ptr, o_ptr, start_ptr, count_ptr, T, N, NB, QC, t0, u0,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, A: tl.constexpr, E: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """X * E columns x Y * 4 * A tokens of one unit, all keys; long rows first. o [B, T, H, D]."""
    tiles = QC // (Y * 4 * A)
    tile, slice_ = tiles - 1 - tl.program_id(0) // (D // (X * E)), tl.program_id(0) % (D // (X * E))
    unit = u0 + tl.program_id(1)
    b, h = unit // H, unit % H
    start, count = tl.load(start_ptr + b), tl.minimum(tl.load(count_ptr + b), T)
    first = t0 + tile * (Y * 4 * A)
    last = tl.where(first < count, tl.minimum(start + tl.minimum(first + Y * 4 * A, count), NB * KEYS) - 1, -1)
    # a row with a negative start means nothing, but must not be read in front of the cache
    end = tl.maximum((last + KEYS) // KEYS * KEYS, 0)
    whole = tl.minimum(tl.maximum((start + first + 1) // KEYS * KEYS, 0), end)  # up to here every token of the tile sees every key
    x = tl.arange(0, X)[:, None, None, None, None]
    y = tl.arange(0, Y)[None, :, None, None, None]
    place = tile * (Y * 4 * A) + tl.arange(0, A)[None, None, :, None, None] * (Y * 4) + y * 4 + tl.arange(0, 4)[None, None, None, :, None]
    column = slice_ * (X * E) + x * E + tl.arange(0, E)[None, None, None, None, :]
    limit = tl.minimum(start + t0 + place, last)
    step = tl.cast(QC, tl.int64)
    p_pointers = p_ptr + tl.cast(tl.program_id(1), tl.int64) * NB * KEYS * step + (place + x * 0)
    l_pointers = l_ptr + tl.cast(tl.program_id(1), tl.int64) * NB * step + (place + x * 0)
    v_pointers = v_ptr + (tl.cast(b, tl.int64) * G + h // (H // G)) * N * (KEYS * D) + (column + y * 0)
    out = tl.zeros((X, Y, A, 4, E), tl.float32)
    total = tl.zeros((X, Y, A, 4, 1), tl.float32)
    out, total = value_span(p_pointers, v_pointers, l_pointers, out, total, 0, whole, limit, step, D, X, Y, A, E, UNROLL, False)
    out, total = value_span(p_pointers, v_pointers, l_pointers, out, total, whole, end, limit, step, D, X, Y, A, E, UNROLL, True)
    o = tl.where(t0 + place < count, tl.div_rn(out, tl.broadcast_to(total, (X, Y, A, 4, E))), 0.0)
    row = (tl.cast(b, tl.int64) * T + t0 + place) * H + h
    tl.store(o_ptr + row * D + column, o.to(o_ptr.dtype.element_ty), mask=t0 + place < T)


def prefill_schedules() -> tuple[AttentionPrefillSchedule, ...]:
    """Every schedule that a study should sweep."""
    changes = (
        {}, dict(unroll=4), dict(unroll=1), dict(columns=4, score_keys=4), dict(columns=4, unroll=4), dict(tokens=4, unroll=4),
        dict(score_tokens=16, score_keys=4, tokens=16, columns=4), dict(score_warps=2, warps=2), dict(scratch_bytes=1 << 25),
        dict(score_warps=2, warps=1, score_tokens=4, tokens=4, columns=2, score_keys=2, unroll=8),
    )  # fmt: skip
    return tuple(AttentionPrefillSchedule(**change) for change in changes)


def chunk_sizes(units: int, tokens: int, keys: int, scratch_bytes: int) -> tuple[int, int]:
    """(tokens, units) of one pass: all units and many tokens where the scratch allows it, else 128 tokens of fewer units."""
    fitting = max(1, scratch_bytes // (TILE * keys * 4))  # units x 128 tokens
    most = min(fitting, 1 << 15)  # a dimension of a grid ends at 65535
    if most < units:
        return TILE, most
    return TILE * min(triton.cdiv(tokens, TILE), fitting // units), units


def lanes(per_thread: int, per_thread_tokens: int, columns: int, warps: int, dtype: torch.dtype) -> dict[str, int]:
    """X lanes along columns of E each (at most 16 bytes), Y lanes along tokens of 4 A each, at most a tile of 128; warps as these need."""
    e = min(per_thread, 4 if dtype == torch.float32 else 8)
    x = min(columns // e & -(columns // e), 32)
    y = max(1, min(32 * warps // x, TILE // 4))
    return dict(X=x, Y=y, A=min(per_thread_tokens // 4, TILE // (4 * y)), E=e, num_warps=max(1, x * y // 32))


@on_gpu("attention")
def prefill_attention(
    q_BTHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor, max_tokens: int, scale: float,
    out_dtype: torch.dtype, schedule: AttentionPrefillSchedule | None,
) -> torch.Tensor:  # fmt: skip
    """o_BTHD; k and v as a `KVCache` holds them; start + count of a row is at most `max_tokens`."""
    schedule = schedule or AttentionPrefillSchedule()
    batch, tokens, heads, dim = q_BTHD.shape
    device, groups, blocks, units = q_BTHD.device, k.shape[1], triton.cdiv(max_tokens, 64), batch * heads
    padded = triton.cdiv(tokens, TILE) * TILE
    chunk, some = chunk_sizes(units, tokens, blocks * 64, schedule.scratch_bytes)
    q_BHDT = torch.zeros((batch, heads, dim, triton.cdiv(padded, chunk) * chunk), dtype=torch.float32, device=device)
    q_BHDT[..., :tokens].copy_(q_BTHD.permute(0, 2, 3, 1))
    s = torch.empty((some, blocks * 64, chunk), dtype=torch.float32, device=device)
    highest, sums = torch.empty((2, some, blocks, chunk), dtype=torch.float32, device=device)
    o_BTHD = torch.empty(q_BTHD.shape, dtype=out_dtype, device=device)
    of_scores = lanes(schedule.score_keys, schedule.score_tokens, 64, schedule.score_warps, k.dtype)
    of_values = lanes(schedule.columns, schedule.tokens, dim, schedule.warps, v.dtype)
    score_tiles, value_tiles = (chunk // (cut["Y"] * 4 * cut["A"]) for cut in (of_scores, of_values))
    shape = dict(H=heads, G=groups, D=dim, UNROLL=schedule.unroll, enable_fp_fusion=False)
    for t0 in range(0, tokens, chunk):
        for u0 in range(0, units, some):
            here = min(some, units - u0)
            prefill_scores_kernel[(blocks * score_tiles, here)](
                q_BHDT, k, s, highest, start_B, count_B, tokens, q_BHDT.shape[3], k.shape[2], blocks, chunk, t0, u0, scale, **of_scores, **shape,
            )  # fmt: skip
            prefill_weights_kernel[(blocks * (chunk // TILE), here)](
                s, highest, sums, start_B, count_B, tokens, blocks, chunk, t0, u0, H=heads, UNROLL=16, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            prefill_values_kernel[(value_tiles * (dim // (of_values["X"] * of_values["E"])), here)](
                s, sums, v, o_BTHD, start_B, count_B, tokens, k.shape[2], blocks, chunk, t0, u0, **of_values, **shape,
            )  # fmt: skip
    return o_BTHD
