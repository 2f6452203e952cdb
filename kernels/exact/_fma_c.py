"""Elementwise fused multiply-add in C: the fast engine behind `ieee.fma_f32`, the same bits as its float64 arithmetic.

    >>> from kernels.exact import _fma_c
    >>> _fma_c.available()                    # False without a C compiler, or on a processor without FMA instructions
    True
"""

import ctypes
import functools

import torch

from kernels.exact import _compile

__all__ = ["available", "fma"]

SOURCE = r"""
/* out[i] = fma(a, b, c); an operand with step 0 is one value */
int fma_elements(const float *a, long sa, const float *b, long sb, const float *c, long sc, float *out, long n) {
  if (flushes_subnormals()) return 1;
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    STORE(out + i, FMA(sa ? LOAD(a + i) : SET1(*a), sb ? LOAD(b + i) : SET1(*b), sc ? LOAD(c + i) : SET1(*c)));
  for (; i < n; ++i) out[i] = fmaf(a[sa * i], b[sb * i], c[sc * i]);
  return 0;
}
int lanes(void) { return LANES; }
"""


@functools.cache
def _load() -> ctypes.CDLL | None:
    library, _ = _compile.load("fma", _compile.PRELUDE + SOURCE)
    if library is None or library.lanes() == 1:  # a library call per element would be slower than float64 arithmetic
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_long
    library.fma_elements.argtypes = [pointer, integer, pointer, integer, pointer, integer, pointer, integer]
    return library


def available() -> bool:
    """True where the engine is built (builds it at the first call, about a second)."""
    return _load() is not None


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once; float32 CPU tensors that broadcast together. Raises AssertionError where subnormals are flushed."""
    shape = torch.broadcast_shapes(a.shape, b.shape, c.shape)
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    operands = [t.contiguous() if t.numel() == 1 else t.expand(shape).contiguous() for t in (a, b, c)]
    steps = [0 if t.numel() == 1 else 1 for t in operands]
    pairs = [value for t, step in zip(operands, steps, strict=True) for value in (t.data_ptr(), step)]
    status = _load().fma_elements(*pairs, out.data_ptr(), out.numel())
    assert status == 0, _compile.FLUSHED
    return out
