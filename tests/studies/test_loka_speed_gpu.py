"""Claims on a GPU: every timing cell runs, checks and records at small sizes, and graphs of one contest share their scratch memory.

Run on a GPU host: python -m pytest tests/studies/test_loka_speed_gpu.py. No time is asserted.
"""

import json

import pytest
import torch

from studies.loka.measures import contests, model_speed
from studies.loka.measures.replay import Replayed, shared_pool
from studies.loka.measures.site_times import site_times
from suite.measure import Context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUICK = {"rounds": 2, "launches": 2, "warmup_s": 0.05}
ALL_MODS = "nobias+blocknorm+hardswish"
SCRATCH = 64 << 20  # floats of a step's scratch, 256 MiB


@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_a_crossover_runs_every_variant(which: str) -> None:
    ask = {"m": 2000, "k": 512, "n": 272, "which": which, "recipes": ["tensorwise-fast", "rowwise-fast", "rowwise-p2", "blockwise"], "backends": ["triton", "torch"], "fused": ["rowwise-fast", "blockwise"]}
    result = contests.crossover(Context(device="cuda"), **ask, eager=True, **QUICK)
    assert all(x["eager_us"] > 0 for x in result.records["variants"])
    ran = {(x["work"], x["recipe"], x["backend"]) for x in result.records["variants"]}
    assert {("whole", r, "triton") for r in ask["recipes"]} <= ran and ("whole", "rowwise-fast", "torch") in ran
    assert (("fused", "blockwise", "triton") in ran) == (which == "forward")
    assert all(25 < x["sqnr_db"] < 35 for x in result.records["variants"] if x["recipe"] != "bf16")


@pytest.mark.parametrize("granularity, norm", [("row", "blocknorm"), ("block", "blocknorm"), ("row", "layernorm")])
def test_fused_quantising_runs(granularity: str, norm: str) -> None:
    result = contests.fused_quantise(Context(device="cuda"), m=4000, k=1024, norm=norm, activation="hardswish", granularity=granularity, keep=True, **QUICK)
    assert result.metrics["copy_gbps"] > 0 and "log_speedup_over_compiled" in result.metrics


def test_products_and_steps_of_a_model_run_in_training_and_serving(tmp_path) -> None:
    where = {"model": "wukong", "size": "small", "mods": ALL_MODS, "batch": 512}
    recipes = {"forward": ["rowwise-fast", "blockwise"], "dgrad": ["rowwise-p2"], "wgrad": ["rowwise-p2"]}
    timed = site_times(Context(device="cuda", state_dir=tmp_path), **where, recipes=recipes, backends=["triton", "torch"], **QUICK)
    (tmp_path / "times.json").write_text(json.dumps(timed.records["times"]))
    (tmp_path / "serving.json").write_text(json.dumps(timed.records["serving"]))
    ctx = Context(device="cuda", inputs={"times": tmp_path})
    training = model_speed.dense_step(ctx, **where, training=True, variants=["bf16", "single rowwise", "single rowwise fused", "dispatch"], table_rows=1000, **QUICK)
    assert all(x["gradient_cosine"] > 0.8 for x in training.records["variants"]) and training.metrics["rest_us"] > 0
    serving = model_speed.dense_step(ctx, **where, training=False, variants=["bf16", "single blockwise epilogues", "dispatch fused"], **QUICK)
    assert all(x["logits_db"] > 10 for x in serving.records["variants"])


def test_a_layer_runs_in_all_eight_mods() -> None:
    result = model_speed.mods_latency(Context(device="cuda"), size="1.25", batch=64, training=True, **QUICK)
    assert len(result.records["mods"]) == 8


def test_graphs_of_one_pool_share_scratch_and_keep_their_outputs() -> None:
    x = torch.arange(8.0, device="cuda")

    def step(factor: float) -> list[torch.Tensor]:
        scratch = torch.full((SCRATCH,), factor, device="cuda")
        return [x * (scratch * 2).max()]

    pool = shared_pool("cuda")
    steps = [Replayed(lambda f=f: step(f), "cuda", pool) for f in (1.0,)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    one = torch.cuda.memory_reserved()
    steps += [Replayed(lambda f=f: step(f), "cuda", pool) for f in (2.0, 3.0, 4.0)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - one < 4 * SCRATCH  # less than one scratch tensor more, for three steps with two each
    for s in steps:
        s.poison()
    for s in (steps[2], steps[0], steps[3], steps[1]):
        s()
    torch.cuda.synchronize()
    assert [s.output[0].tolist() for s in steps] == [(x * 2 * f).tolist() for f in (1.0, 2.0, 3.0, 4.0)]
    assert steps[0].repeats() >= 1
