"""Decoders to run packs on without downloading weights: shapes of Qwen2.5, of SmolLM2-135M, and one that a test trains in seconds.

    base = Base.random(SHAPES["0.5b"], seed=0, device="cuda", dtype=torch.bfloat16)

Qwen2.5's have a vocabulary of 32,000 (theirs: 152k), so that the head of a random model does not decide what is timed (Qwen Team 2024, arXiv
2412.15115). A time does not depend on what weights hold; a quality does, and none is claimed for these.
"""

from __future__ import annotations

from collections.abc import Mapping

from studies.models.config import LlamaConfig

__all__ = ["SHAPES"]

_QWEN25 = {"vocabulary": 32_000, "context_tokens": 32768, "rope_base": 1000000.0, "rms_eps": 1e-6, "qkv_bias": True}

SHAPES: Mapping[str, LlamaConfig] = {
    "0.5b": LlamaConfig(layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, tied_head=True, **_QWEN25),
    "3b": LlamaConfig(layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, tied_head=True, **_QWEN25),
    "7b": LlamaConfig(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, tied_head=False, **_QWEN25),
    "smollm2": LlamaConfig(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49152, context_tokens=8192, rope_base=100000.0, rms_eps=1e-5),
    "tiny": LlamaConfig(layers=2, hidden=64, intermediate=160, heads=4, kv_heads=2, vocabulary=512, context_tokens=1024, rope_base=10000.0, rms_eps=1e-6, qkv_bias=True, tied_head=False),
}  # fmt: skip
