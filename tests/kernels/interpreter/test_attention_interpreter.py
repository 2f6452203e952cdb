"""Claims about the logic of the attention kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

The interpreter's fma is mul + add, so values are compared with the oracle by a bound, and schedules with each other bit for bit. Positions
behind a row's last key are poisoned with NaN: a kernel that multiplied them by 0 would fail.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact import digest, philox_bell  # noqa: E402
from kernels.exact.attention import append, attention_ref, make_cache, score_scale  # noqa: E402
from kernels.exact.attention_decode import append_tokens, decode_attention, decode_schedules  # noqa: E402
from kernels.exact.attention_prefill import AttentionPrefillSchedule, chunk_sizes, prefill_attention, prefill_schedules  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
# mul + add rounds once more than fma, once per term of the chains over D <= 64, 64 keys and up to 5 blocks, and exp has 10 steps of its own; a
# score of at most 4 passes its relative error on times 4: 4 D + 64 + 5 + 10 < 400 roundings of 2^-24, of values below max |v| < 2
BOUND = 400 * 2.0**-24 * 2
CAPACITY = 290


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def case(tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype, start: torch.Tensor, count: torch.Tensor):
    """(q, cache poisoned behind each row's last key, the oracle's result)."""
    batch = len(start)
    cache = make_cache(batch, CAPACITY, groups, dim, dtype)
    k, v = (philox_bell((batch, CAPACITY, groups, dim), seed, dtype) for seed in (1, 2))
    append(cache, k, v, lengths(*[0] * batch), lengths(*[CAPACITY] * batch))
    q = philox_bell((batch, tokens, heads, dim), 3, dtype)
    want = attention_ref(q, cache, start, count)
    for b in range(batch):
        behind = torch.arange(int(start[b] + count[b]), cache.v.shape[2])
        cache.k[b, :, behind // 64, :, behind % 64] = torch.nan
        cache.v[b, :, behind] = torch.nan
    return q, cache, want


def check(run, schedules, q, cache, want, start, count) -> None:
    seen = set()
    for schedule in schedules:
        o = run(q, cache.k, cache.v, start, count, CAPACITY, score_scale(cache.head_dim), FP32, schedule)
        assert float((o - want).abs().max()) <= BOUND, schedule
        seen.add(digest(o))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "tokens, heads, groups, dim, dtype, start, count, every",
    [
        (1, 6, 2, 16, BF16, (129, 5), (1, 1), 4),  # group of 3: a row more than a power of two
        (2, 7, 1, 64, BF16, (62, 0, 127), (2, 1, 0), 6),  # two tokens on both sides of a block border, and a row without tokens
        (1, 2, 2, 64, FP32, (255,), (1,), 4),  # the last key ends a block
    ],
)
def test_every_decode_schedule_computes_the_oracle(tokens, heads, groups, dim, dtype, start, count, every) -> None:
    start, count = lengths(*start), lengths(*count)
    check(decode_attention, decode_schedules()[::every], *case(tokens, heads, groups, dim, dtype, start, count), start, count)


@pytest.mark.parametrize(
    "tokens, heads, groups, dim, dtype, start, count, schedules",
    [
        (66, 2, 1, 16, BF16, (0, 60), (66, 5), (prefill_schedules()[0], prefill_schedules()[9])),  # padded rows, a chunk that starts late
        (130, 2, 2, 16, FP32, (140,), (130,), (prefill_schedules()[3], AttentionPrefillSchedule(scratch_bytes=1))),  # one unit and 128 tokens a pass
    ],
)
def test_prefill_schedules_compute_the_oracle(tokens, heads, groups, dim, dtype, start, count, schedules) -> None:
    start, count = lengths(*start), lengths(*count)
    check(prefill_attention, schedules, *case(tokens, heads, groups, dim, dtype, start, count), start, count)


def test_a_pass_holds_as_many_scores_as_the_scratch_allows() -> None:
    assert chunk_sizes(units=32, tokens=2048, keys=2048, scratch_bytes=1 << 29) == (2048, 32)
    assert chunk_sizes(units=256, tokens=2048, keys=2048, scratch_bytes=1 << 29) == (256, 256)
    assert chunk_sizes(units=256, tokens=100, keys=128, scratch_bytes=1 << 29) == (128, 256)
    assert chunk_sizes(units=1024, tokens=100, keys=4096, scratch_bytes=1 << 29) == (128, 256)
    assert chunk_sizes(units=4, tokens=300, keys=4096, scratch_bytes=1) == (128, 1)


def test_the_append_kernel_writes_what_the_cpu_writes() -> None:
    k, v = (philox_bell((2, 3, 3, 16), seed).transpose(1, 2) for seed in (1, 2))
    start, count = lengths(62, 127), lengths(3, 2)
    want, got = make_cache(2, 129, 3, 16, FP32), make_cache(2, 129, 3, 16, FP32)
    append(want, k, v, start, count)
    append_tokens(got.k, got.v, got.tokens, k, v, start, count)
    assert torch.equal(got.k, want.k) and torch.equal(got.v, want.v)
    append_tokens(got.k, got.v, got.tokens, k, v, lengths(128, -1), lengths(3, 1))  # outside the cache: only position 128 exists
    assert torch.equal(got.v[0, :, 128], v[0, 0]) and not got.v[0, :, 129:].any() and torch.equal(got.v[1], want.v[1])
