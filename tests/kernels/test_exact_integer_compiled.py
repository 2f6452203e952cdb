"""Claim: family B's compiled kernels multiply bytes on integer tensor cores and touch floats by IEEE-754 instructions alone.

Compiled here without a GPU. The audit (`test_exact_audit.py`) holds the general rules; these are the family's own.
"""

import importlib.util
import re

import pytest

from kernels.exact.integer import PRODUCTS

SMEM_86 = 99 << 10  # what a program may use on sm_86 and sm_89
INTS = {name: "i32" for name in ("M", "N", "KP", "x_plane", "w_plane")}
WGMMA, MMA_SYNC = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8", r"mma\.sync\.aligned\.m16n8k32\S*\.s32\.s8\.s8\.s32"
# round to nearest even, or exact: conversions from 16 bits, signs, comparisons, moves. As the audit allows everywhere.
IEEE = r"(fma|add|sub|mul)\.rn\.f32|(neg|abs)\.f32|cvt\.f32\.b?f16|(setp|selp|mov|ld|st)\..*"


def float_opcodes(ptx: str) -> set[str]:
    """Every opcode that touches a float type, with any .approx, .ftz or matrix instruction."""
    opcodes = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:]{1,2}[a-z0-9_]+)+)", ptx, re.MULTILINE))
    return {op for op in opcodes if re.search(r"\.(f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2)\b|approx|ftz|mma", op)}


def forbidden(ptx: str) -> set[str]:
    return {op for op in float_opcodes(ptx) if not re.fullmatch(IEEE, op) or "ftz" in op or "approx" in op}


def kernels_of(architecture: int) -> dict:
    from kernels.exact import integer_decode, integer_engines, integer_prefill, slices

    found = {}
    for products in PRODUCTS:
        s = integer_prefill.integer_prefill_schedule(4096, 4096, 4096, products, architecture)
        constants = dict(BM=s.block_m, BN=s.block_n, BK=s.block_k, GROUP_M=s.group_m, B9=products == "b9", EVEN_K=True, TMA=False, TOTALS=False)
        signature = dict(x_ptr="*i8", w_ptr="*i8", ex_m_ptr="*i32", ex_n_ptr="*i32", out_ptr="*fp32", **INTS)
        found[f"prefill {products}"] = (integer_prefill.integer_prefill_kernel, signature, constants, s.num_warps, s.num_stages)
    for assembly, adds in ((True, False), (False, True)):
        s = integer_decode.integer_decode_schedule(8, 4096, 4096)
        constants = dict(T=8, BN=s.block_n, BK=s.block_k, B9=False, EVEN_K=True, CODE=True, ASSEMBLY=assembly, WIDE=s.wide, PARTS=s.split if adds else 1, FINISH=adds)
        signature = dict(x_ptr="*i8", w_ptr="*bf16", ex_m_ptr="*i32", ex_n_ptr="*i32", out_ptr="*i64", y_ptr="*fp32", ticket_ptr="*i32")
        signature |= dict(M="i32", N="i32", KP="i32", BLOCKS="i32", x_plane="i32", w_plane="i32")
        found[f"decode assembly={assembly}"] = (integer_decode.integer_decode_kernel, signature, constants, s.num_warps, s.num_stages)
    finish = dict(part_ptr="*i64", ex_m_ptr="*i32", ex_n_ptr="*i32", out_ptr="*fp32", M="i32", N="i32", PARTS="i32")
    found["finish"] = (integer_decode.integer_finish_kernel, finish, dict(BLOCK=256, B9=True, FINISH=True), 2, 1)
    slicing = dict(x_ptr="*fp32", planes_ptr="*i8", ex_ptr="*i32", x_stride="i32", K="i32", KP="i32", plane="i32")
    found["slice"] = (slices.slice_kernel, slicing, dict(GIVEN=False, WRITE=True, STEPS=1, BLOCK=4096), 4, 1)
    packed = dict(x_ptr="*i32", w_ptr="*i32", out_ptr="*i64", M="i32", N="i32", W="i32", x_plane="i32", w_plane="i32")
    found["dp4a"] = (integer_engines.dp4a_kernel, packed, dict(BM=16, BN=32, B9=True, HARDWARE=True), 4, 1)
    return found


def compiled(kernel: object, signature: dict, constants: dict, num_warps: int, num_stages: int, architecture: int) -> object:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    multiples_of_16 = ("KP", "x_plane", "w_plane", "plane", "x_stride")
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in multiples_of_16}
    source = ASTSource(fn=kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False))


@pytest.mark.skipif(importlib.util.find_spec("triton.backends.nvidia") is None, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_compiled_kernels_use_int8_tensor_cores_and_ieee_float_instructions_only(architecture: int) -> None:
    """wgmma or mma.sync on int8 where products are; no float outside the audit's list; the default tiles fit small chips."""
    integer_mma = {"wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned"}
    for name, spec in kernels_of(architecture).items():
        kernel = compiled(*spec, architecture)
        ptx = kernel.asm["ptx"]
        products = {op for op in float_opcodes(ptx) if re.fullmatch(f"{WGMMA}|{MMA_SYNC}", op)}
        assert forbidden(ptx) - integer_mma - products == set(), name
        assert not re.search(r"\bmma\S*(f16|bf16|tf32|f32)", ptx) and "cvt.rzi" not in ptx, name
        assert bool(products) == name.startswith(("prefill", "decode")), name
        assert architecture == 90 or not any(op.startswith("wgmma") for op in products), name
        if name.startswith("prefill") and architecture == 90:
            assert all(op.startswith("wgmma") for op in products), name  # decode's few warps take mma.sync there too
        assert ("dp4a.s32.s32" in ptx) == (name == "dp4a")
        if architecture == 89:  # 99 KiB
            assert kernel.metadata.shared <= SMEM_86, name
        if name.startswith("decode"):
            assert re.search(r"(ld\.global\S*v4\.b32|cp\.async\.\S+ \[ %r\d+ \+ \d+ \], \[ %rd\d+ \+ \d+ \], 0x10)", ptx), "weights come 16 bytes at a time"
