"""Device code that prefill and decode share: the int64 total of digit products -> float32, rounded once.

    y = rounded(total, ex_m, ex_n, fast, SCALE=30, FOLD=False)          # inside a Triton kernel

y is the float32 nearest to total * 2^(ex_m + ex_n - SCALE), ties to even. |total| is split in two integers of at most 23 bits, each a float32
exactly; one FMA adds them, which is the one rounding to 24 bits. Totals of 46 bits and more (FOLD) first lose 16 bits into one odd bit
("round to odd": rounding it later is rounding once). Where every exponent of a tile is moderate (`moderate`), two exact power-of-two products
finish. Elsewhere a result below 2^-126 is rounded by integer shifts at 2^-149 instead, so it is not rounded twice.
Legend: ex_m [.., 1] and ex_n [1, ..] broadcast against total, or scalars. It uses no conversion instruction, and needs enable_fp_fusion=False.
"""

import triton
import triton.language as tl


@triton.jit
def moderate(ex):
    """1 where every exponent lies in -51..64 (a row of zeros counts: its totals are 0), so no result of the tile is subnormal by scaling."""
    return tl.min(((ex >= -51) & (ex <= 64) | (ex == -149)).to(tl.int32), 0)


@triton.jit
def two_to(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_float(n):
    """0 <= n < 2^23 -> float32."""
    return (n | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def to_24_bits(size, FOLD: tl.constexpr):
    """0 <= size < 2^46 (2^62 with FOLD) -> float32, rounded to nearest even."""
    if FOLD:
        wide = size >= 35184372088832  # 2^45
        odd = (size >> 16) | ((size & 0xFFFF) != 0).to(tl.int64)
        part = tl.where(wide, odd, size)
    else:
        part = size
    value = tl.fma(exact_float((part >> 23).to(tl.int32)), 8388608.0, exact_float(part.to(tl.int32) & 0x7FFFFF))
    if FOLD:
        value = tl.where(wide, value * 65536.0, value)
    return value


@triton.jit
def below_normal(size, value, e):
    """size * 2^e for e < -149, rounded at the last bit that a float32 of that size has: integers only. value = size to 24 bits."""
    length = (value.to(tl.int32, bitcast=True) >> 23) - 126  # a carry into the next binade gives the same result either way
    drop = tl.minimum(tl.maximum(tl.maximum(length - 24, -149 - e), 1), 63)
    r = drop.to(tl.int64)
    one = tl.full(size.shape, 1, tl.int64)
    kept = (size + ((one << (r - 1)) - 1) + ((size >> r) & 1)) >> r
    return ((tl.maximum(e + drop + 149, 0) << 23) + kept.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def with_sign_of(total, y):
    """-y where total < 0, by the sign bit: Triton's minus is 0 - y, which loses -0."""
    sign = (total >> 32).to(tl.int32) & (-2147483648)
    return (y.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def rounded(total, ex_m, ex_n, fast, SCALE: tl.constexpr, FOLD: tl.constexpr):
    """float32 of total's shape; rows with ex_m = 255 are NaN. `fast`: scalar, both `moderate` results hold for the tile."""
    size = tl.where(total < 0, -total, total)
    value = to_24_bits(size, FOLD)
    if fast:
        y = value * two_to(tl.where(ex_m == -149, 0, ex_m) - SCALE // 2) * two_to(tl.where(ex_n == -149, 0, ex_n) - SCALE // 2)
        y = with_sign_of(total, y)
    else:
        e = ex_m + ex_n - SCALE + tl.zeros(total.shape, tl.int32)
        high = tl.minimum(tl.maximum(e, -149), 250)
        half = high >> 1
        y = tl.where(e >= -149, value * two_to(half) * two_to(high - half), below_normal(size, value, e))
        y = tl.where(ex_m + tl.zeros(total.shape, tl.int32) == 255, float("nan"), with_sign_of(total, y))
    return y
