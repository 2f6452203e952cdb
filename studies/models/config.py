"""The shape of a Llama or Qwen2 decoder.

    config = LlamaConfig.from_gguf(load_bf16().metadata)
    config.head_dim, config.kv_heads                        # 64, 3 for SmolLM2-135M

It describes decoders with RMSNorm, grouped-query attention, RoPE in half-split order and SwiGLU; a bias on q, k and v (Qwen2) and a
head of its own are options. It has no field for what this project does not run (RoPE scaling, sliding windows, mixture of experts).
`LLAMA2_7B` and `QWEN25_7B` are shapes for measurements of speed (Touvron et al. 2023; Qwen Team 2024, arXiv 2412.15115).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes are numbers of elements; `head_size` None means hidden / heads. Raises ValueError where they do not fit together."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    rms_eps: float
    head_size: int | None = None
    qkv_bias: bool = False
    tied_head: bool = True

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.vocabulary, self.context_tokens) < 1:
            raise ValueError(f"every size must be at least 1, got {self=}; read them from the model's metadata")
        if self.heads % self.kv_heads or (self.head_size is None and self.hidden % (2 * self.heads)):
            raise ValueError(f"kv_heads must divide heads, and heads an even share of hidden, got {self.hidden=} {self.heads=} "
                             f"{self.kv_heads=}; choose sizes that divide or give head_size")
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            raise ValueError(f"a head has an even number of elements, got {self.head_size=}; RoPE turns pairs")
        if not (self.rope_base > 1 and self.rms_eps >= 0):
            raise ValueError(f"rope_base must exceed 1 and rms_eps be >= 0, got {self.rope_base=} {self.rms_eps=}; SmolLM2 has 1e5, 1e-5")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Outputs of the q, k and v projections."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

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


LLAMA2_7B = LlamaConfig(
    layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, vocabulary=32000, context_tokens=4096, rope_base=10000.0,
    rms_eps=1e-5, tied_head=False,
)  # fmt: skip
QWEN25_7B = LlamaConfig(
    layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocabulary=152064, context_tokens=32768, rope_base=1000000.0,
    rms_eps=1e-6, qkv_bias=True, tied_head=False,
)  # fmt: skip
