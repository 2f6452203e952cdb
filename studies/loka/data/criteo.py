"""A user's own copy of Criteo's click logs (Kaggle display advertising, or a day of the terabyte set): their licence forbids passing them on.

    for batch in batches("train.txt", size=8192): ...             # a stream in file order, any length
    table = criteo("day_0.gz", rows=2_000_000, seed=0)            # in memory; the last seventh is the test part, as day 7 of Kaggle's week

A line is a label, 13 counts and 26 ids of 8 hexadecimal digits, tab-separated, any of them but the label empty. Counts become log1p(max(v, 0)),
a missing one 0; ids become 1 + id mod (buckets - 1), a missing one 0. Files may be compressed by gzip. It does not download anything.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from studies.loka.data.batch import Batch
from studies.loka.data.table import Table, shuffled

__all__ = ["COUNTS", "IDS", "batches", "criteo"]

COUNTS, IDS = 13, 26
_COLUMNS = 1 + COUNTS + IDS
TEST_SHARE = 1 / 7
_Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def batches(path: Path | str, *, size: int, buckets: int = 100_000) -> Iterator[Batch]:
    """`size` lines at a time, the last batch may be shorter. Raises ValueError for lines of another format, with their number and what is wrong."""
    if size < 1:
        raise ValueError(f"a batch has a size >= 1, got {size=}")
    for dense, ids, y in _blocks(Path(path), size, buckets):
        yield Batch(dense=torch.from_numpy(dense), ids=torch.from_numpy(ids.astype(np.int64)), y=torch.from_numpy(y))


def criteo(path: Path | str, *, rows: int, seed: int, buckets: int = 100_000) -> Table:
    """The first `rows` lines; `seed` shuffles the training part. Raises ValueError as `batches`, and where the file has fewer lines."""
    if rows < 7:
        raise ValueError(f"a seventh of the lines is the test part, so there are 7 or more, got {rows=}")
    blocks = list(islice(_blocks(Path(path), min(rows, 65536), buckets), -(-rows // min(rows, 65536))))
    dense, ids, y = (np.concatenate(parts)[:rows] for parts in zip(*blocks, strict=True))
    if len(y) < rows:
        raise ValueError(f"{path} has {len(y)} lines, got {rows=}; ask for no more")
    cut = rows - int(rows * TEST_SHARE)
    order = shuffled(cut, seed)
    return Table(
        name="criteo", fields=tuple(f"C{i + 1}" for i in range(IDS)), counts=tuple(f"I{i + 1}" for i in range(COUNTS)), cardinalities=(buckets,) * IDS,
        train=(dense[order], ids[order], y[order]), test=(dense[cut:], ids[cut:], y[cut:]), source=f"{Path(path).name}, {rows} lines",
    )  # fmt: skip


def _blocks(path: Path, size: int, buckets: int) -> Iterator[_Rows]:
    if buckets < 2:
        raise ValueError(f"ids need two buckets or more, one for missing ones, got {buckets=}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the path of your own copy of Criteo's train.txt or day_N (.gz)")
    try:
        with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as stream:
            first = 1
            while lines := list(islice(stream, size)):
                yield _parse(path, lines, first, buckets)
                first += len(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or no text of Criteo's format ({type(error).__name__}); fetch it again") from error
    if first == 1:
        raise ValueError(f"{path} is empty; give Criteo's train.txt or day_N")


def _parse(path: Path, lines: list[str], first: int, buckets: int) -> _Rows:
    dense, ids, y = np.zeros((len(lines), COUNTS)), np.zeros((len(lines), IDS), dtype=np.int32), np.zeros(len(lines), dtype=np.float32)
    for row, line in enumerate(lines):
        columns = line.rstrip("\r\n").split("\t")
        if len(columns) != _COLUMNS:
            hint = "the test file has no labels; give the training file" if len(columns) == _COLUMNS - 1 else "is it tab-separated?"
            raise ValueError(f"a line has {_COLUMNS} columns, got {len(columns)} in line {first + row} of {path}; {hint}")
        try:
            y[row] = ("0", "1").index(columns[0])
            dense[row] = [int(v) if v else 0 for v in columns[1 : 1 + COUNTS]]
            ids[row] = [1 + _hexadecimal(v) % (buckets - 1) if v else 0 for v in columns[1 + COUNTS :]]
        except ValueError as error:
            raise ValueError(f"a line is a label 0 or 1, {COUNTS} whole numbers and {IDS} ids of 8 hexadecimal digits, got line {first + row} of {path}: {error}") from error
    return np.log1p(np.maximum(dense, 0)).astype(np.float32), ids, y


def _hexadecimal(text: str) -> int:
    if len(text) != 8 or not all(c in "0123456789abcdefABCDEF" for c in text):
        raise ValueError(f"{text!r} is no id")
    return int(text, 16)
