"""What is done to a tile in registers around a product: norm, activation, quantising. Used behind a product, and alone in front of one.

    Epilogue(norm="blocknorm", activation="hardswish", requantise=OperandRecipe(fmt="e4m3", granularity="block"))

A norm is "none", "layernorm", "rmsnorm" or "blocknorm": RMSNorm over fixed blocks of 256 features without parameters, the last block of a
row shorter where 256 does not divide it. An activation is "identity", "silu" or "hardswish". Order: norm, then activation (LoKA's Mods, from
reading notes of arXiv 2605.10886: linear, BlockNorm, HardSwish). With x a row, K its length, all in float32:

    layernorm  n = (x - mean x) rsqrt(mean (x - mean x)^2 + eps) w + b
    rmsnorm    n = x rsqrt(mean x^2 + eps) w + b            blocknorm  the same in each block, w = 1, b = 0
    silu       y = n / (1 + e^-n)                           hardswish  y = n min(max(n + 3, 0), 6) / 6

A product's epilogue has blocknorm alone: a CTA owns 128 x 256 outputs, so a block of 256 features never leaves it, while a row of LayerNorm
would. Requantising has 1 x 128 blocks, two of which lie in the tile; a whole row only where it is at most 256 long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.fp8.recipes import BLOCK, OperandRecipe
from kernels.fp8.scaling import finite_abs, scale_rule

__all__ = [
    "ACTIVATIONS", "FEATURES", "NORMS", "Epilogue", "activate", "activate_ref", "check_norm", "normalise", "normalise_ref", "quantise_tile",
]  # fmt: skip

NORMS = ("none", "layernorm", "rmsnorm", "blocknorm")
ACTIVATIONS = ("identity", "silu", "hardswish")
FEATURES = 256  # of BlockNorm
_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """What a product does with its tile before it is written. `requantise`: write FP8 with scales instead of `out_dtype`."""

    norm: str = "none"  # "none" or "blocknorm"
    activation: str = "identity"
    requantise: OperandRecipe | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_norm(self.norm, self.activation, self.eps, FEATURES)
        if self.norm not in ("none", "blocknorm"):
            raise ValueError(f"a product's epilogue has no norm or blocknorm, whose block lies in one tile, got {self.norm=}; use norm_quantise behind the product")
        if self.requantise and self.requantise.granularity not in ("block", "row"):
            raise ValueError(f"an epilogue requantises by block, or by row up to {FEATURES} features, got {self.requantise}; quantise behind the product")


def check_norm(norm: str, activation: str, eps: float, block: int) -> None:
    """Raises ValueError with the rule that is broken."""
    if norm not in NORMS or activation not in ACTIVATIONS:
        raise ValueError(f"a norm is one of {NORMS} and an activation one of {ACTIVATIONS}, got {norm=} {activation=}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is added to a mean square: finite and not negative, got {eps=}; use 1e-5")
    if block < 16 or block & (block - 1):
        raise ValueError(f"a block of blocknorm is a power of two from 16 on, got {block=}; use {FEATURES}")


# ---- references: float64 -------------------------------------------------------------------------------------------------------


def normalise_ref(
    x_MK: torch.Tensor, norm: str, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5, block: int = FEATURES
) -> torch.Tensor:
    """The norm in float64, differentiable; x: [..., K], any dtype."""
    x, k = x_MK.double(), x_MK.shape[-1]
    if norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    if norm in ("layernorm", "rmsnorm"):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    elif norm == "blocknorm":
        x = torch.cat([b * torch.rsqrt(b.square().mean(-1, keepdim=True) + eps) for b in x.split(block, -1)], -1) if k else x
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


def activate_ref(n: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation in n's dtype, differentiable."""
    if activation == "silu":
        return torch.nn.functional.silu(n)
    return n * torch.nn.functional.relu6(n + 3) / 6 if activation == "hardswish" else n


# ---- inside kernels: a tile [ROWS, WIDTH] of float32, zero from column K on ------------------------------------------------------


@triton.jit
def normalise(x, cols, K, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """(x normalised without weight and bias, mean [ROWS], reciprocal root [ROWS, groups]); columns from K on stay zero."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM == "blocknorm":
        GROUPS: tl.constexpr = WIDTH // BLOCK
        x3 = tl.reshape(x, (ROWS, GROUPS, BLOCK))
        count = tl.minimum(tl.maximum(K - tl.arange(0, GROUPS) * BLOCK, 1), BLOCK).to(tl.float32)
        r = tl.rsqrt(tl.sum(x3 * x3, 2) / count[None, :] + eps)
        n = tl.reshape(x3 * r[:, :, None], (ROWS, WIDTH))
    elif NORM == "none":
        r = tl.zeros((ROWS, 1), tl.float32)
        n = x
    else:
        if NORM == "layernorm":
            mean = tl.sum(x, 1) / K
            x = tl.where(cols[None, :] < K, x - mean[:, None], 0.0)
        r = tl.expand_dims(tl.rsqrt(tl.sum(x * x, 1) / K + eps), 1)
        n = x * r
    return n, mean, r


@triton.jit
def activate(n, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = n / (1.0 + tl.exp(-n))
    elif ACTIVATION == "hardswish":
        y = n * tl.minimum(tl.maximum(n + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        y = n
    return y


@triton.jit
def quantise_tile(y, given, GRANULARITY: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(y divided by its scales, ready for the cast; scales [ROWS, groups]). "tensor": `given` is the scale, a float32.

    Scales by `scaling.scale_rule`, so data and scales are `quantise_ref(y)`'s bit for bit.
    """
    ROWS: tl.constexpr = y.shape[0]
    WIDTH: tl.constexpr = y.shape[1]
    if GRANULARITY == "tensor":
        scale = tl.zeros((ROWS, 1), tl.float32) + given
        v = y * tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), scale)
    elif GRANULARITY == "row":
        scale, r = scale_rule(tl.expand_dims(tl.max(finite_abs(y), 1), 1), MAX, POWER_OF_TWO)
        v = y * r
    else:
        y3 = tl.reshape(y, (ROWS, WIDTH // _BLOCK, _BLOCK))
        scale, r = scale_rule(tl.max(finite_abs(y3), 2), MAX, POWER_OF_TWO)
        v = tl.reshape(y3 * r[:, :, None], (ROWS, WIDTH))
    return v, scale
