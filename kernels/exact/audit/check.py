"""The audit of one specimen on one target: compile, read the instructions, run the sums on symbols.

    result = audit(specimen, "sm_89")
    assert result.problems == []

`problems` name the rule that is broken, `facts` are what a table shows: opcodes, registers, spills, shared memory, digest of the binary.
"""

import hashlib
import re
from dataclasses import dataclass, replace

from kernels.exact.audit.expression import NotTraced, forget
from kernels.exact.audit.isa import amdgcn_facts, amdgcn_problems, float_opcodes, ptx_problems, sass_facts, sass_of, sass_problems
from kernels.exact.audit.specimen import Specimen, binary_of, compile_specimen

__all__ = ["AuditResult", "audit", "audit_compiled"]

# opt-in shared memory of a block
SHARED_BYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """problems: empty means PASS. facts: opcodes, registers, spill_bytes, shared_bytes, sha256 of the binary, order ("proved" or why not)."""

    name: str
    target: str
    problems: list[str]
    facts: dict[str, object]


_PROVED: dict[tuple[int, str], tuple[list[str], str]] = {}


def _order(specimen: Specimen, ptx: str) -> tuple[list[str], str]:
    """Once for targets whose PTX differs in nothing but `.target` and `.version`."""
    if specimen.order is None:
        return [], "opcodes only"
    key = id(specimen), re.sub(r"^\.(version|target) .*$", "", ptx, flags=re.MULTILINE)
    if key not in _PROVED:
        try:
            problems = specimen.order(ptx, specimen)
            _PROVED[key] = problems, "wrong" if problems else "proved"
        except NotTraced as reason:
            _PROVED[key] = [f"order: the kernel must be traceable; got {reason}"], "not traced"
        forget()
    return _PROVED[key]


def audit_compiled(specimen: Specimen, target: str, asm: dict, shared_bytes: int, binary: bytes) -> AuditResult:
    """The rules on what a compiler produced; `asm` as triton's CompiledKernel.asm."""
    facts: dict[str, object] = {"shared_bytes": shared_bytes, "sha256": hashlib.sha256(binary).hexdigest()}
    if "ptx" in asm:
        sass = sass_of(binary)
        problems = ptx_problems(asm["ptx"], specimen.family) + sass_problems(sass, asm["ptx"], specimen.family)
        found, facts["order"] = _order(specimen, asm["ptx"])
        problems += found
        facts |= sass_facts(sass) | {"opcodes": float_opcodes(asm["ptx"])}
    else:
        problems = amdgcn_problems(asm["amdgcn"], asm["llir"], specimen.family)
        facts |= amdgcn_facts(asm["amdgcn"]) | {"order": "opcodes only"}
    limit = SHARED_BYTES[target] * 1024
    if shared_bytes > limit:
        problems.append(f"shared memory: {target} has {limit} bytes a block; got {shared_bytes}; choose smaller tiles there")
    return AuditResult(name=specimen.name, target=target, problems=problems, facts=facts)


def audit(specimen: Specimen, target: str, *, order: bool = True) -> AuditResult:
    """Compiled here, without a GPU. A kernel that does not compile for the target has that as its problem.

    order: also run the PTX on symbols, which takes seconds a kernel; without it only instructions are judged.
    """
    try:
        compiled = compile_specimen(specimen, target)
    except Exception as error:  # the compilers' own errors have no common base class
        return AuditResult(name=specimen.name, target=target, problems=[f"compiles: got {type(error).__name__}: {str(error)[:300]}"], facts={})
    specimen = specimen if order else replace(specimen, order=None)
    return audit_compiled(specimen, target, compiled.asm, compiled.metadata.shared, binary_of(compiled))
