"""Rows of a task where the model reads them: padded token ids, lengths, and where their answers are, all on the device.

    rows = rows_of(task.train, tokens=128, device="cuda")
    rows.ids_NT[index_B], rows.lengths_N[index_B]               # a micro-step needs no more than row numbers from the host

Legend: N rows and one more that is empty (what an idle place of a pack reads), T positions, A most answer tokens of a row. Padding is at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from studies.plora.data.task import Examples

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """ids_NT: int64. lengths_N: int32. places_NA: int64, the position that predicts an answer token, or -1. targets_NA: int64, that token, or -1."""

    ids_NT: torch.Tensor
    lengths_N: torch.Tensor
    places_NA: torch.Tensor
    targets_NA: torch.Tensor

    @property
    def idle(self) -> int:
        """The number of the empty row."""
        return len(self.lengths_N) - 1

    @property
    def tokens(self) -> int:
        return self.ids_NT.shape[1]

    @property
    def answers(self) -> int:
        return self.targets_NA.shape[1]


def rows_of(examples: Examples, *, tokens: int, device: torch.device | str) -> Rows:
    n, most = len(examples), int(examples.answer_tokens.max())
    ids, lengths = np.zeros((n + 1, tokens), np.int64), np.append(examples.lengths, 0).astype(np.int32)
    places, targets = np.full((n + 1, most), -1, np.int64), np.full((n + 1, most), -1, np.int64)
    for i, (row, start) in enumerate(zip(examples.ids, examples.answer_from, strict=True)):
        count = len(row) - int(start)
        ids[i, : len(row)] = row
        places[i, :count] = np.arange(start - 1, len(row) - 1)
        targets[i, :count] = row[start:]
    made = {"ids_NT": ids, "lengths_N": lengths, "places_NA": places, "targets_NA": targets}
    return Rows(**{name: torch.from_numpy(array).to(device) for name, array in made.items()})
