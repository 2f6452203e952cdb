"""The environment that a worker starts with: the user's, without what would change numbers or times behind a bundle's back.

    env, left_out = worker_environment(os.environ, threads=2)
    left_out                                    # ("NVIDIA_TF32_OVERRIDE",): said once at the start of a run

A variable that steers a numeric library belongs into a cell's parameters, where it enters the key. Where caches and drivers lie is kept.
MLflow's address and password are not for workers, which never speak to it. `SUITE_*` and all else passes through.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from suite.identity import ROOT

_STEERS = ("TRITON_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "CUBLAS", "CUDNN_", "NVIDIA_TF32_", "MLIR_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "NPY_", "ATEN_",
           "OMP_", "KMP_", "GOMP_")  # fmt: skip
_STEER_ALONE = ("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT", "NCCL_ALGO", "NCCL_PROTO")
_KEPT = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_LIBCUDA_PATH", "TRITON_LIBDEVICE_PATH", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
         "TORCH_EXTENSIONS_DIR", "PYTORCH_KERNEL_CACHE_PATH",
         "TORCH_SYMM_MEM_DISABLE_MULTICAST")  # fmt: skip  # a host's owner sets it where NVLink multicast would harm
_NOT_FOR_WORKERS = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_BACKEND_STORE_URI")


def worker_environment(environ: Mapping[str, str], *, threads: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """(environment of a worker, names of the user's variables that it does not get because they steer numbers or times)."""
    set_by_us = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(threads), "TRITON_DISABLE_LINE_INFO": "1"}
    if not environ.keys() & {"TRITON_CACHE_DIR", "TRITON_HOME"}:  # said aloud: torch's compiler moves a process's cache at its first use unless it is set
        set_by_us["TRITON_CACHE_DIR"] = os.path.expanduser("~/.triton/cache")
    left_out = tuple(sorted(name for name, value in environ.items() if _steers(name) and set_by_us.get(name) != value))
    env = {k: v for k, v in environ.items() if not _steers(k) and k not in _NOT_FOR_WORKERS}
    here = str(ROOT)
    rest = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != here]
    return {**env, **set_by_us, "PYTHONPATH": os.pathsep.join([here, *rest])}, left_out


def _steers(name: str) -> bool:
    return name in _STEER_ALONE or (name.startswith(_STEERS) and name not in _KEPT)
