"""Claims about softmax, log-softmax and cross-entropy on the CPU."""

import math

import pytest
import torch

from kernels.exact import exp_ref, philox_bell
from kernels.exact.activations import log_ref
from kernels.exact.softmax import cross_entropy_ref, log_softmax_ref, softmax_ref, token_losses_ref

INF, NAN = math.inf, math.nan
SHAPES_MV = [(3, 1), (2, 5), (3, 1024), (2, 2500)]  # one element; less than a lane each; whole steps; a short last step


def roundings(v: int) -> float:
    """Relative error of l in units of 2^-24: exp (2), chain and tree, each addition one rounding (the terms are positive)."""
    return 2 + math.ceil(v / 1024) + 10


def by_the_text(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x - m, l), one number at a time."""
    shifted = row - max(row.tolist())
    lanes = [torch.tensor(0.0) for _ in range(1024)]
    for v, s in enumerate(shifted):
        lanes[v % 1024] = lanes[v % 1024] + exp_ref(s)
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    return shifted, lanes[0]


@pytest.mark.parametrize("m, v", SHAPES_MV)
def test_values_have_the_stated_order_bit_for_bit(m: int, v: int) -> None:
    x = philox_bell((m, v), 1, scale_log2=2)
    for i in range(min(m, 2)):
        shifted, total = by_the_text(x[i])
        assert torch.equal(softmax_ref(x)[i], exp_ref(shifted) / total)
        assert torch.equal(log_softmax_ref(x)[i], shifted - log_ref(total))
        assert float(token_losses_ref(x, torch.full((m,), v - 1))[i]) == float(log_ref(total) - shifted[v - 1])


@pytest.mark.parametrize("m, v", SHAPES_MV)
def test_values_are_near_float64(m: int, v: int) -> None:
    x = philox_bell((m, v), 2, scale_log2=3)
    widest = float(x.max() - x.min())
    want = torch.softmax(x.double(), 1)
    # x - m is rounded by at most widest 2^-24; then p, l and the division
    assert float(((softmax_ref(x) - want).abs() / want).max()) <= (widest + 2 + roundings(v) + 1) * 2.0**-24
    # log: a relative error of l is an absolute one of log(l), plus an ulp of at most 16, plus the last rounding
    assert float((log_softmax_ref(x) - torch.log_softmax(x.double(), 1)).abs().max()) <= (2 * widest + roundings(v) + 16 + widest + 16) * 2.0**-24


def test_the_mean_loss_is_a_chain_in_token_order_over_the_counted_tokens() -> None:
    x, target = philox_bell((50, 33), 3, scale_log2=2), torch.arange(50) % 33
    target[[4, 49]] = -100
    losses = token_losses_ref(x, target)
    total = torch.tensor(0.0)
    for i in range(50):
        total = total + losses[i] if int(target[i]) != -100 else total
    assert float(cross_entropy_ref(x, target)) == float(total / torch.tensor(48.0))
    assert losses[[4, 49]].tolist() == [0.0, 0.0]
    # 50 additions of positive terms and one division beside the losses' own errors (bounded above by 64 here)
    want = torch.nn.functional.cross_entropy(x.double(), target)
    assert abs(float(cross_entropy_ref(x, target)) / float(want) - 1) <= (51 + 64) * 2.0**-24
    assert float(cross_entropy_ref(x, target.int(), ignore_index=7)) != float(cross_entropy_ref(x, target))


def test_special_rows_are_what_ieee_arithmetic_says() -> None:
    x = torch.tensor([[0.0, -INF, 0.0], [1.0, NAN, 0.0], [INF, 1.0, 2.0], [-INF, -INF, -INF], [-0.0, 0.0, -200.0]])
    y = softmax_ref(x)
    assert y[0].tolist() == [0.5, 0.0, 0.5] and y[4].tolist() == [0.5, 0.5, 0.0] and bool(y[1:4].isnan().all())
    assert log_softmax_ref(x)[0, 1] == -INF and bool(log_softmax_ref(x)[1:4].isnan().all())
    assert softmax_ref(torch.tensor([[-0.0]])).tolist() == [[1.0]] and log_softmax_ref(torch.tensor([[-0.0]])).tolist() == [[0.0]]
    assert token_losses_ref(x, torch.tensor([1, 0, 0, 0, -100])).tolist()[0] == INF


def test_a_target_outside_the_vocabulary_is_nan_and_no_target_left_is_nan() -> None:
    x = torch.zeros(4, 3)
    assert token_losses_ref(x, torch.tensor([3, -1, 2**40, 2])).isnan().tolist() == [True, True, True, False]
    assert math.isnan(cross_entropy_ref(x, torch.full((4,), -100))) and math.isnan(cross_entropy_ref(x[:0], torch.zeros(0, dtype=torch.int64)))
    assert softmax_ref(x[:0]).shape == (0, 3)


def test_views_and_other_dtypes_are_right() -> None:
    x = philox_bell((4, 60), 4, torch.bfloat16)
    assert torch.equal(softmax_ref(x), softmax_ref(x.float(), out_dtype=torch.bfloat16)) and softmax_ref(x).dtype == torch.bfloat16
    assert torch.equal(softmax_ref(x[:, 10:30]), softmax_ref(x[:, 10:30].contiguous()))
    assert torch.equal(log_softmax_ref(x.T.contiguous().T), log_softmax_ref(x))


@pytest.mark.parametrize("x, target, message", [
    (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "flatten"), (torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), "0 < V"),
    (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), "one int32"), (torch.zeros(3, 2), torch.zeros(3), "one int32"),
    (torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), "convert"),
])  # fmt: skip
def test_wrong_operands_are_named(x: torch.Tensor, target: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy_ref(x, target)
