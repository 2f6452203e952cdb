"""A function that runs eagerly, or is captured once as a CUDA graph and replayed.

    step = Runner(function, device="cuda", graphed=True, pool=other)
    step()                                   # first call: warm-up and capture; then one launch

The function reads and writes tensors that stay where they are, and asks nothing of the device. It is warmed up by real calls before the capture, so
whoever makes a Runner sees to it that those change nothing (idle rows, no slot due). Captures that never run at once may share a memory pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Runner"]

_WARM_UPS = 2  # compile, then the allocator's sizes


class Runner:
    """graphed: ignored without a GPU, where there is nothing to capture."""

    def __init__(self, function: Callable[[], None], *, device: torch.device, graphed: bool, pool: Runner | None = None) -> None:
        self.function, self.device, self._pool = function, device, pool
        self.graphed = graphed and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.graphed:
            self.function()
            return
        if self._graph is None:
            raise AssertionError("a captured function runs after `capture`, when its inputs are idle")
        self._graph.replay()

    def capture(self) -> None:
        """Does nothing where it is captured, or need not be."""
        if not self.graphed or self._graph is not None:
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self.function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._pool is None or self._pool._graph is None else self._pool._graph.pool()
            with torch.cuda.graph(graph, pool=pool):
                self.function()
            self._graph = graph
