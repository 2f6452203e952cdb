"""The prefill kernel of family A: y = x W^T for many tokens, bound by the rate of FP32 FMA.

    y = prefill_fma(x_MK, pack_weight(w_NK))         # on a GPU; `linear.linear_fma` chooses between this and the decode kernel

A thread holds R rows of W and B tokens: R * B chains (`acc`) and as many span sums (`total`), the two live tiles. Lanes lie along n,
warps along tokens, so a CTA covers R * LANES outputs x WARPS * B tokens and its warps find W in the L1 cache. Spans are walked one after
the other; a finished span sum waits for its partner in the tree in a scratch of 3 slots [3, M, N] (4 + 2 + 1 tile writes and as many reads).
Legend: M tokens, N outputs, S spans, G groups of 8 in a span.

It is explicit `tl.fma`, not `tl.dot`: no tensor core and no order that a compiler may choose. It reads the same packed weight as decode.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact._chains import span_sum
from kernels.exact.decode import PackedWeight, dividing_unroll, output_buffer, pad_spans

__all__ = ["PrefillSchedule", "prefill_fma", "prefill_schedule", "prefill_schedules"]


@dataclass(frozen=True, kw_only=True)
class PrefillSchedule:
    """How the work is cut; any valid value gives the same bits.

    rows: rows of W per thread (1, 2, 4, 8); block_m: tokens per thread (1, 2, 4, 8, 16); lanes: threads along N (32, 64, 128);
    warps_m: groups of lanes along M (1, 2, 4, 8); unroll: groups of 8 k in flight (1, 2, 4); group_m: blocks of tokens that share an L2 pass.
    """

    rows: int = 8
    block_m: int = 8
    lanes: int = 32
    warps_m: int = 4
    unroll: int = 1
    group_m: int = 8

    def __post_init__(self) -> None:
        allowed = {"rows": (1, 2, 4, 8), "block_m": (1, 2, 4, 8, 16), "lanes": (32, 64, 128), "warps_m": (1, 2, 4, 8), "unroll": (1, 2, 4), "group_m": (1, 2, 4, 8, 16)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of prefill_schedules()")
        if self.rows * self.block_m > 64 or self.num_warps > 16:
            raise ValueError(f"rows * block_m is at most 64 and warps at most 16; got {self}; lower one of them")

    @property
    def num_warps(self) -> int:
        return self.warps_m * self.lanes // 32


@triton.jit(do_not_specialize=["M", "N", "G", "GROUPS_PER_ROW"])
def prefill_kernel(
    x_ptr, w_ptr, y_ptr, scratch_ptr, M, N, G, GROUPS_PER_ROW,
    S: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr, GROUP_M: tl.constexpr,
    X_WIDE: tl.constexpr, W_WIDE: tl.constexpr,
):  # fmt: skip
    """One CTA: R * LANES outputs x W * B tokens, all spans. Grid: one dimension, walked in bands of GROUP_M token blocks."""
    blocks_m, blocks_n = tl.cdiv(M, W * B), tl.cdiv(N, R * LANES)
    band = tl.program_id(0) // (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * blocks_n)
    block_m, block_n = band * GROUP_M + inside % height, inside // height
    lane = tl.arange(0, LANES)[:, None, None, None]
    warp = tl.arange(0, W)[None, :, None, None]
    r = tl.arange(0, R)[None, None, :, None]
    b = tl.arange(0, B)[None, None, None, :]
    n = block_n * (R * LANES) + r * LANES + lane
    m = block_m * (W * B) + warp * B + b
    keep = (m < M) & (n < N)
    place = m.to(tl.int64) * N + n
    # every warp asks for all of W's tile: the zero terms give both operands the full [LANES, W] of threads
    w_pointers = w_ptr + ((tl.minimum(n, N - 1) + warp * 0) * 8)[:, :, :, :, None]
    x_pointers = x_ptr + ((tl.minimum(m, M - 1).to(tl.int64) * GROUPS_PER_ROW + lane * 0) * 8)[:, :, :, :, None]
    slot = tl.cast(M, tl.int64) * N
    for s in range(S):
        first = tl.cast(s, tl.int64) * G * 8
        v = span_sum(x_pointers + first, w_pointers + first * N, G, N * 8, LANES, W, R, B, UNROLL, X_WIDE, W_WIDE, False, False)
        tl.debug_barrier()
        if s % 2 == 1:
            v = tl.load(scratch_ptr + place, mask=keep, other=0.0) + v
        if s % 4 == 3:
            v = tl.load(scratch_ptr + slot + place, mask=keep, other=0.0) + v
        if s % 8 == 7:
            v = tl.load(scratch_ptr + 2 * slot + place, mask=keep, other=0.0) + v
        if s == S - 1:
            tl.store(y_ptr + place, v, mask=keep)
        else:
            level = tl.where(s % 2 == 0, 0, tl.where(s % 4 == 1, 1, 2))
            tl.store(scratch_ptr + level * slot + place, v, mask=keep)


def prefill_schedules() -> tuple[PrefillSchedule, ...]:
    """Every schedule that a study should sweep."""
    shapes = ((4, 8, 32, 8), (4, 8, 32, 4), (4, 8, 64, 4), (4, 4, 32, 8), (8, 4, 32, 8), (2, 16, 32, 8), (8, 8, 32, 4), (4, 16, 32, 4), (2, 8, 64, 4))
    return tuple(PrefillSchedule(rows=r, block_m=b, lanes=lanes, warps_m=w) for r, b, lanes, w in shapes)


def prefill_schedule(m: int, n: int, k: int) -> PrefillSchedule:
    """The schedule used by default: a function of shape only, and the same for every shape so far."""
    return PrefillSchedule()


@on_gpu("linear_fma")
def prefill_fma(x_MK: torch.Tensor, weight: PackedWeight, schedule: PrefillSchedule | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN float32 (in `out` where given) in the canonical order."""
    (m, k), n = x_MK.shape, weight.n
    if k != weight.k:
        raise ValueError(f"x_MK and the packed weight need one K; got {tuple(x_MK.shape)=} {weight.shape=}; pack the right weight")
    if m * n * k == 0:
        return output_buffer(out, m, n, x_MK.device).zero_()
    schedule = schedule or prefill_schedule(m, n, k)
    spans, groups = weight.data.shape[:2]
    y_MN = output_buffer(out, m, n, x_MK.device)
    scratch = torch.empty((3, m, n) if spans > 1 else (0,), dtype=torch.float32, device=x_MK.device)
    blocks_m = triton.cdiv(m, schedule.warps_m * schedule.block_m)
    grid = (blocks_m * triton.cdiv(n, schedule.rows * schedule.lanes),)
    prefill_kernel[grid](
        pad_spans(x_MK, spans), weight.data, y_MN, scratch, m, n, groups, spans * groups, S=spans, LANES=schedule.lanes, W=schedule.warps_m,
        R=schedule.rows, B=schedule.block_m, UNROLL=dividing_unroll(schedule.unroll, groups), GROUP_M=schedule.group_m,
        X_WIDE=x_MK.dtype == torch.float32, W_WIDE=weight.dtype == torch.float32, num_warps=schedule.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN
