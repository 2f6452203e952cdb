"""Recorded grids, live makespans and quality: every adapter is trained once and to its budget, what a pause interrupts goes on, and what is
compared is what was trained. Over packs that replay made-up curves (their truth is known), then over the engine on a two-layer random model.

Tolerances
- BITS      a resumed cell gives the very record of an unbroken one; adapters of a deterministic pack have the bits of those trained alone.
- LEARNT    on the planted task the answer follows from one token: a trained adapter is right on more than CHANCE + 5 standard deviations of a
            guesser's accuracy over the n test rows, sqrt(p (1 - p) / n).
- PEFT_GAP  AdamW divides a gradient by its size, so where rounding decides a gradient's sign the weight is off by up to two steps, 2 x rate. Sums of
            some 2^10 terms round by 2^-24 x 2^5 of their size: so large is the share of such weights. Over the norm of A (uniform, variance 1 / 3K).
- SAME      arms that run the same adapters in the same float32 reference give the same scores: a difference of exactly 0 on a CPU.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from studies.plora.adapter import AdapterConfig, Evaluation, PackShape, SlotShape
from studies.plora.data.planted import synthetic
from studies.plora.measures import grid as of_grid, makespan as of_makespan, quality as of_quality
from studies.plora.measures.grid import configurations, grid, pack_times
from studies.plora.measures.live import CHUNK, add_looks, finished, setting_of, slots_for, task_of
from studies.plora.measures.makespan import chosen, makespan, same_adapters
from studies.plora.measures.quality import against_peft, quality, winner
from studies.plora.search.recorded import Curve, RecordedPack, StepTimes, read_curves
from studies.plora.search.saved import load_state
from suite.measure import Context, Pause

BUDGET, REAL = 4_000, 10.0
TICK = 2.0**-10  # seconds of a replayed micro-step: sums of it are exact
SIGMAS = 5.0
PEFT_GAP = math.sqrt(2**-19) * 2 * 1e-2 * math.sqrt(3 * 128)
AXES = {"learning_rates": [1e-4, 1e-3], "ranks": [4, 8], "batches": [1, 4], "alpha_ratios": [1.0], "seeds": 2}
PLANTED = {"name": "synthetic", "classes": 4, "rows": [64, 24, 40]}
STRONG = {"rank": 8, "alpha": 16.0, "learning_rate": 1e-2, "batch": 4}


def score(adapter):
    return 0.5 + 0.1 * math.log10(adapter.learning_rate / 1e-4) + 0.01 * adapter.seed - 0.001 * adapter.batch


class AnyCurve(dict):
    """A curve for whatever adapter is asked for: a straight rise to `score`."""

    def __contains__(self, adapter):
        return True

    def __missing__(self, adapter):
        return Curve(adapter=adapter, tokens=(0, 2 * adapter.budget_tokens), scores=(0.0, 2 * score(adapter)), losses=(3.0, 1.0), tokens_a_sequence=REAL, test_score=score(adapter))


class Timed(StepTimes):
    def micro_step(self, live, rows, rank):
        return TICK

    def check(self, shape):
        assert shape.slots


class Replay:
    """A Setting whose packs replay; it counts what was admitted."""

    tokens, tokens_a_sequence = 32, REAL

    def __init__(self):
        self.task = synthetic(vocabulary=64, classes=4, seed=0)
        self.admitted, self.shapes = [], []

    def pack(self, shape, **options):
        pack, admitted = RecordedPack(AnyCurve(), shape, Timed(micro_step_s={(1, 1, 1): TICK}, evaluate_s={1000: 0.01})), self.admitted
        admit = pack.admit
        pack.admit = lambda slot, adapter: (admitted.append(adapter), admit(slot, adapter))[1]
        self.shapes.append(shape)
        return pack

    def tested(self, pack):
        return {slot: replace(e, score=score(pack.live()[slot].adapter) / 2) for slot, e in pack.evaluate()[0].items()}


@pytest.fixture
def replay(monkeypatch):
    setting = Replay()
    for module in (of_grid, of_makespan, of_quality):
        monkeypatch.setattr(module, "setting_of", lambda ctx, **_: setting)
    return setting


def context(tmp_path, **changes):
    return Context(**{"device": "cpu", "state_dir": tmp_path / "state", **changes})


GRID = {"model": "-", "task": {}, "tokens": 32, **AXES, "budget_tokens": BUDGET, "looks": 4, "slots": 6}


# ---------------------------------------------------------------- capacities and waves


def test_slots_are_as_wide_as_the_run_of_ranks_that_they_serve():
    assert [s.rank for s in slots_for((8,) * 4 + (64,) * 4, 4)] == [64, 64, 8, 8]
    assert [s.rank for s in slots_for((8, 16, 128), 8)] == [128, 16, 8]
    assert [s.rank for s in slots_for((8, 8, 8, 128), 2)] == [128, 8]


@pytest.mark.parametrize("slots", [1, 5, 6, 16, 40])
def test_waves_hold_every_adapter_once_in_a_slot_that_fits_and_as_few_waves_as_the_widest_need(slots):
    adapters = configurations(**AXES, budget_tokens=BUDGET)
    shape = PackShape(tokens=32, slots=slots_for(tuple(a.rank for a in adapters), slots))
    waves = of_grid._waves(adapters, shape)
    placed = [a for w in waves for a in w.values()]
    assert len(placed) == len(adapters) == 16 and set(placed) == set(adapters)
    assert all(shape.slots[slot].rank >= a.rank for w in waves for slot, a in w.items())
    widest = sum(s.rank >= 8 for s in shape.slots)
    assert len(waves) == max(math.ceil(16 / len(shape.slots)), math.ceil(8 / widest))


# ---------------------------------------------------------------- the grid


def test_a_grid_s_record_is_what_the_search_reads_and_has_every_curve_to_its_end(tmp_path, replay):
    result = grid(context(tmp_path), **GRID)
    curves = read_curves(result.records["curves"])
    assert set(curves) == set(configurations(**AXES, budget_tokens=BUDGET)) == set(replay.admitted) and len(replay.admitted) == 16
    for adapter, curve in curves.items():
        assert curve.tokens_a_sequence == pytest.approx(REAL, abs=REAL * adapter.batch / (BUDGET / REAL))  # the last batch is whole
        assert curve.scores[-1] == pytest.approx(score(adapter) * curve.tokens[-1] / BUDGET) and curve.test_score == score(adapter) / 2
        assert 4 <= len(curve.tokens) <= 5
    best = max(score(a) for a in curves)
    assert result.metrics["curves"] == 16.0 and result.metrics["best_score"] == pytest.approx(best, rel=0.01)
    assert result.metrics["padding_share"] == pytest.approx(1 - REAL / 32, rel=0.02) and result.metrics["diverged"] == 0.0
    assert result.metrics["tokens_per_s"] == pytest.approx(16 * BUDGET / (3 * BUDGET / REAL * TICK), rel=0.05)  # three waves of TICK s a micro-step


class Ends:
    """time.monotonic such that `after` looks later the piece is over."""

    def __init__(self, after):
        self.left = after

    def __call__(self):
        self.left -= 1
        return 0.0 if self.left >= 0 else math.inf


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_grid_that_is_paused_again_and_again_gives_the_record_of_an_unbroken_one(after, tmp_path, replay, monkeypatch):
    unbroken = grid(context(tmp_path / "a"), **GRID)
    replay.admitted.clear()
    pauses = 0
    while True:
        monkeypatch.setattr("suite.measure.time.monotonic", Ends(after))
        try:
            resumed = grid(context(tmp_path / "b", deadline=1.0), **GRID)
            break
        except Pause:
            pauses += 1
            assert pauses < 100, "no progress"
    assert pauses >= 3
    assert resumed.records == unbroken.records and resumed.metrics == pytest.approx(unbroken.metrics)
    assert sorted(map(str, replay.admitted)) == sorted(map(str, configurations(**AXES, budget_tokens=BUDGET)))  # none was started twice


def test_a_grid_pauses_between_waves_where_the_next_one_would_not_end_in_time(tmp_path, replay, monkeypatch):
    """Every look at the clock is a second: a wave takes some 6 of them, and the piece ends in the second wave unless it pauses before."""
    clock = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    with pytest.raises(Pause):
        grid(context(tmp_path, deadline=10.5), **GRID)
    saved = load_state(tmp_path / "state" / of_grid.STATE)
    assert saved["pack"] is None and len(json.loads(saved["ledger"])["curves"]) == 6  # one wave of six slots, no adapters
    assert len(replay.admitted) == 6


def test_a_grid_of_which_nothing_ends_finite_is_refused(tmp_path, replay, monkeypatch):
    monkeypatch.setattr("tests.studies.test_plora_live.score", lambda adapter: math.nan)
    with pytest.raises(ValueError, match="got none of 16; lower the learning rates"):
        grid(context(tmp_path), **GRID)


def test_times_are_recorded_by_adapters_rows_and_widest_rank(tmp_path, replay):
    result = pack_times(context(tmp_path), model="-", task={}, tokens=32, packs=[[[8, 1], [4, 1]], [[16, 4]]], micro_steps=10, repeats=3)
    assert result.records["times"] == {"micro_step_s": [[2, 1, 8, TICK], [1, 4, 16, TICK]], "evaluate_s": [[2, 0.01], [1, 0.01]]}
    assert result.metrics == {"micro_step_s": TICK, "evaluate_s": 0.01}


# ---------------------------------------------------------------- makespans


SPAN = {"model": "-", "tasks": [{}, {}], "tokens": 32, "configurations": 30, "budget_tokens": BUDGET, "slots": 7, "chunk": 64, "single_paths": ["looped"]}


def test_both_arms_train_every_configuration_once_and_their_scores_are_compared_in_pairs(tmp_path, replay):
    replay.task = replace(replay.task, name="toy")
    result = makespan(context(tmp_path), **SPAN)
    wanted = chosen(30, BUDGET, 0)
    counts = {a: replay.admitted.count(a) for a in replay.admitted}
    assert all(counts[a] == 2 for a in wanted) and sum(counts.values()) == 61  # one more is the trial of paths
    assert result.metrics["adapters"] == 30.0 and result.facts == {"single_path": "looped"}
    rows = {line["adapter"]: line for line in result.records["adapters"]}
    assert len(rows) == 30 and all(r["tokens"] >= BUDGET and r["tokens_alone"] >= BUDGET for r in rows.values())
    assert abs(result.metrics["score_difference"]) < 0.02  # both end within a batch of the budget
    singles = {(s.slots[0].rank, s.slots[0].rows) for s in replay.shapes if len(s.slots) == 1}
    assert {(a.rank, a.batch) for a in wanted} <= singles  # alone, an adapter passes whole batches at its own rank


def test_two_ranks_share_the_work_and_neither_gets_much_more():
    work = [(i % 2, a) for i, a in enumerate(chosen(120, BUDGET, 0))]
    parts = [of_makespan._share(work, rank, 2) for rank in range(2)]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, work))
    loads = [sum(1 / a.batch for _, a in part) for part in parts]
    assert max(loads) - min(loads) <= 1.0  # list scheduling: no more than the longest job


def test_packs_of_two_ranks_take_whole_tasks_where_they_can():
    work = [(i % 2, a) for i, a in enumerate(chosen(12, BUDGET, 0))]
    parts = [of_makespan._whole_tasks(work, 2, rank, 2) for rank in range(2)]
    assert [{task for task, _ in part} for part in parts] == [{0}, {1}] and [len(part) for part in parts] == [6, 6]
    assert of_makespan._whole_tasks(work, 2, 0, 1) == work and of_makespan._whole_tasks(work, 3, 0, 2) == []


def test_a_makespan_of_two_ranks_is_the_slower_s_and_all_adapters_are_paired():
    look = lambda x: Evaluation(tokens_seen=10, score=x, loss=0.0)  # noqa: E731
    packed = [of_makespan.Arm(wall_s=5.0, built_s=1.0, tokens=60, sequences=3, scores={"a": look(0.5)}), of_makespan.Arm(wall_s=4.0, built_s=0.5, tokens=40, sequences=2, scores={"b": look(0.75), "c": look(math.nan)})]
    alone = [of_makespan.Arm(wall_s=20.0, built_s=2.0, scores={"a": look(0.25)}), of_makespan.Arm(wall_s=18.0, built_s=10.0, scores={"b": look(0.75), "c": look(0.5)})]
    result = of_makespan._compared(Context(device="cpu", world_size=2), packed, alone, [Replay()], "looped")
    m = result.metrics
    assert (m["makespan_s"], m["sequential_s"], m["speedup"], m["speedup_wall"], m["tokens_per_s"], m["gpus"]) == (5.0, 20.0, 18.0 / 4.0, 4.0, 20.0, 2.0)
    assert m["padding_share"] == 1 - 100 / (5 * Replay.tokens)
    assert (m["score_difference"], m["diverged"], m["adapters"]) == (0.125, 1.0, 3.0)  # of the pairs in which both are finite
    with pytest.raises(AssertionError, match="the same adapters, got 3 and 1"):
        of_makespan._compared(Context(device="cpu", world_size=2), packed, alone[:1], [Replay()], "looped")


def test_configurations_are_the_paper_s_and_no_more_than_there_are():
    assert len(set(chosen(120, BUDGET, 0))) == 120 and len({(a.rank, a.batch) for a in chosen(60, BUDGET, 0)}) == 30
    with pytest.raises(ValueError, match="from 1 to 120 configurations can be taken, got count=121"):
        chosen(121, BUDGET, 0)


# ---------------------------------------------------------------- quality


def test_the_adapter_is_chosen_on_validation_rows_and_reported_on_test_rows(tmp_path, replay):
    """The replayed validation score is `score`, the test score half of it: a lower rate is worse on both, and only the test score is reported."""
    adapters = [{**STRONG, "learning_rate": rate} for rate in (1e-4, 1e-2, 1e-3)]
    result = quality(context(tmp_path), model="-", task={}, tokens=32, adapters=adapters, seeds=3, budget_tokens=BUDGET, looks=4)
    runs = [AdapterConfig(**adapters[1], budget_tokens=BUDGET, seed=seed) for seed in range(3)]
    assert result.records["chosen"] == adapters[1]
    assert result.metrics["score"] == pytest.approx(np.mean([score(a) / 2 for a in runs]))
    assert result.metrics["score_high"] - result.metrics["score"] == pytest.approx(4.302653 * 0.005 / math.sqrt(3), rel=1e-6)  # t of 2 degrees; seeds lie 0.005 apart
    assert result.metrics["validation_score"] == pytest.approx(np.mean([score(a) for a in runs]), rel=0.02)


def test_a_configuration_that_diverges_under_a_seed_is_no_candidate(tmp_path, replay, monkeypatch):
    whole = score
    monkeypatch.setattr("tests.studies.test_plora_live.score", lambda a: math.nan if a.learning_rate == 1e-2 and a.seed == 1 else whole(a))
    adapters = [{**STRONG, "learning_rate": rate} for rate in (1e-4, 1e-2)]
    result = quality(context(tmp_path), model="-", task={}, tokens=32, adapters=adapters, seeds=2, budget_tokens=BUDGET, looks=4)
    assert result.records["chosen"] == adapters[0] and [line["test"] is None for line in result.records["quality"]] == [False, True]


# ---------------------------------------------------------------- over the engine


def tiny(tmp_path, **params):
    return {"model": "tiny", "task": PLANTED, "tokens": 16, **params}


def chance_bound(classes, rows):
    return 1 / classes + SIGMAS * math.sqrt((1 / classes) * (1 - 1 / classes) / rows)


def test_a_task_is_dropped_to_its_length_or_planted():
    assert task_of(PLANTED, 16).longest == 16
    with pytest.raises(ValueError, match="got name='nothing'"):
        task_of({"name": "nothing"}, 16)
    with pytest.raises(ValueError, match="got model='3b'"):
        setting_of(Context(device="cpu"), model="3b", task=PLANTED, tokens=16)


def test_finished_adapters_have_rising_looks_up_to_their_budget():
    pack = Replay().pack(PackShape(tokens=32, slots=(SlotShape(rank=8), SlotShape(rank=8))))
    adapters = {i: AdapterConfig(rank=8, alpha=8.0, learning_rate=1e-3, batch=b, budget_tokens=BUDGET) for i, b in enumerate((1, 32))}
    done = finished(pack, adapters, every=50)
    for run in done.values():
        tokens = [e.tokens_seen for e in run.looks]
        assert tokens == sorted(set(tokens)) and tokens[-1] >= BUDGET and len(tokens) >= 8
    assert not pack.live() and CHUNK > 1
    looks = {0: []}
    add_looks(looks, {0: done[0].looks[0]})
    add_looks(looks, {0: done[0].looks[0]})
    assert len(looks[0]) == 1


def test_an_engine_s_grid_is_the_same_however_it_is_cut_in_pieces(tmp_path, monkeypatch):
    axes = {**AXES, "learning_rates": [1e-2], "ranks": [2, 4], "seeds": 1}
    params = tiny(tmp_path, **axes, budget_tokens=150, looks=3, slots=3)
    unbroken = grid(context(tmp_path / "a"), **params)
    paused = 0
    while True:
        monkeypatch.setattr("suite.measure.time.monotonic", Ends(1))
        try:
            resumed = grid(context(tmp_path / "b", deadline=1.0), **params)
            break
        except Pause:
            paused += 1
    assert paused >= 2 and resumed.records == unbroken.records
    assert set(read_curves(unbroken.records["curves"])) == set(configurations(**axes, budget_tokens=150))


def test_makespan_over_the_engine_trains_the_same_adapters_in_both_arms(tmp_path):
    result = makespan(context(tmp_path), model="tiny", tasks=[PLANTED], tokens=16, configurations=4, budget_tokens=100, slots=2, chunk=16, single_paths=["looped"])
    lines = result.records["adapters"]
    assert len(lines) == 4 and all(line["tokens"] == line["tokens_alone"] and line["score"] == line["alone"] for line in lines)
    assert result.metrics["score_difference"] == 0.0
    (ours,), (theirs,) = result.records["arms"]["packed"], result.records["arms"]["alone"]
    assert ours["tokens"] == theirs["tokens"] and 0 < ours["built_s"] < ours["wall_s"] and 0 < theirs["built_s"] < theirs["wall_s"]


def test_packed_adapters_have_the_bits_of_those_trained_alone(tmp_path):
    result = same_adapters(context(tmp_path), **tiny(tmp_path, configurations=4, budget_tokens=100))
    assert result.metrics["equal_share"] == 1.0 and len({line["packed"] for line in result.records["digests"]}) == 4


def test_quality_learns_the_planted_task_and_shows_where_it_began(tmp_path):
    result = quality(context(tmp_path), **tiny(tmp_path, adapters=[STRONG], seeds=2, budget_tokens=2_500, looks=2))
    m = result.metrics
    assert m["score_low"] <= m["score"] <= m["score_high"] and result.records["chosen"] == STRONG
    assert m["score"] > chance_bound(4, 40) > m["base_score"] and 0 < m["chance"] < 0.5
    assert [len(curve) for curve in result.records["quality"][0]["curves"]] in ([2, 2], [3, 3], [2, 3], [3, 2])


def test_a_task_without_classes_is_judged_by_its_answer_loss(tmp_path):
    result = quality(context(tmp_path), model="tiny", task={**PLANTED, "classes": 0}, tokens=16, adapters=[STRONG], seeds=2, budget_tokens=600, looks=1)
    losses = [run[-1][2] for run in result.records["quality"][0]["curves"]]
    scores = [run[-1][1] for run in result.records["quality"][0]["curves"]]
    assert scores == [-loss for loss in losses] and math.isnan(result.metrics["chance"])
    assert result.metrics["score"] > result.metrics["base_score"] + 1.0  # nats an answer token: eight answers of 256 tokens are soon told from the rest


def test_the_winner_alone_is_the_winner_among_others(tmp_path):
    adapter = AdapterConfig(**STRONG, budget_tokens=150).to_json()
    result = winner(context(tmp_path), **tiny(tmp_path, adapter=adapter, seeds=2, neighbours=2))
    assert result.metrics["score_difference"] == 0.0 and all(line["weights_gap"] == 0.0 for line in result.records["seeds"])


def test_peft_trains_the_same_adapter_from_the_same_start_over_the_same_rows(tmp_path):
    pytest.importorskip("peft", reason="the reference trainer is a test dependency")
    result = against_peft(context(tmp_path), **tiny(tmp_path, adapter=STRONG, seeds=2, budget_tokens=400))
    assert 0 < result.metrics["weights_gap"] <= PEFT_GAP and result.metrics["differences_in_spreads"] == 0.0
    moved = np.array([line["ours"] for line in result.records["seeds"]])
    assert (moved == [line["peft"] for line in result.records["seeds"]]).all()


def test_differences_are_counted_in_spreads_over_seeds():
    assert [of_quality._in_spreads(d, s) for d, s in ((0.0, 0.0), (-0.02, 0.01), (0.1, 0.0))] == [0.0, 2.0, math.inf]
