"""Log-loss, normalised entropy, AUC and paired changes against numbers by hand and against their definitions."""

import math

import pytest
import torch

from studies.loka.pricing.metrics import auc, detectable_change, log_loss, losses, normalised_entropy, relative_change

# Coverage of a 95% interval in 400 repetitions: 380 on average, standard deviation sqrt(400 x 0.95 x 0.05) = 4.4; four of them either way.
REPEATS, COVERED = 400, (362, 397)


def test_losses_of_labels_and_of_probabilities_by_hand():
    z = torch.tensor([0.0, math.log(3.0)])
    found = losses(z, torch.tensor([1.0, 0.25]))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.log(2), -0.25 * math.log(0.75) - 0.75 * math.log(0.25)], rel=1e-7)
    assert log_loss(z, torch.tensor([1.0, 0.25])) == pytest.approx(float(found.mean()), rel=1e-12)


def test_losses_of_large_logits_neither_overflow_nor_vanish():
    assert losses(torch.tensor([1000.0, -1000.0]), torch.tensor([0.0, 0.0])).tolist() == [1000.0, 0.0]


def test_an_expected_loss_is_the_mean_over_labels():
    z, p = torch.tensor([0.3, -2.0]), torch.tensor([0.2, 0.7], dtype=torch.float64)
    ones, zeros = losses(z, torch.ones(2)), losses(z, torch.zeros(2))
    assert torch.allclose(losses(z, p), p * ones + (1 - p) * zeros, rtol=1e-14)


def test_normalised_entropy_by_hand_and_its_relation_to_the_log_loss():
    y = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert normalised_entropy(torch.full((4,), 0.25), y) == pytest.approx(1.0, rel=1e-12)
    by_hand = (-math.log2(0.5) - 3 * math.log2(0.9)) / (-math.log2(0.25) - 3 * math.log2(0.75))
    assert normalised_entropy(torch.tensor([0.5, 0.1, 0.1, 0.1], dtype=torch.float64), y) == pytest.approx(by_hand, rel=1e-12)
    a, b = torch.tensor([0.1, -1.0, -2.0, 0.4], dtype=torch.float64), torch.tensor([0.5, -1.5, -2.0, 0.0], dtype=torch.float64)
    ratio = normalised_entropy(a.sigmoid(), y) / normalised_entropy(b.sigmoid(), y)
    assert ratio == pytest.approx(log_loss(a, y) / log_loss(b, y), rel=1e-12)


def test_normalised_entropy_clamps_as_torchrec_does():
    found = normalised_entropy(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 0.0]))
    assert found == pytest.approx((-math.log2(1e-12) + 1) / 2, rel=1e-9)


def test_auc_with_ties_equals_counting_pairs():
    generator = torch.Generator().manual_seed(1)
    scores, y = torch.randint(0, 9, (200,), generator=generator), torch.randint(0, 2, (200,), generator=generator)
    pairs = scores[y == 1][:, None] - scores[y == 0][None]
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()
    assert auc(scores.float(), y.float()) == pytest.approx(float(expected), rel=1e-12)


def test_auc_of_perfect_reversed_and_constant_scores():
    y = torch.tensor([0.0, 0.0, 1.0])
    assert [auc(s, y) for s in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0]), torch.ones(3))] == [1.0, 0.0, 0.5]


def test_a_relative_change_is_the_ratio_of_means():
    a, b = torch.tensor([1.1, 2.0, 3.3]), torch.tensor([1.0, 2.0, 3.0])
    assert relative_change(a, b).value == pytest.approx(0.4 / 6.0, rel=1e-6)


def test_the_interval_of_a_relative_change_covers():
    generator = torch.Generator().manual_seed(2)
    inside = 0
    for _ in range(REPEATS):
        b = torch.empty(300, dtype=torch.float64).exponential_(generator=generator)
        a = b * (1.05 + 0.2 * torch.randn(300, generator=generator, dtype=torch.float64))
        interval = relative_change(a, b)
        inside += interval.low <= 0.05 <= interval.high
    assert COVERED[0] <= inside <= COVERED[1]


def test_pairing_shows_what_unpaired_examples_hide():
    generator = torch.Generator().manual_seed(3)
    b = torch.empty(5000, dtype=torch.float64).exponential_(generator=generator)
    a = b * (1.001 + 0.001 * torch.randn(5000, generator=generator, dtype=torch.float64))
    assert relative_change(a, b).low > 0.0009
    assert detectable_change(a, b) < 1e-4 < 0.01 < detectable_change(a, b.flip(0))


def test_the_detectable_change_is_seen_in_four_of_five_samples():
    generator = torch.Generator().manual_seed(4)

    def draw(change):
        b = 1 + torch.rand(200, generator=generator, dtype=torch.float64)
        return b * (1 + change + 0.05 * torch.randn(200, generator=generator, dtype=torch.float64)), b

    size = detectable_change(*draw(0.0))
    seen = sum(relative_change(*draw(size)).low > 0 for _ in range(REPEATS))
    # 80% of 400 is 320 +- 8; the size itself is estimated from 200 numbers, 5% of 2.8 standard errors, which moves the power by 4 points
    assert 320 - 4 * 8 - 16 <= seen <= 320 + 4 * 8 + 16


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: losses(torch.zeros(2, 1), torch.zeros(2)), "one number an example"),
        (lambda: losses(torch.zeros(2), torch.tensor([0.5, 1.5])), "a label or a probability"),
        (lambda: losses(torch.zeros(2), torch.tensor([0.5, math.nan])), "a label or a probability"),
        (lambda: log_loss(torch.zeros(0), torch.zeros(0)), "needs an example"),
        (lambda: normalised_entropy(torch.zeros(0), torch.zeros(0)), "needs an example"),
        (lambda: auc(torch.zeros(3), torch.ones(3)), "both classes"),
        (lambda: relative_change(torch.ones(1), torch.ones(1)), "two examples"),
        (lambda: relative_change(torch.ones(3), torch.zeros(3)), "baseline above 0"),
    ],
)
def test_what_has_no_value_is_refused(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
