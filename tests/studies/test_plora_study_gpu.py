"""Timing cells of the PLoRA study on a GPU, small: every rung, way and table runs, is captured, checked and reports what the study declares.

Tolerances:
    NOISE     ln of a ratio of a program to itself, over rounds of a shared GPU at small sizes: nothing near a factor of 1.5
    WALL      a GPU's events against the host's clock around the same steps
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from studies.plora.cells import kernels as cells_kernels
from studies.plora.cells import throughput as cells_throughput
from studies.plora.measures import kernels as of_kernels
from studies.plora.measures.flops import peak_flops
from studies.plora.measures.subjects import STEPS, subject_of, uniform
from studies.plora.presets import RUNGS
from studies.plora.study import STUDY
from suite.measure import Context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NOISE = math.log(1.5)
WALL = 0.3
GPU = Context(device="cuda")
QUICK = {"rounds": 3, "launches": 2, "warmup_s": 0.1}
SMALL = {"model": "smollm2", "tokens": 64, "answer_tokens": 16, **QUICK}


def declared(result) -> dict[str, float]:
    assert set(result.metrics) <= STUDY.metric_names() and all(map(math.isfinite, result.metrics.values()))
    return dict(result.metrics)


def test_every_rung_of_the_ladder_runs_and_trains_the_same_adapter():
    found = cells_throughput.ladder(GPU, batch=1, k=4, rank=16, saturated_tokens=4096, variants=list(RUNGS), **SMALL)
    lines = {x["variant"]: x for x in found.records["variants"]}
    assert set(lines) == {*RUNGS, "saturated"} and abs(declared(found)["log_control"]) < NOISE
    assert all(x["cosine"] >= 0.9 for v, x in lines.items() if v != "saturated")
    assert lines["B7 ours, graphed"]["us"] < lines["B3 looped"]["us"], "captured and packed kernels beat an eager loop"
    assert lines["B1 one graphed"]["us"] < lines["one eager"]["us"], "a graph takes the host's time away"
    assert found.metrics["log_pack_cap"] > 0, "many sequences keep the GPU busier than one"
    if peak_flops(torch.cuda.get_device_name()):
        assert 0 < found.metrics["mfu_single"] < found.metrics["mfu_max"] < 1


def test_a_surface_grows_with_k_for_a_small_model():
    found = cells_throughput.surface(GPU, batch=1, rank=16, ks=[2, 16], saturated_tokens=4096, **SMALL)
    gains = {x["variant"]: x["log_speedup"] for x in found.records["variants"]}
    assert gains["k=16"] > gains["k=2"] and declared(found)["log_pack_speedup"] == gains["k=16"]


def test_saturation_is_at_most_about_one():
    found = cells_throughput.saturation(GPU, rank=16, k=32, singles=[2048, 4096], **SMALL)
    assert -3.0 < declared(found)["log_saturation_share"] < NOISE


@pytest.mark.parametrize("which", of_kernels.WAYS)
@pytest.mark.parametrize("tokens", [16, 96])  # one tile of a segment, and ragged ones
def test_kernels_are_right_and_timed_beside_every_other_way(which, tokens):
    found = cells_kernels.kernels(GPU, which=which, d=1024, tokens=tokens, slots=8, rank=64, paths=["looped", "padded", "grouped"], **QUICK)
    assert [x["path"] for x in found.records["variants"]] == ["triton", "looped", "padded", "grouped"] and all(x["eager_us"] >= 0.5 * x["us"] for x in found.records["variants"])
    m = declared(found)
    assert m["log_kernel_roofline_share"] < NOISE and m["log_kernel_cap_share"] < NOISE, "nothing is faster than its bytes allow"


def test_tables_have_times_and_peaks_that_grow_with_the_pack(tmp_path):
    shapes = [{"tokens": 64, "slots": [[16, 1]]}, {"tokens": 64, "slots": [[64, 2], [16, 1], [16, 1]]}, {"tokens": 64, "slots": [[64, 8]] * 16}]
    found = cells_throughput.step_times(replace(GPU, state_dir=tmp_path), model="smollm2", table={"listed": shapes}, **QUICK)
    lines = found.records["step_times"]
    assert [x["slots"] for x in lines] == [s["slots"] for s in shapes] and not found.records["refused"]
    assert lines[0]["peak_bytes"] < lines[1]["peak_bytes"] < lines[2]["peak_bytes"] and lines[0]["seconds"] < lines[2]["seconds"]


def test_the_most_adapters_that_fit_are_found_and_the_limit_is_lifted_again():
    found = cells_throughput.largest(GPU, model="smollm2", tokens=64, rank=64, rows=1, limits_bytes=[3 * 10**9], answer_tokens=16)
    (line,) = found.records["largest"]
    assert line["k"] >= 1 and {x["k"]: x["peak_bytes"] is None for x in found.records["tried"]}[line["k"] + 1], "one more did not fit"
    torch.empty(4 * 10**9, dtype=torch.uint8, device="cuda")


def test_a_timed_call_is_as_many_steps_as_it_says():
    """Device seconds of one call against the host's clock over many."""
    subject = subject_of(GPU, "smollm2", tokens=64, answer_tokens=16)
    pack = subject.pack(uniform(64, slots=8, rank=16))
    step = subject.step(pack)
    step()
    before, began = pack.live()[0].optimizer_steps, time.perf_counter()
    spent = sum(step() for _ in range(20))
    wall = time.perf_counter() - began
    assert pack.live()[0].optimizer_steps - before == 20 * STEPS and spent <= wall * (1 + WALL)
