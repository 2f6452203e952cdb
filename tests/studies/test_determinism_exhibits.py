"""What the report shows of hand-made rows: equal where equal, differing where a digest differs, and never another device's numbers."""

from dataclasses import replace

import pytest

from studies.determinism import exhibits_audit, exhibits_flips, exhibits_matrix, exhibits_texts, peers
from studies.determinism.bits import REQUIRED
from studies.determinism.exhibits import exhibits
from studies.determinism.exhibits_matrix import MAX_COLUMNS, matrices, packed
from studies.determinism.shown import STALE
from studies.determinism.study import STUDY
from suite.claims import View, judge_all
from suite.exhibit import Curves, Matrix, Prose, Table
from tests.studies.determinism_rows import CPU, H200, L4, OTHER_CPU, Rows, audit_cases, kernel_record


@pytest.fixture
def rows(tmp_path) -> Rows:
    return Rows(tmp_path)


def tables(shown: list) -> dict[str, Table]:
    return {e.title: e for e in shown if isinstance(e, Table)}


def column(table: Table, name: str) -> list:
    return [row[[c.name for c in table.columns].index(name)] for row in table.rows]


def states(matrix: Matrix, label: str) -> list[str]:
    return [c.state for c in matrix.cells[matrix.row_labels.index(label)]]


# ---- the whole -----------------------------------------------------------------------------------------------------------------


def test_a_view_without_rows_says_what_was_not_measured_and_shows_the_peers():
    shown = exhibits(View(study="determinism", rows_=(), planned={}))
    sentences = [e for e in shown if isinstance(e, Prose)]
    assert len(sentences) >= 9 and all("NOT MEASURED HERE" in e.text for e in sentences)
    assert set(tables(shown)) == {"Attempts to break the bits", *(t.title for t in peers.tables())}


def test_a_view_with_every_question_shows_every_part_and_is_drawn(rows):
    from reports import html
    from reports.study import study_report

    view = rows.everything()
    shown = exhibits(view)
    assert not [e for e in shown if isinstance(e, Prose) and "NOT MEASURED HERE" in e.text]
    assert sum(isinstance(e, Matrix) for e in shown) == 3 and sum(isinstance(e, Curves) for e in shown) == 4
    used = {r.run_id for e in shown if not isinstance(e, Prose) for r in e.sources}
    unseen = [r for r in view.rows_ if r.run_id not in used]
    assert not unseen, "every row stands behind an exhibit"
    page = html.render(study_report(STUDY, view, judge_all(STUDY, view), {}, "0" * 12))
    assert "this CPU" in page and "STALE" not in page


def test_every_exhibit_of_stale_rows_is_marked(rows):
    from reports import html
    from reports.study import study_report

    view = rows.everything()
    view = replace(view, rows_=tuple(replace(r, stale=r.measure.endswith((":oracle", ":operators", ":generation", ":stress"))) for r in view.rows_))
    linear, texts = (next(e for e in exhibits(view) if isinstance(e, Matrix) and e.title == t) for t in (exhibits_matrix.TITLE, exhibits_texts.TITLE))
    assert all(c.text.endswith(STALE) for m in (linear, texts) for line in m.cells for c in line if c.text)
    assert [STALE in r for r in column(tables(exhibits(view))["Attempts to break the bits"], "result")][:2] == [True, False]
    page = html.render(study_report(STUDY, view, judge_all(STUDY, view), {}, "0" * 12))
    assert f"{exhibits_matrix.TITLE} (STALE)" in page and "those of the cells marked †" in page


def test_implementations_of_other_code_are_left_out_of_the_pictures(rows):
    rows.oracle("fma"), rows.operators("fma", H200), rows.operators("unheard", H200), rows.operators("unheard", H200, kernel={"kind": "x"})
    rows.texts("unheard", H200), rows.flips("unheard", 1, [[1, 2]]), rows.labels("unheard", 1, [1.0], 1.0)
    assert not any("unheard" in str(value) for t in tables(exhibits(rows.view())).values() for r in t.rows for value in r)


# ---- the matrix of linear layers -----------------------------------------------------------------------------------------------


def test_an_exact_family_is_judged_everywhere_against_its_oracle(rows):
    rows.oracle("fma"), rows.oracle("integer")
    for device in (CPU, H200):
        rows.operators("fma", device), rows.operators("integer", device, wrong=int(device == H200))
    (matrix,) = matrices(rows.view())
    assert matrix.column_labels == [f"{CPU}, batch 64", f"{H200}, batch 64"]
    assert states(matrix, "fma (ours)") == ["equal", "equal"] and states(matrix, "integer b6 (ours)") == ["equal", "partial"]
    assert matrix.cells[1][1].text == "1/2"


def test_a_digest_that_differs_in_all_operators_differs(rows):
    rows.oracle("fma"), rows.operators("fma", H200, wrong=2)
    assert states(matrices(rows.view())[0], "fma (ours)") == ["differs"]


def test_one_family_is_never_compared_with_the_others_oracle(rows):
    rows.oracle("fma"), rows.operators("integer-b9", H200)
    assert states(matrices(rows.view())[0], "integer b9 (ours)") == ["not_measured"]


def test_layercast_is_judged_on_a_gpu_against_its_own_bits_there_and_not_claimed_on_a_cpu(rows):
    for device, n in ((CPU, 64), (CPU, 1), (H200, 64), (H200, 1)):
        rows.operators("layercast", device, n, wrong=int(device == H200))
    rows.operators("layercast", H200, 8, wrong=2)
    (matrix,) = matrices(rows.view())
    assert states(matrix, "LayerCast") == ["not_claimed", "not_claimed", "equal", "partial", "equal"]  # batches 1, 64; then 1, 8, 64
    assert [c.text for c in matrix.cells[matrix.row_labels.index("LayerCast")]] == ["2/2", "reference", "2/2", "1/2", "reference"]


@pytest.mark.parametrize(
    "impl, label, state",
    [
        ("batch-invariant", "batch-invariant bf16", "differs"),
        ("sgemm", "fp32 SGEMM", "not_claimed"),
        ("tf32", "TF32 GEMM", "not_claimed"),
        ("bf16", "bf16 GEMM", "not_claimed"),
    ],
)
def test_the_others_are_judged_only_where_their_authors_promise_something(rows, impl, label, state):
    rows.operators(impl, H200, 64), rows.operators(impl, H200, 1, wrong=2)
    (matrix,) = matrices(rows.view())
    assert states(matrix, label)[0] == state and matrix.cells[matrix.row_labels.index(label)][0].text == "0/2"


def test_operators_without_a_reference_are_counted_apart_and_never_as_equal(rows):
    rows.oracle("fma")
    row = rows.operators("fma", H200)
    records = row.record("operators")
    rows.made.remove(row)
    rows.add(
        "cells:operators",
        row.params,
        records={"operators": [records[0], {**records[1], "operator": "layers.29.mlp.down_proj"}]},
        metrics=row.metrics,
        device=H200,
    )
    cell = matrices(rows.view())[0].cells[0][0]
    assert (cell.state, cell.text) == ("equal", "1/1 of 2") and "1 without a reference" in cell.detail


def test_a_cell_is_marked_where_its_reference_was_made_with_other_code(rows):
    oracle, ours = rows.oracle("fma"), rows.operators("fma", H200)
    matrix, = matrices(rows.view([replace(oracle, stale=True), ours]))
    assert matrix.cells[0][0].text == f"2/2{STALE}" and [r.run_id for r in matrix.sources] == [oracle.run_id, ours.run_id]


def test_kernel_schedules_share_one_column_in_which_one_wrong_run_shows(rows):
    rows.oracle("fma")
    rows.operators("fma", H200, kernel={"kind": "decode", "rows": 1}), rows.operators("fma", H200, kernel={"kind": "decode", "rows": 2}, wrong=1)
    (matrix,) = matrices(rows.view())
    assert matrix.column_labels == [f"{H200}, kernel schedules"] and (matrix.cells[0][0].state, matrix.cells[0][0].text) == ("partial", "3/4")
    listed = tables(exhibits_matrix.schedules(rows.view()))["The exact families under every kernel schedule"]
    assert column(listed, "equal") == [2, 1]


def test_two_cpus_have_columns_of_their_own_and_the_one_at_hand_stands_first(rows):
    rows.oracle("fma")
    rows.operators("fma", OTHER_CPU, origin="published"), rows.operators("fma", CPU), rows.operators("fma", H200)
    assert [label.partition(", ")[0] for label in matrices(rows.view())[0].column_labels] == [CPU, OTHER_CPU, H200]


@pytest.mark.parametrize("sizes, packs", [([5, 5], [10]), ([5, 8], [5, 8]), ([13], [10, 3]), ([], []), ([5, 0, 1, 8], [6, 8])])
def test_a_matrix_has_at_most_ten_columns_and_splits_no_device_that_fits(sizes, packs):
    found = packed((str(i), [(i, j) for j in range(size)]) for i, size in enumerate(sizes))
    assert [len(p) for p in found] == packs and max([0, *packs]) <= MAX_COLUMNS


# ---- whole texts and attempts --------------------------------------------------------------------------------------------------


def test_texts_are_equal_prompt_by_prompt_and_a_wrong_one_shows(rows):
    rows.texts("fma", CPU, batch=8), rows.texts("fma", H200, batch=64, graph=True, wrong=1), rows.texts("fma", H200, batch=8, sampled=True)
    (matrix,) = exhibits_texts.texts(rows.view())
    assert matrix.column_labels == [f"{CPU}, batch 8", f"{H200}, batch 64 CUDA graph", f"{H200}, batch 8 sampled"]
    assert [(c.state, c.text) for c in matrix.cells[0]] == [("equal", "reference"), ("partial", "2/3"), ("not_measured", "")]  # no CPU sampled


def test_families_share_columns_and_one_label_never_stands_for_two_schedules(rows):
    rows.texts("fma", CPU, batch=8), rows.texts("integer", CPU, batch=8), rows.texts("fma", CPU, batch=8, prompts=2)
    (matrix,) = exhibits_texts.texts(rows.view())
    assert matrix.row_labels == ["fma (ours)", "integer b6 (ours)"] and matrix.column_labels == [
        f"{CPU}, batch 8, 2 prompts",
        f"{CPU}, batch 8, 3 prompts",
    ]
    assert states(matrix, "integer b6 (ours)") == ["not_measured", "equal"]


def test_a_chunked_cpu_run_is_compared_and_is_no_reference(rows):
    rows.texts("fma", CPU, batch=8, chunk=16)
    assert states(exhibits_texts.texts(rows.view())[0], "fma (ours)") == ["not_measured"]


def test_attempts_count_equal_cases_and_say_what_was_not_run(rows):
    wrong = [
        {"operator": "linear", "case": "a", "equal": True, "error": ""},
        {"operator": "linear", "case": "b", "equal": False, "error": "RuntimeError: no"},
    ]
    rows.counted("stress", {"sms": 8}), rows.counted("foreign", {"architecture": 80}, wrong), rows.training(CPU), rows.training(H200, loss="other")
    (table,) = exhibits_texts.evidence(rows.view())
    lines = {r[0]: r[1:] for r in table.rows}
    assert lines["golden questions on 8 SMs"] == (H200, "4/4", "the golden manifest", "all equal")
    assert lines["golden questions by sm_80 code"][3] == "1 differ, 1 of them did not run"
    assert lines["training step"] == (H200, "1/2", "the CPU's training step", "1 differ, 0 on one side alone")
    others = ", ".join(str(n) for n in REQUIRED["stress"][1] if n != 8)
    assert lines[f"golden questions on {others} SMs"][3] == lines["integer b6, b9 by every engine"][3] == "NOT MEASURED HERE"


def test_foreign_code_says_how_many_kernels_were_loaded_as_such(rows):
    row = rows.counted("foreign", {"architecture": 89})
    loaded = [{"kernel": f"k{i}", "target": "sm_89", "ptx_sha256": "a" * 64} for i in range(3)]
    rows.made.remove(row)
    rows.add("evidence:foreign", row.params, records={"cases": row.record("cases"), "loaded": loaded}, device=H200)
    result = {r[0]: r[4] for r in exhibits_texts.evidence(rows.view())[0].rows}["golden questions by sm_89 code"]
    assert result == "all equal; 3 kernels loaded as that code"


def test_a_training_step_without_the_cpus_is_not_measured(rows):
    rows.training(H200)
    assert exhibits_texts.evidence(rows.view())[0].rows[-1] == (
        "training step",
        H200,
        "-",
        "the CPU's training step",
        "NOT MEASURED HERE: no CPU run",
    )


# ---- the audit -----------------------------------------------------------------------------------------------------------------


def test_the_audit_shows_each_kernel_by_target_and_names_the_broken_rule(rows):
    rows.counted("audit", {"target": "sm_90"}, audit_cases("sm_90"), device=CPU)
    rows.counted("audit", {"target": "gfx942"}, audit_cases("gfx942", equal=False, problems=["v_mfma is not allowed"], spill_bytes=64), device=CPU)
    shown = exhibits_audit.audit(rows.view())
    found = tables(shown)
    by_target = found["Kernels by target"]
    assert (
        by_target.rows[0] == ("decode", "PASS", "FAIL", "proved", 64, 1024)
        and by_target.rows[1][3] == "opcodes only"
        and by_target.rows[2][1:4] == ("not built", "not built", "-")
    )
    assert found["Kernels that failed the audit"].rows == [("decode", "gfx942", "v_mfma is not allowed")]
    assert "4 compiled kernels for sm_90, gfx942: 3 PASS, 1 FAIL" in shown[0].text and "sm_80" in by_target.note


def test_an_order_that_one_target_does_not_prove_is_not_called_proved(rows):
    rows.counted("audit", {"target": "sm_80"}, audit_cases("sm_80"), device=CPU)
    rows.counted("audit", {"target": "sm_90"}, audit_cases("sm_90", order="wrong", equal=False, problems=["order"]), device=CPU)
    assert tables(exhibits_audit.audit(rows.view()))["Kernels by target"].rows[0][3] == "wrong"


def test_executed_binaries_are_counted_against_the_manifest_and_the_audit(rows, monkeypatch):
    listed = {"sm_90": {"triton 3.6.0": {"kernels.exact.decode:decode_kernel": ["b" * 64, "d" * 64]}}}
    monkeypatch.setattr(exhibits_audit, "read", lambda: type("Manifest", (), {"cubins": listed}))
    rows.counted("audit", {"target": "sm_90"}, audit_cases("sm_90"), device=CPU)
    rows.verify(H200, [kernel_record(c * 64) for c in "abe"])
    assert tables(exhibits_audit.audit(rows.view()))["Audited = executed"].rows == [(H200, 3, 1, 1)]


def test_a_record_of_odd_shape_counts_no_binary(rows):
    rows.verify(H200, [{"kernel": "x"}])
    assert tables(exhibits_audit.executed(rows.view(), {}))["Audited = executed"].rows == [(H200, None, None, None)]


# ---- flips ---------------------------------------------------------------------------------------------------------------------


def test_the_flip_study_shows_zero_for_exact_families_and_the_share_for_others(rows):
    rows.flip_study()
    shown = exhibits_flips.flips(rows.view())
    table = tables(shown)[exhibits_flips.TITLE]
    found = {(r[0], r[1]): r[2:] for r in table.rows}
    assert (
        found["fma (ours)", "1 and 64"][0][0] == found["integer b6 (ours)", "8 and 64"][0][0] == 0 and found["fma (ours)", "1 and 64"][2] == "no flip"
    )
    value, low, high = found["bf16 GEMM", "1 and 64"][0]
    assert value == pytest.approx(100 * 9 / 24) and low < value < high
    assert found["bf16 GEMM", "8 and 64"][0][0] == pytest.approx(25) and found["bf16 GEMM", "1 and 8"][2:4] == (1.0, pytest.approx(0.2))
    spread = {r[0]: r[3] for r in tables(shown)["How far the highest probability moves with the batch"].rows}
    assert spread["fma (ours)"] == (0.0, 0.0, 0.0) and spread["bf16 GEMM"][0] > 0
    curve = next(e for e in shown if isinstance(e, Curves))
    lines = {s.name: s.y for s in curve.series}
    assert "1 and 64" in curve.title and lines["fma (ours)"] == [100, 100, 100] and lines["bf16 GEMM"] == [100, 62.5, 62.5]


def test_labels_by_batch_are_counted(rows):
    rows.flip_study()
    table = tables(exhibits_flips.flips(rows.view()))["Labels by batch"]
    assert dict(zip(column(table, "implementation"), column(table, "labels that change"), strict=True)) == {
        "fma (ours)": 0,
        "LayerCast": 0,
        "fp32 SGEMM": 0,
        "bf16 GEMM": 1,
    }


def test_flips_of_two_gpu_models_are_tables_of_their_own(rows):
    for device, tokens in ((H200, [[1, 2]] * 3), (L4, [[1, 3]] * 3)):
        rows.flips("bf16", 1, [[1, 2]] * 3, device=device), rows.flips("bf16", 8, tokens, device=device)
    found = tables(exhibits_flips.flips(rows.view()))
    assert (
        column(found[f"{exhibits_flips.TITLE}, {H200}"], "texts that diverge")[0][0] == 0
        and column(found[f"{exhibits_flips.TITLE}, {L4}"], "texts that diverge")[0][0] == 100
    )


def test_batches_of_older_code_are_not_compared_with_todays(rows):
    rows.flips("bf16", 1, [[1, 3]] * 3, stale=True), rows.flips("bf16", 8, [[1, 2]] * 3), rows.flips("bf16", 64, [[1, 2]] * 3)
    table = tables(exhibits_flips.flips(rows.view()))[exhibits_flips.TITLE]
    assert column(table, "batches") == ["8 and 64"] and not any(r.stale for r in table.sources)


def test_a_target_that_two_machines_audited_is_shown_by_todays_code(rows):
    rows.counted("audit", {"target": "sm_90"}, audit_cases("sm_90"), device=CPU)
    rows.counted("audit", {"target": "sm_90"}, audit_cases("sm_90", equal=False, problems=["old"]), device=OTHER_CPU, stale=True)
    table = tables(exhibits_audit.audit(rows.view()))["Kernels by target"]
    assert table.rows[0][1] == "PASS" and not any(r.stale for r in table.sources)


def test_attempts_count_no_case_that_launched_nothing(rows):
    idle = [{"operator": "linear", "case": "a", "equal": True, "error": "", "launches": n} for n in (0, 3)]
    rows.counted("stress", {"sms": 8}, idle)
    assert {r[0]: r[2] for r in exhibits_texts.evidence(rows.view())[0].rows}["golden questions on 8 SMs"] == "1/1"


def test_one_row_for_several_numbers_of_sms_is_a_line_each_with_the_sms_that_were_seen(rows):
    cases = [{"operator": "linear", "case": "a", "equal": n == 8, "error": "", "launches": 1, "sms": n} for n in (8, 64)]
    rows.add("evidence:stress", {"sms": [8, 64]}, records={"cases": cases, "limits": [{"sms": 8, "seen": 8}, {"sms": 64, "seen": 63}]}, device=H200)
    lines = {r[0]: (r[2], r[4]) for r in exhibits_texts.evidence(rows.view())[0].rows}
    assert lines["golden questions on 8 SMs"] == ("1/1", "all equal; programs ran on 8 SMs")
    assert lines["golden questions on 64 SMs"] == ("0/1", "1 differ; programs ran on 63 SMs")


def test_the_larger_question_is_shown_where_two_were_asked(rows):
    rows.flips("bf16", 1, [[1, 2]]), rows.flips("bf16", 1, [[1, 2]] * 3), rows.flips("bf16", 8, [[1, 2]] * 3)
    assert column(tables(exhibits_flips.flips(rows.view()))[exhibits_flips.TITLE], "of prompts") == [3]


# ---- peers ---------------------------------------------------------------------------------------------------------------------


def test_every_peer_is_there_with_a_source_and_no_empty_field():
    promises, covers = peers.tables()
    named = " ".join(column(promises, "project"))
    assert all(name in named for name in ("batch_invariant_ops", "vLLM", "SGLang", "TBIK", "RepDL", "ReproBLAS", "RepOps", "HEAL", "GEMMul8"))
    assert all(str(value).strip() for t in (promises, covers) for r in t.rows for value in r) and column(covers, "project") == column(
        promises, "project"
    )
