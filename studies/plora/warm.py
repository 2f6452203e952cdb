"""What `suite warm plora` runs: the launches of a preset's GPU cells, once each, for the kernels that they compile.

    python -m suite warm plora --preset gpu --jobs 16 --only 'time ladder*'
    warm(presets.gpu())         # [WarmTask, ...], from the same list of cells that the preset measures

Triton's kernels depend on types, constants and on which sizes are 1 or multiples of 16, not on the number of layers: a task steps a pack of the cell's own
slots, length and path on one layer of the cell's model, one composition of a table for those that have the same kernels. NOT_PREPARED names kinds of cells that have no tasks, and why. Importing it imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from studies.plora.presets import OURS, SINGLES
from studies.plora.questions import questions
from suite.cell import Cell
from suite.study import WarmTask

__all__ = ["BY_KIND", "NOT_PREPARED", "PATHS", "warm"]

TASKS = "studies.plora.warm_tasks"
# rung -> (path, whether it packs all adapters) of studies.plora.measures.throughput.LADDER: paths without kernels of Triton's have the decoder's own
PATHS = {"one eager": ("looped", False), SINGLES[0]: ("looped", False), SINGLES[1]: ("triton", False), "B3 looped": ("looped", True), "B3 looped, graphed": ("looped", True), "B4 padded": ("padded", True),
         "B5 grouped": ("grouped", True), "B6 ours": ("triton", True), OURS: ("triton", True)}  # fmt: skip
NOT_PREPARED = {
    "cells.throughput:largest": "each try is another pack", "cells.training:quality": "a pack of its own, minutes of training", "cells.training:winner": "small packs, minutes of training",
    "cells.training:against_peft": "PEFT's arm compiles nothing, ours is quality's", "cells.training:same_adapters": "deterministic mode, one schedule", "cells.training:makespan_live": "thirty shapes of single adapters, captured anyway",
}  # fmt: skip


def warm(config: Any) -> list[WarmTask]:
    """The tasks of every GPU cell, each once; kinds by turns, so that processes that run side by side seldom want one kernel."""
    by_kind: dict[str, dict[str, WarmTask]] = {kind: {} for kind in BY_KIND}
    for cell in questions(config):
        kind = cell.measure.removeprefix("studies.plora.")
        if cell.needs.device == "cuda" and not cell.replicate and kind in BY_KIND:
            for task in BY_KIND[kind](cell):
                by_kind[kind].setdefault(_asked(task), task)
    found: dict[str, WarmTask] = {}
    for task in (t for turn in zip_longest(*(tasks.values() for tasks in by_kind.values())) for t in turn if t is not None):
        found.setdefault(_asked(task), task)
    return list(found.values())


def _asked(task: WarmTask) -> str:
    return repr((task.run, task.params))


def _task(function: str, cell: Cell, part: str, **params: Any) -> WarmTask:
    return WarmTask(label=f"{cell.label}: {part}" if part else cell.label, run=f"{TASKS}:{function}", params=params)


def _pack(cell: Cell, part: str, slots: list[list[int]], *, path: str = "triton", tokens: int = 0, answer_tokens: int = 0) -> WarmTask:
    p = cell.params
    return _task("pack", cell, part, model=p["model"], tokens=tokens or p["tokens"], answer_tokens=answer_tokens or p["answer_tokens"], slots=slots, path=path)


def _ladder(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for variant in p["variants"]:
        path, packed = PATHS[variant]
        yield _pack(cell, variant, [[p["rank"], p["batch"]]] * (p["k"] if packed else 1), path=path)
    yield _saturated(cell)


def _surface(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for path in ("looped", "triton"):
        yield _pack(cell, f"one, {path}", [[p["rank"], p["batch"]]], path=path)
    for k in p["ks"]:
        yield _pack(cell, f"k={k}", [[p["rank"], p["batch"]]] * k)
    yield _saturated(cell)


def _saturated(cell: Cell) -> WarmTask:
    p = cell.params
    return _pack(cell, "saturated", [[p["rank"], max(1, p["saturated_tokens"] // p["tokens"])]])


def _saturation(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    yield _pack(cell, "pack", [[p["rank"], 1]] * p["k"])
    for n in p["singles"]:
        yield _pack(cell, f"{n} tokens", [[p["rank"], max(1, n // p["tokens"])]])


def _table(cell: Cell) -> Iterator[WarmTask]:
    """One composition of those that ask for the same schedules (kernels.lora.schedules: powers of two of rows and slots, the widest rank)."""
    from studies.plora.measures.tables import ANSWER_TOKENS, shapes_of

    asked = set()
    for i, shape in enumerate(shapes_of(cell.params["model"], cell.params["table"])):
        ranks, rows = [r for r, _ in shape["slots"]], max(n for _, n in shape["slots"])
        key = (max(ranks), (rows * shape["tokens"] - 1).bit_length(), (len(ranks) - 1).bit_length(), sum(ranks) % 16 == 0)
        if key not in asked:
            asked.add(key)
            yield _pack(cell, str(i), shape["slots"], tokens=shape["tokens"], answer_tokens=ANSWER_TOKENS)


def _kernels(cell: Cell) -> Iterator[WarmTask]:
    yield _task("kernels", cell, "", **{name: cell.params[name] for name in ("which", "d", "tokens", "slots", "rank", "paths")})


def _grid(cell: Cell) -> Iterator[WarmTask]:
    """Slots of the recording, as wide as they come; classes have one answer token, evaluation is run too."""
    p = cell.params
    share = -(-p["slots"] // len(p["ranks"]))
    slots = [[r, 1] for r in sorted(p["ranks"], reverse=True) for _ in range(share)][: p["slots"]]
    yield _task("learning", cell, "", model=p["model"], task=p["task"], tokens=p["tokens"], slots=slots)


def _pack_times(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    for i, slots in enumerate(p["packs"]):
        yield _task("learning", cell, str(i), model=p["model"], task=p["task"], tokens=p["tokens"], slots=slots)


def _live(cell: Cell) -> Iterator[WarmTask]:
    p = cell.params
    if p["arm"].startswith("packed"):
        yield _task("learning", cell, "", model=p["model"], task=p["task"], tokens=p["tokens"], slots=[[r, 1] for r in p["slots"]])


# measure function -> its tasks; the kinds that take longest first
BY_KIND: Mapping[str, Callable[[Cell], Iterator[WarmTask]]] = {
    "cells.throughput:ladder": _ladder,
    "cells.throughput:surface": _surface,
    "cells.throughput:saturation": _saturation,
    "cells.throughput:step_times": _table,
    "cells.kernels:kernels": _kernels,
    "cells.training:grid": _grid,
    "cells.training:pack_times": _pack_times,
    "cells.search:live": _live,
}
