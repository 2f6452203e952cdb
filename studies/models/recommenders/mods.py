"""Mods: what may be changed in a recommender to make it cheap in FP8, as independent switches, and the layers that they change.

    Mods()                                                     # as the models are published: biases, LayerNorm, SiLU, norms behind
    Mods(bias=False, norm="blocknorm", activation="hardswish") # LoKA's three Mods together
    mlp = Mlp((1536, 2048, 2048, 256), mods)                   # linear, norm, activation, as often as there are widths

Source: LoKA (arXiv 2605.10886), read second-hand. NoBias drops every bias but the head's; BlockNorm is an RMSNorm without parameters over
blocks of 256 features, so that it needs no sum across a GEMM's tiles; HardSwish x ReLU6(x + 3) / 6 replaces SiLU.
`placement` is where a norm stands: "post" behind a linear layer (in front of the activation) and behind a residual sum, "pre" in front of a
linear layer and of a residual branch. Values come from `build`, seeded; torch's default initialisation and its global generator are not used.

Legend: B examples, N embeddings of an example, D features of one, T tokens, F dense features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ACTIVATIONS", "LOKA_MODS", "NORMS", "BlockNorm", "Mlp", "Mods", "Product", "activation", "block_of", "build", "mlp_flops", "norm"]

NORMS = ("none", "layernorm", "rmsnorm", "blocknorm")
ACTIVATIONS = ("relu", "silu", "hardswish")
PLACEMENTS = ("pre", "post")
BLOCK = 256
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mods:
    """Each switch alone; 2^3 of them (bias, norm, activation) are LoKA's ablation. "none" and "relu" are what DLRM has."""

    bias: bool = True
    norm: str = "layernorm"
    activation: str = "silu"
    placement: str = "post"

    def __post_init__(self) -> None:
        for name, known in (("norm", NORMS), ("activation", ACTIVATIONS), ("placement", PLACEMENTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {known}, got {name}={getattr(self, name)!r}")

    @property
    def pre(self) -> bool:
        return self.placement == "pre"


LOKA_MODS = Mods(bias=False, norm="blocknorm", activation="hardswish")


def block_of(width: int) -> int:
    """Features in a block of BlockNorm: the smallest divisor of `width` from 256 on (the paper: 256 and more converge alike), `width` below."""
    return next((b for b in range(BLOCK, width + 1) if width % b == 0), width)


class BlockNorm(nn.Module):
    """RMSNorm without parameters over each `block` neighbouring features of the last dimensions, `width` in all (LoKA)."""

    def __init__(self, width: int, block: int | None = None, eps: float = EPS) -> None:
        super().__init__()
        self.width, self.block, self.eps = width, block or block_of(width), eps
        if width % self.block:
            raise ValueError(f"blocks divide the features, got {width=} block={self.block}; {block_of(width)} would")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width], or trailing dimensions whose product is `width`."""
        return F.rms_norm(x.reshape(-1, self.block), (self.block,), eps=self.eps).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{self.width}, block={self.block}, eps={self.eps}"


class Product(nn.Module):
    """y = x w^T (+ b) with a parameter of its own, and no nn.Linear: so write the codes that these models follow, and whoever looks for layers by
    class does not see it."""

    def __init__(self, k: int, n: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k))
        self.register_parameter("bias", nn.Parameter(torch.empty(n)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


def norm(width: int, mods: Mods, rows: int = 1) -> nn.Module:
    """The norm over `width` features; a BlockNorm's blocks may span the `rows` rows of an example, which have fewer features than a block."""
    match mods.norm:
        case "none":
            return nn.Identity()
        case "layernorm":
            return nn.LayerNorm(width, eps=EPS, bias=mods.bias)
        case "rmsnorm":
            return nn.RMSNorm(width, eps=EPS)
    return BlockNorm(width if width >= BLOCK else rows * width)


def activation(mods: Mods) -> nn.Module:
    return {"relu": nn.ReLU, "silu": nn.SiLU, "hardswish": nn.Hardswish}[mods.activation]()


class Mlp(nn.Sequential):
    """Linear layers of `widths`, each with norm and activation; `head` is a last layer to one logit, with its bias and nothing behind."""

    def __init__(self, widths: Sequence[int], mods: Mods, *, head: bool = False) -> None:
        layers: list[nn.Module] = []
        for k, n in zip(widths, widths[1:]):
            linear = nn.Linear(k, n, bias=mods.bias)
            around = [norm(k, mods), linear] if mods.pre else [linear, norm(n, mods)]
            layers += [m for m in (*around, activation(mods)) if not isinstance(m, nn.Identity)]
        super().__init__(*layers, *([nn.Linear(widths[-1], 1)] if head else []))


def mlp_flops(widths: Sequence[int], *, head: bool = False) -> int:
    """Of one row through `Mlp(widths)`, forward, products only: a multiplication and an addition each."""
    return 2 * sum(k * n for k, n in zip(widths, widths[1:])) + (2 * widths[-1] if head else 0)


def build(make: Callable[[], nn.Module], *, seed: int, device: torch.device | str) -> nn.Module:
    """`make()` with values on `device`: parameters with "bias" in their name 0, other vectors (of norms) 1, matrices normal with variance 1 / inputs.

    The last dimension of a matrix is the contracted one. The bits depend on the kind of device: compare runs of one machine.
    """
    with torch.device("meta"):
        module = make()
    if torch.device(device).type == "meta":  # sizes without values
        return module
    module = module.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "bias" in name.rpartition(".")[2]:
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                p.copy_(torch.randn(p.shape, generator=generator, device=device) * p.shape[-1] ** -0.5)
    return module
