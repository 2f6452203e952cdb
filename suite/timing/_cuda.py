"""Runs and times entries on a CUDA device: graph replays between events, none of them starved by the host.

Used by `suite.timing.contest` alone. How a replay is timed:

    spin | event | graph replay (passes x calls) | event

The spin (a kernel that only waits) keeps the device busy while the host enqueues what follows, so the event pair sees
the replay and not the host's launch cost. A replay is at least `min_replay_s` long (the rotation is captured several
times over), so the few microseconds that launching a graph costs on the device stay small against it.
An eager entry is the opposite on purpose: the device is idle when it starts and the host's launches count, as they do
for a user who runs eagerly. It never sets a clock, a power limit or the persistence mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from suite.telemetry import Sensor
from suite.timing._entry import Entry

__all__ = ["CudaRunner"]

_EAGER_WARM_CALLS = 3  # lazy modules, autotuning and library workspaces are in place before a capture
_MAX_PASSES = 64
_PROBES = 5
_WARM_CHUNK_S = 0.05
_STEADY_READINGS = 5  # the mean of so many clock readings against that of as many before
_STEADY_TREND = 0.01
_SPIN_CYCLES_PER_S = 2.0e9  # no card's SM clock is much above; a slower clock only spins longer
_SPIN_LIMIT_S = 5e-3
_SPIN_EXTRA_S = 10e-6


class CudaRunner:
    """The device's way to run a contest's entries; the same methods as `suite.timing._host.HostRunner`.

    Enter it before use (it makes the device current). Raises RuntimeError where a variant cannot be captured.
    """

    def __init__(self, entries: Sequence[Entry], device: str, min_replay_s: float):
        import torch

        self._cuda = torch.cuda
        index = torch.device(device).index
        self._index = torch.cuda.current_device() if index is None else index
        self._guard = torch.cuda.device(self._index)
        self._entries = entries
        self._min_replay_s = min_replay_s
        self._passes = [1] * len(entries)
        self._graphs: dict[int, object] = {}
        self._spin_cycles = 0
        self._sweep_s = _WARM_CHUNK_S
        self._events: list[list[tuple]] = []

    def __enter__(self) -> CudaRunner:
        self._guard.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._events.clear()
        self._graphs.clear()  # gives the graphs' private memory back
        self._guard.__exit__(*exc_info)

    def prepare(self) -> dict:
        """Warm every variant eagerly, capture the graphs, size the passes and the head start; facts for the conditions."""
        stream = self._cuda.Stream(self._index)  # torch's default capture stream belongs to the first device that captured
        self._warm_calls(stream)
        graphed = [index for index, entry in enumerate(self._entries) if entry.graphed]
        self._capture(graphed, stream)
        self._spin_cycles = self._head_start_cycles(graphed)
        self._size_passes(graphed)
        again = [index for index in graphed if self._passes[index] > 1]
        for index in again:
            del self._graphs[index]
        self._capture(again, stream)
        self._spin_cycles = self._head_start_cycles(graphed)
        self._sweep_s = sum(self._launch_s(index) for index in range(len(self._entries)))
        passes = {entry.name: self._passes[index] for index, entry in enumerate(self._entries)}
        return {"passes": passes, "head_start_s": self._spin_cycles / _SPIN_CYCLES_PER_S}

    def calls_per_launch(self, index: int) -> int:
        return len(self._entries[index].variant.calls) * self._passes[index]

    def recompute(self, index: int) -> None:
        """One untimed launch by the very path that is timed, its outputs ready on return."""
        self._launch(index)
        self.synchronize()

    def synchronize(self) -> None:
        self._cuda.synchronize(self._index)

    def warm(self, warmup_s: float, sensor: Sensor, *, until_steady: bool) -> dict:
        """Launches over all entries for at least `warmup_s`, and if asked until the SM clock has no trend.

        Gives up on the trend after 4 x warmup_s + 5 s and says so (`steady` False; None where no clock can be read or
        none was asked for). The clock is read while the device works: an idle card shows another one.
        """
        sweeps = min(2000, max(1, math.ceil(_WARM_CHUNK_S / self._sweep_s)))
        start_s, clocks_mhz, steady, spent_s = time.perf_counter(), [], None, 0.0
        while warmup_s > 0:
            for _ in range(sweeps):
                for index in range(len(self._entries)):
                    self._launch(index)
            clock_mhz = sensor.sm_clock_mhz() if until_steady else None
            self.synchronize()
            spent_s = time.perf_counter() - start_s
            if clock_mhz is not None:
                clocks_mhz.append(float(clock_mhz))
                steady = _has_no_trend(clocks_mhz)
            if spent_s >= warmup_s and steady is not False or spent_s >= 4 * warmup_s + 5:
                break
        return {"seconds": spent_s, "steady": steady, "sm_clocks_mhz": clocks_mhz}

    def round_s(self, visits: Sequence[Sequence[int]]) -> np.ndarray:
        """Timed launches in the order of `visits` [launches][entries]; seconds per call, [launches, entries].

        One untimed sweep comes first: what stood between two rounds (a check, a sensor) must not cool the first launch.
        """
        num_entries = len(self._entries)
        while len(self._events) < len(visits):
            self._events.append([self._event_pair() for _ in range(num_entries)])
        for index in range(num_entries):
            self._launch(index)
        for launch, order in enumerate(visits):
            for index in order:
                self._launch(index, *self._events[launch][index])
        self.synchronize()
        elapsed_ms = [[start.elapsed_time(end) for start, end in pairs] for pairs in self._events[: len(visits)]]
        calls = [self.calls_per_launch(index) for index in range(num_entries)]
        return np.asarray(elapsed_ms, dtype=np.float64) * 1e-3 / calls

    def _launch(self, index: int, start: object = None, end: object = None) -> None:
        """Enqueue one launch, between events where given. An eager one begins on an idle device."""
        graph = self._graphs.get(index)
        if graph is None:
            self.synchronize()
        elif self._spin_cycles:
            self._cuda._sleep(self._spin_cycles)
        if start is not None:
            start.record()
        if graph is not None:
            graph.replay()
        else:
            for call in self._entries[index].variant.calls:
                call()
        if end is not None:
            end.record()

    def _warm_calls(self, stream: object) -> None:
        """Run each variant's calls on the stream of capture, as torch's notes on CUDA graphs ask for, and on the current one."""
        calls = [call for variant in {id(e.variant): e.variant for e in self._entries}.values() for call in variant.calls]
        for call in calls:
            call()
        stream.wait_stream(self._cuda.current_stream(self._index))
        with self._cuda.stream(stream):
            for call in calls:
                for _ in range(_EAGER_WARM_CALLS):
                    call()
        self._cuda.current_stream(self._index).wait_stream(stream)
        self.synchronize()

    def _capture(self, graphed: Sequence[int], stream: object) -> None:
        for index in graphed:
            entry, graph = self._entries[index], self._cuda.CUDAGraph()
            try:
                # thread_local: another thread of a worker (a heartbeat) must not break the capture.
                with self._cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    for _ in range(self._passes[index]):
                        for call in entry.variant.calls:
                            call()
            except RuntimeError as error:
                raise RuntimeError(
                    f"a graphed variant needs calls that neither synchronise nor copy to the host, got {entry.name!r}, "
                    f"whose capture failed; mend its calls or time with mode='eager'"
                ) from error
            self._graphs[index] = graph
        self.synchronize()

    def _size_passes(self, graphed: Sequence[int]) -> None:
        """How often each graph holds its rotation. Both entries of the control get the same number: they are one program."""
        replay_s: dict[int, float] = {}
        for index in graphed:
            key = id(self._entries[index].variant)
            replay_s[key] = min(replay_s.get(key, math.inf), self._launch_s(index))
        for index in graphed:
            wanted = math.ceil(self._min_replay_s / replay_s[id(self._entries[index].variant)])
            self._passes[index] = min(_MAX_PASSES, max(1, wanted))

    def _head_start_cycles(self, graphed: Sequence[int]) -> int:
        """Cycles to spin before a replay: twice what the host needs to enqueue the slowest one, and a little more."""
        if not graphed:
            return 0
        enqueue_s = max(self._enqueue_s(index) for index in graphed)
        return round(min(_SPIN_LIMIT_S, 2 * enqueue_s + _SPIN_EXTRA_S) * _SPIN_CYCLES_PER_S)

    def _event_pair(self) -> tuple:
        return self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)

    def _launch_s(self, index: int) -> float:
        """Median device seconds of a few launches, the first one dropped."""
        pairs = [self._event_pair() for _ in range(_PROBES + 1)]
        for start, end in pairs:
            self._launch(index, start, end)
        self.synchronize()
        return max(1e-6, float(np.median([start.elapsed_time(end) for start, end in pairs[1:]])) * 1e-3)

    def _enqueue_s(self, index: int) -> float:
        """Median host seconds to enqueue one timed replay on an idle device."""
        (start, end), seconds = self._event_pair(), []
        for _ in range(_PROBES + 1):
            self.synchronize()
            begin_s = time.perf_counter()
            self._launch(index, start, end)
            seconds.append(time.perf_counter() - begin_s)
        self.synchronize()
        return float(np.median(seconds[1:]))


def _has_no_trend(clocks_mhz: Sequence[float]) -> bool:
    """Whether the last readings' mean is within 1% of the mean of as many before; jitter of a power-capped card averages out."""
    if len(clocks_mhz) < 2 * _STEADY_READINGS:
        return False
    before, last = np.mean(clocks_mhz[-2 * _STEADY_READINGS : -_STEADY_READINGS]), np.mean(clocks_mhz[-_STEADY_READINGS:])
    return bool(abs(last - before) <= _STEADY_TREND * before)
