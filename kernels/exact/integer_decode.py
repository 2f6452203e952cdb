"""The decode kernel of family B: few tokens, weights of 2 bytes read once, sliced in registers and multiplied by int8 tensor cores.

    y = decode_integer(planes_x, ex_M, weight, schedule, out)           # on a GPU; `integer.linear_integer` slices x and calls it

A bf16 weight is kept as its integer q, itself a bf16 number, row-major [N, KP] (integer.IntegerWeight.code): a row's tile is whole 128-byte
lines, so no other order is needed. Slicing takes three float operations a weight and no conversion: with f = q and the magic number
1.5 * 2^23, whose sum with an integer shows that integer in its last bits,
    h = fma(f + 0.5, 2^-8, magic + 128)     bytes 1 and 0 are d0 and d1 + 128 (never a tie, f being an integer)
    l = f + magic                           byte 0 is d2, f mod 256 (from 2^22 on l leaves the binade, but there 2^15 divides f: byte 0 is 0)
W's rows are the wide side of the product, the tokens (8 or 16) the narrow one. `wide`: the three planes of x stand side by side, so each plane of W
is multiplied once, and all nine digit products appear (b6 leaves three out when adding); else six or nine narrow products.
K is split over `split` programs; their int64 totals are added by the last of them to arrive (an integer ticket of the weight says who), or
where tickets are too few by a second kernel: in any order the same. fp16 and fp32 weights use their
digit planes (3 bytes). Legend: M tokens, N outputs, KP inputs, T tokens a program, C = 4 T columns of x (the last T are zero), S parts.
No value passes through an atomic, and any M works (each T tokens read W again).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.exact.integer_rounding import moderate, rounded

__all__ = ["IntegerDecodeSchedule", "decode_integer", "finish_parts", "integer_decode_schedule", "integer_decode_schedules"]

MOST_BLOCKS = 65535  # of tokens in one launch: a grid's third axis
_MOST_PARTS = 8  # of K, up to which the last program adds them itself
_HALF = tl.constexpr(12583040.0)  # 1.5 * 2^23 + 128
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23


@dataclass(frozen=True, kw_only=True)
class IntegerDecodeSchedule:
    """How the work is cut; any valid value gives the same bits.

    block_n: rows of W a program (16 to 128); block_k: 32 to 256; split: programs along K; wide: planes of x side by side; assembly: slicing packs
    bytes by PTX `prmt`, four weights at a time (else the compiler packs them).
    """

    block_n: int = 64
    block_k: int = 128
    split: int = 4
    num_warps: int = 4
    num_stages: int = 3
    wide: bool = True
    assembly: bool | None = None

    def __post_init__(self) -> None:
        allowed = {"block_n": (16, 32, 64, 128), "block_k": (32, 64, 128, 256), "num_warps": (1, 2, 4, 8)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {values}; got {self}; take an entry of integer_decode_schedules()")
        if not 1 <= self.split <= 64 or self.num_stages < 1:
            raise ValueError(f"split is 1..64 and num_stages at least 1; got {self}; take an entry of integer_decode_schedules()")


_PACKED = tl.constexpr("""{
.reg .f32 f<4>, h<4>, l<4>, t; .reg .b32 p, q;
shl.b32 p, $3, 16; mov.b32 f0, p; and.b32 p, $3, 0xffff0000; mov.b32 f1, p;
shl.b32 p, $4, 16; mov.b32 f2, p; and.b32 p, $4, 0xffff0000; mov.b32 f3, p;
""" + "".join(f"""add.rn.f32 t, f{i}, 0f3F000000; fma.rn.f32 h{i}, t, 0f3B800000, 0f4B400080; add.rn.f32 l{i}, f{i}, 0f4B400000;
""" for i in range(4)) + """.reg .b32 i<8>;
mov.b32 i0, h0; mov.b32 i1, h1; mov.b32 i2, h2; mov.b32 i3, h3; mov.b32 i4, l0; mov.b32 i5, l1; mov.b32 i6, l2; mov.b32 i7, l3;
prmt.b32 p, i4, i5, 0x0040; prmt.b32 q, i6, i7, 0x0040; prmt.b32 $2, p, q, 0x5410;
prmt.b32 p, i0, i1, 0x5140; prmt.b32 q, i2, i3, 0x5140; prmt.b32 $0, p, q, 0x7632; prmt.b32 p, p, q, 0x5410; xor.b32 $1, p, 0x80808080;
}""")  # fmt: skip


@triton.jit
def digits_of(code, ASSEMBLY: tl.constexpr):
    """bf16 integers -> three int8 tensors, the top digit first; see the module's docstring."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_PACKED, "=r,=r,=r,r,r", [code], dtype=(tl.int8, tl.int8, tl.int8), is_pure=True, pack=4)
    else:
        f = code.to(tl.float32)
        h = tl.fma(f + 0.5, 0.00390625, _HALF)
        low = f + _MAGIC
        bits = h.to(tl.int32, bitcast=True)
        return (bits >> 8).to(tl.int8), (bits ^ 0x80).to(tl.int8), low.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def weight_digits(w_pointers, w_plane, keep, CODE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Three int8 tiles of W [BN, BK]: sliced here from one read of 2 bytes, or read from the planes."""
    if CODE:
        return digits_of(tl.load(w_pointers, mask=keep, other=0.0), ASSEMBLY)
    else:
        w0 = tl.load(w_pointers, mask=keep, other=0)
        return w0, tl.load(w_pointers + w_plane, mask=keep, other=0), tl.load(w_pointers + 2 * w_plane, mask=keep, other=0)


@triton.jit
def add_wide(acc0, acc1, acc2, T: tl.constexpr, BN: tl.constexpr, B9: tl.constexpr):
    """acc_i [BN, 4 T] (column j T + t: plane j of x) -> T int64 [BN, T]; an integer sum, so its order is free."""
    j = (tl.arange(0, 4 * T) // T).to(tl.int64)[None, :]
    last: tl.constexpr = 4 if B9 else 2
    total = tl.zeros((BN, 4 * T), tl.int64)
    total += tl.where((j < 3), acc0.to(tl.int64) << tl.maximum(8 * (last - j), 0), 0)
    total += tl.where((j < 3) & (j < last), acc1.to(tl.int64) << tl.maximum(8 * (last - 1 - j), 0), 0)
    total += tl.where((j < 3) & (j < last - 1), acc2.to(tl.int64) << tl.maximum(8 * (last - 2 - j), 0), 0)
    return tl.sum(tl.reshape(total, (BN, 4, T)), 1)


@triton.jit(do_not_specialize=["M", "N", "BLOCKS"])
def integer_decode_kernel(
    x_ptr, w_ptr, ex_m_ptr, ex_n_ptr, out_ptr, y_ptr, ticket_ptr, M, N, KP, BLOCKS, x_plane, w_plane,
    T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B9: tl.constexpr, EVEN_K: tl.constexpr, CODE: tl.constexpr, ASSEMBLY: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of K for BN rows of W and T tokens. Grid (N blocks, parts of K, M blocks).

    out: int64 [part, M, N], unused where FINISH and PARTS = 1. FINISH: y is written, where PARTS > 1 by the program that draws the last
    ticket of its (N, M) block; it puts the counter back to 0.
    """
    first_n, first_m = tl.program_id(0) * BN, tl.program_id(2) * T
    x_plane, w_plane = tl.cast(x_plane, tl.int64), tl.cast(w_plane, tl.int64)  # twice a plane may pass 2^31
    row, kk = tl.arange(0, BN), tl.arange(0, BK)
    start = tl.program_id(1) * BLOCKS * BK
    stop = tl.minimum(start + BLOCKS * BK, KP)
    w_rows = w_ptr + tl.cast(first_n, tl.int64) * KP + start + tl.minimum(row, N - 1 - first_n)[:, None] * KP + kk[None, :]
    c = tl.arange(0, 4 * T if WIDE else T)
    m_of_c = first_m + c % T
    x_rows = x_ptr + ((c // T).to(tl.int64) * x_plane + m_of_c.to(tl.int64) * KP)[:, None] + (start + kk)[None, :]
    x_valid = ((m_of_c < M) & (c < 3 * T))[:, None]
    acc0 = tl.zeros((BN, 4 * T if WIDE else T), tl.int32)
    acc1 = tl.zeros((BN, 4 * T if WIDE else T), tl.int32)
    acc2 = tl.zeros((BN, 4 * T if WIDE else T), tl.int32)
    if B9 and not WIDE:
        acc3 = tl.zeros((BN, T), tl.int32)
        acc4 = tl.zeros((BN, T), tl.int32)
    for k in range(start, stop, BK):
        inside = None if EVEN_K else (k + kk < KP)[None, :]
        keep_x = x_valid if EVEN_K else x_valid & inside
        keep_w = row[:, None] >= 0 if EVEN_K else inside & (row[:, None] >= 0)
        w0, w1, w2 = weight_digits(w_rows, w_plane, keep_w, CODE, ASSEMBLY)
        x0 = tl.load(x_rows, mask=keep_x, other=0).T
        if WIDE:
            acc0 = tl.dot(w0, x0, acc0, out_dtype=tl.int32)
            acc1 = tl.dot(w1, x0, acc1, out_dtype=tl.int32)
            acc2 = tl.dot(w2, x0, acc2, out_dtype=tl.int32)
        else:
            x1 = tl.load(x_rows + x_plane, mask=keep_x, other=0).T
            x2 = tl.load(x_rows + 2 * x_plane, mask=keep_x, other=0).T
            acc0 = tl.dot(w0, x0, acc0, out_dtype=tl.int32)
            acc1 = tl.dot(w0, x1, acc1, out_dtype=tl.int32)
            acc2 = tl.dot(w0, x2, acc2, out_dtype=tl.int32)
            acc1 = tl.dot(w1, x0, acc1, out_dtype=tl.int32)
            acc2 = tl.dot(w1, x1, acc2, out_dtype=tl.int32)
            acc2 = tl.dot(w2, x0, acc2, out_dtype=tl.int32)
            if B9:
                acc3 = tl.dot(w1, x2, acc3, out_dtype=tl.int32)
                acc3 = tl.dot(w2, x1, acc3, out_dtype=tl.int32)
                acc4 = tl.dot(w2, x2, acc4, out_dtype=tl.int32)
        w_rows += BK
        x_rows += BK
    if WIDE:
        total = add_wide(acc0, acc1, acc2, T, BN, B9)
    else:
        total = acc0.to(tl.int64) * 65536 + (acc1.to(tl.int64) * 256 + acc2)
        if B9:
            total = total * 65536 + (acc3.to(tl.int64) * 256 + acc4)
    n, m = first_n + row, first_m + tl.arange(0, T)
    keep = (n < N)[:, None] & (m < M)[None, :]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    last = True
    if not FINISH or PARTS > 1:
        tl.store(out_ptr + tl.program_id(1).to(tl.int64) * M * N + place, total, mask=keep)
    if FINISH:
        if PARTS > 1:
            tl.debug_barrier()
            ticket = ticket_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
            last = tl.atomic_add(ticket, 1, sem="acq_rel") == PARTS - 1
            if last:
                tl.store(ticket, 0)
        if last:
            if PARTS > 1:
                total = tl.zeros((BN, T), tl.int64)
                for part in tl.static_range(PARTS):
                    total += tl.load(out_ptr + tl.cast(part, tl.int64) * M * N + place, mask=keep, other=0, cache_modifier=".cg")
            ex_m = tl.load(ex_m_ptr + m, mask=m < M, other=0)
            ex_n = tl.load(ex_n_ptr + n, mask=n < N, other=0)
            fast = (moderate(ex_m) & moderate(ex_n)) == 1
            tl.store(y_ptr + place, rounded(total, ex_m[None, :], ex_n[:, None], fast, 46 if B9 else 30, B9), mask=keep)


@triton.jit(do_not_specialize=["M", "N", "PARTS"])
def integer_finish_kernel(part_ptr, ex_m_ptr, ex_n_ptr, out_ptr, M, N, PARTS, BLOCK: tl.constexpr, B9: tl.constexpr, FINISH: tl.constexpr):
    """Adds int64 parts [PARTS, M, N]; FINISH rounds to y. Grid (M, N blocks)."""
    m = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.cast(m, tl.int64) * N + n
    total = tl.zeros((BLOCK,), tl.int64)
    for part in range(PARTS):
        total += tl.load(part_ptr + tl.cast(part, tl.int64) * M * N + place, mask=n < N, other=0)
    if FINISH:
        ex_m = tl.load(ex_m_ptr + m) + tl.zeros((BLOCK,), tl.int32)
        ex_n = tl.load(ex_n_ptr + n, mask=n < N, other=0)
        fast = (moderate(ex_m) & moderate(ex_n)) == 1
        tl.store(out_ptr + place, rounded(total, ex_m, ex_n, fast, 46 if B9 else 30, True), mask=n < N)
    else:
        tl.store(out_ptr + place, total, mask=n < N)


def integer_decode_schedules() -> tuple[IntegerDecodeSchedule, ...]:
    """Every schedule that a study should sweep."""
    shapes = [(64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (64, 64, 4), (32, 128, 2), (32, 256, 4), (16, 256, 1), (16, 128, 2)]
    return tuple(
        IntegerDecodeSchedule(block_n=bn, block_k=bk, num_warps=warps, split=split, num_stages=stages, wide=wide)
        for bn, bk, warps in shapes for split in (1, 2, 4, 8, 16) for stages in (1, 2, 3, 4) for wide in (True, False)
    )  # fmt: skip


def integer_decode_schedule(m: int, n: int, k: int) -> IntegerDecodeSchedule:
    """The schedule used by default: a function of shape only (measured on an H200), K not among what decides. Fewer outputs: more parts of K."""
    split = next(s for s in (1, 2, 4, 8) if triton.cdiv(n, 32) * triton.cdiv(m, 16) * s >= 256 or s == 8)
    return IntegerDecodeSchedule(block_n=32, block_k=128, num_warps=2, num_stages=4, wide=m <= 8, split=split)


def finish_parts(parts: torch.Tensor, ex_M: torch.Tensor, weight, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN001
    """int64 [S, M, N] -> their sum, as y (fp32) or T (int64)."""
    _, m, n = parts.shape
    out = torch.empty((m, n), dtype=dtype, device=parts.device) if out is None else out
    if m * n:
        grid = (m, triton.cdiv(n, 256))
        integer_finish_kernel[grid](
            parts, ex_M, weight.ex_N, out, m, n, parts.shape[0], BLOCK=256, B9=weight.products == "b9", FINISH=dtype == torch.float32,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def decode_integer(planes: torch.Tensor, ex_M: torch.Tensor, weight, schedule: IntegerDecodeSchedule | None, out: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
    """planes int8 [3, M, KP] of x, ex_M, an IntegerWeight -> `out` [M, N]: y where it is fp32, T where it is int64."""
    m, n, kp = planes.shape[1], weight.n, planes.shape[2]
    s = schedule or integer_decode_schedule(m, n, weight.k)
    code = weight.code is not None
    assembly = s.assembly if s.assembly is not None else planes.is_cuda and torch.version.hip is None
    tokens = 8 if s.wide and m <= 8 else 16
    if m > (most := MOST_BLOCKS * tokens):
        for m0 in range(0, m, most):
            decode_integer(planes[:, m0 : m0 + most], ex_M[m0 : m0 + most], weight, s, out[m0 : m0 + most])
        return out
    blocks = triton.cdiv(triton.cdiv(kp, s.block_k), s.split)
    split = triton.cdiv(kp, blocks * s.block_k)  # no part is empty
    grid = (triton.cdiv(n, s.block_n), split, triton.cdiv(m, tokens))
    finish = out.dtype == torch.float32 and (split == 1 or split <= _MOST_PARTS and weight.tickets is not None and grid[0] * grid[2] <= weight.tickets.numel())
    parts = out if split == 1 else torch.empty((split, m, n), dtype=torch.int64, device=planes.device)
    integer_decode_kernel[grid](
        planes, weight.code if code else weight.digits, ex_M, weight.ex_N, parts, out, ex_M if weight.tickets is None else weight.tickets, m, n, kp, blocks,
        planes.stride(0), n * kp, T=tokens, BN=s.block_n, BK=s.block_k, B9=weight.products == "b9", EVEN_K=kp % s.block_k == 0, CODE=code,
        ASSEMBLY=assembly and code, WIDE=s.wide, PARTS=split if finish else 1, FINISH=finish, num_warps=s.num_warps, num_stages=s.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out if split == 1 or finish else finish_parts(parts, ex_M, weight, out, out.dtype)
