"""PLoRA's planner (arXiv 2508.02932, section 5 and algorithms 1 and 2), re-made from a description of it.

    dtm(instance)                             # jobs of one GPU: the restricted form, as far as one engine without sharding can run it
    dtm(replace(instance, models=sharded))    # degrees 1, 2, 4, 8, for simulation

Where GPUs become free, decomposed throughput maximisation chooses what starts on them: for a job of d GPUs the pack of greatest
(sum of ranks) / (time of a micro-step) within d GPUs' memory, then the same for the GPUs and adapters that are left, for every d that is a power of two and
no larger than the one before; of all these divisions the one of greatest summed throughput. The pack for a given d is an integer program with
a ratio as its goal, solved by Dinkelbach's method (Management Science 13, 1967) over scipy.optimize.milp, exactly: memory and time are linear
in how many adapters of each kind are taken, once the widest rank is fixed, and all widest ranks are tried. Rank stands for work, so adapters of
high rank go first and micro-steps count for nothing: what that costs is what the other planners show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from studies.plora.adapter import PackShape, SlotShape
from studies.plora.planning.planners import Instance
from studies.plora.planning.schedule import HOST_GPUS, Job, Placed, Schedule, placed
from studies.plora.planning.time_model import canonical, features

__all__ = ["densest", "dtm"]

Kinds = tuple[tuple[SlotShape, int], ...]  # (slot, how many adapters ask for such a one), sorted
ROUNDS = 50  # of Dinkelbach's method, which converges superlinearly
CONVERGED = 1e-9  # relative


def dtm(instance: Instance) -> Schedule:
    """The schedule that repeated division gives."""
    planner, made_by = _Planner(instance), "dtm" if instance.degrees != (1,) else "dtm, one GPU a job"
    left = {i: instance.work.slot(i) for i in range(len(instance.work))}
    free_s = [0.0] * instance.gpus
    done: list[Placed] = []
    while left:
        now_s = min(free_s)
        for host in range(0, instance.gpus, HOST_GPUS):  # a job stays on one host
            gpus = [g for g in range(host, min(host + HOST_GPUS, instance.gpus)) if free_s[g] <= now_s]
            for degree, slots in planner.division(len(gpus), _kinds(left.values())):
                pack = _take(slots, left)
                start = _start(instance.job(pack, degree), gpus, now_s)
                done.append(start)
                for g in start.gpus:
                    free_s[g] = start.end_s
                    gpus.remove(g)
        assert not left or min(free_s) > now_s, "a job of one GPU fits, so no GPU stays free while adapters are left"
    return Schedule(gpus=instance.gpus, placed=tuple(done), made_by=made_by)


def densest(instance: Instance, kinds: Kinds, degree: int = 1) -> tuple[SlotShape, ...]:
    """Slots of greatest (sum of ranks) / (seconds of a micro-step) on `degree` GPUs; none where nothing fits."""
    best: tuple[SlotShape, ...] = ()
    for widest in sorted({s.rank for s, _ in kinds}, reverse=True):
        best = _denser(instance, kinds, degree, widest, best)
    return best


@dataclass
class _Planner:
    instance: Instance
    packs: dict[tuple[int, Kinds], tuple[SlotShape, ...]] = field(default_factory=dict)

    def division(self, gpus: int, kinds: Kinds) -> list[tuple[int, tuple[SlotShape, ...]]]:
        """(degree, slots) of the jobs that start now on `gpus` GPUs of a host."""
        return self._best(gpus, max(self.instance.degrees), kinds)[1]

    def _best(self, gpus: int, most: int, kinds: Kinds) -> tuple[float, list[tuple[int, tuple[SlotShape, ...]]]]:
        best: tuple[float, list] = (0.0, [])
        for degree in (d for d in self.instance.degrees if d <= min(gpus, most)) if kinds else ():
            if (degree, kinds) not in self.packs:
                self.packs[degree, kinds] = densest(self.instance, kinds, degree)
            slots = self.packs[degree, kinds]
            if slots:
                rest, jobs = self._best(gpus - degree, degree, _without(kinds, slots))
                total = _ratio(self.instance, self.instance.models[degree], slots) + rest
                best = max(best, (total, [(degree, slots), *jobs]), key=lambda b: b[0])
        return best


def _denser(instance: Instance, kinds: Kinds, degree: int, widest: int, taken: tuple[SlotShape, ...]) -> tuple[SlotShape, ...]:
    """As `densest`, of adapters no wider than `widest`, memory counted as if one were so wide; `taken` where nothing is better than that."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    model, tokens = instance.models[degree], instance.work.tokens
    slots, counts = zip(*[(s, n) for s, n in kinds if s.rank <= widest], strict=True)
    own_bytes, fixed_bytes = _linear_bytes(instance, slots, widest)
    room = degree * instance.limit_bytes - fixed_bytes
    own_s = np.array([features(PackShape(tokens=tokens, slots=(s,)))[1:] @ model.coefficients[1:] for s in slots])
    ranks = np.array([s.rank for s in slots], float)
    if room < own_bytes.min():
        return taken
    unit_s = model.floor_s or model.fixed_s + own_s.max()  # the solver's tolerances are absolute: numbers near 1
    n = len(slots)
    constraints = [
        LinearConstraint(np.append(own_bytes / room, 0.0), -np.inf, 1.0),
        LinearConstraint(np.append(np.ones(n), 0.0), 1, instance.most_slots),
        LinearConstraint(np.append(own_s, -unit_s) / unit_s, -np.inf, -model.fixed_s / unit_s),
    ]
    bounds = Bounds(np.append(np.zeros(n), model.floor_s / unit_s), np.append(np.array(counts, float), np.inf))
    rate = _ratio(instance, model, taken) if taken else 0.0
    for _ in range(ROUNDS):
        goal = np.append(-ranks, rate * unit_s) / ranks.max()
        found = milp(goal, integrality=np.append(np.ones(n), 0), bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0.0})
        if not found.success:
            return taken
        chosen = tuple(s for s, x in zip(slots, found.x[:-1], strict=True) for _ in range(round(x)))
        better = _ratio(instance, model, chosen)
        if better <= rate * (1 + CONVERGED):
            return taken
        rate, taken = better, chosen
    raise AssertionError(f"Dinkelbach's method converges superlinearly, but {ROUNDS} rounds did not do")


def _linear_bytes(instance: Instance, slots: Sequence[SlotShape], widest: int) -> tuple[np.ndarray, int]:
    """Bytes that each slot adds beside one of rank `widest`, and those of no slot at all: the memory model is linear there."""
    wide = SlotShape(rank=widest)
    of = lambda *more: instance.bytes_of(canonical(PackShape(tokens=instance.work.tokens, slots=(wide, *more))))  # noqa: E731
    alone = of()
    return np.array([of(s) - alone for s in slots], float), 2 * alone - of(wide)


def _ratio(instance: Instance, model, slots: Sequence[SlotShape]) -> float:
    return sum(s.rank for s in slots) / model.seconds(PackShape(tokens=instance.work.tokens, slots=tuple(slots)))


def _kinds(slots) -> Kinds:
    return tuple(sorted(Counter(slots).items(), key=lambda item: (item[0].rank, item[0].rows)))


def _without(kinds: Kinds, taken: Sequence[SlotShape]) -> Kinds:
    gone = Counter(taken)
    return tuple((s, n - gone[s]) for s, n in kinds if n > gone[s])


def _take(slots: Sequence[SlotShape], left: dict[int, SlotShape]) -> tuple[int, ...]:
    """The first adapters that ask for these slots, taken out of `left`."""
    pack = []
    for slot in slots:
        pack.append(next(i for i, s in left.items() if s == slot))
        del left[pack[-1]]
    return tuple(pack)


def _start(job: Job, gpus: Sequence[int], now_s: float) -> Placed:
    at = placed(job, [now_s] * len(gpus))
    return Placed(job=job, start_s=now_s, gpus=tuple(gpus[g] for g in at.gpus))
