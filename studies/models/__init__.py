"""Models that more than one study needs, on the CPU, with every bit reproducible on any IEEE-754 machine.

    from studies.models import capture_digest, capture_linear_inputs, golden_token_ids, load_smollm2
    captured = capture_linear_inputs(load_smollm2(), golden_token_ids())
    captured["layers.14.mlp.down_proj"].shape, capture_digest(captured)         # (64, 1536), the pinned sha256

Weights come from `suite.assets`, arithmetic from `kernels.exact`. No training, no sampling, no GPU.
"""

from studies.models.attention import BLOCK_KEYS, attention_ref
from studies.models.capture import GOLDEN_CAPTURE_SHA256, Captured, capture_digest, capture_linear_inputs, capture_prompts, golden_token_ids
from studies.models.config import LlamaConfig
from studies.models.llama import LINEARS, LlamaWeights, forward, load_smollm2
from studies.models.rope import apply_rope, rope_tables

__all__ = [
    "BLOCK_KEYS", "Captured", "GOLDEN_CAPTURE_SHA256", "LINEARS", "LlamaConfig", "LlamaWeights", "apply_rope", "attention_ref", "capture_digest",
    "capture_linear_inputs", "capture_prompts", "forward", "golden_token_ids", "load_smollm2", "rope_tables",
]  # fmt: skip
