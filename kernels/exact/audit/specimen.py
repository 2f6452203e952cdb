"""What is audited: a launch of a kernel as a public operator makes it, compiled offline for a named target.

    specimens = captured("rmsnorm", lambda: rmsnorm(x_MK, w_K), family="elementwise")      # CPU tensors; nothing is launched
    compiled = compile_specimen(specimens[0], "sm_80")      # triton's CompiledKernel: .asm["ptx"], .asm["cubin"]; gfx942: .asm["amdgcn"]

Types, constants, alignment and options are those that Triton itself derives from the launch, so the audited code is the code that the
operator would run. It compiles without line information (TRITON_DISABLE_LINE_INFO), because paths and line numbers would otherwise enter
the binary; what still decides its bytes is the source, the launch, the target and the ptxas of triton's wheel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.exact.audit.machine import Pointer

__all__ = ["FAMILIES", "TARGETS", "Specimen", "binary_of", "captured", "compile_specimen", "kernel_name", "reproducible_compiles", "source_class", "target_of"]

FAMILIES = ("fma", "integer", "elementwise")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
WAVE = {"gfx942": 64}


def source_class(kernel: JITFunction) -> type[ASTSource]:
    """Gluon kernels enter the compiler further down."""
    return GluonASTSource if kernel.is_gluon() else ASTSource


def kernel_name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One launch of one kernel.

    args, kwargs, grid: what the operator passed; family: which rules hold (`isa.py`); targets: where it may be compiled (a schedule for one
    architecture); order: runs the PTX on symbols and returns what is wrong with its sums (`specified.py`), None where opcodes alone are judged.
    """

    name: str
    kernel: JITFunction
    args: tuple
    kwargs: dict
    grid: tuple
    family: str
    targets: tuple[str, ...] = TARGETS
    order: Callable[[str, "Specimen"], list[str]] | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family is one of {FAMILIES}; got {self.family=}; a new family needs its rules in isa.py")

    def packed(self, target: GPUTarget) -> tuple:
        """Triton's own reading of the launch for a target: options, signature, constants, attributes, values by argument."""
        backend = make_backend(target)
        kwargs = {**self.kwargs, "debug": False, "instrumentation_mode": ""}
        if target.backend == "hip":
            kwargs.pop("maxnreg", None)  # ptxas's cap on registers; AMD's compiler has none
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, options = binder(*self.args, **kwargs)
        return *self.kernel._pack_args(backend, kwargs, bound, specialization, options), bound

    def params(self) -> list:
        """The PTX parameters in order: `Pointer` for a tensor (named as the argument), int, or the argument's name for a float."""
        _, signature, _, _, bound = self.packed(target_of("sm_80"))
        found: list = []
        for name, kind in signature.items():
            value = bound[name]
            if kind != "constexpr":
                found.append(Pointer(name, value.element_size()) if isinstance(value, torch.Tensor) else name if isinstance(value, float) else int(value))
        return found

    def value(self, name: str) -> object:
        """An argument as the operator passed it, or its default."""
        return self.packed(target_of("sm_80"))[-1][name]


def captured(name: str, call: Callable[[], object], *, family: str, orders: dict | None = None, targets: tuple[str, ...] = TARGETS, as_gpu: bool = False) -> list[Specimen]:
    """The launches that `call` makes, one specimen each; `orders` by the kernel's name. Tensors may live on the CPU: nothing runs.

    as_gpu: they say that they are on a GPU, for operators that choose an instruction by that.
    """
    launches: list[Specimen] = []

    def note(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        if callable(grid):
            grid = grid(dict(zip(kernel.arg_names, args, strict=False)) | kwargs)
        order = (orders or {}).get(kernel.fn.__name__)
        place = tuple(grid) + (1,) * (3 - len(grid))
        launches.append(Specimen(name=name, kernel=kernel, args=args, kwargs=kwargs, grid=place, family=family, targets=targets, order=order))

    with mock.patch.object(JITFunction, "run", note), mock.patch.object(torch.Tensor, "is_cuda", True) if as_gpu else nullcontext():
        call()
    if not launches:
        raise ValueError(f"an entry launches at least one kernel; got none from {name!r}; pass tensors that are not empty")
    different = len({s.kernel for s in launches}) > 1
    return [replace(s, name=f"{name}: {s.kernel.fn.__name__.removesuffix('_kernel')}") if different else s for s in launches]


def target_of(name: str) -> GPUTarget:
    """"sm_90" -> GPUTarget("cuda", 90, 32); "gfx942" -> GPUTarget("hip", "gfx942", 64)."""
    if name.startswith("sm_") and name[3:].isdigit():
        return GPUTarget("cuda", int(name[3:]), 32)
    if name in WAVE:
        return GPUTarget("hip", name, WAVE[name])
    raise ValueError(f"a target is sm_NN or one of {sorted(WAVE)}; got {name!r}; the audited ones are {TARGETS}")


@contextmanager
def reproducible_compiles() -> Iterator[None]:
    """Inside, Triton writes no line information: the binary is a function of source, arguments, options and compiler alone."""
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


def compile_specimen(specimen: Specimen, target: str) -> CompiledKernel:
    """Compiled without a GPU, or read from triton's cache."""
    place = target_of(target)
    options, signature, constants, attrs, _ = specimen.packed(place)
    source = source_class(specimen.kernel)(specimen.kernel, signature, constants, attrs)
    with reproducible_compiles():
        return triton.compile(source, target=place, options=options.__dict__)


def binary_of(compiled: CompiledKernel) -> bytes:
    """The cubin or hsaco."""
    return compiled.asm["cubin" if "cubin" in compiled.asm else "hsaco"]
