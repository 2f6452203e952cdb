"""What was executed, in a form from which anyone compiles the same bytes again: audited = executed.

    with record_compiles() as entries:          # on a GPU
        linear_fma(x_MK, weight)
    json.dump(entries, file)
    ...
    compiled = recompile(entries[0])            # anywhere, no GPU
    assert sha256(compiled.asm["cubin"]) == entries[0]["cubin_sha256"]

An entry stands for each compiled kernel that was *launched* inside the block (capture into a CUDA graph counts; a replay launches nothing
new), whether it was compiled there or before. The same triton version is needed, because ptxas is part of its wheel.
"""

import hashlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend

from kernels.exact.audit.specimen import reproducible_compiles, source_class

__all__ = ["differences", "entry_of", "recompile", "record_compiles"]

# paths of the machine; the backend puts its own libdevice there
_NOT_PORTABLE = ("extern_libs",)


def _sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _encoded(value: object) -> object:
    """A constant as JSON; types and functions by name."""
    if isinstance(value, tl.constexpr):
        return _encoded(value.value)
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, triton.JITFunction):
        return {"kernel": f"{value.fn.__module__}:{value.fn.__qualname__}"}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_encoded(v) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a constant of a kernel is a number, text, type, kernel or a tuple of these; got {value!r}; extend record.py")


def _decoded(value: object) -> object:
    if not isinstance(value, dict):
        return value
    (kind, inner), = value.items()
    return {"dtype": tl.dtype, "kernel": _kernel_named, "tuple": lambda items: tuple(_decoded(v) for v in items)}[kind](inner)


def _kernel_named(name: str) -> triton.JITFunction:
    module, _, function = name.partition(":")
    if module.partition(".")[0] not in ("kernels", "studies", "tests"):
        raise ValueError(f"only kernels of this project are compiled again; got {name!r}; check where the record comes from")
    return getattr(importlib.import_module(module), function)


def entry_of(compiled: CompiledKernel) -> dict:
    """Everything that decides the bytes of a compiled kernel, and their digests; JSON."""
    source, metadata = compiled.src, compiled.metadata._asdict()
    options = make_backend(compiled.metadata.target).parse_options({}).__dict__
    text, binary = ("ptx", "cubin") if "cubin" in compiled.asm else ("amdgcn", "hsaco")
    target = compiled.metadata.target
    return {
        "kernel": f"{source.fn.fn.__module__}:{source.fn.fn.__qualname__}",
        "signature": dict(source.signature),
        "constexprs": [[list(path), _encoded(value)] for path, value in source.constants.items()],
        "attrs": [[list(path), [list(pair) for pair in pairs]] for path, pairs in source.attrs.items()],
        "options": {name: _encoded(metadata[name]) for name in options if name not in _NOT_PORTABLE and metadata.get(name) is not None},
        "target": [target.backend, target.arch, target.warp_size],
        "triton": metadata["triton_version"],
        "line_info": str(metadata.get("TRITON_DISABLE_LINE_INFO")).lower() not in ("1", "true", "on", "yes"),
        "shared_bytes": metadata["shared"],
        f"{text}_sha256": _sha256(compiled.asm[text]),
        f"{binary}_sha256": _sha256(compiled.asm[binary]),
    }


def recompile(entry: dict) -> CompiledKernel:
    """The same kernel from this checkout's source, compiled here."""
    if entry["triton"] != triton.__version__:
        raise ValueError(f"the record needs its own triton, which brings ptxas; got {triton.__version__=} for {entry['triton']!r}; install that version")
    kernel = _kernel_named(entry["kernel"])
    source = source_class(kernel)(
        fn=kernel,
        signature=dict(entry["signature"]),
        constexprs={tuple(path): _decoded(value) for path, value in entry["constexprs"]},
        attrs={tuple(path): [list(pair) for pair in pairs] for path, pairs in entry["attrs"]},
    )
    with reproducible_compiles():
        options = {name: _decoded(value) for name, value in entry["options"].items()}
        return triton.compile(source, target=GPUTarget(*entry["target"]), options=options)


def differences(entries: list[dict]) -> list[str]:
    """Compiles every entry again and names those whose binary is another; empty: what was executed is what is audited here."""
    wrong = []
    for entry in entries:
        kind = "cubin" if "cubin_sha256" in entry else "hsaco"
        again = _sha256(recompile(entry).asm[kind])
        if again != entry[f"{kind}_sha256"]:
            reason = "it was compiled with line information" if entry["line_info"] else "another source, compiler or launch"
            wrong.append(f"{entry['kernel']}: executed {entry[f'{kind}_sha256'][:12]}, compiled here {again[:12]} ({reason})")
    return wrong


def _known_kernels() -> Iterator[triton.JITFunction]:
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if isinstance(value, triton.JITFunction):
                yield value


@contextmanager
def record_compiles() -> Iterator[list[dict]]:
    """Fills the list at the end of the block: one entry per compiled kernel that was launched, sorted by name and digest.

    Raises RuntimeError for a launched kernel that no module holds (one made inside a function), since nobody could compile it again.
    """
    entries: list[dict] = []
    launched: dict[int, str] = {}

    def note(metadata: object) -> None:
        seen = metadata.get()
        launched[seen["function"]] = seen["name"]

    with reproducible_compiles():
        knobs.runtime.launch_enter_hook.add(note)
        try:
            yield entries
        finally:
            knobs.runtime.launch_enter_hook.remove(note)
        found = {}
        for kernel in {id(k): k for k in _known_kernels()}.values():
            for caches in kernel.device_caches.values():
                found |= {c.function: entry_of(c) for c in caches[0].values() if c.function in launched}
    if missing := [name for function, name in launched.items() if function not in found]:
        raise RuntimeError(f"every launched kernel stands in a module; got {sorted(set(missing))}; define it at the top of a module")
    unique = {(e["kernel"], e.get("cubin_sha256") or e["hsaco_sha256"]): e for e in found.values()}
    entries += [unique[key] for key in sorted(unique)]
