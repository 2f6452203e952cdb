"""The time model is found again from noisy times, says how far it is off, and the compositions to time fill their ranges."""

import math

import numpy as np
import pytest

from studies.models.config import QWEN25_7B
from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.planning.design import PAPER_BATCHES, PAPER_RANKS, compositions, paper_configurations, shape_json, shape_of, spread
from studies.plora.planning.roofline import assumed
from studies.plora.planning.time_model import StepTable, StepTime, TimeModel, canonical, errors, features, fit, mape
from studies.plora.planning.work import Work, largest_divisor

TRUTH = dict(fixed_s=2e-3, token_s=1e-6, token_rank_s=3e-9, token_position_s=2e-10, slot_s=1e-5)
RANGES = dict(tokens=(64, 128, 256, 512), most_tokens=16384)
# Times with NOISE of relative noise. A fit of p = 5 numbers over n points adds a variance of p / n of it to that of a new point, on average over points
# like the fitted ones: sqrt(1 + 5 / 24) NOISE, of which the mean absolute value is sqrt(2 / pi). Twice that, as held-out points may lie at the edge.
NOISE, FIT = 0.02, 24
MAPE = 2 * NOISE * math.sqrt((1 + 5 / FIT) * 2 / math.pi)
# Without noise the fit is a linear system in double precision, its scaled columns with a condition number below 100 (asserted for the design).
CONDITION, EXACT = 100, 1e-9


def timed(model: TimeModel, shapes: list[PackShape], *, noise: float = 0.0, seed: int = 0) -> list[StepTime]:
    rng = np.random.default_rng(seed)
    return [StepTime(shape=s, seconds=model.seconds(s) * (1 + noise * rng.standard_normal())) for s in shapes]


def test_features_are_those_of_the_formula():
    """N = 2 x 8 + 3 x 8, sum N_i r_i = 16 x 4 + 24 x 128, sum N_i s_i = 40 x 8, two slots."""
    shape = PackShape(tokens=8, slots=(SlotShape(rank=4, rows=2), SlotShape(rank=128, rows=3)))
    assert features(shape).tolist() == [1, 40, 16 * 4 + 24 * 128, 320, 2]
    model = TimeModel(**TRUTH, floor_s=1.0)
    assert model.seconds(shape) == 1.0
    assert TimeModel(**TRUTH).seconds(shape) == pytest.approx(2e-3 + 40e-6 + 3136 * 3e-9 + 320 * 2e-10 + 2e-5, rel=EXACT)


def test_a_fit_without_noise_finds_the_coefficients():
    shapes = spread(12, **RANGES)
    columns = np.array([features(s) for s in shapes])
    assert np.linalg.cond(columns / columns.max(axis=0)) < CONDITION
    found = fit(timed(TimeModel(**TRUTH), shapes), host_s=0.0)
    assert found.coefficients == pytest.approx(TimeModel(**TRUTH).coefficients, rel=EXACT)


# a floor of no time, of the host measured apart, and one that has to be found in the times
@pytest.mark.parametrize(("floor_s", "host_s"), [(0.0, 0.0), (5e-3, 5e-3), (5e-3, None), (0.0, None)])
@pytest.mark.parametrize("seed", range(3))
def test_held_out_errors_are_those_of_the_noise(floor_s, host_s, seed):
    model = TimeModel(**TRUTH, floor_s=floor_s)
    found = fit(timed(model, spread(FIT, **RANGES), noise=NOISE, seed=seed), host_s=host_s)
    off = errors(found, timed(model, spread(24, first=FIT, **RANGES), noise=NOISE, seed=100 + seed))
    interval = mape(off, seed=seed)
    assert interval.value == pytest.approx(np.abs(off).mean()) and interval.low < interval.value < interval.high and interval.n == 24
    assert interval.value < MAPE


def test_a_line_without_a_floor_is_wrong_where_there_is_one():
    """What the floor is for: some of these compositions take 5 ms, however small they are."""
    model = TimeModel(**TRUTH, floor_s=5e-3)
    seen, unseen = timed(model, spread(FIT, **RANGES)), timed(model, spread(24, first=FIT, **RANGES))
    assert sum(p.seconds == 5e-3 for p in seen) > 5
    assert mape(errors(fit(seen, host_s=0.0), unseen)).low > MAPE
    assert mape(errors(fit(seen), unseen)).high < MAPE
    assert fit(seen).floor_s == pytest.approx(5e-3, rel=EXACT)


def test_no_coefficient_is_negative_whatever_the_times():
    rng = np.random.default_rng(5)
    points = [StepTime(shape=s, seconds=float(rng.uniform(1e-3, 1e-1))) for s in spread(12, **RANGES)]
    assert (fit(points).coefficients >= 0).all()


def test_a_table_knows_compositions_whatever_their_order_and_no_others():
    slots = (SlotShape(rank=8), SlotShape(rank=64, rows=2))
    table = StepTable([StepTime(shape=PackShape(tokens=64, slots=slots), seconds=0.5, peak_bytes=7)])
    turned = PackShape(tokens=64, slots=slots[::-1])
    assert turned in table and table.seconds(turned) == 0.5 and table.peak_bytes(turned) == 7 and len(table) == 1
    with pytest.raises(ValueError, match="got none of 64 tokens, rank x rows 8x1"):
        table.seconds(PackShape(tokens=64, slots=slots[:1]))


def test_times_and_shapes_travel_as_json():
    for shape in spread(20, **RANGES):
        assert shape_of(shape_json(shape)) == shape == canonical(shape)
        point = StepTime(shape=shape, seconds=0.25, peak_bytes=11)
        assert StepTime.from_json(point.to_json() | {"noise_floor": 0.01}) == point


def test_a_spread_is_even_has_no_repeats_and_its_parts_do_not_meet():
    shapes = spread(60, **RANGES)
    assert len(set(shapes)) == 60 and spread(20, first=40, **RANGES) == shapes[40:]
    for tokens in RANGES["tokens"]:
        assert 60 / 8 <= sum(s.tokens == tokens for s in shapes) <= 60 / 2  # within 2 of an even share: limits on N cut long ones
    mixed = sum(len(set(s.slots)) > 1 for s in shapes)
    assert 10 <= mixed <= 50
    assert {s.rank for x in shapes for s in x.slots} == set(PAPER_RANKS)
    with pytest.raises(ValueError, match="have enough compositions"):
        spread(40, tokens=(64,), slots=(1,), rows=(1,), ranks=(8, 16), most_tokens=64)


def test_the_papers_configurations_are_120_over_its_ranges():
    found = paper_configurations(budget_tokens=10)
    assert len(set(found)) == 120
    assert {(a.rank, a.batch) for a in found} == {(r, b) for r in PAPER_RANKS for b in PAPER_BATCHES}
    assert min(a.learning_rate for a in found) == 2e-5 and max(a.learning_rate for a in found) == 4e-4
    assert {a.scale for a in found} == {0.25, 1.0, 2.0, 4.0}
    for rate in {a.learning_rate for a in found}:  # a Latin square: no rate goes with one alpha
        assert len({a.scale for a in found if a.learning_rate == rate}) == 4


def test_work_divides_batches_and_counts_micro_steps():
    adapters = tuple(AdapterConfig(rank=8, alpha=8, learning_rate=1e-4, batch=b, budget_tokens=1000) for b in (1, 6, 32))
    work = Work(adapters=adapters, tokens=64, real_tokens=33.0, most_rows=4)
    assert [largest_divisor(b, 4) for b in (1, 6, 32, 7)] == [1, 3, 4, 1]
    assert [work.rows(i) for i in range(3)] == [1, 3, 4]
    assert work.sequences(0) == 31  # 30 sequences are 990 tokens
    assert [work.micro_steps(i) for i in range(3)] == [31, 11, 8]
    assert work.steps((1, 2)) == 11 and work.shape((0, 1, 2)).slots == tuple(SlotShape(rank=8, rows=n) for n in (4, 3, 1))
    assert len(compositions(work)) == 7


def test_the_assumed_model_nears_the_flops_of_a_long_pack_and_the_bytes_of_a_short_one():
    """4 P operations a token at 60% of 989 TFLOP/s, no less, and at most a third more for adapters of rank 16 and attention; weights read twice at 3.84 TB/s."""
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    model = assumed(QWEN25_7B)
    long = PackShape(tokens=512, slots=(SlotShape(rank=16),) * 64)
    ideal_s = 4 * linear * 512 * 64 / (0.6 * 989e12)
    assert ideal_s < model.seconds(long) < 4 / 3 * ideal_s
    assert model.seconds(PackShape(tokens=8, slots=(SlotShape(rank=16),))) > 2 * 2 * linear / 3.84e12


def test_bad_input_is_refused():
    shapes = spread(6, **RANGES)
    with pytest.raises(ValueError, match="at least 6 compositions"):
        fit(timed(TimeModel(**TRUTH), shapes[:5] + shapes[:3]))
    with pytest.raises(ValueError, match="host's time"):
        fit(timed(TimeModel(**TRUTH), shapes), host_s=-1.0)
    with pytest.raises(ValueError, match="finite time above 0"):
        StepTime(shape=shapes[0], seconds=math.inf)
    with pytest.raises(ValueError, match="not negative"):
        TimeModel(**{**TRUTH, "token_s": -1e-9})
    with pytest.raises(ValueError, match="work has adapters"):
        Work(adapters=paper_configurations(budget_tokens=10), tokens=64, real_tokens=65.0)
    with pytest.raises(ValueError, match="at most 10 adapters"):
        compositions(Work(adapters=paper_configurations(budget_tokens=10), tokens=64, real_tokens=60.0))
