"""DLRM-v2: a bottom MLP for dense features, a low-rank cross network (DCNv2) over all embeddings, a top MLP to one logit.

    model = dlrm_v2(size="mlperf")
    logit_B = model(*model.example(batch=8, seed=0))

Sizes of MLPerf's training benchmark (mlcommons/training, recommendation_v2): 13 dense features -> 512 -> 256 -> 128, 26 sparse ones of 128,
three cross layers 3456 -> 512 -> 3456, over 3456 -> 1024 -> 1024 -> 512 -> 256 -> 1; ReLU, no norms. 13 inputs and 1 output are no multiples of
16, which FP8 products need. Embedding tables are apart (inputs.Embeddings). Legend in mods.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from studies.models.recommenders.inputs import example_inputs
from studies.models.recommenders.mods import Mlp, Mods, Product, build, mlp_flops

__all__ = ["DLRM_MODS", "DLRM_SIZES", "Dlrm", "DlrmConfig", "dlrm_v2"]

DLRM_MODS = Mods(norm="none", activation="relu")


@dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    dense: int
    fields: int
    dim: int
    bottom: tuple[int, ...]  # widths behind the dense features; `dim` follows
    cross_layers: int
    rank: int
    over: tuple[int, ...]  # widths between the cross network and the logit

    @property
    def width(self) -> int:
        return (self.fields + 1) * self.dim

    @property
    def flops_per_example(self) -> int:
        """Of a forward pass, products only."""
        bottom = mlp_flops((self.dense, *self.bottom, self.dim))
        return bottom + self.cross_layers * 4 * self.width * self.rank + mlp_flops((self.width, *self.over), head=True)


DLRM_SIZES = {
    "mlperf": DlrmConfig(dense=13, fields=26, dim=128, bottom=(512, 256), cross_layers=3, rank=512, over=(1024, 1024, 512, 256)),
    "small": DlrmConfig(dense=13, fields=26, dim=16, bottom=(64,), cross_layers=2, rank=32, over=(64, 32)),
}


class Cross(nn.Module):
    """x0 * (W (V x) + b) + x (DCNv2, arXiv 2008.13535, section 3.2); W and V are bare parameters, as in torchrec."""

    def __init__(self, width: int, rank: int, mods: Mods) -> None:
        super().__init__()
        self.v = Product(width, rank)
        self.w = Product(rank, width, bias=mods.bias)

    def forward(self, x0_BW: torch.Tensor, x_BW: torch.Tensor) -> torch.Tensor:
        return x0_BW * self.w(self.v(x_BW)) + x_BW


class Dlrm(nn.Module):
    def __init__(self, config: DlrmConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.mods = config, mods
        self.bottom = Mlp((config.dense, *config.bottom, config.dim), mods)
        self.cross = nn.ModuleList(Cross(config.width, config.rank, mods) for _ in range(config.cross_layers))
        self.over = Mlp((config.width, *config.over), mods, head=True)

    @property
    def flops_per_example(self) -> int:
        return self.config.flops_per_example

    def forward(self, dense_BF: torch.Tensor, embedded_BND: torch.Tensor) -> torch.Tensor:
        """-> logits [B]."""
        x0_BW = torch.cat((self.bottom(dense_BF), embedded_BND.flatten(1)), dim=1)
        x_BW = x0_BW
        for cross in self.cross:
            x_BW = cross(x0_BW, x_BW)
        return self.over(x_BW).flatten()

    def example(self, batch: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Inputs of `forward`."""
        c = self.config
        return example_inputs(batch=batch, dense=c.dense, fields=c.fields, dim=c.dim, seed=seed, device=device, dtype=dtype)


def dlrm_v2(mods: Mods = DLRM_MODS, size: str = "mlperf", *, seed: int = 0, device: torch.device | str = "cpu") -> Dlrm:
    """Raises ValueError for an unknown size."""
    if size not in DLRM_SIZES:
        raise ValueError(f"a size of DLRM-v2 is one of {list(DLRM_SIZES)}, got {size!r}")
    return build(lambda: Dlrm(DLRM_SIZES[size], mods), seed=seed, device=device)
