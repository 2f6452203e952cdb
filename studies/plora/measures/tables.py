"""Tables of compositions and planning problems by a few numbers: a cell's parameters say which, its function lists them.

    shapes_of("3b", {"spread": {"first": 0, "count": 12, "tokens": [64, 128], "most_tokens": 8192}})       # JSON of compositions, for a fit or its errors
    shapes_of("3b", {"plans": {"tokens": 512, "real_tokens": 190.4, "budget_tokens": 40_000}})             # every pack that any plan of those cases uses
    shapes_of("3b", {"packs": {"tokens": 512, "real_tokens": 190.4, "budget_tokens": 90_000, "gpus": 8, "limit_bytes": 120e9, "most_tokens": 8192}})
    shapes_of("3b", {"alone": {"tokens": 512, "most_tokens": 8192}})                                       # single slots of the paper's ranks and batches
    shapes_of("3b", {"listed": [{"tokens": 128, "slots": [[16, 1]]}]})
    cases_of({"tokens": 512, "real_tokens": 190.4, "budget_tokens": 40_000})                               # JSON of studies.plora.planning.cases

What fits is counted, not measured. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from studies.plora.adapter import PackShape
from studies.plora.engine.shapes import SHAPES
from studies.plora.planning.cases import cases, to_time
from studies.plora.planning.continuous import candidates
from studies.plora.planning.design import PAPER_BATCHES, PAPER_RANKS, paper_configurations, shape_json, spread
from studies.plora.planning.memory import predict
from studies.plora.planning.work import Work

__all__ = ["ANSWER_TOKENS", "KINDS", "cases_of", "shapes_of"]

ANSWER_TOKENS = 16  # of every row of a table, whatever its length: a cost model has no term for them
KINDS = ("spread", "plans", "packs", "alone", "listed")


def shapes_of(model: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises ValueError for a kind that KINDS does not hold."""
    if len(table) != 1 or next(iter(table)) not in KINDS:
        raise ValueError(f"a table is of one kind of {KINDS}, got {list(table)}; name one")
    ((kind, how),) = table.items()
    if kind == "listed":
        return [dict(x) for x in how]
    if kind == "alone":
        return [{"tokens": how["tokens"], "slots": [[r, n]]} for r in PAPER_RANKS for n in PAPER_BATCHES if how["tokens"] * n <= how["most_tokens"]]
    if kind == "spread":
        found = spread(how["count"], first=how["first"], tokens=tuple(how["tokens"]), most_tokens=how["most_tokens"])
    elif kind == "plans":
        found = to_time(cases(**how), _bytes_of(model))
    else:
        found = _packs(model, **how)
    return [shape_json(s) for s in found]


def cases_of(problem: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [c.to_json() for c in cases(**problem)]


def _packs(model: str, *, tokens: int, real_tokens: float, budget_tokens: int, gpus: int, limit_bytes: int, most_tokens: int) -> list[PackShape]:
    """Slots that continuous packing of the paper's 120 configurations tries."""
    work, bytes_of = Work(adapters=paper_configurations(budget_tokens=budget_tokens), tokens=tokens, real_tokens=real_tokens), _bytes_of(model)
    return candidates(work, gpus=gpus, fits=lambda s: bytes_of(s) <= limit_bytes and s.tokens * sum(x.rows for x in s.slots) <= most_tokens)


def _bytes_of(model: str) -> Callable[[PackShape], int]:
    return lambda shape: predict(SHAPES[model], shape, answer_tokens=ANSWER_TOKENS).total
