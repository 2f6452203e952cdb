"""Claims about the gradients on hard and wrong inputs, and about their compiled kernels (IEEE instructions only; no GPU is needed)."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.exact import attention_backward as attention_module
from kernels.exact import backward
from kernels.exact.attention_backward import attention_backward_ref
from kernels.exact.audit.isa import ptx_problems
from kernels.exact.backward import (
    cross_entropy_backward_ref,
    embedding_backward_ref,
    linear_backward_ref,
    rmsnorm_backward_ref,
    rope_backward_ref,
    swiglu_backward_ref,
    token_dot_ref,
)
from kernels.exact.digests import digest
from kernels.exact.optimizer import adamw_kernel
from kernels.exact.philox import philox_bell
from kernels.exact.rope import rope_tables

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TABLES = rope_tables(tokens=8, head_dim=4, base=100.0)


def bells(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [philox_bell(shape, 1, dtype, stream=i) for i, shape in enumerate(shapes)]


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1]).expand(x.shape[:2])


# name -> (gradient of its operands, shapes of the operands): M = 6 tokens or [2, 3], heads 2 over 1
CASES = {
    "linear": (linear_backward_ref, [(6, 5), (6, 4), (5, 4)]),
    "token_dot": (lambda a, b: (token_dot_ref(a, b),), [(6, 5), (6, 5)]),
    "rmsnorm": (rmsnorm_backward_ref, [(6, 5), (6, 5), (5,)]),
    "swiglu": (swiglu_backward_ref, [(6, 5), (6, 5), (6, 5)]),
    "rope": (lambda dy: (rope_backward_ref(dy, positions(dy), *TABLES),), [(2, 3, 2, 4)]),
    "cross entropy": (lambda x: (cross_entropy_backward_ref(x, torch.arange(len(x)) % 5),), [(6, 5)]),
    "embedding": (lambda dh: (embedding_backward_ref(dh, torch.arange(len(dh)) % 3, 4),), [(6, 5)]),
    "attention": (attention_backward_ref, [(2, 3, 2, 4)] * 3 + [(2, 3, 1, 4)] * 2),
}


def bits(outputs: tuple[torch.Tensor, ...]) -> list[str]:
    assert all(x.dtype == FP32 for x in outputs)
    return [digest(x) for x in outputs]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_16_bit_operands_give_the_gradient_of_their_values(name: str, dtype: torch.dtype) -> None:
    gradient, shapes = CASES[name]
    operands = bells(*shapes, dtype=dtype)
    assert bits(gradient(*operands)) == bits(gradient(*(x.float() for x in operands)))


@pytest.mark.parametrize("name", CASES)
def test_strided_operands_give_the_same_bits(name: str) -> None:
    gradient, shapes = CASES[name]
    operands = bells(*shapes)
    strided = [torch.stack([x, x * 0], dim=-1)[..., 0].transpose(0, -1).contiguous().transpose(0, -1) for x in operands]
    assert all(s.stride() != x.stride() or x.ndim == 1 for s, x in zip(strided, operands, strict=True))
    assert bits(gradient(*strided)) == bits(gradient(*operands))


@pytest.mark.parametrize("name", CASES)
def test_no_tokens_give_zero_gradients_of_the_weights_and_empty_ones_of_the_rest(name: str) -> None:
    gradient, shapes = CASES[name]
    weights = {"linear": 2, "rmsnorm": 2}.get(name)
    empty = [torch.ones(shape) if i == weights else torch.ones(0, *shape[1:]) for i, shape in enumerate(shapes)]
    for out in gradient(*empty):
        assert out.dtype == FP32 and bool((out == 0).all())
    if name in ("rope", "attention"):
        assert [x.shape[1] for x in gradient(*(torch.ones(2, 0, *shape[2:]) for shape in shapes))] in ([0], [0, 0, 0])


@pytest.mark.parametrize("name", CASES)
def test_other_dtypes_are_refused(name: str) -> None:
    gradient, shapes = CASES[name]
    operands = bells(*shapes)
    for wrong in range(len(operands)):
        for dtype in (torch.float64, torch.int32):
            with pytest.raises(ValueError, match="bf16, fp16 or fp32|float32, bfloat16 or float16"):
                gradient(*(x.to(dtype) if i == wrong else x for i, x in enumerate(operands)))


@pytest.mark.parametrize("name", CASES)
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    gradient, shapes = CASES[name]
    for wrong in range(len(shapes)):
        operands = [x[..., None] if i == wrong else x for i, x in enumerate(bells(*shapes))]
        with pytest.raises(ValueError, match="got"):
            gradient(*operands)


def test_sizes_beyond_the_kernels_integers_are_refused_before_any_work() -> None:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    for name, call in {
        "tokens": lambda: token_dot_ref(meta(2**31, 1), meta(2**31, 1)),
        "columns": lambda: rmsnorm_backward_ref(meta(1, 2**23 + 1), meta(1, 2**23 + 1), meta(2**23 + 1)),
        "vocabulary": lambda: cross_entropy_backward_ref(meta(1, 2**24), torch.zeros(1, dtype=torch.int64)),
        "rows": lambda: embedding_backward_ref(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 2**31),
        "positions": lambda: attention_backward_ref(*(meta(1, 2**19, 1, 1) for _ in range(5))),
    }.items():
        with pytest.raises(ValueError, match="got"):
            call()
            pytest.fail(name)


@pytest.mark.parametrize("ids", [[0, 4], [-1, 0], [0], [0.0, 1.0]])
def test_ids_outside_the_vocabulary_are_refused(ids: list) -> None:
    with pytest.raises(ValueError, match="ids 0 to 3|int32 or int64"):
        embedding_backward_ref(torch.zeros(2, 3), torch.tensor(ids), 4)


def test_ignored_tokens_have_no_gradient_and_unknown_targets_have_none_that_is_a_number() -> None:
    (logits,) = bells((4, 5))
    d = cross_entropy_backward_ref(logits, torch.tensor([2, -100, 5, -1]))
    assert torch.isnan(d[2:]).all() and digest(d[1]) == digest(torch.zeros(5))
    assert digest(cross_entropy_backward_ref(logits, torch.tensor([2, -100, 1, -100]))[::2].contiguous()) == digest(
        cross_entropy_backward_ref(logits[::2], torch.tensor([2, 1])))  # fmt: skip
    assert digest(cross_entropy_backward_ref(logits, torch.full((4,), -100))) == digest(torch.zeros(4, 5))
    assert digest(cross_entropy_backward_ref(logits, torch.tensor([0, 1, 2, 3]), ignore_index=3)[3]) == digest(torch.zeros(5))
    with pytest.raises(ValueError, match="int32 or int64"):
        cross_entropy_backward_ref(logits, torch.zeros(3, dtype=torch.int64))


def test_what_a_query_cannot_see_never_reaches_its_gradient() -> None:
    do, o, q, k, v = bells((1, 70, 1, 4), (1, 70, 1, 4), (1, 70, 1, 4), (1, 70, 1, 4), (1, 70, 1, 4))
    clean = attention_backward_ref(do, o, q, k, v)
    for bad in (torch.nan, torch.inf):
        k2, v2 = k.clone(), v.clone()
        k2[0, 66], v2[0, 66] = bad, bad
        dq, dk, dv = attention_backward_ref(do, o, q, k2, v2)
        assert digest(dq[:, :66].contiguous()) == digest(clean[0][:, :66].contiguous()) and torch.isnan(dq[0, 66:]).all()
        do2 = do.clone()
        do2[0, 3] = bad
        dq, dk, dv = attention_backward_ref(do2, o, q, k, v)
        assert [digest(x[:, 4:].contiguous()) for x in (dq, dk, dv)] == [digest(x[:, 4:].contiguous()) for x in clean]


def test_rows_of_zeros_and_subnormals_have_finite_norm_gradients() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0**-140, -(2.0**-149)], [1.0, 2.0]])
    dx, dw = rmsnorm_backward_ref(torch.ones(3, 2), x, torch.ones(2), eps=1e-6)
    assert torch.isfinite(dx).all() and torch.isfinite(dw).all()
    assert torch.isnan(rmsnorm_backward_ref(torch.ones(3, 2), x, torch.ones(2), eps=0.0)[0][0]).all()  # 0 / 0, as the forward pass says


def test_subnormal_gradients_are_kept() -> None:
    tiny = torch.full((8, 1), 2.0**-149)
    assert float(token_dot_ref(tiny, torch.ones(8, 1))) == 8 * 2.0**-149
    assert float(linear_backward_ref(tiny, torch.ones(8, 1), torch.ones(1, 1))[1]) == 8 * 2.0**-149
    assert float(swiglu_backward_ref(tiny, torch.full((8, 1), 60.0), torch.ones(8, 1))[0][0]) == 2.0**-149


def test_saturated_gates_have_the_gradients_of_their_limits() -> None:
    gate = torch.tensor([-torch.inf, -200.0, 100.0, 200.0, torch.inf, -100.0, torch.nan])
    dgate, dup = swiglu_backward_ref(torch.ones(7), gate, torch.ones(7))
    assert dgate[:5].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0] and -(2.0**-130) < float(dgate[5]) <= 0.0
    assert dup[:5].tolist() == [0.0, 0.0, 100.0, 200.0, torch.inf] and torch.isnan(dgate[6]) and torch.isnan(dup[6])


# ---- compiled kernels ----------------------------------------------------------------------------------------------------------

_SIZES = dict.fromkeys(("first", "T", "H", "G", "D"), "i32")


def _compiled(kernel: object, pointers: str, constexprs: dict, **others: str) -> tuple:
    """(kernel, its ASTSource); bf16 where a model may hold activations so."""
    types = dict.fromkeys(("x_ptr", "k_ptr"), "*bf16") | dict.fromkeys(("target_ptr", "token_ptr", "start_ptr"), "*i64")
    signature = {name: types.get(name, "*fp32") for name in pointers.split()} | others
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    return kernel, ASTSource(fn=kernel, signature={**signature, **dict.fromkeys(constexprs, "constexpr")}, constexprs=constexprs, attrs=aligned)


_ADAMW = "beta1 rest1 correction1 beta2 rest2 correction2 lr keep eps".split()
SOURCES = {kernel.fn.__name__: source for kernel, source in (
    _compiled(backward.token_dot_kernel, "a_ptr b_ptr out_ptr", dict(S=8, BLOCK=32, PER_CHUNK=256), K="i32", LENGTH="i32"),
    _compiled(backward.rmsnorm_backward_kernel, "dy_ptr x_ptr w_ptr dx_ptr scaled_ptr", dict(STEPS=2), K="i32", count="fp32", eps="fp32"),
    _compiled(backward.swiglu_backward_kernel, "dy_ptr gate_ptr up_ptr dgate_ptr dup_ptr", dict(BLOCK=512), count="i32"),
    _compiled(backward.cross_entropy_backward_kernel, "p_ptr target_ptr count_ptr out_ptr", dict(BLOCK=512), V="i32", ignore_index="i32"),
    _compiled(backward.embedding_backward_kernel, "dh_ptr token_ptr start_ptr out_ptr", dict(BLOCK=128), K="i32"),
    _compiled(adamw_kernel, "p_ptr g_ptr m_ptr v_ptr p_out m_out v_out", dict(BLOCK=512), count="i32", **dict.fromkeys(_ADAMW, "fp32")),
    _compiled(attention_module.scores_kernel, "q_ptr k_ptr do_ptr v_ptr s_ptr dp_ptr", dict(QUERIES=32, KEYS=32), **_SIZES, scale="fp32"),
    _compiled(attention_module.weights_kernel, "do_ptr o_ptr s_ptr dp_ptr p_ptr ds_ptr", dict(QUERIES=32, PER_BLOCK=64), first="i32", T="i32", H="i32", D="i32", scale="fp32"),
    _compiled(attention_module.query_gradient_kernel, "ds_ptr k_ptr dq_ptr", dict(QUERIES=16, DIM=64, PER_BLOCK=64), **_SIZES),
    _compiled(attention_module.key_gradient_kernel, "p_ptr ds_ptr q_ptr do_ptr dk_ptr dv_ptr", dict(KEYS=16, DIM=64, PER_BLOCK=64), **_SIZES),
)}  # fmt: skip


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("name", SOURCES)
def test_kernels_hold_ieee_instructions_only(name: str, target: int) -> None:
    options = dict(num_warps=4, enable_fp_fusion=False)
    ptx = triton.compile(SOURCES[name], target=GPUTarget("cuda", target, 32), options=options).asm["ptx"]
    assert ptx_problems(ptx, "elementwise") == []
    assert re.search(r"\.rn\.f32", ptx), "the audit must have seen arithmetic"
    assert not re.search(r"\b(atom|red)\.", ptx), "no atomics"
