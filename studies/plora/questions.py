"""The cells of the PLoRA study: a config becomes the list of questions that it asks.

    questions(presets.cpu())        # [Cell, ...] in the order in which they run

Labels begin with what a cell does, so that `suite run plora --preset gpu --only 'time kernel*'` takes a sensible part. Replicates are the outer loop:
each is a process start. Importing it imports neither torch nor kernels: planning takes no second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from studies.plora.presets import HEADLINE, Baselines, Config, Grid, Kernels, Ladder, Makespan, PaperMakespan, Planning, Quality, Saturation, Searches, Surface, Training, answers
from suite.cell import Cell, Needs
from suite.identity import ROOT, module_path

STUDY, HERE = "plora", "studies.plora"
CONTEST = {"rounds": 5, "launches": 2, "warmup_s": 1.0}
REAL_TOKENS = {"gsm8k": 190.4, "mrpc": 65.8}  # mean of studies.plora.data.lengths, which a test holds these to
PADDED_TOKENS = {"gsm8k": 512, "mrpc": 128}  # 5 of 7,473 rows and 1 of 4,076 are longer
MODEL_ASSETS = ("smollm2-135m-instruct", "smollm2-135m-instruct-bf16")
TASK_ASSETS = {"banking77": ("banking77-train", "banking77-test"), "clinc150": ("clinc150",), "svamp": ("mawps-asdiv", "svamp")}  # of studies.plora.data.sets, which imports torch
STEP_ANSWERS = 16  # answer tokens of every composition of a table, whatever its length: a cost model has no term for them


def questions(config: Config) -> list[Cell]:
    out: list[Cell] = []
    out += _replicated(config.ladders, ladder)
    out += [cell for s in config.surfaces for cell in _surface(s)]
    out += _replicated(config.saturation, saturation)
    out += _kernels(config.kernels) if config.kernels else []
    out += _baselines(config.baselines) if config.baselines else []
    out += [cell for p in config.planning for cell in _planning(p)]
    out += _makespans(config.makespan) if config.makespan else []
    out += _exactness(config.exactness) if config.exactness else []
    recorded = _grid(config.grid) if config.grid else {}
    out += recorded.values()
    out += _replays(config.replays, config.grid, recorded) if config.replays and config.grid else []
    out += [cell for training, s in config.live for cell in _live(training, s)]
    out += [cell for m in config.makespans for cell in _live_makespan(m)]
    out += [cell for q in config.quality for cell in _quality(q)]
    out += [_pruners()] if config.pruners else []
    return [c for c in map(_with_what_is_here, out) if _is_here(c)]


def _is_here(cell: Cell) -> bool:
    """Whether the cell's measure function is in the tree."""
    path, name = module_path(cell.module, ROOT), cell.measure.partition(":")[2]
    return path is not None and re.search(rf"^(def )?{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _with_what_is_here(cell: Cell) -> Cell:
    return replace(cell, inputs={role: c for role, c in cell.inputs.items() if _is_here(c)})


# ---- throughput ----------------------------------------------------------------------------------------------------------------


def _replicated(asked: tuple, cell) -> list[Cell]:
    """Replicate by replicate over all of them, so that a process start is one of the whole sweep."""
    return [cell(a, i) for i in range(max((a.replicates for a in asked), default=0)) for a in asked if i < a.replicates]


def ladder(a: Ladder, replicate: int) -> Cell:
    params = {"model": a.model, "tokens": a.tokens, "batch": a.batch, "k": a.k, "rank": a.rank, "answer_tokens": answers(a.tokens), "saturated_tokens": a.saturated, "variants": list(a.rungs), **CONTEST}
    return _timing("cells.throughput:ladder", params, f"time ladder {a.model} T={a.tokens} B={a.batch} k={a.k} r={a.rank} #{replicate}", replicate)


def _surface(s: Surface) -> list[Cell]:
    cells = []
    for tokens in s.tokens:
        for batch in s.batches:
            ks = [k for k in s.ks if k * batch * tokens <= s.most]
            if ks:
                params = {"model": s.model, "tokens": tokens, "batch": batch, "rank": s.rank, "ks": ks, "answer_tokens": answers(tokens), "saturated_tokens": s.saturated, **CONTEST}
                cells.append(_timing("cells.throughput:surface", params, f"time surface {s.model} T={tokens} B={batch} r={s.rank}"))
    return cells


def saturation(s: Saturation, replicate: int) -> Cell:
    params = {"model": s.model, "tokens": s.tokens, "rank": s.rank, "k": s.k, "singles": list(s.singles), "answer_tokens": answers(s.tokens), **CONTEST}
    return _timing("cells.throughput:saturation", params, f"time saturation {s.model} T={s.tokens} k={s.k} #{replicate}", replicate)


def _kernels(k: Kernels) -> list[Cell]:
    return [
        _timing("cells.kernels:kernels", {"which": which, "d": d, "tokens": tokens, "slots": k.slots, "rank": k.rank, "paths": list(k.paths), "rounds": 6, "launches": 8, "warmup_s": 0.2},
                f"time kernel {which} d={d} T={tokens} n={k.slots} r={k.rank} #{replicate}", replicate)
        for replicate in range(k.replicates) for which in ("forward", "backward") for d in k.sizes for tokens in k.tokens
    ]  # fmt: skip


def _baselines(b: Baselines) -> list[Cell]:
    """Eager PEFT and several processes, each against our pack or one captured adapter inside its own contest."""
    at = {"batch": HEADLINE["batch"], "k": b.k, **CONTEST}
    points = [(m, HEADLINE["tokens"], b.rank, "", b.replicates) for m in b.models]
    points += [(b.paper_model, 512, rank, name, b.replicates if rank == b.rank else 1) for name in b.lengths for rank in b.ranks]
    points += [(b.paper_model, tokens, b.rank, "", 1) for tokens in b.tokens]
    eager = [
        _timing("measures.baselines:peft_eager", {"model": m, "tokens": t, "rank": r, "lengths": name, "answer_tokens": answers(t), **at},
                f"time eager PEFT {m} {name or 'full'} T={t} r={r} #{i}", i)
        for i in range(b.replicates) for m, t, r, name, n in points if i < n
    ]  # fmt: skip
    processes = [
        _timing("measures.baselines:processes", {"model": m, "tokens": HEADLINE["tokens"], "batch": HEADLINE["batch"], "rank": b.rank, "answer_tokens": answers(HEADLINE["tokens"]), "counts": list(b.processes)},
                f"time processes {m} T={HEADLINE['tokens']} #{i}", i)
        for i in range(b.replicates) for m in b.models
    ]  # fmt: skip
    return eager + processes


# ---- what plans stand on -------------------------------------------------------------------------------------------------------


def _planning(p: Planning) -> list[Cell]:
    """The tables of step times, the cost and memory models on them, planners' regret on measured times of every plan, gaps and clusters by the model."""
    from studies.plora.planning.cases import cases, to_time
    from studies.plora.planning.design import shape_json, spread

    sizes = {"config": _config(p.model), "answer_tokens": STEP_ANSWERS}
    asked = cases(tokens=PADDED_TOKENS["gsm8k"], real_tokens=REAL_TOKENS["gsm8k"], budget_tokens=40_000)
    problems = sizes | {"cases": [c.to_json() for c in asked]}
    at = sizes | {"tokens": PADDED_TOKENS["gsm8k"], "real_tokens": REAL_TOKENS["gsm8k"], "budget_tokens": 90_000, "gpus": [8, 64], "limit_bytes": 40 * 10**9}
    out, known = [], {}
    if p.timed:
        shapes = [shape_json(x) for x in spread(p.fit + p.holdout, tokens=p.tokens, most_tokens=p.most)]
        tables = {role: step_times(p.model, part, f"time steps {p.model} {role}") for role, part in (("fit", shapes[: p.fit]), ("holdout", shapes[p.fit :]))}
        known = {"model": _plan("cost_model", {}, f"cost model {p.model}", **tables), "memory": _plan("memory_model", sizes, f"memory model {p.model}", **tables)}
        out += [*tables.values(), *known.values(), *([_largest(p.model, *p.largest, known["memory"])] if p.largest else [])]
        if p.regret:
            table = step_times(p.model, [shape_json(x) for x in to_time(asked, _bytes_of(p.model))], f"time steps {p.model} plans")
            out += [table, _plan("regret", problems, f"planners' regret {p.model}", times=table, **known)]
    out += [_plan("gaps", problems, f"planners' gaps {'' if p.timed else 'by assumed times '}{p.model}", **known)] if p.gaps else []
    return out + ([_plan("clusters", at, f"clusters {'' if p.timed else 'by assumed times '}{p.model}", **known)] if p.clusters else [])


def _makespans(m: PaperMakespan) -> list[Cell]:
    """A cell for each kind of rows, with the tables that it reads: packs, single captured adapters, and single ones in eager PEFT."""
    from studies.plora.planning.continuous import candidates
    from studies.plora.planning.design import PAPER_BATCHES, PAPER_RANKS, paper_configurations, shape_json
    from studies.plora.planning.work import Work

    out = []
    for name in m.lengths:
        tokens, real = PADDED_TOKENS[name], REAL_TOKENS[name]
        work, bytes_of = Work(adapters=paper_configurations(budget_tokens=m.budget_tokens), tokens=tokens, real_tokens=real), _bytes_of(m.model)
        fits = lambda s: bytes_of(s) <= m.limit_bytes and s.tokens * sum(x.rows for x in s.slots) <= m.most_tokens  # noqa: B023, E731
        packed = step_times(m.model, [shape_json(s) for s in candidates(work, gpus=m.gpus, fits=fits)], f"time steps {m.model} {name} packs")
        alone = [{"tokens": tokens, "slots": [[r, n]]} for r in PAPER_RANKS for n in PAPER_BATCHES if tokens * n <= m.most_tokens]
        inputs = {"packed": packed, "graphed": step_times(m.model, alone, f"time steps {m.model} {name} single captured")}
        inputs["eager"] = _timing("measures.baselines:peft_step_times", {"model": m.model, "shapes": alone, "answer_tokens": STEP_ANSWERS, "rounds": 3, "launches": 2, "warmup_s": 0.2}, f"time steps {m.model} {name} eager PEFT")
        at = {"tokens": tokens, "real_tokens": real, "budget_tokens": m.budget_tokens, "gpus": m.gpus, "limit_bytes": m.limit_bytes, "answer_tokens": STEP_ANSWERS}
        out += [*inputs.values(), _plan("makespan", {"config": _config(m.model)} | at, f"makespan of the paper, {m.model} {name}", **inputs)]
    return out


def step_times(model: str, shapes: list[dict], label: str) -> Cell:
    return _timing("cells.throughput:step_times", {"model": model, "shapes": shapes, "answer_tokens": STEP_ANSWERS, "rounds": 5, "launches": 4, "warmup_s": 0.2}, label)


def _largest(model: str, tokens: int, rank: int, memory: Cell) -> Cell:
    from studies.plora.planning.cases import CAPS_BYTES

    params = {"model": model, "tokens": tokens, "rank": rank, "rows": 1, "limits_bytes": list(CAPS_BYTES), "answer_tokens": STEP_ANSWERS}
    return _timing("cells.throughput:largest", params, f"memory {model} T={tokens} r={rank}", inputs={"memory": memory})


def _plan(function: str, params: dict[str, Any], label: str, **inputs: Cell) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.cells.planning:{function}", params=params, label=label, inputs=inputs, needs=Needs(memory_gib=1, packages=("scipy",)))


def _config(model: str) -> dict[str, Any]:
    from dataclasses import asdict

    from studies.plora.engine.shapes import SHAPES

    return asdict(SHAPES[model])


def _bytes_of(model: str) -> Callable:
    from studies.plora.engine.shapes import SHAPES
    from studies.plora.planning.memory import predict

    return lambda shape: predict(SHAPES[model], shape, answer_tokens=STEP_ANSWERS).total


# ---- training ------------------------------------------------------------------------------------------------------------------


def _exactness(model: str) -> list[Cell]:
    """Bits of adapters packed and alone, with neighbours that move, fail or are replaced; and what another padding changes without deterministic mode."""
    device = "cpu" if model == "tiny" else "cuda"
    return [_trains(f"measures.exactness:{name}", {"model": model}, f"exactness {name.replace('_', ' ')} {model}", device) for name in ("packed_equals_separate", "isolation", "noise_floor")]


def _grid(g: Grid) -> dict[str, Cell]:
    """The recorded curves, and the step times that replays count with: packs of the widest slots by live adapters, single ones by rank and rows."""
    t = g.training
    at = {"model": t.model, "task": t.spec, "tokens": t.tokens}
    axes = {"learning_rates": list(g.learning_rates), "ranks": list(g.ranks), "batches": list(g.batches), "alpha_ratios": list(g.alpha_ratios), "seeds": g.seeds}
    curves = _trains("cells.training:grid", at | axes | {"budget_tokens": t.budget_tokens, "looks": g.looks, "slots": g.slots}, f"record grid {t.model} {t.task}", t.device, time_limit_s=7200)
    packs = [[[max(g.ranks), 1]] * k for k in (1, 2, 4, 8, 12, 16)] + [[[r, b]] for r in g.ranks for b in g.batches if [r, b] != [max(g.ranks), 1]]
    times = _trains("cells.training:pack_times", at | {"packs": packs, "micro_steps": 16, "repeats": 5}, f"record step times {t.model} {t.task}", t.device, exclusive=True)
    return {"grid": curves, "times": times}


def _replays(s: Searches, g: Grid, recorded: dict[str, Cell]) -> list[Cell]:
    params = {"trials": s.trials, "slots": [max(g.ranks)] * s.slots, "looks": s.looks, "shares": list(s.shares), "eta": s.eta}
    return [
        Cell(study=STUDY, measure=f"{HERE}.cells.search:replayed", params={"sampler": sampler, "arm": arm, **params}, seed=seed, inputs=recorded, label=f"replay {sampler} {arm} seed {seed}",
             needs=Needs(memory_gib=1, packages=("optuna",)))
        for seed in range(1, s.seeds + 1) for sampler, arm in s.arms
    ]  # fmt: skip


def _live(t: Training, s: Searches) -> list[Cell]:
    widest = 64 if t.model != "tiny" else 8
    space = {"learning_rate": {"low": 5e-5, "high": 5e-3, "log": True} if t.model != "tiny" else {"low": 1e-3, "high": 6.4e-2, "log": True},
             "rank": [8, 16, 32, 64] if t.model != "tiny" else [4, 8], "batch": [1, 2, 4, 8] if t.model != "tiny" else [1, 4], "alpha_ratio": [1.0, 4.0] if t.model != "tiny" else 2.0}  # fmt: skip
    params = {"model": t.model, "task": t.spec, "tokens": t.tokens, "space": space, "budget_tokens": t.budget_tokens, "trials": s.trials, "slots": [widest] * s.slots, "looks": s.looks,
              "shares": list(s.shares), "eta": s.eta}  # fmt: skip
    out = []
    for seed in range(1, s.seeds + 1):
        for sampler, arm in s.arms:
            found = _trains("cells.search:live", params | {"sampler": sampler, "arm": arm}, f"search {t.model} {t.task} {sampler} {arm} seed {seed}", t.device, seed=seed, packages=("optuna",), time_limit_s=7200, exclusive=t.device == "cuda")
            out.append(found)
            if seed == 1 and arm.endswith("refill"):
                at = {"model": t.model, "task": t.spec, "tokens": t.tokens, "adapter": None, "seeds": 3, "neighbours": 15 if t.model != "tiny" else 3}
                out.append(_trains("cells.training:winner", at, f"winner alone {t.model} {t.task}", t.device, inputs={"search": found}))
    return out


def _live_makespan(m: Makespan) -> list[Cell]:
    t = m.training
    tasks = [t.spec | {"name": name} for name in m.tasks]
    params = {"model": t.model, "tasks": tasks, "tokens": t.tokens, "configurations": m.configurations, "budget_tokens": t.budget_tokens, "slots": m.slots, "chunk": m.chunk, "single_paths": ["looped", "triton"]}
    several = {"gpus": m.gpus, "ranks": m.gpus} if m.gpus > 1 else {}
    out = [_trains("cells.training:makespan_live", params, f"makespan live {m.gpus} GPU #{i}", t.device, replicate=i, seed=i, exclusive=True, assets=_assets(*m.tasks), **several) for i in range(m.replicates)]
    same = {"model": t.model, "task": tasks[0], "tokens": t.tokens, "configurations": m.same, "budget_tokens": 4_000}
    return out + ([_trains("cells.training:same_adapters", same, f"same adapters {t.model}", t.device)] if m.same else [])


def _quality(q: Quality) -> list[Cell]:
    t = q.training
    at = {"model": t.model, "task": t.spec, "tokens": t.tokens, "seeds": q.seeds, "budget_tokens": t.budget_tokens}
    adapters = [{"rank": r, "alpha": 2.0 * r, "learning_rate": rate, "batch": b} for r, b in ((8, 1), (16, 4), (64, 4)) for rate in (4e-4, 1e-3, 2e-3)]
    out = [_trains("cells.training:quality", at | {"adapters": adapters, "looks": 8}, f"quality {t.model} {t.task}", t.device)]
    peft = {"adapter": {"rank": 16, "alpha": 32.0, "learning_rate": 1e-3, "batch": 4}}
    return out + ([_trains("cells.training:against_peft", at | peft, f"quality against PEFT {t.model} {t.task}", t.device, packages=("transformers", "peft"))] if q.peft else [])


def _pruners() -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.cells.search:pruners", params={"trials": 8, "steps": 16}, label="pruners on a pack in lock-step", needs=Needs(memory_gib=1, packages=("optuna",)))


def _assets(*tasks: str) -> tuple[str, ...]:
    return tuple(a for t in tasks for a in TASK_ASSETS.get(t, ()))


def _trains(
    measure: str, params: dict[str, Any], label: str, device: str, *, seed: int = 0, replicate: int = 0, inputs: dict[str, Cell] | None = None, assets: tuple[str, ...] = (), time_limit_s: float = 1800,
    **needs: Any,
) -> Cell:  # fmt: skip
    """A cell that trains; its assets are those of its task."""
    if "task" in params:
        assets = _assets(params["task"]["name"])
    if params["model"] == "smollm2":
        assets = (*assets, *MODEL_ASSETS)
    return Cell(study=STUDY, measure=f"{HERE}.{measure}", params=params, seed=seed, replicate=replicate, inputs=inputs or {}, assets=assets, label=label,
                needs=Needs(device=device, memory_gib=2, time_limit_s=time_limit_s, **needs))  # fmt: skip


# ---- cells ---------------------------------------------------------------------------------------------------------------------


def _timing(measure: str, params: dict[str, Any], label: str, replicate: int = 0, inputs: dict[str, Cell] | None = None, gpus: int = 1) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.{measure}", params=params, replicate=replicate, label=label, inputs=inputs or {},
                needs=Needs(device="cuda", gpus=gpus, exclusive=True, gpu_memory_gib=60, time_limit_s=1800))  # fmt: skip
