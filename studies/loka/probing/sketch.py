"""Sketch: what is kept of an operand of a product while a model runs. It streams, it merges, and every recipe is predicted from it.

    s = sketch(x_MK, step=0).merge(sketch(y_MK, step=100))
    s.log2_amax, len(s.reservoir), s.share_below(2.0**-20)

Of a tensor that is read once:

    exponents      numbers by floor(log2|x|), zeros, and what is not finite: what any scale and format flushes, exactly (kernels.fp8.statistics)
    moments        count, mean and sum of squared deviations, merged as Chan, Golub and LeVeque do
    steps          amax and the mean of log2(row rms) of each step read: what a tensor's scale was, and whether it drifts
    row norms      rows by log2 of their rms and of their amax over it: the joint histogram that says whether rows differ in scale
    columns        amax (geometric mean over steps) and sum of squares of each column: rows of the transpose, which dgrad and wgrad quantise
    reservoir      `ROWS` real rows, or whole matrices of a batched product (studies.loka.probing.reservoir)

Merging is associative and commutative: counts, amax and the reservoir exactly, sums to float64's rounding. Numbers that are not finite are counted
and left out, with the column that holds them. It is kept on the CPU; a GPU reads the tensor for the statistics once, and for the
columns twice at most COLUMN_ROWS of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch

from kernels.fp8.statistics import EXPONENTS, MIN_EXPONENT, Statistics, statistics, statistics_ref
from studies.loka.probing.reservoir import Reservoir, chosen, reservoir_of

__all__ = ["CREST_BINS", "PARAMETER_NUMBERS", "RMS_BINS", "ROWS", "Look", "Sketch", "look", "sketch"]

ROWS = 512  # of a reservoir: a 1st percentile with a lower bound needs 299
PARAMETER_NUMBERS = 2**20  # a parameter of at most so many numbers is kept whole, a larger one as rows
RMS_BINS, CREST_BINS = 256, 24  # half octaves: rms from 2^-64 to 2^64, amax / rms from 1 to 2^12, which 2^24 columns cannot exceed
COLUMN_ROWS = 2**16  # of a step, at most and evenly spaced, are read for the columns
FORMS = ("rows", "layers", "matrices")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sketch:
    """Of an operand [..., R, C] over the steps that were read."""

    exponents: torch.Tensor  # int64 [EXPONENTS]
    zeros: int
    nonfinite: int
    count: int  # finite numbers
    mean: float
    deviations: float  # sum of (x - mean)^2
    steps: torch.Tensor  # int64 [T], ascending
    amax: torch.Tensor  # float64 [T], of each step
    log2_rms: torch.Tensor  # float64 [T], summed over rows that are not zero
    live_rows: torch.Tensor  # int64 [T], rows that are not zero
    rows: int  # read in all
    norms: torch.Tensor  # int64 [RMS_BINS, CREST_BINS], rows that are not zero
    column_log2_amax: torch.Tensor  # float64 [T C], summed over the steps in which the column is not zero; [0] of matrices
    column_steps: torch.Tensor  # int64 [T C], those steps
    column_squares: torch.Tensor  # float64 [T C]
    reservoir: Reservoir

    @property
    def variance(self) -> float:
        return self.deviations / self.count if self.count else 0.0

    @property
    def log2_amax(self) -> torch.Tensor:
        """Of each step, -inf where all was zero."""
        return torch.log2(self.amax)

    @property
    def column_amax(self) -> torch.Tensor:
        """Typical amax of each column in a step, 0 where it was always zero."""
        return torch.where(self.column_steps > 0, torch.exp2(self.column_log2_amax / self.column_steps.clamp(min=1)), 0.0)

    def share_below(self, limit: float) -> float:
        """Share of finite numbers other than zero with |x| < limit, a power of two."""
        bound = int(np.log2(limit)) - MIN_EXPONENT
        if limit <= 0 or 2.0 ** (bound + MIN_EXPONENT) != limit:
            raise ValueError(f"exponents tell numbers below a power of two, got {limit=}; take the next one")
        return int(self.exponents[: max(bound, 0)].sum()) / max(int(self.exponents.sum()), 1)

    def merge(self, other: Self) -> Sketch:
        """The sketch of both streams. Raises ValueError where they are of different operands."""
        if self.column_squares.shape != other.column_squares.shape:
            raise ValueError(f"sketches of one operand merge, got {tuple(self.column_squares.shape)} and {tuple(other.column_squares.shape)} columns")
        total = self.count + other.count
        gap = other.mean - self.mean
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name in _SUMS}
        return Sketch(
            **added, **_merged_steps(self, other), mean=self.mean + gap * other.count / total if total else 0.0,
            deviations=self.deviations + other.deviations + (gap * gap * self.count * other.count / total if total else 0.0),
            reservoir=self.reservoir.merge(other.reservoir),
        )  # fmt: skip

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Numbers only: bfloat16 items travel as uint16."""
        items = self.reservoir.items
        out = {f.name: np.asarray(getattr(self, f.name)) for f in fields(self) if f.name != "reservoir"}
        out |= {f"reservoir_{name}": getattr(self.reservoir, name).numpy() for name in ("keys", "steps", "index")}
        out["reservoir_items"] = (items.view(torch.int16) if items.dtype == torch.bfloat16 else items).numpy()
        return out | {"reservoir_capacity": np.asarray(self.reservoir.capacity), "reservoir_dtype": np.asarray(_DTYPES.index(items.dtype))}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Sketch:
        """What `to_arrays` gave. Raises ValueError where a field is missing."""
        kinds = {f.name: f.type for f in fields(cls) if f.name != "reservoir"}
        needed = [*kinds, *(f"reservoir_{name}" for name in ("keys", "steps", "index", "items", "capacity", "dtype"))]
        if missing := [name for name in needed if name not in arrays]:
            raise ValueError(f"a sketch has the fields {needed}, got none of {missing}; write it with to_arrays")
        scalar = {"int": int, "float": float}
        plain = {name: scalar[kind](arrays[name]) if kind in scalar else torch.from_numpy(arrays[name]) for name, kind in kinds.items()}
        dtype, items = _DTYPES[int(arrays["reservoir_dtype"])], torch.from_numpy(arrays["reservoir_items"])
        kept = {name: torch.from_numpy(arrays[f"reservoir_{name}"]) for name in ("keys", "steps", "index")}
        items = items.view(torch.bfloat16) if dtype == torch.bfloat16 else items
        return cls(**plain, reservoir=Reservoir(capacity=int(arrays["reservoir_capacity"]), items=items, **kept))


_SUMS = {"exponents", "zeros", "nonfinite", "count", "rows", "norms", "column_log2_amax", "column_steps", "column_squares"}


def _merged_steps(a: Sketch, b: Sketch) -> dict[str, torch.Tensor]:
    """Both's steps in order; parts of one step, as ranks have, are put together."""
    steps, place = torch.cat([a.steps, b.steps]).unique(return_inverse=True)
    zeros = torch.zeros(len(steps), dtype=torch.float64)
    both = {name: torch.cat([getattr(a, name), getattr(b, name)]) for name in ("amax", "log2_rms", "live_rows")}
    return {
        "steps": steps, "amax": zeros.scatter_reduce(0, place, both["amax"], "amax"), "log2_rms": zeros.index_add(0, place, both["log2_rms"]),
        "live_rows": zeros.long().index_add(0, place, both["live_rows"]),
    }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Look:
    """What one step's operand gives to its sketch, still on its device: nothing waited for it yet."""

    counts: torch.Tensor  # int64: exponents, zeros, not finite, rows that are not zero, norms
    sums: torch.Tensor  # float64: sum, sum of squares, amax, sum of log2 rms, then amax and norm of columns
    items: torch.Tensor  # those chosen
    keys: torch.Tensor
    index: torch.Tensor
    step: int
    capacity: int
    rows: int

    def sketch(self) -> Sketch:
        """Fetches it."""
        exponents, (zeros, nonfinite, live_rows), norms = self.counts.cpu().split([EXPONENTS, 3, RMS_BINS * CREST_BINS])
        scalars, amax, norm = self.sums.cpu().split([4, *2 * [(len(self.sums) - 4) // 2]])
        total, squares = float(scalars[0]), float(scalars[1])
        finite = int(exponents.sum() + zeros)
        mean = total / finite if finite else 0.0
        live = (amax > 0) & torch.isfinite(norm) & (amax < float("inf"))  # a column with a number that is not finite is left out of this step
        return Sketch(
            exponents=exponents.clone(), zeros=int(zeros), nonfinite=int(nonfinite), count=finite, mean=mean,
            deviations=max(squares - finite * mean * mean, 0.0), steps=torch.tensor([self.step]), amax=scalars[2:3].clone(),
            log2_rms=scalars[3:4].clone(), live_rows=live_rows.reshape(1).clone(), rows=self.rows, norms=norms.clone().view(RMS_BINS, CREST_BINS),
            column_log2_amax=torch.where(live, amax.log2(), 0.0), column_steps=live.long(), column_squares=torch.where(live, norm.square(), 0.0),
            reservoir=reservoir_of(self.items.cpu(), self.keys, self.index, step=self.step, capacity=self.capacity),
        )  # fmt: skip


def sketch(x: torch.Tensor, *, step: int, items: int = ROWS, seed: int = 0, parameter: bool = False, form: str = "rows") -> Sketch:
    """The sketch of one step's x: `look` says how."""
    return look(x, step=step, items=items, seed=seed, parameter=parameter, form=form).sketch()


def look(x: torch.Tensor, *, step: int, items: int = ROWS, seed: int = 0, parameter: bool = False, form: str = "rows", below: int | None = None) -> Look:
    """Reads one step's x, of which so many items are kept; a `parameter`'s are the same ones in every step. By form, an item is

        rows      [..., C]     a row
        layers    [M, T, C]    one example's rows in T layers, each with its own weight; a weight is [N, T, C]
        matrices  [I, R, C]    a matrix whose rows meet those of the other operand's same item

    below: keys from there on are left out, for those of the reservoir that this will be merged with are smaller. Waits for no GPU.
    Raises ValueError for another form, and for dtypes other than float32, bf16 and fp16.
    """
    if form not in FORMS or x.dtype not in _DTYPES or (x.ndim < 2 if form == "rows" else x.ndim != 3):
        raise ValueError(f"a sketch is of rows [..., C], layers [M, T, C] or matrices [I, R, C] in float32, bfloat16 or float16, got {form=} {tuple(x.shape)=} {x.dtype}; convert it first")
    c = x.shape[-1]
    x = x.detach().reshape(x.shape[:-1].numel(), 1, c) if form == "rows" else x.detach()
    capacity = items if not parameter else max(items, PARAMETER_NUMBERS // max(x.shape[1] * c, 1))
    keys, index = chosen(len(x), step=step, capacity=capacity, seed=seed, fixed=parameter)
    if below is not None:
        keys, index = keys[keys < below], index[keys < below]
    x_RC = (x.transpose(0, 1) if form == "layers" else x).flatten(0, 1)  # layer by layer, as such a tensor lies in memory: no copy
    s = (statistics if x.is_cuda else statistics_ref)(x_RC)
    log2_rms, norms, live_rows = _row_norms(s, c)
    counts = torch.cat([s.exponents, *(v.reshape(1) for v in (s.zeros, s.nonfinite, live_rows)), norms])
    sums = torch.cat([*(v.reshape(1) for v in (s.sum, s.sum_squares, s.amax.double(), log2_rms)), *([] if form == "matrices" else _columns(x))])
    return Look(counts=counts, sums=sums, items=x[index.to(x.device)], keys=keys, index=index, step=step, capacity=capacity, rows=len(x_RC))


def _columns(x: torch.Tensor) -> list[torch.Tensor]:
    """amax and Euclidean norm of each column of x [M, T, C], float64 [T C], over at most COLUMN_ROWS evenly spaced M; the norm is scaled to all."""
    every = max(1, len(x) // COLUMN_ROWS)
    read = x[::every]
    if not len(read):
        return 2 * [torch.zeros(x.shape[1:].numel(), dtype=torch.float64, device=x.device)]
    amax, norm = (torch.linalg.vector_norm(read, order, dim=0, dtype=torch.float32).flatten().double() for order in (float("inf"), 2))
    return [amax, norm * (len(x) / len(read)) ** 0.5]


def _row_norms(s: Statistics, c: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of log2 rms, joint histogram, number) of the rows that are not zero. Few and simple operators: each is a launch."""
    live = s.row_amax > 0
    log2_rms = torch.where(live, s.row_sum_squares, max(c, 1)).div_(max(c, 1)).log2_().mul_(0.5)
    crest = torch.where(live, s.row_amax, 1.0).double().log2_().sub_(log2_rms)
    i = torch.add(RMS_BINS // 2, log2_rms, alpha=2).clamp_(0, RMS_BINS - 1).long()  # no number is below 0: to cut is to floor
    j = crest.mul_(2).clamp_(0, CREST_BINS - 1).long()
    norms = torch.zeros(RMS_BINS * CREST_BINS, dtype=torch.int64, device=live.device).index_add_(0, torch.add(j, i, alpha=CREST_BINS), live.long())
    return log2_rms.sum(), norms, live.sum()
