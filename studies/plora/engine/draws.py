"""Philox numbers made where they are used, equal bit for bit to those of kernels.exact.philox: starts of adapters, random bases.

    a_SrK = uniform(streams=(0, 1, 2), count=16 * 576, seed=7, device="cuda").view(3, 16, 576)      # each row: philox_uniform under its stream
    w_NK = bell(count=n * k, seed=0, stream=5, device="cuda", scale_log2=-5).view(n, k)

Integer operations of torch on any device; a billion numbers take about a second of an H200, and minutes of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["bell", "uniform"]

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_AT_ONCE = 2**22  # numbers, a multiple of 4: their integers take some 100 MB, so that a start is no peak of a small pack's memory


def _words(streams: torch.Tensor, count: int, seed: int, first: int = 0) -> torch.Tensor:
    """Words `first` (a multiple of 4) and following of each stream: int64 [streams, count] in [0, 2^32); one counter gives four."""
    index = torch.arange(first // 4, (first + count + 3) // 4, dtype=torch.int64, device=streams.device)
    c0, c1, c2, c3 = index & _MASK, index >> 32, streams[:, None], torch.zeros((), dtype=torch.int64, device=streams.device)
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps at 2^64: shifted right and masked it is still the high word
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack([x.expand(len(streams), len(index)) for x in (c0, c1, c2, c3)], dim=2).flatten(1)[:, :count]


def uniform(*, streams: Sequence[int], count: int, seed: int, device: torch.device | str) -> torch.Tensor:
    """float32 [streams, count]: row i is `philox_uniform((count,), seed, stream=streams[i])`, odd multiples of 2^-24 in (-1, 1)."""
    _check(seed, streams)
    numbers, out = torch.tensor(streams, dtype=torch.int64, device=device), torch.empty(len(streams), count, dtype=torch.float32, device=device)
    each = max(1, _AT_ONCE // count)
    for some, part in zip(numbers.split(each), out.split(each), strict=True):
        for start in range(0, count, _AT_ONCE):
            words = _words(some, min(_AT_ONCE, count - start), seed, start)
            part[:, start : start + _AT_ONCE] = ((words >> 8) * 2 + 1 - 2**24).to(torch.float32) * 2.0**-24
    return out


def bell(*, count: int, seed: int, stream: int, device: torch.device | str, scale_log2: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[count] in `dtype`, `philox_bell`'s numbers: variance 4^scale_log2 / 3. Made in pieces of 2^26, so that memory stays small."""
    _check(seed, (stream,))
    streams, out = torch.tensor([stream], dtype=torch.int64, device=device), torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, 2**26):
        n = min(2**26, count - start)
        words = _words(streams, 2 * n, seed, 2 * start)[0]
        halves = (words & 0xFFFF) + (words >> 16)
        out[start : start + n] = ((halves[0::2] + halves[1::2]) * 2 - 4 * 65535).to(torch.float32) * 2.0 ** (scale_log2 - 17)
    return out


def _check(seed: int, streams: Sequence[int]) -> None:
    if not 0 <= seed < 2**64 or min(streams) < 0 or max(streams) >= 2**32:
        raise ValueError(f"need 0 <= seed < 2^64 and streams below 2^32, got {seed=} {min(streams)=} {max(streams)=}; fold larger values")
