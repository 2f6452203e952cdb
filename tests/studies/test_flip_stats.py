"""The numbers of the flip study against cases worked out by hand."""

import math

import numpy as np
import pytest

from studies.determinism import flip_stats


def test_a_flip_is_the_first_token_that_differs_before_the_earlier_end():
    a, b = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 0, 7]]), np.array([[1, 2, 3, 4], [1, 2, 8, 8], [1, 2, 8, 8], [1, 2, 0, 5]])
    ends_a, ends_b = np.array([4, 4, 4, 3]), np.array([4, 4, 4, 3])
    assert flip_stats.first_flips(a, b, ends_a, ends_b).tolist() == [-1, 2, 1, -1]  # the last: both ended before


def test_runs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="same prompts and steps"):
        flip_stats.first_flips(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros(2), np.zeros(2))


def run(tokens, gap, ends, top1=None) -> dict[str, np.ndarray]:
    return {"tokens": np.array(tokens), "gap": np.array(gap), "ends": np.array(ends), "top1": np.array(top1 if top1 is not None else gap)}


def test_a_pair_of_batches_against_numbers_by_hand():
    a = run([[1, 2, 3], [1, 2, 3], [4, 4, 4]], [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], [3, 3, 2])
    b = run([[1, 2, 9], [1, 9, 9], [4, 4, 5]], [[9, 9, 9]] * 3, [3, 3, 2])
    pair = flip_stats.compared(a, b)
    assert (pair.prompts, pair.diverged, pair.median_div_index) == (3, 2, 1.5)  # flips at 2 and 1; the third ended before it differs
    assert pair.median_gap_at_flip == pytest.approx(0.4) and pair.gap_at_flip_90 == pytest.approx(0.3 + 0.9 * 0.2)  # of 0.3 and 0.5
    assert pair.median_gap == pytest.approx(0.45)  # of 0.1 to 0.8: the ninth token is after an end


def test_without_a_flip_there_is_no_index_and_no_gap():
    a = run([[1, 2]], [[0.5, 0.7]], [2])
    pair = flip_stats.compared(a, a)
    assert pair.diverged == 0 and math.isnan(pair.median_div_index) and math.isnan(pair.median_gap_at_flip)


def test_the_spread_of_the_highest_probability_is_read_before_texts_part():
    tokens = [np.array([[1, 2, 3], [1, 2, 3], [7, 7, 7]]), np.array([[1, 2, 9], [1, 2, 3], [8, 7, 7]])]
    ends = [np.array([3, 2, 3])] * 2
    steps = flip_stats.compared_steps(tokens, ends)
    assert steps.tolist() == [2, 2, 0]
    top1 = [np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]), np.array([[0.7, 0.5, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]])]
    # the sample standard deviation of two numbers is their distance over sqrt(2); the third prompt has no common step
    assert flip_stats.std_of_top1(top1, steps) == pytest.approx([0.2 / math.sqrt(2) / 2, 0.0])


def test_three_batches_count_steps_until_any_of_them_parts():
    tokens = [np.array([[1, 2, 3, 4]]), np.array([[1, 2, 3, 9]]), np.array([[1, 9, 3, 4]])]
    assert flip_stats.compared_steps(tokens, [np.array([4])] * 3).tolist() == [1]


def test_the_share_still_equal_falls_at_the_flip():
    assert flip_stats.still_equal(np.array([-1, 2, 0, 3]), (1, 2, 3, 4)) == [0.75, 0.75, 0.5, 0.25]


def test_labels_that_change_and_the_spread_of_accuracy():
    margins = [np.array([1.0, -1.0, 0.1]), np.array([1.0, -1.0, -0.1]), np.array([1.5, -1.0, -0.1])]
    assert flip_stats.labels_that_change(margins) == 1 and flip_stats.largest_change(margins) == pytest.approx(0.5)
    assert flip_stats.std_of_accuracy([0.5, 0.7]) == pytest.approx(0.2 / math.sqrt(2)) and math.isnan(flip_stats.std_of_accuracy([0.5]))
