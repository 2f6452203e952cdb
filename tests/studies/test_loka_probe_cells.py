"""The probe's cells at small sizes: what they report is what the parts say, finite, and labelled emulated on a CPU."""

import math

import pytest

from kernels.fp8.recipes import GEMMS
from studies.loka.measures.probing import overhead, stopping, surrogate_failures, validation
from suite.measure import Context

CPU = Context(device="cpu", seed=1)
# As in test_loka_predict: a prediction's 1st percentile is within 1 dB where rows differ by elements; 512 of 1024 rows add what sampling leaves.
GAUSSIAN_DB, SAMPLED_DB = 0.6, 1.5


@pytest.mark.parametrize(("distribution", "bound"), [("gaussian", GAUSSIAN_DB), ("row-scaled", SAMPLED_DB)])
def test_validation_holds_each_recipe_and_pass_to_the_emulation(distribution, bound):
    found = validation(CPU, distribution=distribution, m=1024, k=256, n=320)
    lines = found.records["recipes"]
    assert found.kind == "emulated" and len(lines) == 3 * sum(g.is_fp8 and not g.fast_accum for g in GEMMS.values())
    assert 0 < found.metrics["prediction_error_db"] <= bound and 0 < found.metrics["prediction_median_db"] <= 1.0
    assert found.metrics["p01_db_tensorwise"] == pytest.approx(7.8 if distribution == "row-scaled" else 27.3, abs=1.0)


def test_stopping_is_right_and_soon_where_the_share_is_clear():
    bad = stopping(CPU, distribution="row-scaled", recipe="tensorwise", m=256, k=128, n=64, draws=4, threshold_db=25.6, streams=20)
    assert bad.records["stream"][0]["truth"] == "unsafe" and bad.metrics["stop_error_share"] == 0 and bad.metrics["stop_rows"] <= 128
    good = stopping(CPU, distribution="gaussian", recipe="rowwise", m=256, k=128, n=64, draws=4, threshold_db=20.0, streams=20)
    assert good.records["stream"][0]["truth"] == "safe" and good.metrics["stop_error_share"] == 0 and 299 <= good.metrics["stop_rows"] <= 448


def test_the_papers_probe_misses_what_ours_sees():
    found = surrogate_failures(CPU, m=2048, k=128, n=128, rows=256, draws=4, seeds=4)
    assert found.metrics["surrogate_gap_db"] > 15 and abs(found.metrics["prediction_gap_db"]) < 2.5
    assert found.metrics["mere_spread"] > 1.2 > 1.05 > found.metrics["mere_sums_spread"]
    assert {law["distribution"] for law in found.records["laws"]} == {"gaussian", "student-t3", "log-normal", "row-scaled", "outliers", "post-relu"}


def test_overhead_times_pieces_that_hold_one_probed_step_each():
    found = overhead(CPU, model="dlrm_v2", size="small", mods="", batch=32, every=3, pieces=2, warmup=1, compiled=False)
    assert found.facts["sites"] == found.facts["read"] and int(found.facts["sites"]) > 8
    assert all(math.isfinite(v) for v in found.metrics.values()) and all(len(a) == 2 for a in found.arrays.values())
    assert found.metrics["probed_step_us"] > found.metrics["step_us"] > 0
