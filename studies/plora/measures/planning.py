"""Measure functions of planning: models fitted to timed compositions, their errors on others, planners' regret, makespans computed from step times.

    cost_model(ctx)                                    # inputs "fit" and "holdout": step times of different compositions
    memory_model(ctx, config={...}, answer_tokens=16)  # the same inputs, for the peaks beside the times
    regret(ctx, config={...}, answer_tokens=16, cases=[case.to_json(), ...])            # inputs "model", "times", and "memory" where it is calibrated
    makespan(ctx, config={...}, tokens=256, real_tokens=61.5, budget_tokens=90_000, gpus=8, ...)        # inputs "packed", "eager", "graphed"
    gaps(ctx, config={...}, answer_tokens=16, cases=[...])      # input "model", else an assumed one: kind simulated
    clusters(ctx, config={...}, tokens=512, ...)       # likewise

A table of step times is the record "step_times" of its cell (studies.plora.measures.step_times): lines {"tokens": 512, "slots": [[rank, rows], ...], "seconds",
"peak_bytes": or null}. `config` holds the fields of a LlamaConfig. Nothing here runs a model or needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from studies.models.config import LlamaConfig
from studies.plora.adapter import PackShape
from studies.plora.planning import memory, simulate
from studies.plora.planning import regret as regrets
from studies.plora.planning.cases import Case
from studies.plora.planning.continuous import continuous, takes
from studies.plora.planning.design import paper_configurations, shape_json
from studies.plora.planning.dtm import dtm
from studies.plora.planning.exact import exact
from studies.plora.planning.planners import Instance, chunks, fifo, longest_first, lpt, sequential
from studies.plora.planning.roofline import assumed
from studies.plora.planning.schedule import Job, Schedule
from studies.plora.planning.time_model import StepTable, StepTime, TimeModel, errors, fit, mape
from studies.plora.planning.work import Work
from suite.measure import Context, Result

__all__ = ["clusters", "cost_model", "gaps", "makespan", "memory_model", "one_by_one", "regret"]

PLANNERS = (exact, chunks, lpt, fifo, dtm, sequential)  # the first is the one that the claim is about


def cost_model(ctx: Context, *, host_s: float | None = None) -> Result:
    """Fit on the input "fit", judge on the input "holdout". `host_s`: the host's time of launching a step, where nothing is captured.

    Metrics: mape and its bounds mape_low and mape_high (95%, bootstrap over compositions), worst_error, mape_fit, fit_points, holdout_points.
    Records: "model"; "residuals", a line a point. Raises ValueError where a composition is in both parts.
    """
    seen, unseen = _apart(ctx)
    model = fit(seen, host_s=host_s)
    found = mape(errors(model, unseen), seed=ctx.seed)
    return Result(
        metrics={
            "mape": found.value, "mape_low": found.low, "mape_high": found.high, "worst_error": float(np.abs(errors(model, unseen)).max()),
            "mape_fit": float(np.abs(errors(model, seen)).mean()), "fit_points": float(len(seen)), "holdout_points": float(len(unseen)),
        },
        records={"model": asdict(model), "residuals": [_residual(model, p, part) for part, points in (("fit", seen), ("holdout", unseen)) for p in points]},
    )  # fmt: skip


def memory_model(ctx: Context, *, config: dict, answer_tokens: int | None = None, element_bytes: int = 2) -> Result:
    """Calibrate on the peaks of the input "fit", judge on those of "holdout".

    Metrics: memory_mape, memory_worst. Records: "calibration"; "peaks", a line a point. Raises ValueError where an input has no peaks.
    """
    shape_of, how = LlamaConfig(**config), {"answer_tokens": answer_tokens, "element_bytes": element_bytes}
    seen, unseen = ([(p.shape, p.peak_bytes) for p in points if p.peak_bytes] for points in _apart(ctx))
    if not unseen:
        raise ValueError("a memory model is judged on peaks that it never saw, got none in the input 'holdout'; read peaks beside the times")
    calibration = memory.calibrate(shape_of, seen, **how)
    peaks = [{**shape_json(s), "part": part, "peak_bytes": peak, "predicted_bytes": memory.predict(shape_of, s, calibration=calibration, **how).total}
             for part, points in (("fit", seen), ("holdout", unseen)) for s, peak in points]  # fmt: skip
    off = [abs(p["predicted_bytes"] / p["peak_bytes"] - 1) for p in peaks if p["part"] == "holdout"]
    return Result(metrics={"memory_mape": float(np.mean(off)), "memory_worst": max(off)}, records={"calibration": asdict(calibration), "peaks": peaks})


def regret(ctx: Context, *, config: dict, cases: list, answer_tokens: int | None = None, element_bytes: int = 2, reserve: float = 0.03) -> Result:
    """Every planner on every case (studies.plora.planning.cases), its plan judged by measured step times against the best of all plans.

    reserve: share of the memory that planners leave free, as their memory model errs; the best plan may use it. Metrics, of the exact planner:
    planner_regret, the worst over cases (infinite where a plan did not fit), planner_regret_mean, cases, fewest_plans. Record "planners": a line a case
    and planner; regret is null where the plan did not fit, gap is predicted makespan over the exact one's, less 1. Kind: replayed.
    """
    if not 0 <= reserve < 1:
        raise ValueError(f"a reserve is a share of the memory, got {reserve=}; 0.03 is three percent")
    bytes_of = _bytes_of(ctx, config, answer_tokens, element_bytes)
    model, table = TimeModel(**ctx.input_record("model", "model")), StepTable(_points(ctx, "times"))
    found = []
    for number, case in enumerate(map(Case.from_json, cases)):
        of = [regrets.regret(case, model, table, bytes_of, planner=planner, reserve=reserve) for planner in PLANNERS]
        found += [{"case": number, "gpus": case.gpus, "limit_bytes": case.limit_bytes, "planner": r.planner, "regret": r.regret if r.chosen_s < np.inf else None,
                   "chosen_s": r.chosen_s if r.chosen_s < np.inf else None, "best_s": r.best_s, "predicted_s": r.predicted_s, "plans": r.plans,
                   "gap": r.predicted_s / of[0].predicted_s - 1} for r in of]  # fmt: skip
    ours = [np.inf if x["regret"] is None else x["regret"] for x in found if x["planner"] == PLANNERS[0].__name__]
    return Result(
        metrics={"planner_regret": float(max(ours)), "planner_regret_mean": float(np.mean(ours)), "cases": float(len(ours)), "fewest_plans": float(min(x["plans"] for x in found))},
        records={"planners": found}, kind="replayed",
    )  # fmt: skip


def gaps(ctx: Context, *, config: dict, cases: list, answer_tokens: int | None = None, element_bytes: int = 2) -> Result:
    """What each planner's makespan is above the exact one's, all under one model: by how much heuristics fall short. Kind: simulated.

    Metrics: gap_chunks, gap_lpt, gap_fifo, gap_dtm, gap_sequential: means over cases. Record "planners": a line a case and planner.
    """
    model, bytes_of, found = _model(ctx, config), _bytes_of(ctx, config, answer_tokens, element_bytes), []
    for number, case in enumerate(map(Case.from_json, cases)):
        plans = [(planner.__name__, planner(case.instance({1: model}, bytes_of))) for planner in PLANNERS]
        found += [{"case": number, "gpus": case.gpus, "limit_bytes": case.limit_bytes, "planner": plan.made_by, "gap": plan.makespan_s / plans[0][1].makespan_s - 1,
                   "predicted_s": plan.makespan_s, "bound_ratio": plan.ratio, "graham": plan.graham, "name": name} for name, plan in plans]  # fmt: skip
    mean = lambda name: float(np.mean([x["gap"] for x in found if x["name"] == name]))  # noqa: E731
    return Result(metrics={f"gap_{p.__name__}": mean(p.__name__) for p in PLANNERS[1:]}, records={"planners": found}, kind="simulated")


def makespan(
    ctx: Context, *, config: dict, tokens: int, real_tokens: float, budget_tokens: int, gpus: int, limit_bytes: int, answer_tokens: int | None = None,
    element_bytes: int = 2, setup_s: float = 0.0,
) -> Result:  # fmt: skip
    """PLoRA's 120 configurations: continuous packing against one adapter a job, longest first ("Min GPU"), from measured step times. Kind: simulated.

    Inputs: "packed" with compositions of studies.plora.planning.continuous.candidates, of which the best is taken; "eager" and "graphed" with
    single slots: each adapter passes as many sequences at once as is fastest of those that its batch allows and that were timed. `setup_s`: of starting
    a job, one each for the baselines, one a GPU for packs. Metrics: makespan_over_eager, makespan_over_graphed, makespan_s, idle_share, slots.
    Records: "makespans"; "order", who trains where.
    """
    work = Work(adapters=paper_configurations(budget_tokens=budget_tokens), tokens=tokens, real_tokens=real_tokens)
    points = {role: _points(ctx, role) for role in ("packed", "eager", "graphed") if role in ctx.inputs}
    tables = {role: StepTable(of) for role, of in points.items()}
    instance = Instance(work=work, gpus=gpus, models={1: tables["packed"]}, bytes_of=_bytes_of(ctx, config, answer_tokens, element_bytes),
                        limit_bytes=limit_bytes, setup_s=setup_s, most_slots=len(work))  # fmt: skip
    best = continuous(instance, [p.shape for p in points["packed"] if _serves(p.shape, work)])
    alone = {role: one_by_one(work, table, gpus, setup_s=setup_s) for role, table in tables.items() if role != "packed"}
    spans = [{"arm": "packed", "makespan_s": best.makespan_s, "busy_share": 1 - best.idle_share, **shape_json(best.shape), "seconds_per_step": best.seconds_per_step}]
    spans += [{"arm": role, "makespan_s": s.makespan_s, "busy_share": s.busy_share, "bound_ratio": s.ratio} for role, s in alone.items()]
    return Result(
        metrics={"makespan_s": best.makespan_s, "idle_share": best.idle_share, "slots": float(len(best.shape.slots)),
                 **{f"makespan_over_{role}": s.makespan_s / best.makespan_s for role, s in alone.items()}},
        records={"makespans": spans, "order": best.order}, kind="simulated",
    )  # fmt: skip


def one_by_one(work: Work, table: StepTable, gpus: int, *, setup_s: float = 0.0) -> Schedule:
    """One adapter a job, longest first, each at the fastest rows that divide its batch and were timed. Raises ValueError where none were."""
    jobs = []
    for i, adapter in enumerate(work.adapters):
        ways = [replace(work, most_rows=n) for n in range(1, adapter.batch + 1) if adapter.batch % n == 0]
        times = [w.micro_steps(i) * table.seconds(w.shape((i,))) for w in ways if w.shape((i,)) in table]
        if not times:
            raise ValueError(f"every adapter alone has a measured time, got none of rank {adapter.rank} and batch {adapter.batch} at {work.tokens} tokens; time it with any rows that divide its batch")
        jobs.append(Job(adapters=(i,), seconds=setup_s + min(times)))
    return longest_first(jobs, gpus, "one by one")


def clusters(
    ctx: Context, *, config: dict, tokens: int, real_tokens: float, budget_tokens: int, gpus: list, limit_bytes: int, most_rows: int = 4,
    degrees: Sequence[int] = (1, 2, 4, 8), answer_tokens: int | None = None, element_bytes: int = 2,
) -> Result:  # fmt: skip
    """All planners on clusters of `gpus` GPUs, PLoRA's 120 configurations, by the model of the input "model" or an assumed one. Kind: simulated.

    Metrics, on the largest cluster: simulated_over_sequential and simulated_over_dtm, makespans over continuous packing's. Record "planners".
    """
    model, shape = _model(ctx, config), LlamaConfig(**config)
    work = Work(adapters=paper_configurations(budget_tokens=budget_tokens), tokens=tokens, real_tokens=real_tokens, most_rows=most_rows)
    models = simulate.sharded(model, shape, degrees=degrees, element_bytes=element_bytes)
    bytes_of = _bytes_of(ctx, config, answer_tokens, element_bytes)
    lines = [line for g in gpus for line in simulate.compared(Instance(work=work, gpus=g, models=models, bytes_of=bytes_of, limit_bytes=limit_bytes))]
    of = {line["planner"]: min(x["makespan_s"] for x in lines if x["gpus"] == max(gpus) and x["planner"] == line["planner"]) for line in lines}
    dtms = [seconds for name, seconds in of.items() if name.startswith("dtm")]
    return Result(
        metrics={"simulated_over_sequential": of["sequential"] / of["continuous"], "simulated_over_dtm": min(dtms) / of["continuous"]},
        records={"planners": lines}, kind="simulated",
    )  # fmt: skip


# ---- shared by the cells -------------------------------------------------------------------------------------------------------------


def _points(ctx: Context, role: str) -> list[StepTime]:
    return [StepTime.from_json(line) for line in ctx.input_record(role, "step_times")]


def _apart(ctx: Context) -> tuple[list[StepTime], list[StepTime]]:
    """What is fitted and what is foretold. Raises ValueError where a composition is both."""
    seen, unseen = _points(ctx, "fit"), _points(ctx, "holdout")
    both = [p.shape for p in unseen if p.shape in StepTable(seen)]
    if both or len(unseen) < 2:
        raise ValueError(f"errors are those of compositions that the fit never saw, at least 2, got {len(unseen)=}, {len(both)} of them fitted too; time others")
    return seen, unseen


def _model(ctx: Context, config: dict) -> TimeModel:
    """The fitted one, where there is an input "model"."""
    return TimeModel(**ctx.input_record("model", "model")) if "model" in ctx.inputs else assumed(LlamaConfig(**config))


def _serves(shape: PackShape, work: Work) -> bool:
    """Whether every adapter finds a slot."""
    return shape.tokens == work.tokens and all(any(takes(slot, a) for slot in shape.slots) for a in work.adapters)


def _bytes_of(ctx: Context, config: dict, answer_tokens: int | None, element_bytes: int) -> Callable[[PackShape], int]:
    """The memory model, calibrated where there is an input "memory"."""
    found = memory.Calibration(**ctx.input_record("memory", "calibration")) if "memory" in ctx.inputs else memory.AS_COUNTED
    shape_of = LlamaConfig(**config)
    return lambda shape: memory.predict(shape_of, shape, answer_tokens=answer_tokens, element_bytes=element_bytes, calibration=found).total


def _residual(model: TimeModel, point: StepTime, part: str) -> dict[str, Any]:
    predicted_s = model.seconds(point.shape)
    return {**shape_json(point.shape), "part": part, "measured_s": point.seconds, "predicted_s": predicted_s, "error": predicted_s / point.seconds - 1}

