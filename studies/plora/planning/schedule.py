"""Jobs on GPUs: list scheduling, its makespan, and how far from the best it can be.

    jobs = [Job(adapters=(0, 1), seconds=40.0), Job(adapters=(2,), seconds=25.0), Job(adapters=(3,), seconds=20.0)]
    found = list_schedule(jobs, gpus=2)                  # in this order, each as soon as it can start
    found.makespan_s, found.bound_s, found.ratio         # 45, 42.5, 1.06: no schedule is below 42.5 s
    found.graham                                         # what PLoRA's theorem D.1 says of the same schedule

A job holds `degree` GPUs of one host from start to end. List scheduling is at most 2 - 1/G from the best for jobs of one GPU (Graham 1969).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Job", "Placed", "Schedule", "fastest_assignment", "list_schedule", "placed"]

HOST_GPUS = 8
MOST_JOBS = 12  # of an exact assignment


@dataclass(frozen=True, kw_only=True)
class Job:
    """adapters: their numbers. seconds: from start to end. degree: GPUs that it holds."""

    adapters: tuple[int, ...]
    seconds: float
    degree: int = 1

    def __post_init__(self) -> None:
        if not self.adapters or not 0 < self.seconds < math.inf or self.degree < 1:
            raise ValueError(f"a job has adapters, a finite time and at least one GPU, got {self}; mend it")


@dataclass(frozen=True, kw_only=True)
class Placed:
    job: Job
    start_s: float
    gpus: tuple[int, ...]

    @property
    def end_s(self) -> float:
        return self.start_s + self.job.seconds


@dataclass(frozen=True, kw_only=True)
class Schedule:
    gpus: int
    placed: tuple[Placed, ...]
    made_by: str = ""

    @property
    def makespan_s(self) -> float:
        return max(p.end_s for p in self.placed)

    @property
    def busy_share(self) -> float:
        """Of all GPUs' time until the end, what jobs held."""
        return self._area_s / (self.gpus * self.makespan_s)

    @property
    def bound_s(self) -> float:
        """No schedule of these jobs is shorter: the longest job, and all their GPU-seconds spread evenly."""
        return max(max(p.job.seconds for p in self.placed), self._area_s / self.gpus)

    @property
    def ratio(self) -> float:
        """Makespan over `bound_s`: at least the ratio to the best schedule of these jobs."""
        return self.makespan_s / self.bound_s

    @property
    def graham(self) -> float:
        """PLoRA's theorem D.1: F / (F - T (G - D) / G), F the makespan, T and D the time and GPUs of the job that ends last. It asks that all GPUs
        are busy until that job starts, which list schedules of single GPUs are.
        """
        last = max(self.placed, key=lambda p: (p.end_s, p.start_s))
        return self.makespan_s / (self.makespan_s - last.job.seconds * (self.gpus - last.job.degree) / self.gpus)

    @property
    def _area_s(self) -> float:
        return math.fsum(p.job.seconds * p.job.degree for p in self.placed)


def list_schedule(jobs: Iterable[Job], gpus: int, *, made_by: str = "", host_gpus: int = HOST_GPUS) -> Schedule:
    """Each job in the order given, at the first time at which a host has enough free GPUs. Raises ValueError for a job no host can hold."""
    free_s = [0.0] * _positive(gpus)
    done = []
    for job in jobs:
        done.append(placed(job, free_s, host_gpus))
        for g in done[-1].gpus:
            free_s[g] = done[-1].end_s
    if not done:
        raise ValueError("a schedule has at least one job, got none; give jobs")
    return Schedule(gpus=gpus, placed=tuple(done), made_by=made_by)


def placed(job: Job, free_s: Sequence[float], host_gpus: int = HOST_GPUS) -> Placed:
    """The job at the earliest time that its host's GPUs (free from `free_s`) allow; of equally early ones those that waited least, then the first."""
    hosts = [range(h, min(h + host_gpus, len(free_s))) for h in range(0, len(free_s), host_gpus)]
    chosen = [sorted(host, key=lambda g: (free_s[g], g))[: job.degree] for host in hosts if len(host) >= job.degree]
    if not chosen:
        raise ValueError(f"a job runs on one host, got {job.degree=} with hosts of {min(host_gpus, len(free_s))} GPUs; lower its degree")
    best = min(chosen, key=lambda c: (free_s[c[-1]], -math.fsum(free_s[g] for g in c), c))
    return Placed(job=job, start_s=free_s[best[-1]], gpus=tuple(sorted(best)))


def fastest_assignment(seconds: Sequence[float], gpus: int) -> tuple[float, tuple[int, ...]]:
    """(makespan, GPU of each job): the best there is for a few jobs of one GPU, by branch and bound. Raises ValueError for more than 12 jobs."""
    if not 1 <= len(seconds) <= MOST_JOBS:
        raise ValueError(f"an exact assignment is for 1 to {MOST_JOBS} jobs, got {len(seconds)}; use list_schedule")
    order = sorted(range(len(seconds)), key=lambda i: -seconds[i])
    best: list = [math.inf, ()]

    def place(depth: int, load: tuple[float, ...], at: dict[int, int]) -> None:
        if max(load) >= best[0]:
            return
        if depth == len(order):
            best[:] = max(load), tuple(at[i] for i in range(len(seconds)))
            return
        i = order[depth]
        for g in sorted({value: g for g, value in reversed(list(enumerate(load)))}.values(), key=lambda g: load[g]):  # one of equally loaded GPUs
            place(depth + 1, (*load[:g], load[g] + seconds[i], *load[g + 1 :]), {**at, i: g})

    place(0, (0.0,) * _positive(gpus), {})
    return best[0], best[1]


def _positive(gpus: int) -> int:
    if gpus < 1:
        raise ValueError(f"a schedule has at least one GPU, got {gpus=}; give 1 or more")
    return gpus
