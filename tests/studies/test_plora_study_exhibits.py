"""What the PLoRA report shows, on rows made by hand: gains with their caps, the points without gain, searches by arm, and that all of it draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reports.study import draw
from studies.plora import presets
from studies.plora.report import exhibits_plans, exhibits_speed, exhibits_training
from studies.plora.report.exhibits import exhibits
from suite.exhibit import Curves, Prose, Table
from tests.studies.plora_rows import CPU, H200, Rows


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


def table(parts: list, title: str) -> Table:
    return next(p for p in parts if isinstance(p, Table) and p.title.startswith(title))


def test_nothing_measured_is_said_and_not_invented():
    *shown, peers = exhibits(Rows.view(Rows(None)))
    assert [p.heading for p in shown] == ["Exactness", "Time", "Training", "Plans"]
    assert all(isinstance(p, Prose) and "NOT MEASURED HERE" in p.text for p in shown) and peers.title == "Peers"


def test_everything_draws_once_under_a_title_of_its_own(rows):
    rows.everything()
    shown = exhibits(rows.view())
    titles = [p.title for p in shown]
    assert len(set(titles)) == len(titles) and len(titles) > 20
    for item in shown:
        assert draw(item, "c" * 40, {CPU: "this CPU", H200: "H200"})
        assert not isinstance(item, Table) or all(len(line) == len(item.columns) for line in item.rows), item.title


def test_a_ladder_shows_every_rung_with_its_interval_and_the_cap(rows):
    for i in range(5):
        rows.ladder("3b", math.log(3.0) + i / 1e4, cap=math.log(4.0) + i / 1e4, replicate=i)
    (shown,) = exhibits_speed.ladders(rows.view())
    lines = {line[0]: line for line in shown.rows}
    value, low, high = lines["B7 ours, graphed"][5]
    assert low < value < high and value == pytest.approx(3.0, rel=1e-3) and lines["B3 looped"][5][0] == pytest.approx(math.exp(-0.5))
    assert "eta_max / eta_1 is 4.00x (4.00 to 4.00)" in shown.note


def test_points_without_gain_are_counted_and_stand_first(rows):
    rows.surface("0.5b", 128, {2: 0.5, 64: math.log(6.0)}, cap=math.log(8.0))
    rows.surface("7b", 1024, {2: 0.0, 4: math.log(1.05)}, cap=math.log(1.1))
    shown = exhibits_speed.surfaces(rows.view())
    where = table(shown, "Where packing gains")
    assert where.note.startswith("At 1 of 2 points") and [line[0] for line in where.rows] == ["7b", "0.5b"]
    assert where.rows[0][3:6] == (4, pytest.approx(1.05), pytest.approx(1.1))
    curve = next(p for p in shown if isinstance(p, Curves) and "0.5b" in p.title)
    assert {s.name: (list(s.x), [round(y, 2) for y in s.y]) for s in curve.series} == {"128 tokens": ([2, 64], [1.65, 6.0]), "cap, 128 tokens": ([2, 64], [8.0, 8.0])}


def test_what_a_whole_preset_measures_is_drawn(rows):
    """Every length of a surface, every arm of every sampler: figures hold seven curves."""
    for tokens in presets.gpu().surfaces[0].tokens:
        rows.surface("0.5b", tokens, {2: 0.5, 64: 1.0})
    for sampler, arm in presets.REPLAYED:
        row = rows.search(arm, 1, 100.0)
        rows.made[-1] = replace(row, params={**row.params, "sampler": sampler})
    shown = exhibits(rows.view())
    figures = [p for p in shown if isinstance(p, Curves)]
    assert len(figures) == 2 + 3 and all(draw(p, "c" * 40, {CPU: "this CPU", H200: "H200"}) for p in figures)
    assert len({p.title for p in shown if not isinstance(p, Prose)}) == sum(not isinstance(p, Prose) for p in shown)


def test_gpus_stand_apart(rows):
    rows.ladder("3b", 1.0)
    rows.ladder("3b", 1.2, device="NVIDIA L4")
    assert [p.title for p in exhibits_speed.ladders(rows.view())] == [f"Ladder, {d}: 3b, 128 tokens, batch 1, k = 32, rank 16" for d in (H200, "NVIDIA L4")]


def test_kernels_stand_beside_every_other_way(rows):
    rows.kernel("forward", 3584, 128)
    (shown,) = exhibits_speed.kernels(rows.view())
    assert shown.rows[0][:7] == (3584, 128, "32 x r 64", 50.0, 400.0, 90.0, 80.0)
    assert isinstance(shown.rows[0][7], float), "one process has no interval"


def test_searches_are_compared_by_seed(rows):
    rows.searches(5.0, [0.01, -0.01, 0.0])
    curves, by_arm = exhibits_training.searches(rows.view())
    lines = {line[1]: line for line in by_arm.rows}
    value, low, high = lines["packed+prune+refill"][7]
    assert low < value < high and value == pytest.approx(5.0, rel=1e-3) and lines["sequential+prune"][7] == pytest.approx((1.0, 1.0, 1.0)) and {line[-1] for line in by_arm.rows} == {"replayed"}
    of = {s.name: s for s in curves.series}["sequential+prune"]
    assert of.y[0] == pytest.approx(0.7) and of.y[-1] == pytest.approx(0.8) and list(of.x) == sorted(of.x) and of.x[-1] == pytest.approx(1003)
    assert len({x for s in curves.series for x in s.x}) <= exhibits_training.POINTS, "curves are read at the same seconds"


def test_a_search_has_no_score_before_every_seed_has_a_finished_trial(rows):
    rows.search("packed", 1, 100.0)
    rows.search("packed", 2, 400.0)
    rows.search("sequential", 1, 60.0)
    curves, _ = exhibits_training.searches(rows.view())
    of = {s.name: list(s.x) for s in curves.series}
    assert min(of["packed"]) >= 100.0, "the slower one has its first answer after 100 s"
    assert of["sequential"][0] == pytest.approx(15.0) and max(of["sequential"]) <= 60.0 and max(of["packed"]) == pytest.approx(400.0)


def test_live_and_replayed_searches_stand_apart(rows):
    rows.search("packed", 1, 100.0)
    rows.search("packed", 1, 100.0, measure="live")
    assert [p.title.split(",")[0] for p in exhibits_training.searches(rows.view()) if isinstance(p, Table)] == ["Searches replayed on a recorded grid", "Searches live"]


def test_diverged_configurations_show_no_score(rows):
    rows.quality()
    shown = exhibits_training.quality(rows.view())
    assert shown[0].rows[0][1:] == ((0.7, 0.6, 0.8), None) and "the untrained base 0.010" in shown[0].note and "most frequent" not in shown[0].note
    assert shown[1].rows[0][4][0] == pytest.approx(0.01)


def test_a_plan_that_does_not_fit_is_said(rows):
    rows.regret(None)
    (shown,) = exhibits_plans.regrets(rows.view())
    assert shown.rows[0][4] == "does not fit" and "replayed" in shown.title


def test_assumed_times_are_said_to_be_assumed(rows):
    rows.gaps()
    (shown,) = exhibits_plans.gaps(rows.view())
    assert "simulated" in shown.title and "assumed H200" in shown.note and [line[1:4] for line in shown.rows] == [("exact", 0.0, 0.0), ("fifo", 0.2, 0.2)]


def test_residuals_show_the_held_out_compositions_first(rows):
    rows.cost_model("3b", [0.1, -0.05])
    (shown,) = exhibits_plans.residuals(rows.view())
    assert shown.rows == [(part, 128, "1 of 16 x 1", ms, 10.0, e) for part in ("held out", "fitted") for ms, e in ((10.0, 0.1), (20.0, -0.05))]
    assert exhibits_plans._slots([[64, 2], [64, 2], [8, 1]]) == "2 of 64 x 2, 1 of 8 x 1"


def test_exactness_lists_its_cases(rows):
    rows.exact("isolation", 0.5)
    rows.same(1.0)
    (shown,) = exhibits_training.exactness(rows.view())
    assert [line[3] for line in shown.rows] == ["differs", "100% equal"]
