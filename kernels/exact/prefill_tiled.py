"""The tiled prefill kernel of family A on NVIDIA GPUs: y = x W^T through shared memory, near the rate at which FP32 FMA can be fed.

    y = prefill_tiled(x_MK, pack_weight(w_NK))      # `linear.linear_fma` chooses between this, the plain kernel and decode

A CTA owns BM tokens x BN outputs. Two k-major fp32 tiles of BK products each stand in shared memory (16-bit operands are upcast once, on
their way in); a thread holds a block of chains and, one k ahead, the x and w values of the next outer product, also across the barrier
between tiles. A chunk's sums are added to the span sums in shared memory, each by the thread that made them; a finished span sum waits for
its partner in the tree in a scratch of 3 slots [3, M, N]. With BY_SPAN every span has a CTA of its own and `parts_kernel` takes the tree.
Legend: M tokens, N outputs, S spans, G groups of 8 k in a span.

It is written in Gluon for the layouts; the arithmetic is explicit `fma` in ascending k, no dot and no tensor core. It does not run on AMD
(the layouts assume 32 lanes): `prefill.py` does.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.device import on_gpu
from kernels.exact.decode import PackedWeight, output_buffer, pad_spans, parts_kernel
from kernels.exact.order import CHUNK

__all__ = ["TiledSchedule", "prefill_tiled", "tiled_schedule", "tiled_schedules"]


@dataclass(frozen=True, kw_only=True)
class TiledSchedule:
    """How the work is cut; any valid value gives the same bits.

    block_m, block_n: tile of outputs (64, 128, 256); block_k: products between barriers (8, 16, 32); lanes_m, warps_m: lanes of a warp and
    warps along M (each lane holds 4 x 4 neighbours, repeated over the tile); warps: 4 or 8; registers: cap a thread (0: the compiler's
    choice), which sets how many CTAs share an SM; group_m: blocks of tokens that share an L2 pass; by_span: a CTA for every span;
    wave: CTAs that run side by side: where whole tiles would leave most of a last wave idle, its blocks of tokens are cut by span (0: never).
    """

    block_m: int = 64
    block_n: int = 128
    block_k: int = 8
    lanes_m: int = 4
    warps_m: int = 1
    warps: int = 4
    registers: int = 168
    group_m: int = 8
    by_span: bool = False
    wave: int = 0

    def __post_init__(self) -> None:
        allowed = {"block_m": (64, 128, 256), "block_n": (64, 128, 256), "block_k": (8, 16, 32), "lanes_m": (2, 4, 8), "warps_m": (1, 2, 4, 8), "warps": (4, 8), "group_m": (1, 2, 4, 8, 16)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of tiled_schedules()")
        if self.warps % self.warps_m or self.block_m * self.block_n > 128 * 128 * self.warps // 4 or not (self.registers == 0 or 64 <= self.registers <= 255):
            raise ValueError(f"warps_m divides warps, a thread holds at most 128 chains, registers are 0 or 64 to 255; got {self}; take an entry of tiled_schedules()")

    @property
    def shared_bytes(self) -> int:
        """Two tiles of x and of w, and the span sums: at most 224 KiB for what is allowed above, and 227 KiB are at hand."""
        return 4 * (2 * (self.block_m + self.block_n) * self.block_k + self.block_m * self.block_n)


@gluon.jit
def outer_fma(a_M, b_N, acc_MN):
    """acc + a b^T, one fma an element."""
    a, b = gl.broadcast(gl.expand_dims(a_M, 1), gl.expand_dims(b_N, 0))
    return gl.fma(a, b, acc_MN)


@gluon.jit
def tile_step(acc, a, b, x_rows, w_rows, x_next, w_next, x_tile, w_tile, x_new, w_new, BK: gl.constexpr, x_lanes: gl.constexpr, w_lanes: gl.constexpr):
    """BK outer products in ascending k from the current tile, whose k = 0 stands in (a, b); the new tile is stored in between.

    Returns the chains and (a, b) of the new tile's k = 0, loaded behind the barrier while the last product is computed.
    """
    for k in gl.static_range(1, BK):
        a_next = x_rows.index(k).load(x_lanes)
        b_next = w_rows.index(k).load(w_lanes)
        acc = outer_fma(a, b, acc)
        a, b = a_next, b_next
    x_tile.permute([1, 0]).store(x_new.to(gl.float32))
    w_tile.permute([1, 0]).store(w_new.to(gl.float32))
    gl.thread_barrier()
    a_next = x_next.index(0).load(x_lanes)
    b_next = w_next.index(0).load(w_lanes)
    return outer_fma(a, b, acc), a_next, b_next


@gluon.jit
def merge_span(pieces, y_ptr, scratch_ptr, M, N, m0, n0, s, S: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, PIECE: gl.constexpr, layout: gl.constexpr):
    """The finished span s joins the tree: it waits in scratch for its partner, or is added to the one that waits; the last one is y."""
    slot = M.to(gl.int64) * N
    n = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    for j in range(BM // PIECE):
        v = pieces.index(j).load(layout)
        m = m0 + j * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
        keep = (m < M)[:, None] & (n < N)[None, :]
        place = m.to(gl.int64)[:, None] * N + n[None, :]
        if s % 2 == 1:
            v = gl.load(scratch_ptr + place, mask=keep, other=0.0) + v
        if s % 4 == 3:
            v = gl.load(scratch_ptr + slot + place, mask=keep, other=0.0) + v
        if s % 8 == 7:
            v = gl.load(scratch_ptr + 2 * slot + place, mask=keep, other=0.0) + v
        if s == S - 1:
            gl.store(y_ptr + place, v, mask=keep)
        else:
            level = gl.where(s % 2 == 0, 0, gl.where(s % 4 == 1, 1, 2))
            gl.store(scratch_ptr + level * slot + place, v, mask=keep)


@gluon.jit(do_not_specialize=["M", "N", "G", "GROUPS_PER_ROW"])
def prefill_tiled_kernel(
    x_ptr, w_ptr, y_ptr, scratch_ptr, M, N, G, GROUPS_PER_ROW,
    S: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, LANES_M: gl.constexpr, WARPS_M: gl.constexpr, WARPS: gl.constexpr,
    GROUP_M: gl.constexpr, PAIRS_PER_CHUNK: gl.constexpr,
):  # fmt: skip
    """One CTA: BM tokens x BN outputs over S spans, from span program_id(1) * S on; grid axis 0 is walked in bands of GROUP_M token blocks."""
    acc_layout: gl.constexpr = gl.BlockedLayout([4, 4], [LANES_M, 32 // LANES_M], [WARPS_M, WARPS // WARPS_M], [1, 0])
    x_lanes: gl.constexpr = gl.SliceLayout(1, acc_layout)
    w_lanes: gl.constexpr = gl.SliceLayout(0, acc_layout)
    X_WARPS: gl.constexpr = BM // 32 if BM < WARPS * 32 else WARPS
    W_WARPS: gl.constexpr = BN // 32 if BN < WARPS * 32 else WARPS
    X_RUN: gl.constexpr = BM * BK // (WARPS * 32) if BM * BK < WARPS * 256 else 8
    x_stage: gl.constexpr = gl.BlockedLayout([1, X_RUN], [32, 1], [X_WARPS, WARPS // X_WARPS], [1, 0])
    w_stage: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W_WARPS, WARPS // W_WARPS], [1, 0])
    piece: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PIECE: gl.constexpr = WARPS * 2
    GT: gl.constexpr = BK // 8

    blocks_m, blocks_n = gl.cdiv(M, BM), gl.cdiv(N, BN)
    band = gl.program_id(0) // (GROUP_M * blocks_n)
    height = gl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    inside = gl.program_id(0) % (GROUP_M * blocks_n)
    m0, n0 = (band * GROUP_M + inside % height) * BM, (inside // height) * BN
    first = gl.program_id(1) * S
    y_ptr += first.to(gl.int64) * M * N

    xs0 = gl.allocate_shared_memory(gl.float32, [BK, BM], tile)
    xs1 = gl.allocate_shared_memory(gl.float32, [BK, BM], tile)
    ws0 = gl.allocate_shared_memory(gl.float32, [BK, BN], tile)
    ws1 = gl.allocate_shared_memory(gl.float32, [BK, BN], tile)
    totals = gl.allocate_shared_memory(gl.float32, [BM, BN], tile)
    x0, x1 = xs0._reinterpret(gl.float32, [BK, BM], row), xs1._reinterpret(gl.float32, [BK, BM], row)
    w0, w1 = ws0._reinterpret(gl.float32, [BK, BN], row), ws1._reinterpret(gl.float32, [BK, BN], row)
    pieces = totals._reinterpret(gl.float32, [BM // PIECE, PIECE, BN], tile)

    xk, wk = gl.arange(0, BK, gl.SliceLayout(0, x_stage)), gl.arange(0, BK, gl.SliceLayout(0, w_stage))
    xm = gl.minimum(m0 + gl.arange(0, BM, gl.SliceLayout(1, x_stage)), M - 1)
    wn = gl.minimum(n0 + gl.arange(0, BN, gl.SliceLayout(1, w_stage)), N - 1)
    x_at = x_ptr + (xm.to(gl.int64) * (GROUPS_PER_ROW * 8) + first * G * 8)[:, None] + xk[None, :]
    w_at = w_ptr + (first.to(gl.int64) * G * N * 8 + wn * 8)[:, None] + ((wk // 8).to(gl.int64) * N * 8 + wk % 8)[None, :]
    x_new = gl.load(x_at, mask=(xk // 8 < G)[None, :], other=0.0)
    w_new = gl.load(w_at, mask=(wk // 8 < G)[None, :], other=0.0)
    xs0.permute([1, 0]).store(x_new.to(gl.float32))
    ws0.permute([1, 0]).store(w_new.to(gl.float32))
    gl.thread_barrier()
    a, b = x0.index(0).load(x_lanes), w0.index(0).load(w_lanes)

    acc = gl.zeros([BM, BN], gl.float32, acc_layout)
    pairs = gl.cdiv(G, 2 * GT)  # a pair of tiles a step; groups past the span's end are zeros, which end its last chunk
    t, s = 0, 0
    for _ in range(S * pairs):
        q, left = s * G + (2 * t + 1) * GT, G - (2 * t + 1) * GT
        x_new = gl.load(x_at + q * 8, mask=(xk // 8 < left)[None, :], other=0.0)
        w_new = gl.load(w_at + q.to(gl.int64) * N * 8, mask=(wk // 8 < left)[None, :], other=0.0)
        acc, a, b = tile_step(acc, a, b, x0, w0, x1, w1, xs1, ws1, x_new, w_new, BK, x_lanes, w_lanes)
        last = t == pairs - 1
        t_next, s_next = gl.where(last, 0, t + 1), gl.where(last, s + 1, s)
        q, left = s_next * G + 2 * t_next * GT, gl.where(s_next < S, G - 2 * t_next * GT, 0)
        x_new = gl.load(x_at + q * 8, mask=(xk // 8 < left)[None, :], other=0.0)
        w_new = gl.load(w_at + q.to(gl.int64) * N * 8, mask=(wk // 8 < left)[None, :], other=0.0)
        acc, a, b = tile_step(acc, a, b, x1, w1, x0, w0, xs0, ws0, x_new, w_new, BK, x_lanes, w_lanes)
        if (t % PAIRS_PER_CHUNK == PAIRS_PER_CHUNK - 1) | last:
            v = acc + 0.0
            if t >= PAIRS_PER_CHUNK:
                v = totals.load(acc_layout) + v
            totals.store(v)
            acc = gl.zeros([BM, BN], gl.float32, acc_layout)
            if last:
                gl.thread_barrier()
                merge_span(pieces, y_ptr, scratch_ptr, M, N, m0, n0, s, S, BM, BN, PIECE, piece)
        t, s = t_next, s_next


def tiled_schedules() -> tuple[TiledSchedule, ...]:
    """Every schedule that a study should sweep."""
    large = dict(block_m=128, block_k=16, warps=8, warps_m=4, registers=128)
    return (
        TiledSchedule(), TiledSchedule(by_span=True), TiledSchedule(wave=3), TiledSchedule(registers=0, group_m=4), TiledSchedule(block_k=16, warps_m=2),
        TiledSchedule(block_k=16, lanes_m=8), TiledSchedule(**large), TiledSchedule(**large, by_span=True), TiledSchedule(block_m=128, warps_m=2, registers=0),
    )  # fmt: skip


def tiled_schedule(m: int, n: int, k: int) -> TiledSchedule:
    """The schedule used by default: a function of shape only (measured on an H200, NOTES.md), K not among what decides. Few tiles: a CTA for every span."""
    return TiledSchedule(by_span=-(-m // 64) * -(-n // 128) < 1024, wave=_WAVE)


_WAVE = 396  # three CTAs of the default tile on each of an H200's 132 SMs
_CUT_COST = 0.1  # waves: a second launch, and the spans' sums through memory


def whole_rows(m: int, n: int, c: TiledSchedule) -> int:
    """Tokens, the first ones, that are computed in whole tiles; the rest goes by span.

    Time is counted in waves: a whole tile takes one, a span an eighth, and a partly filled wave as long as a full one.
    """
    blocks, across = triton.cdiv(m, c.block_m), triton.cdiv(n, c.block_n)
    waves = triton.cdiv(blocks * across, c.wave) if c.wave else 1
    if waves == 1:
        return m
    kept = (waves - 1) * c.wave // across
    cut = triton.cdiv(kept * across, c.wave) + triton.cdiv((blocks - kept) * across * 8, c.wave) / 8
    return kept * c.block_m if cut < waves - _CUT_COST else m


@on_gpu("linear_fma")
def prefill_tiled(x_MK: torch.Tensor, weight: PackedWeight, schedule: TiledSchedule | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN float32 (in `out` where given) in the canonical order."""
    (m, k), n = x_MK.shape, weight.n
    if k != weight.k:
        raise ValueError(f"x_MK and the packed weight need one K; got {tuple(x_MK.shape)=} {weight.shape=}; pack the right weight")
    if m * n * k == 0:
        return output_buffer(out, m, n, x_MK.device).zero_()
    c = schedule or tiled_schedule(m, n, k)
    x_MK, y_MN = pad_spans(x_MK, weight.data.shape[0]), output_buffer(out, m, n, x_MK.device)
    whole = m if c.by_span else whole_rows(m, n, c)
    if whole:
        _launch(x_MK[:whole], weight, c, y_MN[:whole])
    if whole < m:
        _launch(x_MK[whole:], weight, replace(c, by_span=True), y_MN[whole:])
    return y_MN


def _launch(x_MK: torch.Tensor, weight: PackedWeight, c: TiledSchedule, y_MN: torch.Tensor) -> None:
    """x padded by span, y contiguous."""
    (m, n), (spans, groups) = y_MN.shape, weight.data.shape[:2]
    split = spans if c.by_span else 1
    sums = y_MN if split == 1 else torch.empty((split, m, n), dtype=torch.float32, device=y_MN.device)
    scratch = y_MN if spans == split else torch.empty((3, m, n), dtype=torch.float32, device=y_MN.device)
    cap = {"maxnreg": c.registers} if c.registers else {}
    prefill_tiled_kernel[(triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n), split)](
        x_MK, weight.data, sums, scratch, m, n, groups, spans * groups, S=spans // split, BM=c.block_m, BN=c.block_n, BK=c.block_k,
        LANES_M=c.lanes_m, WARPS_M=c.warps_m, WARPS=c.warps, GROUP_M=c.group_m, PAIRS_PER_CHUNK=CHUNK // (2 * c.block_k), num_warps=c.warps, enable_fp_fusion=False, **cap,
    )  # fmt: skip
    if split > 1:
        parts_kernel[(triton.cdiv(m * n, 32),)](sums, y_MN, m * n, ROWS=1, PARTS=split, BLOCK=32, num_warps=1, enable_fp_fusion=False)
