"""What `suite warm loka` runs: the launches of a preset's GPU cells, once each, for the kernels that they compile.

    python -m suite warm loka --preset gpu --jobs 16 --only 'time *'
    warm(presets.gpu())         # [WarmTask, ...], from the same list of cells that the preset measures

Each kind of GPU cell names its tasks below, and a test holds the table to the cells. Triton's kernels depend on a launch's types, options and
constants, and of its integers only on which are 1 or multiples of 16: so shapes are the cells' own, and what costs time is left out: one set
of operands instead of many, no timing, one training step. What torch.compile makes is kept in its own cache on disk by the same tasks.

A plan that other cells find is not known here: "dispatch" is prepared as a single recipe is, its products are those that site_times times, and what
joins norms and products of a found plan is compiled by the cell. NOT_PREPARED names kinds that have no tasks, and why. Importing it imports neither
torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from studies.loka.presets import MODS_2K
from studies.loka.questions import questions
from suite.cell import Cell
from suite.study import WarmTask

__all__ = ["BY_KIND", "NOT_PREPARED", "warm"]

TASKS = "studies.loka.warm_tasks"
STAND_IN = {"dispatch": "single rowwise", "planner": "single rowwise"}  # of a variant whose plan is found by other cells
TRAINED_ELSEWHERE = ("ours", "loka")  # arms of quality whose plans are found by other cells
NOT_PREPARED = {
    "cells.pricing:trained": "trains in bf16: nothing of Triton's",
    "cells.pricing:planners": "its products are those of flips",
    "cells.real:real_change": "small products of one model, a minute of training each",
    "cells.probing:validation": "one layer", "cells.probing:stopping": "one product", "cells.probing:surrogate_failures": "one product",
    "cells.probing:overhead": "a model whose plain step is dense_step's",
}  # fmt: skip


def warm(config: Any) -> list[WarmTask]:
    """The tasks of every GPU cell, each once; kinds by turns, so that processes that run side by side seldom want one kernel."""
    by_kind: dict[str, dict[str, WarmTask]] = {kind: {} for kind in BY_KIND}
    for cell in questions(config):
        kind = cell.measure.removeprefix("studies.loka.")
        if cell.needs.device == "cuda" and not cell.replicate and kind in BY_KIND:
            for task in BY_KIND[kind](cell):
                by_kind[kind].setdefault(_asked(task), task)
    found: dict[str, WarmTask] = {}
    for task in (t for turn in zip_longest(*(tasks.values() for tasks in by_kind.values())) for t in turn if t is not None):
        found.setdefault(_asked(task), task)
    return list(found.values())


def _asked(task: WarmTask) -> str:
    return repr((task.run, task.params))


def _task(function: str, cell: Cell, part: str = "", **params: Any) -> WarmTask:
    return WarmTask(label=f"{cell.label}{f': {part}' if part else ''}", run=f"{TASKS}:{function}", params=params)


def _some(function: str, *names: str) -> Callable[[Cell], Iterator[WarmTask]]:
    """One task with these of the cell's parameters."""

    def tasks(cell: Cell) -> Iterator[WarmTask]:
        yield _task(function, cell, **{name: cell.params[name] for name in names})

    return tasks


def _products(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for which, recipes in p["recipes"].items():
        for recipe in recipes:
            yield _task("products", cell, f"{which} {recipe}", model=p["model"], size=p["size"], batch=p["batch"], which=which, recipe=recipe, dtype="bfloat16")


def _steps(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for variant in dict.fromkeys(_stand_in(v) for v in p["variants"]):
        yield _task("step", cell, variant, **{k: p[k] for k in ("model", "size", "mods", "batch", "training")}, variant=variant)


def _stand_in(variant: str) -> str:
    first, *rest = variant.split()
    if first not in STAND_IN:
        return variant
    if rest == ["epilogues"]:
        return "single blockwise epilogues"  # a product's epilogue quantises for blocks of 128
    return " ".join((STAND_IN[first], *rest)) if first == "dispatch" else STAND_IN[first]


def _mods(cell: Cell) -> Iterator[WarmTask]:
    for mods in MODS_2K:
        yield _task("mods_layer", cell, mods or "none", **{k: cell.params[k] for k in ("size", "batch", "training")}, mods=mods)


def _arm(cell: Cell) -> Iterator[WarmTask]:
    if cell.params["arm"] not in TRAINED_ELSEWHERE:
        yield _task("arm", cell, **{k: v for k, v in cell.params.items() if k not in ("steps", "test_rows")})


def _flips(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for recipe in p["recipes"]:
        yield _task("products", cell, recipe, model="wukong", size=p["training"]["size"], batch=p["chunk"], which="forward", recipe=recipe, dtype="float32")


def _gradients(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for which, recipes in p["products"].items():
        for recipe in recipes:
            yield _task("products", cell, f"{which} {recipe}", model="wukong", size=p["training"]["size"], batch=p["batch"], which=which, recipe=recipe, dtype="float32")


# measure function -> its tasks; the kinds that take longest first
BY_KIND: Mapping[str, Callable[[Cell], Iterator[WarmTask]]] = {
    "cells.speed:dense_step": _steps,
    "cells.speed:site_times": _products,
    "cells.contests:crossover": _some("crossover", "m", "k", "n", "which", "recipes", "fused"),
    "cells.contests:fused_quantise": _some("fused_quantise", "m", "k", "norm", "activation", "granularity", "keep"),
    "cells.speed:mods_latency": _mods,
    "learning.quality:quality": _arm,
    "probing.captured:captured": _some("captured", "model", "size", "mods", "batch", "examples"),
    "measures.safety_map:safety": _some("safety", "which", "op", "products", "rows", "contracted"),
    "cells.pricing:flips": _flips,
    "cells.pricing:gradients": _gradients,
}
