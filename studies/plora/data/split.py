"""Parts of a set: which rows are held out, stratified by class, the same on every machine.

    train, validation = held_out(labels, 770, seed=0)          # row indices, each in rising order
    rows = subset(labels, 500, seed=0)

Rows are drawn by integer Philox under the seed; each class gives its share, remainders go to the classes with the largest ones.
"""

from __future__ import annotations

import numpy as np

from kernels.exact.philox import philox_integers

__all__ = ["held_out", "subset"]

_STREAM = 7001


def held_out(labels: np.ndarray, count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(the others, `count` drawn rows) of rows with these labels (zeros where there are no classes). Raises ValueError."""
    drawn = subset(labels, count, seed=seed)
    others = np.setdiff1d(np.arange(len(labels)), drawn)
    if not len(others):
        raise ValueError(f"some rows remain, got {count=} of {len(labels)}; hold out fewer")
    return others, drawn


def subset(labels: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Indices of `count` rows in rising order, each class by its share. Raises ValueError for a count that is not from 1 to the rows there are."""
    if not 1 <= count <= len(labels):
        raise ValueError(f"from 1 to {len(labels)} rows can be drawn, got {count=}; ask for fewer")
    classes, sizes = np.unique(labels, return_counts=True)
    shares = sizes * count / len(labels)
    take = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(-(shares - take), kind="stable")
    take[by_remainder[: count - int(take.sum())]] += 1
    order = np.argsort(philox_integers(len(labels), seed, _STREAM), kind="stable")
    drawn = [order[labels[order] == c][:n] for c, n in zip(classes, take, strict=True)]
    return np.sort(np.concatenate(drawn))
