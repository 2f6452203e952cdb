"""The prefill kernel of family B: int8 tensor-core products of digit planes, six (b6) or nine (b9) per tile, rounded once at the end.

    y = prefill_integer(planes_x, ex_M, weight, schedule, out)          # on a GPU; `integer.linear_integer` slices x and calls it

Legend: M tokens, N outputs, KP inputs (padded with zeros), planes int8 [3, rows, KP], top digit first. Per tile and block of K all six
planes are read once and every product goes to the int32 accumulator of its digit weight (3 for b6, 5 for b9). Sums of integers: the tile,
the pipeline and the order of programs cannot change bits, so a schedule may differ by architecture.
It splits no K over programs (decode does) and reads weights of 3 bytes, not 2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.exact.integer_rounding import moderate, rounded

__all__ = ["IntegerPrefillSchedule", "integer_prefill_schedule", "integer_prefill_schedules", "prefill_integer"]


@dataclass(frozen=True, kw_only=True)
class IntegerPrefillSchedule:
    """How the work is cut; any valid value gives the same bits.

    block_m, block_n, block_k: tile (powers of two; block_k 32, 64 or 128); group_m: row blocks that share columns of W in L2; tma: load tiles by
    tensor descriptors (sm_90 and later).
    """

    block_m: int = 128
    block_n: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    tma: bool = False

    def __post_init__(self) -> None:
        allowed = {"block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "block_k": (32, 64, 128), "num_warps": (1, 2, 4, 8, 16)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of integer_prefill_schedules()")
        if self.num_stages < 1 or self.group_m < 1:
            raise ValueError(f"num_stages and group_m are at least 1; got {self}; take an entry of integer_prefill_schedules()")
        if self.shared_bytes > 227 << 10:
            raise ValueError(f"the pipeline holds at most 227 KiB of shared memory; got {self.shared_bytes=} {self}; lower a block or num_stages")

    @property
    def shared_bytes(self) -> int:
        return 3 * (self.block_m + self.block_n) * self.block_k * self.num_stages


@triton.jit
def load_tile(source, plane: tl.constexpr, plane_stride, rows, first, k, offsets, edge, EVEN_K: tl.constexpr, TMA: tl.constexpr):
    """int8 [rows of the tile, BK] of one plane: by descriptor (a last tile may run into the next plane: those rows are not stored), or by pointers."""
    if TMA:
        return source.load([plane * rows + first, k])
    elif EVEN_K:
        return tl.load(source + plane * plane_stride + k + offsets)
    else:
        return tl.load(source + plane * plane_stride + k + offsets, mask=edge, other=0)


@triton.jit
def halves(a):
    """[rows, columns] -> its left and right half; register moves only in the layouts of tensor-core results."""
    return tl.split(tl.permute(tl.reshape(a, (a.shape[0], 2, a.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def store_tile(acc0, acc1, acc2, acc3, acc4, ex_m_ptr, ex_n_ptr, out_ptr, m, n, M, N, fast, B9: tl.constexpr, TOTALS: tl.constexpr):
    """Stores T, or with its exponents y, at rows m and columns n."""
    total = acc0.to(tl.int64) * 65536 + (acc1.to(tl.int64) * 256 + acc2)
    if B9:
        total = total * 65536 + (acc3.to(tl.int64) * 256 + acc4)
    keep = (m < M)[:, None] & (n < N)[None, :]
    place = out_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    if TOTALS:
        tl.store(place, total, mask=keep)
    else:
        ex_m = tl.load(ex_m_ptr + m, mask=m < M, other=0)
        ex_n = tl.load(ex_n_ptr + n, mask=n < N, other=0)
        tl.store(place, rounded(total, ex_m[:, None], ex_n[None, :], fast, 46 if B9 else 30, B9), mask=keep)


@triton.jit(do_not_specialize=["M", "N"])
def integer_prefill_kernel(
    x_ptr, w_ptr, ex_m_ptr, ex_n_ptr, out_ptr, M, N, KP, x_plane, w_plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, B9: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
    TOTALS: tl.constexpr,
):  # fmt: skip
    """One tile of y (or, with TOTALS, of T int64). T = acc0 2^16 + acc1 2^8 + acc2, for b9 (that) 2^16 + acc3 2^8 + acc4."""
    x_plane, w_plane = tl.cast(x_plane, tl.int64), tl.cast(w_plane, tl.int64)  # twice a plane may pass 2^31
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tl.program_id(0) // (GROUP_M * blocks_n)
    inside = tl.program_id(0) % (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    first_m, first_n = (band * GROUP_M + inside % height) * BM, inside // height * BN
    row, col, kk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    x_offsets = tl.minimum(row, M - 1 - first_m)[:, None] * KP + kk[None, :]
    w_offsets = tl.minimum(col, N - 1 - first_n)[:, None] * KP + kk[None, :]
    if TMA:
        x_source, w_source = x_ptr, w_ptr
    else:
        x_source, w_source = x_ptr + tl.cast(first_m, tl.int64) * KP, w_ptr + tl.cast(first_n, tl.int64) * KP
    acc0 = tl.zeros((BM, BN), tl.int32)
    acc1 = tl.zeros((BM, BN), tl.int32)
    acc2 = tl.zeros((BM, BN), tl.int32)
    if B9:
        acc3 = tl.zeros((BM, BN), tl.int32)
        acc4 = tl.zeros((BM, BN), tl.int32)
    tl.assume(KP > 0)
    for k in range(0, KP, BK):
        edge = (k + kk < KP)[None, :]
        x0 = load_tile(x_source, 0, x_plane, M, first_m, k, x_offsets, edge, EVEN_K, TMA)
        w0 = load_tile(w_source, 0, w_plane, N, first_n, k, w_offsets, edge, EVEN_K, TMA).T
        x1 = load_tile(x_source, 1, x_plane, M, first_m, k, x_offsets, edge, EVEN_K, TMA)
        w1 = load_tile(w_source, 1, w_plane, N, first_n, k, w_offsets, edge, EVEN_K, TMA).T
        x2 = load_tile(x_source, 2, x_plane, M, first_m, k, x_offsets, edge, EVEN_K, TMA)
        w2 = load_tile(w_source, 2, w_plane, N, first_n, k, w_offsets, edge, EVEN_K, TMA).T
        acc0 = tl.dot(x0, w0, acc0, out_dtype=tl.int32)
        acc1 = tl.dot(x0, w1, acc1, out_dtype=tl.int32)
        acc2 = tl.dot(x0, w2, acc2, out_dtype=tl.int32)
        acc1 = tl.dot(x1, w0, acc1, out_dtype=tl.int32)
        acc2 = tl.dot(x1, w1, acc2, out_dtype=tl.int32)
        acc2 = tl.dot(x2, w0, acc2, out_dtype=tl.int32)
        if B9:
            acc3 = tl.dot(x1, w2, acc3, out_dtype=tl.int32)
            acc3 = tl.dot(x2, w1, acc3, out_dtype=tl.int32)
            acc4 = tl.dot(x2, w2, acc4, out_dtype=tl.int32)
    if not B9:
        acc3, acc4 = acc2, acc2
    if TOTALS:
        fast = True
    else:
        ex_m = tl.load(ex_m_ptr + first_m + row, mask=first_m + row < M, other=0)
        ex_n = tl.load(ex_n_ptr + first_n + col, mask=first_n + col < N, other=0)
        fast = (moderate(ex_m) & moderate(ex_n)) == 1
    # an eighth of the columns at a time: the wide integers of the rounding would not fit the registers otherwise
    a0, a1, a2, a3, a4 = halves(acc0), halves(acc1), halves(acc2), halves(acc3), halves(acc4)
    for i in tl.static_range(2):
        b0, b1, b2, b3, b4 = halves(a0[i]), halves(a1[i]), halves(a2[i]), halves(a3[i]), halves(a4[i])
        for j in tl.static_range(2):
            c0, c1, c2, c3, c4 = halves(b0[j]), halves(b1[j]), halves(b2[j]), halves(b3[j]), halves(b4[j])
            for h in tl.static_range(2):
                n = first_n + (4 * i + 2 * j + h) * (BN // 8) + tl.arange(0, BN // 8)
                store_tile(c0[h], c1[h], c2[h], c3[h], c4[h], ex_m_ptr, ex_n_ptr, out_ptr, first_m + row, n, M, N, fast, B9, TOTALS)


def integer_prefill_schedules(products: str = "b6") -> tuple[IntegerPrefillSchedule, ...]:
    """Every schedule that a study should sweep on sm_90 (registers: 3 or 5 accumulators of block_m * block_n words)."""
    tiles = [(128, 64, 4), (64, 128, 4), (128, 128, 8), (64, 64, 4), (128, 64, 8)]
    tiles += [(128, 256, 16), (128, 256, 8)] if products == "b6" else [(64, 256, 8)]
    found = []
    for (bm, bn, warps), bk, stages, tma in ((t, k, s, d) for t in tiles for k in (64, 128) for s in (2, 3, 4) for d in (False, True)):
        if 3 * (bm + bn) * bk * stages <= 227 << 10:
            found.append(IntegerPrefillSchedule(block_m=bm, block_n=bn, block_k=bk, num_warps=warps, num_stages=stages, tma=tma))
    return tuple(found)


def integer_prefill_schedule(m: int, n: int, k: int, products: str, architecture: int) -> IntegerPrefillSchedule:
    """The schedule used by default; N and K do not decide it so far. architecture: 10 * major + minor; sm_86 and sm_89 have 99 KiB of shared memory, and 64x128x64 takes 36 a stage."""
    large = architecture == 90
    if m <= 64 or products == "b9":  # five accumulators: a larger tile spills
        return IntegerPrefillSchedule(block_m=64, block_n=64, num_stages=4 if large else 3)
    return IntegerPrefillSchedule(block_m=64, block_n=128, num_stages=3 if large else 2)


def architecture_of(device: torch.device) -> int:
    return 10 * torch.cuda.get_device_capability(device)[0] + torch.cuda.get_device_capability(device)[1] if device.type == "cuda" else 0


def prefill_integer(planes: torch.Tensor, ex_M: torch.Tensor, weight, schedule: IntegerPrefillSchedule | None, out: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
    """planes int8 [3, M, KP] of x, ex_M, an IntegerWeight with digit planes -> `out` [M, N]: y where it is fp32, T where it is int64."""
    if weight.digits is None:
        raise ValueError(f"the prefill kernel reads digit planes; got a weight prepared with prefill=False, {weight.shape=}; prepare it with prefill=True")
    m, n, kp = planes.shape[1], weight.n, planes.shape[2]
    s = schedule or integer_prefill_schedule(m, n, weight.k, weight.products, architecture_of(planes.device))
    x, w = planes, weight.digits
    if s.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = TensorDescriptor.from_tensor(x.view(3 * m, kp), [s.block_m, s.block_k])
        w = TensorDescriptor.from_tensor(w.view(3 * n, kp), [s.block_n, s.block_k])
    grid = (triton.cdiv(m, s.block_m) * triton.cdiv(n, s.block_n),)
    integer_prefill_kernel[grid](
        x, w, ex_M, weight.ex_N, out, m, n, kp, m * kp, n * kp, BM=s.block_m, BN=s.block_n, BK=s.block_k, GROUP_M=s.group_m,
        B9=weight.products == "b9", EVEN_K=kp % s.block_k == 0, TMA=s.tma, TOTALS=out.dtype == torch.int64,
        num_warps=s.num_warps, num_stages=s.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
