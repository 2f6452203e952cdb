"""RankMixer: tokens of features that exchange their parts without parameters, and a feed-forward network of its own for every token.

    model = rankmixer_100m()
    logit_B = model(*model.example(batch=8, seed=0))

A block is S = norm(mix(X) + X), X' = norm(ffn_t(S_t) + S_t): token t's mixed vector is the t-th part of every token (arXiv 2507.15551). The FFNs of all
tokens are one batched product with a parameter [T, outputs, inputs]. Sizes of its 100M model: 768 features, 16 tokens, 2 blocks; an inner width of
2048 gives 2 x 2 x 16 x 768 x 2048 = 100.7 M parameters, where the text at hand names no width. Dense features become one more
embedding; all embeddings, side by side, are cut into T pieces of equal length and projected, each by a matrix of its own.
The published order is "post". Legend in mods.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from studies.models.recommenders.inputs import example_inputs
from studies.models.recommenders.mods import Mods, activation, build, norm

__all__ = ["RANKMIXER_SIZES", "RankMixer", "RankMixerConfig", "rankmixer_100m"]


@dataclass(frozen=True, kw_only=True)
class RankMixerConfig:
    layers: int
    tokens: int
    dim: int
    inner: int
    dense: int
    fields: int
    field_dim: int

    def __post_init__(self) -> None:
        if self.dim % self.tokens or (self.fields + 1) * self.field_dim % self.tokens:
            raise ValueError(f"tokens divide both their own features and those of all embeddings, got {self}")

    @property
    def piece(self) -> int:
        """Features of embeddings in a token."""
        return (self.fields + 1) * self.field_dim // self.tokens

    @property
    def flops_per_example(self) -> int:
        """Of a forward pass, products only."""
        tokens = 2 * self.tokens * self.dim * (self.piece + 2 * self.layers * self.inner)
        return 2 * self.dense * self.field_dim + tokens + 2 * self.dim


RANKMIXER_SIZES = {
    "100m": RankMixerConfig(layers=2, tokens=16, dim=768, inner=2048, dense=13, fields=31, field_dim=128),
    "small": RankMixerConfig(layers=2, tokens=4, dim=32, inner=64, dense=13, fields=26 + 1, field_dim=16),
}


class PerToken(nn.Module):
    """A linear layer for every token: [T, B, K] -> [T, B, N]."""

    def __init__(self, tokens: int, k: int, n: int, mods: Mods) -> None:
        super().__init__()
        self.weight_TNK = nn.Parameter(torch.empty(tokens, n, k))
        self.register_parameter("bias_TN", nn.Parameter(torch.empty(tokens, n)) if mods.bias else None)

    def forward(self, x_TBK: torch.Tensor) -> torch.Tensor:
        y_TBN = torch.matmul(x_TBK, self.weight_TNK.transpose(1, 2))
        return y_TBN if self.bias_TN is None else y_TBN + self.bias_TN.unsqueeze(1)


class Block(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    def __init__(self, config: RankMixerConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.pre = config, mods.pre
        self.mix_norm, self.ffn_norm = norm(config.dim, mods, config.tokens), norm(config.dim, mods, config.tokens)
        self.up = PerToken(config.tokens, config.dim, config.inner, mods)
        self.activation = activation(mods)
        self.down = PerToken(config.tokens, config.inner, config.dim, mods)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.pre:
            s_BTD = self.mix(self.mix_norm(x_BTD)) + x_BTD
            return self.ffn(self.ffn_norm(s_BTD)) + s_BTD
        s_BTD = self.mix_norm(self.mix(x_BTD) + x_BTD)
        return self.ffn_norm(self.ffn(s_BTD) + s_BTD)

    def mix(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Token t of the result is the t-th of T parts of every token; twice is the identity."""
        t, d = self.config.tokens, self.config.dim
        return x_BTD.reshape(-1, t, t, d // t).transpose(1, 2).reshape(-1, t, d)

    def ffn(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x_BTD.transpose(0, 1)))).transpose(0, 1)


class RankMixer(nn.Module):
    def __init__(self, config: RankMixerConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.mods = config, mods
        self.dense = nn.Linear(config.dense, config.field_dim, bias=mods.bias)
        self.tokens = PerToken(config.tokens, config.piece, config.dim, mods)
        self.blocks = nn.ModuleList(Block(config, mods) for _ in range(config.layers))
        self.head = nn.Linear(config.dim, 1)

    @property
    def flops_per_example(self) -> int:
        return self.config.flops_per_example

    def forward(self, dense_BF: torch.Tensor, embedded_BND: torch.Tensor) -> torch.Tensor:
        """-> logits [B]."""
        wide_BW = torch.cat((self.dense(dense_BF), embedded_BND.flatten(1)), dim=1)
        piece_TBK = wide_BW.reshape(-1, self.config.tokens, self.config.piece).transpose(0, 1)
        x_BTD = self.tokens(piece_TBK).transpose(0, 1)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD.mean(1)).flatten()

    def example(self, batch: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Inputs of `forward`."""
        c = self.config
        return example_inputs(batch=batch, dense=c.dense, fields=c.fields, dim=c.field_dim, seed=seed, device=device, dtype=dtype)


def rankmixer_100m(mods: Mods = Mods(), size: str = "100m", *, seed: int = 0, device: torch.device | str = "cpu") -> RankMixer:
    """Raises ValueError for an unknown size."""
    if size not in RANKMIXER_SIZES:
        raise ValueError(f"a size of RankMixer is one of {list(RANKMIXER_SIZES)}, got {size!r}")
    return build(lambda: RankMixer(RANKMIXER_SIZES[size], mods), seed=seed, device=device)
