"""HSTU: layers of gated attention without a softmax over a user's history, causal, then one logit for the last event.

    model = hstu_block(size="dlrm-v3")
    logit_B = model(*model.example(batch=4, seed=0))

Sizes of DLRM-v3 (meta-recsys/generative-recommenders): 5 layers of 512 features, 4 heads of 128, so one product 512 -> 2048 makes u, v, q and k and
one of 1536 -> 512 reads u, the attention's output and their gated product. Scores are silu(q k^T / sqrt(128)) / T, masked, not normalised over keys
(arXiv 2402.17152). Histories are ragged in production; here they are padded at the front and `valid_BT` says which events are real, so flops
count the padding. T is 256 here, our choice. The published order is "pre". Legend in mods.py; H heads, E features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from studies.models.recommenders.inputs import example_inputs
from studies.models.recommenders.mods import Mods, Product, activation, build, norm

__all__ = ["HSTU_MODS", "HSTU_SIZES", "Hstu", "HstuConfig", "hstu_block"]

HSTU_MODS = Mods(placement="pre")


@dataclass(frozen=True, kw_only=True)
class HstuConfig:
    layers: int
    dim: int
    heads: int
    head_dim: int
    tokens: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def flops_per_example(self) -> int:
        """Of a forward pass over T events, products only."""
        linears = 2 * self.tokens * self.dim * (4 + 3) * self.inner
        attention = 4 * self.tokens**2 * self.inner
        return self.layers * (linears + attention) + 2 * self.dim


HSTU_SIZES = {
    "dlrm-v3": HstuConfig(layers=5, dim=512, heads=4, head_dim=128, tokens=256),
    "small": HstuConfig(layers=2, dim=32, heads=2, head_dim=16, tokens=16),
}


class HstuLayer(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    def __init__(self, config: HstuConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.pre = config, mods.pre
        self.uvqk = Product(config.dim, 4 * config.inner, bias=mods.bias)
        self.activation = activation(mods)
        self.score = activation(mods)
        self.attention_norm = norm(config.inner, mods)
        self.out = Product(3 * config.inner, config.dim, bias=mods.bias)
        self.norm = norm(config.dim, mods)

    def forward(self, x_BTD: torch.Tensor, mask_B1TT: torch.Tensor) -> torch.Tensor:
        z_BTD = self.norm(x_BTD) if self.pre else x_BTD
        u_BTN, v_BTN, q_BTN, k_BTN = self.activation(self.uvqk(z_BTD)).chunk(4, dim=2)
        q_BHTE, k_BHTE, v_BHTE = self._heads(q_BTN), self._heads(k_BTN), self._heads(v_BTN)
        score_BHTT = self.score(torch.matmul(q_BHTE, k_BHTE.transpose(2, 3)) * self.config.head_dim**-0.5)
        attended_BHTE = torch.matmul(score_BHTT * mask_B1TT, v_BHTE)
        o_BTN = attended_BHTE.transpose(1, 2).reshape(x_BTD.shape[0], self.config.tokens, self.config.inner)
        gated_BTN = torch.cat((u_BTN, o_BTN, u_BTN * self.attention_norm(o_BTN)), dim=2)
        out_BTD = x_BTD + self.out(gated_BTN)
        return out_BTD if self.pre else self.norm(out_BTD)

    def _heads(self, x_BTN: torch.Tensor) -> torch.Tensor:
        return x_BTN.reshape(-1, self.config.tokens, self.config.heads, self.config.head_dim).transpose(1, 2)


class Hstu(nn.Module):
    def __init__(self, config: HstuConfig, mods: Mods) -> None:
        super().__init__()
        self.config, self.mods = config, mods
        self.layers = nn.ModuleList(HstuLayer(config, mods) for _ in range(config.layers))
        self.head = nn.Linear(config.dim, 1)

    @property
    def flops_per_example(self) -> int:
        return self.config.flops_per_example

    def forward(self, events_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        """valid_BT: 1 for an event, 0 for padding in front, in the dtype of `events_BTD` -> logits [B]."""
        mask_B1TT = self.mask(valid_BT)
        x_BTD = events_BTD
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_B1TT)
        return self.head(x_BTD[:, -1]).flatten()

    def mask(self, valid_BT: torch.Tensor) -> torch.Tensor:
        """[B, 1, T, T]: 1 / T where query t may see key s <= t, else 0."""
        position_BT = torch.ones_like(valid_BT).cumsum(1)
        causal_BTT = (position_BT.unsqueeze(2) >= position_BT.unsqueeze(1)).to(valid_BT.dtype)
        return (causal_BTT * valid_BT.unsqueeze(1) / self.config.tokens).unsqueeze(1)

    def example(self, batch: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Inputs of `forward`; histories have between a quarter and all of the T events."""
        c = self.config
        events_BTD = example_inputs(batch=batch, dense=1, fields=c.tokens, dim=c.dim, seed=seed, device=device, dtype=dtype)[1]
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        padding_B = torch.randint(3 * c.tokens // 4 + 1, (batch, 1), generator=generator, device=device)
        valid_BT = (torch.arange(c.tokens, device=device) >= padding_B).to(dtype)
        return events_BTD * valid_BT.unsqueeze(2), valid_BT


def hstu_block(mods: Mods = HSTU_MODS, size: str = "dlrm-v3", *, seed: int = 0, device: torch.device | str = "cpu") -> Hstu:
    """Raises ValueError for an unknown size."""
    if size not in HSTU_SIZES:
        raise ValueError(f"a size of HSTU is one of {list(HSTU_SIZES)}, got {size!r}")
    return build(lambda: Hstu(HSTU_SIZES[size], mods), seed=seed, device=device)
