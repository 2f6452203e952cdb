"""The decode kernel of family A: y = x W^T for few tokens, near the speed at which memory delivers 16-bit weights.

    y = decode_fma(x_MK, pack_weight(w_NK))          # on a GPU; `linear.linear_fma` chooses between this and the prefill kernel

Layout: the weight is stored as [span, group of 8 k, n, 8], so a lane reads 8 consecutive k of one row in 16 bytes and a warp reads 512
consecutive bytes. A warp owns one span (8 warps, 8 spans) and walks its chunks one after the other; every product is one `tl.fma` of
weights upcast in registers. The tree over spans is taken inside the CTA; where spans or chunks are spread over CTAs, each stores its
sums, and the last CTA of a block of outputs (who is last, an atomic ticket says) or a second small kernel adds them in the fixed order.
Legend: M tokens, N outputs, S spans, G groups of 8 in a span, R rows of W per thread, B tokens per thread.

It keeps 2 bytes a weight and uses neither tensor cores nor shared-memory staging; no float passes through an atomic, and the schedule cannot
change bits. The tickets belong to the weight, so one packed weight serves one stream at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact._chains import GROUP, span_sum
from kernels.exact.order import CHUNK, span_count

__all__ = ["DecodeSchedule", "PackedWeight", "decode_fma", "decode_schedule", "decode_schedules", "pack_weight"]


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """w_NK as [S, G, N, 8] (`data`), zero-padded inside each span to a multiple of 8; made by `pack_weight`.

    `tickets`: zeros that every launch leaves as zeros; CTAs draw from them who adds the chunks. So a packed weight serves one stream at
    a time, as a cuBLAS workspace does.
    """

    data: torch.Tensor
    tickets: torch.Tensor
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device


@dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """How the work is cut; any valid value gives the same bits.

    rows: rows of W per thread (1, 2, 4, 8); lanes: threads side by side along N in one span (32, 64, 128); block_m: tokens per thread
    (power of two up to 16); folds: groups of block_m tokens side by side in one CTA, which find W in its L1 cache (1, 2, 4); unroll: groups
    of 8 k in flight per row (1 to 16); split: CTAs that share the 8 spans (1, 2, 4, 8); x_ahead: load x one group ahead of its use;
    by_chunk: one CTA takes one chunk of each of its spans, and the last CTA to finish adds them (in the fixed order: who it is cannot matter).
    """

    rows: int = 1
    lanes: int = 32
    block_m: int = 1
    folds: int = 1
    unroll: int = 4
    split: int = 1
    x_ahead: bool = True
    by_chunk: bool = False

    def __post_init__(self) -> None:
        allowed = {"rows": (1, 2, 4, 8), "lanes": (32, 64, 128), "block_m": (1, 2, 4, 8, 16), "folds": (1, 2, 4), "unroll": (1, 2, 4, 8, 16), "split": (1, 2, 4, 8)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of decode_schedules()")
        if self.rows * self.block_m > 64 or self.num_warps(8) > 16:
            raise ValueError(f"rows * block_m accumulators per thread are at most 64, warps at most 16; got {self}; lower one of them")

    def num_warps(self, spans: int) -> int:
        return max(1, spans // self.split) * self.folds * self.lanes // 32

    @property
    def block_n(self) -> int:
        return self.rows * self.lanes


def pack_weight(w_NK: torch.Tensor, *, spans: int | None = None) -> PackedWeight:
    """[N, K] -> [S, G, N, 8] on the same device: a permutation plus zeros that end a span on a multiple of 8.

    `spans`: w is a tensor-parallel shard of a longer K that holds this many of its 8 spans (order.span_count); the result is then the
    complete subtree over them, and the ranks' results are added as the upper levels of the tree.
    """
    if w_NK.ndim != 2:
        raise ValueError(f"a weight is w_NK; got {tuple(w_NK.shape)=}; reshape it to two dimensions")
    n, k = w_NK.shape
    count = span_count(k, spans)
    data = pad_spans(w_NK, count).view(n, count, -(-k // (count * GROUP)), GROUP).permute(1, 2, 0, 3).contiguous()
    return PackedWeight(data=data, tickets=torch.zeros(4 * -(-n // 32), dtype=torch.int32, device=w_NK.device), n=n, k=k)


def pad_spans(a_RK: torch.Tensor, s: int) -> torch.Tensor:
    """[rows, K] -> [rows, S * G * 8]; no copy where 8 divides the span length."""
    rows, k = a_RK.shape
    length = k // s
    if length % GROUP == 0:
        return a_RK.contiguous()
    return torch.nn.functional.pad(a_RK.reshape(rows, s, length), (0, -length % GROUP)).reshape(rows, s * (length + -length % GROUP))


def dividing_unroll(unroll: int, groups: int) -> int:
    """The largest power of two up to `unroll` that divides the groups of a span (and, being at most 32, of a chunk)."""
    while groups % unroll:
        unroll //= 2
    return unroll


@triton.jit
def span_tree(v, LANES: tl.constexpr, S: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """[LANES, S, R, B] -> [LANES, R, B]: neighbours first, ((0+1)+(2+3))+((4+5)+(6+7))."""
    v = tl.permute(v, (0, 2, 3, 1))
    if S == 8:
        left, right = tl.split(tl.reshape(v, (LANES, R, B, 4, 2)))
        v = left + right
    if S >= 4:
        left, right = tl.split(tl.reshape(v, (LANES, R, B, 2, 2)))
        v = left + right
    if S >= 2:
        left, right = tl.split(tl.reshape(v, (LANES, R, B, 2)))
        v = left + right
    else:
        v = tl.reshape(v, (LANES, R, B))
    return v


@triton.jit
def add_parts(part_ptr, at, inside, stride, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK]: rows (chunks of a span) are added left to right, parts by the (upper levels of the) span tree; part [row, PARTS] + at."""
    p = tl.arange(0, PARTS)[None, :]
    total = tl.zeros((BLOCK, PARTS), tl.float32)
    for row in tl.static_range(ROWS):
        total = total + tl.load(part_ptr + (row * PARTS + p).to(tl.int64) * stride + at[:, None], mask=inside[:, None], other=0.0, cache_modifier=".cg")
    return tl.reshape(span_tree(tl.reshape(total, (BLOCK, PARTS, 1, 1)), BLOCK, PARTS, 1, 1), (BLOCK,))


@triton.jit(do_not_specialize=["M", "N", "G", "GROUPS_PER_ROW"])
def decode_kernel(
    x_ptr, w_ptr, out_ptr, y_ptr, ticket_ptr, M, N, G, GROUPS_PER_ROW,
    B: tl.constexpr, F: tl.constexpr, R: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
    X_WIDE: tl.constexpr, W_WIDE: tl.constexpr, X_AHEAD: tl.constexpr, BY_CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    FINISH: tl.constexpr, ROWS: tl.constexpr, CHUNK_GROUPS: tl.constexpr = CHUNK // GROUP,
):  # fmt: skip
    """One CTA: S spans x (R * LANES) rows of W x F * B tokens. Grid (N blocks, SPLIT or SPLIT * chunks, M blocks).

    out is [SPLIT, M, N], parts of the span tree; BY_CHUNK: one chunk of each span, out is [chunk, span, M, N]. FINISH: the CTA that takes
    the last ticket of its (N, M) block adds them into y and puts the counter back to 0.
    """
    part = tl.program_id(1) % SPLIT
    chunk = tl.program_id(1) // SPLIT
    lane = tl.arange(0, LANES)[:, None, None, None, None]
    d = tl.arange(0, S * F)[None, :, None, None, None]
    s = part * S + d // F
    r = tl.arange(0, R)[None, None, :, None, None]
    b = (d % F) * B + tl.arange(0, B)[None, None, None, :, None]
    n = tl.minimum(tl.program_id(0) * (R * LANES) + r * LANES + lane, N - 1)
    m = tl.minimum(tl.program_id(2) * (F * B) + b, M - 1)
    w_pointers = w_ptr + (s.to(tl.int64) * G * N + n) * 8
    # offsets in x have 32 bits, which the host sees to: with 64, registers and so whole waves of CTAs were lost (NOTES.md)
    x_pointers = x_ptr + (m * GROUPS_PER_ROW * 8 + lane * 0) + s * G * 8
    if BY_CHUNK:
        first = chunk * CHUNK_GROUPS
        x_pointers += first * 8
        w_pointers += first.to(tl.int64) * N * 8
        groups = tl.minimum(G - first, CHUNK_GROUPS)
    else:
        groups = G
    total = span_sum(x_pointers, w_pointers, groups, N * 8, LANES, S * F, R, B, UNROLL, X_WIDE, W_WIDE, True, X_AHEAD)
    v = tl.reshape(total, (LANES, S, F * R, B))
    fr = tl.arange(0, F * R)[None, :, None]
    m3 = tl.program_id(2) * (F * B) + (fr // R) * B + tl.arange(0, B)[None, None, :]
    n3 = tl.program_id(0) * (R * LANES) + (fr % R) * LANES + tl.arange(0, LANES)[:, None, None]
    inside = (m3 < M) & (n3 < N)
    if BY_CHUNK:
        row = ((chunk * SPLIT + part) * S + tl.arange(0, S)).to(tl.int64)[None, :, None, None] * M + tl.expand_dims(m3, 1)
        tl.store(out_ptr + row * N + tl.expand_dims(n3, 1), v, mask=tl.expand_dims(inside, 1))
    if FINISH:
        tl.debug_barrier()
        block = ticket_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(block, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            i = tl.arange(0, F * B * R * LANES)
            token, column = tl.program_id(2) * (F * B) + i // (R * LANES), tl.program_id(0) * (R * LANES) + i % (R * LANES)
            keep = (token < M) & (column < N)
            at = token.to(tl.int64) * N + column
            tl.store(y_ptr + at, add_parts(out_ptr, at, keep, tl.cast(M, tl.int64) * N, ROWS, SPLIT * S, F * B * R * LANES), mask=keep)
            tl.store(block, 0)
    if not BY_CHUNK:
        y = span_tree(v, LANES, S, F * R, B)
        tl.store(out_ptr + (part * M + m3).to(tl.int64) * N + n3, y, mask=inside)


@triton.jit
def parts_kernel(part_ptr, y_ptr, count, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """y = the sum of part [ROWS, PARTS, count] in the order of `add_parts`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, add_parts(part_ptr, i, i < count, count, ROWS, PARTS, BLOCK), mask=i < count)


def decode_schedules(m: int = 1) -> tuple[DecodeSchedule, ...]:
    """Every schedule that a study should sweep for m tokens."""
    tokens = [b for b in (1, 2, 4, 8, 16) if b == 1 or b < 2 * m]
    shapes = ((1, 32, 8, 1), (1, 32, 4, 2), (2, 32, 4, 1), (2, 32, 2, 2), (4, 32, 1, 4), (1, 64, 4, 1), (2, 64, 4, 4), (1, 128, 4, 8))
    found = [
        DecodeSchedule(rows=rows, lanes=lanes, block_m=block_m, folds=folds, unroll=unroll, split=split, x_ahead=ahead, by_chunk=by_chunk)
        for block_m in tokens[-2:]
        for (rows, lanes, unroll, split), ahead, by_chunk, folds in zip(shapes, (True, False) * 4, (False, False, True, True) * 2, (1, 2, 2, 1) * 2, strict=True)
        if 8 // split * folds * lanes <= 16 * 32
    ]
    return tuple(found)


# tokens of a CTA: rows, unroll, split, x_ahead, by_chunk, folds. From _WIDE_N outputs on, one warp a span fills the chip; below, chunks must be
# spread too (_NARROW, and _LONG from as many inputs on).
_WIDE_N = 8192
_WIDE = {1: (2, 4, 1, True, False, 1), 2: (2, 4, 1, True, False, 1), 4: (2, 2, 1, True, False, 1), 8: (4, 2, 1, False, False, 1), 16: (2, 2, 2, False, True, 1)}
_NARROW = {1: (1, 16, 1, False, False, 1), 2: (2, 4, 4, False, True, 2), 4: (2, 4, 4, True, True, 2), 8: (2, 4, 4, False, True, 2), 16: (2, 2, 2, False, True, 1)}
_LONG = {1: (1, 16, 1, False, False, 1), 2: (2, 4, 2, True, True, 1), 4: (4, 2, 4, False, True, 1), 8: (4, 4, 2, False, True, 1), 16: (2, 2, 2, False, True, 1)}
MOST_BLOCKS = 65535  # of tokens in one launch: a grid's third axis
MOST_ELEMENTS = 2**31 - 1  # of x in one launch: the kernel's offsets in it have 32 bits
_FINISH_CHUNKS = 2  # up to so many chunks a span the last CTA adds them itself; more take longer than a second launch


def decode_schedule(m: int, n: int, k: int) -> DecodeSchedule:
    """The schedule used by default: a function of shape only (measured on an H200, NOTES.md)."""
    tokens = next(b for b in (1, 2, 4, 8, 16) if b >= min(m, 16))
    table = _WIDE if n >= _WIDE_N else _LONG if k >= _WIDE_N else _NARROW
    rows, unroll, split, x_ahead, by_chunk, folds = table[tokens]
    return DecodeSchedule(block_m=tokens // folds, folds=folds, rows=rows, unroll=unroll, split=split, x_ahead=x_ahead, by_chunk=by_chunk)


def output_buffer(out: torch.Tensor | None, m: int, n: int, device: torch.device) -> torch.Tensor:
    """The caller's buffer, checked, or a new one: y_MN float32."""
    if out is None:
        return torch.empty((m, n), dtype=torch.float32, device=device)
    if out.shape != (m, n) or out.dtype != torch.float32 or not out.is_contiguous() or out.device != device:
        raise ValueError(f"out is a contiguous fp32 tensor {(m, n)} on {device}; got {tuple(out.shape)=} {out.dtype=} {out.device=}; allocate it so")
    return out


@on_gpu("linear_fma")
def decode_fma(x_MK: torch.Tensor, weight: PackedWeight, schedule: DecodeSchedule | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN float32 (in `out` where given) in the canonical order; any M (more than block_m tokens take more CTAs, which read W again)."""
    (m, k), n = x_MK.shape, weight.n
    if k != weight.k:
        raise ValueError(f"x_MK and the packed weight need one K; got {tuple(x_MK.shape)=} {weight.shape=}; pack the right weight")
    if m * n * k == 0:
        return output_buffer(out, m, n, x_MK.device).zero_()
    schedule = schedule or decode_schedule(m, n, k)
    spans, groups = weight.data.shape[:2]
    split = min(schedule.split, spans)
    chunks = triton.cdiv(groups, CHUNK // GROUP) if schedule.by_chunk else 1
    parts = chunks * spans if schedule.by_chunk else split
    y_MN = output_buffer(out, m, n, x_MK.device)
    tokens = schedule.block_m * schedule.folds
    if m > (most := max(min(MOST_BLOCKS, MOST_ELEMENTS // (spans * groups * GROUP * tokens)), 1) * tokens):
        for m0 in range(0, m, most):
            decode_fma(x_MK[m0 : m0 + most], weight, schedule, y_MN[m0 : m0 + most])
        return y_MN
    sums = y_MN if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=x_MK.device)
    grid = (triton.cdiv(n, schedule.block_n), split * chunks, triton.cdiv(m, tokens))
    finish = schedule.by_chunk and 1 < parts and chunks <= _FINISH_CHUNKS and grid[0] * grid[2] <= weight.tickets.numel()
    decode_kernel[grid](
        pad_spans(x_MK, spans), weight.data, sums, y_MN, weight.tickets, m, n, groups, spans * groups, B=schedule.block_m, F=schedule.folds, R=schedule.rows,
        S=spans // split, LANES=schedule.lanes, UNROLL=dividing_unroll(schedule.unroll, groups), X_WIDE=x_MK.dtype == torch.float32,
        W_WIDE=weight.dtype == torch.float32, X_AHEAD=schedule.x_ahead, BY_CHUNK=schedule.by_chunk, SPLIT=split,
        FINISH=finish, ROWS=chunks if finish else 1, num_warps=schedule.num_warps(spans), enable_fp_fusion=False,
    )  # fmt: skip
    if parts > 1 and not finish:
        parts_kernel[(triton.cdiv(m * n, 32),)](sums, y_MN, m * n, ROWS=chunks, PARTS=parts // chunks, BLOCK=32, num_warps=1, enable_fp_fusion=False)
    return y_MN
