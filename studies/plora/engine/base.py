"""Base: the frozen decoder that all adapters of a pack share, its weights in one type on one device.

    base = Base.smollm2(device="cuda", dtype=torch.bfloat16)            # suite.assets; layers=4 takes the first four
    base = Base.from_hf(AutoModelForCausalLM.from_pretrained(...))      # Llama and Qwen2 families
    base = Base.random(SHAPES["3b"], seed=0, device="cuda", dtype=torch.bfloat16)

Matrices, biases and the embedding are in the compute type, norms in float32. Nothing here is ever written: packs on one base may share it. A
random base keeps the size of what flows through it (entries of variance 1/K up to a power of two), so gradients are ordinary numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from studies.models.config import LlamaConfig
from studies.models.llama import LlamaWeights, load_smollm2
from studies.plora.adapter import MODULES
from studies.plora.engine.draws import bell
from studies.plora.planning.memory import site_sizes

__all__ = ["Base", "Frozen", "Layer"]

_FAMILIES = ("llama", "qwen2")
_PARTS = {module: f"self_attn.{module}" if module in MODULES[:4] else f"mlp.{module}" for module in MODULES}
_STREAM = 2**30  # of Philox: sites of adapters, which may have the same seed, draw from lower ones
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A linear of the base. w_NK; bias_N or None."""

    w_NK: torch.Tensor
    bias_N: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """linears: by the names of studies.plora.adapter.MODULES; norms float32."""

    input_norm_K: torch.Tensor
    post_norm_K: torch.Tensor
    linears: dict[str, Frozen]


@dataclass(frozen=True, kw_only=True)
class Base:
    """name: what exported adapters call it. embed_VK, head_VK: the same tensor where they are tied."""

    name: str
    config: LlamaConfig
    embed_VK: torch.Tensor
    layers: tuple[Layer, ...]
    norm_K: torch.Tensor
    head_VK: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.embed_VK.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VK.dtype

    @staticmethod
    def smollm2(*, layers: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Base:
        """SmolLM2-135M-Instruct, its matrices rounded to bf16 in every compute type. Raises suite.assets.AssetError."""
        weights = load_smollm2()
        return _built("HuggingFaceTB/SmolLM2-135M-Instruct", _first(weights.config, layers), weights.tensors, device, dtype)

    @staticmethod
    def from_hf(model: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Base:
        """From a transformers model, by default where and as it is. Raises ValueError for what is not of the Llama or Qwen2 family, or has scaled RoPE,
        sliding windows, or biases that those families do not have."""  # fmt: skip
        config = _from_hf_config(model.config)
        tensors = {name.removeprefix("model."): tensor.detach() for name, tensor in model.state_dict().items()}
        embedding = tensors["embed_tokens.weight"]
        if unknown := [n for n in tensors if n.endswith(".bias") and not (config.qkv_bias and n.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")))]:
            raise ValueError(f"biases are of q, k and v alone (Qwen2), got {unknown[:3]}; use a Llama or Qwen2 model without them")
        if not config.tied_head and "lm_head.weight" not in tensors:
            raise ValueError(f"a base has a head for logits, got {type(model).__name__} without one; load it as a causal language model")
        return _built(str(getattr(model.config, "_name_or_path", "") or "base"), config, tensors, device or embedding.device, dtype or embedding.dtype)

    @staticmethod
    def random(config: LlamaConfig, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Base:
        """The same weights on every machine and device, by integer Philox."""
        number = iter(range(_STREAM, 2**31))

        def matrix(n: int, k: int, fan: int) -> torch.Tensor:
            return bell(count=n * k, seed=seed, stream=next(number), device=device, dtype=dtype, scale_log2=round(math.log2(3 / fan) / 2)).view(n, k)

        tensors = {"embed_tokens.weight": matrix(config.vocabulary, config.hidden, config.hidden)}
        for layer in range(config.layers):
            for module, (k, n) in site_sizes(config).items():
                tensors[f"layers.{layer}.{_PARTS[module]}.weight"] = matrix(n, k, k)
                if config.qkv_bias and module in MODULES[:3]:
                    tensors[f"layers.{layer}.{_PARTS[module]}.bias"] = matrix(1, n, 1024)[0]
        if not config.tied_head:
            tensors["lm_head.weight"] = matrix(config.vocabulary, config.hidden, config.hidden)
        ones = torch.ones(config.hidden, dtype=torch.float32, device=device)
        norms = [f"layers.{i}.{norm}" for i in range(config.layers) for norm in ("input_layernorm", "post_attention_layernorm")]
        return _built(f"random-{seed}", config, tensors | {f"{name}.weight": ones for name in [*norms, "norm"]}, device, dtype)


def _built(name: str, config: LlamaConfig, tensors: dict[str, torch.Tensor], device: torch.device | str, dtype: torch.dtype) -> Base:
    if dtype not in _DTYPES:
        raise ValueError(f"a base computes in float32, bfloat16 or float16, got {dtype=}; choose one")

    def taken(key: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return tensors[key].to(device=device, dtype=kind).contiguous()

    def frozen(at: str) -> Frozen:
        return Frozen(w_NK=taken(f"{at}.weight"), bias_N=taken(f"{at}.bias") if f"{at}.bias" in tensors else None)

    layers = tuple(
        Layer(
            input_norm_K=taken(f"layers.{i}.input_layernorm.weight", torch.float32), post_norm_K=taken(f"layers.{i}.post_attention_layernorm.weight", torch.float32),
            linears={module: frozen(f"layers.{i}.{part}") for module, part in _PARTS.items()},
        )
        for i in range(config.layers)
    )  # fmt: skip
    embed_VK = taken("embed_tokens.weight")
    return Base(name=name, config=config, embed_VK=embed_VK, layers=layers, norm_K=taken("norm.weight", torch.float32), head_VK=embed_VK if config.tied_head else taken("lm_head.weight"))


def _first(config: LlamaConfig, layers: int | None) -> LlamaConfig:
    if layers is not None and not 1 <= layers <= config.layers:
        raise ValueError(f"a base has 1 to {config.layers} layers, got {layers=}; choose so many")
    return config if layers is None else replace(config, layers=layers)


def _from_hf_config(config: Any) -> LlamaConfig:
    if config.model_type not in _FAMILIES:
        raise ValueError(f"a base is of one of the families {_FAMILIES}, got {config.model_type!r}; other decoders are not run here")
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    if rope.get("rope_type", rope.get("type", "default")) != "default" or getattr(config, "use_sliding_window", False):
        raise ValueError(f"a base has plain RoPE and no sliding window, got {rope} use_sliding_window={getattr(config, 'use_sliding_window', False)}; use another model")
    if config.hidden_act != "silu":
        raise ValueError(f"a base has SwiGLU, got hidden_act={config.hidden_act!r}; use another model")
    return LlamaConfig(
        layers=config.num_hidden_layers, hidden=config.hidden_size, intermediate=config.intermediate_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size, context_tokens=config.max_position_embeddings, rope_base=float(rope.get("rope_theta") or config.rope_theta), rms_eps=config.rms_norm_eps,
        head_size=getattr(config, "head_dim", None), qkv_bias=config.model_type == "qwen2", tied_head=config.tie_word_embeddings,
    )  # fmt: skip
