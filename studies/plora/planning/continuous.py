"""Continuous packing: slots that stay, adapters that pass through them. No job ends, a freed slot takes the next adapter.

    found = continuous(instance)                      # the best of `candidates`, on every GPU the same slots
    found.shape, found.makespan_s, found.idle_share
    refilled(work, shape, gpus=2)                     # one shape: which slot trains which adapters, in which order

A slot has a rank capacity (a bucket, as a graph captured once must serve many ranks) and sequences a micro-step, so it takes adapters of at
most that rank whose batch those sequences divide. Longest first, of those the widest, each adapter goes where it is done first. All slots of a pack pass in one
micro-step of constant time, whether they are filled or not, so the makespan is (micro-steps until the last is done) x (seconds of one), and the
shapes to try do not depend on times: their step times can be measured before anything is planned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.planning.planners import Instance
from studies.plora.planning.time_model import canonical
from studies.plora.planning.work import Work

__all__ = ["CAPACITIES", "Refilled", "candidates", "continuous", "refilled", "takes"]

CAPACITIES = (16, 64, 128)  # kernels.lora.segments.BUCKETS, which importing would load torch
ROWS = (1, 2, 4, 8, 16, 32)
Groups = dict[int, list[tuple[int, int]]]  # sequences a micro-step -> (capacity, micro-steps) of each adapter, widest first
SLOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48, 60, 64)


@dataclass(frozen=True, kw_only=True)
class Refilled:
    """Who trains where. order: for every GPU and slot the adapters in turn. steps: micro-steps until the last is done. used: slot-steps that trained."""

    shape: PackShape
    gpus: int
    order: tuple[tuple[tuple[int, ...], ...], ...]
    steps: int
    used: int
    seconds_per_step: float = math.nan
    setup_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        return self.setup_s + self.steps * self.seconds_per_step

    @property
    def idle_share(self) -> float:
        """Of all slots' micro-steps, those in which no adapter was there: the tail."""
        return 1.0 - self.used / (self.gpus * len(self.shape.slots) * self.steps)


def takes(slot: SlotShape, adapter: AdapterConfig) -> bool:
    return adapter.rank <= slot.rank and adapter.batch % slot.rows == 0


def refilled(work: Work, shape: PackShape, *, gpus: int) -> Refilled:
    """Raises ValueError where an adapter fits no slot."""
    shape = canonical(shape)
    slots = [(g, j) for g in range(gpus) for j in range(len(shape.slots))]
    free = np.zeros(len(slots))
    order: list[list[int]] = [[] for _ in slots]
    steps_of = {(i, s): math.ceil(work.sequences(i) / s.rows) if takes(s, work.adapters[i]) else math.inf for s in set(shape.slots) for i in range(len(work))}
    rows = np.array([[steps_of[i, shape.slots[j]] for _, j in slots] for i in range(len(work))])
    tightest = np.argsort([shape.slots[j].rank for _, j in slots], kind="stable")  # of equally early slots the narrowest
    for i in sorted(range(len(work)), key=lambda i: (-rows[i].min(), -work.adapters[i].rank, i)):  # the wide ones first, while the wide slots are free
        if not math.isfinite(rows[i].min()):
            raise ValueError(f"every adapter fits a slot, got {work.adapters[i]} with slots {sorted(set((s.rank, s.rows) for s in shape.slots))}; widen one")
        at = tightest[np.argmin((free + rows[i])[tightest])]
        free[at] += rows[i, at]
        order[at].append(i)
    used = sum(int(rows[i, at]) for at, line in enumerate(order) for i in line)
    k = len(shape.slots)
    return Refilled(shape=shape, gpus=gpus, order=tuple(tuple(tuple(line) for line in order[g * k : (g + 1) * k]) for g in range(gpus)), steps=int(free.max()), used=used)


def candidates(
    work: Work, *, gpus: int, fits: Callable[[PackShape], bool], most_slots: int = 64, rows: Sequence[int] = ROWS, slots: Sequence[int] = SLOTS
) -> list[PackShape]:  # fmt: skip
    """Shapes worth trying, without knowing any time: for every most sequences a slot and every number of slots, slots divided over the adapters in
    proportion to their micro-steps, by the sequences that they pass and by capacity.
    """
    found = []
    for most in rows:
        for groups in _groups(replace(work, most_rows=most)):
            for k in (k for k in slots if len(groups) <= k <= min(most_slots, math.ceil(len(work) / gpus))):
                shape = canonical(PackShape(tokens=work.tokens, slots=_divided(groups, k)))
                if fits(shape) and shape not in found:
                    found.append(shape)
    return found


def continuous(instance: Instance, shapes: Iterable[PackShape] | None = None) -> Refilled:
    """The candidate (or one of `shapes`) of least makespan under the instance's model. Raises ValueError where none fits."""
    fits = lambda shape: len(shape.slots) <= instance.most_slots and instance.bytes_of(shape) <= instance.limit_bytes  # noqa: E731
    tried = candidates(instance.work, gpus=instance.gpus, fits=fits, most_slots=instance.most_slots) if shapes is None else [s for s in shapes if fits(s)]
    timed = [
        replace(refilled(instance.work, s, gpus=instance.gpus), seconds_per_step=instance.models[1].seconds(s), setup_s=instance.setup_s) for s in tried
    ]  # fmt: skip
    if not timed:
        raise ValueError(f"continuous packing asks for a shape that fits, got none with {instance.limit_bytes=} {instance.most_slots=}; raise the limit")
    return min(timed, key=lambda r: r.makespan_s)


def _groups(work: Work) -> list[Groups]:
    """Adapters by the sequences that they pass at most, and all together by those that all can pass; with their own capacities, and all as wide as the
    widest: memory may bind, or adapters that fit everywhere may fill the tail.
    """
    own = [(work.rows(i), next(c for c in CAPACITIES if c >= a.rank), i) for i, a in enumerate(work.adapters)]
    common = math.gcd(*(n for n, _, _ in own))
    widest, ways = max(capacity for _, capacity, _ in own), []
    for single, even in product((False, True), repeat=2):
        groups: Groups = defaultdict(list)
        for n, capacity, i in sorted(own, key=lambda o: (-o[1], o[2])):
            rows = common if single else n
            groups[rows].append((widest if even else capacity, math.ceil(work.sequences(i) / rows)))
        if groups not in ways:
            ways.append(groups)
    return ways


def _divided(groups: Groups, k: int) -> tuple[SlotShape, ...]:
    """One slot a group, each further one to the group with most micro-steps a slot; within a group, adapters in order of capacity are cut into as many
    parts of equal micro-steps, each with a slot as wide as its widest.
    """
    work, counts = {rows: sum(steps for _, steps in group) for rows, group in groups.items()}, dict.fromkeys(groups, 1)
    for _ in range(k - len(groups)):
        counts[max(groups, key=lambda rows: (work[rows] / counts[rows], rows))] += 1
    out = []
    for rows, group in groups.items():
        before = list(accumulate((steps for _, steps in group), initial=0))
        cuts = [part * work[rows] / counts[rows] for part in range(counts[rows])]
        out += [SlotShape(rank=group[bisect_right(before, cut) - 1][0], rows=rows) for cut in cuts]
    return tuple(out)
