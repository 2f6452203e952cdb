"""A function that runs eagerly, or is captured once as a CUDA graph and replayed.

    step = Runner(function, device=device, graphed=True)
    if not step.ready:
        ...                                  # make the function's inputs idle
        step.prepare()                       # warm-up and capture
    step()                                   # one launch

The function reads and writes tensors that stay where they are, and asks nothing of the device. Warming up calls it, so whoever prepares a Runner sees
to it that a call changes nothing (idle rows, no slot due). Its memory is the graph's own as long as the Runner lives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Runner"]

_WARM_UPS = 2  # compile, then the allocator's sizes


class Runner:
    """graphed: without a GPU there is nothing to capture, and the function runs as it is."""

    def __init__(self, function: Callable[[], None], *, device: torch.device, graphed: bool) -> None:
        self.function, self.device = function, device
        self.graphed = graphed and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def ready(self) -> bool:
        return not self.graphed or self._graph is not None

    def __call__(self) -> None:
        if not self.graphed:
            self.function()
            return
        assert self._graph is not None, "a Runner is prepared before it runs"
        self._graph.replay()

    def prepare(self) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self.function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):  # torch's own capture stream is of the GPU that a process captured on first
                self.function()
            self._graph = graph
