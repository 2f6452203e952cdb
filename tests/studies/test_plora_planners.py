"""Schedules keep their bounds; the exact plan is the best of all plans; the others are valid, and each does what its name says."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from studies.models.config import QWEN25_7B
from studies.plora.adapter import AdapterConfig, SlotShape
from studies.plora.planning.cases import Case, cases, to_time
from studies.plora.planning.continuous import CAPACITIES, candidates, continuous, refilled, takes
from studies.plora.planning.design import paper_configurations
from studies.plora.planning.dtm import densest, dtm
from studies.plora.planning.exact import exact, packs_that_fit
from studies.plora.planning.memory import predict
from studies.plora.planning.planners import Instance, chunks, fifo, lpt, sequential
from studies.plora.planning.regret import best_plan, divisions, regret
from studies.plora.planning.schedule import Job, Schedule, fastest_assignment, list_schedule
from studies.plora.planning.simulate import LATENCY_S, compared, sharded
from studies.plora.planning.time_model import StepTable, StepTime, TimeModel
from studies.plora.planning.work import Work

Q3 = replace(QWEN25_7B, layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, vocabulary=151936, tied_head=True)
MODEL = TimeModel(fixed_s=3e-3, token_s=1.5e-5, token_rank_s=5e-9, token_position_s=1e-9, slot_s=2e-4, floor_s=6e-3)
ALL = (sequential, fifo, lpt, chunks, dtm)
BELL = (1, 1, 2, 5, 15, 52, 203)  # divisions of n things, OEIS A000110
# Sums of at most 120 times in another order: 120 roundings of 2^-53, and the solver's own tolerance of 1e-6 of the makespan for what it minimises.
ROUNDING, SOLVER = 1e-13, 1e-6
GRAHAM = lambda gpus: 2 - 1 / gpus  # noqa: E731  list schedules of single GPUs (Graham 1969)
LPT = lambda gpus: 4 / 3 - 1 / (3 * gpus)  # noqa: E731  longest first (Graham 1969)


def bytes_of(shape) -> int:
    return predict(Q3, shape, answer_tokens=16).total


def drawn(seed: int, count: int) -> tuple[AdapterConfig, ...]:
    draw = random.Random(seed)
    return tuple(
        AdapterConfig(rank=draw.choice([8, 16, 32, 64, 128]), alpha=16, learning_rate=1e-4, batch=draw.choice([1, 2, 4, 8]), budget_tokens=draw.choice([4000, 10_000, 25_000]))
        for _ in range(count)
    )  # fmt: skip


def asked(adapters, gpus=1, limit=24e9, tokens=512, **more) -> Instance:
    work = Work(adapters=tuple(adapters), tokens=tokens, real_tokens={512: 150.0, 128: 60.0, 32: 30.0}[tokens], most_rows=4)
    return Instance(work=work, gpus=gpus, models={1: MODEL}, bytes_of=bytes_of, limit_bytes=round(limit), **more)


def check(instance: Instance, plan: Schedule) -> None:
    """Each adapter once, within memory, as long as the model says; no GPU in two jobs at once, no job over two hosts."""
    assert sorted(i for p in plan.placed for i in p.job.adapters) == list(range(len(instance.work)))
    for p in plan.placed:
        assert instance.fits(p.job.adapters, p.job.degree) and len(p.gpus) == p.job.degree and len({g // 8 for g in p.gpus}) == 1
        assert p.job == instance.job(p.job.adapters, p.job.degree)
    for a, b in itertools.combinations(plan.placed, 2):
        if set(a.gpus) & set(b.gpus):
            assert a.end_s <= b.start_s * (1 + ROUNDING) or b.end_s <= a.start_s * (1 + ROUNDING)
    assert plan.bound_s <= plan.makespan_s * (1 + ROUNDING) and 0 < plan.busy_share <= 1 + ROUNDING


# ---- schedules ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_list_schedules_keep_grahams_bounds_and_the_exact_assignment_is_the_best(seed, gpus):
    draw = random.Random(seed)
    seconds = [draw.choice([1, 2, 3, 3, 5, 8.5]) for _ in range(7)]
    best = min(max(sum(t for t, g in zip(seconds, at, strict=True) if g == k) for k in range(gpus)) for at in itertools.product(range(gpus), repeat=7))
    found, at = fastest_assignment(seconds, gpus)
    assert found == best == max(sum(t for t, g in zip(seconds, at, strict=True) if g == k) for k in range(gpus))
    jobs = [Job(adapters=(i,), seconds=t) for i, t in enumerate(seconds)]
    given, longest = list_schedule(jobs, gpus), list_schedule(sorted(jobs, key=lambda j: -j.seconds), gpus)
    for plan, bound in ((given, GRAHAM(gpus)), (longest, LPT(gpus))):
        assert plan.bound_s <= best <= plan.makespan_s <= bound * best * (1 + ROUNDING)
        assert plan.makespan_s / best <= plan.graham * (1 + ROUNDING)  # PLoRA's theorem D.1


def test_a_schedule_by_hand():
    plan = list_schedule([Job(adapters=(0,), seconds=4.0), Job(adapters=(1,), seconds=1.0), Job(adapters=(2,), seconds=2.0, degree=2), Job(adapters=(3,), seconds=1.0)], 2)
    assert [(p.start_s, p.gpus) for p in plan.placed] == [(0.0, (0,)), (0.0, (1,)), (4.0, (0, 1)), (6.0, (0,))]
    assert plan.makespan_s == 7.0 and plan.busy_share == 10 / 14 and plan.bound_s == 5.0
    assert plan.graham == 7 / (7 - 1 * (2 - 1) / 2)


def test_a_job_of_many_gpus_stays_on_one_host():
    jobs = [Job(adapters=(i,), seconds=1.0 + i) for i in range(10)] + [Job(adapters=(10,), seconds=1.0, degree=8)]
    last = list_schedule(jobs, 16).placed[-1]
    assert last.gpus in (tuple(range(8)), tuple(range(8, 16))) and last.start_s == 8.0  # host 0's eighth job lasts 8 s, host 1's last 10
    with pytest.raises(ValueError, match="runs on one host"):
        list_schedule([Job(adapters=(0,), seconds=1.0, degree=4)], 2)


# ---- planners ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [*ALL, exact])
@pytest.mark.parametrize(("gpus", "limit"), [(1, 24e9), (2, 24e9), (3, 141e9)])
def test_plans_are_valid_and_none_beats_the_exact_one(planner, gpus, limit):
    for seed in range(3):
        instance = asked(drawn(seed, 6), gpus, limit)
        plan = planner(instance)
        check(instance, plan)
        assert plan.makespan_s >= exact(instance).makespan_s * (1 - SOLVER)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_exact_plan_is_the_best_of_all_plans(seed, gpus, leaving):
    """All divisions of six adapters, each with its best assignment: 203, or fewer where memory forbids some."""
    instance = asked(drawn(10 + seed, 6), gpus, leaving=leaving)
    best, packs, plans = best_plan(instance, lambda shape: bytes_of(shape) <= instance.limit_bytes)
    assert exact(instance).makespan_s == pytest.approx(best, rel=SOLVER)
    assert sorted(i for pack in packs for i in pack) == list(range(6)) and 1 < plans < BELL[6]


def test_divisions_are_bells_number_of_partitions():
    for n, count in enumerate(BELL):
        found = {frozenset(map(frozenset, packs)) for packs in divisions(n)}
        assert len(found) == count == len(list(divisions(n)))
        assert all(sorted(i for pack in packs for i in pack) == list(range(n)) for packs in found)


def test_chunks_are_the_best_cut_on_one_gpu_and_never_lose_to_no_packing():
    sizes: list[int] = []
    for seed, tokens in ((20, 512), (21, 512), (22, 32), (23, 32)):
        instance = asked(drawn(seed, 7), limit=60e9, tokens=tokens)
        order = sorted(range(7), key=lambda i: (-instance.work.micro_steps(i), -instance.work.adapters[i].rank, i))
        best = math.inf
        for marks in itertools.product((False, True), repeat=6):
            ends = [i + 1 for i, mark in enumerate(marks) if mark] + [7]
            packs = [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            if all(map(instance.fits, packs)):
                best = min(best, sum(instance.job(p).seconds for p in packs))
        assert chunks(instance).makespan_s == pytest.approx(best, rel=ROUNDING)
        sizes += [len(p.job.adapters) for p in chunks(instance).placed]
    assert {1, 2} < set(sizes)  # the cuts of some are not pairs alone
    for gpus in (1, 8, 64):
        instance = asked(paper_configurations(budget_tokens=20_000), gpus, 40e9, tokens=128)
        assert chunks(instance).makespan_s <= sequential(instance).makespan_s * (1 + ROUNDING)


def test_fifo_keeps_the_order_and_lpt_packs_like_with_like():
    instance = asked(drawn(1, 6), limit=60e9, most_slots=3)
    assert [i for p in fifo(instance).placed for i in p.job.adapters] == list(range(6))
    waste = lambda plan: sum(instance.work.steps(p.job.adapters) - instance.work.micro_steps(i) for p in plan.placed for i in p.job.adapters)  # noqa: E731
    assert waste(lpt(instance)) < waste(fifo(instance)) and waste(sequential(instance)) == 0


def test_a_job_of_leaving_adapters_goes_on_with_those_that_are_left():
    adapters = [AdapterConfig(rank=8, alpha=8, learning_rate=1e-4, batch=1, budget_tokens=150 * n) for n in (10, 30)]
    instance = asked(adapters)
    both, alone = (MODEL.seconds(instance.work.shape(pack)) for pack in ((0, 1), (1,)))
    assert instance.job((0, 1)).seconds == pytest.approx(30 * both)
    assert replace(instance, leaving=True, setup_s=2.0).job((0, 1)).seconds == pytest.approx(2.0 + 10 * both + 20 * alone)


# ---- PLoRA's planner ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [18e9, 24e9, 141e9])
@pytest.mark.parametrize("seed", range(4))
def test_the_densest_pack_is_the_best_of_all_packs(seed, limit):
    instance = asked(drawn(30 + seed, 8), limit=limit)
    rate = lambda shape: sum(s.rank for s in shape.slots) / MODEL.seconds(shape)  # noqa: E731
    best = max(rate(instance.work.shape(pack)) for pack in packs_that_fit(instance))
    slots = [instance.work.slot(i) for i in range(8)]
    kinds = tuple(sorted({s: slots.count(s) for s in slots}.items(), key=lambda item: (item[0].rank, item[0].rows)))
    found = densest(instance, kinds)
    assert sum(s.rank for s in found) / MODEL.seconds(replace(instance.work.shape((0,)), slots=found)) == pytest.approx(best, rel=SOLVER)


def test_plora_puts_high_ranks_first_whatever_they_last():
    """Rank is its measure of work: short adapters of rank 128 go before long ones of rank 8, which then last alone."""
    wide = [AdapterConfig(rank=128, alpha=16, learning_rate=1e-4, batch=1, budget_tokens=2000) for _ in range(4)]
    narrow = [AdapterConfig(rank=8, alpha=16, learning_rate=1e-4, batch=1, budget_tokens=60_000) for _ in range(4)]
    instance = asked(narrow + wide, limit=13e9)
    first = dtm(instance).placed[0].job.adapters
    assert first and all(i >= 4 for i in first)


def test_where_gpus_are_many_jobs_take_powers_of_two_and_where_memory_is_short_two_hold_more_than_one():
    models = sharded(MODEL, Q3, degrees=(1, 2, 4))
    few = replace(asked(paper_configurations(budget_tokens=20_000)[::40], 8, 40e9), models=models)
    plan = dtm(few)
    check(few, plan)
    assert {p.job.degree for p in plan.placed} <= {2, 4}  # three adapters on eight GPUs
    short = replace(asked([paper_configurations(budget_tokens=20_000)[-1]] * 6, 2, 13e9, tokens=128), models=models)  # a base of 6 GB, adapters of 6
    packs = {d: densest(short, ((short.work.slot(0), 6),), d) for d in (1, 2)}
    need = {d: bytes_of(replace(short.work.shape((0,)), slots=slots)) for d, slots in packs.items()}
    assert len(packs[1]) == 1 and len(packs[2]) == 3 and 13e9 < need[2] <= 26e9
    assert 13e9 < bytes_of(replace(short.work.shape((0,)), slots=packs[1] * 2)) and 26e9 < bytes_of(replace(short.work.shape((0,)), slots=packs[1] * 4))


def test_a_sharded_pack_shares_its_work_and_pays_for_all_reduces():
    shape = asked(drawn(2, 4)).work.shape((0, 1, 2, 3))
    models = sharded(replace(MODEL, floor_s=0.0, slot_s=0.0), Q3, degrees=(1, 2, 8))
    times = {d: m.seconds(shape) for d, m in models.items()}
    tokens = sum(s.rows for s in shape.slots) * shape.tokens
    for d in (2, 8):
        ring_s = 2 * (d - 1) / d * tokens * 2048 * 2 / (0.8 * 450e9)
        assert times[d] == pytest.approx(times[1] / d + 4 * 36 * (LATENCY_S + ring_s))
    with pytest.raises(ValueError, match="powers of two"):
        sharded(MODEL, Q3, degrees=(1, 3))


# ---- continuous packing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2])
def test_slots_take_every_adapter_once_and_only_those_that_fit(gpus):
    work = Work(adapters=paper_configurations(budget_tokens=20_000), tokens=128, real_tokens=60.0)
    shapes = candidates(work, gpus=gpus, fits=lambda s: bytes_of(s) <= 40e9)
    assert len(shapes) == len(set(shapes)) > 10
    for shape in shapes:
        found = refilled(work, shape, gpus=gpus)
        lines = [line for gpu in found.order for line in gpu]
        assert len(lines) == gpus * len(shape.slots) and sorted(i for line in lines for i in line) == list(range(120))
        took = [[math.ceil(work.sequences(i) / found.shape.slots[j % len(shape.slots)].rows) for i in line] for j, line in enumerate(lines)]
        assert all(takes(found.shape.slots[j % len(shape.slots)], work.adapters[i]) for j, line in enumerate(lines) for i in line)
        assert found.steps == max(map(sum, took)) and found.idle_share == pytest.approx(1 - sum(map(sum, took)) / (found.steps * len(lines)))


def test_equal_adapters_fill_equal_slots_without_a_tail():
    same = [AdapterConfig(rank=16, alpha=16, learning_rate=1e-4, batch=2, budget_tokens=6000)] * 12
    work = Work(adapters=tuple(same), tokens=128, real_tokens=60.0)
    four, five = (refilled(work, replace(work.shape((0,)), slots=(SlotShape(rank=16, rows=2),) * k), gpus=1) for k in (4, 5))
    assert (four.steps, four.idle_share) == (3 * 50, 0.0)
    assert five.steps == 3 * 50 and five.idle_share == pytest.approx(1 - 12 / 15)  # twelve in five slots last as long as in four


def test_long_adapters_start_first_and_rows_divide_batches():
    sizes = [600, 600, 600, 600, 1800]
    work = Work(adapters=tuple(AdapterConfig(rank=16, alpha=16, learning_rate=1e-4, batch=4, budget_tokens=n) for n in sizes), tokens=128, real_tokens=60.0)
    found = refilled(work, replace(work.shape((0,)), slots=(SlotShape(rank=16), SlotShape(rank=16))), gpus=1)
    assert found.order == (((4, 3), (0, 1, 2)),) and found.steps == 40  # 30 and 10 steps beside three times 10
    assert takes(SlotShape(rank=16, rows=2), work.adapters[0]) and takes(SlotShape(rank=128, rows=4), work.adapters[0])
    assert not takes(SlotShape(rank=8, rows=2), work.adapters[0]) and not takes(SlotShape(rank=16, rows=3), work.adapters[0])


def test_refilling_beats_jobs_that_wait_for_their_slowest():
    """One long adapter beside many short ones, arriving in the worst order: a job of four waits, a slot does not."""
    sizes = [24_000, 2000, 2000, 2000] * 3
    adapters = [AdapterConfig(rank=16, alpha=16, learning_rate=1e-4, batch=1, budget_tokens=n) for n in sizes]
    instance = asked(adapters, limit=16e9, tokens=128, most_slots=4)
    best = continuous(instance)
    assert best.makespan_s < 0.7 * fifo(instance).makespan_s
    assert len(best.shape.slots) <= 4 and bytes_of(best.shape) <= 16e9


def test_capacities_are_those_of_the_kernels():
    from kernels.lora.segments import BUCKETS

    assert CAPACITIES == BUCKETS


# ---- clusters and regret -----------------------------------------------------------------------------------------------------------


def test_clusters_are_compared_with_every_planner_and_the_same_work():
    instance = asked(paper_configurations(budget_tokens=20_000)[::15], 3, 40e9, tokens=128)
    lines = compared(replace(instance, models=sharded(MODEL, Q3, degrees=(1, 2))))
    assert {(x["planner"], x["tail"]) for x in lines} >= {("sequential", "idle"), ("dtm", "idle"), ("dtm, one GPU a job", "leave"), ("continuous", "refill")}
    assert lines[0]["over_sequential"] == 1.0 and all(x["over_sequential"] == pytest.approx(lines[0]["makespan_s"] / x["makespan_s"]) for x in lines)
    of = {(x["planner"], x["tail"]): x["makespan_s"] for x in lines}
    assert of["chunks", "idle"] <= of["sequential", "idle"] * (1 + ROUNDING)


@pytest.fixture(scope="module")
def small():
    """Cases of seven adapters and a table of times that are the model's but for one term that no model here has."""
    found = cases(tokens=512, real_tokens=180.0, budget_tokens=20_000, turns=(0, 2))
    shapes = to_time(found, bytes_of)
    bent = lambda s: MODEL.seconds(s) * (1.3 if len(s.slots) == 2 else 1.0)  # noqa: E731
    return found, {name: StepTable(StepTime(shape=s, seconds=f(s)) for s in shapes) for name, f in (("as modelled", MODEL.seconds), ("pairs are slow", bent))}


def test_an_exact_planner_has_no_regret_under_its_own_times_and_some_under_others(small):
    found, tables = small
    own = [regret(case, MODEL, tables["as modelled"], bytes_of, planner=exact) for case in found]
    assert len(own) == 8 and min(r.plans for r in own) >= 30
    assert all(1 - ROUNDING <= r.regret <= 1 + SOLVER and r.predicted_s == pytest.approx(r.chosen_s, rel=ROUNDING) for r in own)
    others = [regret(case, MODEL, tables["pairs are slow"], bytes_of, planner=exact) for case in found]
    assert all(1 - ROUNDING <= r.regret <= 1.3 + SOLVER for r in others) and max(r.regret for r in others) > 1.01
    assert max(regret(case, MODEL, tables["as modelled"], bytes_of, planner=fifo).regret for case in found) > 1.1


def test_regret_counts_what_was_measured_of_memory(small):
    """A plan whose pack did not fit when it was measured has failed; what is left free by planners is left to the best plan."""
    case, shapes = small[0][1], to_time(small[0], bytes_of)
    full = StepTable(StepTime(shape=s, seconds=MODEL.seconds(s), peak_bytes=bytes_of(s) if len(s.slots) == 1 else case.limit_bytes + 1) for s in shapes)
    failed = regret(case, MODEL, full, bytes_of, planner=exact)
    assert failed.regret == math.inf and failed.plans == 1
    table = small[1]["as modelled"]
    assert regret(case, MODEL, table, bytes_of, planner=exact, reserve=0.4).regret > regret(case, MODEL, table, bytes_of, planner=exact).regret


def test_a_case_travels_as_json(small):
    assert all(Case.from_json(case.to_json()) == case for case in small[0])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="every adapter alone fits one GPU"):
        asked(drawn(0, 2), limit=6e9)
    with pytest.raises(ValueError, match="an instance has GPUs"):
        asked(drawn(0, 2), gpus=0)
    with pytest.raises(ValueError, match="at most 10 adapters"):
        exact(asked(drawn(0, 11)))
    with pytest.raises(ValueError, match="at most 8 adapters"):
        best_plan(asked(drawn(0, 9)), lambda shape: True)
    with pytest.raises(ValueError, match="some division of the adapters fits"):
        best_plan(asked(drawn(0, 2)), lambda shape: False)
    with pytest.raises(ValueError, match="1 to 12 jobs"):
        fastest_assignment([1.0] * 13, 2)
    with pytest.raises(ValueError, match="at least one job"):
        list_schedule([], 2)
    with pytest.raises(ValueError, match="at least one GPU"):
        list_schedule([Job(adapters=(0,), seconds=1.0)], 0)
    with pytest.raises(ValueError, match="a job has adapters"):
        Job(adapters=(), seconds=1.0)
    work = Work(adapters=drawn(3, 4), tokens=128, real_tokens=60.0)
    with pytest.raises(ValueError, match="every adapter fits a slot"):
        refilled(work, replace(work.shape((0,)), slots=(SlotShape(rank=4),)), gpus=1)
    with pytest.raises(ValueError, match="a shape that fits"):
        continuous(asked(drawn(0, 2)), [])
