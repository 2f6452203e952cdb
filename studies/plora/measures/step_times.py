"""Step times and peaks of memory of given compositions: what cost models are fitted on, tried on, and what planners are judged by.

    step_times(ctx, model="3b", table={"listed": [{"tokens": 128, "slots": [[16, 1], [64, 2]]}]}, rounds=5, launches=4, warmup_s=0.2)

`table`: which compositions (studies.plora.measures.tables). Record "step_times": a line for each, as studies.plora.measures.planning reads it. A step is a micro-step at whose end the batch of every slot is full, so the optimizer's step is in it: the dearest micro-step there is. Each composition has a pack of its
own, entered twice (A/A). `captured` False launches eagerly, path "looped" loops over adapters: with single slots these are the baselines. A composition
that does not fit the memory is in the record "refused", with why. A pause keeps what was timed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any

import torch

from studies.plora.measures.subjects import Subject, subject_of
from studies.plora.measures.tables import ANSWER_TOKENS, shapes_of
from studies.plora.planning.design import shape_of
from studies.plora.planning.time_model import StepTime
from suite.measure import Context, Pause, Result
from suite.timing import Variant, contest

__all__ = ["step_times"]

STATE = "step_times.json"


def step_times(
    ctx: Context, *, model: str, table: Mapping[str, Any], rounds: int, launches: int, warmup_s: float, captured: bool = True, path: str = "triton",
) -> Result:  # fmt: skip
    """Raises Pause with what was timed kept, and goes on from there; ValueError where nothing fitted."""
    state = ctx.state_dir / STATE
    done: list[dict] = json.loads(state.read_text()) if state.exists() else []
    subject: Subject | None = None
    for entry in shapes_of(model, table)[len(done) :]:
        if ctx.time_is_up():
            raise Pause
        if subject is None or subject.tokens != entry["tokens"]:
            subject = None  # one base at a time
            subject = subject_of(ctx, model, tokens=entry["tokens"], answer_tokens=ANSWER_TOKENS)
        done.append(dict(entry) | _timed(ctx, subject, entry, path=path, captured=captured, rounds=rounds, launches=launches, warmup_s=warmup_s))
        ctx.state_dir.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(done))
    timed = [line for line in done if "seconds" in line]
    if not timed:
        raise ValueError(f"a table of step times has at least one time, got {len(done)} refusals, first {done[0]}; ask for smaller packs")
    return Result(metrics={"noise_floor": max(line["noise_floor"] for line in timed)},
                  records={"step_times": timed, "refused": [line for line in done if "why" in line]})  # fmt: skip


def _timed(ctx: Context, subject: Subject, entry: Mapping[str, Any], *, path: str, captured: bool, rounds: int, launches: int, warmup_s: float) -> dict[str, Any]:
    cuda, shape = ctx.device.startswith("cuda"), shape_of(entry)
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ctx.device)
    try:
        pack = subject.pack(shape, path=path, graphed=captured and cuda)
        pack.advance(2)
        peak = torch.cuda.max_memory_allocated(ctx.device) if cuda else None
        found = contest([Variant(name="pack", calls=(subject.step(pack),))], device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, mode="eager")
    except torch.OutOfMemoryError as error:
        return {"why": str(error).partition("\n")[0]}
    return StepTime(shape=shape, seconds=subject.step_s(found, "pack"), peak_bytes=peak).to_json() | {"noise_floor": found.noise_floor, "throttle": list(found.throttle_reasons)}
