"""Wukong: layers of factorization machines (FMB) beside linear compressions (LCB) over embeddings, then a top MLP to one logit.

    model = wukong(size="0.53")                                # GFLOP an example, forward and backward
    logit_B = model(*model.example(batch=8, seed=0))

A layer maps N embeddings to nF + nL: FMB = MLP(norm(flatten(X (X^T Y)))) with a learned Y of N x k, LCB = W X, both side by side plus X (through a
linear map where N changes), then a norm (arXiv 2403.02545, section 4; embeddings of 160 features; layers, nF, nL, k and MLP of its table 5).
The products are named as an FP8 site needs them: X^T Y contracts N, X (X^T Y) contracts D and has two activations.

What we chose, for the text at hand does not say it: 768 embeddings go in (LoKA's longest contraction, 123,200 = 770 x 160, says about 770; 768 is a
multiple of 16), 8 of them made of the dense features by an MLP; the top MLP is 4096-2048-1024 at every size. With these, and a backward pass
counted as two forward passes, the sizes come to 0.55, 1.18 and 5.53 GFLOP an example where the paper's names are 0.53, 1.25 and 5.6.
MLPs have a norm in each layer, as LoKA's Mods presume. The published order is "post". Legend in mods.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from studies.models.recommenders.inputs import example_inputs
from studies.models.recommenders.mods import Mlp, Mods, Product, build, mlp_flops, norm

__all__ = ["WUKONG_SIZES", "Wukong", "WukongConfig", "wukong"]


@dataclass(frozen=True, kw_only=True)
class WukongConfig:
    layers: int
    made: int  # nF = nL: embeddings made by each of FMB and LCB
    k: int
    hidden: tuple[int, ...]  # widths of FMB's MLP
    dense: int = 13
    fields: int = 760
    dim: int = 160
    dense_made: int = 8  # embeddings made of the dense features
    dense_hidden: int = 512
    over: tuple[int, ...] = (4096, 2048, 1024)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Embeddings that go into each layer, and those that come out of the last."""
        return (self.fields + self.dense_made, *[2 * self.made] * self.layers)

    @property
    def flops_per_example(self) -> int:
        """Of a forward pass, products only."""
        dense = mlp_flops((self.dense, self.dense_hidden, self.dense_made * self.dim))
        return dense + sum(self._layer_flops(n) for n in self.inputs[:-1]) + mlp_flops((2 * self.made * self.dim, *self.over), head=True)

    def _layer_flops(self, n: int) -> int:
        machine = 4 * n * self.dim * self.k + mlp_flops((n * self.k, *self.hidden, self.made * self.dim))
        residual = 2 * n * 2 * self.made * self.dim if n != 2 * self.made else 0
        return machine + 2 * n * self.made * self.dim + residual


WUKONG_SIZES = {
    "0.53": WukongConfig(layers=2, made=8, k=24, hidden=(2048,) * 3),
    "1.25": WukongConfig(layers=4, made=32, k=24, hidden=(2048,) * 3),
    "5.6": WukongConfig(layers=8, made=48, k=48, hidden=(4096,) * 3),
    "small": WukongConfig(layers=2, made=8, k=8, hidden=(64,), fields=26, dim=16, dense_made=6, dense_hidden=32, over=(64,)),
}


class FmBlock(nn.Module):
    """MLP(norm(flatten(X (X^T Y)))): [B, n, D] -> [B, made, D]."""

    def __init__(self, n: int, config: WukongConfig, mods: Mods) -> None:
        super().__init__()
        self.made, self.dim = config.made, config.dim
        self.y = Product(n, config.k)
        mlp = Mlp((n * config.k, *config.hidden, config.made * config.dim), mods)
        self.mlp = mlp if mods.pre or mods.norm == "none" else nn.Sequential(norm(n * config.k, mods), *mlp)

    def forward(self, x_BND: torch.Tensor) -> torch.Tensor:
        xy_BDK = self.y(x_BND.transpose(1, 2))
        fm_BNK = torch.matmul(x_BND, xy_BDK)
        return self.mlp(fm_BNK.flatten(1)).reshape(-1, self.made, self.dim)


class Layer(nn.Module):
    """[B, n, D] -> [B, 2 made, D]."""

    def __init__(self, n: int, config: WukongConfig, mods: Mods) -> None:
        super().__init__()
        out, self.pre = 2 * config.made, mods.pre
        self.fmb = FmBlock(n, config, mods)
        self.lcb = Product(n, config.made, bias=mods.bias)
        self.residual = Product(n, out) if n != out else None
        self.norm = norm(config.dim, mods, rows=n if mods.pre else out)

    def forward(self, x_BND: torch.Tensor) -> torch.Tensor:
        z_BND = self.norm(x_BND) if self.pre else x_BND
        lcb_BLD = self.lcb(z_BND.transpose(1, 2)).transpose(1, 2)
        kept_BND = x_BND if self.residual is None else self.residual(x_BND.transpose(1, 2)).transpose(1, 2)
        out_BND = torch.cat((self.fmb(z_BND), lcb_BLD), dim=1) + kept_BND
        return out_BND if self.pre else self.norm(out_BND)


class Wukong(nn.Module):
    def __init__(self, config: WukongConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.mods = config, mods
        self.dense = Mlp((config.dense, config.dense_hidden, config.dense_made * config.dim), mods)
        self.interaction = nn.ModuleList(Layer(n, config, mods) for n in config.inputs[:-1])
        self.over = Mlp((2 * config.made * config.dim, *config.over), mods, head=True)

    @property
    def flops_per_example(self) -> int:
        return self.config.flops_per_example

    def forward(self, dense_BF: torch.Tensor, embedded_BND: torch.Tensor) -> torch.Tensor:
        """-> logits [B]."""
        made_BND = self.dense(dense_BF).reshape(-1, self.config.dense_made, self.config.dim)
        x_BND = torch.cat((made_BND, embedded_BND), dim=1)
        for layer in self.interaction:
            x_BND = layer(x_BND)
        return self.over(x_BND.flatten(1)).flatten()

    def example(self, batch: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Inputs of `forward`."""
        c = self.config
        return example_inputs(batch=batch, dense=c.dense, fields=c.fields, dim=c.dim, seed=seed, device=device, dtype=dtype)


def wukong(mods: Mods = Mods(), size: str = "0.53", *, seed: int = 0, device: torch.device | str = "cpu") -> Wukong:
    """Raises ValueError for an unknown size."""
    if size not in WUKONG_SIZES:
        raise ValueError(f"a size of Wukong is one of {list(WUKONG_SIZES)}, got {size!r}")
    return build(lambda: Wukong(WUKONG_SIZES[size], mods), seed=seed, device=device)
