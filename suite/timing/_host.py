"""Runs and times entries on the host: a launch is one pass over a variant's calls between two readings of the clock.

Used by `suite.timing.contest` alone. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from suite.telemetry import Sensor
from suite.timing._entry import Entry

__all__ = ["HostRunner"]


class HostRunner:
    """The CPU's way to run a contest's entries; `suite.timing._cuda.CudaRunner` has the same methods."""

    def __init__(self, entries: Sequence[Entry], clock: Callable[[], int]):
        self._entries = entries
        self._clock = clock

    def __enter__(self) -> HostRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to give back."""

    def prepare(self) -> dict:
        """Facts for the conditions; every entry has run once after it (first-call costs are paid)."""
        for index in range(len(self._entries)):
            self.recompute(index)
        return {"passes": {entry.name: 1 for entry in self._entries}, "head_start_s": 0.0}

    def calls_per_launch(self, index: int) -> int:
        return len(self._entries[index].variant.calls)

    def recompute(self, index: int) -> None:
        """One untimed pass, its outputs ready on return."""
        for call in self._entries[index].variant.calls:
            call()

    def synchronize(self) -> None:
        """Host calls are done when they return."""

    def warm(self, warmup_s: float, sensor: Sensor, *, until_steady: bool) -> dict:
        """Passes over all entries for `warmup_s`. A CPU's clock is not read: `steady` is None."""
        start_ns = self._clock()
        while (self._clock() - start_ns) * 1e-9 < warmup_s:
            for index in range(len(self._entries)):
                self.recompute(index)
        return {"seconds": (self._clock() - start_ns) * 1e-9, "steady": None, "sm_clocks_mhz": []}

    def round_s(self, visits: Sequence[Sequence[int]]) -> np.ndarray:
        """Timed launches in the order of `visits` [launches][entries]; seconds per call, [launches, entries]."""
        clock, seconds = self._clock, np.empty((len(visits), len(self._entries)))
        rotations = [entry.variant.calls for entry in self._entries]
        for launch, order in enumerate(visits):
            for index in order:
                calls = rotations[index]
                start_ns = clock()
                for call in calls:
                    call()
                seconds[launch, index] = (clock() - start_ns) * 1e-9 / len(calls)
        return seconds
