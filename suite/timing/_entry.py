"""The entries of a contest and the order in which a launch visits them.

    [list(order) for order in orders(num_entries=3)]     # one period of visiting orders

It times nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.timing._variant import Variant

__all__ = ["Entry", "enter", "orders"]

CONTROL_SUFFIX = " [A/A]"
EAGER_SUFFIX = " [eager]"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slot of a contest: a variant under a name, replayed from a graph or launched call by call."""

    name: str
    variant: Variant
    graphed: bool


def enter(
    variants: tuple[Variant, ...], *, control: str | None, graphed: bool, also_eager: bool
) -> tuple[list[Entry], tuple[str, str]]:
    """Entries of a contest and the names of the control's two: the variants, the control again, and eager twins if asked.

    Raises ValueError for no variants, a name that two entries share, or a `control` that is none of the variants.
    """
    if not variants:
        raise ValueError(f"a contest needs at least one variant, got {variants=}; pass Variant objects")
    names = [variant.name for variant in variants]
    chosen = names[0] if control is None else control
    if chosen not in names:
        raise ValueError(f"the control needs to be one of the variants, got {control=}; choose from {names}")
    twin = variants[names.index(chosen)]
    entries = [Entry(name=variant.name, variant=variant, graphed=graphed) for variant in variants]
    entries.append(Entry(name=chosen + CONTROL_SUFFIX, variant=twin, graphed=graphed))
    if also_eager:
        entries += [Entry(name=variant.name + EAGER_SUFFIX, variant=variant, graphed=False) for variant in variants]
    all_names = [entry.name for entry in entries]
    twice = sorted({name for name in all_names if all_names.count(name) > 1})
    if twice:
        raise ValueError(f"entries of a contest need different names, got {twice} more than once among {all_names}; rename one")
    return entries, (chosen, chosen + CONTROL_SUFFIX)


def orders(num_entries: int) -> list[tuple[int, ...]]:
    """One period of visiting orders, each a permutation of range(num_entries), balanced for carry-over.

    A Williams design: over a period every entry stands in every place equally often and follows every other entry
    equally often, so what one program leaves behind (cache contents, heat) touches all others alike.
    E. J. Williams, Australian J. Sci. Res. A 2 (1949) 149-168: n orders where n is even, 2n where it is odd.
    """
    zigzag, low, high = [], 0, num_entries - 1
    while low <= high:
        zigzag.append(low)
        if low < high:
            zigzag.append(high)
        low, high = low + 1, high - 1
    square = [tuple((place + shift) % num_entries for place in zigzag) for shift in range(num_entries)]
    mirrored = [tuple(reversed(order)) for order in square] if num_entries % 2 else []
    return square + mirrored
