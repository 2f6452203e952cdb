"""The global state of a worker, before and after a cell: what a cell must leave as it found it.

    before = snapshot()
    measure()
    changes(before, snapshot())     # ["torch default dtype", "environment variable OMP_NUM_THREADS"]

A worker on which anything is found is replaced, so that no cell inherits what another one set.
torch and numpy are read only if something has imported them already: importing them is no change.
It restores nothing, and does not see state inside C libraries that has no getter.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

ABSENT = "absent"  # the library that owns the setting was not imported

# Variables that torch itself adds at the first use of CUDA or of its compiler: where to cache, how to load. No number depends on them.
# TRITON_PTXAS_PATH, which the compiler adds too, is not among them: it picks another assembler for the next cell's kernels.
_SET_AT_FIRST_USE = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

_TORCH: dict[str, Callable[[Any], Any]] = {
    "torch matmul precision": lambda t: t.get_float32_matmul_precision(),
    "torch fp32 precision": lambda t: t.backends.fp32_precision,
    "torch cuda matmul fp32 precision": lambda t: t.backends.cuda.matmul.fp32_precision,
    "torch cuda matmul allow_tf32": lambda t: t.backends.cuda.matmul.allow_tf32,
    "torch cuda matmul fp16 reduced precision": lambda t: t.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "torch cuda matmul bf16 reduced precision": lambda t: t.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "torch cudnn allow_tf32": lambda t: t.backends.cudnn.allow_tf32,
    "torch cudnn conv fp32 precision": lambda t: t.backends.cudnn.conv.fp32_precision,
    "torch cudnn benchmark": lambda t: t.backends.cudnn.benchmark,
    "torch cudnn deterministic": lambda t: t.backends.cudnn.deterministic,
    "torch mkldnn matmul fp32 precision": lambda t: t.backends.mkldnn.matmul.fp32_precision,
    "torch sdpa backends": lambda t: (t.backends.cuda.flash_sdp_enabled(), t.backends.cuda.mem_efficient_sdp_enabled(), t.backends.cuda.math_sdp_enabled()),
    "torch deterministic algorithms": lambda t: (t.are_deterministic_algorithms_enabled(), t.is_deterministic_algorithms_warn_only_enabled()),
    "torch default dtype": lambda t: str(t.get_default_dtype()),
    "torch default device": lambda t: str(t.get_default_device()),
    "torch gradients enabled": lambda t: t.is_grad_enabled(),
    "torch threads": lambda t: t.get_num_threads(),
    "torch interop threads": lambda t: t.get_num_interop_threads(),
    "torch random state": lambda t: _digest(t.get_rng_state().numpy().tobytes()),
}

# Of these the value right after `import torch` is known, so a cell that imports torch itself is checked too.
_TORCH_FRESH = {
    "torch matmul precision": "highest",
    "torch cudnn benchmark": False,
    "torch cudnn deterministic": False,
    "torch deterministic algorithms": (False, False),
    "torch default dtype": "torch.float32",
    "torch default device": "cpu",
    "torch gradients enabled": True,
}


def snapshot() -> dict[str, Any]:
    """Name -> value or digest of all that is watched. Values of environment variables are kept as digests only."""
    state: dict[str, Any] = {f"environment variable {k}": _digest(v.encode("utf-8", "surrogateescape")) for k, v in os.environ.items()}
    state["working directory"] = _working_directory()
    state["python random state"] = _digest(repr(random.getstate()).encode())
    state["subnormal numbers flushed to zero"] = flushes_subnormals()
    numpy = sys.modules.get("numpy")
    if hasattr(numpy, "random"):
        state["numpy error handling"] = dict(numpy.geterr())
        state["numpy random state"] = _digest(repr([a.tobytes() if hasattr(a, "tobytes") else a for a in numpy.random.get_state()]).encode())
    state.update(_torch_state(sys.modules.get("torch")))
    return state


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of what differs, sorted. A library imported in between is compared with its known fresh values only."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if name.startswith(("torch ", "numpy ")) and old == ABSENT:
            old = _TORCH_FRESH.get(name, new)
        if name.startswith("cuda ") and old == ABSENT:
            old = 0 if name.endswith("allocated bytes") else new
        if old == ABSENT and name.removeprefix("environment variable ") in _SET_AT_FIRST_USE:
            continue
        if old != new:
            found.append(name)
    return found


def flushes_subnormals() -> bool:
    """True if this thread's arithmetic takes subnormal inputs or results as zero (FTZ or DAZ is on)."""
    smallest_normal = sys.float_info.min
    subnormal = float.fromhex("0x0.8p-1022")
    return smallest_normal * 0.5 == 0.0 or subnormal * 2.0 == 0.0


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "deleted"


def _torch_state(torch: Any) -> dict[str, Any]:
    if not hasattr(torch, "get_rng_state"):  # absent, or an import that failed half-way
        return {}
    state = {name: _read(torch, getter) for name, getter in _TORCH.items()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        torch._C._cuda_clearCublasWorkspaces()  # held by torch after any matmul; nothing that a cell left
        if any(torch.cuda.memory_allocated(i) for i in devices):
            gc.collect()  # cycles are no leftovers; only where it matters, for it takes 0.2 s in a large process
        for i in devices:
            state[f"cuda {i} allocated bytes"] = torch.cuda.memory_allocated(i)
            state[f"cuda {i} random state"] = _digest(torch.cuda.get_rng_state(i).numpy().tobytes())
    return state


def _read(torch: Any, getter: Callable[[Any], Any]) -> Any:
    """A setting, or the text of torch's refusal: it refuses to read old flags once new ones are set, itself a change."""
    try:
        return getter(torch)
    except (RuntimeError, AttributeError) as error:
        return f"unreadable: {str(error).partition(chr(10))[0]}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
