"""Claims: the reference is causal attention of each sequence's own tokens, with torch's numbers and gradients; a sequence's bits are its own.

    NEAR    both are float64 with at most T + D = 200 terms a sum of numbers of order one: 200 2^-53 = 2e-14, times 50 for products of three factors
"""

import math

import pytest
import torch

from kernels.exact.audit.specimen import captured
from kernels.exact.philox import philox_bell
from kernels.lora.attention import HEAD_DIMS, AttentionSchedule, attention_backward, attention_forward, causal_attention, causal_attention_ref, schedules

NEAR = 1e-12


def operands(batch: int, tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [philox_bell((batch, tokens, h, dim), i).to(dtype).requires_grad_() for i, h in enumerate((heads, groups, groups, heads))]


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, lengths: torch.Tensor | None = None) -> list[torch.Tensor]:
    o = causal_attention_ref(q, k, v, lengths)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.detach())]


# one query head a key head; groups of three, as SmolLM2; one token
@pytest.mark.parametrize("tokens, heads, groups, dim", [(70, 2, 2, 16), (33, 9, 3, 64), (1, 4, 1, 32)])
def test_the_reference_is_torch_s_causal_attention_and_its_gradients(tokens: int, heads: int, groups: int, dim: int) -> None:
    q, k, v, do = operands(2, tokens, heads, groups, dim)
    got = gradients(q, k, v, do)
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
    want = [o, *torch.autograd.grad(o, (q, k, v), do.detach())]
    assert all((a - b).abs().max() <= NEAR for a, b in zip(got, want, strict=True))


def test_what_lies_behind_a_sequence_is_neither_read_nor_written() -> None:
    q, k, v, do = operands(3, 20, 4, 2, 16)
    lengths = torch.tensor([20, 7, 0], dtype=torch.int32)
    clean = gradients(q, k, v, do, lengths)
    for x in (q, k, v, do):
        for b, n in enumerate(lengths.tolist()):
            x.data[b, n:] = math.nan
    poisoned = gradients(q, k, v, do, lengths)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b) and not a[1, 7:].any() and not a[2].any() and a[1, :7].any()


def test_a_sequence_has_in_a_batch_the_bits_that_it_has_alone() -> None:
    q, k, v, do = operands(3, 40, 6, 2, 16, torch.float32)
    lengths = torch.tensor([40, 13, 31], dtype=torch.int32)
    together = gradients(q, k, v, do, lengths)
    for b, n in enumerate(lengths.tolist()):
        own = [x[b : b + 1, :n].detach().clone().requires_grad_() for x in (q, k, v, do)]
        assert all(torch.equal(a[b, :n], c[0]) for a, c in zip(together, gradients(*own), strict=True))


def test_16_bit_operands_are_computed_in_float64_and_rounded_once() -> None:
    q, k, v, _ = (x.detach().bfloat16() for x in operands(2, 9, 2, 1, 16))
    assert torch.equal(causal_attention_ref(q, k, v), causal_attention_ref(q.double(), k.double(), v.double()).bfloat16())
    assert causal_attention_ref(q[:0], k[:0], v[:0]).shape == (0, 9, 2, 16)


def test_schedules_depend_on_the_model_alone() -> None:
    for dim in HEAD_DIMS:
        for dtype in (torch.bfloat16, torch.float32):
            assert set(schedules(dim, dtype)) == {"forward", "query", "key"}
            assert all(isinstance(plan, AttentionSchedule) for plan in schedules(dim, dtype).values())


def test_more_sequences_than_a_grid_s_second_axis_holds_are_served() -> None:
    """CUDA grids have 2^31 - 1 places along their first axis, 65,535 along the others; an evaluation of many short rows has more units."""
    q, k, n = (torch.empty(shape, dtype=kind, device="meta") for shape, kind in (((20_000, 70, 9, 64), torch.bfloat16), ((20_000, 70, 3, 64), torch.bfloat16), ((20_000,), torch.int32)))
    lse = torch.empty(20_000, 9, 70, device="meta")
    launches = captured("many", lambda: (attention_forward(q, k, k, n), attention_backward(q, q, lse, q, k, k, n)), family="elementwise")
    assert [x.grid for x in launches] == [(2 * 9 * 20_000, 1, 1), (2 * 9 * 20_000, 1, 1), (2 * 3 * 20_000, 1, 1)]


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, _ = (x.detach() for x in operands(2, 5, 4, 2, 16, torch.float32))
    for wrong in ((q, k[:, :4], v[:, :4]), (q[:, :, :3], k, v), (q[0], k, v), (q, k, v[:1]), (q[..., :8], k, v)):
        with pytest.raises(ValueError, match="G divides H"):
            causal_attention_ref(*wrong)
    with pytest.raises(ValueError, match="one dtype"):
        causal_attention_ref(q, k.double(), v.double())
    for lengths in (torch.tensor([5], dtype=torch.int32), torch.tensor([5, 5])):
        with pytest.raises(ValueError, match="lengths are int32"):
            causal_attention_ref(q, k, v, lengths)
    for call in (lambda: causal_attention(q, k, v), lambda: attention_forward(q, k, v), lambda: attention_backward(q, q, q[..., 0], q, k, v)):
        with pytest.raises(ValueError, match="runs on a GPU"):
            call()
