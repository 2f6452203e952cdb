"""Which rows of a packed batch belong to which adapter, and where each adapter's rank rows lie.

    segments = Segments.of(rows=(128, 0, 96), ranks=(16, 64, 8), scales=(2.0, 1.0, 0.5), device="cuda")
    s_MR, y_MN = shrink and expand of x_MK under it            # kernels.lora.forward

Legend: S slots, M rows (tokens) of all slots one after another, K inputs, N outputs, T rank rows of all slots one after another.
An adapter's matrices are slices of two tensors in which one row is one rank: `a_TK` (its A) and `b_TN` (its B transposed), rows
`rank_offsets[i]` to `rank_offsets[i + 1]`; its product is y_MN += scale * (x_MK a_TK^T) b_TN over its own rows of x alone. A slot has a
capacity of rank rows; an adapter of a smaller rank leaves the rest zero in A and B, which stays zero under training: the gradients of
those rows are exact zeros. Slots never meet in one sum, so nothing of one adapter, not even a NaN, reaches another.

What a CUDA graph must not change is static (slots, capacities, the most rows a slot can have); offsets and scales are read on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

__all__ = ["BUCKETS", "MAX_RANK", "Segments", "alone", "bucket"]

BUCKETS = (16, 64, 128)  # capacities of slots whose rank changes from one adapter to the next
MAX_RANK = 128


def bucket(rank: int) -> int:
    """The smallest capacity that holds `rank`. Raises ValueError for a rank outside 1 to 128."""
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"a rank is from 1 to {MAX_RANK}, got {rank=}; choose one in this range")
    return next(b for b in BUCKETS if b >= rank)


def alone(part: torch.Tensor) -> torch.Tensor:
    """A slot's part, row-major in memory of its own. On a CPU the bits of a product can depend on where its operands start and how far their
    rows lie apart, both of which a pack decides; a reference multiplies copies, so that its bits are a slot's own."""
    return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Made by `Segments.of`; tensors lie on one device.

    offsets: int32 [S + 1], first row of each slot and the end. rank_offsets: int32 [S + 1], likewise of rank rows. scales: float32 [S],
    alpha over rank. ranks: capacities. most_rows: no slot has more rows, now or at any replay of a graph.
    """

    offsets: torch.Tensor
    rank_offsets: torch.Tensor
    scales: torch.Tensor
    ranks: tuple[int, ...]
    most_rows: int

    @staticmethod
    def of(
        *, rows: Sequence[int], ranks: Sequence[int], scales: Sequence[float], device: torch.device | str, most_rows: int | None = None
    ) -> Segments:  # fmt: skip
        if not len(rows) == len(ranks) == len(scales) > 0:
            raise ValueError(f"rows, ranks and scales have one entry a slot, got {len(rows)=} {len(ranks)=} {len(scales)=}; give all for at least one slot")
        if min(rows) < 0 or not all(1 <= r <= MAX_RANK for r in ranks):
            raise ValueError(f"rows are not negative and ranks are from 1 to {MAX_RANK}, got {rows=} {ranks=}; mend the slot")
        most = max(rows) if most_rows is None else most_rows
        if most < max(rows):
            raise ValueError(f"most_rows is at least every slot's rows, got {most_rows=} {rows=}; raise it")
        return Segments(
            offsets=torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device=device),
            rank_offsets=torch.tensor([0, *accumulate(ranks)], dtype=torch.int32, device=device),
            scales=torch.tensor(scales, dtype=torch.float32, device=device),
            ranks=tuple(ranks),
            most_rows=most,
        )

    @property
    def slots(self) -> int:
        return len(self.ranks)

    @property
    def rank_rows(self) -> int:
        """T: rank rows of all slots."""
        return sum(self.ranks)

    @property
    def widest(self) -> int:
        """The largest capacity: columns of the saved s_MR."""
        return max(self.ranks)

    def bounds(self) -> list[tuple[slice, slice]]:
        """(rows, rank rows) of each slot, read from the device: for references and tests."""
        m, t = self.offsets.tolist(), self.rank_offsets.tolist()
        return [(slice(m[i], m[i + 1]), slice(t[i], t[i + 1])) for i in range(self.slots)]
