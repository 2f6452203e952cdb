"""Claims about the logic of the training step's kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

    U          2^-24, one rounding of float32 relative to what is rounded
    gamma(n)   (n + 4) U: a float32 sum of n products in any order, relative to the sum of magnitudes (Higham 2002, 3.1)
    ATTENTION  (2 D + T + 8) U max|v|, times |do| where it is a gradient and 16 for its three products: scores of order one carry gamma(D), so p
               does, and the sums over T of p (which add up to 1) times v carry gamma(T) more
    HALF_DB    float16 against float64: p or ds, the result and (in gradients) o are rounded to 11 bits, each 10 log10(3 2^22) = 71.0 dB at worst, so
               four roundings leave 71.0 - 6.0; bf16, whose products the interpreter cannot do, has 18.1 dB less
    NORM       sums of squares in float32: gamma(rank rows + columns of a tile + matrices)
The update itself rounds every operation as its reference does, so its bits are equal, given the same factor.
"""

import math
import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell  # noqa: E402
from kernels.lora import optimizer as step_module  # noqa: E402
from kernels.lora.attention import attention_backward, attention_forward, causal_attention, causal_attention_ref  # noqa: E402
from kernels.lora.dropout import Dropout  # noqa: E402
from kernels.lora.dropped import dropped, dropped_rows_ref  # noqa: E402
from kernels.lora.fixed_gemm import fixed_dgrad, fixed_dgrad_ref, fixed_linear, fixed_linear_ref  # noqa: E402
from kernels.lora.optimizer import AdamState, SlotStep, adamw_step  # noqa: E402
from kernels.lora.segments import Segments  # noqa: E402

U = 2.0**-24
HALF_DB = 65.0
NAN = math.nan


# ---- attention -----------------------------------------------------------------------------------------------------------------


def operands(batch: int, tokens: int, heads: int, groups: int, dim: int) -> list[torch.Tensor]:
    """q, k and v as views of one tensor, as a fused projection leaves them; do."""
    qkv = philox_bell((batch, tokens, heads + 2 * groups, dim), 1)
    return [*qkv.split([heads, groups, groups], dim=2), philox_bell((batch, tokens, heads, dim), 2)]


def all_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, lengths: torch.Tensor | None) -> list[torch.Tensor]:
    o, lse = attention_forward(q, k, v, lengths)
    return [o, *attention_backward(do, o, lse, q, k, v, lengths)]


# several tiles of 32 queries and keys, ragged; groups of two; lengths inside a tile, at its edge, none; one token
@pytest.mark.parametrize(
    "tokens, heads, groups, dim, lengths", [(70, 2, 1, 16, (70, 33)), (64, 2, 2, 32, None), (40, 2, 2, 64, (32, 0)), (1, 1, 1, 16, None), (20, 1, 1, 128, (20, 19))]
)
def test_attention_and_its_gradients_follow_float64(tokens: int, heads: int, groups: int, dim: int, lengths: tuple[int, ...] | None) -> None:
    q, k, v, do = operands(2, tokens, heads, groups, dim)
    n = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    o = causal_attention_ref(*wide, n)
    want = [o, *torch.autograd.grad(o, wide, do.double())]
    bound = (2 * dim + tokens + 8) * U * float(v.abs().max())
    for i, (a, b) in enumerate(zip(all_of(q, k, v, do, n), want, strict=True)):
        assert a.dtype == torch.float32 and (a - b).abs().max() <= bound * (1 if i == 0 else 16 * float(do.abs().max()))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    causal_attention(*leaves, n).backward(do)
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, all_of(q, k, v, do, n)[1:], strict=True))


def test_16_bit_operands_lose_four_roundings_at_most() -> None:
    q, k, v, do = (x.half() for x in operands(1, 70, 2, 1, 32))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    o = causal_attention_ref(*wide)
    for a, b in zip(all_of(q, k, v, do, None), [o.detach(), *torch.autograd.grad(o, wide, do.double())], strict=True):
        assert a.dtype == torch.float16
        assert 10 * math.log10(float(b.square().sum() / (a.double() - b).square().sum())) >= HALF_DB


def test_a_sequence_s_bits_are_its_own_and_what_lies_behind_it_is_never_read() -> None:
    q, k, v, do = operands(3, 50, 2, 1, 16)
    lengths = torch.tensor([50, 37, 12], dtype=torch.int32)
    clean = all_of(q, k, v, do, lengths)
    alone = all_of(*(x[1:2, :37].contiguous() for x in (q, k, v, do)), None)
    poisoned = [x.clone() for x in (q, k, v, do)]
    for x in poisoned:
        x[0], x[1, 37:] = NAN, NAN
    dirty = all_of(*poisoned, lengths)
    for a, b, c in zip(clean, alone, dirty, strict=True):
        assert torch.equal(a[1, :37], b[0]) and torch.equal(a[1:], c[1:]) and c[0].isnan().any() and not a[1, 37:].any()


# ---- base products ---------------------------------------------------------------------------------------------------------------


# ragged in every axis and unaligned rows; one row; several tiles of rows, which stand in groups
@pytest.mark.parametrize("m, k, n", [(70, 40, 33), (1, 13, 200), (600, 24, 65)])
def test_products_are_within_a_sum_s_rounding_and_rows_keep_their_bits(m: int, k: int, n: int) -> None:
    x, w, bias, dy = philox_bell((m, k), 1), philox_bell((n, k), 2), philox_bell((n,), 3), philox_bell((m, n), 4)
    y, dx = fixed_linear(x, w, bias), fixed_dgrad(dy, w)
    sizes = fixed_linear_ref(x.double().abs(), w.double().abs(), bias.double().abs()), fixed_dgrad_ref(dy.double().abs(), w.double().abs())
    wanted = fixed_linear_ref(x.double(), w.double(), bias.double()), fixed_dgrad_ref(dy.double(), w.double())
    for got, want, size, terms in zip((y, dx), wanted, sizes, (k, n), strict=True):
        assert ((got - want).abs() <= (terms + 4) * U * size).all()
    half = slice(m // 2, m)
    assert torch.equal(fixed_linear(x[half], w, bias), y[half]) and torch.equal(fixed_dgrad(dy[half], w), dx[half])
    assert fixed_linear(x[:0], w).shape == (0, n)


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    x, w = philox_bell((9, 16), 1), philox_bell((24, 16), 2)
    y = fixed_linear(x, w)
    x[3] = NAN
    got = fixed_linear(x, w)
    assert got[3].isnan().all() and all(torch.equal(got[i], y[i]) for i in range(9) if i != 3)


# ---- optimizer -------------------------------------------------------------------------------------------------------------------

WIDTHS, RANKS = (13, 1500, 32, 4100), (3, 8, 5)


def filled(ranks: tuple[int, ...] = RANKS, dtype: torch.dtype = torch.float16, first: int = 0) -> AdamState:
    """float16 copies: the interpreter's casts to bf16 do not round as the hardware does."""
    state = AdamState.zeros(widths=WIDTHS, ranks=ranks, device="cpu", compute_dtype=dtype)
    for slot, rank in enumerate(ranks):
        for i, name in enumerate(("master", "grad", "m", "v")):
            x = philox_bell((rank * sum(WIDTHS),), 10 * (first + slot) + i)
            state.write(slot, name, x.abs() if name == "v" else x)
    return state


def everything(state: AdamState, slot: int) -> list[torch.Tensor]:
    return [state.read(slot, name) for name in ("master", "grad", "m", "v", "compute")] + [state.norms[slot]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_update_has_the_reference_s_bits_and_the_norm_its_value(dtype: torch.dtype) -> None:
    got, want = filled(dtype=dtype), filled(dtype=dtype)
    steps = {0: SlotStep(learning_rate=1e-2, step=3, clip=0.5, divisor=3.0), 2: SlotStep(learning_rate=2e-3, step=1, weight_decay=0.1)}
    for state in (got, want):
        state.prepare(steps)
    untouched = everything(got, 1)
    adamw_step(got)
    for slot, step in steps.items():
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.slot_views(slot, "grad"))) / step.divisor
        assert abs(float(got.norms[slot]) - norm) <= (RANKS[slot] + 1024 + len(WIDTHS) + 4) * U * norm
        factor = min(1.0, step.clip / (float(got.norms[slot]) + 1e-6)) / step.divisor
        assert abs(float(got.factors[slot]) - factor) <= 4 * U * factor and (slot == 2) == (factor == 1.0)
        want.factors[slot] = got.factors[slot]
        want.norms[slot] = got.norms[slot]
        step_module.update_ref(want, slot)
    assert all(torch.equal(a, b) for slot in range(3) for a, b in zip(everything(got, slot), everything(want, slot), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(everything(got, 1), untouched, strict=True)), "not due"


def test_a_step_has_the_same_bits_alone_beside_a_nan_and_in_a_wider_slot() -> None:
    pack, alone, wide = filled(), filled(ranks=(8,), first=1), filled(ranks=(2, 64), first=1)
    pack.write(0, "grad", torch.full((RANKS[0] * sum(WIDTHS),), NAN))
    for name in ("master", "grad", "m", "v"):
        rows = [torch.cat([x, x.new_zeros(56, x.shape[1])]) for x in alone.slot_views(0, name)]
        wide.write(1, name, torch.cat([x.reshape(-1) for x in rows]))
    for state, slot in ((pack, 1), (alone, 0), (wide, 1)):
        state.prepare({s: SlotStep(learning_rate=1e-2, step=2, clip=0.5) for s in {0, slot}})
        adamw_step(state)
    assert all(torch.equal(a, b) for a, b in zip(everything(pack, 1), everything(alone, 0), strict=True))
    assert pack.norms[0].isnan() and pack.read(0, "master").isnan().all()
    assert torch.equal(wide.norms[1], alone.norms[0])
    for name in ("master", "m", "v", "compute", "grad"):
        assert all(torch.equal(x[:8], y) and not x[8:].any() for x, y in zip(wide.slot_views(1, name), alone.slot_views(0, name), strict=True))


# ---- dropout --------------------------------------------------------------------------------------------------------------------


def test_the_dropped_copy_is_the_reference_s() -> None:
    seg = Segments.of(rows=[5, 0, 21], ranks=[8, 8, 8], scales=[1.0] * 3, device="cpu")
    dropout = Dropout(p_S=torch.tensor([0.0, 0.1, 0.5]), seed_S=torch.tensor([3, 4, 2**40 + 5]), step_S=torch.tensor([0, 1, 7]), site=2)
    x = philox_bell((26, 150), 1)
    got = dropped(x, seg, dropout)
    assert torch.equal(got, dropped_rows_ref(x, seg, dropout)) and torch.equal(got[:5], x[:5]) and 0.4 < (got[5:] == 0).float().mean() < 0.6
