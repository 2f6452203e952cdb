"""Tensor parallelism whose result has the bits of one rank: which part of a weight a rank holds, and how parts become a whole.

    parallel = join(torch.distributed.group.WORLD)          # in each of 2, 4 or 8 processes; SINGLE in one
    w_part = parallel.columns(w_NK)                         # this rank's inputs: 8 / size whole spans of K
    y_MN = tree_add(parallel.gather(y_part_MN))             # family A: the upper levels of the fixed tree over spans

Legend: M tokens, N outputs, K inputs, P ranks. Splitting N needs no sum and cannot change bits. Splitting K does: family A gathers
the ranks' subtrees and adds them as the tree does (`tree_add`); family B reduces row exponents by max and integers by sum, both free
of order. No pipeline, no sequence parallelism, no overlap of communication with arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

RANKS = (1, 2, 4, 8)  # a rank holds whole spans, and there are 8


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """One rank's view; `group` None is the group of one. Raises ValueError for a number of ranks that does not divide the spans."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if self.size not in RANKS or not 0 <= self.rank < self.size:
            raise ValueError(f"the number of ranks is one of {RANKS} and a rank below it, got {self.rank=} {self.size=}; start as many processes")

    def divides(self, *counts: int) -> bool:
        """True where each of `counts` can be shared out in equal parts."""
        return all(count % self.size == 0 for count in counts)

    def rows(self, w_NK: torch.Tensor) -> torch.Tensor:
        """This rank's equal share of the first dimension, in order. Raises ValueError where there is none."""
        if not self.divides(w_NK.shape[0]):
            raise ValueError(f"rows must be a multiple of the ranks, got {tuple(w_NK.shape)=} {self.size=}; keep this matrix whole")
        return w_NK.chunk(self.size)[self.rank] if self.size > 1 else w_NK

    def columns(self, w_NK: torch.Tensor) -> torch.Tensor:
        """This rank's equal share of K. Raises ValueError unless 8 divides K (order.py: only then does K have spans to share)."""
        if self.size == 1:
            return w_NK
        if w_NK.shape[1] % max(RANKS):
            raise ValueError(f"a K that is split is a multiple of {max(RANKS)}, got {tuple(w_NK.shape)=} {self.size=}; keep this matrix whole")
        return w_NK.chunk(self.size, dim=1)[self.rank].contiguous()

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `part`, by rank."""
        if self.size == 1:
            return [part]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return parts

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks: exact for integers, in the library's order for floats."""
        return self._reduce(part, dist.ReduceOp.SUM)

    def max(self, part: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks."""
        return self._reduce(part, dist.ReduceOp.MAX)

    def _reduce(self, part: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        if self.size == 1:
            return part
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, op=op, group=self.group)
        return whole


SINGLE = Parallel()


def join(group: Any) -> Parallel:
    """The calling process's place in a process group of torch.distributed (gloo on CPUs, nccl on GPUs)."""
    return Parallel(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)


def tree_add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, (0+1)+(2+3): the levels of the span tree above the ranks' subtrees."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
