"""A model's weights as one rank of one family reads them: projections that share an input joined, matrices split over ranks.

    model = prepare(load_smollm2(), family="fma", device="cuda")
    model = prepare(weights, family="integer", device="cpu", parallel=join(group))      # in each process

Joining q, k, v (and gate, up) along N and sharing N out cannot change bits. K is split where a matrix follows one whose N was split:
o_proj where the ranks divide query and key heads, down_proj where they divide the intermediate features; what does not divide stays
whole on every rank (SmolLM2's attention: 9 and 3 heads). The embedding stays whole; the logits' matrix is split by vocabulary.
Preparation may take several times the memory of the bf16 weights (`kernels.exact`); it copies them to the device one by one.
Prepared weights of the exact families serve one stream at a time: steps of one model on several streams must not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.exact.slices import Sliced
from studies.models.config import LlamaConfig
from studies.models.families import FAMILIES, Family
from studies.models.llama import LlamaWeights
from studies.models.operators import Operators, operators
from studies.models.parallel import RANKS, SINGLE, Parallel

__all__ = ["Layer", "Model", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Handles of `Family.prepare`, or of `prepare_columns` where the model splits K; norms and the bias are tensors."""

    input_norm_K: torch.Tensor
    qkv: Any
    qkv_bias_N: torch.Tensor | None
    o: Any
    post_norm_K: torch.Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """`heads`, `kv_heads`: of this rank. `split_heads`, `split_mlp`, `split_vocabulary`: what the ranks share out."""

    config: LlamaConfig
    family: Family
    device: torch.device
    operators: Operators
    parallel: Parallel
    embed_VK: torch.Tensor
    layers: tuple[Layer, ...]
    norm_K: torch.Tensor
    head: Any
    heads: int
    kv_heads: int
    split_heads: bool
    split_mlp: bool
    split_vocabulary: bool

    def linear(self, x_MK: torch.Tensor | Sliced, handle: Any, *, split_k: bool = False) -> torch.Tensor:
        """y_MN of a prepared matrix; `split_k`: x holds this rank's inputs, y is whole."""
        if split_k:
            return self.family.reduce_columns(x_MK, handle, self.parallel)
        return self.family.linear(x_MK, handle)

    def logits(self, x_MK: torch.Tensor | Sliced) -> torch.Tensor:
        """fp32 [M, vocabulary], whole on every rank."""
        y_MV = self.linear(x_MK, self.head).float()
        return torch.cat(self.parallel.gather(y_MV), dim=1) if self.split_vocabulary else y_MV


def prepare(weights: LlamaWeights, *, family: str, device: str | torch.device = "cpu", parallel: Parallel = SINGLE) -> Model:
    """Raises ValueError for a family that does not exist or needs a GPU."""
    if family not in FAMILIES:
        raise ValueError(f"families are {', '.join(FAMILIES)}, got {family=}; name one of them")
    chosen, device, config = FAMILIES[family], torch.device(device), weights.config
    if chosen.needs_gpu and device.type != "cuda":
        raise ValueError(f"this family runs on GPUs only, got {family=} {device=}; use device='cuda'")
    many = parallel.size > 1
    split_heads = many and parallel.divides(config.heads, config.kv_heads) and config.qkv_rows[0] % max(RANKS) == 0
    split_mlp = many and config.intermediate % max(RANKS) == 0
    split_vocabulary = many and parallel.divides(config.vocabulary)
    loader = _Loader(weights=weights, family=chosen, device=device, parallel=parallel)
    share = parallel.size if split_heads else 1
    # an operand whose K is split is sliced by its linear: the exponents of the other ranks' parts come first
    slices = chosen.sliced and device.type == "cuda"
    ops = operators(chosen.operators, device, sliced_norm=slices, sliced_swiglu=slices and not split_mlp)
    with torch.no_grad():
        return Model(
            config=config, family=chosen, device=device, operators=ops, parallel=parallel,
            embed_VK=weights["embed_tokens"].to(device),
            layers=tuple(loader.layer(f"layers.{layer}", split_heads, split_mlp) for layer in range(config.layers)),
            norm_K=weights["norm"].to(device), head=loader.rows([weights.head], split_vocabulary),
            heads=config.heads // share, kv_heads=config.kv_heads // share, split_heads=split_heads, split_mlp=split_mlp,
            split_vocabulary=split_vocabulary,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Loader:
    weights: LlamaWeights
    family: Family
    device: torch.device
    parallel: Parallel

    def rows(self, matrices: list[torch.Tensor], split: bool) -> Any:
        """The matrices, or this rank's rows of each, one below the other."""
        return self.family.prepare(self._joined(matrices, split))

    def columns(self, w_NK: torch.Tensor, split: bool) -> Any:
        w_NK = w_NK.to(self.device)
        return self.family.prepare_columns(w_NK, self.parallel) if split else self.family.prepare(w_NK)

    def layer(self, at: str, split_heads: bool, split_mlp: bool) -> Layer:
        w, qkv = self.weights, [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        biases = [w.bias(name) for name in qkv]
        return Layer(
            input_norm_K=w[f"{at}.input_layernorm"].to(self.device),
            qkv=self.rows([w[name] for name in qkv], split_heads),
            qkv_bias_N=None if biases[0] is None else self._joined(biases, split_heads).to(self.family.residual),
            o=self.columns(w[f"{at}.self_attn.o_proj"], split_heads),
            post_norm_K=w[f"{at}.post_attention_layernorm"].to(self.device),
            gate_up=self.rows([w[f"{at}.mlp.{part}_proj"] for part in ("gate", "up")], split_mlp),
            down=self.columns(w[f"{at}.mlp.down_proj"], split_mlp),
        )

    def _joined(self, parts: list[torch.Tensor], split: bool) -> torch.Tensor:
        return torch.cat([(self.parallel.rows(part) if split else part).to(self.device) for part in parts])
