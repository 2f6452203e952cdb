"""Claim: a decode step of the integer family launches one kernel a linear, beside the slicing of what attention hands to o_proj.

Counted on the shape of Llama-2-7B at batch 8 without memory or a GPU: meta tensors, and launches that are noted instead of made. Kernels of
torch (a dozen a step) are not among them.
"""

from collections import Counter
from unittest import mock

import pytest
import torch

from kernels.exact.audit.specimen import captured
from kernels.exact.decode import PackedWeight
from kernels.exact.integer import IntegerWeight
from kernels.exact.sampling import argmax
from studies.models.config import LLAMA2_7B
from studies.models.decoder import Decoder
from studies.models.families import FAMILIES
from studies.models.operators import Operators, operators
from studies.models.parallel import SINGLE
from studies.models.prepared import Layer, Model

BATCH, TOKENS = 8, 1024
META, GPU = torch.device("meta"), torch.device("cuda")


def _packed(n: int, k: int) -> PackedWeight:
    tickets = torch.empty(4 * -(-n // 32), dtype=torch.int32, device=META)
    return PackedWeight(data=torch.empty((8, k // 64, n, 8), dtype=torch.bfloat16, device=META), tickets=tickets, n=n, k=k)


def _integer(n: int, k: int) -> IntegerWeight:
    ex_N, tickets = (torch.empty(size, dtype=torch.int32, device=META) for size in (n, -(-n // 16)))
    code = torch.empty((n, k), dtype=torch.bfloat16, device=META)
    return IntegerWeight(n=n, k=k, products="b6", dtype=torch.bfloat16, ex_N=ex_N, digits=None, code=code, tickets=tickets)


def launches(family: str, ops: Operators) -> Counter:
    """Kernel -> launches of one step."""
    config, weight = LLAMA2_7B, {"fma": _packed, "integer": _integer}[family]
    hidden, wide = config.hidden, config.intermediate
    norm_K = torch.empty(hidden, dtype=torch.bfloat16, device=META)
    layer = Layer(input_norm_K=norm_K, qkv=weight(sum(config.qkv_rows), hidden), qkv_bias_N=None, o=weight(hidden, hidden), post_norm_K=norm_K,
                  gate_up=weight(2 * wide, hidden), down=weight(hidden, wide))  # fmt: skip
    model = Model(
        config=config, family=FAMILIES[family], device=META, operators=ops, parallel=SINGLE, layers=(layer,) * config.layers, norm_K=norm_K,
        embed_VK=torch.empty((config.vocabulary, hidden), dtype=torch.bfloat16, device=META), head=weight(config.vocabulary, hidden),
        heads=config.heads, kv_heads=config.kv_heads, split_heads=False, split_mlp=False, split_vocabulary=False,
    )  # fmt: skip
    decoder = Decoder(model, batch=BATCH, capacity_tokens=TOKENS)
    with mock.patch("studies.models.decoder.argmax_ref", argmax):  # the one choice that the decoder makes by the type of its device
        made = captured("step", decoder.repeat_step, family="integer", as_gpu=True)
    return Counter(s.kernel.fn.__name__ for s in made)


def test_norms_and_swiglu_slice_for_their_linears() -> None:
    rows = launches("integer", operators("exact", GPU))
    sliced = launches("integer", operators("exact", GPU, sliced_norm=True, sliced_swiglu=True))
    layers = LLAMA2_7B.layers
    assert rows["slice_kernel"] == 4 * layers + 1 and sliced["slice_kernel"] == layers
    assert rows["rmsnorm_kernel"] == sliced["rmsnorm_sliced_kernel"] == 2 * layers + 1
    assert rows["swiglu_rows_kernel"] == sliced["swiglu_sliced_kernel"] == layers
    assert rows["integer_decode_kernel"] == sliced["integer_decode_kernel"] == 4 * layers + 1
    assert not rows["integer_finish_kernel"] and rows.total() - sliced.total() == 3 * layers + 1


def test_a_step_of_the_integer_family_launches_no_more_than_one_of_fma() -> None:
    sliced, fma = launches("integer", operators("exact", GPU, sliced_norm=True, sliced_swiglu=True)), launches("fma", operators("exact", GPU))
    assert sliced.total() == fma.total() == 388


@pytest.mark.parametrize(("kind", "device"), [("exact", "cpu"), ("torch", "cuda"), ("serving", "cuda")])
def test_only_exact_operators_of_a_gpu_slice(kind: str, device: str) -> None:
    with pytest.raises(ValueError, match="slice their results"):
        operators(kind, torch.device(device), sliced_norm=True)
