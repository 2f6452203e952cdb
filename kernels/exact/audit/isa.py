"""The rules on opcodes: which instructions a kernel may contain, on NVIDIA (PTX and SASS) and on AMD (amdgcn text).

    problems = ptx_problems(ptx, family) + sass_problems(sass, ptx, family)

Each problem starts with its rule. The allow-list on PTX decides what the arithmetic is: `.rn` operations and nothing that ptxas may
contract or approximate. SASS is checked for what ptxas could still have put there: matrix units, flushing, approximate functions outside
the expansion of div.rn and sqrt.rn. It says nothing about order; that is `order.py`.
"""

import re
import subprocess
import tempfile
from collections import Counter

from triton import knobs

__all__ = ["amdgcn_facts", "amdgcn_problems", "float_opcodes", "ptx_opcodes", "ptx_problems", "sass_facts", "sass_of", "sass_problems"]

_STATEMENT = re.compile(r"(?:^|;)\s*(?:\$?\w+:\s*)?(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[a-z0-9_]+)*)(?=[\s;])", re.MULTILINE)
_FLOAT = re.compile(r"\.(f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2|e4m3\w*|e5m2\w*|e2m1\w*)\b|\bapprox|\bftz|mma|^(ex2|lg2|sin|cos|tanh|rcp|rsqrt|red|atom)\b")
_MATRIX = re.compile(r"mma|^dp[24]a")

# Correctly rounded to nearest even, or exact (neg, abs, min, max, comparisons, moves, conversions to a wider type).
_ARITHMETIC = {f"{op}.rn.{kind}" for op in ("fma", "add", "sub", "mul") for kind in ("f32", "f32x2", "f64")} | {"div.rn.f32", "sqrt.rn.f32"}
# a maximum is exact and free of order, across lanes too (sm_100 has it as one instruction)
_EXACT = re.compile(
    r"(neg|abs|copysign)\.(b?f16(x2)?|f32|f64)|(redux\.sync\.)?(min|max)(\.NaN)?\.f32|(setp|selp|slct|mov|ld|st|testp|shfl|prmt|tensormap|cp|tcgen05\.(ld|st|cp|alloc|dealloc|wait|commit|relinquish_alloc_permit))\b.*"
    r"|cvt\.f32\.(bf16|f16)|cvt\.f64\.f32|cvt\.rn\.(bf16x2|bf16|f16|f16x2)\.f32|cvt\.rn\.f32\.(f64|[su](8|16|32|64))|cvt\.rn\.f64\.[su](32|64)|cvt\.r[nzmp]i\.[su](32|64)\.f32|cvt\.r[nzmp]i\.f32\.f32"
)
_INTEGER_MATRIX = re.compile(
    r"mma\.sync\.aligned\.m\d+n\d+k\d+\.row\.col(\.satfinite)?\.s32\.s8\.s8\.s32|wgmma\.mma_async\.sync\.aligned\.m64n\d+k32(\.satfinite)?\.s32\.s8\.s8"
    r"|wgmma\.(fence|commit_group|wait_group)\b.*|tcgen05\.mma\.cta_group::[12]\.kind::i8\b.*|dp4a\.s32\.s32"
)


def ptx_opcodes(ptx: str) -> Counter:
    """Every opcode, those of inline assembly too, with its number of occurrences."""
    body = re.sub(r"//[^\n]*", "", ptx.partition("{")[2])
    return Counter(op for op in _STATEMENT.findall(body) if op not in ("mov",))


def float_opcodes(ptx: str) -> dict[str, int]:
    """The opcodes that touch a float type, with any .approx, .ftz, atomic or matrix instruction."""
    return {op: count for op, count in sorted(ptx_opcodes(ptx).items()) if _FLOAT.search(op)}


def _ptx_rule(op: str, family: str) -> str | None:
    """The rule that this float opcode breaks, None where it is allowed."""
    if _MATRIX.search(op):
        if family == "integer" and _INTEGER_MATRIX.fullmatch(op):
            return None
        return f"matrix instruction: family {family} allows {'s8 x s8 -> s32 only' if family == 'integer' else 'none'}"
    if ".ftz" in op:
        return "ftz: subnormals must be kept"
    if "approx" in op:
        return "approx: an approximate instruction differs between architectures"
    if op.startswith(("red.", "atom.")):
        return "atomic: the order of float atomics is not defined" if _FLOAT.search(op.partition(".")[2]) or ".f" in op else None
    if op in _ARITHMETIC or _EXACT.fullmatch(op):
        return None
    if re.fullmatch(r"(add|sub|mul|fma|mad)\.(f32|f64|f32x2)", op):
        return "contraction: without .rn ptxas may fuse it; compile with enable_fp_fusion=False"
    return "allow-list: not an IEEE-754 operation known to be exact or correctly rounded"


def ptx_problems(ptx: str, family: str) -> list[str]:
    """What the PTX must not contain; empty where all is well."""
    found = float_opcodes(ptx)
    problems = [f"{rule}; got {op} x{count} in PTX" for op, count in found.items() if (rule := _ptx_rule(op, family))]
    return problems if found or ".f32" not in ptx else ["seen: the audit must have seen float instructions; got none in PTX"]


def sass_of(cubin: bytes) -> str:
    """nvdisasm's text with labels, from the wheel of triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name], check=True, capture_output=True, text=True).stdout


def _sass_parts(sass: str) -> dict[bool, list[tuple[str, str]]]:
    """(opcode, operands): of the kernel itself under False, of the slow paths that ptxas appends for div.rn, sqrt.rn and 64-bit division under True."""
    parts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    library = False
    for line in sass.splitlines():
        if label := re.match(r"(\S+):\s*$", line.strip()):
            library = "__cuda_sm" in label[1] or (library and label[1].startswith(".L"))
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\s*([^;]*);", line):
            parts[library].append((found[1], found[2]))
    return parts


def sass_problems(sass: str, ptx: str, family: str) -> list[str]:
    """What ptxas may have put there in spite of the PTX."""
    parts, opcodes = _sass_parts(sass), ptx_opcodes(ptx)
    own, problems = parts[False], []
    if not own:
        return ["seen: the audit must have seen SASS; got no instruction"]
    divides = any(op.startswith(("div.", "rem.")) for op in opcodes)
    roots = sum(count for op, count in opcodes.items() if op.startswith("sqrt.rn"))
    for op, operands in own + parts[True]:
        head, operands = op.split(".")[0], re.split(r"\s[?&]|\s{3,}", operands.replace(".reuse", ""))[0]
        constant = re.match(r"R\d+, -?RZ(\.H0_H0)?, (-?RZ(\.H0_H0)?,|-?R\d+(\.H\d_H\d)?\s*$)", operands)  # r = -0 * 0 + c and r = -0 + r.H0: moves
        if re.search(r"MMA", op) and not (op == "HFMA2.MMA" and constant):
            if family != "integer" or not re.match(r"IMMA|IGMMA|UTCIMMA", op):
                problems.append(f"matrix instruction: family {family}; got {op} in SASS")
        elif head in ("HFMA2", "HADD2", "HMUL2") and not constant:
            problems.append(f"allow-list: 16-bit arithmetic; got {op} {operands} in SASS")
        elif op.startswith("MUFU") and not (op.startswith(("MUFU.RCP", "MUFU.RSQ")) and (divides or roots)):
            problems.append(f"approx: MUFU only as the seed of div.rn, sqrt.rn or an integer division; got {op} in SASS")
    whole = sum(count for op, count in opcodes.items() if re.match(r"(div|rem)\.[su]", op))  # integer division starts with F2I.FTZ of a reciprocal
    flushed = [op for op, _ in own if ".FTZ" in op and not (whole and re.match(r"U?F2I\.FTZ\.U(32|64)\.TRUNC", op))]
    allowed = 2 * sum(op == "MUFU.RSQ" for op, _ in own) if roots else 0  # sqrt.rn starts with s = x * r, h = r * 0.5 on normal numbers
    if len(flushed) > allowed or any(op != "FMUL.FTZ" for op in flushed):
        problems.append(f"ftz: subnormals must be kept; got {dict(Counter(flushed))} in SASS outside the expansion of sqrt.rn")
    return sorted(set(problems))


def sass_facts(sass: str) -> dict[str, object]:
    """Registers that the code names, and the bytes a thread that the code moves to and from local memory (spills), each access counted once."""
    width = {"64": 8, "128": 16}
    spills = re.findall(r"\b(?:STL|LDL)((?:\.\w+)*)", sass)
    used = max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) + 1
    return {"registers": used, "spill_bytes": sum(width.get(s.rpartition(".")[2], 4) for s in spills)}


# ---- AMD -----------------------------------------------------------------------------------------------------------------------------
# v_fma_mix_f32 is a fused multiply-add that widens 16-bit operands; v_div_* with the v_rcp seed is LLVM's correctly rounded division.
_AMD_EXACT = re.compile(
    r"v_(pk_)?(fma|fmac|fmamk|fmaak|add|sub|subrev|mul)_f(32|64)|v_fma_mix_f32|v_(max|min|max3|min3|med3)_f32|v_cvt_f32_(f16|bf16|i32|u32|ubyte\d|f64)|v_cvt_f16_f32|v_cvt_f64_(f32|i32|u32)|v_cvt_(i32|u32)_f32"
    r"|v_cmpx?_\w+_f(32|64)|v_cmp_class_f32|v_div_(scale|fmas|fixup)_f32|v_(rndne|floor|trunc|ceil)_f(32|64)|v_ldexp_f(32|64)|v_pk_mov_b32"
)
_AMD_SEEDS = {"v_rcp_f32": "fdiv", "v_rcp_iflag_f32": "", "v_rsq_f32": "amdgcn.rsq", "v_sqrt_f32": "llvm.sqrt"}
_AMD_FLOAT = re.compile(r"_(f16|bf16|f32|f64|fp8|bf8|xf32|f8)\b|_f(16|32|64)_|^v_(exp|log|sin|cos|rcp|rsq|sqrt|mfma|smfmac|dot)")


def _amd_opcodes(amdgcn: str) -> Counter:
    found = re.findall(r"^\s+([vs]_[a-z0-9_]+|(?:buffer|global|flat|ds)_[a-z0-9_]+)", amdgcn.partition(".amdhsa_kernel")[0], re.MULTILINE)
    return Counter(re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", op) for op in found)


def _amd_rule(op: str, llir: str, family: str) -> str | None:
    if op.startswith(("v_mfma", "v_smfmac", "v_dot")):
        integer = re.match(r"v_mfma_i32_\w+_i8$|v_dot4c?_i32_i8$", op)
        return None if family == "integer" and integer else f"matrix instruction: family {family} allows {'i8 -> i32 only' if family == 'integer' else 'none'}"
    if "atomic" in op:
        return "atomic: the order of float atomics is not defined" if re.search(r"_(f32|f16|bf16|f64)$", op) else None
    if op in _AMD_SEEDS:
        return None if _AMD_SEEDS[op] in llir else f"approx: {op} only as the seed of a division or square root"
    if _AMD_EXACT.fullmatch(op):
        return None
    return "allow-list: not an operation known to be exact or correctly rounded (unfused v_mad/v_mac, approximate functions, other roundings)"


def amdgcn_problems(amdgcn: str, llir: str, family: str) -> list[str]:
    """The same rules on AMD, plus the mode register (subnormals kept, round to nearest) and LLVM's licences to reorder."""
    floats = {op: n for op, n in sorted(_amd_opcodes(amdgcn).items()) if _AMD_FLOAT.search(op) or "atomic" in op}
    problems = [f"{rule}; got {op} x{count} in amdgcn" for op, count in floats.items() if (rule := _amd_rule(op, llir, family))]
    modes = dict(re.findall(r"\.amdhsa_float_(\w+) (\d)", amdgcn))
    wanted = {"denorm_mode_32": "3", "denorm_mode_16_64": "3", "round_mode_32": "0", "round_mode_16_64": "0"}
    problems += [f"ftz: the mode register keeps subnormals and rounds to nearest; got {name}={modes.get(name)} in amdgcn" for name, value in wanted.items() if modes.get(name) != value]
    if licences := set(re.findall(r"\b(?:fadd|fsub|fmul|fdiv|fneg|call)\s+((?:fast|reassoc|contract|arcp|afn|nsz|nnan|ninf)\b[ a-z]*?)(?= float| <| double)", llir)):
        problems.append(f"contraction: LLVM may not reorder or fuse; got flags {sorted(licences)} in LLVM IR")
    if "!fpmath" in llir:
        problems.append("approx: LLVM may not lower the accuracy of a division; got !fpmath in LLVM IR")
    return problems if floats or not re.search(r"^\s*v_\w+_f(?:16|32)\b", amdgcn, re.MULTILINE) else [*problems, "seen: the audit must have seen float instructions; got none in amdgcn"]


def amdgcn_facts(amdgcn: str) -> dict[str, object]:
    """Registers, spilled registers; the float opcodes."""
    number = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", amdgcn)}
    return {"registers": number["vgpr_count"], "spill_bytes": 4 * (number["vgpr_spill_count"] + number["sgpr_spill_count"]) + number["private_segment_fixed_size"],
            "opcodes": {op: n for op, n in sorted(_amd_opcodes(amdgcn).items()) if _AMD_FLOAT.search(op)}}  # fmt: skip
