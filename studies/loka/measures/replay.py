"""A step captured as a CUDA graph whose scratch memory it shares with other steps: many variants of a large model in one contest.

    pool = shared_pool(device)
    step = Replayed(run, device, pool)           # run() -> list of tensors
    step()                                       # replays; step.output is what it wrote

Graphs of one pool give each other their scratch memory and keep their outputs: replayed one after the other on one stream, as a contest does, each
writes its scratch before it reads it. A graph of each variant's own would hold its activations for as long as the contest lasts, about 20 GB of a
Wukong-5.6 step at a batch of 6144. A contest launches these replays eagerly, so a call is `repeats` of them in a row: the first one's launch then
weighs little. On a CPU a call runs the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from suite.timing import Variant

__all__ = ["Replayed", "replayed_variant", "shared_pool"]

WARM_CALLS = 3  # compiled, allocated and chosen for good before the capture
LEAST_S = 20e-3  # of device time a launch: launching a graph takes the host some 10 us


def shared_pool(device: str) -> tuple[int, int] | None:
    return None if torch.device(device).type == "cpu" else torch.cuda.graph_pool_handle()


class Replayed:
    """Raises RuntimeError where the step cannot be captured: it synchronises, or copies to the host."""

    def __init__(self, step: Callable[[], list[torch.Tensor]], device: str, pool: tuple[int, int] | None) -> None:
        self._step, self._graph = step, None
        self.output: list[torch.Tensor] = []
        if torch.device(device).type == "cuda":
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_CALLS):
                    step()
            torch.cuda.current_stream(device).wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                self.output = step()
        self()

    def __call__(self) -> None:
        if self._graph is None:
            self.output = self._step()
        else:
            self._graph.replay()

    def poison(self) -> None:
        for t in self.output:
            t.fill_(float("nan"))

    def repeats(self) -> int:
        """Replays that together take LEAST_S on the device, at most 100."""
        if self._graph is None:
            return 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            self()
        end.record()
        torch.cuda.synchronize()
        return min(100, max(1, math.ceil(LEAST_S / (start.elapsed_time(end) * 1e-3 / 5))))


def replayed_variant(name: str, step: Replayed, check: Callable[[Sequence[torch.Tensor]], None], *, touched: int) -> Variant:
    """A contest's variant; `check` gets the outputs, of which none has a NaN, and raises AssertionError where they are wrong."""

    def checked() -> None:
        holes = [i for i, t in enumerate(step.output) if bool(t.isnan().any())]
        assert not holes, f"outputs {holes[:5]} of {len(step.output)} of {name} were not written whole"
        check(step.output)

    return Variant(name=name, calls=(step,) * step.repeats(), check=checked, poison=step.poison, bytes_moved=touched)
