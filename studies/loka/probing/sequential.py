"""Sequential: when has a probe seen enough of a site, and when has what it saw changed. Both may be asked after every reading.

    stop = Stopping(limit=0.01)                        # is the share of rows below the SQNR threshold under 1%?
    stop.update(rows_below=0, rows=512).verdict        # "safe" | "unsafe" | "undecided"; once decided it stays
    alarm = Drift()
    alarm.update(log2_amax).alarmed                    # of one probe step after the other
    drifted(watch.readings, since=4000)                # sites with an operand that moved after step 4000, for dispatch.after(alarms=...)

Stopping bets against a share (Waudby-Smith and Ramdas, JRSS B 2024): with unit values Z in [0, 1] and a limit p,

    against "the share is p or more"   prod_t (1 + l (p - Z_t)),  l = (1 - f) / (1 - p),      f in SAFE_BETS
    against "it is p or less"          prod_t (1 + l (Z_t - p)),  l = (g - 1) / (1 - p),      g in UNSAFE_BETS, l p <= 1/2

averaged over the bets. While each Z_t, given those before, has a mean on the denied side, the capital has an expectation of at most 1 at all times, so it
ever reaches 1 / alpha with a probability of at most alpha (Ville): an error is bounded at every stopping time, however often one looks.
A row counts as a unit, Z = 1 if it is below the threshold, where rows are as good as drawn one by one. Where whole steps are bad together (one outlier
sets the scale of all) they are not: use `update_step`, which takes the share of a step as one value and needs as many steps.

Drift is a self-starting CUSUM (Hawkins, J. Quality Technology 1987): each value is compared with the mean and spread of those before, which gives
exactly standard normal scores as long as values are independent and normal; sums of their excess over REFERENCE alarm at DECISION.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri, stdtr

from studies.loka.probing.readings import OPERANDS, Readings

__all__ = ["DECISION", "REFERENCE", "Drift", "Stopping", "drifted"]

SAFE_BETS = (0.0, 0.0, 0.1, 0.25, 0.5, 0.75)  # the share, over the limit, that a bet is best for; twice on none
UNSAFE_BETS = (1.25, 1.5, 2.0, 4.0, 16.0, 64.0)
SHARES = np.geomspace(1e-4, 0.9, 32)  # limits that `bounds` tells apart
REFERENCE, DECISION = 0.5, 8.0  # in standard deviations: one false alarm in 9,600 values by Siegmund's formula, both directions
LARGEST_SCORE = 6.0  # so that one wild reading does not alarm alone


@dataclass(kw_only=True)
class Stopping:
    """Bets on the share of rows below a threshold. `alpha` bounds the probability of ever saying safe, or ever unsafe, wrongly: each."""

    limit: float = 0.01
    alpha: float = 0.05
    units: int = 0
    verdict: str = "undecided"
    _limits: np.ndarray = field(init=False, repr=False)
    _safe: np.ndarray = field(init=False, repr=False)  # log capital [limits, bets]
    _unsafe: np.ndarray = field(init=False, repr=False)
    _ruled_out: np.ndarray = field(init=False, repr=False)  # [2, limits], at any time so far

    def __post_init__(self) -> None:
        if not (0 < self.limit < 1 and 0 < self.alpha < 1):
            raise ValueError(f"a limit and an alpha lie between 0 and 1, got {self.limit=} {self.alpha=}")
        self._limits = np.concatenate([[self.limit], SHARES])
        self._safe = np.zeros((len(self._limits), len(SAFE_BETS)))
        self._unsafe = np.zeros((len(self._limits), len(UNSAFE_BETS)))
        self._ruled_out = np.zeros((2, len(self._limits)), dtype=bool)

    def update(self, *, rows_below: int, rows: int) -> Stopping:
        """Rows that came by, and how many of them were below. Raises ValueError for counts that do not fit."""
        if not 0 <= rows_below <= rows:
            raise ValueError(f"rows below the threshold are some of the rows, got {rows_below=} {rows=}")
        return self._bet(rows, (1.0, rows_below), (0.0, rows - rows_below))

    def update_step(self, share: float) -> Stopping:
        """The share of one step's rows that were below, as a single unit."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share lies between 0 and 1, got {share=}")
        return self._bet(1, (share, 1))

    @property
    def bounds(self) -> tuple[float, float]:
        """Shares that were never ruled out, each side at 1 - alpha for all times at once."""
        above, below = self._ruled_out  # "p or more" and "p or less" were denied
        order = np.argsort(self._limits)
        limits = self._limits[order]
        low, high = limits[below[order]], limits[above[order]]
        return (float(low.max()) if len(low) else 0.0), (float(high.min()) if len(high) else 1.0)

    def _bet(self, units: int, *values: tuple[float, int]) -> Stopping:
        """One look after these values, each so many times."""
        p = self._limits[:, None]
        safe = (1 - np.array(SAFE_BETS)) / (1 - p)
        unsafe = np.minimum(np.array(UNSAFE_BETS) - 1, (1 - p) / p / 2) / (1 - p)
        for z, times in values:
            if times:
                with np.errstate(divide="ignore"):  # a bet on no row below loses all to the first one
                    self._safe += times * np.log1p(safe * (p - z))
                self._unsafe += times * np.log1p(unsafe * (z - p))
        self.units += units
        self._look()
        return self

    def _look(self) -> None:
        bar = -math.log(self.alpha)
        self._ruled_out |= np.stack([_mean_capital(self._safe) >= bar, _mean_capital(self._unsafe) >= bar])
        if self.verdict == "undecided":
            self.verdict = "safe" if self._ruled_out[0, 0] else "unsafe" if self._ruled_out[1, 0] else "undecided"


def _mean_capital(log_capital: np.ndarray) -> np.ndarray:
    """Logarithm of the mean over bets."""
    top = log_capital.max(1, keepdims=True)
    return (top + np.log(np.exp(log_capital - top).mean(1, keepdims=True)))[:, 0]


@dataclass(kw_only=True)
class Drift:
    """Has a quantity moved away from where it started? Fed with log2 amax, or with the mean log2 row rms, of each probe step."""

    reference: float = REFERENCE
    decision: float = DECISION
    count: int = 0
    up: float = 0.0
    down: float = 0.0
    alarmed: bool = False
    _mean: float = 0.0
    _squares: float = 0.0

    def __post_init__(self) -> None:
        if self.reference <= 0 or self.decision <= 0:
            raise ValueError(f"a reference and a decision are above 0, got {self.reference=} {self.decision=}")

    def update(self, value: float) -> Drift:
        """The next value; two serve to start. -inf (a tensor of zeros) raises ValueError: no logarithm is a scale."""
        if not math.isfinite(value):
            raise ValueError(f"drift is that of finite values, got {value=}; leave out steps that were all zero")
        if self.count >= 2:
            score = self._score(value)
            self.up = max(0.0, self.up + score - self.reference)
            self.down = max(0.0, self.down - score - self.reference)
            self.alarmed |= max(self.up, self.down) > self.decision
        self.count += 1
        gap = value - self._mean
        self._mean += gap / self.count
        self._squares += gap * (value - self._mean)
        return self

    def _score(self, value: float) -> float:
        """Standard normal where all values so far are independent and of one normal distribution."""
        n, spread = self.count, math.sqrt(self._squares / (self.count - 1))
        if spread == 0:
            return 0.0 if value == self._mean else math.copysign(LARGEST_SCORE, value - self._mean)
        t = math.sqrt(n / (n + 1)) * (value - self._mean) / spread
        score = -float(ndtri(stdtr(n - 1, -abs(t)))) if t else 0.0
        return math.copysign(min(score, LARGEST_SCORE), t)


def drifted(readings: Readings, since: int = 0) -> tuple[str, ...]:
    """Sites with an operand whose log2 amax, or mean log2 rms of rows, has drifted over the steps read from `since` on. Steps of zeros are left out."""
    out = []
    for name, reading in readings.sites.items():
        for s in (getattr(reading, operand) for operand in OPERANDS):
            live = (s.steps >= since) & (s.amax > 0) if s is not None else None
            series = () if s is None else (s.log2_amax[live], (s.log2_rms / s.live_rows.clamp(min=1))[live])
            if any(_alarms(values.tolist()) for values in series):
                out.append(name)
                break
    return tuple(out)


def _alarms(values: list[float]) -> bool:
    drift = Drift()
    for value in values:
        drift.update(value)
    return drift.alarmed
