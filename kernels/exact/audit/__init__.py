"""Static audit of compiled kernels: which instructions they contain and in which order they add, on seven targets, without a GPU.

    python -m kernels.exact.audit --targets sm_80 gfx942        # a table: kernel x target, PASS or FAIL and why

`specimen` says what is compiled, `catalogue` lists it, `isa` holds the rules on opcodes, `order` executes PTX symbolically and compares
every output with the specified sum, `record` lists what a GPU really executed, so that anyone can compile the same bytes again.
It proves nothing about silicon: that an FFMA unit rounds as IEEE-754 says is taken from the vendors.
"""

_EXPORTS = {
    "AuditResult": "kernels.exact.audit.check",
    "Specimen": "kernels.exact.audit.specimen",
    "TARGETS": "kernels.exact.audit.specimen",
    "audit": "kernels.exact.audit.check",
    "catalogue": "kernels.exact.audit.catalogue",
    "compile_specimen": "kernels.exact.audit.specimen",
    "recompile": "kernels.exact.audit.record",
    "record_compiles": "kernels.exact.audit.record",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
