"""Clusters that are not here: every planner's makespan on 8 or 64 GPUs from a model fitted on one. Kind: simulated.

    lines = compared(replace(instance, gpus=64, models=sharded(model, QWEN25_7B, degrees=(1, 2, 4, 8))))
    lines[0]["planner"], lines[0]["makespan_s"], lines[0]["over_sequential"]

A pack on d GPUs of one host is split by tensor parallelism (Shoeybi et al. 2019): work and weights by d, the floor stays, and each layer adds
four all-reduces of the hidden states, two forward and two backward. They run as rings at LINK_SHARE of the link's rate and take LATENCY_S each at
least: assumptions, as is an NVLink of 450 GB/s each way. Everything that is left out (failures, loading, neighbours on the network) makes a
real cluster slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from studies.models.config import LlamaConfig
from studies.plora.planning.continuous import continuous
from studies.plora.planning.dtm import dtm
from studies.plora.planning.planners import Instance, chunks, fifo, lpt, sequential
from studies.plora.planning.schedule import Schedule
from studies.plora.planning.time_model import TimeModel

__all__ = ["compared", "sharded"]

LINK_BYTES_PER_S = 450e9  # NVLink 4, one direction
LINK_SHARE = 0.8
LATENCY_S = 10e-6  # of one all-reduce
ALL_REDUCES = 4  # a layer and micro-step


def sharded(model: TimeModel, config: LlamaConfig, *, degrees: Sequence[int], element_bytes: int = 2) -> dict[int, TimeModel]:
    """Degree -> the model of a pack on so many GPUs. Raises ValueError for degrees that are no powers of two."""
    if not degrees or any(d < 1 or d & (d - 1) for d in degrees):
        raise ValueError(f"degrees are powers of two, got {tuple(degrees)}; PLoRA's are 1, 2, 4, 8")
    return {d: model if d == 1 else _split(model, config, d, element_bytes) for d in degrees}


def compared(instance: Instance) -> list[dict[str, Any]]:
    """One line a planner, the job-wise ones with slots that idle and, as PLoRA may have meant, with adapters that leave."""
    alone = replace(instance, models={1: instance.models[1]})
    lines = [_line(planner(alone), "idle") for planner in (sequential, fifo, lpt, chunks)]
    for leaving, tail in ((False, "idle"), (True, "leave")):
        lines.append(_line(dtm(replace(alone, leaving=leaving)), tail))
        if instance.degrees != (1,):
            lines.append(_line(dtm(replace(instance, leaving=leaving)), tail))
    lines.append(_line(chunks(replace(alone, leaving=True)), "leave"))
    best = continuous(alone)
    lines.append({"planner": "continuous", "tail": "refill", "makespan_s": best.makespan_s, "jobs": instance.gpus, "busy_share": 1.0 - best.idle_share,
                  "slots": len(best.shape.slots)})  # fmt: skip
    base_s = lines[0]["makespan_s"]
    return [line | {"over_sequential": base_s / line["makespan_s"], "gpus": instance.gpus} for line in lines]


def _line(schedule: Schedule, tail: str) -> dict[str, Any]:
    return {
        "planner": schedule.made_by, "tail": tail, "makespan_s": schedule.makespan_s, "jobs": len(schedule.placed), "busy_share": schedule.busy_share,
        "bound_ratio": schedule.ratio, "graham": schedule.graham, "slots": max(len(p.job.adapters) for p in schedule.placed),
    }  # fmt: skip


def _split(model: TimeModel, config: LlamaConfig, degree: int, element_bytes: int) -> TimeModel:
    reduces = ALL_REDUCES * config.layers
    ring_s = 2 * (degree - 1) / degree * config.hidden * element_bytes / (LINK_BYTES_PER_S * LINK_SHARE)
    return TimeModel(
        fixed_s=model.fixed_s / degree + reduces * LATENCY_S, token_s=model.token_s / degree + reduces * ring_s, token_rank_s=model.token_rank_s / degree,
        token_position_s=model.token_position_s / degree, slot_s=model.slot_s, floor_s=model.floor_s,
    )  # fmt: skip
