"""Rows of floats as exact integers: one power-of-two scale a row, then three balanced base-256 digits (int8) an element.

    >>> import torch
    >>> from kernels.exact.slices import digits_ref, quantise_ref, row_exponents_ref
    >>> x_RK = torch.tensor([[1.0, -0.25]])
    >>> ex_R = row_exponents_ref(x_RK)                     # tensor([1]): |x| < 2^1
    >>> digits_ref(quantise_ref(x_RK, ex_R))[:, 0]         # top digit first: x = (d0 2^16 + d1 2^8 + d2) 2^(ex - 23)
    tensor([[ 64, -16],
            [  0,   0],
            [  0,   0]], dtype=torch.int8)

Legend: R rows (tokens of x, outputs of w), K inputs, P = 3 planes of digits, the top one first, KP = K padded with zeros to `PAD_K`.
- **Exponent.** u = the largest bit pattern of |x| in the row (an integer maximum: order-free, NaN included). 2^e <= max < 2^(e+1), subnormals
  normalised; ex = e + 1, plus 1 more where the top six mantissa bits of the maximum are all ones, because three balanced digits reach only
  127 * 65793 = 8,355,711 < 2^23. A row of zeros (or K = 0) has ex = EX_ZERO, below every other; a row with an infinity or a NaN has
  ex = EX_NONFINITE, above every other. So the exponent of a row cut in parts is the maximum of the parts' exponents.
- **Integer.** q = round-half-even(x * 2^(23 - ex)), |q| < 127 * 2^16 where the row sets its own exponent; the scale is applied as two
  powers of two, each a normal float32. The first product is exact, or so small that q = 0 whatever it rounds to. Non-finite rows have q = 0.
- **Digits.** q + 0x808080 holds digit + 128 in each byte; flipping each byte's top bit leaves the digits in [-128, 127] as int8.

|x - q 2^(ex-23)| <= 2^(ex-24), at most 2^-22.98 of the row's maximum (2^-22 / 1.984375 in a row with the extra 1, else 2^-23) for every
element alike: the error is normwise. It keeps no scale finer than a row's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.ieee import assert_subnormals_kept

__all__ = [
    "DTYPES", "EX_NONFINITE", "EX_ZERO", "PAD_K", "Q_MAX", "Q_MIN", "Sliced", "digits_ref", "padded", "quantise_ref", "row_exponents_ref", "slice_rows",
    "sliced_ref",
]  # fmt: skip

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAD_K = 64  # planes hold a multiple of it: rows start on 16 bytes
EX_ZERO = -149  # the smallest exponent of a nonzero row is -148 (2^-149 < 2^-148)
EX_NONFINITE = 255  # the largest of a finite row is 129
Q_MIN, Q_MAX = -128 * 65793, 127 * 65793
_ONE_REGISTER_PASS = 16384  # longest row that a CTA keeps in registers


@dataclass(frozen=True, kw_only=True)
class Sliced:
    """Rows as a linear of the integer family reads them: planes int8 [3, R, KP], zero from column k on, and ex_R int32. Any number of linears may read one."""

    planes: torch.Tensor
    ex_R: torch.Tensor
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.shape[1], self.k

    @property
    def device(self) -> torch.device:
        return self.planes.device


def empty_sliced(rows: int, k: int, device: torch.device) -> Sliced:
    """For a kernel to fill."""
    planes = torch.empty((3, rows, padded(k)), dtype=torch.int8, device=device)
    return Sliced(planes=planes, ex_R=torch.empty(rows, dtype=torch.int32, device=device), k=k)


def padded(k: int) -> int:
    return -(-k // PAD_K) * PAD_K


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, int32 in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def row_exponents_ref(a_RK: torch.Tensor) -> torch.Tensor:
    """ex_R int32 of each row (any device, torch operations only)."""
    if a_RK.ndim != 2 or a_RK.dtype not in DTYPES:
        raise ValueError(f"rows to slice are a matrix of bf16, fp16 or fp32; got {tuple(a_RK.shape)=} {a_RK.dtype=}; flatten or cast it")
    if a_RK.shape[1] == 0:
        return torch.full((a_RK.shape[0],), EX_ZERO, dtype=torch.int32, device=a_RK.device)
    top_R = (a_RK.detach().float().contiguous().view(torch.int32) & 0x7FFFFFFF).amax(1) if a_RK.shape[0] else a_RK.new_empty(0, dtype=torch.int32)
    subnormal = top_R < 0x00800000
    bits = torch.where(subnormal, top_R.clamp(max=0x007FFFFF).float().view(torch.int32), top_R)  # an integer up to 2^23 is a float32
    e = (bits >> 23) - torch.where(subnormal, 127 + 149, 127).to(torch.int32)
    ex = e + 1 + ((bits >> 17) & 63 == 63).to(torch.int32)
    ex = torch.where(top_R == 0, EX_ZERO, ex)
    return torch.where(top_R >= 0x7F800000, EX_NONFINITE, ex).to(torch.int32)


def quantise_ref(a_RK: torch.Tensor, ex_R: torch.Tensor) -> torch.Tensor:
    """q_RK int32 for exponents that are at least the rows' own (any device, torch operations only)."""
    if a_RK.device.type == "cpu":
        assert_subnormals_kept()
    shift = (23 - ex_R.to(torch.int32))[:, None]
    half = shift >> 1
    v_RK = a_RK.detach().float() * power_of_two(half) * power_of_two(shift - half)
    return torch.round(v_RK.masked_fill(ex_R[:, None] == EX_NONFINITE, 0.0)).to(torch.int32)


def digits_ref(q_RK: torch.Tensor) -> torch.Tensor:
    """q_RK int32 in Q_MIN..Q_MAX -> int8 [3, R, K], the top digit first."""
    if q_RK.numel() and not (int(q_RK.min()) >= Q_MIN and int(q_RK.max()) <= Q_MAX):
        raise ValueError(f"three balanced digits reach {Q_MIN}..{Q_MAX}; got {int(q_RK.min())=} {int(q_RK.max())=}; "
                         "pass exponents that are at least the rows' own (row_exponents of the whole rows)")  # fmt: skip
    t = (q_RK + 0x808080) ^ 0x808080
    return torch.stack([t << 8 >> 24, t << 16 >> 24, t << 24 >> 24]).to(torch.int8)


def sliced_ref(a_RK: torch.Tensor) -> Sliced:
    """Rows with their own exponents (any device, torch operations only)."""
    ex_R = row_exponents_ref(a_RK)
    planes = torch.nn.functional.pad(digits_ref(quantise_ref(a_RK, ex_R)), (0, padded(a_RK.shape[1]) - a_RK.shape[1]))
    return Sliced(planes=planes, ex_R=ex_R, k=a_RK.shape[1])


@triton.jit
def exponent_of(top):
    """The rule above for the integer maximum of a row's absolute bit patterns; integers, and one exact subtraction for subnormals."""
    magic: tl.constexpr = 0x4B000000  # 2^23: an integer below 2^23 in the mantissa, minus 2^23, is that integer as a float32
    normalised = (tl.minimum(top, 0x007FFFFF) | magic).to(tl.float32, bitcast=True) - 8388608.0
    subnormal = top < 0x00800000
    bits = tl.where(subnormal, normalised.to(tl.int32, bitcast=True), top)
    ex = (bits >> 23) - tl.where(subnormal, 275, 126) + tl.where(((bits >> 17) & 63) == 63, 1, 0)
    ex = tl.where(top == 0, -149, ex)
    return tl.where(top >= 0x7F800000, 255, ex)


@triton.jit
def absolute_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def balanced_bytes(x, ex):
    """x fp32 -> int32 whose bytes 2, 1, 0 are the digits. |x| 2^(23-ex) + 2^23 lies in one binade, so the addition rounds to an integer."""
    shift = 23 - ex
    half = shift >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((shift - half + 127) << 23).to(tl.float32, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * low * high + 8388608.0
    q = size.to(tl.int32, bitcast=True) - 0x4B000000
    q = tl.where(bits < 0, -q, q)
    return (tl.where(ex == 255, 0, q) + 0x808080) ^ 0x808080


@triton.jit
def slice_kernel(x_ptr, planes_ptr, ex_ptr, x_stride, K, KP, plane, GIVEN: tl.constexpr, WRITE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its exponent (read from ex_ptr where GIVEN), then three int8 planes `plane` elements apart, zeros from K to KP.

    With STEPS = 1 the row is read once and stays in registers; longer rows are read twice.
    """
    row, plane = tl.program_id(0).to(tl.int64), tl.cast(plane, tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if GIVEN:
        ex = tl.load(ex_ptr + row)
    else:
        top = tl.max(absolute_bits(x), 0)
        for step in range(1, STEPS):
            more = tl.load(x_ptr + row * x_stride + step * BLOCK + k, mask=step * BLOCK + k < K, other=0.0)
            top = tl.maximum(top, tl.max(absolute_bits(more), 0))
        ex = exponent_of(top)
        tl.store(ex_ptr + row, ex)
    if WRITE:
        for step in range(STEPS):
            if STEPS > 1:
                x = tl.load(x_ptr + row * x_stride + step * BLOCK + k, mask=step * BLOCK + k < K, other=0.0).to(tl.float32)
            t = balanced_bytes(x, ex)
            place = planes_ptr + row * KP + step * BLOCK + k
            inside = step * BLOCK + k < KP
            tl.store(place, (t >> 16).to(tl.int8), mask=inside)
            tl.store(place + plane, (t >> 8).to(tl.int8), mask=inside)
            tl.store(place + 2 * plane, t.to(tl.int8), mask=inside)


@triton.jit
def store_sliced(ys, planes_ptr, ex_ptr, row, K, KP, plane, STEPS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """What `slice_kernel` makes of the row whose STEPS blocks of BLOCK elements, in float32, are rounded to DTYPE first; K <= KP <= STEPS * BLOCK."""
    lane, plane = tl.arange(0, BLOCK), tl.cast(plane, tl.int64)
    top = tl.zeros((BLOCK,), tl.int32)
    kept = ()
    for s in tl.static_range(STEPS):
        x = tl.where(s * BLOCK + lane < K, ys[s].to(DTYPE).to(tl.float32), 0.0)
        top = tl.maximum(top, absolute_bits(x))
        kept = kept + (x,)
    ex = exponent_of(tl.max(top, 0))
    tl.store(ex_ptr + row, ex)
    for s in tl.static_range(STEPS):
        t = balanced_bytes(kept[s], ex)
        place = planes_ptr + row * KP + s * BLOCK + lane
        inside = s * BLOCK + lane < KP
        tl.store(place, (t >> 16).to(tl.int8), mask=inside)
        tl.store(place + plane, (t >> 8).to(tl.int8), mask=inside)
        tl.store(place + 2 * plane, t.to(tl.int8), mask=inside)


@on_gpu("row_exponents")
def slice_rows(a_RK: torch.Tensor, *, ex_R: torch.Tensor | None = None, write: bool = True) -> tuple[torch.Tensor | None, torch.Tensor]:
    """On a GPU -> (int8 [3, R, KP] or None where not `write`, ex_R int32), equal to the references in every bit; x is read once up to K = 16,384.

    ex_R given: exponents over longer rows, of which a_RK is a part; they must be at least the rows' own (unchecked: it would cost a wait).
    """
    if a_RK.ndim != 2 or a_RK.dtype not in DTYPES:
        raise ValueError(f"rows to slice are a matrix of bf16, fp16 or fp32; got {tuple(a_RK.shape)=} {a_RK.dtype=}; flatten or cast it")
    (rows, k), kp = a_RK.shape, padded(a_RK.shape[1])
    given = ex_R is not None
    if given and (ex_R.shape != (rows,) or ex_R.dtype != torch.int32):
        raise ValueError(f"exponents are int32, one a row of {tuple(a_RK.shape)}; got {tuple(ex_R.shape)=} {ex_R.dtype=}; take row_exponents")
    a_RK = a_RK.detach() if k == 0 or a_RK.stride(1) == 1 else a_RK.detach().contiguous()
    ex_R = ex_R.contiguous() if given else torch.empty(rows, dtype=torch.int32, device=a_RK.device)
    planes = torch.empty((3, rows, kp), dtype=torch.int8, device=a_RK.device) if write else None
    if rows:
        block = min(triton.next_power_of_2(max(kp, PAD_K)), _ONE_REGISTER_PASS)
        slice_kernel[(rows,)](
            a_RK, planes if write else ex_R, ex_R, a_RK.stride(0), k, kp, rows * kp, GIVEN=given, WRITE=write, STEPS=triton.cdiv(max(kp, 1), block),
            BLOCK=block, num_warps=max(1, min(16, block // 1024)), enable_fp_fusion=False,
        )  # fmt: skip
    return planes, ex_R
