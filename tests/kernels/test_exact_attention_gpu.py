"""Claim: on a GPU attention equals its CPU oracle bit for bit, for every schedule, batch, split into chunks and cache content.

Run on a GPU host: python -m pytest tests/kernels/test_exact_attention_gpu.py. There is no tolerance here: digests are compared.
"""

import pytest
import torch

from kernels.exact import digest, philox_bell
from kernels.exact.attention import KVCache, append, attention, attention_ref, make_cache
from kernels.exact.attention_decode import decode_schedules
from kernels.exact.attention_prefill import AttentionPrefillSchedule, prefill_schedules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# query heads, key heads, head_dim of the models that the studies run
MODELS = [(9, 3, 64), (32, 32, 128), (28, 4, 128)]
KEYS = (1, 63, 64, 65, 1000)  # one key; around a block; many blocks and a part
CAPACITY = 1040


def lengths(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def caches(batch: int, groups: int, dim: int, dtype: torch.dtype, *, filled: list[int], capacity: int = CAPACITY) -> tuple[KVCache, KVCache]:
    """(on the CPU, on the GPU) with `filled` tokens a row, written by `append` on each; the rest of the GPU's is NaN."""
    k, v = (philox_bell((batch, max(filled), groups, dim), seed, dtype) for seed in (1, 2))
    host, device = (make_cache(batch, capacity, groups, dim, dtype, d) for d in ("cpu", "cuda"))
    device.k.fill_(torch.nan)
    device.v.fill_(torch.nan)
    append(host, k, v, lengths([0] * batch), lengths(filled))
    append(device, k.cuda(), v.cuda(), lengths([0] * batch, "cuda"), lengths(filled, "cuda"))
    return host, device


def agree(q: torch.Tensor, host: KVCache, device: KVCache, start: list[int], count: list[int], schedules: tuple = (None,), **options: object) -> None:
    want = digest(attention_ref(q, host, lengths(start), lengths(count)))
    for schedule in schedules:
        got = attention(q.cuda(), device, lengths(start, "cuda"), lengths(count, "cuda"), schedule=schedule, **options)
        assert digest(got) == want, schedule


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("heads, groups, dim", MODELS)
def test_decode_equals_the_oracle_at_every_length(heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    host, device = caches(len(KEYS), groups, dim, dtype, filled=list(KEYS))
    q = philox_bell((len(KEYS), 1, heads, dim), 3, dtype, scale_log2=1)
    agree(q, host, device, [k - 1 for k in KEYS], [1] * len(KEYS))
    agree(q, host, device, [k - 1 for k in KEYS], [1, 0, 1, 1, 0], max_tokens=1001)


@pytest.mark.parametrize("heads, groups, dim", MODELS)
def test_every_decode_schedule_gives_the_same_bits_for_one_and_three_tokens(heads: int, groups: int, dim: int) -> None:
    host, device = caches(2, groups, dim, BF16, filled=[700, 130])
    for tokens in (1, 3):
        q = philox_bell((2, tokens, heads, dim), 3, BF16, scale_log2=1)
        agree(q, host, device, [700 - tokens, 127], [tokens, tokens], decode_schedules())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("heads, groups, dim", MODELS)
def test_prefill_equals_the_oracle_for_whole_late_padded_and_empty_rows(heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    start, count = [0, 500, 61, 7], [300, 200, 0, 70]
    host, device = caches(4, groups, dim, dtype, filled=[s + c for s, c in zip(start, count, strict=True)])
    agree(philox_bell((4, 300, heads, dim), 3, dtype, scale_log2=1), host, device, start, count)


@pytest.mark.parametrize("schedule", [*prefill_schedules(), AttentionPrefillSchedule(scratch_bytes=1)], ids=str)
def test_every_prefill_schedule_gives_the_same_bits(schedule: AttentionPrefillSchedule) -> None:
    for heads, groups, dim in ((6, 2, 64), (7, 1, 128)):
        host, device = caches(2, groups, dim, BF16, filled=[300, 270])
        agree(philox_bell((2, 200, heads, dim), 3, BF16, scale_log2=1), host, device, [100, 70], [200, 200], (schedule,))


@pytest.mark.parametrize("heads, groups, dim", [(4, 2, 8), (3, 1, 256), (2, 2, 80), (6, 2, 24)])
def test_other_head_dims_equal_the_oracle(heads: int, groups: int, dim: int) -> None:
    host, device = caches(1, groups, dim, BF16, filled=[150])
    for tokens in (1, 150):
        agree(philox_bell((1, tokens, heads, dim), 3, BF16), host, device, [150 - tokens], [tokens])


def test_chunks_and_single_steps_equal_one_prefill() -> None:
    q, (_, whole) = philox_bell((1, 200, 6, 64), 3, BF16).cuda(), caches(1, 2, 64, BF16, filled=[200])
    want = digest(attention(q, whole, lengths([0], "cuda"), lengths([200], "cuda")))
    for splits in ((1,) * 200, (64, 64, 72), (63, 2, 135)):
        parts, start = [], 0
        for count in splits:
            parts.append(attention(q[:, start : start + count], whole, lengths([start], "cuda"), lengths([count], "cuda")))
            start += count
        assert digest(torch.cat(parts, 1)) == want, splits


@pytest.mark.parametrize("tokens", [1, 70])
def test_values_that_are_not_finite_and_subnormals_follow_the_oracle(tokens: int) -> None:
    k, v = philox_bell((1, 70, 2, 64), 1), philox_bell((1, 70, 2, 64), 2)
    q = philox_bell((1, tokens, 4, 64), 3)
    for name, poison in (("k", torch.nan), ("k", torch.inf), ("k", -torch.inf), ("v", torch.inf), ("v", torch.nan), ("v", 2.0**-140), ("k", 2.0**-140)):
        kk, vv = k.clone(), v.clone()
        (kk if name == "k" else vv)[0, 40, 0, 3] = poison
        host, device = (make_cache(1, 70, 2, 64, FP32, d) for d in ("cpu", "cuda"))
        append(host, kk, vv, lengths([0]), lengths([70]))
        append(device, kk.cuda(), vv.cuda(), lengths([0], "cuda"), lengths([70], "cuda"))
        agree(q, host, device, [70 - tokens], [tokens])
    agree(q * 2.0**-130, host, device, [70 - tokens], [tokens])


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_captured_graph_follows_lengths_that_change_on_the_device(tokens: int) -> None:
    host, device = caches(2, 2, 64, BF16, filled=[300, 300])
    q = philox_bell((2, tokens, 4, 64), 3, BF16)
    q_device, start, count = q.cuda(), lengths([0, 0], "cuda"), lengths([tokens, tokens], "cuda")
    attention(q_device, device, start, count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q_device, device, start, count)
    for begin, many in (([5, 200], [1, tokens]), ([260, 0], [tokens, 0])):
        start.copy_(lengths(begin))
        count.copy_(lengths(many))
        graph.replay()
        assert digest(out) == digest(attention_ref(q, host, lengths(begin), lengths(many)))


def test_append_on_a_gpu_writes_what_the_cpu_writes_and_nothing_outside() -> None:
    k, v = (philox_bell((2, 5, 3, 16), seed, FP32).transpose(1, 2).contiguous().transpose(1, 2) for seed in (1, 2))
    host, device = (make_cache(2, 129, 3, 16, BF16, d) for d in ("cpu", "cuda"))
    append(host, k, v, lengths([62, 127]), lengths([5, 2]))
    append(device, k.cuda(), v.cuda(), lengths([62, 127], "cuda"), lengths([5, 2], "cuda"))
    assert torch.equal(device.k.cpu(), host.k) and torch.equal(device.v.cpu(), host.v)
    append(device, k.cuda(), v.cuda(), lengths([129, -5], "cuda"), lengths([5, 5], "cuda"))
    assert torch.equal(device.k.cpu(), host.k) and torch.equal(device.v.cpu(), host.v)


def test_outputs_in_16_bits_are_one_rounding_and_empty_batches_are_empty() -> None:
    host, device = caches(1, 2, 64, BF16, filled=[100])
    for tokens in (1, 100):
        q = philox_bell((1, tokens, 4, 64), 3, FP16)
        start, count = [100 - tokens], [tokens]
        want = attention_ref(q, host, lengths(start), lengths(count), BF16)
        assert digest(attention(q.cuda(), device, lengths(start, "cuda"), lengths(count, "cuda"), BF16)) == digest(want)
    empty = make_cache(0, 8, 1, 8, BF16, "cuda")
    assert attention(torch.zeros(0, 1, 1, 8, device="cuda"), empty, lengths([], "cuda"), lengths([], "cuda")).shape == (0, 1, 1, 8)
