"""The bundles checked in under reports/published/: valid, small, and enough for a reader with a laptop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reports import html
from reports.blocks import Matrix
from reports.study import study_report
from suite import identity
from suite.bundle import BundleStore, read_bundle
from suite.claims import judge_all, make_view
from suite.session import PUBLISHED
from suite.study import load_study, study_names
from suite.tracking import open_tracker

MAX_BYTES = 8 << 20  # of all published bundles: they travel with the source
FOLDERS = sorted(p.parent for p in PUBLISHED.glob("*/**/bundle.json"))


def test_published_bundles_are_valid_small_and_of_known_commits():
    bundles = [read_bundle(folder) for folder in FOLDERS]
    assert len(bundles) > 100 and sum(f.stat().st_size for folder in FOLDERS for f in folder.iterdir()) < MAX_BYTES
    assert {b.status for b in bundles} == {"OK"} and all(len(b.data["commit"]) == 40 for b in bundles)
    assert len({b.id for b in bundles}) == len(bundles)


def test_published_environments_hold_the_allow_list_and_no_more():
    allowed = {"device_model", "cpu_model", "gpu_model", "driver", "python", "torch", "triton", "numpy", "cores", "machine", "os", "process"}
    assert all(set(read_bundle(f, verify_files=False).data["environment"]) <= allowed for f in FOLDERS)


def test_results_are_published_under_the_study_they_belong_to():
    assert {f.relative_to(PUBLISHED).parts[0] for f in FOLDERS} <= set(study_names())


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """What a laptop sees before it has run anything: the published rows alone."""
    state = tmp_path_factory.mktemp("state")
    store, study, tracker = BundleStore(state), load_study("determinism"), open_tracker(None, state)
    for folder in FOLDERS:
        bundle, _ = store.adopt(folder, "published")
        tracker.ingest(bundle, None, study.metric_names(), "published")
    rows = tracker.rows("determinism")
    return make_view(rows, {}, {m: identity.code_digest(m) for m in {r.measure.partition(":")[0] for r in rows}})


def test_timing_claims_stand_on_published_rows_of_the_h200(view):
    judged = {j.id: j for j in judge_all(load_study("determinism"), view)}
    for name in ("decode_vs_layercast", "decode_bandwidth", "decode_vs_fp32_stored", "decode_vs_bf16"):
        assert judged[name].n >= 5 and judged[name].machine == "NVIDIA H200" and judged[name].kind == "measured" and judged[name].bar_met is not None
    assert judged["decode_bandwidth"].bar_met and judged["weight_bytes"].bar_met
    assert judged["bitwise_three_archs"].verdict == "NOT MEASURED HERE"


@pytest.fixture(scope="module")
def without_oracle(view):
    """The GPU's rows alone."""
    return replace(view, rows_=tuple(r for r in view.rows_ if r.device == "NVIDIA H200"))


def test_bits_are_not_judged_without_a_cpu_oracle(without_oracle):
    judged = {j.id: j for j in judge_all(load_study("determinism"), without_oracle)}
    assert judged["bitwise_cpu_h200"].verdict == "NOT MEASURED HERE"


def test_without_a_cpu_oracle_the_matrix_says_that_nothing_is_known_of_our_bits(without_oracle):
    study = load_study("determinism")
    matrix = next(b for b in study_report(study, without_oracle, judge_all(study, without_oracle), {}, "0" * 12).blocks if isinstance(b, Matrix))
    assert matrix.row_labels[0] == "fma (ours)" and {c.state for c in matrix.cells[0]} == {"not_measured"}
    assert [g.label for g in matrix.column_groups] == ["NVIDIA H200"] and len(matrix.run_ids) > 28


def test_the_report_of_published_rows_is_a_function_of_them(view):
    study = load_study("determinism")
    page = html.render(study_report(study, view, judge_all(study, view), {}, "0" * 12))
    assert "NVIDIA H200" in page and "NOT MEASURED HERE" in page and page.count("<svg") >= 3
    assert page == html.render(study_report(study, view, judge_all(study, view), {}, "0" * 12))


def test_the_readmes_picture_is_there():
    assert Path(PUBLISHED / "matrix.png").stat().st_size < 100_000
