"""Bitwise portable operators: the same bits on every GPU, for every tile, batch and schedule, and on the CPU.

    >>> import torch
    >>> from kernels.exact import digest, linear_fma_ref, philox_uniform
    >>> y_MN = linear_fma_ref(philox_uniform((2, 64), 1), philox_uniform((8, 64), 2, torch.bfloat16))
    >>> len(digest(y_MN))
    64

`op` runs on a GPU, `op_ref` is its exact oracle on the CPU and needs neither a GPU nor a C compiler. Two families of linear layers: "fma"
(FP32 FMA in an order that is a function of K alone) and "integer" (exact integer products, free of order, on integer tensor cores).
Around them: attention, RoPE, norms, activations, softmax, sampling, their gradients and AdamW, from IEEE-754 operations only. No
float tensor core, no approximate instruction, no library's reduction, and nothing falls back to another order. `attention`, `rope` and `softmax` are
imported from the modules of their names.
"""

_EXPORTS = {
    "AdamW": "kernels.exact.optimizer",
    "CHUNK": "kernels.exact.order",
    "DecodeSchedule": "kernels.exact.decode",
    "IntegerWeight": "kernels.exact.integer",
    "KVCache": "kernels.exact.attention",
    "ORDER_VERSION": "kernels.exact.order",
    "PackedWeight": "kernels.exact.decode",
    "PrefillSchedule": "kernels.exact.prefill",
    "Schedule": "kernels.exact.linear",
    "Sliced": "kernels.exact.slices",
    "TiledSchedule": "kernels.exact.prefill_tiled",
    "adamw_step": "kernels.exact.optimizer",
    "adamw_step_ref": "kernels.exact.optimizer",
    "add_rmsnorm": "kernels.exact.norm",
    "add_rmsnorm_ref": "kernels.exact.norm",
    "add_rmsnorm_sliced": "kernels.exact.sliced",
    "add_rmsnorm_sliced_ref": "kernels.exact.sliced",
    "append": "kernels.exact.attention",
    "argmax": "kernels.exact.sampling",
    "argmax_ref": "kernels.exact.sampling",
    "attention_ref": "kernels.exact.attention",
    "canonical_bytes": "kernels.exact.digests",
    "chunks": "kernels.exact.order",
    "cross_entropy": "kernels.exact.softmax",
    "cross_entropy_backward": "kernels.exact.backward",
    "cross_entropy_backward_ref": "kernels.exact.backward",
    "cross_entropy_ref": "kernels.exact.softmax",
    "decode_schedules": "kernels.exact.decode",
    "digest": "kernels.exact.digests",
    "embedding_backward": "kernels.exact.backward",
    "embedding_backward_ref": "kernels.exact.backward",
    "erf": "kernels.exact.activations",
    "erf_ref": "kernels.exact.activations",
    "exp": "kernels.exact.activations",
    "exp_ref": "kernels.exact.activations",
    "fma_f32": "kernels.exact.ieee",
    "gelu": "kernels.exact.activations",
    "gelu_erf": "kernels.exact.activations",
    "gelu_erf_ref": "kernels.exact.activations",
    "gelu_ref": "kernels.exact.activations",
    "integer_accumulate": "kernels.exact.integer",
    "integer_accumulate_ref": "kernels.exact.integer",
    "integer_finish": "kernels.exact.integer",
    "integer_finish_ref": "kernels.exact.integer",
    "layernorm": "kernels.exact.norm",
    "layernorm_ref": "kernels.exact.norm",
    "linear_backward": "kernels.exact.backward",
    "linear_backward_ref": "kernels.exact.backward",
    "linear_fma": "kernels.exact.linear",
    "linear_fma_ref": "kernels.exact.linear",
    "linear_integer": "kernels.exact.integer",
    "linear_integer_ref": "kernels.exact.integer",
    "log": "kernels.exact.activations",
    "log_ref": "kernels.exact.activations",
    "log_softmax": "kernels.exact.softmax",
    "log_softmax_ref": "kernels.exact.softmax",
    "make_cache": "kernels.exact.attention",
    "nan_canonical": "kernels.exact.ieee",
    "pack_weight": "kernels.exact.decode",
    "philox_bell": "kernels.exact.philox",
    "philox_integers": "kernels.exact.philox",
    "philox_ref": "kernels.exact.philox",
    "philox_uniform": "kernels.exact.philox",
    "prefill_schedules": "kernels.exact.prefill",
    "prepare_integer": "kernels.exact.integer",
    "rmsnorm": "kernels.exact.norm",
    "rmsnorm_backward": "kernels.exact.backward",
    "rmsnorm_backward_ref": "kernels.exact.backward",
    "rmsnorm_ref": "kernels.exact.norm",
    "rmsnorm_sliced": "kernels.exact.sliced",
    "rmsnorm_sliced_ref": "kernels.exact.sliced",
    "rope_backward": "kernels.exact.backward",
    "rope_backward_ref": "kernels.exact.backward",
    "rope_ref": "kernels.exact.rope",
    "rope_tables": "kernels.exact.rope",
    "row_exponents": "kernels.exact.integer",
    "row_exponents_ref": "kernels.exact.integer",
    "sample": "kernels.exact.sampling",
    "sample_ref": "kernels.exact.sampling",
    "silu": "kernels.exact.activations",
    "silu_ref": "kernels.exact.activations",
    "sliced_ref": "kernels.exact.slices",
    "softmax_ref": "kernels.exact.softmax",
    "spans": "kernels.exact.order",
    "swiglu": "kernels.exact.activations",
    "swiglu_backward": "kernels.exact.backward",
    "swiglu_backward_ref": "kernels.exact.backward",
    "swiglu_ref": "kernels.exact.activations",
    "swiglu_sliced": "kernels.exact.sliced",
    "swiglu_sliced_ref": "kernels.exact.sliced",
    "tanh": "kernels.exact.activations",
    "tanh_ref": "kernels.exact.activations",
    "tiled_schedules": "kernels.exact.prefill_tiled",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
