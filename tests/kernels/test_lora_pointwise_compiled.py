"""Claims about what runs on an H200, from the compiler alone: no spills, no atomics, wide loads on the models' rows."""

import re
import subprocess
import tempfile

import pytest
import torch
import triton

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.lora.answers import logit_losses, slot_sums
from kernels.lora.pointwise import _norm_backward, _norm_forward, _swiglu_backward, _swiglu_forward, _turned

pytestmark = pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
BF16 = torch.bfloat16


def norms(columns: int) -> None:
    h, w = torch.zeros(16, columns, dtype=BF16), torch.zeros(columns)
    for other in (h, None):
        _norm_forward(h, other, w, 1e-5)
        _norm_backward(h, other, h, torch.zeros(16), w)


def turns(heads: int, groups: int, dim: int) -> None:
    _turned(torch.zeros(16, heads * dim, dtype=BF16), torch.zeros(16, groups * dim, dtype=BF16), torch.zeros(8, dim // 2), torch.zeros(8, dim // 2), 1.0)


def gates() -> None:
    x = torch.zeros(16, 1536, dtype=BF16)
    _swiglu_forward(x, x)
    _swiglu_backward(x, x, x)


def losses() -> None:
    for learn in (True, False):
        logit_losses(torch.zeros(16, 49152, dtype=BF16), torch.zeros(16, dtype=torch.int64), learn=learn)
    slot_sums(torch.zeros(16), torch.zeros(3, dtype=torch.int32), tokens=16, answers=1)


# the narrowest and the widest model; SmolLM2's and 7B's heads
CASES = {
    "norms 576": (lambda: norms(576), 4), "norms 3584": (lambda: norms(3584), 4), "turns 9": (lambda: turns(9, 3, 64), 1), "turns 28": (lambda: turns(28, 4, 128), 1),
    "gates": (gates, 2), "losses": (losses, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_spills_no_atomics_and_wide_loads(name: str) -> None:
    call, kernels = CASES[name]
    specimens = captured(name, call, family="elementwise")
    assert len(specimens) == kernels
    for specimen in specimens:
        compiled = compile_specimen(specimen, "sm_90")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
        used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        assert used["STACK"] == used["LOCAL"] == "0", (specimen.name, usage)
        ptx = compiled.asm["ptx"]
        assert not re.search(r"\b(atom|red)\.", ptx), specimen.name
        if specimen.kernel.fn.__name__ != "sums_kernel":
            assert re.search(r"ld\.global\S*\.v[248]\.", ptx), "16 bits at a time would leave most of the bandwidth"
