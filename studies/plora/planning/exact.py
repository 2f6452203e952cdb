"""The plan of least makespan for a few adapters: every pack a column of an integer program (scipy.optimize.milp, HiGHS).

    plan = exact(instance)                    # at most 10 adapters, jobs of one GPU
    fifo(instance).makespan_s / plan.makespan_s - 1

Minimise C subject to: each adapter lies in exactly one chosen pack; the seconds of the packs on each GPU add up to at most C. Listing all packs
leaves the time and memory of a pack free to be any function, so there is no restriction but the size: 2^n - 1 columns a GPU. The plan is
exact under its model; what it loses by the model's errors is measured by studies.plora.planning.regret.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from studies.plora.planning.design import MOST_ADAPTERS
from studies.plora.planning.planners import Instance
from studies.plora.planning.schedule import Job, Schedule, list_schedule

__all__ = ["exact", "on_gpus", "packs_that_fit"]


def packs_that_fit(instance: Instance) -> list[tuple[int, ...]]:
    """Every pack of the adapters within memory, smallest first. Raises ValueError for more than 10 adapters."""
    n = len(instance.work)
    if n > MOST_ADAPTERS:
        raise ValueError(f"an exact plan is for at most {MOST_ADAPTERS} adapters, got {n}; use chunks, dtm or continuous")
    return [pack for k in range(1, n + 1) for pack in combinations(range(n), k) if instance.fits(pack)]


def exact(instance: Instance) -> Schedule:
    """Raises ValueError for more than 10 adapters."""
    jobs = [instance.job(pack) for pack in packs_that_fit(instance)]
    chosen = _solve(jobs, len(instance.work), instance.gpus)
    return on_gpus([[jobs[c] for c in columns] for columns in chosen], "exact")


def on_gpus(jobs_of: list[list[Job]], made_by: str) -> Schedule:
    """A schedule in which each GPU runs its own jobs one after another, the longest first."""
    parts = [list_schedule(sorted(jobs, key=lambda j: -j.seconds), 1).placed if jobs else () for jobs in jobs_of]
    moved = [type(p)(job=p.job, start_s=p.start_s, gpus=(g,)) for g, part in enumerate(parts) for p in part]
    return Schedule(gpus=len(jobs_of), placed=tuple(moved), made_by=made_by)


def _solve(jobs: list[Job], adapters: int, gpus: int) -> list[list[int]]:
    """Columns chosen for each GPU. Variables: a 0/1 for each GPU and pack, then C; GPUs are ordered by load, so that equal plans are one."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    columns = len(jobs)
    seconds = np.array([job.seconds for job in jobs])
    scale = seconds.max()  # the solver's tolerances are absolute
    covers = np.zeros((adapters, columns))
    for c, job in enumerate(jobs):
        covers[list(job.adapters), c] = 1
    once = np.hstack([np.tile(covers, gpus), np.zeros((adapters, 1))])
    load = np.zeros((gpus, gpus * columns + 1))
    for g in range(gpus):
        load[g, g * columns : (g + 1) * columns] = seconds / scale
    within = load.copy()
    within[:, -1] = -1
    constraints = [LinearConstraint(once, 1, 1), LinearConstraint(within, -np.inf, 0)]
    if gpus > 1:
        constraints.append(LinearConstraint(load[1:] - load[:-1], -np.inf, 0))
    goal = np.zeros(gpus * columns + 1)
    goal[-1] = 1
    upper = np.ones_like(goal)
    upper[-1] = np.inf
    found = milp(goal, integrality=1 - goal, bounds=Bounds(0, upper), constraints=constraints, options={"mip_rel_gap": 0.0})
    assert found.success, f"one adapter a pack is a plan, but the solver says: {found.message}"
    chosen = (found.x[:-1] > 0.5).reshape(gpus, columns)
    assert (covers @ chosen.sum(axis=0) == 1).all(), "each adapter lies in exactly one chosen pack"
    return [list(np.flatnonzero(row)) for row in chosen]
