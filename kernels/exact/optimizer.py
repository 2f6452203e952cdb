"""AdamW from IEEE-754 operations only: one set of bits for a training step on every GPU and on the CPU.

    >>> import torch
    >>> from kernels.exact.optimizer import AdamW, adamw_step_ref
    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> [x[0].item() for x in adamw_step_ref(one, one, zero, zero, step=1, config=AdamW(lr=0.5, weight_decay=0.0))]
    [0.5, 0.10000000149011612, 0.0010000000474974513]

    m' = fma(beta1, m, (1 - beta1) g)            u  = (m' / c1) / (sqrt(v' / c2) + eps)
    v' = fma(beta2, v, ((1 - beta2) g) g)        p' = fma(-lr, u, p (1 - lr decay))

Each operation is rounded once to float32; division and square root are the correctly rounded ones. Every scalar (also 1 - beta, the
bias corrections c = 1 - beta^step and 1 - lr decay) is computed from the decimal that was written, to 100 digits in Python's `decimal`,
and rounded once to float32, so no machine's `pow` takes part. Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.

It does not clip gradients, schedule the learning rate or keep 16-bit states; it returns new tensors and leaves its arguments alone.
"""

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.ieee import assert_subnormals_kept, fma_f32

__all__ = ["AdamW", "AdamWConstants", "adamw_step", "adamw_step_ref", "round_to_f32"]

_DIGITS = 100
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class AdamWConstants:
    """The float32 scalars of one step, as Python floats."""

    beta1: float
    rest1: float
    correction1: float
    beta2: float
    rest2: float
    correction2: float
    lr: float
    keep: float
    eps: float


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Hyperparameters; a float stands for the shortest decimal that Python prints for it (0.9 is nine tenths)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"betas lie in [0, 1); got {self.beta1=} {self.beta2=}; use 0.9 and 0.999")
        if not 0 < self.lr < float("inf") or not 0 <= self.weight_decay < float("inf") or not self.lr * self.weight_decay < 1:
            raise ValueError(f"lr is positive, weight_decay not negative and their product below 1; got {self.lr=} {self.weight_decay=}; use 1e-3, 0.01")
        if not 2.0**-126 <= self.eps < 2.0**127:
            raise ValueError(f"eps keeps 0 / 0 away, so it is a normal float32 above 0; got {self.eps=}; use 1e-8")

    def constants(self, step: int, *, decay: bool = True) -> AdamWConstants:
        """Scalars of step 1, 2, ...; `decay=False` for parameters without weight decay (norms)."""
        if step < 1:
            raise ValueError(f"steps count from 1, or the bias correction is 0; got {step=}; pass the number of this update")
        with localcontext(Context(prec=_DIGITS)):
            lr, wd, eps, b1, b2 = (Decimal(repr(float(x))) for x in (self.lr, self.weight_decay, self.eps, self.beta1, self.beta2))
            exact = dict(beta1=b1, rest1=1 - b1, correction1=1 - b1**step, beta2=b2, rest2=1 - b2, correction2=1 - b2**step)
            exact |= dict(lr=lr, keep=1 - lr * wd if decay else Decimal(1), eps=eps)
        return AdamWConstants(**{name: round_to_f32(value) for name, value in exact.items()})


def round_to_f32(value: Decimal) -> float:
    """The nearest float32, ties to even, without the double rounding of a way through float64. |value| below 2^127."""
    near = np.float32(float(value))
    with localcontext(Context(prec=400)):  # a float32 has at most 112 significant digits: differences are exact
        candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
        best = min(candidates, key=lambda c: (abs(Decimal(float(c)) - value), int(c.view(np.uint32)) & 1))
    return float(best)


def _check(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    if not param.shape == grad.shape == m.shape == v.shape:
        raise ValueError(f"a parameter, its gradient and both moments have one shape; got {tuple(param.shape)=} {tuple(grad.shape)=} {tuple(m.shape)=} "
                         f"{tuple(v.shape)=}; pass what belongs together")  # fmt: skip
    if not param.dtype == m.dtype == v.dtype == torch.float32 or grad.dtype not in _FLOATS:
        raise ValueError(f"parameter and moments are float32, gradients bf16, fp16 or fp32; got {param.dtype=} {grad.dtype=} {m.dtype=} {v.dtype=}; keep "
                         "float32 master weights")  # fmt: skip


def adamw_step_ref(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *, step: int, config: AdamW, decay: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(param', m', v') float32 on the CPU; `step` counts from 1. Raises ValueError for shapes, dtypes or steps that do not fit."""
    _check(param, grad, m, v)
    assert_subnormals_kept()
    c = config.constants(step, decay=decay)
    p, g, m, v = (x.detach().cpu().float() for x in (param, grad, m, v))
    m = fma_f32(c.beta1, m, g * c.rest1)
    v = fma_f32(c.beta2, v, (g * c.rest2) * g)
    # division by a tensor and numpy's square root are the hardware's correctly rounded instructions
    root = torch.from_numpy(np.sqrt((v / torch.full_like(v, c.correction2)).numpy()))
    u = (m / torch.full_like(m, c.correction1)) / (root + c.eps)
    return fma_f32(-c.lr, u, p * c.keep), m, v


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, p_out, m_out, v_out, count, beta1, rest1, correction1, beta2, rest2, correction2, lr, keep, eps, BLOCK: tl.constexpr
):
    """One element a lane, in the sequence of `adamw_step_ref`; must be compiled with enable_fp_fusion=False."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    p = tl.load(p_ptr + i, mask=inside, other=0.0)
    g = tl.load(g_ptr + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + i, mask=inside, other=0.0)
    v = tl.load(v_ptr + i, mask=inside, other=0.0)
    one = tl.full((BLOCK,), 1.0, tl.float32)
    m = tl.fma(one * beta1, m, g * rest1)
    v = tl.fma(one * beta2, v, (g * rest2) * g)
    root = tl.sqrt_rn(tl.div_rn(v, one * correction2))
    u = tl.div_rn(tl.div_rn(m, one * correction1), root + eps)
    tl.store(p_out + i, tl.fma(one * (-lr), u, p * keep), mask=inside)
    tl.store(m_out + i, m, mask=inside)
    tl.store(v_out + i, v, mask=inside)


@on_gpu("adamw_step")
def adamw_step(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *, step: int, config: AdamW, decay: bool = True,
    block: int = 1024, num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`adamw_step_ref` on a GPU; any `block` and `num_warps` give the same bits."""
    _check(param, grad, m, v)
    c = config.constants(step, decay=decay)
    param, grad, m, v = (x.detach().contiguous() for x in (param, grad, m, v))
    out = tuple(torch.empty_like(param) for _ in range(3))
    if param.numel():
        adamw_kernel[(triton.cdiv(param.numel(), block),)](
            param, grad, m, v, *out, param.numel(), c.beta1, c.rest1, c.correction1, c.beta2, c.rest2, c.correction2, c.lr, c.keep, c.eps,
            BLOCK=block, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
