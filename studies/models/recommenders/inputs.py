"""Inputs of recommenders: dense features, ids that follow a power law, and the tables that turn ids into vectors.

    tables = embeddings(fields=26, rows=10_000, dim=128, seed=0)
    tables(ids_BN).shape                                       # [B, 26, 128], differentiable
    dense_BF, embedded_BND = example_inputs(batch=8, dense=13, fields=26, dim=128, seed=0)

Tables are a module of their own, so that the dense part of a model can be timed, traced and planned alone. `example_inputs` serves shapes,
timing and activations; what models are trained on is another matter (studies.loka.data). Its bits depend on the kind of device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from studies.models.recommenders.mods import build

__all__ = ["Embeddings", "embeddings", "example_inputs", "power_law_ids"]

_MULTIPLIER = 0x9E3779B1  # odd, so that multiplying is a permutation of 32-bit integers (Knuth's multiplicative hashing)
EXAMPLE_ROWS = 4096
TAIL_SIGMA = 0.7  # of the log of a row's length: the longest of 4096 rows is about ten times the median


class Embeddings(nn.Module):
    """One table for all fields: id -> row by hashing, so that ids need no dictionary and two may share a row."""

    def __init__(self, fields: int, rows: int, dim: int) -> None:
        super().__init__()
        if min(fields, rows, dim) < 1:
            raise ValueError(f"tables have at least one field, row and feature, got {fields=} {rows=} {dim=}")
        self.fields, self.rows, self.dim = fields, rows, dim
        self.table = nn.Parameter(torch.empty(fields * rows, dim))

    def slots(self, ids_BN: torch.Tensor) -> torch.Tensor:
        """Rows of the table, [B, N]: field i has `rows` of its own from i * rows on."""
        if ids_BN.ndim != 2 or ids_BN.shape[1] != self.fields or ids_BN.dtype != torch.int64:
            raise ValueError(f"ids are int64 [B, {self.fields}], got {ids_BN.dtype} {tuple(ids_BN.shape)}; one column a field")
        hashed = (ids_BN & 0xFFFFFFFF) * _MULTIPLIER & 0xFFFFFFFF  # its high bits are the well mixed ones
        return (hashed * self.rows >> 32) + torch.arange(self.fields, device=ids_BN.device) * self.rows

    def forward(self, ids_BN: torch.Tensor) -> torch.Tensor:
        return F.embedding(self.slots(ids_BN), self.table)


def embeddings(*, fields: int, rows: int, dim: int, seed: int, device: torch.device | str = "cpu") -> Embeddings:
    """Normal values with variance 1 / dim: rows have length about 1."""
    return build(lambda: Embeddings(fields, rows, dim), seed=seed, device=device)


def power_law_ids(batch: int, fields: int, *, rows: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [B, N] in [0, rows): the number of binary digits is uniform, so that P(id) falls as 1 / id, Zipf's law, by integers alone."""
    if rows < 1:
        raise ValueError(f"ids are drawn from at least one row, got {rows=}")
    draw = dict(generator=generator, device=generator.device)
    digits = torch.randint(rows.bit_length(), (batch, fields), **draw)
    low = torch.ones_like(digits) << digits
    return (low + (torch.randint(1 << 62, (batch, fields), **draw) & (low - 1)) - 1) % rows


def example_inputs(
    *, batch: int, dense: int, fields: int, dim: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """dense_BF: log(1 + log-normal counts); embedded_BND: rows of a table by power-law ids, whose lengths are log-normal too."""
    generator = torch.Generator(device=device).manual_seed(seed)
    draw = dict(generator=generator, device=generator.device)
    dense_BF = torch.log1p(torch.exp(1.0 + 1.5 * torch.randn((batch, dense), **draw)).floor())
    lengths = torch.exp(TAIL_SIGMA * torch.randn((EXAMPLE_ROWS, 1), **draw))
    table = lengths * torch.randn((EXAMPLE_ROWS, dim), **draw) * dim**-0.5
    ids_BN = power_law_ids(batch, fields, rows=EXAMPLE_ROWS, generator=generator)
    return dense_BF.to(dtype), table.to(dtype)[ids_BN]
