"""Inputs of the golden questions: tensors from the integer Philox, equal on every machine.

    values("hard", (12, 264), seed=7, dtype=torch.bfloat16)

Kinds: `bell` (like weights and activations: many exponents, both signs), `hard` (a bell with rows of zeros of both signs,
subnormals, an infinity, a NaN, the largest finite values), `wide` (uniform times `scale`), `bits` (random bit patterns of the dtype),
`every` (each of the 65,536 values of a 16-bit dtype once). Nothing here is random in the sense of a test statistic.
"""

from __future__ import annotations

import hashlib
import math

import torch

from kernels.exact.philox import philox_bell, philox_integers, philox_uniform

_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
_HARD_KINDS = 8


def seed_of(operator: str, case: str) -> int:
    """A seed for each question, from its name: adding a case moves no other."""
    return int.from_bytes(hashlib.sha256(f"{operator}, {case}".encode()).digest()[:4], "big")


def values(kind: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.float32, stream: int = 0, scale: float = 1.0) -> torch.Tensor:
    """A CPU tensor of one of the kinds above; `stream` separates several inputs of one question."""
    if kind == "bell":
        return philox_bell(shape, seed, dtype, stream)
    if kind == "wide":
        return (philox_uniform(shape, seed, torch.float32, stream) * scale).to(dtype)
    if kind == "bits":
        return _bits(shape, seed, dtype, stream)
    if kind == "hard":
        return _hard(shape, seed, dtype, stream)
    if kind == "every":
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(shape)
    raise ValueError(f"values are bell, wide, bits, hard or every, got {kind=}; see the module's docstring")


def integers(shape: tuple[int, ...], below: int, *, seed: int, stream: int = 0) -> torch.Tensor:
    """int64 in [0, below)."""
    raw = torch.from_numpy(philox_integers(math.prod(shape), seed, stream).astype("int64"))
    return (raw % below).reshape(shape)


def _bits(shape: tuple[int, ...], seed: int, dtype: torch.dtype, stream: int) -> torch.Tensor:
    raw = torch.from_numpy(philox_integers(math.prod(shape), seed, stream).astype("int64"))
    kind = _INTEGER[dtype]
    width = torch.iinfo(kind).bits
    wrapped = raw & ((1 << width) - 1)
    return torch.where(wrapped >= 1 << (width - 1), wrapped - (1 << width), wrapped).to(kind).view(dtype).reshape(shape)


def _hard(shape: tuple[int, ...], seed: int, dtype: torch.dtype, stream: int) -> torch.Tensor:
    """Row i is of kind i mod 8: bell, zeros of both signs, subnormals, one infinity, one NaN, largest values, opposite infinities, tiny beside huge."""
    x = philox_bell(shape, seed, dtype, stream).reshape(-1, shape[-1])
    sign = torch.where(_bits(x.shape, seed, torch.float32, stream + 100).view(torch.int32) < 0, -1.0, 1.0)
    small = _bits(x.shape, seed, dtype, stream + 200).view(_INTEGER[dtype]) & ((1 << _MANTISSA_BITS[dtype]) - 1)
    rows = torch.arange(x.shape[0]) % _HARD_KINDS
    largest, at = torch.finfo(dtype).max, x.shape[1] // 2
    x[rows == 1] = (0.0 * sign[rows == 1]).to(dtype)
    x[rows == 2] = small[rows == 2].to(_INTEGER[dtype]).view(dtype) * sign[rows == 2].to(dtype)
    x[rows == 3, at] = float("inf")
    x[rows == 4, at] = float("nan")
    x[rows == 5] = (largest * sign[rows == 5]).to(dtype)
    x[rows == 6, 0], x[rows == 6, at] = float("inf"), -float("inf")
    x[rows == 7, at] = largest
    return x.reshape(shape)
