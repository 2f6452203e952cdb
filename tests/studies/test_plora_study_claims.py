"""The PLoRA study's claims on rows made by hand: what counts, what is missing, and that each can be refuted."""

from __future__ import annotations

import math

import pytest

from studies.plora import presets
from studies.plora.questions import questions
from studies.plora.report import findings_speed
from studies.plora.study import STUDY
from suite.claims import judge_all
from tests.studies.plora_rows import H200, L4, Rows

SPEC = {
    "throughput_0_5b": (4.0, 4.0), "throughput_3b": (2.0, 2.0), "throughput_7b": (1.4, 1.4), "throughput_paper": (12.8, 12.8), "saturation_share": (0.8, 0.8), "makespan_paper": (7.52, 7.52),
    "makespan_1gpu": (4.0, 4.0), "makespan_2gpu": (4.0, 4.0), "makespan_pruned": (4.0, 4.0), "kernel_vs_graphed": (4.0, 4.0), "kernel_roofline": (0.7, 0.7), "exactness": (1.0, 1.0),
    "isolation": (1.0, 1.0), "cost_model_mape": (0.08, 0.08), "planner_regret": (1.05, 1.05),
}  # fmt: skip


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


def judged(rows: Rows, claim: str, plan_cells: tuple = ()):
    return {j.id: j for j in judge_all(STUDY, rows.view(plan_cells=plan_cells))}[claim]


def test_claims_have_the_targets_and_bars_of_the_plan():
    found = {c.id: (c.target, c.bar) for c in STUDY.claims}
    assert {id_: found[id_] for id_ in SPEC} == SPEC


def test_without_rows_nothing_is_claimed():
    assert {j.verdict for j in judge_all(STUDY, Rows.view(Rows(None)))} == {"NOT MEASURED HERE"}


def test_every_claim_stands_on_a_full_set_of_rows_that_meet_their_bars(rows):
    rows.everything()
    found = {j.id: (j.verdict, j.bar_met) for j in judge_all(STUDY, rows.view())}
    assert {id_: v for id_, v in found.items() if v[0] not in ("EXCEEDED", "REPRODUCED") or not v[1]} == {}


# ---- throughput ----------------------------------------------------------------------------------------------------------------


def ladder(rows: Rows, gain: float, model: str = "3b", **fields) -> None:
    for i in range(5):
        rows.ladder(model, math.log(gain) + i / 1e4, replicate=i, **fields)


def test_a_gain_below_the_bar_is_refuted(rows):
    ladder(rows, 1.9)
    j = judged(rows, "throughput_3b")
    assert j.value == pytest.approx(1.9, rel=1e-3) and (j.verdict, j.bar_met, j.n, j.machine) == ("NOT REPRODUCED", False, 5, H200)
    assert "cap eta_max/eta_1 7.39x" in j.note and "B2) were not measured" in j.note


def test_several_processes_take_their_gain_from_the_pack_and_never_add(rows):
    ladder(rows, 3.0)
    for i in range(5):
        rows.processes("3b", math.log(1.5), replicate=i)
        rows.processes("7b", math.log(0.5), replicate=i)
    assert judged(rows, "throughput_3b").value == pytest.approx(2.0, rel=1e-3)
    ladder(rows, 3.0, "7b")
    assert judged(rows, "throughput_7b").value == pytest.approx(3.0, rel=1e-3)


def test_processes_and_packs_are_paired_by_replicate(rows):
    """Both vary by 4% from start to start in the same direction: their ratio does not."""
    for i in range(5):
        rows.ladder("3b", math.log(3.0) + i / 100, replicate=i)
        rows.processes("3b", math.log(1.5) + i / 100, replicate=i)
    f = findings_speed.throughput(rows.view(), "3b")
    assert f.high / f.low == pytest.approx(1.0)


def test_other_lengths_batches_and_models_are_no_case_of_the_claim(rows):
    ladder(rows, 3.0)
    for i in range(5):
        row = rows.ladder("3b", 0.0, replicate=i)
        rows.made[-1] = row.__class__(**{**row.__dict__, "params": {**row.params, "tokens": 1024}})
    assert judged(rows, "throughput_3b").n == 5 and judged(rows, "throughput_7b").verdict == "NOT MEASURED HERE"


def test_another_gpu_is_no_measurement_of_the_h200(rows):
    ladder(rows, 3.0, device=L4)
    j = judged(rows, "throughput_3b")
    assert j.verdict == "NOT MEASURED HERE" and j.others == (L4,)


def test_four_process_starts_are_too_few(rows):
    for i in range(4):
        rows.ladder("3b", 1.5 + i / 1e4, replicate=i)
    assert judged(rows, "throughput_3b").verdict == "UNDECIDED"


def test_the_share_of_the_cap_is_that_of_the_worst_model(rows):
    for model, gain, cap in (("0.5b", 8.0, 10.0), ("3b", 2.0, 4.0), ("7b", 1.5, 1.6)):
        ladder(rows, gain, model, cap=math.log(cap))
    j = judged(rows, "throughput_of_cap")
    assert j.value == pytest.approx(0.5, rel=1e-3) and j.note == "the least, at 3b" and j.verdict == "NOT REPRODUCED"
    assert findings_speed.throughput_of_cap(rows.view(rows.made[:10])) is None, "without a model nothing is said of all three"


def test_planned_ladders_without_rows_leave_it_undecided(rows):
    ladder(rows, 3.0)
    cells = tuple(c for c in questions(presets.gpu()) if c.measure.endswith(":ladder"))
    assert judged(rows, "throughput_3b", cells).verdict == "UNDECIDED"


def test_the_paper_s_ratio_is_the_best_point_and_says_what_it_is(rows):
    for rank, gain, lengths in ((8, 20.0, "gsm8k"), (128, 6.0, "mrpc"), (16, 99.0, "")):  # rows of one length are no rows of the paper's
        for i in range(5):
            rows.peft(math.log(gain) + i / 1e4, rank=rank, lengths=lengths, replicate=i)
    j = judged(rows, "throughput_paper")
    assert j.value == pytest.approx(20.0, rel=1e-3) and "best of 2 points: 3b, 512 tokens, rank 8, lengths of gsm8k" in j.note and "mostly launch overhead" in j.note


@pytest.mark.parametrize("share, verdict", [(0.9, "EXCEEDED"), (0.7, "NOT REPRODUCED")])
def test_saturation_is_the_least_over_models(rows, share, verdict):
    for i in range(5):
        rows.saturation("0.5b", math.log(0.95) + i / 1e4, replicate=i)
        rows.saturation("3b", math.log(share) + i / 1e4, replicate=i)
    assert judged(rows, "saturation_share").verdict == verdict


# ---- kernels -------------------------------------------------------------------------------------------------------------------


def test_kernels_are_judged_by_their_worst_shape_at_the_claim_s_point(rows):
    for i in range(5):
        rows.kernel("forward", 3584, 128, speedup=math.log(8) + i / 1e4, share=math.log(0.9) + i / 1e4, replicate=i)
        rows.kernel("backward", 3584, 128, speedup=math.log(3) + i / 1e4, share=math.log(0.9) + i / 1e4, replicate=i)
        rows.kernel("forward", 2048, 32, speedup=0.1 + i / 1e4, share=math.log(0.2) + i / 1e4, roofline=math.log(0.2) + i / 1e4, over_cache=0.3, replicate=i)
    over = judged(rows, "kernel_vs_graphed")
    assert over.value == pytest.approx(3.0, rel=1e-3) and over.verdict == "NOT REPRODUCED" and over.note.startswith("the least of 2: backward, d = 3584")
    assert judged(rows, "kernel_of_cap").value == pytest.approx(0.2, rel=1e-3), "everywhere means the small shapes too"
    assert judged(rows, "kernel_roofline").value == pytest.approx(math.exp(-0.1)), "a shape that fits the cache has no roofline of memory"


# ---- plans ---------------------------------------------------------------------------------------------------------------------


def test_the_worst_model_s_error_counts_with_its_interval(rows):
    rows.cost_model("0.5b", [0.02] * 8 + [-0.03] * 8)
    rows.cost_model("3b", [0.12, -0.09] * 8)
    j = judged(rows, "cost_model_mape")
    assert j.value == pytest.approx(0.105) and j.low < 0.105 < j.high and (j.n, j.verdict) == (16, "NOT REPRODUCED")


@pytest.mark.parametrize("worst, verdict", [(1.02, "EXCEEDED"), (1.05, "REPRODUCED"), (1.2, "NOT REPRODUCED"), (None, "NOT REPRODUCED")])
def test_regret_is_the_worst_case_and_a_plan_that_does_not_fit_is_infinite(rows, worst, verdict):
    rows.regret(worst)
    assert judged(rows, "planner_regret").verdict == verdict


def test_simulated_times_say_nothing_of_regret(rows):
    rows.regret(1.0, kind="simulated")
    assert judged(rows, "planner_regret").verdict == "NOT MEASURED HERE"


@pytest.mark.parametrize("gap, verdict", [(1, "REPRODUCED"), (2, "NOT REPRODUCED")])
def test_the_memory_model_may_miss_by_one(rows, gap, verdict):
    rows.largest(gap)
    assert judged(rows, "largest_k").verdict == verdict


def test_the_paper_s_makespan_is_simulated_and_the_smaller_gain_counts(rows):
    rows.makespan(9.0)
    rows.makespan(7.0, tokens=128)
    j = judged(rows, "makespan_paper")
    assert (j.value, j.kind, j.verdict) == (7.0, "simulated", "NOT REPRODUCED") and "3.00x over captured jobs" in j.note


# ---- training ------------------------------------------------------------------------------------------------------------------


def test_live_makespans_of_one_and_two_gpus_are_not_pooled(rows):
    for i in range(3):
        rows.live(5.0 + i / 100, replicate=i)
    rows.same(0.5)
    j = judged(rows, "makespan_1gpu")
    assert j.verdict == "EXCEEDED" and "50% of the adapters" in j.note and "+0.0010 (-0.0020 to +0.0040)" in j.note
    assert judged(rows, "makespan_2gpu").verdict == "NOT MEASURED HERE"


EQUAL = [0.001, -0.001, 0.0, 0.002, -0.002]


@pytest.mark.parametrize("ratio, differences, verdict", [(6.0, EQUAL, "EXCEEDED"), (3.0, EQUAL, "NOT REPRODUCED"), (6.0, [0.03, -0.03, 0.02, -0.01, 0.0], "UNDECIDED"), (6.0, [-0.05 + d for d in EQUAL], "UNDECIDED")])
def test_a_faster_search_counts_only_where_its_quality_is_equal(rows, ratio, differences, verdict):
    rows.searches(ratio, differences)
    j = judged(rows, "makespan_pruned")
    assert j.value == pytest.approx(ratio, rel=1e-3) and (j.verdict, j.kind, j.n) == (verdict, "replayed", 5)


def test_short_searches_of_a_laptop_are_no_case_of_the_claim(rows):
    for seed in range(1, 6):
        rows.search("sequential+prune", seed, 100.0, trials=12)
        rows.search("packed+prune+refill", seed, 10.0, trials=12)
    assert judged(rows, "makespan_pruned").verdict == "NOT MEASURED HERE"


@pytest.mark.parametrize("claim, name", [("exactness", "packed_equals_separate"), ("isolation", "isolation")])
def test_one_case_that_differs_refutes(rows, claim, name):
    rows.exact(name, 1.0)
    assert judged(rows, claim).verdict == "REPRODUCED"
    rows.exact(name, 0.99)
    assert judged(rows, claim).verdict == "NOT REPRODUCED"


def test_adapters_trained_again_packed_and_alone_are_cases_of_exactness(rows):
    rows.exact("packed_equals_separate", 1.0)
    rows.same(7 / 8)
    j = judged(rows, "exactness")
    assert (j.value, j.n, j.verdict) == (0.5, 2, "NOT REPRODUCED") and "noise floor was not measured" in j.note
    assert judged(rows, "isolation").verdict == "NOT MEASURED HERE"
