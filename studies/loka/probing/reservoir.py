"""A reservoir of real rows: a uniform sample of all that streamed by, which merges, and in which operands of one product stay paired.

    r = sample(x_MK[:, None], step=7, capacity=512, seed=0).merge(sample(y_MK[:, None], step=8, capacity=512, seed=0))
    r.items                                    # [512, 1, K]: 512 rows of both steps, each pair of sets of 512 equally likely

Every item has a uniform key that follows from (seed, step, number of items) and not from data; the reservoir is the `capacity` smallest keys. So it is
a uniform sample without replacement, merging is exact, associative and commutative, and x and dy of one step keep the same rows. What is chosen is
known before data are read: a GPU copies the chosen items alone. Of many items only the smallest keys are drawn, as the order statistics that they
are, on distinct random indices. Ranks of one job take different seeds: of one key one item is kept.

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

__all__ = ["Reservoir", "chosen", "reservoir_of", "sample"]

KEYS = 2**62
ALL_KEYS = 4096  # up to so many items each gets its key


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

    @property
    def bound(self) -> int | None:
        """Keys from here on would not be kept any more; None while there is room."""
        return int(self.keys[-1]) + 1 if len(self) == self.capacity else None

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
    if items.ndim != 3:
        raise ValueError(f"a reservoir takes items [I, R, C], got {tuple(items.shape)=}")
    keys, index = chosen(len(items), step=step, capacity=capacity, seed=seed, fixed=fixed)
    return reservoir_of(items.detach()[index.to(items.device)].cpu(), keys, index, step=step, capacity=capacity)


def reservoir_of(items: torch.Tensor, keys: torch.Tensor, index: torch.Tensor, *, step: int, capacity: int) -> Reservoir:
    """Of items that `chosen` chose."""
    return Reservoir(capacity=capacity, keys=keys, steps=torch.full_like(index, step), index=index, items=items)


def chosen(count: int, *, step: int, capacity: int, seed: int, fixed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, indices) of the `capacity` smallest keys among `count` items of a step, ascending; int64. Raises ValueError for capacity < 1 and step < 0."""
    if capacity < 1 or step < 0:
        raise ValueError(f"a reservoir has a capacity >= 1 and steps >= 0, got {capacity=} {step=}")
    keys, index = _smallest(count, -1 if fixed else step, min(capacity, count), seed)
    return torch.from_numpy(keys), torch.from_numpy(index)


@lru_cache(maxsize=64)
def _smallest(count: int, step: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if count <= max(ALL_KEYS, 4 * k):
        keys = _words(count, step, seed, stream=0)
        index = np.argsort(keys, kind="stable")[:k]
        return keys[index], index
    # the k smallest of n uniform numbers: 1 - u_i = (1 - u_(i-1)) V_i^(1 / (n - i + 1))
    exponential = -np.log((_words(k, step, seed, stream=1) + 0.5) / KEYS)
    keys = -np.expm1(-np.cumsum(exponential / (count - np.arange(k)))) * KEYS
    places = _words(2 * k, step, seed, stream=2) % count  # k distinct ones: of 2 k drawn from more than 4 k, fewer than half are doubles
    _, first = np.unique(places, return_index=True)
    return keys.astype(np.int64), places[np.sort(first)[:k]]


def _words(count: int, step: int, seed: int, stream: int) -> np.ndarray:
    """int64 [count], 62 random bits each, of a step (-1: of a parameter)."""
    counter = np.zeros((count, 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1:] = np.arange(count), ((step + 1) & 0xFFFFFFFF, (step + 1) >> 32, stream)
    words = philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.int64)
    return (words[:, 0] << 30) | (words[:, 1] >> 2)
