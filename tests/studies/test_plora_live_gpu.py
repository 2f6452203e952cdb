"""Claims of real training on a GPU: bits packed and alone in the deterministic mode, a grid that goes on after a pause, arms that train the same
adapters, and PEFT's adapter. Run on a GPU host: python -m pytest tests/studies/test_plora_live_gpu.py. The model is two random layers.

Tolerances
- BITS    none: digests of finished weights.
- ROWS    bf16 kernels of other shapes round otherwise, and a row near the border of two classes may change sides: a score moves by ROWS of the test
          or validation rows at most, the mean of differences by less.
- SIGMAS  a trained adapter is right on more than chance + 5 sqrt(p (1 - p) / n) of n rows.
"""

import math

import pytest
import torch

from studies.plora.measures.grid import configurations, grid, pack_times
from studies.plora.measures.makespan import makespan, same_adapters
from studies.plora.measures.quality import against_peft, quality, winner
from studies.plora.search.recorded import StepTimes, read_curves
from suite.measure import Context, Pause

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIGMAS, ROWS = 5.0, 0.15
PLANTED = {"name": "synthetic", "classes": 4, "rows": [256, 128, 128]}
STRONG = {"rank": 8, "alpha": 16.0, "learning_rate": 1e-2, "batch": 4}
AXES = {"learning_rates": [1e-3, 1e-2], "ranks": [4, 8], "batches": [1, 4], "alpha_ratios": [2.0], "seeds": 2}
BOUND = 1 / 4 + SIGMAS * math.sqrt(1 / 4 * 3 / 4 / 128)


def context(tmp_path, **changes):
    return Context(**{"device": "cuda", "state_dir": tmp_path / "state", **changes})


def tiny(**params):
    return {"model": "tiny", "task": PLANTED, "tokens": 32, **params}


def test_adapters_of_every_rank_and_batch_have_the_bits_of_those_trained_alone(tmp_path):
    result = same_adapters(context(tmp_path), **tiny(configurations=30, budget_tokens=1_500))
    assert result.metrics["equal_share"] == 1.0, [line for line in result.records["digests"] if line["packed"] != line["alone"]]
    assert len({line["packed"] for line in result.records["digests"]}) == 30


class Ends:
    """time.monotonic such that two looks later the piece is over."""

    def __init__(self):
        self.left = 2

    def __call__(self):
        self.left -= 1
        return 0.0 if self.left >= 0 else math.inf


def test_a_grid_in_pieces_has_the_curves_of_an_unbroken_one(tmp_path, monkeypatch):
    params = tiny(**AXES, budget_tokens=2_000, looks=4, slots=6)
    whole = read_curves(grid(context(tmp_path / "a"), **params).records["curves"])
    pauses = 0
    while True:
        monkeypatch.setattr("suite.measure.time.monotonic", Ends())
        try:
            pieces = read_curves(grid(context(tmp_path / "b", deadline=1.0), **params).records["curves"])
            break
        except Pause:
            pauses += 1
    assert pauses >= 3 and set(whole) == set(pieces) == set(configurations(**AXES, budget_tokens=2_000))
    for adapter, curve in whole.items():
        assert curve.tokens == pieces[adapter].tokens and curve.tokens_a_sequence == pieces[adapter].tokens_a_sequence
        assert max(abs(a - b) for a, b in zip(curve.scores, pieces[adapter].scores, strict=True)) <= ROWS


def test_times_grow_with_the_pack_and_are_read_by_the_search(tmp_path):
    result = pack_times(context(tmp_path), **tiny(packs=[[[8, 1]], [[8, 32]], [[8, 1]] * 16], micro_steps=32, repeats=5))
    times = StepTimes.from_json(result.records["times"])
    assert 0 < times.micro_step(1, 1, 8) < 0.05 and times.evaluate(1) > 0
    assert times.micro_step(16, 1, 8) < 16 * times.micro_step(1, 1, 8)  # a pack is worth something


def test_both_arms_train_the_same_adapters_and_packs_are_faster(tmp_path):
    result = makespan(context(tmp_path), model="tiny", tasks=[PLANTED], tokens=32, configurations=60, budget_tokens=4_000, slots=60, chunk=32, single_paths=["looped", "triton"])
    lines = result.records["adapters"]
    assert len(lines) == 60 and all(line["tokens"] == line["tokens_alone"] for line in lines)
    assert abs(result.metrics["score_difference"]) <= ROWS / 3 and result.metrics["diverged"] == 0.0
    assert result.metrics["speedup"] > 1.0


def test_quality_learns_the_planted_task(tmp_path):
    metrics = quality(context(tmp_path), **tiny(adapters=[STRONG], seeds=5, budget_tokens=12_000, looks=4)).metrics
    assert metrics["score_low"] > BOUND > metrics["base_score"]


def test_the_winner_among_others_is_worth_what_it_is_alone(tmp_path):
    adapter = {**STRONG, "budget_tokens": 12_000, "seed": 0}
    result = winner(context(tmp_path), **tiny(adapter=adapter, seeds=3, neighbours=7))
    assert abs(result.metrics["score_difference"]) <= ROWS and result.metrics["alone_score"] > BOUND


def test_peft_s_adapter_is_ours_within_bf16(tmp_path):
    pytest.importorskip("peft", reason="the reference trainer is a test dependency")
    result = against_peft(context(tmp_path), **tiny(adapter=STRONG, seeds=3, budget_tokens=12_000))
    assert abs(result.metrics["score_difference"]) <= ROWS and min(result.metrics["score"], result.metrics["peft_score"]) > BOUND
