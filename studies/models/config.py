"""The shape of a Llama decoder.

    config = LlamaConfig.from_gguf(load_bf16().metadata)
    config.head_dim, config.kv_heads                        # 64, 3 for SmolLM2-135M

It describes decoders with RMSNorm, grouped-query attention, RoPE in half-split order, SwiGLU and a tied head, without biases; it has
no field for what this project does not run (RoPE scaling, sliding windows, mixture of experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes are numbers of elements. Raises ValueError where they do not fit together."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    rms_eps: float

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.vocabulary, self.context_tokens) < 1:
            raise ValueError(f"every size must be at least 1, got {self=}; read them from the model's metadata")
        if self.heads % self.kv_heads or self.hidden % (2 * self.heads):
            raise ValueError(f"kv_heads must divide heads, and heads an even share of hidden, got {self.hidden=} {self.heads=} "
                             f"{self.kv_heads=}; choose sizes that divide")
        if not (self.rope_base > 1 and self.rms_eps >= 0):
            raise ValueError(f"rope_base must exceed 1 and rms_eps be >= 0, got {self.rope_base=} {self.rms_eps=}; SmolLM2 has 1e5, 1e-5")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> LlamaConfig:
        """From GGUF metadata. Raises ValueError for another architecture, or RoPE over a part of the head."""
        if metadata.get("general.architecture") != "llama":
            raise ValueError(f"the architecture must be 'llama', got {metadata.get('general.architecture')=}; use the SmolLM2 asset")
        config = LlamaConfig(
            layers=metadata["llama.block_count"],
            hidden=metadata["llama.embedding_length"],
            intermediate=metadata["llama.feed_forward_length"],
            heads=metadata["llama.attention.head_count"],
            kv_heads=metadata["llama.attention.head_count_kv"],
            vocabulary=metadata["llama.vocab_size"],
            context_tokens=metadata["llama.context_length"],
            rope_base=metadata["llama.rope.freq_base"],
            rms_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        )
        if metadata["llama.rope.dimension_count"] != config.head_dim:
            raise ValueError(f"RoPE must cover the head, got {metadata['llama.rope.dimension_count']=} {config.head_dim=}; not supported")
        return config
