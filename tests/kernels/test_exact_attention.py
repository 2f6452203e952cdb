"""Claims about attention's oracle: it is its definition bit for bit, in either engine, and nothing but a token's own past reaches it.

And about the compiled kernels, which are read as PTX: no GPU is needed.
"""

import itertools
import re

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.exact import _attention_c, digest, exp_ref, fma_f32, philox_bell
from kernels.exact import attention_decode as decode
from kernels.exact import attention_prefill as prefill
from kernels.exact.attention import BLOCK_KEYS, KVCache, append, attention, attention_ref, causal_attention_ref, make_cache
from kernels.exact.decode import DecodeSchedule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_c = pytest.mark.skipif(not _attention_c.available(), reason="needs a C compiler named cc")
ENGINES = [pytest.param("c", marks=needs_c), "torch"]
# query heads, key heads, head_dim of the models that the studies run: SmolLM2-135M, a 7B with as many key heads, Qwen2-7B
MODELS = [(9, 3, 64), (32, 32, 128), (28, 4, 128)]
# one key; one short of a block, a block, one more; many blocks and a part
KEYS = (1, 63, 64, 65, 1000)
# 1000 terms: l and P V are random walks of sqrt(1000) u, exp adds one ulp, and a score of |s| <= 2 carries sqrt(128) u of its own, which exp
# passes on; 4 (sqrt(1000) + 2 sqrt(128)) u bounds the relative error of p v sums with a margin of a few standard deviations
AGAINST_FP64 = 4 * (1000**0.5 + 2 * 128**0.5) * 2.0**-24


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, *, tokens: int | None = None, dtype: torch.dtype = BF16) -> KVCache:
    """A cache that holds all tokens of every row from position 0."""
    batch, count, groups, dim = k_BTGD.shape
    cache = make_cache(batch, tokens or count, groups, dim, dtype)
    append(cache, k_BTGD, v_BTGD, lengths(*[0] * batch), lengths(*[count] * batch))
    return cache


def operands(batch: int, tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype = BF16, seed: int = 1) -> tuple[torch.Tensor, ...]:
    q = philox_bell((batch, tokens, heads, dim), seed, dtype)
    return q, *(philox_bell((batch, tokens, groups, dim), seed + i, dtype) for i in (1, 2))


def one_by_one(q_TD: torch.Tensor, k_KD: torch.Tensor, v_KD: torch.Tensor, start: int) -> torch.Tensor:
    """The text of attention.py for one head, one number at a time."""
    tokens, dim = q_TD.shape
    one, scale = torch.tensor(1.0), torch.tensor(np.float32(1) / np.sqrt(np.float32(dim)))
    out = torch.zeros(tokens, dim)
    for t in range(tokens):
        scores = []
        for key in range(start + t + 1):
            acc = torch.tensor(0.0)
            for d in range(dim):
                acc = fma_f32(q_TD[t, d], k_KD[key, d], acc)
            scores.append(acc * scale)
        m = max(scores)
        p = [exp_ref(s - m) for s in scores]
        total, o = torch.tensor(0.0), torch.zeros(dim)
        for first in range(0, len(p), BLOCK_KEYS):
            block, acc = torch.tensor(0.0), torch.zeros(dim)
            for key in range(first, min(first + BLOCK_KEYS, len(p))):
                block, acc = fma_f32(p[key], one, block), fma_f32(p[key], v_KD[key], acc)
            total, o = total + block, o + acc
        out[t] = o / total
    return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_attention_is_its_definition_bit_for_bit_across_block_borders(engine: str, dtype: torch.dtype) -> None:
    q, k, v = operands(1, 132, 2, 1, 3, dtype)
    cache, start = filled(k, v, dtype=dtype), 126
    out = attention_ref(q[:, start:], cache, lengths(start), lengths(6), engine=engine)
    for h in range(2):
        want = one_by_one(q[0, start:, h], k[0, :, 0], v[0, :, 0], start)
        assert torch.equal(out[0, :, h].view(torch.int32), want.view(torch.int32))


@needs_c
@pytest.mark.parametrize("heads, groups, dim", [*MODELS, (4, 2, 17), (3, 1, 256), (2, 2, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_both_engines_give_the_same_bits(heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = operands(2, 67, heads, groups, dim, dtype)
    cache = filled(k, v, dtype=dtype)
    for start, count, first in ((lengths(0, 0), lengths(67, 30), 0), (lengths(66, 40), lengths(1, 0), 66)):
        c, slow = (attention_ref(q[:, first:], cache, start, count, engine=engine) for engine in ("c", "torch"))
        assert digest(c) == digest(slow)


@pytest.mark.parametrize("heads, groups, dim", MODELS)
@pytest.mark.parametrize("keys", KEYS)
def test_attention_agrees_with_fp64_softmax(heads: int, groups: int, dim: int, keys: int) -> None:
    _, k, v = operands(1, keys, heads, groups, dim)
    q = philox_bell((1, 1, heads, dim), 7, BF16)
    out = attention_ref(q, filled(k, v), lengths(keys - 1), lengths(1))[0, 0].double()
    kk, vv = (part[0].double().repeat_interleave(heads // groups, 1) for part in (k, v))
    p = (torch.einsum("hd,khd->hk", q[0, 0].double(), kk) / dim**0.5).softmax(-1)
    want = torch.einsum("hk,khd->hd", p, vv)
    assert float((out - want).abs().max()) <= AGAINST_FP64 * float(v.abs().max())


@pytest.mark.parametrize("engine", ENGINES)
def test_chunks_single_steps_and_one_prefill_give_the_same_bits(engine: str) -> None:
    q, k, v = operands(1, 140, 6, 2, 16)
    whole = attention_ref(q, filled(k, v), lengths(0), lengths(140), engine=engine)
    for splits in ((1,) * 140, (64, 64, 12), (63, 2, 75), (100, 40)):
        cache, parts, start = make_cache(1, 140, 2, 16), [], 0
        for count in splits:
            part = slice(start, start + count)
            append(cache, k[:, part], v[:, part], lengths(start), lengths(count))
            parts.append(attention_ref(q[:, part], cache, lengths(start), lengths(count), engine=engine))
            start += count
        assert digest(torch.cat(parts, 1)) == digest(whole), splits


@pytest.mark.parametrize("engine", ENGINES)
def test_neighbours_padding_and_capacity_cannot_change_bits(engine: str) -> None:
    q, k, v = operands(3, 90, 6, 2, 16)
    count = lengths(90, 0, 37)
    cache = make_cache(3, 500, 2, 16)
    append(cache, k, v, lengths(0, 0, 0), count)
    out = attention_ref(q, cache, lengths(0, 0, 0), count, engine=engine)
    for b, length in enumerate(count.tolist()):
        assert not out[b, length:].any(), "rows behind a sequence are zeros"
        if length:
            alone = attention_ref(q[b : b + 1, :length], filled(k[b : b + 1, :length], v[b : b + 1, :length]), lengths(0), lengths(length), engine=engine)
            assert digest(out[b, :length]) == digest(alone[0])


@needs_c
def test_threads_cannot_change_bits() -> None:
    q, k, v = operands(2, 300, 4, 2, 32)
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.add(digest(attention_ref(q, filled(k, v), lengths(0, 0), lengths(300, 300), engine="c")))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_token_may_not_see_never_reaches_it(engine: str) -> None:
    """Multiplying an invisible infinity or NaN by 0 would give NaN: such keys are skipped."""
    q, k, v = operands(1, 100, 2, 1, 8)
    want = attention_ref(q, filled(k, v), lengths(0), lengths(100), engine=engine)[:, :70]
    k[:, 70:], v[:, 70:] = torch.inf, torch.nan
    cache = filled(k, v)
    poisoned = attention_ref(q, cache, lengths(0), lengths(100), engine=engine)
    assert digest(poisoned[:, :70]) == digest(want) and poisoned[:, 70:].isnan().all()
    assert digest(attention_ref(q[:, 69:70], cache, lengths(69), lengths(1), engine=engine)) == digest(want[:, 69:])


@pytest.mark.parametrize("engine", ENGINES)
def test_values_that_are_not_finite_follow_the_stated_rules(engine: str) -> None:
    q, k, v = torch.ones(1, 1, 1, 4), torch.zeros(1, 66, 1, 4), torch.ones(1, 66, 1, 4)

    def out(key: float, value: float = 1.0, at: int = 65) -> torch.Tensor:
        kk, vv = k.clone(), v.clone()
        kk[0, at, 0, 0], vv[0, at, 0, 1] = key, value
        return attention_ref(q, filled(kk, vv, dtype=FP32), lengths(65), lengths(1), engine=engine)[0, 0, 0]

    assert out(torch.nan).isnan().all() and out(torch.nan, at=0).isnan().all() and out(torch.inf).isnan().all()
    assert torch.equal(out(-torch.inf), torch.ones(4)), "a score of -inf has weight 0"
    assert out(-torch.inf, value=torch.inf).isnan().tolist() == [False, True, False, False], "0 times a visible infinity is NaN"
    assert out(0.0, value=torch.inf).tolist() == [1.0, torch.inf, 1.0, 1.0]
    hidden = attention_ref(-q, filled(torch.full_like(k, torch.inf), v, dtype=FP32), lengths(65), lengths(1), engine=engine)
    assert hidden.isnan().all(), "a row of -inf scores has no weights"


@pytest.mark.parametrize("engine", ENGINES)
def test_subnormal_scores_and_values_are_kept(engine: str) -> None:
    q, k = torch.full((1, 1, 1, 4), 2.0**-70), torch.full((1, 2, 1, 4), 2.0**-70)
    v = torch.full((1, 2, 1, 4), 2.0**-140)
    out = attention_ref(q, filled(k, v, dtype=FP32), lengths(1), lengths(1), engine=engine)
    assert torch.equal(out, v[:, :1])


def test_append_writes_the_given_tokens_and_no_others() -> None:
    cache = make_cache(2, 130, 3, 4, FP32)
    k, v = philox_bell((2, 5, 3, 4), 1), philox_bell((2, 5, 3, 4), 2)
    append(cache, k, v, lengths(62, 125), lengths(4, 5))
    for b, start, count in ((0, 62, 4), (1, 125, 5)):
        for t, g in itertools.product(range(count), range(3)):
            position = start + t
            assert torch.equal(cache.k[b, g, position // 64, :, position % 64], k[b, t, g]) and torch.equal(cache.v[b, g, position], v[b, t, g])
    assert int(cache.k.ne(0).any(3).sum()) == int(cache.v.ne(0).any(3).sum()) == 3 * (4 + 5)
    small = make_cache(1, 1, 1, 1)
    append(small, torch.full((1, 1, 1, 1), 1 + 2.0**-8 + 2.0**-20), torch.full((1, 1, 1, 1), 1 + 2.0**-8), lengths(0), lengths(1))
    assert float(small.k[0, 0, 0, 0, 0]) == 1 + 2.0**-7 and float(small.v[0, 0, 0, 0]) == 1.0, "one rounding, ties to even"


def test_operands_need_not_be_contiguous_and_the_output_is_rounded_once() -> None:
    q, k, v = operands(2, 70, 4, 2, 8)
    want = attention_ref(q, filled(k, v), lengths(0, 0), lengths(70, 70))
    crooked = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    q2, k2, v2 = crooked
    got = attention_ref(q2, filled(k2, v2), lengths(0, 0), lengths(70, 70), torch.bfloat16)
    assert not q2.is_contiguous() and digest(got) == digest(want.to(BF16))


def test_a_whole_sequence_needs_no_cache() -> None:
    q, k, v = operands(1, 70, 6, 3, 8)
    want = attention_ref(q, filled(k, v), lengths(0), lengths(70))[0]
    assert digest(causal_attention_ref(*(x[0].transpose(0, 1) for x in (q, k, v)))) == digest(want.transpose(0, 1))
    with pytest.raises(ValueError, match="one sequence"):
        causal_attention_ref(q[0].transpose(0, 1), k[0].transpose(0, 1)[:, :5], v[0].transpose(0, 1)[:, :5])


def test_empty_batches_and_no_tokens_give_empty_results() -> None:
    assert attention_ref(torch.zeros(0, 3, 2, 8), make_cache(0, 4, 1, 8), lengths(), lengths()).shape == (0, 3, 2, 8)
    cache = make_cache(1, 4, 1, 8)
    append(cache, torch.zeros(1, 0, 1, 8), torch.zeros(1, 0, 1, 8), lengths(0), lengths(0))
    assert attention_ref(torch.zeros(1, 0, 2, 8), cache, lengths(0), lengths(0)).shape == (1, 0, 2, 8)


def test_wrong_sizes_dtypes_and_lengths_are_refused() -> None:
    cache, good = make_cache(1, 8, 2, 4), torch.zeros(1, 2, 4, 4)
    for q, message in (
        (good[0], "B and D"), (good[..., :3], "B and D"), (good[:, :, :3], "B and D"), (good[:, :, :0], "B and D"),
        (good.repeat(2, 1, 1, 1), "B and D"), (good.double(), "bf16, fp16 or fp32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attention_ref(q, cache, lengths(0), lengths(2))
    for start, count in ((lengths(-1), lengths(1)), (lengths(7), lengths(2)), (lengths(0), lengths(3)), (lengths(0), lengths(-1))):
        with pytest.raises(ValueError, match="start >= 0"):
            attention_ref(good, cache, start, count)
        with pytest.raises(ValueError, match="start >= 0"):
            append(cache, good[:, :, :2], good[:, :, :2], start, count)
    for start, count in ((lengths(0).long(), lengths(1)), (lengths(0, 0), lengths(1)), (lengths(0), lengths(1).float())):
        with pytest.raises(ValueError, match="int32"):
            attention_ref(good, cache, start, count)
    for k, v in ((good, good), (good[:, :, :2], good[:, :1, :2]), (good[:, :, :2, :3], good[:, :, :2, :3]), (good[:, :, :2].int(), good[:, :, :2])):
        with pytest.raises(ValueError):
            append(cache, k, v, lengths(0), lengths(1))
    with pytest.raises(ValueError, match="output"):
        attention_ref(good, cache, lengths(0), lengths(1), torch.float64)
    with pytest.raises(ValueError, match="engine"):
        attention_ref(good, cache, lengths(0), lengths(1), engine="fast")
    for sizes in ((-1, 8, 1, 8), (1, 0, 1, 8), (1, 8, 0, 8), (1, 8, 1, 257), (1, 8, 1, 0), (1, 2**31, 1, 1)):
        with pytest.raises(ValueError, match="a cache has"):
            make_cache(*sizes)
    with pytest.raises(ValueError, match="holds"):
        make_cache(1, 8, 1, 8, torch.float64)


# ---- compiled offline: no GPU is needed to see the instructions ----------------------------------------------------------------

# rn = round to nearest even; max is order-free; conversions to 16 bits are one rounding, from 16 bits exact. See test_exact_audit.py.
ALLOWED = {"fma.rn.f32", "add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "max.f32"}
ALLOWED_PREFIXES = ("cvt.rn.bf16", "cvt.rn.f16", "cvt.f32.bf16", "cvt.f32.f16", "setp.", "selp.", "mov.", "ld.", "st.")
LENGTHS = dict(start_ptr="*i32", count_ptr="*i32")
DECODE_SHAPE, TILE_SHAPE = dict(G=4, GROUP=7, D=128, L=32, W=4, R=2, J=2), dict(H=28, G=4, D=128, X=8, Y=16, A=2, E=8, UNROLL=2)
KERNELS = {
    "append": (decode.append_kernel, dict(k_ptr="*fp32", v_ptr="*bf16", to_k_ptr="*bf16", to_v_ptr="*fp16", **LENGTHS), dict(G=4, D=128, BLOCK=512)),
    "decode scores": (decode.decode_scores_kernel, dict(q_ptr="*bf16", k_ptr="*bf16", s_ptr="*fp32", max_ptr="*fp32", scale="fp32", **LENGTHS), dict(DECODE_SHAPE, UNROLL=32, Q_WIDE=False)),
    "decode values": (decode.decode_values_kernel, dict(s_ptr="*fp32", max_ptr="*fp32", p_ptr="*fp32", v_ptr="*bf16", o_ptr="*bf16", **LENGTHS), dict(DECODE_SHAPE, UNROLL=16, WEIGHTS=256)),
    "prefill scores": (prefill.prefill_scores_kernel, dict(q_ptr="*fp32", k_ptr="*bf16", s_ptr="*fp32", max_ptr="*fp32", scale="fp32", **LENGTHS), TILE_SHAPE),
    "prefill weights": (prefill.prefill_weights_kernel, dict(s_ptr="*fp32", max_ptr="*fp32", l_ptr="*fp32", **LENGTHS), dict(H=28, UNROLL=16)),
    "prefill values": (prefill.prefill_values_kernel, dict(p_ptr="*fp32", l_ptr="*fp32", v_ptr="*bf16", o_ptr="*fp32", **LENGTHS), dict(TILE_SHAPE, X=16, Y=8)),
}
MULTIPLES_OF_16 = ("PADDED", "QC", "t0")  # integers that the launches pass as such
# products of one trip of each chain, copies of the loop with and without mask, and exp's 10 for each weight of a thread
FMAS = {"append": 0, "decode scores": 32 * 2 * 2, "decode values": 2 * 16 * 2 * 2 + 10 * 4, "prefill scores": 2 * 64, "prefill weights": 10 * 16, "prefill values": 2 * 2 * 64}
needs_cuda_compiler = pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")


def compiled(name: str, architecture: int, fusion: bool = False) -> str:
    """PTX, with pointers aligned as torch allocates them."""
    kernel, pointers, constants = KERNELS[name]
    signature = {arg: pointers.get(arg, "constexpr" if arg in constants else "i32") for arg in kernel.arg_names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, (arg, kind) in enumerate(signature.items()) if kind.startswith("*") or arg in MULTIPLES_OF_16}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(num_warps=4, enable_fp_fusion=fusion)).asm["ptx"]


def forbidden(ptx: str) -> set[str]:
    opcodes = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:]{1,2}[a-z0-9_]+)+)", ptx, re.MULTILINE))
    floats = {op for op in opcodes if re.search(r"\.(f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2)\b|approx|ftz|mma", op)}
    return {op for op in floats if op not in ALLOWED and not op.startswith(ALLOWED_PREFIXES) or "ftz" in op or "approx" in op}


@needs_cuda_compiler
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_have_only_ieee_float_instructions_and_no_product_beside_the_chains(name: str, architecture: int) -> None:
    ptx = compiled(name, architecture)
    assert forbidden(ptx) == set()
    assert ptx.count("fma.rn.f32") == FMAS[name], "one FMA per product"
    if "scores" in name or name == "prefill values":
        assert len(re.findall(r"ld\.global\S*v4\.b32", ptx)) >= 2, "operands of the products are loaded 16 bytes wide"


@needs_cuda_compiler
def test_an_attention_kernel_compiled_with_fusion_fails_the_audit() -> None:
    assert {"add.f32", "mul.f32"} <= forbidden(compiled("decode values", 90, fusion=True))


def test_schedules_that_no_kernel_can_run_are_refused() -> None:
    for wrong in (dict(columns=8, per_thread=8, blocks=2), dict(score_keys=3), dict(score_keys=8, score_blocks=1), dict(rows=64)):
        with pytest.raises(ValueError):
            decode.AttentionDecodeSchedule(**wrong)
    for wrong in (dict(tokens=16), dict(score_tokens=16), dict(score_warps=8), dict(unroll=3), dict(scratch_bytes=0)):
        with pytest.raises(ValueError):
            prefill.AttentionPrefillSchedule(**wrong)
    assert len(decode.decode_schedules()) == len(prefill.prefill_schedules()) == 10


def test_the_gpu_entry_refuses_what_its_kernels_cannot_read() -> None:
    for schedule in (DecodeSchedule(), "decode"):
        with pytest.raises(ValueError, match="AttentionDecodeSchedule or AttentionPrefillSchedule; got schedule="):
            attention(torch.zeros(1, 1, 1, 8), make_cache(1, 8, 1, 8), lengths(0), lengths(1), schedule=schedule)
    with pytest.raises(ValueError, match="multiple of 8"):
        attention(torch.zeros(1, 1, 1, 12), make_cache(1, 8, 1, 12), lengths(0), lengths(1))
    for bound in (0, 9):
        with pytest.raises(ValueError, match="max_tokens"):
            attention(torch.zeros(1, 1, 1, 8), make_cache(1, 8, 1, 8), lengths(0), lengths(1), max_tokens=bound)
