"""Claim: the compiled kernels contain IEEE-754 float instructions only; no GPU is needed to see it.

Each kernel is compiled offline and the float opcodes of its PTX are compared with an allow-list. Deliberately wrong kernels must fail.
"""

import re

import pytest
import torch  # noqa: F401  (fixes the order of imports: triton's driver looks for torch)
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.exact.activations import elementwise_kernel
from kernels.exact.decode import decode_kernel, parts_kernel
from kernels.exact.norm import rmsnorm_kernel
from kernels.exact.prefill import prefill_kernel

# rn = round to nearest even; conversions to 16 bits are one rounding, from 16 bits exact. neg and abs change a sign bit.
# add.f32 and mul.f32 without .rn are forbidden: ptxas may contract them.
ALLOWED = {"fma.rn.f32", "add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "neg.f32", "abs.f32"}
ALLOWED_PREFIXES = ("cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32", "cvt.rn.f16.f32", "cvt.f32.bf16", "cvt.f32.f16", "setp.", "selp.", "mov.", "ld.", "st.")
ARCHITECTURES = (80, 90)
CUDA_ONLY = pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
pytestmark = CUDA_ONLY

_CHAIN = dict(LANES=32, R=2, B=2, UNROLL=2, X_WIDE=True, W_WIDE=False)
_DECODE = dict(_CHAIN, S=8, X_AHEAD=True, BY_CHUNK=False, SPLIT=1, CHUNK_GROUPS=32)
_INTS = {name: "i32" for name in ("M", "N", "G", "GROUPS_PER_ROW")}
KERNELS = {
    "decode": (decode_kernel, dict(x_ptr="*fp32", w_ptr="*bf16", out_ptr="*fp32", **_INTS), _DECODE, 8),
    "decode by chunk": (decode_kernel, dict(x_ptr="*bf16", w_ptr="*bf16", out_ptr="*fp32", **_INTS), dict(_DECODE, BY_CHUNK=True, X_WIDE=False), 8),
    "parts": (parts_kernel, dict(part_ptr="*fp32", y_ptr="*fp32", count="i32"), dict(ROWS=2, PARTS=8, BLOCK=32), 1),
    "prefill": (prefill_kernel, dict(x_ptr="*fp32", w_ptr="*fp16", y_ptr="*fp32", scratch_ptr="*fp32", **_INTS), dict(_CHAIN, S=8, W=4, GROUP_M=8), 4),
    "rmsnorm": (rmsnorm_kernel, dict(x_ptr="*bf16", w_ptr="*bf16", y_ptr="*bf16", K="i32", count="fp32", eps="fp32"), dict(STEPS=4), 4),
    **{op: (elementwise_kernel, dict(x_ptr="*fp32", up_ptr="*fp32", y_ptr="*bf16", count="i32"), dict(OP=op, BLOCK=256), 4) for op in ("exp", "silu", "swiglu", "gelu")},
}


def ptx_of(kernel: object, signature: dict, constants: dict, num_warps: int, architecture: int, fusion: bool = False) -> str:
    # a pointer is aligned to 16 bytes, as torch allocates: without it nothing is loaded 16 bytes wide
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned)
    options = dict(num_warps=num_warps, enable_fp_fusion=fusion)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]


def float_opcodes(ptx: str) -> set[str]:
    """Every opcode that touches a float type, with any .approx, .ftz or matrix instruction."""
    opcodes = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:]{1,2}[a-z0-9_]+)+)", ptx, re.MULTILINE))
    return {op for op in opcodes if re.search(r"\.(f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2)\b|approx|ftz|mma", op)}


def forbidden(ptx: str) -> set[str]:
    return {op for op in float_opcodes(ptx) if op not in ALLOWED and not op.startswith(ALLOWED_PREFIXES) or "ftz" in op or "approx" in op}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_has_only_ieee_float_instructions(name: str, architecture: int) -> None:
    kernel, signature, constants, num_warps = KERNELS[name]
    ptx = ptx_of(kernel, signature, constants, num_warps, architecture)
    assert forbidden(ptx) == set()
    assert float_opcodes(ptx), "the audit must have seen float instructions"
    if name not in ("rmsnorm", "parts", "exp", "silu", "swiglu", "gelu"):
        # one FMA per product of a step of UNROLL groups of 8, and not one multiplication beside them
        products = constants["UNROLL"] * 8 * constants["R"] * constants["B"]
        assert ptx.count("fma.rn.f32") == products and not re.search(r"\bmul\.\S*f32", ptx)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_loads_weights_sixteen_bytes_wide(architecture: int) -> None:
    ptx = ptx_of(*KERNELS["decode"], architecture)
    assert len(re.findall(r"ld\.global\S*v4\.b32", ptx)) >= 2 * _CHAIN["UNROLL"] * _CHAIN["R"]


@triton.jit
def wrong_exp(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


@triton.jit
def wrong_division(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, 1.0 / tl.load(x_ptr + i))


@triton.jit
def wrong_dot(x_ptr, y_ptr):
    i = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.dot(x, x, input_precision="tf32"))


@triton.jit
def wrong_sum(x_ptr, y_ptr):
    i = tl.arange(0, 1024)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + i), 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", [wrong_exp, wrong_division, wrong_dot], ids=lambda k: k.__name__)
def test_a_wrong_kernel_fails_the_audit(kernel: object, architecture: int) -> None:
    assert forbidden(ptx_of(kernel, dict(x_ptr="*fp32", y_ptr="*fp32"), {}, 4, architecture))


def shuffles(ptx: str) -> int:
    return ptx.count("shfl.sync")


def test_a_library_sum_shows_in_the_audit_by_its_dependence_on_warps() -> None:
    """tl.sum uses allowed opcodes; what betrays it is that its chain of additions changes with num_warps. rmsnorm's tree does not."""
    signature = dict(x_ptr="*fp32", y_ptr="*fp32")
    assert len({len(re.findall(r"add(?:\.rn)?\.f32", ptx_of(wrong_sum, signature, {}, warps, 90))) for warps in (1, 4)}) == 2


def test_a_kernel_compiled_with_fusion_fails_the_audit() -> None:
    """Forgetting enable_fp_fusion=False leaves add and mul that may be contracted to fma: the same source, other bits."""
    kernel, signature, constants, num_warps = KERNELS["silu"]
    assert {"add.f32", "mul.f32"} <= forbidden(ptx_of(kernel, signature, constants, num_warps, 90, fusion=True))
