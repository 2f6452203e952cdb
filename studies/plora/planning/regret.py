"""What a planner loses by its model's errors: the time of its plan over that of the best plan, both by measured step times.

    line = regret(case, model, table, bytes_of, planner=exact)
    line.regret, line.plans                        # 1.01, 203: of all plans, the chosen one is 1% from the best

A plan is a division of the adapters into packs with each pack on a GPU. All divisions whose packs fit the memory are listed, each with its best
assignment; the table has a measured time for every pack, so the best is the best there is and no model enters it. What fits is
read from measured peaks where the table has them: a chosen pack above the limit would have failed, and its regret is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from studies.plora.adapter import PackShape
from studies.plora.planning.cases import Case
from studies.plora.planning.planners import Instance
from studies.plora.planning.schedule import Schedule, fastest_assignment
from studies.plora.planning.time_model import StepTable, TimeModel

__all__ = ["Regret", "best_plan", "divisions", "measured_makespan_s", "regret"]

MOST_ADAPTERS = 8  # 4,140 divisions


@dataclass(frozen=True, kw_only=True)
class Regret:
    """chosen_s, best_s: makespans by measured times. plans: divisions that fit. predicted_s: what the planner believed."""

    planner: str
    chosen_s: float
    best_s: float
    predicted_s: float
    plans: int

    @property
    def regret(self) -> float:
        return self.chosen_s / self.best_s


def divisions(n: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to divide 0 to n - 1 into packs, each once: Bell's number of them."""
    if n == 0:
        yield ()
        return
    for rest in divisions(n - 1):
        for at in range(len(rest)):
            yield (*rest[:at], (*rest[at], n - 1), *rest[at + 1 :])
        yield (*rest, (n - 1,))


def best_plan(instance: Instance, fits: Callable[[PackShape], bool]) -> tuple[float, tuple[tuple[int, ...], ...], int]:
    """(makespan, packs, number of divisions that fit): the least of all. Raises ValueError for more than 8 adapters, or where no division fits."""
    work = instance.work
    if len(work) > MOST_ADAPTERS:
        raise ValueError(f"all plans are listed for at most {MOST_ADAPTERS} adapters, got {len(work)}; choose some")
    seconds: dict[tuple[int, ...], float] = {}

    def of(pack: tuple[int, ...]) -> float:
        if pack not in seconds:
            seconds[pack] = instance.job(pack).seconds if len(pack) <= instance.most_slots and fits(work.shape(pack)) else math.inf
        return seconds[pack]

    best, chosen, plans = math.inf, (), 0
    for packs in divisions(len(work)):
        times = [of(pack) for pack in packs]
        if math.inf in times:
            continue
        plans += 1
        makespan = fastest_assignment(times, instance.gpus)[0]
        if makespan < best:
            best, chosen = makespan, packs
    if not plans:
        raise ValueError(f"some division of the adapters fits, got none with {instance.limit_bytes=}; raise the limit")
    return best, chosen, plans


def measured_makespan_s(plan: Schedule, instance: Instance, fits: Callable[[PackShape], bool]) -> float:
    """The plan's jobs, each on its GPU as planned, by the instance's times; infinite where one does not fit."""
    loads = [0.0] * plan.gpus
    for p in plan.placed:
        if not fits(instance.work.shape(p.job.adapters)):
            return math.inf
        loads[p.gpus[0]] += instance.job(p.job.adapters).seconds
    return max(loads)


def regret(
    case: Case, model: TimeModel, table: StepTable, bytes_of: Callable[[PackShape], int], *, planner: Callable[[Instance], Schedule], reserve: float = 0.0
) -> Regret:  # fmt: skip
    """`planner` plans by `model` and `bytes_of`, leaving a share `reserve` of the memory free; `table` says what that was worth. Raises ValueError
    where the table lacks a pack that fits.
    """
    plan = planner(replace(case, limit_bytes=round((1 - reserve) * case.limit_bytes)).instance({1: model}, bytes_of))
    truth = case.instance({1: table}, bytes_of)

    def fits(shape: PackShape) -> bool:
        peak = table.peak_bytes(shape) if shape in table else None
        return (bytes_of(shape) if peak is None else peak) <= case.limit_bytes

    best_s, _, plans = best_plan(truth, fits)
    return Regret(planner=plan.made_by, chosen_s=measured_makespan_s(plan, truth, fits), best_s=best_s, predicted_s=plan.makespan_s, plans=plans)
