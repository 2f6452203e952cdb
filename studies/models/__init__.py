"""Models that more than one study needs, with every bit reproducible on any IEEE-754 machine and, in the exact families, on a GPU.

    from studies.models import capture_digest, capture_linear_inputs, golden_token_ids, load_smollm2
    captured = capture_linear_inputs(load_smollm2(), golden_token_ids())
    captured["layers.14.mlp.down_proj"].shape, capture_digest(captured)         # (64, 1536), the pinned sha256

Weights come from `suite.assets`, arithmetic from `kernels.exact`. `forward` is the oracle; `prepare` and `generate` are the decoder with a
cache, on a CPU or a GPU, in any family, over ranks; `training` is one step of a small model.
"""

_EXPORTS = {
    "Captured": "studies.models.capture",
    "Decoder": "studies.models.decoder",
    "FAMILIES": "studies.models.families",
    "Family": "studies.models.families",
    "GOLDEN_CAPTURE_SHA256": "studies.models.capture",
    "Generation": "studies.models.generation",
    "LINEARS": "studies.models.llama",
    "LLAMA2_7B": "studies.models.config",
    "LlamaConfig": "studies.models.config",
    "LlamaWeights": "studies.models.llama",
    "Model": "studies.models.prepared",
    "Parallel": "studies.models.parallel",
    "QWEN25_7B": "studies.models.config",
    "SINGLE": "studies.models.parallel",
    "Sampling": "studies.models.decoder",
    "Schedule": "studies.models.generation",
    "apply_rope": "kernels.exact.rope",
    "capture_digest": "studies.models.capture",
    "capture_linear_inputs": "studies.models.capture",
    "capture_prompts": "studies.models.capture",
    "forward": "studies.models.llama",
    "fp32_precision": "studies.models.families",
    "generate": "studies.models.generation",
    "golden_token_ids": "studies.models.capture",
    "join": "studies.models.parallel",
    "load_smollm2": "studies.models.llama",
    "philox_weights": "studies.models.synthetic",
    "prepare": "studies.models.prepared",
    "random_weights": "studies.models.synthetic",
    "rope_tables": "kernels.exact.rope",
    "tree_add": "studies.models.parallel",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
