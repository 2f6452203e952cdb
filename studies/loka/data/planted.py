"""Planted truth: click-through examples without end, whose probabilities are known, so that the best possible loss is known too.

    data = Planted(seed=1)                                   # 26 fields and 13 counts as Criteo has them, a base rate of 0.26
    batch = data.batch(7, 8192)                              # examples 57344 to 65535 of the training part: Batch(dense, ids, y, p)
    fresh = data.batch(0, 8192, part="test")                 # never in the training part
    tables = data.tables(width=16)                           # heavy-tailed embeddings to start from

Counts are log-normal, rounded down, and given as log1p; ids follow a Zipf law (exponent 9/8) in every field; embeddings have row norms with
P(norm > 2^k) = 2^-k. The teacher is a logistic model plus a factorisation machine over fields and counts: logit = b + sum w + <V, V>, with
weights of the same heavy tails. `base_rate` and `logit_sd` are met by calibration on rows of a third part.

Example e of a part has Philox counters of its own, so a batch does not depend on how the examples before it were cut. Everything up to the
logit is integer arithmetic (counts come from a table of libm values rounded to float32), the sigmoid uses IEEE operations only: the same bits
on every machine. It imitates marginals; fields are independent of each other, which those of a real log are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernels.exact.philox import philox_integers, philox_ref
from studies.loka.data.batch import Batch

__all__ = ["PARTS", "Planted"]

PARTS = {"train": 1, "test": 2, "calibration": 3}  # Philox counters of a part; 0 is what philox_integers uses
_SMALLEST = 4  # ids of the smallest field
_LEVELS = 4  # the teacher sees a count in steps of 1/4 standard deviation
_POINT = 20  # bits behind the binary point of a logit
_CALIBRATION_ROWS = 1 << 14
_TEACHER, _TABLES = 1 << 20, 1 << 21  # streams of philox_integers
_TAIL = 6  # the heaviest row is 2^6 times the lightest
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # n * high is exact for |n| < 2^20
_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The generator: nothing is drawn before it is asked for. Raises ValueError for sizes or rates that make no sense."""

    seed: int
    fields: int = 26
    dense: int = 13
    largest: int = 100_000  # ids of the largest field; the others are spread evenly in log size down to 4
    rank: int = 8  # of the teacher's factorisation machine
    base_rate: float = 0.26  # Criteo Kaggle's; its terabyte set has 0.037
    logit_sd: float = 1.4
    interaction: float = 0.3  # the share of the logit's variance that the factorisation machine has

    def __post_init__(self) -> None:
        if self.fields < 1 or self.dense < 1 or self.rank < 1 or not _SMALLEST <= self.largest < 2**24:
            raise ValueError(f"need fields, dense, rank >= 1 and {_SMALLEST} <= largest < 2^24, got {self.fields=} {self.dense=} {self.rank=} {self.largest=}")
        if not 0.001 <= self.base_rate <= 0.999 or not 0 < self.logit_sd <= 8 or not 0 <= self.interaction <= 1:
            raise ValueError(
                f"need 0.001 <= base_rate <= 0.999, 0 < logit_sd <= 8 and 0 <= interaction <= 1, got {self.base_rate=} {self.logit_sd=} {self.interaction=}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"a seed is a 64-bit integer >= 0, got {self.seed=}")

    @cached_property
    def cardinalities(self) -> tuple[int, ...]:
        """Ids a field, smallest field first."""
        steps = max(self.fields - 1, 1)
        return tuple(round(_SMALLEST * (self.largest / _SMALLEST) ** (f / steps)) for f in range(self.fields))

    def batch(self, index: int, size: int, part: str = "train") -> Batch:
        """Examples index * size and following of `part`. Raises ValueError for a negative index, an empty batch or another part."""
        if part not in PARTS:
            raise ValueError(f"a part is one of {sorted(PARTS)}, got {part=}")
        if index < 0 or size < 1:
            raise ValueError(f"a batch has an index >= 0 and a size >= 1, got {index=} {size=}")
        dense, ids, levels, u = self._draw(index * size, size, PARTS[part])
        p = sigmoid(self._logits(ids, levels))
        y = (u.astype(np.float64) + 0.5) * 2.0**-32 < p
        return Batch(dense=torch.from_numpy(dense), ids=torch.from_numpy(ids), y=torch.from_numpy(y.astype(np.float32)), p=torch.from_numpy(p))

    def bayes_log_loss(self, rows: int, part: str = "test") -> tuple[float, float]:
        """(E[H(p)], its standard error) in nats over the first `rows` examples of `part`: no model has a lower expected log-loss."""
        entropy = np.concatenate([_entropy(self.batch(i, min(rows, 8192), part).p.numpy()) for i in range(-(-rows // 8192))])[:rows]
        return float(entropy.mean()), float(entropy.std(ddof=1) / math.sqrt(rows))

    def tables(self, width: int) -> list[torch.Tensor]:
        """One embedding table [ids, width] float32 a field: bell-shaped rows of variance 4^k / 384, one k a row, P(k >= j) = 2^-j up to j = 6."""
        if width < 1:
            raise ValueError(f"an embedding has a width >= 1, got {width=}")
        return [
            torch.from_numpy(np.ldexp(_heavy(count, width, self.seed, _TABLES + f), -15).astype(np.float32)) for f, count in enumerate(self.cardinalities)
        ]

    # ---- drawing ---------------------------------------------------------------------------------------------------------------

    def _draw(self, first: int, size: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(log1p counts [B, D], ids [B, F], the counts' levels as the teacher sees them [B, D], 32 random bits [B])."""
        words = self._words(first, size, part)
        ids_BF = np.stack([np.searchsorted(t, words[:, f], side="right") for f, t in enumerate(self._thresholds)], axis=1)
        halves = words[:, self.fields : -1].copy().view(np.uint16)[:, : self.dense]
        column = np.arange(self.dense)
        values, levels = self._counts
        return values[column, halves], ids_BF.astype(np.int64), levels[column, halves], words[:, -1]

    def _words(self, first: int, size: int, part: int) -> np.ndarray:
        """[B, words] uint32: one an id, one for two counts, one for the label."""
        wanted = self.fields + -(-self.dense // 2) + 1
        blocks = -(-wanted // 4)
        counter = np.zeros((size, blocks, 4), dtype=np.uint32)
        example = first + np.arange(size, dtype=np.uint64)
        counter[..., 0] = np.arange(blocks, dtype=np.uint32)
        counter[..., 1] = (example & np.uint64(0xFFFFFFFF))[:, None]
        counter[..., 2] = (example >> np.uint64(32))[:, None]
        counter[..., 3] = part
        return philox_ref(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32)).reshape(size, blocks * 4)[:, :wanted]

    @cached_property
    def _thresholds(self) -> list[np.ndarray]:
        """Per field the cumulative law of its ids in units of 2^-32; id r has weight (r + 1)^(-9/8), by square roots, which round alike everywhere."""
        found = []
        for count in self.cardinalities:
            r = np.arange(1, count + 1, dtype=np.float64)
            below = np.cumsum(1.0 / (r * np.sqrt(np.sqrt(np.sqrt(r)))))
            found.append((below[:-1] / below[-1] * 2.0**32).astype(np.uint32))
        return found

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """For 16 random bits of a count: (log1p of the count [D, 65536] float32, its level [D, 65536] int64); mu and sigma differ by feature."""
        from statistics import NormalDist

        half = NormalDist()
        z = np.array([half.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)])
        z = np.concatenate([-z[::-1], z])
        spread = np.arange(self.dense) / max(self.dense - 1, 1)
        mu, sigma = 0.5 + 4.0 * spread, 0.8 + 1.2 * ((5 * np.arange(self.dense)) % self.dense) / self.dense
        logs = np.log1p(np.floor(np.exp(mu[:, None] + sigma[:, None] * z)))
        deviation = (logs - logs.mean(1, keepdims=True)) / logs.std(1, keepdims=True)
        return logs.astype(np.float32), np.rint(_LEVELS * deviation).astype(np.int64)

    # ---- the teacher -----------------------------------------------------------------------------------------------------------

    def _logits(self, ids_BF: np.ndarray, levels_BD: np.ndarray) -> np.ndarray:
        linear, interaction, bias = self._calibrated
        first, second = self._raw(ids_BF, levels_BD)
        return np.ldexp((linear * first + interaction * second + bias).astype(np.float64), -_POINT)

    def _raw(self, ids_BF: np.ndarray, levels_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two parts of the logit, as integers: the sum of weights, and <V, V> over all pairs."""
        *by_field, of_counts = self._teacher
        first = (levels_BD * of_counts[:, 0]).sum(1)
        total = levels_BD @ of_counts[:, 1:]
        squares = (levels_BD**2) @ (of_counts[:, 1:] ** 2).sum(1)
        for f, table in enumerate(by_field):
            rows = table[ids_BF[:, f]]
            first += _LEVELS * rows[:, 0]
            total += _LEVELS * rows[:, 1:]
            squares += _LEVELS**2 * (rows[:, 1:] ** 2).sum(1)
        return first, ((total**2).sum(1) - squares) >> 12

    @cached_property
    def _teacher(self) -> list[np.ndarray]:
        """Per field a table [ids, 1 + rank] of integers (w, then V), and one for the counts last."""
        return [_heavy(count, 1 + self.rank, self.seed, _TEACHER + i) >> 8 for i, count in enumerate((*self.cardinalities, self.dense))]

    @cached_property
    def _calibrated(self) -> tuple[int, int, int]:
        """Integer multipliers of the two parts and the bias, with _POINT bits behind the point."""
        _, ids, levels, _ = self._draw(0, _CALIBRATION_ROWS, PARTS["calibration"])
        first, second = self._raw(ids, levels)
        unit = self.logit_sd * 2.0**_POINT
        linear = round(unit * math.sqrt(1 - self.interaction) / _sd(first))
        interaction = round(unit * math.sqrt(self.interaction) / _sd(second))
        logits = np.ldexp((linear * first + interaction * second).astype(np.float64), -_POINT)
        low, high = -64.0, 64.0
        while high - low > 2.0**-_POINT:
            middle = (low + high) / 2
            rate = math.fsum(sigmoid(logits + middle)) / _CALIBRATION_ROWS
            low, high = (middle, high) if rate < self.base_rate else (low, middle)
        return linear, interaction, round(math.ldexp(low, _POINT))


def sigmoid(z: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-z)) in float64 by IEEE operations in one order: equal bits everywhere, within 4 units in the last place."""
    decay = _exp(-np.abs(np.clip(z, -700.0, 700.0)))
    return np.where(z < 0, decay, 1.0) / (1.0 + decay)


def _exp(x: np.ndarray) -> np.ndarray:
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = np.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        value = value * r + c
    return np.ldexp(value, n.astype(np.int64))


def _heavy(rows: int, width: int, seed: int, stream: int) -> np.ndarray:
    """[rows, width] int64: a bell (sum of two 12-bit uniforms, centred) times 2^k, one k a row with P(k >= j) = 2^-j up to _TAIL."""
    bits = philox_integers(rows * (width + 1), seed, stream).reshape(rows, width + 1).astype(np.int64)
    low, high = bits[:, :-1] & 0xFFF, (bits[:, :-1] >> 12) & 0xFFF
    k = sum(((bits[:, -1:] & ((1 << j) - 1)) == 0).astype(np.int64) for j in range(1, _TAIL + 1))
    return (low + high - 0xFFF) << k


def _sd(values: np.ndarray) -> float:
    """The standard deviation of integers, by sums that are exact."""
    n, total = len(values), int(values.sum())
    return math.sqrt(max(int(sum(int(v) * int(v) for v in values)) * n - total * total, 1)) / n


def _entropy(p: np.ndarray) -> np.ndarray:
    """H(p) in nats; 0 where p is 0 or 1."""
    q = np.clip(np.stack([p, 1 - p]), 2.0**-1074, 1.0)
    return -(np.stack([p, 1 - p]) * np.log(q)).sum(0)
