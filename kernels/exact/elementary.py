"""exp, log, tanh, erf and the normal distribution's tail in float32 from IEEE-754 operations only, each twice: for the CPU and for kernels.

    >>> import torch
    >>> from kernels.exact.elementary import log_host
    >>> log_host(torch.tensor([1.0, 0.0])).tolist()
    [0.0, -inf]

`*_host` takes and gives float32 CPU tensors; `*_f32` is the same sequence for float32 values inside a Triton kernel, which must be
compiled with enable_fp_fusion=False. The operators on tensors of any dtype stand in `activations.py`, with the measured errors.

    exp(x):  n = round(x log2 e), r = x - n ln 2 in two steps, degree-7 polynomial in r by fma, times 2^n as two exact factors
    log(x):  x = 2^e (1 + f), 2/3 <= 1 + f < 4/3 by integer operations; f + f^2 (f P(f) - 1/2), + e ln 2 in two steps
    tanh(x): t = |x|: below 0.55 t + t^3 P(t^2), else 1 - 2 / (exp(2 t) + 1); the sign bit of x
    erf(x):  t = |x|: below 0.9375 t + t P(t^2), else 1 - exp(-P(min(t, 4))); the sign bit of x
    tail(t): Phi(-t) for t >= 0: exp(-t^2/2) P(q) / (1 + 2 t), q = (t - 4) / (t + 4); the rounding error of t^2 is put back

Polynomials other than exp's (Taylor) are minimax fits of this project, coefficients rounded to float32, highest power first.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.exact.ieee import fma_f32

__all__ = ["erf_f32", "erf_host", "exp_f32", "exp_host", "log_f32", "log_host", "tail_f32", "tail_host", "tanh_f32", "tanh_host"]


def _f32(value: float) -> float:
    return float(np.float32(value))


_LOG2E = _f32(1.4426950408889634)
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
_MAGIC_BITS = 0x4B400000
_LN2_HIGH, _LN2_LOW = -0.693145751953125, _f32(-1.428606820e-6)
_LOWEST, _HIGHEST = -104.0, 89.0  # exp is 0 and infinity from here on
_EXP = tuple(_f32(1 / f) for f in (5040, 720, 120, 24, 6, 2, 1, 1))
_LOG = tuple(map(_f32, (-0.12891601, 0.13984467, -0.12184278, 0.14005862, -0.16680487, 0.20010406, -0.24999797, 0.33333215, -0.5)))
_TANH = tuple(map(_f32, (-0.0061886325, 0.021014273, -0.053839244, 0.13332471, -0.33333313)))
_ERF_NEAR = tuple(map(_f32, (8.29661e-05, -0.00081258063, 0.0051996, -0.026858851, 0.11283686, -0.37612632, 0.12837917)))
_ERF_FAR = tuple(map(_f32, (2.1306005e-05, -0.00043690667, 0.0041829343, -0.025150776, 0.10832872, 0.63330257, 1.129537, -0.00017928421)))
_TAIL = tuple(map(_f32, (-0.00014799355, -6.076218e-05, 0.0015588392, -0.0012606583, -0.010514279, 0.044376735, -0.095259234, 0.1289069,
                         -0.096380085, -0.023009198, 0.8496958)))  # fmt: skip
_TWO_THIRDS_BITS = 0x3F2AAAAB
_TINY = 2.0**-126  # the smallest normal number
_TAIL_END = 15.0  # Phi(-15) is below half the smallest subnormal

LOG2E, MAGIC, MAGIC_BITS = tl.constexpr(_LOG2E), tl.constexpr(_MAGIC), tl.constexpr(_MAGIC_BITS)
LN2_HIGH, LN2_LOW, LN2_1, LN2_2 = (tl.constexpr(c) for c in (_LN2_HIGH, _LN2_LOW, -_LN2_HIGH, -_LN2_LOW))
LOWEST, HIGHEST, TINY, TAIL_END = (tl.constexpr(c) for c in (_LOWEST, _HIGHEST, _TINY, _TAIL_END))
TWO_THIRDS_BITS = tl.constexpr(_TWO_THIRDS_BITS)
EXP, LOG, TANH, ERF_NEAR, ERF_FAR, TAIL = (tl.constexpr(c) for c in (_EXP, _LOG, _TANH, _ERF_NEAR, _ERF_FAR, _TAIL))
N_EXP, N_LOG, N_TANH, N_ERF_NEAR, N_ERF_FAR, N_TAIL = (tl.constexpr(len(c)) for c in (_EXP, _LOG, _TANH, _ERF_NEAR, _ERF_FAR, _TAIL))


# ---- CPU -----------------------------------------------------------------------------------------------------------------------


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """Horner's rule by fma, highest power first."""
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma_f32(p, x, c)
    return p


def _signed(size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.signbit(x), -size, size)


def exp_host(x: torch.Tensor) -> torch.Tensor:
    x = torch.where(x < _LOWEST, _LOWEST, x)
    x = torch.where(x > _HIGHEST, _HIGHEST, x)
    t = fma_f32(x, _LOG2E, _MAGIC)
    n = t.view(torch.int32) - _MAGIC_BITS
    nf = t - _MAGIC
    p = _polynomial(fma_f32(nf, _LN2_LOW, fma_f32(nf, _LN2_HIGH, x)), _EXP)
    half = n >> 1
    low, high = ((half + 127) << 23).view(torch.float32), ((n - half + 127) << 23).view(torch.float32)
    return (p * low) * high


def log_host(x: torch.Tensor) -> torch.Tensor:
    small = x < _TINY
    bits = torch.where(small, x * 2.0**23, x).contiguous().view(torch.int32)
    power = (bits - _TWO_THIRDS_BITS) & -0x800000
    f = (bits - power).view(torch.float32) - 1.0
    e = (power >> 23).float() - small.float() * 23.0
    y = fma_f32(_polynomial(f, _LOG), f * f, f)
    y = fma_f32(e, -_LN2_HIGH, fma_f32(e, -_LN2_LOW, y))
    y = torch.where(x > 0, y, torch.where(x == 0, -torch.inf, torch.full_like(x, torch.nan)))
    return torch.where(x == torch.inf, torch.inf, y)


def tanh_host(x: torch.Tensor) -> torch.Tensor:
    t = x.abs()
    s = t * t
    near = fma_f32(_polynomial(s, _TANH) * s, t, t)
    far = 1.0 - torch.full_like(t, 2.0) / (exp_host(t + t) + 1.0)
    return _signed(torch.where(t < 0.55, near, far), x)


def erf_host(x: torch.Tensor) -> torch.Tensor:
    t = x.abs()
    near = fma_f32(_polynomial(t * t, _ERF_NEAR), t, t)
    far = 1.0 - exp_host(-_polynomial(torch.where(t > 4.0, 4.0, t), _ERF_FAR))
    return _signed(torch.where(t < 0.9375, near, far), x)


def tail_host(t: torch.Tensor) -> torch.Tensor:
    """Phi(-t) for 0 <= t <= 15."""
    square = t * t
    error = fma_f32(t, t, -square)
    e = exp_host(-0.5 * square)
    e = fma_f32(e, -0.5 * error, e)
    p = _polynomial((t - 4.0) / (t + 4.0), _TAIL)
    return e * (p / fma_f32(t, 2.0, 1.0))


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def polynomial_f32(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """Horner's rule by fma, highest power first (the interpreter cannot ask a constexpr for its length)."""
    p = tl.fma(x, COEFFICIENTS[0], COEFFICIENTS[1])
    for i in tl.static_range(2, COUNT):
        p = tl.fma(p, x, COEFFICIENTS[i])
    return p


@triton.jit
def signed_f32(size, x):
    """`size` >= 0 with the sign bit of x, by integers: Triton's -v is 0 - v, which is +0 for +0."""
    return (size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def exp_f32(x):
    x = tl.where(x < LOWEST, LOWEST, x)
    x = tl.where(x > HIGHEST, HIGHEST, x)
    t = tl.fma(x, LOG2E, MAGIC)
    n = t.to(tl.int32, bitcast=True) - MAGIC_BITS
    nf = t - MAGIC
    p = polynomial_f32(tl.fma(nf, LN2_LOW, tl.fma(nf, LN2_HIGH, x)), EXP, N_EXP)
    half = n >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return (p * low) * high


@triton.jit
def log_f32(x):
    small = x < TINY
    bits = tl.where(small, x * 8388608.0, x).to(tl.int32, bitcast=True)
    power = (bits - TWO_THIRDS_BITS) & -0x800000
    f = (bits - power).to(tl.float32, bitcast=True) - 1.0
    e = (((power >> 23) + MAGIC_BITS).to(tl.float32, bitcast=True) - MAGIC) - tl.where(small, 23.0, 0.0)
    y = tl.fma(polynomial_f32(f, LOG, N_LOG), f * f, f)
    y = tl.fma(e, LN2_1, tl.fma(e, LN2_2, y))
    y = tl.where(x > 0.0, y, tl.where(x == 0.0, float("-inf"), float("nan")))
    return tl.where(x == float("inf"), float("inf"), y)


@triton.jit
def tanh_f32(x):
    t = tl.abs(x)
    s = t * t
    near = tl.fma(polynomial_f32(s, TANH, N_TANH) * s, t, t)
    far = 1.0 - tl.div_rn(tl.full(t.shape, 2.0, tl.float32), exp_f32(t + t) + 1.0)
    return signed_f32(tl.where(t < 0.55, near, far), x)


@triton.jit
def erf_f32(x):
    t = tl.abs(x)
    near = tl.fma(polynomial_f32(t * t, ERF_NEAR, N_ERF_NEAR), t, t)
    far = 1.0 - exp_f32(-polynomial_f32(tl.where(t > 4.0, 4.0, t), ERF_FAR, N_ERF_FAR))
    return signed_f32(tl.where(t < 0.9375, near, far), x)


@triton.jit
def tail_f32(t):
    square = t * t
    error = tl.fma(t, t, -square)
    e = exp_f32(-0.5 * square)
    e = tl.fma(e, -0.5 * error, e)
    p = polynomial_f32(tl.div_rn(t - 4.0, t + 4.0), TAIL, N_TAIL)
    return e * tl.div_rn(p, tl.fma(t, 2.0, 1.0))
