"""Which compositions to time, so that a model can be fitted, tried on others, and planners judged on what was measured.

    spread(12, first=0, tokens=(64, 128, 256, 512), most_tokens=16384)           # for a fit
    spread(16, first=12, tokens=(64, 128, 256, 512), most_tokens=16384)          # others, for its errors
    compositions(work)                                                           # every pack of a few adapters
    paper_configurations(budget_tokens=100_000)                                  # the 120 of PLoRA's table 1

Nothing is drawn: points of a Halton sequence (Halton 1960) fill the ranges evenly, any number of them, the same everywhere. `shape_json` and
`shape_of` carry a composition through the parameters of a cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.planning.time_model import canonical
from studies.plora.planning.work import Work

__all__ = ["MOST_ADAPTERS", "PAPER_BATCHES", "PAPER_RANKS", "compositions", "paper_configurations", "shape_json", "shape_of", "spread"]

PAPER_RANKS = (8, 16, 32, 64, 128)
PAPER_BATCHES = (1, 2, 4, 8, 16, 32)
PAPER_RATES = (2e-5, 5.43e-5, 1.47e-4, 4e-4)  # evenly in the logarithm
PAPER_ALPHA_SHARES = (0.25, 1.0, 2.0, 4.0)  # alpha over rank
MIXED_OF = 11
MOST_ADAPTERS = 10  # of which every pack is listed: 1,023


def spread(
    count: int, *, first: int = 0, tokens: Sequence[int], slots: Sequence[int] = (1, 2, 4, 8, 16, 32), rows: Sequence[int] = (1, 2, 4),
    ranks: Sequence[int] = PAPER_RANKS, least_tokens: int = 1, most_tokens: int,
) -> list[PackShape]:  # fmt: skip
    """`count` different compositions with `least_tokens` to `most_tokens` a micro-step; skip `first` of them to get others. Half of them have
    equal slots, half ranks and rows that differ from slot to slot. Raises ValueError where the ranges have too few.
    """
    found: list[PackShape] = []
    for index in range(1, 400 * (first + count) + 1):
        length, k = _pick(index, 2, tokens), _pick(index, 3, slots)
        apart = index % MIXED_OF >= MIXED_OF // 2  # a prime of its own, so that it goes with no range
        slot = [SlotShape(rank=_pick(index + 3 * i * apart, 7, ranks), rows=_pick(index + 2 * i * apart, 5, rows)) for i in range(k)]
        shape = canonical(PackShape(tokens=length, slots=tuple(slot)))
        if least_tokens <= length * sum(s.rows for s in slot) <= most_tokens and shape not in found:
            found.append(shape)
            if len(found) == first + count:
                return found[first:]
    raise ValueError(f"the ranges have enough compositions, got {len(found)} of {first + count}; widen tokens, slots, rows or most_tokens")


def compositions(work: Work) -> list[PackShape]:
    """Every different pack of the adapters, smallest first. Raises ValueError for more than 10 adapters."""
    if len(work) > MOST_ADAPTERS:
        raise ValueError(f"all packs are listed of at most {MOST_ADAPTERS} adapters, got {len(work)}; choose some")
    packs = (pack for k in range(1, len(work) + 1) for pack in combinations(range(len(work)), k))
    return list(dict.fromkeys(work.shape(pack) for pack in packs))


def paper_configurations(*, budget_tokens: int, seed: int = 0) -> tuple[AdapterConfig, ...]:
    """120 configurations over PLoRA's ranges: every rank with every batch, each at four learning rates with alphas in a Latin square."""
    cells = [(rank, batch) for rank in PAPER_RANKS for batch in PAPER_BATCHES]
    return tuple(
        AdapterConfig(rank=rank, batch=batch, learning_rate=rate, alpha=rank * PAPER_ALPHA_SHARES[(i + j) % 4], budget_tokens=budget_tokens, seed=seed)
        for i, (rank, batch) in enumerate(cells) for j, rate in enumerate(PAPER_RATES)
    )  # fmt: skip


def shape_json(shape: PackShape) -> dict[str, Any]:
    return {"tokens": shape.tokens, "slots": [[s.rank, s.rows] for s in shape.slots]}


def shape_of(data: Mapping[str, Any]) -> PackShape:
    return PackShape(tokens=data["tokens"], slots=tuple(SlotShape(rank=r, rows=n) for r, n in data["slots"]))


def _pick(index: int, base: int, values: Sequence[int]) -> int:
    """The value at which the `index`-th point of the van der Corput sequence of `base` lies."""
    place, share = 1.0, 0.0
    while index:
        index, digit = divmod(index, base)
        place /= base
        share += digit * place
    return values[int(share * len(values))]
