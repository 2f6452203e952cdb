"""The study's claims on rows made by hand: what counts as equal, what as missing, and which n is told."""

import json
from functools import partial

import pytest

from studies.determinism import bits, speed
from studies.determinism.claims import CLAIMS
from studies.determinism.golden_manifest import read
from studies.determinism.presets import TARGETS, cpu, gpu, smoke
from studies.determinism.questions import questions
from studies.determinism.study import STUDY
from suite.claims import View, judge_all
from tests.studies.determinism_rows import CASES, CPU, H200, L4, OTHER_CPU, Rows, audit_cases

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
    assert (j.n, j.value, j.verdict) == (7, 6 / 7, "NOT REPRODUCED")  # the CPU's own texts are what the others are compared with


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


def test_a_second_engine_of_the_oracle_is_counted_and_can_break_the_claim(rows, manifest):
    exact(rows).oracle("fma", "torch")
    j = judged(rows)
    assert (j.verdict, j.n) == ("REPRODUCED", 6) and "second engine" in j.note
    rows.made.pop(), rows.oracle("fma", "torch", wrong=1)
    assert (judged(rows).verdict, judged(rows).value) == ("NOT REPRODUCED", 5 / 6)


@pytest.mark.parametrize("first, second", [({"stale": True}, {"origin": "published"}), ({"origin": "published"}, {})], ids=["fresh before stale", "here before published"])
def test_the_reference_is_todays_code_before_this_machine_before_others(rows, manifest, first, second):
    rows.oracle("fma", wrong=2, **first), rows.oracle("fma", **second)
    rows.operators("fma", CPU, 1, label=LABELS[0]), rows.operators("fma", H200, 1, label=LABELS[1])
    assert judged(rows).verdict == "REPRODUCED"


@pytest.mark.parametrize("other", [{"fields": {"stale": True}, "wrong": 3}, {"new_tokens": 8, "wrong": 3}], ids=["stale", "shorter texts"])
def test_texts_of_older_code_and_of_another_length_are_no_reference_where_there_is_a_better_one(rows, other):
    rows.texts("fma", CPU, batch=4, **other), rows.texts("fma", CPU, batch=8)
    ours = rows.texts("fma", H200, batch=8)
    assert bits.equal_texts(ours, bits.text_references(rows.view(), ours)) == (3, 3, 0)
    rows.made.pop(1)
    assert bits.equal_texts(ours, bits.text_references(rows.view(), ours)) == ((0, 0, 3) if "new_tokens" in other else (0, 3, 0))


GPU_MEASURES = {"stress": "schedule_stress", "foreign": "foreign_code", "engines": "engine_independence"}


@pytest.mark.parametrize("measure, claim", GPU_MEASURES.items())
def test_one_case_that_differs_on_the_gpu_breaks_its_claim(rows, measure, claim):
    rows.required(measure)
    values = len(bits.REQUIRED[measure][1])
    assert (judged(rows, claim).verdict, judged(rows, claim).n) == ("REPRODUCED", 4 * values)
    rows.counted(measure, rows.made[0].params, [{"operator": "linear", "case": "x", "equal": False, "error": ""}])
    assert (judged(rows, claim).verdict, judged(rows, claim).value) == ("NOT REPRODUCED", 4 * values / (4 * values + 1))


@pytest.mark.parametrize("measure, claim", GPU_MEASURES.items())
def test_every_required_value_needs_a_row_of_the_reference_gpu_stale_or_fresh(rows, measure, claim):
    rows.required(measure)
    last = rows.made.pop()
    assert judged(rows, claim).verdict == "UNDECIDED" and "1 planned points have no OK run" in judged(rows, claim).note
    rows.counted(measure, last.params, device=L4)
    assert judged(rows, claim).verdict == "UNDECIDED"
    rows.counted(measure, last.params, stale=True)
    assert judged(rows, claim).verdict == "REPRODUCED"


def test_one_row_may_answer_for_several_numbers_of_sms_and_only_for_those_with_cases(rows):
    values = bits.REQUIRED["stress"][1]
    rows.counted("stress", {"sms": list(values)}, [{**c, "sms": v, "launches": 1} for v in values for c in CASES])
    assert (judged(rows, "schedule_stress").verdict, judged(rows, "schedule_stress").n) == ("REPRODUCED", 4 * len(values))
    rows.made.pop(), rows.counted("stress", {"sms": list(values)}, [{**c, "sms": v} for v in values[1:] for c in CASES])
    assert judged(rows, "schedule_stress").verdict == "UNDECIDED"


def test_an_engine_that_was_not_there_leaves_independence_undecided(rows):
    rows.required("engines", facts={"missing": "none"})
    assert judged(rows, "engine_independence").verdict == "REPRODUCED"
    rows.counted("engines", {"products": "b6"}, facts={"missing": "dp4a"})
    assert judged(rows, "engine_independence").verdict == "UNDECIDED"


def test_the_required_values_are_those_of_the_presets():
    assert bits.REQUIRED["stress"] == ("sms", gpu().stress_sms) and bits.REQUIRED["audit"] == ("target", TARGETS)
    assert all(len(values) >= 2 for _, values in bits.REQUIRED.values())


@pytest.mark.parametrize("measure", ["stress", "foreign"])
def test_a_case_that_launched_nothing_is_no_evidence_and_a_wrong_one_counts_all_the_same(rows, measure):
    empty = {"operator": "linear", "case": "no tokens", "equal": True, "error": "", "launches": 0}
    rows.required(measure, [*CASES, empty])
    j = judged(rows, GPU_MEASURES[measure])
    assert (j.verdict, j.n) == ("REPRODUCED", 4 * len(bits.REQUIRED[measure][1]))
    name, values = bits.REQUIRED[measure]
    rows.made.pop(), rows.counted(measure, {name: values[-1]}, [empty])
    assert judged(rows, GPU_MEASURES[measure]).verdict == "UNDECIDED"
    rows.counted(measure, {name: values[-1]}, [{**empty, "equal": False}])
    assert judged(rows, GPU_MEASURES[measure]).verdict == "NOT REPRODUCED"


def test_the_audit_needs_no_gpu_and_every_target_and_skipped_ones_do_not_count(rows):
    rows.required("audit", audit_cases("sm_80"), CPU)
    assert (judged(rows, "static_audit").verdict, judged(rows, "static_audit").n) == ("REPRODUCED", 2 * len(TARGETS))
    rows.made.pop()
    assert judged(rows, "static_audit").verdict == "UNDECIDED"


def test_a_target_audited_on_two_machines_counts_once_and_todays_code_speaks(rows):
    rows.required("audit", audit_cases("sm_80", equal=False), OTHER_CPU, stale=True), rows.required("audit", audit_cases("sm_80"), CPU, origin="published")
    assert (judged(rows, "static_audit").verdict, judged(rows, "static_audit").n) == ("REPRODUCED", 2 * len(TARGETS))


def test_a_training_tensor_that_differs_is_found_and_without_the_cpu_nothing_is_judged(rows):
    rows.training(H200, loss="other")
    assert judged(rows, "training_step").verdict == "NOT MEASURED HERE"
    rows.training(CPU)
    assert (judged(rows, "training_step").verdict, judged(rows, "training_step").value) == ("NOT REPRODUCED", 0.5)


@pytest.mark.parametrize("lacking", [CPU, H200])
def test_a_training_tensor_that_one_side_lacks_leaves_the_claim_undecided(rows, lacking):
    for device in (CPU, H200):
        rows.training(device, more={} if device == lacking else {"moment": "c"})
    j = judged(rows, "training_step")
    assert (j.verdict, j.value, j.n) == ("UNDECIDED", 1.0, 2)


def test_training_is_compared_with_a_cpus_steps_of_todays_code_and_of_the_same_number(rows):
    rows.training(CPU, "old", stale=True), rows.training(CPU, "more", steps=3), rows.training(CPU, origin="published"), rows.training(H200)
    assert judged(rows, "training_step").verdict == "REPRODUCED"


def test_golden_questions_need_a_gpu_and_count_every_question_on_each_device(rows):
    rows.verify(CPU)
    assert judged(rows, "golden_questions").verdict == "NOT MEASURED HERE"
    rows.verify(H200)
    j = judged(rows, "golden_questions")
    assert j.verdict == "REPRODUCED" and j.n % 2 == 0 and j.n >= 200


def test_golden_questions_without_a_cpu_are_undecided(rows):
    rows.verify(H200)
    assert (judged(rows, "golden_questions").verdict, judged(rows, "golden_questions").value) == ("UNDECIDED", 1.0)


def test_half_of_the_right_answers_is_undecided_and_not_a_failure(rows):
    rows.verify(CPU), rows.verify(H200, answered=50)
    j = judged(rows, "golden_questions")
    assert (j.verdict, j.value) == ("UNDECIDED", 1.0)


def test_answers_to_an_older_manifest_yield_to_todays(rows):
    rows.verify(CPU), rows.verify(H200, answered=50, questions="older"), rows.verify(H200, questions=read().digest)
    assert judged(rows, "golden_questions").verdict == "REPRODUCED"


THREE = {"Ampere": "NVIDIA A100-SXM4-80GB", "Ada": "NVIDIA L4", "Hopper": "NVIDIA H100 80GB HBM3"}


def test_three_architectures_stay_unmeasured_without_rows_of_other_cards(rows):
    assert judged(exact(rows), "bitwise_three_archs").verdict == "NOT MEASURED HERE"


def test_three_architectures_need_every_fma_cell_of_the_manifest_on_each(rows, manifest):
    manifest.write_text(json.dumps({"exact cells": [*LABELS, "fma cuda rows=64"]}))
    rows.oracle("fma")
    for device in THREE.values():
        for count in (1, 64):
            rows.operators("fma", device, count, label=f"fma cuda rows={count}")
    j = judged(rows, "bitwise_three_archs")
    assert (j.verdict, j.n) == ("REPRODUCED", 12)
    rows.made.pop()
    assert judged(rows, "bitwise_three_archs").verdict == "UNDECIDED"


@pytest.mark.parametrize("architecture, device", [("Ampere", "NVIDIA GA100"), ("Ada", "NVIDIA L40X"), ("Hopper", "NVIDIA GH2000")])
def test_a_card_whose_name_only_contains_anothers_is_none_of_the_three(rows, manifest, architecture, device):
    rows.oracle("fma")
    for name in {**THREE, architecture: device}.values():
        rows.operators("fma", name, 1, label="fma cuda rows=1")
    assert judged(rows, "bitwise_three_archs").verdict == "NOT MEASURED HERE"


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


def test_timings_of_older_code_are_not_pooled_with_todays(rows):
    for replicate in range(5):
        for n in (4096, 14336):
            for m in (1, 2, 4, 8):
                rows.contest(m, n, {"fma": 10.0, "layercast": 20.0}, replicate=replicate, stale=True)
                rows.contest(m, n, {"fma": 10.0, "layercast": 70.0 + replicate / 100}, replicate=replicate)
    j = judged(rows, "decode_vs_layercast")
    assert (j.verdict, j.n, j.stale) == ("EXCEEDED", 5, False) and j.value > 6.9


def test_the_decoders_phases_of_older_code_are_not_pooled_with_todays(rows):
    for replicate in range(5):
        rows.serving({"fma": 4.0, "layercast": 4.0}, replicate=replicate, stale=True)
        rows.serving({"fma": 4.0 * (1 + replicate / 1000), "layercast": 20.0}, replicate=replicate)
    j = judged(rows, "decode_end_to_end")
    assert (j.n, j.stale) == (5, False) and j.value > 4.9


def test_bytes_of_older_code_are_not_the_largest_of_todays(rows):
    for value, stale in ((9.0, True), (2.01, False)):
        rows.add("traffic:weight_bytes", {"rows": 1}, metrics={"bytes_fma": value}, device=H200, stale=stale)
    assert judged(rows, "weight_bytes").value == 2.01


def test_the_compiled_claim_reads_its_own_shape_alone(rows):
    for replicate in range(5):
        times = {"fma": 10.0 * (1 + replicate / 1000), "layercast_compiled": 12.0}
        rows.contest(1, 14336, times, replicate=replicate), rows.contest(1, 4096, {**times, "layercast_compiled": 1.0}, replicate=replicate)
    j = judged(rows, "decode_vs_compiled")
    assert (j.verdict, j.n) == ("EXCEEDED", 5)


@pytest.mark.parametrize("compiled, met", [({}, True), ({"bf16_compiled": 5.0}, False)], ids=["not timed", "faster"])
def test_a_compiled_bf16_program_is_among_the_baselines_where_it_was_timed(rows, compiled, met):
    for replicate in range(5):
        for n in (4096, 14336):
            for m in (1, 2, 4, 8):
                rows.contest(m, n, {"fma": 10.0 * (1 + replicate / 1000), "bf16": 11.0, **(compiled if m == 1 else {})}, replicate=replicate)
    assert judged(rows, "decode_vs_bf16").bar_met is met


def test_the_contest_of_compiled_programs_is_part_of_the_comparison_with_bf16(rows):
    for replicate in range(5):
        ours = {"fma": 10.0 * (1 + replicate / 1000)}
        rows.contest(1, 14336, {**ours, "layercast_compiled": 12.0, "bf16_compiled": 5.0}, replicate=replicate)
        for n in (4096, 14336):
            for m in (1, 2, 4, 8):
                rows.contest(m, n, {**ours, "bf16": 11.0}, replicate=replicate)
    j = judged(rows, "decode_vs_bf16")
    assert j.bar_met is False and "M=1, 14336x4096, compiled" in j.note


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
    assert found.value == pytest.approx(5.0, rel=0.01) and "judged for fma (a model runs in one family)" in found.note and found.n == 5
    cost = speed.exactness_cost(view)
    assert cost.value == pytest.approx(4.0 / 3.9 - 1, abs=0.005) and cost.low < cost.value < cost.high
    assert judged(rows, "exactness_cost").bar_met and judged(rows, "decode_end_to_end").verdict == "EXCEEDED"


def test_a_family_that_lacks_a_phase_never_wins_over_a_complete_one(rows):
    for replicate in range(5):
        rows.serving({"fma": 4.0 * (1 + replicate / 1000), "integer": 2.0, "layercast": 20.0}, replicate=replicate, only={"integer": (1,)})
    found = speed.decode_end_to_end(rows.view())
    assert "for fma" in found.note and found.missing == 0 and found.value == pytest.approx(5.0, rel=0.01)


def test_a_batch_of_the_preset_that_was_not_decoded_is_missing(rows):
    for replicate in range(5):
        rows.serving({"fma": 4.0 * (1 + replicate / 1000), "layercast": 20.0}, replicate=replicate, batches=(1,))
    assert judged(rows, "decode_end_to_end").verdict == "UNDECIDED"


def test_claims_on_serving_name_the_batches_that_are_timed():
    batches = " and ".join(map(str, gpu().serving.batches))
    statements = {c.id: c.statement for c in CLAIMS}
    assert all(f"batch {batches}" in statements[name] for name in ("decode_end_to_end", "exactness_cost"))


def test_every_claim_has_a_finding_on_a_view_with_every_question_but_the_contributed_ones(rows):
    view = rows.everything()
    verdicts = {j.id: j.verdict for j in judge_all(STUDY, view)}
    unmeasured = {name for name, verdict in verdicts.items() if verdict == "NOT MEASURED HERE"}
    assert unmeasured == {"bitwise_cpu_h200", "bitwise_three_archs"}  # no label of the manifest is among the made-up rows


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_the_terminals_ledger_never_wraps_a_claims_name(rows, capsys, monkeypatch, width):
    from suite.commands import look, store

    rich = pytest.importorskip("rich.console")
    monkeypatch.setattr(rich, "Console", partial(rich.Console, force_terminal=False, _environ={"COLUMNS": width}))
    monkeypatch.setattr(look.sys.stdout, "isatty", lambda: True, raising=False)
    contests(rows, 4096, 5, 6.0), contests(rows, 14336, 5, 6.0)
    store.print_judged(STUDY, judge_all(STUDY, rows.view()))
    printed = capsys.readouterr().out
    assert all(f" {c.id} " in printed for c in STUDY.claims)
