"""What the LoKA report shows, on rows made by hand: the safety map's counts and letters, tables of losses and times, and that all of it draws."""

import math

import pytest

from reports.study import draw
from studies.loka import presets
from studies.loka.questions import site_questions
from studies.loka.report.exhibits import exhibits
from studies.loka.report.exhibits_loss import arms, calibration, mods, planners
from studies.loka.report.exhibits_map import LETTERS, families, real, safety_maps
from studies.loka.report.exhibits_probe import probes
from studies.loka.report.exhibits_speed import arms as variants
from studies.loka.report.exhibits_speed import bandwidth, crossover, steps
from studies.loka.sites.model_sites import model_sites
from suite.exhibit import Curves, Matrix, Prose, Table
from tests.studies.loka_rows import CPU, H200, Rows


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


def table(parts: list, title: str) -> Table:
    return next(p for p in parts if isinstance(p, Table) and p.title == title)


def whole_map(rows: Rows, which: str, distribution: str, verdicts: dict, **fields) -> None:
    """A row for every question of the cpu preset's map, of this pass and distribution."""
    for what in site_questions(presets.cpu().map):
        if what[0] == which:
            _, op, products, r, c, threshold = what
            rows.safety(which, distribution, verdicts, threshold=threshold, op=op, products=products, rows=r, contracted=c, **fields)


def test_nothing_measured_is_said_and_not_invented():
    shown = exhibits(Rows.view(Rows(None)))
    assert all(isinstance(p, Prose) and "NOT MEASURED HERE" in p.text for p in shown) and len(shown) == 4


def test_everything_draws(rows):
    rows.everything()
    shown = exhibits(rows.view())
    assert {type(p) for p in shown} == {Matrix, Table, Curves}
    for item in shown:
        assert draw(item, "c" * 40, {CPU: "this CPU", H200: "H200"})


def test_the_summary_counts_every_site_of_a_model(rows):
    whole_map(rows, "forward", "row-scaled", {"tensorwise": "unsafe"})
    lines = {(line[0], line[1]): line[2] for line in table(safety_maps(rows.view()), "Safety map: forward sites that are safe").rows}
    for model, size in presets.MODELS:
        n = len(model_sites(model, size, 1))
        assert lines[f"{model} {size}", "tensorwise"] == f"0 of {n}"
        assert lines[f"{model} {size}", "rowwise"] == f"{n} of {n}"


def test_a_site_shows_which_recipes_are_safe(rows):
    whole_map(rows, "forward", "gaussian", {"tensorwise": "unsafe", "blockwise": "undecided"})
    whole_map(rows, "forward", "outliers", {r: "unsafe" for r in LETTERS})
    shown = table(safety_maps(rows.view()), "Safety map: dlrm_v2 mlperf, forward products")
    assert {line[2:] for line in shown.rows} == {("R P B?", "none")}
    assert {"bottom.0", "cross.*.v (3)", "over.8"} < {line[0] for line in shown.rows} and len(shown.rows) == 14 - 4


def test_cells_that_were_not_asked_stay_empty_and_stale_ones_are_marked(rows):
    whole_map(rows, "forward", "gaussian", {}, stale=True)
    rows.safety("forward", "outliers", {}, contracted=13)
    shown = table(safety_maps(rows.view()), "Safety map: dlrm_v2 mlperf, forward products")
    assert {line[2] for line in shown.rows} == {"all†"}
    assert [line[3] for line in shown.rows if line[0] == "bottom.2"] == [None]
    assert [line[3] for line in shown.rows if line[0] == "bottom.0"] == ["all"]


def test_emulated_and_measured_maps_stand_apart(rows):
    whole_map(rows, "forward", "gaussian", {})
    rows.safety("forward", "gaussian", {}, rows=512, contracted=4096, device=H200)
    titles = [p.title for p in safety_maps(rows.view())]
    assert f"Safety map, {H200}: forward sites that are safe" in titles and f"Safety map, {CPU}: forward sites that are safe" in titles
    for p in safety_maps(rows.view()):
        assert len({r.device for r in p.sources}) == 1


def test_cells_of_a_users_own_map_are_told_and_break_nothing(rows):
    rows.safety("forward", "gaussian", {}, rows=77, contracted=99)
    (shown,) = safety_maps(rows.view())
    assert isinstance(shown, Prose) and shown.text.startswith("1 cells belong to no forward site")


def test_sites_that_differ_in_a_number_only_stand_in_one_line():
    found = families(model_sites("wukong", "5.6", 8192))
    assert found["interaction.*.fmb.mlp.*:linear", "4096 x 4096".replace(" ", "\u00a0")] == 16
    assert sum(found.values()) == len(model_sites("wukong", "5.6", 8192))


def test_real_activations_name_the_logit(rows):
    rows.captured({"tensorwise": "unsafe"})
    (shown,) = real(rows.view())
    assert [line[0] for line in shown.rows] == ["dense.0:linear", "over.3:linear (logit)"]
    assert [line[1] for line in shown.rows] == ["R P B", "none"] and shown.rows[0][2] == "-"


def test_arms_carry_their_interval_and_verdict(rows):
    rows.arms([1e-5, 2e-5, -1e-5, 0.0, 1e-5, 3e-5, 0.0, 1e-5])
    (shown,) = arms(rows.view(), rows.view().rows(measure="quality"))
    lines = {line[2]: line for line in shown.rows}
    value, low, high = lines["our plan"][5]
    assert low < value < high and value == pytest.approx(100 * 0.875e-5, rel=1e-3)
    assert lines["our plan"][6].startswith("EQUIVALENT") and lines["E5M2 forward (planted bad)"][6] == "must not be"


def test_mods_are_compared_with_the_published_model_of_their_device(rows):
    rows.everything()
    (shown,) = mods(rows.view().rows(measure="quality"))
    assert [line[0] for line in shown.rows] == ["as published", *presets.MODS_2K[1:]]
    assert shown.rows[0][4] == "-" and shown.rows[1][4][0] == pytest.approx(0.01)


def test_calibration_follows_the_diagonal_where_prices_are_right(rows):
    rows.flips([(1e-6 * 1.3**i, 1e-6 * 1.3**i) for i in range(44)])
    curve, by_recipe = calibration(rows.view())
    assert list(curve.series[0].y) == pytest.approx(list(curve.series[1].y)) and curve.series[1].x[0] == pytest.approx(1e5 * (1 + 1.3 + 1.69) / 3 * 1e-6 / 0.5)
    assert by_recipe.rows[0][:3] == ("all", 44, pytest.approx(1.0))


def test_the_probe_stands_beside_the_truth(rows):
    rows.everything()
    shown = {p.title: p for p in probes(rows.view())}
    assert shown["The probe's predictions and the truth"].rows[0][2:6] == (26.0, 26.4, 26.0, 26.4)
    assert shown["What a Gaussian probe sees of the worst rows, tensorwise"].rows == [("row-scaled", 7.8, 8.0, pytest.approx(27.7), pytest.approx(19.9))]
    assert [line[-1] for line in shown["One Gaussian product, tensorwise: MERE by seed"].rows] == pytest.approx([1.7, 1.0025])
    assert shown["What the probe costs"].rows[0][-2][0] == pytest.approx(math.exp(0.0032))


def test_planners_name_the_kind_of_their_times(rows):
    rows.planners()
    (shown,) = planners(rows.view())
    assert shown.columns[3].name == "speed-up (simulated)" and "Times are simulated" in shown.note
    assert [line[0] for line in shown.rows] == ["bf16", "torchao, every linear layer", "ours"]
    assert shown.rows[0][5] == "-" and shown.rows[1][4] == "not priced" and shown.rows[2][4] == pytest.approx(0.002) and shown.rows[2][5] == pytest.approx((0.002, 0.001, 0.004))


def test_times_show_an_interval_only_over_processes(rows):
    rows.everything()
    assert all(isinstance(line[2], float) for p in crossover(rows.view()) if isinstance(p, Table) for line in p.rows)
    (shown,) = bandwidth(rows.view())
    assert shown.rows[0][4][0] == pytest.approx(0.9002, rel=1e-3) and shown.rows[0][-1] == 5
    (models,) = steps(rows.view())
    shown = {(line[1], line[2], line[3]): line[4:] for line in variants(rows.view())[0].rows}
    assert shown["as published", "training", "dispatch"] == (30, pytest.approx((math.exp(0.2502), *shown["as published", "training", "dispatch"][1][1:])))
    assert shown["as published", "training", "torchao"] == ("torchao is not installed here", None)
    assert [line[3] for line in models.rows] == ["training", "training", "inference"] and [type(line[-2]) for line in models.rows] == [str, tuple, str] and models.rows[0][5][0] < 1 < models.rows[0][7][0]
