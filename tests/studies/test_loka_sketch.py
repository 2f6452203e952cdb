"""Sketches of parts, merged in any way, are the sketch of the whole; their counts are those of the tensor."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.loka.probing.distributions import draw
from studies.loka.probing.reservoir import chosen, sample
from studies.loka.probing.sketch import RMS_BINS, Sketch, look, sketch

# Sums in float64 of n numbers in another order differ by n 2^-53 of the sum of magnitudes at most; column sums of squares are float32 within a step.
SUM_RTOL, COLUMN_RTOL = 1e-10, 1e-5
# A uniform sample of 64 of 512 rows holds each with p = 1/8: over 300 seeds 37.5 times, standard deviation sqrt(300 p (1 - p)) = 5.7; 512 rows reach 3.3
# of them (the expected largest of 512 normal numbers), 5.5 with a probability below 2e-5.
HELD = (37.5 - 5.5 * 5.7, 37.5 + 5.5 * 5.7)


def same(a: Sketch, b: Sketch) -> None:
    x, y = a.to_arrays(), b.to_arrays()
    assert x.keys() == y.keys()
    for name in x:
        if name in ("mean", "deviations", "log2_rms", "column_log2_amax", "column_squares"):
            np.testing.assert_allclose(x[name], y[name], rtol=SUM_RTOL, atol=SUM_RTOL, err_msg=name)
        else:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def parts(seed: int, sizes: list[int], dtype=torch.float32) -> list[Sketch]:
    return [sketch(draw("row-scaled", n, 16, seed=seed + i).to(dtype), step=i, items=32, seed=5) for i, n in enumerate(sizes)]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_merging_is_associative_and_commutative(sizes, seed):
    a, b, c = parts(seed, sizes)
    whole = a.merge(b).merge(c)
    same(whole, a.merge(b.merge(c)))
    for order in itertools.permutations((a, b, c)):
        same(whole, order[0].merge(order[1]).merge(order[2]))


def test_a_merged_sketch_says_of_both_what_one_pass_says():
    x, y = draw("outliers", 200, 32, seed=1), draw("row-scaled", 300, 32, seed=2)
    merged, once = sketch(x, step=0).merge(sketch(y, step=1)), sketch(torch.cat([x, y]), step=0)
    for name in ("exponents", "norms"):
        assert torch.equal(getattr(merged, name), getattr(once, name))
    assert (merged.count, merged.zeros, merged.rows) == (once.count, once.zeros, once.rows)
    both = torch.cat([x, y]).double()
    assert merged.mean == pytest.approx(float(both.mean()), rel=SUM_RTOL)
    assert merged.variance == pytest.approx(float(both.var(correction=0)), rel=SUM_RTOL)
    assert merged.amax.tolist() == [float(x.abs().max()), float(y.abs().max())]
    torch.testing.assert_close(merged.column_squares, both.square().sum(0), rtol=COLUMN_RTOL, atol=0)
    expected = (x.abs().amax(0).double().log2() + y.abs().amax(0).double().log2()) / 2
    torch.testing.assert_close(merged.column_amax.log2(), expected, rtol=0, atol=1e-12)


def test_exponents_tell_the_share_that_a_scale_flushes():
    x = draw("row-scaled", 400, 64, seed=3)
    assert sketch(x, step=0).share_below(2.0**-10) == pytest.approx(float((x.abs() < 2.0**-10).double().mean()), rel=1e-12)


def test_row_norms_land_in_the_bin_of_their_rms_and_crest():
    x = torch.zeros(3, 16)
    x[0], x[1, 0] = 2.0**-5, 8.0  # rms 2^-5, crest 1; rms 8 / 4 = 2, crest 4; and a row of zeros
    found = sketch(x, step=0)
    assert found.norms.sum() == 2 and int(found.live_rows) == 2 and found.rows == 3
    assert found.norms[RMS_BINS // 2 - 10, 0] == 1 and found.norms[RMS_BINS // 2 + 2, 4] == 1


def test_what_is_not_finite_is_counted_and_left_out():
    x = draw("gaussian", 8, 16, seed=4)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    found, rest = sketch(x, step=0), torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    assert found.nonfinite == 3 and found.count == 8 * 16 - 3
    assert float(found.amax) == float(rest.abs().max())
    squares = rest.double().square().sum(0)
    squares[:3] = 0  # columns that held them are left out of this step
    torch.testing.assert_close(found.column_squares, squares, rtol=COLUMN_RTOL, atol=0)
    assert found.column_steps.tolist() == 3 * [0] + 13 * [1]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (1, 1)])
def test_empty_and_single_operands_have_sketches(shape):
    found = sketch(torch.zeros(shape), step=0)
    assert found.count == found.zeros == math.prod(shape) and float(found.amax) == 0 and found.rows == shape[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])  # items travel in the dtype that was read
def test_a_sketch_survives_its_arrays(dtype, tmp_path):
    before = parts(7, [40, 20, 5], dtype)[0]
    np.savez(tmp_path / "s.npz", **before.to_arrays())
    with np.load(tmp_path / "s.npz", allow_pickle=False) as stored:
        after = Sketch.from_arrays(dict(stored))
    same(before, after)
    assert after.reservoir.items.dtype == dtype and torch.equal(after.reservoir.items, before.reservoir.items)


def test_a_reservoir_holds_every_row_equally_often():
    held = torch.zeros(512)
    x = torch.arange(512.0).view(-1, 1, 1)
    for seed in range(300):
        halves = [sample(x[i : i + 256], step=i, capacity=64, seed=seed) for i in (0, 256)]
        held[halves[0].merge(halves[1]).items.flatten().long()] += 1
    assert held.sum() == 300 * 64 and HELD[0] < held.min() and held.max() < HELD[1]


def test_operands_of_one_step_keep_the_same_rows():
    x, dy = torch.arange(4096.0).view(-1, 1), -torch.arange(4096.0).view(-1, 1)
    a = sketch(x[:2048], step=3, seed=9).merge(sketch(x[2048:], step=4, seed=9))
    b = sketch(dy[:2048], step=3, seed=9).merge(sketch(dy[2048:], step=4, seed=9))
    assert torch.equal(a.reservoir.items, -b.reservoir.items) and len(a.reservoir) == 512
    assert 0 < int((a.reservoir.steps == 3).sum()) < 512


def test_rows_that_would_not_be_kept_need_not_be_read():
    steps = [sketch(draw("gaussian", 5000, 4, seed=i), step=i, items=64) for i in range(4)]
    kept, x = steps[0].merge(steps[1]).merge(steps[2]).merge(steps[3]), draw("gaussian", 5000, 4, seed=4)
    whole, less = (look(x, step=4, items=64, below=bound) for bound in (None, kept.reservoir.bound))
    assert len(less.items) < len(whole.items) == 64  # 16 expected
    same(kept.merge(whole.sketch()), kept.merge(less.sketch()))


def test_a_later_step_replaces_the_rows_of_a_parameter():
    old, new = sketch(torch.ones(700, 8), step=1, parameter=True), sketch(2 * torch.ones(700, 8), step=2, parameter=True)
    for merged in (old.merge(new), new.merge(old)):
        assert len(merged.reservoir) == 700 and torch.equal(merged.reservoir.items, torch.full((700, 1, 8), 2.0))


def test_a_batched_operand_is_kept_as_whole_matrices():
    x = draw("gaussian", 40 * 24, 16, seed=5).view(40, 24, 16)
    kept = sketch(x, step=0, items=5, form="matrices").reservoir
    assert kept.items.shape == (5, 24, 16) and all(torch.equal(m, x[i]) for m, i in zip(kept.items, kept.index, strict=True))


def test_layers_keep_an_examples_rows_together_and_columns_of_each_layer():
    x = draw("student-t3", 40 * 3, 16, seed=6).view(40, 3, 16)
    found = sketch(x, step=0, items=7, form="layers")
    assert all(torch.equal(item, x[i]) for item, i in zip(found.reservoir.items, found.reservoir.index, strict=True))
    torch.testing.assert_close(found.column_amax, x.abs().amax(0).double().flatten(), rtol=1e-14, atol=0)


def test_keys_are_distinct_over_steps():
    found = [chosen(4000, step=step, capacity=4000, seed=0, fixed=fixed) for step, fixed in ((0, True), (0, False), (1, False), (2**33, False))]
    keys = torch.cat([k for k, _ in found])
    assert len(keys.unique()) == len(keys) and int(keys.min()) >= 0 and all(len(i.unique()) == 4000 for _, i in found)


def test_the_smallest_keys_of_many_items_are_order_statistics_on_distinct_items():
    """The 256th smallest of 100,000 uniform numbers: mean 256 / 100,001, standard deviation a sixteenth of it; over 200 seeds within four errors."""
    found = [chosen(100_000, step=3, capacity=256, seed=seed) for seed in range(200)]
    assert all(len(i.unique()) == 256 and int(i.max()) < 100_000 and bool((k[1:] > k[:-1]).all()) for k, i in found)
    mean = sum(float(k[-1]) for k, _ in found) / 200 / 2**62
    assert mean == pytest.approx(256 / 100_001, rel=4 / 16 / 200**0.5)
    indices = torch.cat([i for _, i in found]).double()
    assert float(indices.mean()) == pytest.approx(50_000, abs=4 * 100_000 / (12 * 200 * 256) ** 0.5)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: sketch(torch.zeros(4), step=0), r"rows \[..., C\]"),
        (lambda: sketch(torch.zeros(4, 4, dtype=torch.float64), step=0), "convert it first"),
        (lambda: sketch(torch.zeros(2, 3), step=0).merge(sketch(torch.zeros(2, 4), step=1)), "of one operand"),
        (lambda: sketch(torch.zeros(2, 3), step=0, items=4).merge(sketch(torch.zeros(2, 3), step=1, items=8)), "same capacity"),
        (lambda: sketch(torch.zeros(2, 3), step=0).share_below(0.3), "power of two"),
        (lambda: Sketch.from_arrays({}), "got none of"),
        (lambda: sample(torch.zeros(2, 3), step=0, capacity=1, seed=0), r"items \[I, R, C\]"),
    ],
)
def test_what_is_no_operand_is_refused(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
