"""Claims about what runs on an H200, from the compiler alone: tensor cores where operands are 16 bits, no spills, no atomics, subnormals kept.

Launches are captured as the public functions make them, on shapes of the models (head_dim 64 and 128; rows that 16 bytes divide).
"""

import re
import subprocess
import tempfile
from collections.abc import Callable

import pytest
import torch
import triton

from kernels.exact.audit.specimen import Specimen, captured, compile_specimen
from kernels.lora.attention import attention_backward, attention_forward
from kernels.lora.dropout import Dropout
from kernels.lora.dropped import dropped
from kernels.lora.fixed_gemm import fixed_dgrad, fixed_linear
from kernels.lora.optimizer import AdamState, adamw_step
from kernels.lora.segments import Segments

pytestmark = pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
BF16, FP32 = torch.bfloat16, torch.float32


def attention(dim: int, dtype: torch.dtype, lengths: bool, batch: int = 2, tokens: int = 256, heads: int = 8, groups: int = 2) -> None:
    q, k = torch.zeros(batch, tokens, heads, dim, dtype=dtype), torch.zeros(batch, tokens, groups, dim, dtype=dtype)
    n = torch.zeros(batch, dtype=torch.int32) if lengths else None
    attention_forward(q, k, k, n)
    attention_backward(q, q, torch.zeros(batch, heads, tokens), q, k, k, n)


def products(outputs: int, dtype: torch.dtype, rows: int = 256, inputs: int = 512) -> None:
    x = torch.zeros(rows, inputs, dtype=dtype)
    fixed_linear(x, torch.zeros(outputs, inputs, dtype=dtype), torch.zeros(outputs, dtype=dtype))
    fixed_dgrad(x, torch.zeros(inputs, outputs, dtype=dtype))


def step(widths: tuple[int, ...] = (576, 1536), ranks: tuple[int, ...] = (16, 64)) -> None:
    adamw_step(AdamState.zeros(widths=widths, ranks=ranks, device="cpu", compute_dtype=BF16))


def drop(rows: int = 64, columns: int = 576) -> None:
    seg = Segments.of(rows=[rows], ranks=[16], scales=[1.0], device="cpu")
    ints = torch.zeros(1, dtype=torch.int64)
    dropped(torch.zeros(rows, columns, dtype=BF16), seg, Dropout(p_S=torch.zeros(1), seed_S=ints, step_S=ints, site=0))


# head dims of the models, both with and without lengths once; the widest in float32. Narrow and wide products. What has no products
MULTIPLY = {
    "attention 64": lambda: attention(64, BF16, True), "attention 128": lambda: attention(128, BF16, False), "products 576": lambda: products(576, BF16),
    "products 4096": lambda: products(4096, BF16),
}  # fmt: skip
OTHER = {"attention fp32": lambda: attention(128, FP32, True), "products fp32": lambda: products(576, FP32), "step": step, "drop": drop}


def ptx_of(specimen: Specimen) -> str:
    """Of a kernel that needs no local memory, by ptxas's own words on the binary that would be launched, and no atomics."""
    compiled = compile_specimen(specimen, "sm_90")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    assert used["STACK"] == used["LOCAL"] == "0", (specimen.name, usage)
    assert compiled.metadata.shared <= 232448, "what a block of an H200 may have"
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\b(atom|red)\.", ptx), specimen.name
    return ptx


@pytest.mark.parametrize("name", MULTIPLY)
def test_16_bit_products_run_on_tensor_cores_without_spills_or_atomics(name: str) -> None:
    specimens = captured(name, MULTIPLY[name], family="elementwise")
    assert len(specimens) == (3 if name.startswith("attention") else 2)
    for specimen in specimens:
        ptx = ptx_of(specimen)
        assert "wgmma.mma_async" in ptx
        assert "cp.async" in ptx, "operands of the next tile are on their way"


@pytest.mark.parametrize("name", OTHER)
def test_float32_kernels_round_each_operation_without_spills_or_atomics(name: str) -> None:
    for specimen in captured(name, OTHER[name], family="elementwise"):
        ptx = ptx_of(specimen)
        assert "wgmma" not in ptx and "tf32" not in ptx
        if name == "step":
            assert ".ftz" not in ptx and "approx" not in ptx, "subnormal moments are kept, roots and quotients rounded correctly"
        if specimen.kernel.fn.__name__ == "update_kernel":
            assert "fma." not in ptx, "every operation is rounded, as in the reference"
            assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 4 and len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= 4


@pytest.mark.parametrize("call", [lambda: attention(16, BF16, True, 1, 1, 1, 1), lambda: products(1, BF16, 1, 1), lambda: step((1,), (1,)), lambda: drop(1, 1)])
def test_kernels_compile_where_every_size_is_one(call: Callable[[], None]) -> None:
    """Triton makes a constant of an argument that is 1; the interpreter does not."""
    for specimen in captured("ones", call, family="elementwise"):
        ptx_of(specimen)
