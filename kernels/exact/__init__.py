"""Bitwise portable operators: the same bits on every GPU, for every tile, batch and schedule, and on the CPU.

    >>> import torch
    >>> from kernels.exact import digest, linear_fma_ref, philox_uniform
    >>> y_MN = linear_fma_ref(philox_uniform((2, 64), 1), philox_uniform((8, 64), 2, torch.bfloat16))
    >>> len(digest(y_MN))
    64

`op` runs on a GPU, `op_ref` is its exact oracle on the CPU and needs neither a GPU nor a C compiler. Nothing here uses tensor cores,
approximate instructions or a library's reduction, and nothing falls back to another order.
"""

_EXPORTS = {
    "CHUNK": "kernels.exact.order",
    "DecodeSchedule": "kernels.exact.decode",
    "ORDER_VERSION": "kernels.exact.order",
    "PackedWeight": "kernels.exact.decode",
    "PrefillSchedule": "kernels.exact.prefill",
    "Schedule": "kernels.exact.linear",
    "canonical_bytes": "kernels.exact.digests",
    "chunks": "kernels.exact.order",
    "decode_schedules": "kernels.exact.decode",
    "digest": "kernels.exact.digests",
    "exp": "kernels.exact.activations",
    "exp_ref": "kernels.exact.activations",
    "fma_f32": "kernels.exact.ieee",
    "gelu": "kernels.exact.activations",
    "gelu_ref": "kernels.exact.activations",
    "linear_fma": "kernels.exact.linear",
    "linear_fma_ref": "kernels.exact.linear",
    "nan_canonical": "kernels.exact.ieee",
    "pack_weight": "kernels.exact.decode",
    "philox_bell": "kernels.exact.philox",
    "philox_integers": "kernels.exact.philox",
    "philox_ref": "kernels.exact.philox",
    "philox_uniform": "kernels.exact.philox",
    "prefill_schedules": "kernels.exact.prefill",
    "rmsnorm": "kernels.exact.norm",
    "rmsnorm_ref": "kernels.exact.norm",
    "silu": "kernels.exact.activations",
    "silu_ref": "kernels.exact.activations",
    "spans": "kernels.exact.order",
    "swiglu": "kernels.exact.activations",
    "swiglu_ref": "kernels.exact.activations",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
