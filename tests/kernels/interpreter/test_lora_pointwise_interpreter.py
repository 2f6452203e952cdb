"""Claims about the logic of what stands between a decoder's products, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

U is 2^-24, one rounding of float32. Each bound is relative to the largest element of the result: a chain of `n` roundings and sums of length `c` gives
(n + c) U in the worst case; CHAIN counts the longest one (a norm's backward) with 4 for exp, log and division, which the interpreter takes from numpy.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.exact.rope import rope_tables  # noqa: E402
from kernels.lora.answers import answer_losses, answer_losses_ref, slot_sums, slot_sums_ref  # noqa: E402
from kernels.lora.pointwise import add_norm, add_norm_ref, swiglu, swiglu_ref, turn, turn_ref  # noqa: E402

U, CHAIN = 2.0**-24, 16


def close(mine: torch.Tensor, exact: torch.Tensor, summed: int = 0) -> bool:
    return bool((mine.double() - exact.double()).abs().max() <= (CHAIN + summed) * U * exact.abs().max())


def leaves(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As float32 for the kernels and float64 for the references, both with gradients."""
    return [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]


@pytest.mark.parametrize("columns", [64, 72, 896])  # a power of two, a row's tail, several warps
@pytest.mark.parametrize("added", [True, False])
def test_residual_and_norm_follow_float64_with_gradients_of_both_outputs(columns: int, added: bool) -> None:
    w, dsum, dx = philox_bell((columns,), 3) + 1.0, philox_bell((5, columns), 4), philox_bell((5, columns), 5)
    mine, exact = leaves(philox_bell((5, columns), 1), *([philox_bell((5, columns), 2)] if added else []))
    outs = [add_norm(mine[0], mine[1] if added else None, w, eps=1e-5), add_norm_ref(exact[0], exact[1] if added else None, w.double(), eps=1e-5)]
    for a, b in zip(*outs, strict=True):
        assert close(a, b, columns)
    for out, d in zip(outs, (1, torch.float64), strict=True):
        torch.autograd.backward([*out], [dsum.to(out[0].dtype), dx.to(out[0].dtype)])
    for a, b in zip(mine, exact, strict=True):
        assert close(a.grad, b.grad, columns)
    assert not added or torch.equal(mine[0].grad, mine[1].grad)


def test_a_norm_whose_sum_goes_nowhere_else_has_the_norm_s_gradient_alone() -> None:
    mine, exact = leaves(philox_bell((3, 64), 1), philox_bell((3, 64), 2))
    w = torch.ones(64)
    add_norm(*mine, w, eps=1e-5)[1].sum().backward()
    add_norm_ref(*exact, w.double(), eps=1e-5)[1].sum().backward()
    assert close(mine[0].grad, exact[0].grad, 64)


@pytest.mark.parametrize("heads, groups, dim", [(4, 2, 16), (9, 3, 64), (1, 1, 2)])
def test_turning_follows_float64_and_back_again_is_its_gradient(heads: int, groups: int, dim: int) -> None:
    tokens = 5
    cos, sin = rope_tables(tokens=tokens, head_dim=dim, base=1e4)
    mine, exact = leaves(philox_bell((3 * tokens, heads * dim), 1), philox_bell((3 * tokens, groups * dim), 2))
    outs = turn(*mine, cos, sin), turn_ref(*exact, cos.double(), sin.double())
    d = [philox_bell(tuple(x.shape), 7) for x in mine]
    torch.autograd.backward(outs[0], d)
    torch.autograd.backward(outs[1], [x.double() for x in d])
    for a, b, x, y in zip(*outs, mine, exact, strict=True):
        assert close(a, b) and close(x.grad, y.grad)


def test_swiglu_and_its_gradients_follow_float64_over_a_block_s_edge() -> None:
    mine, exact = leaves(4 * philox_bell((9, 131), 1), philox_bell((9, 131), 2))
    dy = philox_bell((9, 131), 3)
    outs = swiglu(*mine), swiglu_ref(*exact)
    outs[0].backward(dy)
    outs[1].backward(dy.double())
    assert close(*outs) and all(close(a.grad, b.grad) for a, b in zip(mine, exact, strict=True))


@pytest.mark.parametrize("vocabulary", [50, 4096, 5000])  # below a block, one block, a tail
def test_answer_losses_and_their_gradient_follow_float64(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, head = philox_bell((7, 32), 1), philox_bell((vocabulary, 32), 2)
    targets = torch.from_numpy(philox_integers(7, 3).astype("int64") % vocabulary)
    targets[[1, 4]] = -1
    x[4] = float("nan")  # a place without an answer may hold anything
    choices = torch.tensor([3, 1, 40])
    exact = answer_losses_ref(x.double(), head.double(), targets, choices_C=choices)
    whole = answer_losses(x, head, targets, choices_C=choices)
    rows = [0, 1, 2, 3, 5, 6]
    for mine, want in zip(whole[:2], exact[:2], strict=True):
        assert close(mine, want, 32 + vocabulary // 32) and not mine[1].any() and not mine[4].any()
    assert torch.equal(whole[2][rows], exact[2][rows])
    monkeypatch.setattr("kernels.lora.answers.MOST_LOGITS", 3 * vocabulary)
    pieces = answer_losses(x, head, targets, choices_C=choices)
    assert close(pieces[0], whole[0], 32) and close(pieces[1], whole[1], 32) and torch.equal(pieces[2][rows], whole[2][rows])
    looked = answer_losses(x, head, targets, learn=False)
    assert torch.equal(looked[0], pieces[0]) and looked[1] is None and looked[2] is None


def test_a_slot_s_sum_is_its_own() -> None:
    values, offsets = philox_bell((9 * 300,), 1), torch.tensor([0, 2 * 16, 2 * 16, 9 * 16], dtype=torch.int32)
    found = slot_sums(values, offsets, tokens=16, answers=300)
    assert close(found, slot_sums_ref(values.double(), offsets, tokens=16, answers=300), 3)
    values[600:] = float("nan")
    again = slot_sums(values, offsets, tokens=16, answers=300)
    assert torch.equal(again[:2], found[:2]) and again[1] == 0 and again[2].isnan()
