"""Claims about the gradients of kernels.exact on the CPU: right against float64 autograd, and added in the stated order.

What may be asked for, and the audit of the compiled kernels, stand in test_exact_backward_inputs.py.
"""

import pytest
import torch

from kernels.exact import attention_backward as attention_module
from kernels.exact import backward
from kernels.exact.attention import append, attention_ref, make_cache, score_scale
from kernels.exact.attention_backward import attention_backward_ref
from kernels.exact.activations import exp_ref
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
from kernels.exact.ieee import fma_f32
from kernels.exact.linear import linear_fma_ref
from kernels.exact.norm import sum_of_squares_ref
from kernels.exact.order import chunks
from kernels.exact.philox import philox_bell, philox_integers
from kernels.exact.rope import rope_tables

FP32, FP64 = torch.float32, torch.float64

# Bounds in units of u = 2^-24 (one rounding to float32), each times the magnitudes that the operation adds up (in the test body).
#   chain: a sum of n products in family A's order passes at most one rounding a product of its chunk, one a chunk, three of the tree.
#   rmsnorm: r carries 13.5 ulp (test_exact_elementwise) = 27 u, so x r carries 28; g 1; the lane sum at most 4 steps and 10 levels, its
#            factors 29, the division 1: 44; dx adds |x'| c (28 + 44 + 1), g (1 + 1), and r (27) with its product (1) to all of it: 101.
#   swiglu: e 2 (1 ulp), 1 + e 3, quotients 6 each; fma(g, 1 - s, 1) 7 of its magnitudes; three products: 6 + 7 + 4 = 17.
#   rope: two products and a sum.
#   cross entropy: |x - m| below 16 here, so its rounding 16, exp 2, the sum of V = 1000 at most 20 in any tree or 1024 lanes, quotient
#            20 + 18 + 1, difference and division 2, all of it at most 64.
U = 2.0**-24
UNITS = {"rmsnorm": 101, "swiglu": 17, "rope": 3, "cross entropy": 64}


def chain_units(n: int) -> int:
    span = chunks(n)[0]
    return max((stop - start for start, stop in span), default=0) + len(span) + 3


def within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    assert got.dtype == FP32 and got.shape == exact.shape
    worst = ((got.double() - exact).abs() / bound.clamp_min(2.0**-149)).max()
    assert float(worst) <= 1, f"{float(worst)} times the bound"


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double().requires_grad_() for t in tensors]


def bells(*shapes: tuple[int, ...], dtype: torch.dtype = FP32, seed: int = 1) -> list[torch.Tensor]:
    return [philox_bell(shape, seed, dtype, stream=i) for i, shape in enumerate(shapes)]


# ---- gradients are right -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 24, 37, 2056])  # one token; spans of 3; one span; spans of 257: two chunks
def test_linear_gradients_are_those_of_autograd(m: int) -> None:
    dy, x, w = bells((m, 24), (m, 40), (24, 40))
    dx, dw = linear_backward_ref(dy, x, w)
    x64, w64 = leaves(x, w)
    (x64 @ w64.T).backward(dy.double())
    within(dx, x64.grad, chain_units(24) * U * (dy.double().abs() @ w.double().abs()))
    within(dw, w64.grad, chain_units(m) * U * (dy.double().abs().T @ x.double().abs()))


@pytest.mark.parametrize("m, k", [(1, 1), (9, 64), (16, 1500)])
def test_rmsnorm_gradients_are_those_of_autograd(m: int, k: int) -> None:
    dy, x, w = bells((m, k), (m, k), (k,))
    dx, dw = rmsnorm_backward_ref(dy, x, w, eps=1e-5)
    x64, w64 = leaves(x, w)
    r = (x64.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    (x64 * r * w64).backward(dy.double())
    with torch.no_grad():
        g, scaled = (dy.double() * w64).abs(), (x64 * r).abs()
        within(dx, x64.grad, UNITS["rmsnorm"] * U * r * (g + scaled * (g * scaled).mean(1, keepdim=True)))
        within(dw, w64.grad, (chain_units(m) + 28) * U * (dy.double().abs() * scaled).sum(0))


def test_swiglu_gradients_are_those_of_autograd() -> None:
    dy, gate, up = bells((3000,), (3000,), (3000,))
    gate = gate * 10
    dgate, dup = swiglu_backward_ref(dy, gate, up)
    g64, u64 = leaves(gate, up)
    (torch.nn.functional.silu(g64) * u64).backward(dy.double())
    with torch.no_grad():
        s = torch.sigmoid(g64)
        within(dgate, g64.grad, UNITS["swiglu"] * U * (dy.double() * u64).abs() * s * (1 + (g64 * torch.sigmoid(-g64)).abs()))
        within(dup, u64.grad, UNITS["swiglu"] * U * (dy.double() * g64 * s).abs())


def test_rope_gradient_is_the_transpose() -> None:
    x, dy = bells((2, 5, 3, 8), (2, 5, 3, 8))
    cos, sin = rope_tables(tokens=16, head_dim=8, base=100.0)
    position = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 15, 0]])
    (x64,) = leaves(x)
    a, b = x64.chunk(2, dim=-1)
    c, s = (table.double()[position][:, :, None] for table in (cos, sin))
    torch.cat([a * c - b * s, b * c + a * s], dim=-1).backward(dy.double())
    size = dy.double().abs()
    other = size.roll(4, dims=-1)
    c, s = (torch.cat([part, part], dim=-1).abs() for part in (c, s))
    within(rope_backward_ref(dy, position, cos, sin), x64.grad, UNITS["rope"] * U * (size * c + other * s))


def test_cross_entropy_gradient_is_that_of_the_mean_loss() -> None:
    (logits,) = bells((7, 1000))
    logits, target = logits * 3, torch.from_numpy(philox_integers(7, 3).astype("int64") % 1000)
    (x64,) = leaves(logits)
    torch.nn.functional.cross_entropy(x64, target).backward()
    hit = torch.nn.functional.one_hot(target, 1000)
    within(cross_entropy_backward_ref(logits, target), x64.grad, UNITS["cross entropy"] * U * (torch.softmax(logits.double(), 1) + hit) / 7)


def test_embedding_gradient_is_that_of_autograd() -> None:
    (dh,), ids = bells((200, 16)), torch.from_numpy(philox_integers(200, 3).astype("int64") % 11)
    (w64,) = leaves(torch.zeros(12, 16))
    w64[ids].backward(dh.double())
    size = torch.zeros(12, 16, dtype=FP64).index_add(0, ids, dh.double().abs())
    within(embedding_backward_ref(dh, ids, 12), w64.grad, int(torch.bincount(ids).max()) * U * size)


def attention_f64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o_BTHD by the definition, differentiable."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * score_scale(q.shape[3])
    s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhtj,bjhd->bthd", torch.softmax(s, dim=3), v)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The exact forward pass on whole sequences."""
    batch, tokens, kv_heads, dim = k.shape
    cache = make_cache(batch, tokens, kv_heads, dim, dtype=FP32)
    start, count = torch.zeros(batch, dtype=torch.int32), torch.full((batch,), tokens, dtype=torch.int32)
    append(cache, k, v, start, count)
    return attention_ref(q, cache, start, count)


def attention_bounds(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Bounds on dq, dk, dv: every rounding of the order in attention_backward.py, carried to first order with magnitudes in place of
    values, doubled for the higher orders."""
    tokens, dim, group, scale = q.shape[1], q.shape[3], q.shape[2] // k.shape[2], score_scale(q.shape[3])
    do, q, k, v = (x.double() for x in (do, q, k, v))
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    s = (torch.einsum("bthd,bjhd->bhtj", q, k) * scale).masked_fill(hidden, -torch.inf)
    p, spread = torch.softmax(s, dim=3), (s.amax(3, keepdim=True) - s).masked_fill(hidden, 0)
    size_s = scale * torch.einsum("bthd,bjhd->bhtj", q.abs(), k.abs()).masked_fill(hidden, 0)
    depth = min(tokens, 64) + -(-tokens // 64)
    e_p = U * (2 * (dim + 1) * size_s.amax(3, keepdim=True) + spread + 2 + depth + 2)  # s twice, s - m, exp, l, the quotient
    mean_v = torch.einsum("bhtj,bjhd->bthd", p, v.abs())
    size_dp, size_delta = torch.einsum("bthd,bjhd->bhtj", do.abs(), v.abs()), torch.einsum("bthd,bthd->bht", do.abs(), mean_v)[..., None]
    e_top = e_p.amax(3, keepdim=True)
    e_ds = scale * p * ((e_p + 3 * U) * (size_dp + size_delta) + dim * U * (size_dp + size_delta) + (2 * e_top + depth * U) * size_delta)
    e_ds, ds = e_ds.masked_fill(hidden, 0), (scale * p * (size_dp + size_delta)).masked_fill(hidden, 0)
    dq = torch.einsum("bhtj,bjhd->bthd", e_ds + depth * U * ds, k.abs())
    dk = torch.einsum("bhtj,bthd->bjhd", e_ds + (depth + group) * U * ds, q.abs()).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bhtj,bthd->bjhd", p * (e_p + (depth + group) * U), do.abs()).unflatten(2, (-1, group)).sum(3)
    return [2 * x for x in (dq, dk, dv)]


# tokens: one; a partial block; a whole block; two blocks and a bit. heads over key heads: 1, all of them, a group of 2.
@pytest.mark.parametrize("tokens, heads, kv_heads", [(1, 1, 1), (17, 3, 3), (64, 2, 1), (130, 4, 2)])
def test_attention_gradients_are_those_of_autograd(tokens: int, heads: int, kv_heads: int) -> None:
    do, q, k, v = bells((2, tokens, heads, 12), (2, tokens, heads, 12), (2, tokens, kv_heads, 12), (2, tokens, kv_heads, 12))
    q64, k64, v64 = leaves(q * 2, k, v)
    attention_f64(q64, k64, v64).backward(do.double())
    got = attention_backward_ref(do, forward(q * 2, k, v), q * 2, k, v)
    for gradient, leaf, bound in zip(got, (q64, k64, v64), attention_bounds(do, q * 2, k, v), strict=True):
        within(gradient, leaf.grad, bound)


# ---- in the stated order -------------------------------------------------------------------------------------------------------


def test_a_weight_gradient_is_one_chain_over_tokens() -> None:
    """65 tokens are one span and one chunk: the order of a sum that float32 can tell from any other."""
    dy, x = torch.ones(65, 1), torch.full((65, 1), 2.0**-24)
    x[0] = 1.0
    assert float(linear_backward_ref(dy, x, torch.ones(1, 1))[1]) == 1.0  # each 2^-24 is lost; in another order they add up to 2^-18
    x[0], x[64] = 2.0**-24, 1.0
    assert float(linear_backward_ref(dy, x, torch.ones(1, 1))[1]) == 1.0 + 2.0**-18


@pytest.mark.parametrize("m", [0, 1, 13, 64, 2056])
def test_token_dot_is_the_diagonal_of_the_linear_layer(m: int) -> None:
    a, b = bells((m, 12), (m, 12))
    assert digest(token_dot_ref(a, b)) == digest(linear_fma_ref(a.T, b.T).diagonal().contiguous())


def test_the_lane_sum_is_that_of_the_forward_norm() -> None:
    (x,) = bells((5, 2500))
    assert digest(backward._lane_dot_ref(x, x)) == digest(sum_of_squares_ref(x))


def test_rmsnorm_gradients_follow_the_written_order_bit_for_bit() -> None:
    """Two tokens of 1027: lanes 0 to 2 hold two products each, all others one; M = 2 is one span, a chain."""
    dy, x, w = bells((2, 1027), (2, 1027), (1027,))
    dx, dw = rmsnorm_backward_ref(dy, x, w, eps=1e-5)
    rows = []
    for t in range(2):
        def lanes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            acc = fma_f32(a[:1024], b[:1024], 0.0)
            acc[:3] = fma_f32(a[1024:], b[1024:], acc[:3])
            while len(acc) > 1:
                acc = acc[::2] + acc[1::2]
            return acc / torch.tensor(1027.0)

        r = torch.ones(1) / (lanes(x[t], x[t]) + torch.tensor(1e-5)).sqrt()
        g, scaled = dy[t] * w, x[t] * r
        assert digest(fma_f32(-scaled, lanes(g, scaled), g) * r) == digest(dx[t])
        rows.append(scaled)
    assert digest(fma_f32(dy[1], rows[1], fma_f32(dy[0], rows[0], 0.0)) + 0.0) == digest(dw)


def test_embedding_gradients_add_in_token_order() -> None:
    big = 2.0**24
    dh = torch.tensor([[big], [1.0], [-big], [1.0]])
    assert embedding_backward_ref(dh, torch.tensor([1, 1, 1, 1]), 2).tolist() == [[0.0], [1.0]]  # big + 1 = big
    assert embedding_backward_ref(dh[[0, 2, 1, 3]], torch.tensor([1, 1, 1, 1]), 2).tolist() == [[0.0], [2.0]]
    assert str(embedding_backward_ref(-torch.zeros(1, 1), torch.tensor([0]), 1).item()) == "0.0"  # from +0


def scalar_attention_gradients(do, o, q, k, v, group: int, picked: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of the `picked` tokens of one sequence [T, H, D], one scalar operation after the other, as the docstring says."""
    (tokens, heads, dim), scale, zero = q.shape, score_scale(q.shape[2]), torch.zeros(())

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = zero
        for x, y in zip(a, b, strict=True):
            acc = fma_f32(x, y, acc)
        return acc

    def blocked(terms: dict[int, tuple]) -> torch.Tensor:
        total = zero
        for start in range(0, tokens, 64):
            acc = zero
            for i in range(start, min(start + 64, tokens)):
                if i in terms:
                    acc = fma_f32(*terms[i], acc)
            total = total + acc
        return total

    p, ds = torch.zeros(heads, tokens, tokens), torch.zeros(heads, tokens, tokens)
    for h in range(heads):
        for t in range(tokens):
            s = torch.stack([chain(q[t, h], k[j, h // group]) * scale for j in range(t + 1)])
            e = exp_ref(s - s.max())
            p[h, t, : t + 1] = e / blocked({j: (e[j], torch.ones(())) for j in range(t + 1)})
            delta = chain(do[t, h], o[t, h])
            for j in range(t + 1):
                ds[h, t, j] = (p[h, t, j] * (chain(do[t, h], v[j, h // group]) - delta)) * scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for d in range(dim):
        for h in range(heads):
            for t in picked:
                dq[t, h, d] = blocked({j: (ds[h, t, j], k[j, h // group, d]) for j in range(t + 1)})
        for j in picked:
            for out, left, right in ((dk, ds, q), (dv, p, do)):
                for g in range(k.shape[1]):
                    parts = [blocked({t: (left[h, t, j], right[t, h, d]) for t in range(j, tokens)}) for h in range(g * group, (g + 1) * group)]
                    total = parts[0]
                    for part in parts[1:]:
                        total = total + part
                    out[j, g, d] = total
    return dq[picked], dk[picked], dv[picked]


def test_attention_gradients_follow_the_written_order_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of keys (65 tokens) in a group of two heads."""
    do, q, k, v = bells((1, 65, 2, 2), (1, 65, 2, 2), (1, 65, 1, 2), (1, 65, 1, 2))
    o = forward(q, k, v)
    picked = [0, 1, 40, 63, 64]
    want = [digest(x) for x in scalar_attention_gradients(do[0], o[0], q[0], k[0], v[0], 2, picked)]
    assert [digest(x[0, picked]) for x in attention_backward_ref(do, o, q, k, v)] == want
    monkeypatch.setattr(attention_module, "BLOCK_KEYS", 32)
    assert all(digest(x[0, picked]) != y for x, y in zip(attention_backward_ref(do, o, q, k, v), want, strict=True)), "another order must show"


def test_the_backward_pass_recomputes_the_forward_pass_s_weights() -> None:
    """With v the identity the forward pass returns p; with do one unit vector at query t the gradient of v is p's row t."""
    q, k = bells((1, 80, 1, 80), (1, 80, 1, 80))
    v = torch.eye(80).view(1, 80, 1, 80)
    p = forward(q, k, v)
    for t in (0, 63, 64, 79):
        do = torch.zeros(1, 80, 1, 80)
        do[0, t, 0, 0] = 1.0
        dv = attention_backward_ref(do, p, q, k, v)[2]
        assert digest(dv[0, :, 0, 0].contiguous()) == digest(p[0, t, 0].contiguous())


def test_later_tokens_and_other_sequences_change_no_query_gradient() -> None:
    do, q, k, v = bells((2, 70, 2, 8), (2, 70, 2, 8), (2, 70, 1, 8), (2, 70, 1, 8))
    whole = attention_backward_ref(do, forward(q, k, v), q, k, v)
    alone = [x[1:] for x in (do, q, k, v)]
    assert [digest(x) for x in attention_backward_ref(alone[0], forward(*alone[1:]), *alone[1:])] == [digest(x[1:].contiguous()) for x in whole]
    short = [x[:, :65] for x in (do, q, k, v)]
    assert digest(attention_backward_ref(short[0], forward(*short[1:]), *short[1:])[0]) == digest(whole[0][:, :65].contiguous())


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_engines_change_no_bit(threads: int) -> None:
    dy, x, w = bells((300, 24), (300, 40), (24, 40))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = [digest(g) for engine in ("auto", "torch") for g in linear_backward_ref(dy, x, w, engine=engine)]
    finally:
        torch.set_num_threads(before)
    assert got[:2] == got[2:] == [digest(g) for g in linear_backward_ref(dy, x, w)]
