"""Labelled distributions of inputs: what an operand of a product may look like, seeded, the same numbers on every machine.

    x_RC = draw("row-scaled", 2048, 512, seed=3)       # float32 [2048, 512]
    DISTRIBUTIONS["row-scaled"].meaning, DISTRIBUTIONS["row-scaled"].stress

Philox integers (kernels.exact.philox) become float64 numbers through a libm and are rounded once to float32, on a CPU; a GPU gets the same
numbers by copying them. Two libms that differ in the last bit of float64 give another float32 about once in 2^28 numbers, and another bfloat16
once in 2^44. A `stress` is made to break a recipe; the others have the shape of things seen in recommenders, and none is fitted to a data set:
real activations are captured from models and passed in as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact.philox import philox_integers

__all__ = ["DISTRIBUTIONS", "Distribution", "draw", "normals"]

OUTLIER, OUTLIERS_IN = 1e5, 4096  # one number in 4096, times 1e5: beyond it the rest falls below the normal range of e4m3, 2^14.8 wide
DECADES = 5.0  # over which rows are scaled
LOG_SPREAD = 2.0  # standard deviation of ln|x|, as of raw counts in click logs


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How `draw` makes a matrix: `make(rows, columns, seed)` -> float64 [rows, columns]."""

    meaning: str
    stress: bool
    make: Callable[[int, int, int], np.ndarray]


def normals(shape: tuple[int, ...], seed: int, stream: int = 0) -> np.ndarray:
    """Standard normal float64 numbers by Box and Muller, of 32-bit uniforms: |x| <= 6.7."""
    n = math.prod(shape)
    half = -(-n // 2)
    u = (philox_integers(2 * half, seed, stream).astype(np.float64) + 0.5) * 2.0**-32
    radius, angle = np.sqrt(-2 * np.log(u[:half])), 2 * np.pi * u[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n].reshape(shape)


def _uniforms(shape: tuple[int, ...], seed: int, stream: int) -> np.ndarray:
    return (philox_integers(math.prod(shape), seed, stream).astype(np.float64) + 0.5).reshape(shape) * 2.0**-32


def _gaussian(rows: int, columns: int, seed: int) -> np.ndarray:
    return normals((rows, columns), seed)


def _student_t3(rows: int, columns: int, seed: int) -> np.ndarray:
    """z / sqrt(chi^2 / 3), the chi^2 of three more normals."""
    z = normals((4, rows, columns), seed)
    return z[0] / np.sqrt((z[1:] ** 2).mean(0))


def _log_normal(rows: int, columns: int, seed: int) -> np.ndarray:
    sign = np.where(_uniforms((rows, columns), seed, stream=1) < 0.5, -1.0, 1.0)
    return sign * np.exp(LOG_SPREAD * normals((rows, columns), seed))


def _row_scaled(rows: int, columns: int, seed: int) -> np.ndarray:
    return normals((rows, columns), seed) * 10.0 ** (-DECADES * _uniforms((rows, 1), seed, stream=1))


def _outliers(rows: int, columns: int, seed: int) -> np.ndarray:
    """At least one outlier."""
    x = normals((rows, columns), seed).reshape(-1)
    if x.size:
        where = philox_integers(max(1, x.size // OUTLIERS_IN), seed, stream=1).astype(np.int64) % x.size
        x[where] *= OUTLIER
    return x.reshape(rows, columns)


def _post_relu(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.maximum(normals((rows, columns), seed), 0.0)


DISTRIBUTIONS = {
    "gaussian": Distribution(meaning="standard normal", stress=False, make=_gaussian),
    "student-t3": Distribution(meaning="Student t with 3 degrees of freedom: tails as of embeddings that were trained unevenly", stress=False, make=_student_t3),
    "log-normal": Distribution(meaning=f"signed, ln|x| normal with standard deviation {LOG_SPREAD:g}: counts that nobody took the logarithm of", stress=False, make=_log_normal),
    "row-scaled": Distribution(meaning=f"normal, each row times 10^-u, u uniform in [0, {DECADES:g}]: examples of very different size in one batch", stress=True, make=_row_scaled),
    "outliers": Distribution(meaning=f"normal, one number in {OUTLIERS_IN} times {OUTLIER:g}", stress=True, make=_outliers),
    "post-relu": Distribution(meaning="max(normal, 0): half zeros, one sign", stress=False, make=_post_relu),
}  # fmt: skip


def draw(distribution: str, rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """float32 [rows, columns] on the CPU. Raises ValueError for an unknown name and for negative sizes."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"a distribution is one of {sorted(DISTRIBUTIONS)}, got {distribution!r}")
    if rows < 0 or columns < 0:
        raise ValueError(f"a matrix has rows and columns >= 0, got {rows=} {columns=}")
    return torch.from_numpy(DISTRIBUTIONS[distribution].make(rows, columns, seed).astype(np.float32))
