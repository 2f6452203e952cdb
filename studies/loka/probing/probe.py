"""Probe: watch the operands of a model's products while it trains, on every n-th step, and keep their sketches.

    readings = probe(model, batches, loss=bce)             # batches of (inputs, target); without a loss: of inputs, and forward alone is seen
    watch = Probe(model, *inputs, every=100, plain=torch.compile(model))
    loss(watch(*inputs), target).backward()                # in a training loop, in the model's place
    write_readings(watch.readings, "readings.npz")

Two graphs over the same parameters: `plain` runs, except on every n-th step, where a second one with an observer at each traced site
(studies.loka.sites.registry) runs instead: it sees x and w in the forward pass and dy in the backward pass, of all sites. In between nothing is added to
the plain graph, not even a branch inside it, so that it may be compiled. A step whose backward did not come is not kept.

What a probed step reads beside the model, in passes over an operand: x, dy and w of a layer 3 (statistics 1, column amax 1, column sums of squares 1;
columns over 65,536 rows at most), operands of a batched product 1 (`bytes_read` counts all). Of x and dy it copies the rows to the host that the
reservoir will keep, fewer with every step, and of w none before the readings are read. With bf16 operands and products of 2 M N K flops in each of
three passes, reading costs 6 (M K + N K + M N) bytes: at a GPU's 200 flops a byte the time of 200 (1/M + 1/N + 1/K) of the products', 8% or so of
large layers. Of Wukong-5.6 with 6144 examples it is 33 GB beside products of 34 TFLOP. The rest of a probed step's cost is some 40 launches an operand,
and that the model runs uncompiled or, where `watched` is compiled too, in a piece between each two sites. Every 100th step may take half as long
again before it costs 0.5%. Nothing waits for a GPU: what was seen is fetched when the next probed step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from studies.loka.probing.readings import Readings, SiteReading
from studies.loka.probing.sketch import COLUMN_ROWS, ROWS, Look, look
from studies.loka.site import Site
from studies.loka.sites.apply import Replacement, replacement, rewrite
from studies.loka.sites.products import Multiply, multiply
from studies.loka.sites.registry import trace

__all__ = ["Probe", "bytes_read", "probe"]


class Probe:
    """Call it in the model's place. `readings` are those of all steps read so far; reading them ends the step that is under way."""

    def __init__(self, model: nn.Module, *example: object, every: int = 100, backward: bool = True, rows: int = ROWS, seed: int = 0, plain: Callable | None = None) -> None:
        """every: steps from one read to the next, the first step being one. plain: what runs in between, `model` itself if not given; compile
        `watched`, the other graph, as you compiled that.

        Raises ValueError for every < 1, for rows < 1, and as `trace` does.
        """
        if every < 1 or rows < 1:
            raise ValueError(f"a probe reads every n-th step, n >= 1, and keeps rows >= 1, got {every=} {rows=}")
        self.registry = trace(model, *example)
        self.every, self.backward, self.rows, self.seed, self.steps = every, backward, rows, seed, 0
        self.plain = model if plain is None else plain
        self.watched = rewrite(self.registry, [self._replacement(site) for site in self.registry.sites])
        self._kept: dict[str, SiteReading] = {}
        self._weights: dict[str, tuple] = {}
        self._under_way: dict[str, _Step] = {}

    def __call__(self, *inputs: object) -> object:
        step, self.steps = self.steps, self.steps + 1
        if step % self.every:
            return self.plain(*inputs)
        self._end_step()
        self._step = step
        return self.watched(*inputs)

    @property
    def readings(self) -> Readings:
        self._end_step()
        sites = {s.name: self._with_weight(s) for s in self.registry.sites if s.name in self._kept}
        return Readings(sites=sites, unsupported=dict(self.registry.unsupported))

    def _replacement(self, site: Site) -> Replacement:
        """The site's product under observation, which a compiler leaves alone, whole: it breaks the graph once."""
        observed = replacement(self.registry, site.name, self._observer(site))
        return replace(observed, run=torch.compiler.disable(observed.run))

    def _observer(self, site: Site) -> Multiply:
        layer = site.op == "linear"

        def observed(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = multiply(x, w, bias)
            batch = y.shape[:-2] if w.ndim > 2 else ()  # of matrices that each have their own w
            bound = self._kept[site.name].x.reservoir.bound if site.name in self._kept else None
            self._weights[site.name] = w, batch
            seen_x, seen_w = self._look(site, x, batch, below=bound), self._look(site, w, batch, parameter=layer, below=0 if layer else bound)
            step = self._under_way[site.name] = _Step(x=seen_x, w=seen_w, waits=self.backward and y.requires_grad)
            if step.waits:
                y.register_hook(lambda dy: step.saw(self._look(site, dy, batch, below=bound)))
            return y

        return observed

    def _with_weight(self, site: Site) -> SiteReading:
        """A parameter's statistics are of each step, its rows those of now: they need not be fetched before."""
        reading = self._kept[site.name]
        if site.op != "linear":
            return reading
        now = self._look(site, *self._weights[site.name], parameter=True, below=None).sketch()
        return replace(reading, w=replace(reading.w, reservoir=now.reservoir))

    def _look(self, site: Site, x: torch.Tensor, batch: torch.Size | tuple, *, parameter: bool = False, below: int | None = None) -> Look:
        if batch:
            x = x.expand(*batch, *x.shape[-2:]).flatten(0, -3)
        how = {"step": self._step, "seed": self.seed, "parameter": parameter, "below": below}
        if site.op == "bmm":
            return look(x if batch else x.reshape(1, -1, x.shape[-1]), items=-(-self.rows // min(site.m, site.n)), form="matrices", **how)
        return look(x.transpose(0, 1) if batch else x, items=self.rows, form="layers" if batch else "rows", **how)

    def _end_step(self) -> None:
        for site in self.registry.sites:
            step = self._under_way.pop(site.name, None)
            if step and not step.waits:
                reading = SiteReading(site=site, x=step.x.sketch(), w=step.w.sketch(), dy=step.dy and step.dy.sketch())
                self._kept[site.name] = self._kept[site.name].merge(reading) if site.name in self._kept else reading


@dataclass(kw_only=True)
class _Step:
    """What one step showed of one site so far; `waits` for dy."""

    x: Look
    w: Look
    waits: bool
    dy: Look | None = None

    def saw(self, dy: Look) -> None:
        self.dy, self.waits = dy, False


def probe(model: nn.Module, batches: Iterable, *, loss: Callable[[object, object], torch.Tensor] | None = None, every: int = 1, rows: int = ROWS, seed: int = 0) -> Readings:
    """Readings of the model as it is, over every n-th of these batches; parameters and their gradients stay as they were.

    With `loss` a batch is (inputs, target) and loss(output, target) is what is differentiated; without it a batch is the inputs, a tuple or one
    tensor, and only the forward pass is seen. Raises ValueError for no batches.
    """
    watch = None
    for i, batch in enumerate(batches):
        if i % every:
            continue
        inputs, target = batch if loss else (batch, None)
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        watch = watch or Probe(model, *inputs, every=1, backward=loss is not None, rows=rows, seed=seed)
        watch.steps = i
        if loss is None:
            with torch.no_grad():
                watch(*inputs)
        else:
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss(watch(*inputs), target), trained, allow_unused=True)
        watch._end_step()
    if watch is None:
        raise ValueError("a probe reads at least one batch, got none; pass a list, for an iterator is empty the second time")
    return watch.readings


def bytes_read(sites: Iterable[Site], *, backward: bool = True, element_bytes: int = 2) -> int:
    """Bytes of operands that a probed step reads beside the model; see the module's docstring."""
    total = 0
    for s in sites:
        operands = s.m * s.k + (s.m * s.n if backward else 0)
        of_columns = 0 if s.op == "bmm" else 2 * (operands * min(1.0, COLUMN_ROWS / s.m) + s.n * s.k * min(1.0, COLUMN_ROWS / s.n))
        total += element_bytes * s.batch * round(operands + s.n * s.k + of_columns)
    return total
