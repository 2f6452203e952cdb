"""The compiled engine of `linear_fma_ref`: FMA chains in C, vectorised over output columns, the same bits as the torch engine.

    >>> from kernels.exact import _oracle_c
    >>> _oracle_c.available()                 # False without a C compiler: the torch engine then serves everything
    True

The source below is compiled once per host (`_compile.py`). Each output is one chain per chunk, so neither the vector width nor the
number of threads can change bits. Where there is no compiler, `available()` is False and `why()` says so.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.exact import _compile

__all__ = ["available", "linear", "why"]

SOURCE = r"""
#define V 4
#define TILE (V * LANES)

/* acc[MR][TILE] = chain over k of x[m][k] * w[k][0:TILE], then + 0; x has row stride ldx, w is packed [k][TILE] */
#define KERNEL(MR)                                                                       \
static void kernel_##MR(const float *x, long ldx, const float *w, long len, float *out) { \
  vec acc[MR][V];                                                                        \
  for (int m = 0; m < MR; ++m) for (int v = 0; v < V; ++v) acc[m][v] = ZERO();           \
  for (long k = 0; k < len; ++k) {                                                       \
    vec b[V];                                                                            \
    for (int v = 0; v < V; ++v) b[v] = LOAD(w + k * TILE + v * LANES);                   \
    for (int m = 0; m < MR; ++m) {                                                       \
      vec a = SET1(x[m * ldx + k]);                                                      \
      for (int v = 0; v < V; ++v) acc[m][v] = FMA(a, b[v], acc[m][v]);                   \
    }                                                                                    \
  }                                                                                      \
  for (int m = 0; m < MR; ++m) for (int v = 0; v < V; ++v)                               \
    STORE(out + m * TILE + v * LANES, ADD(acc[m][v], ZERO()));                           \
}
KERNEL(1) KERNEL(2) KERNEL(4)

static void run(int mr, const float *x, long ldx, const float *w, long len, float *out) {
  if (mr == 4) kernel_4(x, ldx, w, len, out);
  else if (mr == 2) kernel_2(x, ldx, w, len, out);
  else kernel_1(x, ldx, w, len, out);
}

/* panel[k][j] = w[n + j][k0 + k] as float32 */
static void fill_panel(float *panel, const void *w, int bf16, long K, long n, long k0, long width, long len) {
  for (long k1 = 0; k1 < len; k1 += 16) { /* 16 k at a time: the lines written stay in the first cache */
    long stop = len - k1 < 16 ? len : k1 + 16;
    for (long j = 0; j < width; ++j) {
      long row = (n + j) * K + k0;
      if (bf16)
        for (long k = k1; k < stop; ++k) {
          uint32_t bits = (uint32_t)((const uint16_t *)w)[row + k] << 16;
          memcpy(panel + k * TILE + j, &bits, 4);
        }
      else
        for (long k = k1; k < stop; ++k) panel[k * TILE + j] = ((const float *)w)[row + k];
    }
  }
}

/* spans: `starts`/`stops` of all chunks, `first[s]`..`first[s+1]` are the chunks of span s; columns n0..n1 of w_NK, y_MN.
   sums is scratch [spans][M][TILE], panel scratch [256][TILE]. */
int linear(const float *x, const void *w, int bf16, float *y, long M, long N, long K, long n0, long n1, const long *starts,
           const long *stops, const long *first, long spans, float *sums, float *panel) {
  if (flushes_subnormals()) return 1;
  float tile[4 * TILE];
  for (long n = n0; n < n1; n += TILE) {
    long width = n1 - n < TILE ? n1 - n : TILE;
    memset(sums, 0, sizeof(float) * spans * M * TILE);
    for (long s = 0; s < spans; ++s)
      for (long c = first[s]; c < first[s + 1]; ++c) {
        long k0 = starts[c], len = stops[c] - k0;
        if (width < TILE) memset(panel, 0, sizeof(float) * 256 * TILE);
        fill_panel(panel, w, bf16, K, n, k0, width, len);
        for (long m = 0; m < M;) {
          int mr = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
          run(mr, x + m * K + k0, K, panel, len, tile);
          float *sum = sums + (s * M + m) * TILE;
          for (long i = 0; i < mr * TILE; ++i) sum[i] = sum[i] + tile[i];
          m += mr;
        }
      }
    for (long m = 0; m < M; ++m)
      for (long j = 0; j < width; ++j) {
        const float *p = sums + m * TILE + j;
        long d = M * TILE;
        float part[8];
        for (long s = 0; s < spans; ++s) part[s] = p[s * d];
        for (long left = spans / 2; left > 0; left /= 2)
          for (long s = 0; s < left; ++s) part[s] = part[2 * s] + part[2 * s + 1];
        y[m * N + n + j] = part[0];
      }
  }
  return 0;
}
int tile_width(void) { return TILE; }
"""


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    library, reason = _compile.load("linear", _compile.PRELUDE + SOURCE)
    if library is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        library.linear.argtypes = [pointer, pointer, ctypes.c_int, pointer] + [integer] * 5 + [pointer] * 3 + [integer] + [pointer] * 2
    return library, reason


def available() -> bool:
    """True where the C engine is built (builds it at the first call, about a second)."""
    return _load()[0] is not None


def why() -> str:
    """Why the C engine is not available; empty where it is."""
    return _load()[1]


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor, chunks: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
    """y_MN in the given chunk order; contiguous CPU operands, x float32, w float32 or bf16; columns are shared out over torch's threads."""
    library, reason = _load()
    assert library is not None, f"the C engine was asked for but is missing: {reason}"
    (m, k), n = x_MK.shape, w_NK.shape[0]
    y_MN = torch.empty((m, n), dtype=torch.float32, device="cpu")
    flat = [chunk for span in chunks for chunk in span]
    starts = torch.tensor([c[0] for c in flat], dtype=torch.int64, device="cpu")
    stops = torch.tensor([c[1] for c in flat], dtype=torch.int64, device="cpu")
    first = torch.tensor([0, *(len(span) for span in chunks)], dtype=torch.int64, device="cpu").cumsum(0)
    tile = library.tile_width()
    workers = max(1, min(torch.get_num_threads(), -(-n // tile)))
    share = -(-n // (tile * workers)) * tile

    def columns(n0: int) -> None:
        sums = torch.empty(len(chunks) * m * tile, dtype=torch.float32, device="cpu")
        panel = torch.zeros(256 * tile, dtype=torch.float32, device="cpu")
        status = library.linear(
            x_MK.data_ptr(), w_NK.data_ptr(), int(w_NK.dtype == torch.bfloat16), y_MN.data_ptr(), m, n, k, n0, min(n0 + share, n),
            starts.data_ptr(), stops.data_ptr(), first.data_ptr(), len(chunks), sums.data_ptr(), panel.data_ptr(),
        )
        assert status == 0, _compile.FLUSHED

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(columns, range(0, n, share)))
    return y_MN
