"""Models that more than one study needs, on the CPU, with every bit reproducible on any IEEE-754 machine.

    from studies.models import capture_digest, capture_linear_inputs, golden_token_ids, load_smollm2
    captured = capture_linear_inputs(load_smollm2(), golden_token_ids())
    captured["layers.14.mlp.down_proj"].shape, capture_digest(captured)         # (64, 1536), the pinned sha256

Weights come from `suite.assets`, arithmetic from `kernels.exact`. No training, no sampling, no GPU.
"""

_EXPORTS = {
    "Captured": "studies.models.capture",
    "GOLDEN_CAPTURE_SHA256": "studies.models.capture",
    "LINEARS": "studies.models.llama",
    "LlamaConfig": "studies.models.config",
    "LlamaWeights": "studies.models.llama",
    "apply_rope": "kernels.exact.rope",
    "capture_digest": "studies.models.capture",
    "capture_linear_inputs": "studies.models.capture",
    "capture_prompts": "studies.models.capture",
    "forward": "studies.models.llama",
    "golden_token_ids": "studies.models.capture",
    "load_smollm2": "studies.models.llama",
    "rope_tables": "kernels.exact.rope",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
