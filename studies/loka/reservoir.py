"""A reservoir of real rows: a uniform sample of all that streamed by, which merges, and in which operands of one product stay paired.

    r = sample(x_MK[:, None], step=7, capacity=512, seed=0).merge(sample(y_MK[:, None], step=8, capacity=512, seed=0))
    r.items                                    # [512, 1, K]: 512 rows of both steps, each pair of sets of 512 equally likely

Every item has a key, a Philox number of (seed, step, index) and of nothing else; the reservoir is the `capacity` smallest keys. So it is a uniform
sample without replacement, merging is exact, associative and commutative, ranks need not talk, and x and dy of one step keep the same rows.
What is chosen is known before data are read: a GPU copies the chosen items alone.

An item is one row [1, C] of a layer's operand (of T layers at once: [T, C]), or one whole matrix [R, C] of a batched product, whose rows have partners
in the other operand.
Rows of a parameter are `fixed`: their key is that of their index, and a later step's values replace an earlier one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kernels.exact.philox import philox_ref

__all__ = ["Reservoir", "priorities", "sample"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reservoir:
    """The items of the smallest keys, in the order of their keys; all on the CPU."""

    capacity: int
    keys: torch.Tensor  # int64 [I], ascending
    steps: torch.Tensor  # int64 [I]
    index: torch.Tensor  # int64 [I], within the step
    items: torch.Tensor  # [I, R, C] in the dtype that was read

    def __len__(self) -> int:
        return len(self.keys)

    def merge(self, other: Reservoir) -> Reservoir:
        """The sample of both streams; of one key the later step stays. Raises ValueError where capacities or items differ."""
        if self.capacity != other.capacity or self.items.shape[1:] != other.items.shape[1:] or self.items.dtype != other.items.dtype:
            raise ValueError(
                f"reservoirs merge with the same capacity, item and dtype, got {self.capacity} {tuple(self.items.shape[1:])} {self.items.dtype} "
                f"and {other.capacity} {tuple(other.items.shape[1:])} {other.items.dtype}; sketch both streams alike"
            )
        keys, steps = torch.cat([self.keys, other.keys]), torch.cat([self.steps, other.steps])
        order = torch.from_numpy(np.lexsort((-steps.numpy(), keys.numpy())))
        first = torch.ones(len(order), dtype=torch.bool)
        first[1:] = keys[order][1:] != keys[order][:-1]
        chosen = order[first][: self.capacity]
        both = {name: torch.cat([getattr(self, name), getattr(other, name)])[chosen] for name in ("index", "items")}
        return Reservoir(capacity=self.capacity, keys=keys[chosen], steps=steps[chosen], **both)


def sample(items: torch.Tensor, *, step: int, capacity: int, seed: int, fixed: bool = False) -> Reservoir:
    """The reservoir of one step's items [I, R, C]; `fixed`: rows of a parameter. Raises ValueError for another shape and capacity < 1."""
    if items.ndim != 3 or capacity < 1 or step < 0:
        raise ValueError(f"a reservoir takes items [I, R, C], a capacity >= 1 and a step >= 0, got {tuple(items.shape)=} {capacity=} {step=}")
    keys = priorities(len(items), -1 if fixed else step, seed)
    index = torch.from_numpy(np.argsort(keys, kind="stable")[:capacity].copy())
    chosen = items.detach()[index.to(items.device)].cpu()
    return Reservoir(capacity=capacity, keys=torch.from_numpy(keys)[index], steps=torch.full_like(index, step), index=index, items=chosen)


@lru_cache(maxsize=64)
def priorities(count: int, step: int, seed: int) -> np.ndarray:
    """Keys of items 0 ... count - 1 of a step (-1: of a parameter): int64, 62 random bits."""
    counter = np.zeros((count, 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1:3] = np.arange(count), ((step + 1) & 0xFFFFFFFF, (step + 1) >> 32)
    words = philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.int64)
    return (words[:, 0] << 30) | (words[:, 1] >> 2)
