"""Claim: the default decode schedules need no more registers than the CTAs of one SM have, so their waves are the ones that were measured.

Compiled here for sm_90, counted by the `cuobjdump` of Triton's wheel. M = 8 at 4096 x 4096 is the case that matters most: 512 CTAs are one
wave of four an SM at 128 registers and two waves at 129.
"""

import re
import subprocess
import tempfile

import pytest
import torch
from triton import knobs

from kernels.exact.audit.specimen import binary_of, captured, compile_specimen
from kernels.exact.decode import PackedWeight, decode_fma, decode_schedule

REGISTERS_PER_SM, GRANULE = 65536, 8  # sm_90: a warp's registers a thread are handed out in eights
# (n, k): CTAs of an SM by tokens. What the schedules of decode.py were measured with; below it, more waves
CTAS = {
    (4096, 4096): {1: 1, 2: 4, 4: 4, 8: 4, 16: 2},
    (14336, 4096): {1: 2, 2: 2, 4: 2, 8: 1, 16: 2},
    (4096, 14336): {1: 1, 2: 4, 4: 8, 8: 2, 16: 2},
}


def _meta_weight(n: int, k: int) -> PackedWeight:
    """As `pack_weight` makes it, without memory."""
    tickets = torch.empty(4 * -(-n // 32), dtype=torch.int32, device="meta")
    return PackedWeight(data=torch.empty((8, k // 64, n, 8), dtype=torch.bfloat16, device="meta"), tickets=tickets, n=n, k=k)


def resources(binary: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack (spills) of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


CASES = [(n, k, m, torch.float32) for (n, k), table in CTAS.items() for m in table]
CASES += [(n, k, 8, torch.bfloat16) for n, k in CTAS]  # what a decoder's batch of 8 runs


@pytest.mark.parametrize(("n", "k", "m", "dtype"), CASES)
def test_a_default_decode_schedule_keeps_its_ctas_on_an_sm(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    tokens = torch.empty((m, k), dtype=dtype, device="meta")
    (specimen,) = [s for s in captured("decode", lambda: decode_fma(tokens, _meta_weight(n, k)), family="fma") if s.kernel.fn.__name__ == "decode_kernel"]
    registers, stack = resources(binary_of(compile_specimen(specimen, "sm_90")))
    threads = 32 * decode_schedule(m, n, k).num_warps(8)
    assert registers <= REGISTERS_PER_SM // (threads * CTAS[n, k][m]) // GRANULE * GRANULE
    assert stack == 0, f"spills {stack} bytes a thread"
