"""Claim: sm_80 and sm_89 code, loaded by the driver on a newer GPU, gives the bits of the CPU oracle; and what ran is what is audited.

Run on a GPU host: python -m pytest tests/kernels/test_exact_foreign_gpu.py. There is no tolerance here: digests are compared.
"""

import hashlib
import json

import pytest
import torch

from kernels.exact import digest, linear_fma, linear_fma_ref, pack_weight, philox_bell, rmsnorm, rmsnorm_ref, swiglu, swiglu_ref
from kernels.exact.audit.record import recompile, record_compiles
from kernels.exact.foreign import FOREIGN, foreign
from kernels.exact.prefill import PrefillSchedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return philox_bell((m, k), 1), philox_bell((n, k), 2, BF16, scale_log2=-4)


def run_all() -> dict[str, tuple[str, str]]:
    """name -> digests on the GPU and of the oracle."""
    x, w = operands(3, 161, 2176)
    many, _ = operands(70, 161, 2176)
    rows, scale = philox_bell((5, 3000), 3, BF16), philox_bell((3000,), 4, BF16)
    packed = pack_weight(w.cuda())
    return {
        "decode": (digest(linear_fma(x.cuda(), packed)), digest(linear_fma_ref(x, w))),
        "prefill": (digest(linear_fma(many.cuda(), packed, schedule=PrefillSchedule())), digest(linear_fma_ref(many, w))),
        "rmsnorm": (digest(rmsnorm(rows.cuda(), scale.cuda())), digest(rmsnorm_ref(rows, scale))),
        "swiglu": (digest(swiglu(x.cuda(), x.cuda())), digest(swiglu_ref(x, x))),
    }


@pytest.mark.parametrize("architecture", FOREIGN)
def test_another_architecture_s_code_gives_the_oracle_s_bits(architecture: int) -> None:
    with foreign(architecture) as launches:
        found = run_all()
    assert {name: got == want for name, (got, want) in found.items()} == dict.fromkeys(found, True)
    assert {launch.target for launch in launches} == {f"sm_{architecture}"} and len(launches) >= 4


def test_what_was_executed_compiles_to_the_same_bytes_again() -> None:
    with record_compiles() as entries:
        run_all()
    entries = json.loads(json.dumps(entries))
    assert {e["kernel"].rpartition(":")[2] for e in entries} >= {"decode_kernel", "prefill_kernel", "rmsnorm_kernel"}
    for entry in entries:
        if not entry["line_info"]:  # compiled inside the block, or under TRITON_DISABLE_LINE_INFO
            assert hashlib.sha256(recompile(entry).asm["cubin"]).hexdigest() == entry["cubin_sha256"]


def test_nothing_is_recorded_where_nothing_was_launched() -> None:
    with record_compiles() as entries:
        pass
    assert entries == []
