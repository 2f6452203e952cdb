"""Batch: what every data set here gives a model, and what the loss is taken of.

    batch.dense, batch.ids, batch.y            # [B, D] float32, [B, F] int64, [B] float32 of 0 and 1
    batch.to("cuda")

`p` is the probability that y is 1 where the generator knows it (studies.loka.data.planted), else None. Legend: B examples, D counts, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Batch"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B examples of click-through data: `dense` are log1p of counts, `ids` one category a field, below that field's cardinality."""

    dense: torch.Tensor  # [B, D] float32
    ids: torch.Tensor  # [B, F] int64
    y: torch.Tensor  # [B] float32, 0 or 1
    p: torch.Tensor | None = None  # [B] float64

    def __post_init__(self) -> None:
        sizes = {len(t) for t in (self.dense, self.ids, self.y, self.p) if t is not None}
        if len(sizes) != 1:
            raise ValueError(f"a batch has one row an example in each of its tensors, got {sorted(sizes)} rows; cut them alike")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: slice | torch.Tensor) -> Batch:
        """The examples of a slice or of an index tensor."""
        return Batch(dense=self.dense[rows], ids=self.ids[rows], y=self.y[rows], p=None if self.p is None else self.p[rows])

    def to(self, device: torch.device | str) -> Batch:
        return Batch(dense=self.dense.to(device), ids=self.ids.to(device), y=self.y.to(device), p=None if self.p is None else self.p.to(device))
