"""IEEE-754 building blocks on the CPU: an exact float32 FMA from float64 operations, and a check that subnormals are kept.

    >>> import torch
    >>> from kernels.exact.ieee import fma_f32
    >>> one_ulp = torch.tensor(1 + 2.0**-23)
    >>> float(fma_f32(one_ulp, one_ulp, -one_ulp * one_ulp)) != 0      # the product is not rounded before the addition
    True

The product of two float32 is exact in float64. TwoSum gives the exact error of adding the third operand, and stepping the sum to an
odd last bit when that error is not zero ("round to odd", Boldo and Melquiond 2008) makes the last rounding to float32 the only one. Where
a C compiler is at hand, large operands take the processor's own FMA instruction instead (`_fma_c.py`): the same bits, sooner.

It does not run on a GPU: there `tl.fma` is one instruction.
"""

import threading

import torch

from kernels.exact import _fma_c
from kernels.exact._compile import FLUSHED

__all__ = ["assert_subnormals_kept", "f32", "fma_f32", "nan_canonical"]

CANONICAL_NAN_BITS = 0x7FC00000
_kept = threading.local()
_LARGE = 2048  # elements from which a call into C pays


def f32(value: torch.Tensor | float) -> torch.Tensor:
    """`value` as a float32 CPU tensor; exact for bf16, fp16 and for Python floats that are float32 values."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"this arithmetic runs on the CPU; got {value.device=}; call x.cpu(), or use tl.fma in a kernel")
        return value.to(torch.float32)
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def fma_f32(a: torch.Tensor | float, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """round_to_float32(a * b + c) with one rounding; operands broadcast. Exact for every input, subnormal results included.

    Raises ValueError for tensors that are not on the CPU.
    """
    a, b, c = f32(a), f32(b), f32(c)
    if max(a.numel(), b.numel(), c.numel()) >= _LARGE and _fma_c.available():
        return _fma_c.fma(a, b, c)
    return fma_by_float64(a, b, c)


def fma_by_float64(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The same from float64 operations alone; float32 operands that broadcast."""
    p, c = a.double() * b.double(), c.double()
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    bits = s.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(s) & ((bits & 1) == 0)
    away = (error > 0) == (s > 0)  # the exact sum lies farther from zero than s
    bits = torch.where(inexact, bits + torch.where(away, 1, -1), bits)
    return bits.view(torch.float64).to(torch.float32)


def nan_canonical(x: torch.Tensor) -> torch.Tensor:
    """A copy of a floating tensor with every NaN replaced by the one quiet NaN (0x7FC00000 in float32); -0 is kept."""
    return torch.where(torch.isnan(x), torch.full((), float("nan"), dtype=x.dtype, device=x.device), x)


def assert_subnormals_kept() -> None:
    """Fails if this thread or one of torch's pool flushes subnormals (`torch.set_flush_denormal(True)`): every reference would be wrong.

    A thread of the pool keeps the state of the thread that started it, whatever is set later. So the product here is long enough that each
    of them computes a part; tens of microseconds, on buffers kept by the calling thread.
    """
    count = torch.get_num_threads() << 15  # torch hands out at least 2^15 elements at a time
    if getattr(_kept, "count", 0) != count:
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside it
            _kept.count, _kept.tiny = count, torch.full((count,), 2.0**-126, dtype=torch.float32, device="cpu")
            _kept.half = torch.empty_like(_kept.tiny)
    torch.mul(_kept.tiny, 0.5, out=_kept.half)
    assert int(_kept.half.view(torch.int32).min()) == 1 << 22, FLUSHED
