"""Other architectures' code on the GPU at hand: sm_80 and sm_89 PTX, loaded by the driver and launched in place of the native kernel.

    with foreign(80) as launches:
        y_MN = linear_fma(x_MK, weight)             # every kernel in here runs as sm_80 code
    launches[0].target, launches[0].ptx_sha256      # ".target sm_80" as loaded

The operator itself is unchanged: inside the block a Triton launch is compiled for the older architecture, its PTX goes through the driver's
own compiler (cuModuleLoadData) and its parameters are passed as Triton's launcher passes them: the arguments without constants, then two
scratch pointers. It is evidence about the code that Ampere and Ada would run, not about their silicon. PTX for sm_90 and later is refused:
Triton makes sm_90a of it, which runs on one architecture only. Kernels with tensor descriptors, clusters or global scratch are refused too.
"""

import ctypes
import functools
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from kernels.exact.audit.specimen import Specimen, compile_specimen, kernel_name, target_of

__all__ = ["FOREIGN", "ForeignLaunch", "foreign", "parameters", "run_foreign"]

FOREIGN = (80, 86, 89)  # architectures whose PTX a newer GPU accepts
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_C_TYPES = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "u1": ctypes.c_uint8,
            "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ForeignLaunch:
    """What was loaded and launched."""

    kernel: str
    target: str  # the .target line of the PTX that the driver loaded
    ptx_sha256: str
    shared_bytes: int
    grid: tuple[int, int, int]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """One function of the driver; raises RuntimeError with the driver's own words."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'?').decode()} ({status})")


@functools.cache
def _function(ptx: str, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """Loads PTX into the current context; modules stay loaded for the life of the process."""
    torch.cuda.current_stream(device).synchronize()  # the primary context exists and is current
    log = ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), ctypes.c_void_p(len(log)))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        _call("cuModuleLoadDataEx", ctypes.byref(module), ctypes.c_char_p(ptx.encode()), ctypes.c_uint(2), options, values)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {log.value.decode(errors='replace')}") from None
    _call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
    if shared_bytes > 48 * 1024:
        _call("cuFuncSetAttribute", function, ctypes.c_int(_DYNAMIC_SHARED), ctypes.c_int(shared_bytes))
    return function


def parameters(specimen: Specimen, signature: dict[str, str], bound: dict[str, object]) -> list:
    """The kernel's parameters as C values, constants left out, with the two scratch pointers that Triton appends."""
    values: list = []
    for name, kind in signature.items():
        value = bound[name]
        if kind == "constexpr":
            continue
        if isinstance(kind, str) and kind.startswith("*"):
            values.append(ctypes.c_uint64(value.data_ptr() if isinstance(value, torch.Tensor) else int(value or 0)))
        elif kind in _C_TYPES:
            values.append(_C_TYPES[kind](value))
        else:
            raise ValueError(f"an argument is a pointer, an integer or a float; got {name}: {kind!r} of {specimen.name}; run it without descriptors")
    return [*values, ctypes.c_uint64(0), ctypes.c_uint64(0)]


_COMPILED: dict[tuple, CompiledKernel] = {}


def _compiled(specimen: Specimen, target: str) -> tuple[CompiledKernel, dict[str, str], dict[str, object]]:
    """(code, signature, arguments by name); compiled once a kernel, signature, constants, alignment and options."""
    options, signature, constants, attrs, bound = specimen.packed(target_of(target))
    key = (specimen.kernel, target, *(repr(part) for part in (signature, constants, attrs, options.__dict__)))
    if key not in _COMPILED:
        _COMPILED[key] = compile_specimen(specimen, target)
    return _COMPILED[key], signature, bound


def _launch(specimen: Specimen, architecture: int) -> ForeignLaunch:
    compiled, signature, bound = _compiled(specimen, f"sm_{architecture}")
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)[1].rstrip(",")
    if target != f"sm_{architecture}":
        raise ValueError(f"only plain PTX is loaded as foreign code; got .target {target}; choose one of {FOREIGN}")
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ValueError(f"clusters and scratch are not passed on; got {metadata.num_ctas=} {metadata.global_scratch_size=}; choose another schedule")
    values = parameters(specimen, signature, bound)
    device = torch.cuda.current_device()
    function = _function(ptx, metadata.name, metadata.shared, device)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    grid = [ctypes.c_uint(g) for g in specimen.grid]
    block = [ctypes.c_uint(32 * metadata.num_warps), ctypes.c_uint(1), ctypes.c_uint(1)]
    _call("cuLaunchKernel", function, *grid, *block, ctypes.c_uint(metadata.shared), stream, pointers, None)
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    return ForeignLaunch(kernel=kernel_name(specimen.kernel), target=target, ptx_sha256=digest, shared_bytes=metadata.shared, grid=specimen.grid)


def run_foreign(kernel: JITFunction, grid: tuple, args: tuple, constexprs: dict, options: dict | None = None, *, architecture: int = 80) -> ForeignLaunch:
    """`kernel[grid](*args, **constexprs, **options)` as code of another architecture; the outputs are in the tensors that were passed.

    architecture: 80, 86 or 89. Raises RuntimeError with the driver's words where it refuses the PTX.
    """
    if architecture not in FOREIGN:
        raise ValueError(f"foreign code is PTX of an architecture in {FOREIGN}; got {architecture=}; newer PTX of Triton runs on its own GPU only")
    kwargs = {**constexprs, **(options or {})}
    if callable(grid):
        grid = grid(dict(zip(kernel.arg_names, args, strict=False)) | kwargs)
    place = tuple(int(g) for g in grid) + (1,) * (3 - len(grid))
    specimen = Specimen(name=kernel.fn.__name__, kernel=kernel, args=tuple(args), kwargs=kwargs, grid=place, family="elementwise")
    return _launch(specimen, architecture)


@contextmanager
def foreign(architecture: int) -> Iterator[list[ForeignLaunch]]:
    """Every Triton launch inside runs as code of that architecture and is listed; nothing native runs."""
    if architecture not in FOREIGN:
        raise ValueError(f"foreign code is PTX of an architecture in {FOREIGN}; got {architecture=}; newer PTX of Triton runs on its own GPU only")
    launches: list[ForeignLaunch] = []

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        launches.append(run_foreign(kernel, grid, args, kwargs, architecture=architecture))

    with mock.patch.object(JITFunction, "run", run):
        yield launches
