"""Bitwise portable operators: the same bits on every GPU, for every tile, batch and schedule, and on the CPU.

    >>> import torch
    >>> from kernels.exact import digest, linear_fma_ref, philox_uniform
    >>> y_MN = linear_fma_ref(philox_uniform((2, 64), 1), philox_uniform((8, 64), 2, torch.bfloat16))
    >>> len(digest(y_MN))
    64

`op` runs on a GPU, `op_ref` is its exact oracle on the CPU and needs neither a GPU nor a C compiler. Nothing here uses tensor cores,
approximate instructions or a library's reduction, and nothing falls back to another order.
"""

from kernels.exact.activations import exp, exp_ref, gelu, gelu_ref, silu, silu_ref, swiglu, swiglu_ref
from kernels.exact.decode import DecodeSchedule, PackedWeight, decode_schedules, pack_weight
from kernels.exact.digest import canonical_bytes, digest
from kernels.exact.ieee import fma_f32, nan_canonical
from kernels.exact.linear import Schedule, linear_fma, linear_fma_ref
from kernels.exact.norm import rmsnorm, rmsnorm_ref
from kernels.exact.order import CHUNK, ORDER_VERSION, chunks, spans
from kernels.exact.philox import philox_bell, philox_integers, philox_ref, philox_uniform
from kernels.exact.prefill import PrefillSchedule, prefill_schedules

__all__ = [
    "CHUNK",
    "ORDER_VERSION",
    "DecodeSchedule",
    "PackedWeight",
    "PrefillSchedule",
    "Schedule",
    "canonical_bytes",
    "chunks",
    "decode_schedules",
    "digest",
    "exp",
    "exp_ref",
    "fma_f32",
    "gelu",
    "gelu_ref",
    "linear_fma",
    "linear_fma_ref",
    "nan_canonical",
    "pack_weight",
    "philox_bell",
    "philox_integers",
    "philox_ref",
    "philox_uniform",
    "prefill_schedules",
    "rmsnorm",
    "rmsnorm_ref",
    "silu",
    "silu_ref",
    "spans",
    "swiglu",
    "swiglu_ref",
]
