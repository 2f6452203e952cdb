"""What `suite warm determinism` runs: the launches of a preset's GPU cells, on small models and stand-ins, for the kernels that they compile.

    warm(presets.gpu())         # [WarmTask, ...], from the same list of cells that the preset measures

Each kind of GPU cell names its tasks below, and a test holds the table to the cells. Kernels depend on a launch's types, options and
constants, and of its integers only on which are 1 or multiples of 16: so shapes are the cells' own, and what costs time is left out: 2
layers instead of 30, random weights, one set of operands instead of 40, one round. Cells over several GPUs are not prepared. Importing it
imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from studies.determinism.golden_manifest import read
from studies.determinism.questions import questions
from suite.cell import Cell
from suite.study import WarmTask

TASKS = "studies.determinism.warm_tasks"
COMPILED = ("fma", "integer", "integer-b9", "layercast_compiled", "bf16_compiled")  # of a contest; the others call cuBLAS
PACKED = ("fma", "integer")  # of the profiled call
ENGINE_SHAPES = 3  # evidence.ENGINE_SHAPES; a test compares


def warm(config: Any) -> list[WarmTask]:
    """The tasks of every GPU cell, each once; kinds by turns, so that processes that run side by side seldom want one kernel."""
    by_kind: dict[str, list[WarmTask]] = {kind: [] for kind in BY_KIND}
    for cell in questions(config):
        kind = cell.measure.rpartition(".")[2]
        if kind in BY_KIND and cell.needs.device == "cuda" and not cell.replicate and cell.needs.ranks == 1:
            by_kind[kind] += BY_KIND[kind](cell)
    found: dict[str, WarmTask] = {}
    for task in (t for turn in zip_longest(*map(_unique, by_kind.values())) for t in turn if t is not None):
        found.setdefault(_asked(task), task)
    return list(found.values())


def _asked(task: WarmTask) -> str:
    return repr((task.run, task.params))


def _unique(tasks: list[WarmTask]) -> list[WarmTask]:
    return list({_asked(t): t for t in tasks}.values())


def _task(function: str, cell: Cell, part: str = "", **params: Any) -> WarmTask:
    return WarmTask(label=f"{cell.label}{f': {part}' if part else ''}", run=f"{TASKS}:{function}", params=params)


def _whole(function: str, *left_out: str) -> Callable[[Cell], Iterator[WarmTask]]:
    """One task with the cell's own parameters."""

    def tasks(cell: Cell) -> Iterator[WarmTask]:
        yield _task(function, cell, **{k: v for k, v in cell.params.items() if k not in (*left_out, "device")})

    return tasks


def _golden(cell: Cell) -> Iterator[WarmTask]:
    for q in read().questions:
        yield _task("golden", cell, q.name, question=q.name)


def _foreign(cell: Cell) -> Iterator[WarmTask]:
    for q in read().questions:
        yield _task("foreign", cell, q.name, question=q.name, architecture=cell.params["architecture"])


def _engines(cell: Cell) -> Iterator[WarmTask]:
    for shape in range(ENGINE_SHAPES):
        yield _task("engines", cell, f"shape {shape}", products=cell.params["products"], shape=shape)


def _linear(function: str, variants: tuple[str, ...]) -> Callable[[Cell], Iterator[WarmTask]]:
    def tasks(cell: Cell) -> Iterator[WarmTask]:
        for variant in cell.params["variants"]:
            if variant in variants:
                yield _task(function, cell, variant, variant=variant, **{k: cell.params[k] for k in ("rows", "n", "k")})

    return tasks


def _serving(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for variant in p["variants"]:
        for batch in p["batches"]:
            yield _task("serving_decode", cell, f"{variant} batch={batch}", variant=variant, batch=batch, context=p["context"])
        for tokens in p["prompts"]:
            yield _task("serving_prefill", cell, f"{variant} prompt={tokens}", variant=variant, tokens=tokens)


# measure function -> its tasks; the kinds that take longest first
BY_KIND: Mapping[str, Callable[[Cell], Iterator[WarmTask]]] = {
    "end_to_end:serving": _serving,
    "whole_model:generation": _whole("generation", "ranks"),
    "evidence:training": _whole("training"),
    "contests:linear": _linear("contest", COMPILED),
    "evidence:engines": _engines,
    "flips:texts": _whole("texts"),
    "flips:labels": _whole("labels"),
    "traffic:weight_bytes": _linear("profiled", PACKED),
    "verify_cells:verify": _golden,
    "evidence:foreign": _foreign,
    "cells:operators": _whole("operators", "threads"),
    "evidence:stress": _golden,
}
