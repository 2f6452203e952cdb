"""A machine with a known truth, to test the timing and the statistics against: its clock moves only when its calls run.

    machine = SimulatedMachine(np.random.default_rng(1))
    contest([machine.variant("a", 1e-4), machine.variant("b", 1.03e-4)], clock=machine.clock, device="cpu", ...)

One machine is one process: variants may get a factor of their own that stays for the machine's life (the process-level
variance component), all share a slow drift (heat, neighbours), and every call has its own noise. Not for measuring.
"""

from __future__ import annotations

import math

import numpy as np

from suite.timing._variant import Variant

__all__ = ["SimulatedMachine"]

_BLOCK = 4096


class SimulatedMachine:
    """Log-normal noises; all of them standard deviations of a natural logarithm, so 0.02 is about 2%.

    call_noise: each call by itself. process_noise: a variant's fixed factor in this process. drift: the stationary
    spread of a first-order autoregression over calls that all variants share, with a memory of `drift_calls` calls.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        call_noise: float = 0.02,
        process_noise: float = 0.0,
        drift: float = 0.10,
        drift_calls: int = 2000,
    ):
        self._rng = rng
        self._call_noise, self._process_noise = call_noise, process_noise
        self._keep = 1 - 1 / drift_calls
        self._kick = drift * math.sqrt(1 - self._keep**2)
        self._log_drift = drift * rng.standard_normal()
        self._normals: list[float] = []
        self._now_ns = 0.0
        self.visits: list[str] = []

    def clock(self) -> int:
        """Simulated nanoseconds."""
        return round(self._now_ns)

    def variant(self, name: str, call_s: float, *, num_calls: int = 1, **fields: object) -> Variant:
        """A variant whose calls take `call_s` seconds in the median; `fields` go to Variant."""
        factor_ns = 1e9 * call_s * math.exp(self._process_noise * self._rng.standard_normal())

        def call() -> None:
            if len(self._normals) < 2:
                self._normals = self._rng.standard_normal(_BLOCK).tolist()
            self._log_drift = self._keep * self._log_drift + self._kick * self._normals.pop()
            self._now_ns += factor_ns * math.exp(self._log_drift + self._call_noise * self._normals.pop())
            self.visits.append(name)

        return Variant(name=name, calls=(call,) * num_calls, **fields)
