"""Philox4x32-10 (Salmon et al., SC 2011) with integer operations only, so inputs are equal on every machine.

    >>> from kernels.exact.philox import philox_uniform
    >>> import torch
    >>> x = philox_uniform((4, 8), seed=1, dtype=torch.bfloat16)       # the same bits everywhere

`philox_ref` is the generator (known-answer vectors of Random123 in the tests), `philox_u32` the same inside a Triton kernel. The value helpers map integers to floats exactly, no
libm: `philox_uniform` gives odd multiples of 2^-p in (-1, 1), `philox_bell` a sum of four uniforms (variance 1/3, bell-shaped, for
weights). It does not imitate `torch.rand`, and no statistics beyond Philox's own are claimed.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["philox_bell", "philox_integers", "philox_ref", "philox_u32", "philox_uniform"]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
M0, M1, W0, W1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57), tl.constexpr(_W0), tl.constexpr(_W1)
_MASK = np.uint64(0xFFFFFFFF)
_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # precision p: odd multiples of 2^-p below 1 fit exactly


def philox_ref(counter: np.ndarray, key: tuple[int, int], rounds: int = 10) -> np.ndarray:
    """Philox4x32: `counter` uint32 [..., 4], `key` two 32-bit words -> uint32 [..., 4]."""
    c = np.ascontiguousarray(counter, dtype=np.uint32)
    if c.ndim < 1 or c.shape[-1] != 4:
        raise ValueError(f"a Philox4x32 counter has 4 words in its last dimension; got {c.shape=}; pass [..., 4]")
    c0, c1, c2, c3 = (c[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    for _ in range(rounds):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ np.uint64(k0), p1 & _MASK, (p0 >> 32) ^ c3 ^ np.uint64(k1), p0 & _MASK
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


@triton.jit
def philox_u32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on uint32 values of one shape -> four of them: 32-bit multiplications (low and high half) and exclusive or only."""
    for _ in tl.static_range(10):
        high_0, high_1 = tl.umulhi(M0, c0), tl.umulhi(M1, c2)
        low_0, low_1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + W0, k1 + W1
    return c0, c1, c2, c3


def philox_integers(count: int, seed: int, stream: int = 0) -> np.ndarray:
    """`count` uint32 values: element 4i+j is word j of counter (i low, i high, stream, 0) under the 64-bit `seed` as key."""
    if count < 0 or not 0 <= seed < 2**64 or not 0 <= stream < 2**32:
        raise ValueError(f"need count >= 0, 0 <= seed < 2^64, 0 <= stream < 2^32; got {count=} {seed=} {stream=}; fold larger values")
    index = np.arange(-(-count // 4), dtype=np.uint64)
    counter = np.zeros((len(index), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = index & _MASK, index >> np.uint64(32), stream
    return philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]


def _precision(dtype: torch.dtype) -> int:
    if dtype not in _BITS:
        raise ValueError(f"values are made for bfloat16, float16 and float32; got {dtype=}; convert one of these yourself")
    return _BITS[dtype]


def philox_uniform(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> torch.Tensor:
    """Uniform over the odd multiples of 2^-p in (-1, 1), p = 8, 11, 24 for bf16, fp16, fp32; exact, never zero. CPU tensor."""
    p = _precision(dtype)
    n = philox_integers(math.prod(shape), seed, stream) >> np.uint32(32 - p)  # p bits
    odd = n.astype(np.int64) * 2 + 1 - (1 << p)
    return torch.from_numpy(np.ldexp(odd.astype(np.float64), -p).reshape(shape)).to(dtype)


def philox_bell(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, stream: int = 0, scale_log2: int = 0) -> torch.Tensor:
    """Sum of four 16-bit uniforms, on a grid of 2^-16 in (-2, 2), times 2^`scale_log2`, rounded once to `dtype`; variance 4^scale_log2 / 3.

    A bell like the weights of a network: many exponents, exact zeros, both signs. CPU tensor.
    """
    _precision(dtype)
    n = philox_integers(2 * math.prod(shape), seed, stream)
    halves = (n & np.uint32(0xFFFF)).astype(np.int64) + (n >> np.uint32(16)).astype(np.int64)
    total = 2 * (halves[0::2] + halves[1::2]) - 4 * 65535
    return torch.from_numpy(np.ldexp(total.astype(np.float64), scale_log2 - 17).reshape(shape)).to(dtype)
