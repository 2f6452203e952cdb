"""Small planning problems on which every plan can be listed and every composition timed: what planners are judged on.

    asked = cases(tokens=512, real_tokens=180.0, budget_tokens=40_000)           # twelve, of the same seven adapters
    to_time(asked, bytes_of)                                                     # the compositions that any plan of theirs uses
    asked[0].instance({1: model}, bytes_of)                                      # as planners take it

Cases share their adapters' ranks and batches, so that few compositions serve all: 127 at most. They differ in budgets, GPUs (1 and 2) and memory: 24 and
40 GB are the cards of PLoRA's measurements (A10, A100), as one of 141 GB binds nothing here. A case travels through a cell's parameters as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from studies.plora.adapter import AdapterConfig, PackShape
from studies.plora.planning.design import compositions
from studies.plora.planning.planners import Instance
from studies.plora.planning.time_model import StepTable, TimeModel
from studies.plora.planning.work import Work

__all__ = ["CAPS_BYTES", "Case", "cases", "to_time"]

CAPS_BYTES = (24 * 10**9, 40 * 10**9)
ROOM = 1.5
# (rank, batch, share of the budget): ranks and batches of the paper, and lengths that differ as those of pruned adapters do
POOL = ((8, 1, 0.5), (16, 2, 1.0), (32, 4, 1.0), (64, 1, 0.25), (128, 2, 0.5), (16, 4, 1.5), (64, 8, 1.0))


@dataclass(frozen=True, kw_only=True)
class Case:
    work: Work
    gpus: int
    limit_bytes: int

    def instance(self, models: Mapping[int, TimeModel | StepTable], bytes_of: Callable[[PackShape], int]) -> Instance:
        return Instance(work=self.work, gpus=self.gpus, models=models, bytes_of=bytes_of, limit_bytes=self.limit_bytes)

    def to_json(self) -> dict[str, Any]:
        w = self.work
        return {"adapters": [a.to_json() for a in w.adapters], "tokens": w.tokens, "real_tokens": w.real_tokens, "most_rows": w.most_rows, "gpus": self.gpus,
                "limit_bytes": self.limit_bytes}  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        work = Work(adapters=tuple(map(AdapterConfig.from_json, data["adapters"])), tokens=data["tokens"], real_tokens=data["real_tokens"], most_rows=data["most_rows"])
        return cls(work=work, gpus=data["gpus"], limit_bytes=data["limit_bytes"])


def cases(
    *, tokens: int, real_tokens: float, budget_tokens: int, most_rows: int = 4, gpus: Iterable[int] = (1, 2), caps_bytes: Iterable[int] = CAPS_BYTES, turns: Iterable[int] = (0, 2, 5)
) -> list[Case]:  # fmt: skip
    """The pool with its budgets turned by so many places, on each number of GPUs and under each cap: 12 by default."""
    works, caps = [], tuple(caps_bytes)
    for turn in turns:
        shares = [POOL[(i + turn) % len(POOL)][2] for i in range(len(POOL))]
        pool = [AdapterConfig(rank=r, alpha=2.0 * r, learning_rate=2e-4, batch=b, budget_tokens=max(1, round(budget_tokens * share))) for (r, b, _), share in zip(POOL, shares, strict=True)]
        works.append(Work(adapters=tuple(pool), tokens=tokens, real_tokens=real_tokens, most_rows=most_rows))
    return [Case(work=work, gpus=g, limit_bytes=cap) for work in works for g in gpus for cap in caps]


def to_time(asked: Iterable[Case], bytes_of: Callable[[PackShape], int]) -> list[PackShape]:
    """Each composition that may fit the memory of a case, once, in a fixed order: `bytes_of` is not calibrated yet, so it counts with a half more room."""
    return list(dict.fromkeys(shape for case in asked for shape in compositions(case.work) if bytes_of(shape) <= ROOM * case.limit_bytes))
