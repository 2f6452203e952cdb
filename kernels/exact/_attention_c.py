"""The compiled engine of `attention_ref`: the same bits as the torch engine, vectorised over keys (scores) and over head_dim (P V).

    >>> from kernels.exact import _attention_c
    >>> _attention_c.available()              # False without a C compiler: the torch engine then serves everything
    True

A unit of work is a tile of query rows that share one key head; a block of 64 keys is upcast once per unit. Every score, sum and output
is one chain in a lane of its own, so neither the vector width, the tile nor the number of threads can change bits.
Legend: B batch rows, T new tokens a row, H query heads, G key heads, D head_dim, N blocks of 64 keys.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.exact import _compile

__all__ = ["available", "attention", "why"]

SOURCE = r"""
#define KEYS 64
#define MOST_DIM 256

static float upcast(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float f; memcpy(&f, &bits, 4); return f; }

static void fill(float *panel, const void *from, long offset, long count, int bf16) {
  if (bf16) { const uint16_t *p = (const uint16_t *)from + offset; for (long i = 0; i < count; ++i) panel[i] = upcast(p[i]); }
  else memcpy(panel, (const float *)from + offset, count * sizeof(float));
}

/* the sequence and the constants of exp in elementary.py */
#define LOG2E ((float)1.4426950408889634)
#define LN2_HIGH (-0.693145751953125f)
#define LN2_LOW ((float)-1.428606820e-6)
#define TAYLOR(n) ((float)(1.0 / n))
static void exp_row(float *x, long count, float m) {
  for (long i = 0; i < count; ++i) {
    float v = x[i] - m;
    v = v < -104.0f ? -104.0f : v;
    v = v > 89.0f ? 89.0f : v;
    float t = fmaf(v, LOG2E, 12582912.0f);
    uint32_t bits; memcpy(&bits, &t, 4);
    int32_t n = (int32_t)(bits - 0x4B400000u), half = n >> 1;
    float nf = t - 12582912.0f;
    float r = fmaf(nf, LN2_LOW, fmaf(nf, LN2_HIGH, v));
    float p = TAYLOR(5040);
    p = fmaf(p, r, TAYLOR(720)); p = fmaf(p, r, TAYLOR(120)); p = fmaf(p, r, TAYLOR(24)); p = fmaf(p, r, TAYLOR(6));
    p = fmaf(p, r, 0.5f); p = fmaf(p, r, 1.0f); p = fmaf(p, r, 1.0f);
    uint32_t low = ((uint32_t)half + 127u) << 23, high = ((uint32_t)(n - half) + 127u) << 23;
    float low_f, high_f; memcpy(&low_f, &low, 4); memcpy(&high_f, &high, 4);
    x[i] = (p * low_f) * high_f;
  }
}

/* out[m][c] = chain over i < len of a[m][i] * panel[i][c], c < W * LANES; a has row stride lda, panel and out row stride ld */
#define CHAINS(MR, W)                                                                                              \
static void chains_##MR##_##W(const float *a, long lda, const float *panel, long ld, long len, float *out, long ldo) { \
  vec acc[MR][W];                                                                                                  \
  for (int m = 0; m < MR; ++m) for (int v = 0; v < W; ++v) acc[m][v] = ZERO();                                     \
  for (long i = 0; i < len; ++i) {                                                                                 \
    vec b[W];                                                                                                      \
    for (int v = 0; v < W; ++v) b[v] = LOAD(panel + i * ld + v * LANES);                                           \
    for (int m = 0; m < MR; ++m) {                                                                                 \
      vec s = SET1(a[m * lda + i]);                                                                                \
      for (int v = 0; v < W; ++v) acc[m][v] = FMA(s, b[v], acc[m][v]);                                             \
    }                                                                                                              \
  }                                                                                                                \
  for (int m = 0; m < MR; ++m) for (int v = 0; v < W; ++v) STORE(out + m * ldo + v * LANES, acc[m][v]);            \
}
CHAINS(1, 1) CHAINS(1, 4) CHAINS(2, 1) CHAINS(2, 4) CHAINS(4, 1) CHAINS(4, 4)

#define PICK(MR, W) chains_##MR##_##W(a, lda, panel + c, ld, len, out + c, ldo)
/* columns is a multiple of LANES */
static void chains(int mr, const float *a, long lda, const float *panel, long ld, long len, float *out, long ldo, long columns) {
  for (long c = 0; c < columns;) {
    int wide = columns - c >= 4 * LANES;
    if (mr == 4) { if (wide) PICK(4, 4); else PICK(4, 1); }
    else if (mr == 2) { if (wide) PICK(2, 4); else PICK(2, 1); }
    else { if (wide) PICK(1, 4); else PICK(1, 1); }
    c += wide ? 4 * LANES : LANES;
  }
}

/* Rows r0..r1 of key head g of batch row b; row r is query head g * (H / G) + r % (H / G) of token r / (H / G).
   k [B, G, N, D, 64], v [B, G, N * 64, D]; q, o float32 [B, T, H, D]; start: cache position of token 0.
   scratch: s [rows][N * 64], qs [rows][D], panel [64 * MOST_DIM], acc [4][MOST_DIM], total [rows][MOST_DIM] */
int attend(const float *q, const void *k, const void *v, int bf16, float *o, long b, long g, long r0, long r1, long T, long H, long G, long D,
           long N, long start, float scale, float *s, float *qs, float *panel, float *acc, float *total) {
  if (flushes_subnormals()) return 1;
  long group = H / G, rows = r1 - r0, padded = (D + LANES - 1) / LANES * LANES;
  long last = start + (r1 - 1) / group, lds = (last / KEYS + 1) * KEYS, cache = (b * G + g) * N;
  for (long r = 0; r < rows; ++r)
    memcpy(qs + r * D, q + ((b * T + (r0 + r) / group) * H + g * group + (r0 + r) % group) * D, D * sizeof(float));
  for (long n = 0; n * KEYS <= last; ++n) {
    fill(panel, k, (cache + n) * KEYS * D, KEYS * D, bf16);
    long r = n * KEYS <= start ? 0 : (n * KEYS - start) * group - r0; /* the first row that sees a key of this block */
    for (r = r < 0 ? 0 : r; r < rows;) {
      int mr = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
      chains(mr, qs + r * D, D, panel, KEYS, D, s + r * lds + n * KEYS, lds, KEYS);
      r += mr;
    }
  }
  float l[MOST_ROWS];
  for (long r = 0; r < rows; ++r) {
    long visible = start + (r0 + r) / group + 1;
    float *row = s + r * lds, m = -INFINITY;
    for (long i = 0; i < visible; ++i) { row[i] = row[i] * scale; m = row[i] > m ? row[i] : m; } /* a NaN reaches l through its own p */
    exp_row(row, visible, m);
    l[r] = 0.0f;
    for (long i0 = 0; i0 < visible; i0 += KEYS) {
      float sum = 0.0f;
      for (long i = i0; i < i0 + KEYS && i < visible; ++i) sum = sum + row[i];
      l[r] = l[r] + sum;
    }
    for (long d = 0; d < padded; ++d) total[r * MOST_DIM + d] = 0.0f;
  }
  for (long n = 0; n * KEYS <= last; ++n) {
    long keys = last + 1 - n * KEYS < KEYS ? last + 1 - n * KEYS : KEYS;
    for (long i = 0; i < keys; ++i) {
      fill(panel + i * padded, v, ((cache + n) * KEYS + i) * D, D, bf16);
      for (long d = D; d < padded; ++d) panel[i * padded + d] = 0.0f;
    }
    long r = n * KEYS <= start ? 0 : (n * KEYS - start) * group - r0;
    for (r = r < 0 ? 0 : r; r < rows;) {
      int mr = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
      long seen = start + (r0 + r) / group + 1 - n * KEYS, most = start + (r0 + r + mr - 1) / group + 1 - n * KEYS;
      if (seen < KEYS && most != seen) { mr = 1; } /* the rows of a step see the same keys of this block */
      chains(mr, s + r * lds + n * KEYS, lds, panel, padded, seen < KEYS ? seen : KEYS, acc, MOST_DIM, padded);
      for (long m = 0; m < mr; ++m)
        for (long d = 0; d < padded; ++d) total[(r + m) * MOST_DIM + d] = total[(r + m) * MOST_DIM + d] + acc[m * MOST_DIM + d];
      r += mr;
    }
  }
  for (long r = 0; r < rows; ++r) {
    float *to = o + ((b * T + (r0 + r) / group) * H + g * group + (r0 + r) % group) * D;
    for (long d = 0; d < D; ++d) to[d] = total[r * MOST_DIM + d] / l[r];
  }
  return 0;
}
"""
MOST_ROWS = 64  # rows of one unit
MOST_DIM = 256
_THREADED_FROM = 1 << 21  # FMAs below which starting threads costs more than it saves


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    library, reason = _compile.load("attention", _compile.PRELUDE + f"#define MOST_ROWS {MOST_ROWS}\n" + SOURCE)
    if library is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        library.attend.argtypes = [pointer] * 3 + [ctypes.c_int, pointer] + [integer] * 10 + [ctypes.c_float] + [pointer] * 5
    return library, reason


def available() -> bool:
    """True where the C engine is built (builds it at the first call, about a second)."""
    return _load()[0] is not None


def why() -> str:
    """Why the C engine is not available; empty where it is."""
    return _load()[1]


def attention(q_BTHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], counts: list[int], scale: float) -> torch.Tensor:
    """o_BTHD float32; rows t >= counts[b] are zeros.

    q float32; k [B, G, N, D, 64] and v [B, G, N * 64, D] both bf16 or both float32; all contiguous on the CPU. Units are shared out
    over torch's threads.
    """
    library, reason = _load()
    assert library is not None, f"the C engine was asked for but is missing: {reason}"
    batch, tokens, heads, dim = q_BTHD.shape
    groups, blocks = k.shape[1:3]
    group = heads // groups
    o_BTHD = torch.zeros(q_BTHD.shape, dtype=torch.float32, device="cpu")
    units = [
        (b, g, r, min(r + MOST_ROWS, counts[b] * group))
        for b in range(batch) for r in range(0, counts[b] * group, MOST_ROWS) for g in range(groups)
    ]  # fmt: skip

    def some(mine: list[tuple[int, int, int, int]]) -> None:
        rows, keys = max(r1 - r0 for _, _, r0, r1 in mine), max(-(-(starts[b] + counts[b]) // 64) * 64 for b, *_ in mine)
        sizes = (rows * keys, rows * dim, 64 * MOST_DIM, 4 * MOST_DIM, rows * MOST_DIM)
        parts = torch.empty(sum(sizes), dtype=torch.float32, device="cpu").split(sizes)
        for b, g, r0, r1 in mine:
            status = library.attend(
                q_BTHD.data_ptr(), k.data_ptr(), v.data_ptr(), int(k.dtype == torch.bfloat16), o_BTHD.data_ptr(), b, g, r0, r1, tokens,
                heads, groups, dim, blocks, starts[b], scale, *(part.data_ptr() for part in parts),
            )  # fmt: skip
            assert status == 0, _compile.FLUSHED

    work = sum(2 * (r1 - r0) * (starts[b] + counts[b]) * dim for b, _, r0, r1 in units)
    workers = min(torch.get_num_threads(), len(units)) if work >= _THREADED_FROM else 1
    shares = [units[i::workers] for i in range(workers)] if units else []
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(some, shares))
    else:
        list(map(some, shares))
    return o_BTHD
