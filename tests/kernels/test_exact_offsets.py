"""Claim: no offset and no grid of the exact kernels ends where a tensor is large but still fits a GPU; seen in what the compiler makes.

Tensors of that size are not needed: the intermediate code of a launch shows the width of each product, the operator shows its grid.
"""

import re

import pytest
import torch
import triton
from triton.compiler import ASTSource

from kernels.exact.audit.specimen import captured, target_of
from kernels.exact.integer import integer_accumulate, linear_integer, prepare_integer
from kernels.exact.integer_decode import IntegerDecodeSchedule
from kernels.exact.integer_engines import dp4a_totals
from kernels.exact.integer_prefill import IntegerPrefillSchedule
from kernels.exact.slices import slice_rows

BF16, FP32 = torch.bfloat16, torch.float32


def ones(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def ttir_of(specimen) -> str:
    options, signature, constants, attrs, _ = specimen.packed(target_of("sm_90"))
    source = ASTSource(specimen.kernel, signature, constants, attrs)
    return triton.compile(source, target=target_of("sm_90"), options=options.__dict__).asm["ttir"]


def uses(ttir: str, argument: str) -> list[str]:
    """The lines of the body that read an argument."""
    return [line.strip() for line in ttir.splitlines() if re.search(rf"%{argument}\b", line) and "tt.func" not in line]


def _integer(weight: torch.dtype, schedule: object, products: str = "b6"):
    prepared = prepare_integer(ones(32, 128, dtype=weight), products=products)
    return lambda: integer_accumulate(ones(8, 128), prepared, torch.ones(8, dtype=torch.int32), schedule=schedule)


PLANES = {
    "slicing": lambda: slice_rows(ones(4, 200)),
    "prefill": _integer(BF16, IntegerPrefillSchedule(block_m=16, block_n=32)),
    "prefill, b9": _integer(FP32, IntegerPrefillSchedule(block_m=16, block_n=32), "b9"),
    "decode, wide": _integer(FP32, IntegerDecodeSchedule(block_n=32, block_k=64)),
    "decode, narrow": _integer(FP32, IntegerDecodeSchedule(block_n=32, block_k=64, wide=False)),
    "dp4a": lambda: dp4a_totals(torch.ones((3, 8, 64), dtype=torch.int8), torch.ones((3, 8, 64), dtype=torch.int8), "b6"),
}


@pytest.mark.parametrize("name", PLANES)
def test_distances_between_planes_of_digits_are_multiplied_as_64_bits(name: str) -> None:
    """2 * plane passes 2^31 from 2^30 elements a plane on, while the plane itself is still passed as int32."""
    found = 0
    for specimen in captured(name, PLANES[name], family="integer"):
        names = {"plane", "x_plane", "w_plane"} & set(specimen.kernel.arg_names)
        ttir = ttir_of(specimen)
        for argument in names:
            for line in uses(ttir, argument):
                found += 1
                assert "arith.extsi" in line and "i32 to i64" in line, line
    assert found
