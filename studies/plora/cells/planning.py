"""Cells of cost models and planners: studies.plora.measures.planning with the metrics that the study declares (studies.plora.declared).

A cell names its model and problem in a few numbers (studies.plora.measures.tables); what the measures take whole is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from studies.plora.declared import kept
from studies.plora.engine.shapes import SHAPES
from studies.plora.measures import planning
from studies.plora.measures.tables import ANSWER_TOKENS, cases_of
from suite.measure import Context, Result

__all__ = ["clusters", "cost_model", "gaps", "makespan", "memory_model", "regret"]


def _sizes(model: str) -> dict[str, Any]:
    return {"config": asdict(SHAPES[model]), "answer_tokens": ANSWER_TOKENS}


def _memory_model(ctx: Context, *, model: str) -> Result:
    return planning.memory_model(ctx, **_sizes(model))


def _on_cases(measure: Callable[..., Result]) -> Callable[..., Result]:
    def cell(ctx: Context, *, model: str, problem: Mapping[str, Any]) -> Result:
        return measure(ctx, **_sizes(model), cases=cases_of(problem))

    return cell


def _makespan(ctx: Context, *, model: str, tokens: int, real_tokens: float, budget_tokens: int, gpus: int, limit_bytes: int) -> Result:
    return planning.makespan(ctx, **_sizes(model), tokens=tokens, real_tokens=real_tokens, budget_tokens=budget_tokens, gpus=gpus, limit_bytes=limit_bytes)


def _clusters(ctx: Context, *, model: str, tokens: int, real_tokens: float, budget_tokens: int, gpus: Sequence[int], limit_bytes: int) -> Result:
    return planning.clusters(ctx, **_sizes(model), tokens=tokens, real_tokens=real_tokens, budget_tokens=budget_tokens, gpus=list(gpus), limit_bytes=limit_bytes)


cost_model = kept(planning.cost_model, "mape")
memory_model = kept(_memory_model, "memory_mape")
gaps = kept(_on_cases(planning.gaps))
regret = kept(_on_cases(planning.regret), "planner_regret")
makespan = kept(_makespan, "makespan_s", "makespan_over_eager", "makespan_over_graphed")
clusters = kept(_clusters, "simulated_over_sequential")
