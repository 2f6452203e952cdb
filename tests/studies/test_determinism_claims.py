"""The study's claims on rows made by hand: what counts as equal, what as missing, and which n is told."""

import json

import pytest

from studies.determinism import bits, speed
from studies.determinism.presets import cpu, smoke
from studies.determinism.questions import questions
from studies.determinism.study import STUDY
from suite.claims import View, judge_all
from tests.studies.determinism_rows import CPU, H200, L4, Rows, audit_cases

LABELS = ["fma cpu rows=1", "fma cuda rows=1", "texts fma cpu", "texts fma cuda"]


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


@pytest.fixture
def manifest(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("manifest") / "manifest.json"
    path.write_text(json.dumps({"exact cells": LABELS[:2]}))
    monkeypatch.setattr(bits, "MANIFEST", path)
    return path


def exact(rows: Rows, *, wrong: int = 0) -> Rows:
    """An oracle and one fma cell on each device, under the manifest's labels."""
    rows.oracle("fma")
    rows.operators("fma", CPU, 1, label=LABELS[0])
    rows.operators("fma", H200, 1, label=LABELS[1], wrong=wrong)
    return rows


def judged(rows: Rows | list, claim: str = "bitwise_cpu_h200", planned=None, plan_cells=()):
    view = View(study="determinism", rows_=tuple(rows.made if isinstance(rows, Rows) else rows), planned=planned or {}, plan_cells=plan_cells)
    return {j.id: j for j in judge_all(STUDY, view)}[claim]


# ---- bits ----------------------------------------------------------------------------------------------------------------------


def test_all_equal_is_reproduced_with_the_count(rows, manifest):
    j = judged(exact(rows))
    assert (j.verdict, j.value, j.n, j.bar_met) == ("REPRODUCED", 1.0, 4, True)


def test_one_digest_that_differs_is_not_reproduced(rows, manifest):
    j = judged(exact(rows, wrong=1))
    assert (j.verdict, j.value, j.bar_met) == ("NOT REPRODUCED", 0.75, False)


def test_an_operator_without_a_reference_is_missing_not_unequal(rows, manifest):
    exact(rows)
    row = rows.made.pop()
    records = row.record("operators")
    rows.add(
        "cells:operators",
        row.params,
        records={"operators": [records[0], {**records[1], "operator": "layers.29.mlp.down_proj"}]},
        device=H200,
        label=LABELS[1],
    )
    j = judged(rows)
    assert (j.verdict, j.value, j.n) == ("UNDECIDED", 1.0, 3)


@pytest.mark.parametrize("gone, verdict", [(0, "NOT MEASURED HERE"), (2, "NOT MEASURED HERE"), (1, "UNDECIDED")], ids=["oracle", "cuda", "cpu"])
def test_a_missing_row_never_counts_as_equal(rows, manifest, gone, verdict):
    left = exact(rows).made
    assert judged([r for i, r in enumerate(left) if i != gone]).verdict == verdict


def test_whole_texts_count_prompt_by_prompt(rows, manifest):
    manifest.write_text(json.dumps({"exact cells": LABELS}))
    exact(rows)
    for device, label, wrong in ((CPU, LABELS[2], 0), (H200, LABELS[3], 1)):
        row = rows.texts("fma", device, batch=8, wrong=wrong)
        rows.made[-1] = type(row)(**{**row.__dict__, "label": label})
    j = judged(rows)
    assert (j.n, j.value, j.verdict) == (10, 0.9, "NOT REPRODUCED")


def test_rows_of_another_gpu_are_no_evidence_of_the_reference_device(rows, manifest):
    rows.oracle("fma"), rows.operators("fma", CPU, 1, label=LABELS[0]), rows.operators("fma", L4, 1, label=LABELS[1])
    assert judged(rows).verdict == "NOT MEASURED HERE"


@pytest.mark.parametrize("state, verdict", [("DONE", "REPRODUCED"), ("FAILED", "UNDECIDED"), ("TO RUN", "UNDECIDED"), ("UNAVAILABLE", "REPRODUCED")])
def test_a_planned_cell_that_failed_here_is_not_masked_by_a_published_one(rows, manifest, state, verdict):
    cell = next(c for c in questions(smoke()) if c.params.get("impl") == "fma")
    assert judged(exact(rows), planned={cell.point: state}, plan_cells=(cell,)).verdict == verdict


def test_presets_that_capture_different_layers_ask_different_questions():
    ours, theirs = ({c.point for c in questions(p)} for p in (smoke(), cpu()))
    assert not ours & theirs


@pytest.mark.parametrize(
    "measure, params, claim",
    [
        ("stress", {"sms": 8}, "schedule_stress"),
        ("foreign", {"architecture": 80}, "foreign_code"),
        ("engines", {"products": "b6"}, "engine_independence"),
    ],
)
def test_one_case_that_differs_on_the_gpu_breaks_its_claim(rows, measure, params, claim):
    rows.counted(measure, params)
    assert (judged(rows, claim).verdict, judged(rows, claim).n) == ("REPRODUCED", 4)
    rows.counted(measure, params, [{"operator": "linear", "case": "x", "equal": False, "error": ""}])
    assert (judged(rows, claim).verdict, judged(rows, claim).value) == ("NOT REPRODUCED", 0.8)


def test_the_audit_needs_no_gpu_and_skipped_targets_do_not_count(rows):
    rows.counted("audit", {"target": "sm_80"}, audit_cases("sm_80"), device=CPU)
    assert (judged(rows, "static_audit").verdict, judged(rows, "static_audit").n) == ("REPRODUCED", 2)


def test_a_training_tensor_that_differs_is_found_and_without_the_cpu_nothing_is_judged(rows):
    rows.training(H200, loss="other")
    assert judged(rows, "training_step").verdict == "NOT MEASURED HERE"
    rows.training(CPU)
    assert (judged(rows, "training_step").verdict, judged(rows, "training_step").value) == ("NOT REPRODUCED", 0.5)


def test_golden_questions_need_a_gpu_and_count_every_question_on_each_device(rows):
    rows.verify(CPU)
    assert judged(rows, "golden_questions").verdict == "NOT MEASURED HERE"
    rows.verify(H200)
    j = judged(rows, "golden_questions")
    assert j.verdict == "REPRODUCED" and j.n % 2 == 0 and j.n >= 200


def test_three_architectures_stay_unmeasured_without_rows_of_other_cards(rows):
    assert judged(exact(rows), "bitwise_three_archs").verdict == "NOT MEASURED HERE"


# ---- time ----------------------------------------------------------------------------------------------------------------------


def contests(rows: Rows, n: int, count: int, ratio: float, *, m: int = 1) -> Rows:
    for replicate in range(count):
        rows.contest(m, n, {"fma": 10.0, "layercast": 10.0 * (ratio + 0.01 * replicate)}, replicate=replicate)
    return rows


def test_a_ratio_claim_takes_the_worst_shape_and_the_fewest_processes(rows):
    contests(rows, 4096, 6, 6.0), contests(rows, 14336, 4, 8.0)
    j = judged(rows, "decode_vs_layercast")
    assert 5.9 < j.value < 6.1 and j.n == 4 and j.verdict == "UNDECIDED" and j.bar_met
    rows.contest(1, 14336, {"fma": 10.0, "layercast": 80.0}, replicate=4)
    for n in (4096, 14336):
        for m in (2, 4, 8):
            contests(rows, n, 5, 7.0, m=m)
    enough = judged(rows, "decode_vs_layercast")
    assert (enough.n, enough.verdict) == (5, "EXCEEDED")


def test_a_contest_that_was_not_timed_leaves_the_claim_undecided(rows):
    contests(rows, 4096, 5, 6.0)
    assert judged(rows, "decode_vs_layercast").verdict == "UNDECIDED"


def test_cells_of_one_process_count_once(rows):
    for replicate in range(2):
        rows.contest(1, 4096, {"fma": 10.0, "layercast": 60.0}, environment={"process": "one"}, replicate=replicate)
    assert judged(rows, "decode_vs_layercast").verdict == "NOT MEASURED HERE"


def test_prefill_is_judged_family_by_family(rows):
    for replicate in range(5):
        jitter = 1 + replicate / 1000
        rows.contest(4096, 4096, {"fma": 2800.0, "integer": 700.0 * jitter, "sgemm": 2700.0 * jitter}, replicate=replicate)
    fma, b6, b9 = (judged(rows, f"prefill_{name}_vs_sgemm") for name in ("fma", "integer", "b9"))
    assert (fma.verdict, fma.bar_met) == ("NOT REPRODUCED", True) and b6.verdict == "EXCEEDED" and b9.verdict == "NOT MEASURED HERE"


def test_the_decoders_claims_read_the_worst_phase_of_the_better_family(rows):
    for replicate in range(5):
        rows.serving({"fma": 4.0 * (1 + replicate / 1000), "integer": 5.0, "layercast": 20.0, "sgemm": 8.0, "bf16": 3.9}, replicate=replicate)
    view = View(study="determinism", rows_=tuple(rows.made), planned={})
    found = speed.decode_end_to_end(view)
    assert found.value == pytest.approx(5.0, rel=0.01) and found.note.startswith("fma") and found.n == 5
    cost = speed.exactness_cost(view)
    assert cost.value == pytest.approx(4.0 / 3.9 - 1, abs=0.005) and cost.low < cost.value < cost.high
    assert judged(rows, "exactness_cost").bar_met and judged(rows, "decode_end_to_end").verdict == "EXCEEDED"


def test_every_claim_has_a_finding_on_a_view_with_every_question_but_the_contributed_ones(rows):
    view = rows.everything()
    verdicts = {j.id: j.verdict for j in judge_all(STUDY, view)}
    unmeasured = {name for name, verdict in verdicts.items() if verdict == "NOT MEASURED HERE"}
    assert unmeasured == {"bitwise_cpu_h200", "bitwise_three_archs"}  # no label of the manifest is among the made-up rows
