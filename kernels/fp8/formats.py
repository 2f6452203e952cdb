"""The two FP8 formats, and the one cast that every kernel, emulation and recipe here uses.

    E4M3.max                         # 448.0
    cast(x, E4M3)                    # float32 -> torch.float8_e4m3fn: clamped to +-448, then rounded to nearest even

The cast clamps first because libraries disagree above the largest finite value: some saturate, others (torch before 2.12) give NaN from
464 on. Within the range all of them round alike, so a clamped cast is bitwise equal on every device. NaN stays NaN; infinities become
+-max, and whoever needs to know counts them before (kernels.fp8.statistics).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BY_NAME", "E4M3", "E5M2", "Format", "cast"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """An FP8 format: 1 sign bit, `exponent_bits`, `mantissa_bits`; OCP 8-bit floating point specification, revision 1.0."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number: 2**min_exponent
    max: float  # the largest finite number

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def step(self) -> float:
        """Distance between subnormal numbers, which is the smallest positive one."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


E4M3 = Format(name="e4m3", dtype=torch.float8_e4m3fn, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = Format(name="e5m2", dtype=torch.float8_e5m2, mantissa_bits=2, min_exponent=-14, max=57344.0)
BY_NAME = {f.name: f for f in (E4M3, E5M2)}


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """x (float32, any shape) in `fmt`, clamped to its finite range, round to nearest even. Raises ValueError for another dtype."""
    if x.dtype != torch.float32:
        raise ValueError(f"a cast to {fmt.name} starts from float32, so that it rounds once; got {x.dtype}; convert first")
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
