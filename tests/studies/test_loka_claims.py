"""The LoKA study's claims on rows made by hand: what counts, what is missing, and that each can be refuted."""

import math

import pytest

from studies.loka import presets
from studies.loka.learning.tost import MARGIN
from studies.loka.presets import ALL_MODS
from studies.loka.questions import questions
from studies.loka.report import findings_loss, findings_speed
from studies.loka.study import STUDY
from suite.claims import judge_all
from tests.studies.loka_rows import CPU, H200, L4, Rows

SPEC = {
    "dispatch_vs_bf16": (1.12, 1.25), "dispatch_vs_single": (1.12 / 1.08, 1.03), "training_speedup": (1.19, 1.25), "inference_speedup": (1.4, 1.4), "of_amdahl_cap": (0.85, 0.85),
    "mods_latency": (2.0, 2.0), "quality_tost": (MARGIN, MARGIN), "naive_fp8_speed": (1.3, None), "naive_fp8_loss": (0.025, None), "loss_prediction": (None, 0.9),
    "loss_prediction_slope": (None, 2.0), "fused_quantise_bandwidth": (0.85, 0.85),
}  # fmt: skip


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


def judged(rows: Rows, claim: str, plan_cells: tuple = ()):
    return {j.id: j for j in judge_all(STUDY, rows.view(plan_cells=plan_cells))}[claim]


def test_claims_have_the_targets_and_bars_of_the_paper_and_of_the_plan():
    found = {c.id: (c.target, c.bar) for c in STUDY.claims}
    assert {id_: found[id_] for id_ in SPEC} == SPEC


def test_without_rows_nothing_is_claimed():
    assert {j.verdict for j in judge_all(STUDY, Rows.view(Rows(None)))} == {"NOT MEASURED HERE"}


def test_every_claim_is_judged_on_a_full_set_of_rows(rows):
    rows.everything()
    left = {j.id for j in judge_all(STUDY, rows.view()) if j.verdict == "NOT MEASURED HERE"}
    assert left == {"head_stays_bf16", "quality_tost", "naive_fp8_loss"}  # no row of theirs is in the set


# ---- the safety map ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdicts, verdict", [({"tensorwise": "unsafe"}, "REPRODUCED"), ({}, "NOT REPRODUCED"), ({"tensorwise": "unsafe", "rowwise": "undecided"}, "NOT REPRODUCED")])
def test_row_scales_need_tensorwise_unsafe_and_rowwise_safe(rows, verdicts, verdict):
    rows.safety("forward", "row-scaled", verdicts)
    assert judged(rows, "row_scales_break_tensorwise").verdict == verdict


def test_heads_gradients_and_other_distributions_are_no_case_of_row_scales(rows):
    rows.safety("forward", "row-scaled", {"tensorwise": "unsafe"})
    rows.safety("forward", "row-scaled", threshold=32.0)
    rows.safety("wgrad", "row-scaled")
    rows.safety("forward", "gaussian")
    j = judged(rows, "row_scales_break_tensorwise")
    assert (j.n, j.verdict, j.kind) == (1, "REPRODUCED", "emulated")


def test_one_safe_recipe_at_the_logit_refutes_the_head(rows):
    unsafe = {r["recipe"]: "unsafe" for r in rows.recipes({})}
    rows.safety("forward", "gaussian", unsafe, threshold=32.0)
    assert judged(rows, "head_stays_bf16").verdict == "REPRODUCED"
    rows.safety("forward", "outliers", {**unsafe, "rowwise": "safe"}, threshold=32.0)
    assert judged(rows, "head_stays_bf16").verdict == "NOT REPRODUCED"


def test_a_planned_cell_without_a_row_leaves_the_map_undecided(rows):
    rows.safety("forward", "row-scaled", {"tensorwise": "unsafe"})
    assert judged(rows, "row_scales_break_tensorwise", tuple(questions(presets.smoke()))).verdict == "UNDECIDED"


def test_real_activations_count_inner_sites_only(rows):
    rows.captured()
    assert (judged(rows, "rowwise_safe_for_real").value, judged(rows, "rowwise_safe_for_real").n) == (1.0, 1)
    rows.captured({"rowwise": "unsafe"})
    assert judged(rows, "rowwise_safe_for_real").verdict == "NOT REPRODUCED"


@pytest.mark.parametrize("converted, verdict", [(0, "REPRODUCED"), (1, "NOT REPRODUCED")])
def test_one_converted_layer_refutes_the_blind_filter(rows, converted, verdict):
    rows.filtered(converted)
    j = judged(rows, "torchao_filter_blind")
    assert (j.value, j.n, j.verdict) == (converted, 8, verdict)


def test_the_worst_row_of_the_hardware_decides(rows):
    rows.safety(device=H200, metrics={"hardware_db": 50.0})
    rows.safety("wgrad", device=H200, metrics={"hardware_db": 44.0})
    j = judged(rows, "hardware_matches_emulation")
    assert (j.value, j.verdict, j.kind) == (44.0, "NOT REPRODUCED", "measured")


# ---- the probe -----------------------------------------------------------------------------------------------------------------


def test_the_worst_distribution_decides_on_predictions(rows):
    rows.validation("gaussian", 0.2)
    rows.validation("row-scaled", 0.9)
    j = judged(rows, "probe_prediction_error_db")
    assert (j.value, j.verdict, j.note) == (0.9, "EXCEEDED", "at row-scaled")
    rows.validation("outliers", 1.1)
    assert judged(rows, "probe_prediction_error_db").verdict == "NOT REPRODUCED"


@pytest.mark.parametrize("gap, spread, verdicts", [(19.9, 1.7, {"EXCEEDED"}), (1.0, 1.1, {"NOT REPRODUCED"})])
def test_the_papers_probe_fails_or_is_cleared(rows, gap, spread, verdicts):
    rows.surrogate(gap, spread)
    found = {j.id: j.verdict for j in judge_all(STUDY, rows.view())}
    assert {found["gaussian_probe_hides_rows"], found["mere_unstable"]} == verdicts


def test_wrong_verdicts_of_any_stream_count(rows):
    rows.stopping(0.0)
    rows.stopping(0.06)
    assert (judged(rows, "stops_rightly").value, judged(rows, "stops_rightly").verdict) == (0.06, "NOT REPRODUCED")


@pytest.mark.parametrize("share, verdict, bar_met", [(0.002, "EXCEEDED", True), (0.008, "EXCEEDED", False), (0.02, "NOT REPRODUCED", False)])
def test_overhead_is_the_share_over_a_run_without(rows, share, verdict, bar_met):
    for i in range(5):
        rows.overhead(math.log1p(share) + i / 1e6, replicate=i)
    j = judged(rows, "probe_overhead")
    assert j.value == pytest.approx(share, abs=1e-5) and (j.verdict, j.bar_met) == (verdict, bar_met)


# ---- log-loss ------------------------------------------------------------------------------------------------------------------

CLOSE = [1e-5, 2e-5, -1e-5, 0.0, 1e-5, 3e-5, 0.0, 1e-5]


def test_a_plan_within_the_margin_is_equivalent(rows):
    rows.arms(CLOSE)
    j = judged(rows, "quality_small")
    assert (j.verdict, j.n, j.kind) == ("EXCEEDED", 8, "emulated")  # its whole interval lies below the margin
    assert j.high < MARGIN


def test_a_plan_beyond_the_margin_is_refuted(rows):
    rows.arms([4e-4 + c for c in CLOSE])
    assert judged(rows, "quality_small").verdict == "NOT REPRODUCED"


@pytest.mark.parametrize("change, half, verdict", [(1e-5, 2e-5, "EXCEEDED"), (-4e-4, 2e-5, "NOT REPRODUCED"), (1e-5, 5e-4, "UNDECIDED")])
def test_a_real_log_is_decided_by_its_interval(rows, change, half, verdict):
    rows.log(change, half=half)
    rows.log(0.01, "movielens-100k")
    j = judged(rows, "real_log_change")
    assert (j.verdict, j.value, j.n) == (verdict, abs(change), 1_000_000)


@pytest.mark.parametrize("how", ["planted-bad passes", "the pilot asks for more pairs", "no pilot"])
def test_a_test_that_could_not_fail_decides_nothing(rows, how):
    rows.arms(CLOSE, bad=1e-5 if how == "planted-bad passes" else 0.01, spread=3e-4 if how.startswith("the pilot") else 1e-5)
    kept = [r for r in rows.made if how != "no pilot" or r.params["arm"] != "bf16-perturbed"]
    j = {j.id: j for j in judge_all(STUDY, rows.view(kept))}["quality_small"]
    assert j.verdict == "UNDECIDED" and "ours:" in j.note


def test_emulated_arms_say_nothing_of_the_h200(rows):
    rows.arms(CLOSE, size="0.53")
    assert judged(rows, "quality_tost").verdict == "NOT MEASURED HERE"
    rows.arms(CLOSE, size="0.53", device=H200)
    assert (judged(rows, "quality_tost").verdict, judged(rows, "quality_tost").kind) == ("EXCEEDED", "measured")


def test_naive_fp8_is_compared_with_the_papers_loss(rows):
    rows.quality("bf16", [0.0] * 5, size="0.53", device=H200)
    rows.quality("naive", [0.001, 0.0011, 0.0012, 0.001, 0.0009], size="0.53", device=H200)
    j = judged(rows, "naive_fp8_loss")
    assert j.verdict == "NOT REPRODUCED" and j.value == pytest.approx(0.00104)


def test_the_interval_of_a_size_folds_at_zero():
    f = findings_loss.folded([-1e-4, 1e-4, -2e-5, 3e-5], [], 0, "")
    assert f.low == 0.0 < f.value < f.high
    g = findings_loss.folded([-1e-3, -1.1e-3, -0.9e-3], [], 0, "")
    assert 0 < g.low < g.value < g.high and g.value == pytest.approx(1e-3)


# ---- predicted and measured ----------------------------------------------------------------------------------------------------


def line(n: int, power: float = 1.0) -> list[tuple[float, float]]:
    return [(1e-6 * 1.3**i, 1e-6 * 1.3 ** (power * i)) for i in range(n)]


def test_a_price_that_ranks_and_scales_is_confirmed(rows):
    rows.flips(line(44))
    found = {j.id: j for j in judge_all(STUDY, rows.view())}
    assert [found[c].value for c in ("loss_prediction", "loss_prediction_slope")] == pytest.approx([1.0, 1.0])
    assert {found[c].verdict for c in ("loss_prediction", "loss_prediction_slope", "price_beats_noise")} == {"EXCEEDED"}


def test_fewer_than_40_points_decide_nothing(rows):
    rows.flips(line(39))
    assert judged(rows, "loss_prediction").verdict == "UNDECIDED"


def test_a_price_without_order_is_refuted(rows):
    rows.flips([(e, line(44)[(17 * i) % 44][1]) for i, (e, _) in enumerate(line(44))])
    assert judged(rows, "loss_prediction").verdict == "NOT REPRODUCED"


@pytest.mark.parametrize("power", [3.0, 1 / 3])
def test_a_slope_too_steep_or_too_flat_is_refuted(rows, power):
    rows.flips(line(44, power))
    j = judged(rows, "loss_prediction_slope")
    assert j.value == pytest.approx(3.0) and j.verdict == "NOT REPRODUCED"


def test_noise_that_ranks_as_well_is_not_beaten(rows):
    rows.flips(line(44), noise=[m for _, m in line(44)])
    assert judged(rows, "price_beats_noise").value == pytest.approx(0.0)


def test_excluded_points_are_left_out_and_counted(rows):
    record = rows.flips(line(44)).record("points")
    rows.add("cells.pricing:flips", {}, metrics={"log_loss": 0.5}, records={"points": record + [{**record[0], "excluded": True, "measured": -1.0}]})
    j = {j.id: j for j in judge_all(STUDY, rows.view(rows.made[1:]))}["loss_prediction"]
    assert j.n == 44 and "1 within two standard errors" in j.note


# ---- time ----------------------------------------------------------------------------------------------------------------------


def test_times_are_ratios_over_processes(rows):
    rows.everything()
    found = {j.id: j for j in judge_all(STUDY, rows.view())}
    j = found["dispatch_vs_bf16"]
    assert j.value == pytest.approx(math.exp(0.2502)) and (j.n, j.verdict, j.machine) == (5, "EXCEEDED", H200)
    assert found["naive_fp8_speed"].value == pytest.approx(math.exp(0.1998))
    assert found["of_amdahl_cap"].value == pytest.approx(math.exp(0.3602) / 1.6)


def test_two_processes_are_too_few_for_a_claim(rows):
    for i in range(2):
        rows.step({"log_speedup_dispatch": 0.3}, replicate=i)
    assert judged(rows, "dispatch_vs_bf16").verdict == "UNDECIDED"


def test_another_gpu_is_no_measurement_of_the_h200(rows):
    for i in range(5):
        rows.step({"log_speedup_dispatch": 0.3 + i / 1e4}, replicate=i, device=L4)
    j = judged(rows, "dispatch_vs_bf16")
    assert j.verdict == "NOT MEASURED HERE" and j.others == (L4,)


def test_training_inference_and_mods_are_not_pooled(rows):
    for i in range(5):
        rows.step({"log_speedup_dispatch": 0.3 + i / 1e4}, mods=ALL_MODS, training=True, replicate=i)
    assert judged(rows, "training_speedup").verdict == "EXCEEDED"
    assert judged(rows, "inference_speedup").verdict == judged(rows, "dispatch_vs_bf16").verdict == judged(rows, "of_amdahl_cap").verdict == "NOT MEASURED HERE"


def test_one_process_that_measured_twice_counts_once(rows):
    for i in range(6):
        rows.step({"log_speedup_dispatch": 0.3 + i / 1e4}, environment={"process": f"p{i // 2}"}, replicate=i)
    assert findings_speed.dispatch_vs_bf16(rows.view()).n == 3


def test_a_missing_shape_of_the_map_is_seen(rows):
    cells = [c for c in questions(presets.gpu()) if c.measure.endswith(":crossover")][:3]
    for c in cells[:2]:
        rows.add("cells.contests:crossover", c.params, point=c.point, metrics={"bf16_us": 1.0}, device=H200)
    assert judged(rows, "crossover_map", tuple(cells)).value == pytest.approx(2 / 3)
    assert judged(rows, "crossover_map", tuple(cells[:2])).verdict == "REPRODUCED"
    assert CPU not in judged(rows, "crossover_map").machine
