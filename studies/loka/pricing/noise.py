"""Noise: what a recipe's rounding does to a product, by formula: no cast, no quantised product.

    n = product_noise(known(a_RC), known(b_SC), gemm("rowwise"))
    10 * (n.signal / (n.mean + n.variance)).log10()            # SQNR of each row, in dB
    output_variance(known(a_RC), known(b_SC), gemm("rowwise"))  # of each output [R, S]

An element x with scale s, v = |x| / s, errs by rounding. With m mantissa bits, e = floor(log2 v), and all below times s^2:

    v < 2^emin                    subnormal   variance step^2 / 12, step = 2^(emin - m)
    v <= step / 2                 flushed     error -x, exactly: it has a sign, so such errors add up (`mean`)
    else                          normal      variance 4^(e - m) / 12: mantissas uniform within a binade
    |x| is the group's amax       v = max     none, unless scales are powers of two: the format holds it

Errors of different elements are taken as independent with mean zero, except flushed ones. With a' = a where it is not flushed, row r of a b^T has

    signal    sum_s (sum_c a_rc b_sc)^2
    mean      sum_s (sum_c flushed a_rc b_sc + sum_c a'_rc flushed b_sc)^2, and (h C / 64)^2 signal of fast accumulation
    variance  sum_c D(a_rc) sum_s b_sc^2 + sum_cs a'_rc^2 D(b_sc)

h = 0.72 2^-14: what truncating to 14 bits takes from an accumulator, on average, each 32 of C; it grows from 0 to its end, hence 64.
The variance is an expectation: the noise that one row meets varies about it. `freedom` is the number of degrees of a chi^2 with that spread. A uniform
error u has Var(u^2) = 0.8 Var(u)^2 (a normal one: 2), so with P_c = D(a_rc) sum_s b_sc^2, V_s = sum_c a'^2 D(b_sc), and T = trace(B)^2 / |B|^2,
B = b b^T (the number of independent outputs), freedom = (sum P + sum V)^2 / (sum P^2 (0.4 - 1/T) + (sum P)^2 / T + sum V^2 - 0.6 sum_c a'^4 sum_s D(b_sc)^2).

Legend: B products at once, R rows, S outputs, C contracted; `length` is the C of the real product where only some of it is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8.recipes import GemmRecipe, OperandRecipe
from kernels.fp8.scaling import amax_ref, expand_scale, scale_rule_ref

__all__ = ["Known", "Noise", "known", "output_variance", "product_noise"]

MANTISSA_BITS = {"bf16": 7, "tf32": 10}
TRUNCATION = 0.72 * 2.0**-14  # mean of half a unit of 14 bits over the accumulator, 1 / mantissa averaged over log-uniform mantissas
AT_MAX = 1 - 2.0**-20  # an amax divided by its own scale is the format's largest number up to float32's rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """What is known of an operand: numbers [B, R, C], and the amax of the groups that reach beyond them, broadcastable against them."""

    x: torch.Tensor  # float64
    tensor_amax: torch.Tensor
    row_amax: torch.Tensor

    @property
    def mT(self) -> torch.Tensor:  # noqa: N802
        return self.x.mT


@dataclass(frozen=True, eq=False, kw_only=True)
class Noise:
    """Of rows [B, R], float64, in units of the output squared and summed over S; see the module's docstring."""

    signal: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor
    freedom: torch.Tensor

    @property
    def sqnr_db(self) -> torch.Tensor:
        """Signal over expected noise."""
        return 10 * torch.log10(self.signal / (self.mean + self.variance))


def known(x: torch.Tensor) -> Known:
    """A whole operand [..., R, C]: its own amax are those of the groups."""
    x = x.detach().double()
    x = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    a = torch.where(x.abs() < float("inf"), x.abs(), 0.0)
    return Known(x=x, tensor_amax=torch.nn.functional.pad(a.reshape(-1), (0, 1)).amax(), row_amax=torch.nn.functional.pad(a, (0, 1)).amax(-1, keepdim=True))


def product_noise(a: Known, b: Known, recipe: GemmRecipe, *, length: int | None = None) -> Noise:
    """Noise of the rows of a b^T in `recipe`. With `length` > C the contracted axis is a uniform sample without replacement of that many.

    Raises ValueError where the operands do not fit, and for a sample of one.
    """
    if a.x.shape[-1] != b.x.shape[-1] or len(a.x) != len(b.x):
        raise ValueError(f"operands are [B, R, C] and [B, S, C], got {tuple(a.x.shape)} and {tuple(b.x.shape)}")
    c = a.x.shape[-1]
    length = c if length is None else length
    if length < c or (length > c and c < 2):
        raise ValueError(f"a contracted axis of {length} is sampled by 2 to {length} of it, got {c}")
    (va, fa), (vb, fb) = _errors(a, recipe.a, recipe.dtype), _errors(b, recipe.b, recipe.dtype)
    signal = _power(a.x, b.x, length, c)
    mean = torch.zeros_like(signal)
    kept = a.x - fa
    if bool(fa.any()) or bool(fb.any()):
        mean = _power(torch.cat([fa, kept], -1), torch.cat([b.x, fb], -1), length, c)  # of one c at most one term is not 0
    if recipe.fast_accum:
        mean = mean + (TRUNCATION * length / 64) ** 2 * signal
    of_a = va * b.x.square().sum(-2, keepdim=True)  # P_c: [B, R, C]
    of_b = kept.square() @ vb.mT  # V_s: [B, R, S]
    trace, frobenius = b.x.square().sum((-2, -1)), (b.x @ b.x.mT).square().sum((-2, -1))
    independent = (trace.square() / frobenius.clamp(min=1e-300)).clamp(min=1.0)[:, None]
    total = of_a.sum(-1) + of_b.sum(-1)
    alone = of_a.square().sum(-1) * (0.4 - 1 / independent).clamp(min=0) - 0.6 * (kept.pow(4) @ vb.square().sum(-2)[..., None])[..., 0]
    shared = of_a.sum(-1).square() / independent + of_b.square().sum(-1)
    share = length / max(c, 1)  # of a sample: terms of one c grow with it, squares of sums with its square
    freedom = torch.where(total > 0, total.square() / (alone / share + shared).clamp(min=1e-300), 1.0).clamp(min=1.0)
    return Noise(signal=signal, mean=mean, variance=total * share, freedom=freedom)


def output_variance(a: Known, b: Known, recipe: GemmRecipe) -> torch.Tensor:
    """Expected squared error of each output [B, R, S], float64: what a site adds to an example's features (studies.loka.pricing.price)."""
    (va, fa), (vb, fb) = _errors(a, recipe.a, recipe.dtype), _errors(b, recipe.b, recipe.dtype)
    kept = a.x - fa
    mean = fa @ b.mT + kept @ fb.mT
    if recipe.fast_accum:
        mean = mean - TRUNCATION * a.x.shape[-1] / 64 * (a.x @ b.mT)
    return va @ b.x.square().mT + kept.square() @ vb.mT + mean.square()


def _power(a: torch.Tensor, b: torch.Tensor, length: int, q: int) -> torch.Tensor:
    """sum_s (sum_c a_rc b_sc)^2 of each row over a contracted axis of `length`, of which q are sampled.

    All rows together it is sum_cd K_cd, K = (a^T a) * (b^T b) elementwise. A uniform sample gives the diagonal, times length / q, and the pairs c != d,
    times length (length - 1) / (q (q - 1)). If terms have random signs the pairs' sum D is 0 with the variance 2 sum K_cd^2 = e^2, which is
    large where little was sampled: D is taken times 1 - 4 e^2 / D^2, and as 0 within two e. Rows share the ratio that results, which is kept
    above 1/20.
    """
    if length == q:
        return (a @ b.mT).square().sum(-1)
    squares = length / q * (a.square() @ b.square().sum(-2)[..., None])[..., 0]
    k = (a.mT @ a) * (b.mT @ b)
    k.diagonal(dim1=-2, dim2=-1).zero_()
    pairs, variance = k.sum(), 2 * k.square().sum()
    kept = (1 - 4 * variance / pairs.square().clamp(min=1e-300)).clamp(min=0.0)
    ratio = 1 + length * (length - 1) / (q * (q - 1)) * pairs * kept / squares.sum().clamp(min=1e-300)
    return squares * ratio.clamp(min=0.05)


def _errors(known: Known, operand: OperandRecipe | None, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(variance, mean error with its sign reversed: the flushed numbers themselves) of each element."""
    if operand is None:
        return _narrow(known.x, dtype), torch.zeros_like(known.x)
    fmt = operand.format
    scale = _scale(known, operand)
    v = known.x.abs() / scale
    step = torch.exp2(_exponent(v).clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    flushed = v <= fmt.step / 2
    exact = flushed if operand.power_of_two else flushed | (v >= fmt.max * AT_MAX)
    return torch.where(exact, 0.0, (step * scale).square() / 12), torch.where(flushed, known.x, 0.0)


def _scale(known: Known, operand: OperandRecipe) -> torch.Tensor:
    if operand.granularity in ("block", "square"):
        scale, _ = scale_rule_ref(amax_ref(known.x.float(), operand.granularity), operand.format, operand.power_of_two)
        return expand_scale(scale, tuple(known.x.shape), operand.granularity).double()
    amax = known.tensor_amax if operand.granularity == "tensor" else known.row_amax
    return scale_rule_ref(amax.float(), operand.format, operand.power_of_two)[0].double()


def _narrow(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Variance of rounding to bf16 or tf32; none for numbers that are such already, and for fp32."""
    if dtype not in MANTISSA_BITS:
        return torch.zeros_like(x)
    bits = MANTISSA_BITS[dtype]
    step = torch.exp2(_exponent(x.abs()) - bits)
    return torch.where(torch.remainder(x, step) == 0, 0.0, step.square() / 12)


def _exponent(v: torch.Tensor) -> torch.Tensor:
    """floor(log2 v), of 0 a very small one."""
    return (torch.frexp(v.clamp(min=1e-300))[1] - 1).double()
