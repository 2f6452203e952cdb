"""The compiled engine of the integer family's oracle: sums of digit products in int32, groups of equal weight combined in int64.

    totals_MN = _integer_c.totals(x_PMK, w_PNK, "b6")       # int8 digit planes, top digit first -> int64

Integers: neither the vector width nor the number of threads can change a bit. Digits are widened to int16 block by block of K, so a
weight is read once for all tokens. `available()` is False without a C compiler; the float64 engine then serves everything.
Legend: P planes of digits, M tokens, N outputs, K inputs.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.exact import _compile

__all__ = ["available", "totals"]

_PRODUCTS_A_THREAD = 1 << 19  # below, starting a thread costs more than it saves

# |a group| <= 3 * 2^14 * K < 2^31 for K <= 43,690: a whole K fits int32
SOURCE = r"""
#define BLOCK 1024 /* products between widenings: six int16 rows stay in the first cache */

static void widen(int16_t *to, const int8_t *from, long n) { for (long k = 0; k < n; ++k) to[k] = from[k]; }

static int32_t dot(const int16_t *a, const int16_t *b, long n) {
  int32_t s = 0;
  for (long k = 0; k < n; ++k) s += (int32_t)a[k] * (int32_t)b[k];
  return s;
}

/* x [3][M][K] int16, w [3][N][K] int8 with strides, rows n0..n1 of w; groups: 3 (b6) or 5 (b9); out [M][N]; sums is scratch [M][5] */
void digit_totals(const int16_t *x, const int8_t *w, long plane, long stride, int64_t *out, long M, long N, long K, long n0, long n1, int groups, int32_t *sums) {
  int16_t row[3][BLOCK];
  for (long n = n0; n < n1; ++n) {
    memset(sums, 0, sizeof(int32_t) * 5 * M);
    for (long k0 = 0; k0 < K; k0 += BLOCK) {
      long len = K - k0 < BLOCK ? K - k0 : BLOCK;
      for (int j = 0; j < 3; ++j) widen(row[j], w + j * plane + n * stride + k0, len);
      for (long m = 0; m < M; ++m)
        for (int i = 0; i < 3; ++i)
          for (int j = 0; j < 3; ++j)
            if (i + j < groups) sums[5 * m + i + j] += dot(x + (i * M + m) * K + k0, row[j], len);
    }
    for (long m = 0; m < M; ++m) {
      int64_t total = 0;
      for (int g = 0; g < groups; ++g) total = total * 256 + sums[5 * m + g];
      out[m * N + n] = total;
    }
  }
}
"""


@functools.cache
def _load() -> ctypes.CDLL | None:
    library, _ = _compile.load("integer", _compile.PRELUDE + SOURCE)
    if library is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        library.digit_totals.argtypes = [pointer] * 2 + [integer] * 2 + [pointer] + [integer] * 5 + [ctypes.c_int, pointer]
        library.digit_totals.restype = None
    return library


def available() -> bool:
    """True where the engine is built (builds it at the first call, about a second)."""
    return _load() is not None


def totals(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """int8 [3, M, K] and [3, N, K] on the CPU -> int64 [M, N]; rows of w are shared out over torch's threads."""
    (_, m, k), n = x_PMK.shape, w_PNK.shape[1]
    w = w_PNK if w_PNK.stride(2) == 1 else w_PNK.contiguous()
    x, out = x_PMK.to(torch.int16).contiguous(), torch.empty((m, n), dtype=torch.int64, device="cpu")
    workers = max(1, min(torch.get_num_threads(), n * m * k // _PRODUCTS_A_THREAD))
    share = max(1, -(-n // workers))

    def rows(n0: int) -> None:
        sums = torch.empty(5 * max(m, 1), dtype=torch.int32, device="cpu")
        _load().digit_totals(x.data_ptr(), w.data_ptr(), w.stride(0), w.stride(1), out.data_ptr(), m, n, k, n0, min(n0 + share, n), 3 if products == "b6" else 5, sums.data_ptr())

    if workers == 1:
        rows(0)
        return out
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(rows, range(0, n, share)))
    return out
