"""Claim: no offset and no grid of the exact kernels ends where a tensor is large but still fits a GPU; seen in what the compiler makes.

Tensors of that size are not needed: the intermediate code of a launch shows the width of each product, the operator shows its grid.
"""

import re
from unittest import mock

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.exact.attention import MOST_TOKENS, KVCache, attention, make_cache
from kernels.exact.attention_decode import AttentionDecodeSchedule
from kernels.exact.audit.specimen import captured, target_of
from kernels.exact.decode import DecodeSchedule, decode_fma, pack_weight
from kernels.exact.integer import integer_accumulate, integer_finish, linear_integer, prepare_integer
from kernels.exact.integer_decode import IntegerDecodeSchedule
from kernels.exact.integer_engines import dp4a_totals
from kernels.exact.integer_prefill import IntegerPrefillSchedule
from kernels.exact.prefill import prefill_fma
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


def test_places_in_tokens_and_sums_are_multiplied_as_64_bits() -> None:
    """A row of tokens starts at m * K, a sum stands at m * N + n: both pass 2^31."""
    x, weight = ones(3, 2048), pack_weight(ones(70, 2048))
    decode, parts = captured("decode", lambda: decode_fma(x, weight, DecodeSchedule(split=2, block_m=2)), family="fma")
    (prefill,) = captured("prefill", lambda: prefill_fma(x, weight), family="fma")
    lines = uses(ttir_of(prefill), "GROUPS_PER_ROW")
    assert lines and all("arith.extsi" in line for line in lines), lines
    lines = uses(ttir_of(decode), "GROUPS_PER_ROW")
    assert lines and not any("arith.extsi" in line for line in lines), f"decode counts in 32 bits, and the call is cut where they end: {lines}"
    assert parts.kernel.fn.__name__ == "parts_kernel"
    assert not re.search(r"arith.muli .*: i32", ttir_of(parts))


@pytest.mark.parametrize(("rows", "k", "schedule"), [
    (2**31 // 14336 + 100_003, 14336, DecodeSchedule(block_m=8, folds=2)),  # rows of whole groups
    (2**31 // 4100 + 100_003, 4100, None),  # one span, padded to a group
    (200_003, 8, DecodeSchedule()),  # short rows meet the end of the grid's third axis first
])  # fmt: skip
def test_a_decode_launch_reads_no_more_of_x_than_32_bits_count(rows: int, k: int, schedule: DecodeSchedule | None) -> None:
    """No memory: meta tensors."""
    weight, x = pack_weight(torch.empty((64, k), dtype=BF16, device="meta")), torch.empty((rows, k), device="meta")
    specimens = captured("decode", lambda: decode_fma(x, weight, schedule), family="fma")
    launched = [s.value("M") for s in specimens if s.kernel.fn.__name__.removesuffix("_kernel") == "decode"]
    spans, groups, _, width = weight.data.shape
    of_a_cta = 16 if schedule is None else schedule.block_m * schedule.folds
    assert sum(launched) == rows and len(launched) > 1
    assert max(launched) * spans * groups * width < 2**31
    assert all(m % of_a_cta == 0 and m // of_a_cta <= 65535 for m in launched[:-1])


def test_tokens_stand_on_the_long_axis_of_the_grid() -> None:
    """The second and third axis end at 65,535."""
    prepared = prepare_integer(ones(300, 64))
    (finish,) = captured("finish", lambda: integer_finish(torch.ones((70, 300), dtype=torch.int64), torch.ones(70, dtype=torch.int32), prepared), family="integer")
    assert finish.grid == (70, 2, 1)
    (dp4a,) = captured("dp4a", lambda: dp4a_totals(torch.ones((3, 33, 64), dtype=torch.int8), torch.ones((3, 8, 64), dtype=torch.int8), "b6"), family="integer")
    assert dp4a.grid == (3, 1, 1)


def test_the_longest_cache_fits_the_grid() -> None:
    with pytest.raises(ValueError, match=f"1 <= tokens <= {65535 * 64}"):
        make_cache(1, 65535 * 64 + 1, 1, 8)
    cache = KVCache(k=torch.empty((1, 1, 65535, 8, 64), device="meta"), v=torch.empty((1, 1, 65535 * 64, 8), device="meta"), tokens=MOST_TOKENS)
    one = torch.ones(1, dtype=torch.int32, device="meta")
    scores, _ = captured("attention", lambda: attention(torch.ones((1, 1, 1, 8), device="meta"), cache, one, one, schedule=AttentionDecodeSchedule(score_blocks=1)), family="fma")
    assert scores.grid[1] == 65535


def test_a_decode_schedule_for_more_rows_than_a_grid_has_is_refused() -> None:
    cache, length = make_cache(1, 64, 1, 8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="take an AttentionPrefillSchedule"), mock.patch.object(JITFunction, "run"):
        attention(torch.ones(1, 65536, 1, 8), cache, length, length, schedule=AttentionDecodeSchedule(rows=1))
