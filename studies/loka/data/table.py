"""Table: a real log as examples of two parts, with the same `batch` as the generator's.

    table = adult(seed=0)
    table.batch(3, 1024)                       # the training part, shuffled once, again from its start after its end
    table.batch(0, 1024, part="test")          # the test part, in the log's order
    table.rows("test")
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact.philox import philox_integers
from studies.loka.data.batch import Batch

__all__ = ["Table", "encode", "shuffled"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Examples of a log: per part (dense [R, D] float32, ids [R, F] int32, y [R] float32). Field f has ids below `cardinalities[f]`."""

    name: str
    fields: tuple[str, ...]
    counts: tuple[str, ...]  # names of the dense features
    cardinalities: tuple[int, ...]
    train: tuple[np.ndarray, np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray, np.ndarray]
    source: str  # sha256 of what it was read from
    unit: str = ""  # the field whose ids were sampled: rows of one user are not independent; "": each row

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            dense, ids, y = part
            if not len(y) == len(dense) == len(ids) or not len(y):
                raise ValueError(f"each part has examples, with a row of counts and of ids each, got {len(dense)=} {len(ids)=} {len(y)=} in {self.name}")
            if (ids < 0).any() or (ids.max(0) >= np.array(self.cardinalities)).any():
                raise ValueError(f"ids lie below their field's cardinality, got up to {ids.max(0).tolist()} of {self.cardinalities} in {self.name}")

    def rows(self, part: str = "train") -> int:
        return len(self._part(part)[2])

    def batch(self, index: int, size: int, part: str = "train") -> Batch:
        """Examples index * size and following; the training part begins again after its end, the test part just ends.

        Raises ValueError for another part, a negative index, an empty batch, and past the end of the test part.
        """
        dense, ids, y = self._part(part)
        if index < 0 or size < 1:
            raise ValueError(f"a batch has an index >= 0 and a size >= 1, got {index=} {size=}")
        if part == "test" and index * size >= len(y):
            raise ValueError(f"{self.name} has {len(y)} test examples, got {index=} of batches of {size}; stop before")
        at = np.arange(index * size, (index + 1) * size)
        at = at[at < len(y)] if part == "test" else at % len(y)
        return Batch(dense=torch.from_numpy(dense[at]), ids=torch.from_numpy(ids[at].astype(np.int64)), y=torch.from_numpy(y[at]))

    def units(self, part: str) -> np.ndarray:
        """[R] int64: a number for each row, equal where rows belong to one sampled unit."""
        ids = self._part(part)[1]
        return ids[:, self.fields.index(self.unit)].astype(np.int64) if self.unit else np.arange(len(ids))

    def _part(self, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if part not in ("train", "test"):
            raise ValueError(f"a part is 'train' or 'test', got {part=}")
        return self.train if part == "train" else self.test


def encode(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(ids [R, F] int32, cardinalities): each column's distinct values numbered in their sorted order."""
    codes, sizes = [], []
    for column in columns.values():
        values, code = np.unique(column, return_inverse=True)
        codes.append(code.astype(np.int32))
        sizes.append(len(values))
    return np.stack(codes, axis=1), tuple(sizes)


def shuffled(rows: int, seed: int) -> np.ndarray:
    """A permutation of `rows` from Philox: the same on every machine."""
    return np.argsort(philox_integers(rows, seed), kind="stable")
