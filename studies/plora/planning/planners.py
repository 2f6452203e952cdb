"""Who trains with whom: planners that divide adapters into packs and lay the packs on GPUs.

    instance = Instance(work=work, gpus=2, models={1: model}, bytes_of=lambda shape: predict(QWEN25_7B, shape).total, limit_bytes=24 * GIB)
    for plan in (sequential, fifo, lpt, chunks): plan(instance).makespan_s

`sequential` gives every adapter a job of its own, which is what is done without packing. `fifo` fills packs in the order given, `lpt` those of
most micro-steps first, so that like lie with like; both divide evenly over the GPUs where memory allows. `chunks` sorts like `lpt` and cuts the
row into packs by dynamic programming: fewest GPU-seconds with no pack above a bound and a size, for those whose schedule ends first. The exact plan is
studies.plora.planning.exact, PLoRA's own planner studies.plora.planning.dtm. A job's slots are fixed: an adapter that is done idles until the
last one is, or leaves where `leaving` says that a job can shrink. Refilling slots is studies.plora.planning.continuous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from studies.plora.adapter import PackShape
from studies.plora.planning.schedule import Job, Schedule, list_schedule
from studies.plora.planning.time_model import StepTable, TimeModel
from studies.plora.planning.work import Work

__all__ = ["Instance", "chunks", "fifo", "longest_first", "lpt", "sequential"]

BOUNDS = 24  # of a pack's time that `chunks` tries


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What is asked of a planner.

    models: degree -> time model of a pack on so many GPUs, or measured times of every pack that can be asked for; 1 is there.
    bytes_of(shape): what a pack needs, in all; it has `limit_bytes` a GPU. most_slots: of one pack, as far as the model is trusted.
    setup_s: what starting a job takes (loading, capturing). leaving: adapters that are done leave their job, which goes on with fewer slots.
    Raises ValueError where some adapter does not fit one GPU alone.
    """

    work: Work
    gpus: int
    models: Mapping[int, TimeModel | StepTable]
    bytes_of: Callable[[PackShape], int]
    limit_bytes: int
    most_slots: int = 64
    setup_s: float = 0.0
    leaving: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.most_slots < 1 or 1 not in self.models or self.setup_s < 0:
            raise ValueError(f"an instance has GPUs, slots and a model of one GPU, got {self.gpus=} {self.most_slots=} {sorted(self.models)=} {self.setup_s=}; mend it")
        alone = max(range(len(self.work)), key=lambda i: self.bytes_of(self.work.shape((i,))))
        if not self.fits((alone,)):
            raise ValueError(f"every adapter alone fits one GPU, got {self.work.adapters[alone]} of {self.bytes_of(self.work.shape((alone,)))} bytes with "
                             f"{self.limit_bytes=}; raise the limit or lower most_rows")  # fmt: skip

    @property
    def degrees(self) -> tuple[int, ...]:
        """GPUs that a job may hold here."""
        return tuple(d for d in sorted(self.models) if d <= self.gpus)

    def fits(self, pack: Sequence[int], degree: int = 1) -> bool:
        """PLoRA's condition: what the pack needs is at most the memory of its GPUs together."""
        return len(pack) <= self.most_slots and self.bytes_of(self.work.shape(pack)) <= degree * self.limit_bytes

    def job(self, pack: Iterable[int], degree: int = 1) -> Job:
        pack = tuple(sorted(pack))
        ends = sorted({self.work.micro_steps(i) for i in pack}) if self.leaving else [self.work.steps(pack)]
        seconds = self.setup_s
        for start, end in zip([0, *ends], ends, strict=False):
            stayed = [i for i in pack if self.work.micro_steps(i) > start] if self.leaving else pack
            seconds += (end - start) * self.models[degree].seconds(self.work.shape(stayed))
        return Job(adapters=pack, degree=degree, seconds=seconds)


def longest_first(jobs: Iterable[Job], gpus: int, made_by: str) -> Schedule:
    """Graham's LPT over finished packs."""
    return list_schedule(sorted(jobs, key=lambda j: (-j.seconds, j.adapters)), gpus, made_by=made_by)


def sequential(instance: Instance) -> Schedule:
    """One adapter a job, longest first."""
    return longest_first((instance.job((i,)) for i in range(len(instance.work))), instance.gpus, "sequential")


def fifo(instance: Instance) -> Schedule:
    """Packs of neighbours in the order given, started in that order."""
    return list_schedule(_filled(instance, range(len(instance.work))), instance.gpus, made_by="fifo")


def lpt(instance: Instance) -> Schedule:
    """Packs of neighbours by micro-steps, longest first."""
    return longest_first(_filled(instance, _by_steps(instance.work)), instance.gpus, "lpt")


def chunks(instance: Instance) -> Schedule:
    """The best of cuts of the row by micro-steps: of all on one GPU; on more of those that are cheapest under a bound on a pack's time and size."""
    order = _by_steps(instance.work)
    cost: dict[tuple[int, int], Job] = {}
    for i in range(len(order)):
        for j in range(i + 1, min(len(order), i + instance.most_slots) + 1):
            if not instance.fits(order[i:j]):
                break
            cost[i, j] = instance.job(order[i:j])
    longest_s = max(cost[i, i + 1].seconds for i in range(len(order)))
    times = sorted({job.seconds for job in cost.values() if job.seconds >= longest_s})
    bounds = dict.fromkeys(times[round(i * (len(times) - 1) / BOUNDS)] for i in range(BOUNDS + 1))
    most = max(j - i for i, j in cost)
    cuts = [_cut(len(order), cost, bound, size) for size in {most, *(2**n for n in range(most.bit_length()))} for bound in (bounds if instance.gpus > 1 else times[-1:])]
    return min((longest_first(cut, instance.gpus, "chunks") for cut in cuts), key=lambda s: s.makespan_s)


def _by_steps(work: Work) -> list[int]:
    return sorted(range(len(work)), key=lambda i: (-work.micro_steps(i), -work.adapters[i].rank, i))


def _filled(instance: Instance, order: Iterable[int]) -> list[Job]:
    """A new pack where the next adapter does not fit, or the pack has its even share of all."""
    share = math.ceil(len(instance.work) / instance.gpus)
    packs: list[list[int]] = [[]]
    for i in order:
        if packs[-1] and (len(packs[-1]) >= share or not instance.fits([*packs[-1], i])):
            packs.append([])
        packs[-1].append(i)
    return [instance.job(pack) for pack in packs]


def _cut(n: int, cost: Mapping[tuple[int, int], Job], bound: float, size: int) -> list[Job]:
    """Consecutive packs of at most `size` with fewest seconds together, none above `bound`, which every adapter alone keeps."""
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * n
    for j in range(1, n + 1):
        best[j] = min((best[i][0] + cost[i, j].seconds, i) for i in range(max(0, j - size), j) if (i, j) in cost and cost[i, j].seconds <= bound)
    cut, j = [], n
    while j:
        cut.append(cost[best[j][1], j])
        j = best[j][1]
    return cut
