"""The cells of the PLoRA study: a config becomes the list of questions that it asks.

    questions(presets.cpu())        # [Cell, ...] in the order in which they run

Labels begin with what a cell does, so that `suite run plora --preset gpu --only 'time kernel*'` takes a sensible part. Replicates are the outer loop:
each is a process start. Importing it imports neither torch nor kernels: planning takes no second.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from studies.plora.presets import HEADLINE, Baselines, Config, Grid, Kernels, Ladder, Makespan, PaperMakespan, Planning, Quality, Same, Saturation, Searches, Surface, Training, answers
from suite.cell import Cell, Needs
from suite.identity import ROOT, module_path, sha256_file

STUDY, HERE = "plora", "studies.plora"
CONTEST = {"rounds": 5, "launches": 2, "warmup_s": 1.0}
REAL_TOKENS = {"gsm8k": 190.4, "mrpc": 65.8}  # mean of studies.plora.data.lengths, which a test holds these to
PADDED_TOKENS = {"gsm8k": 512, "mrpc": 128}  # 5 of 7,473 rows and 1 of 4,076 are longer
MODEL_ASSETS = ("smollm2-135m-instruct", "smollm2-135m-instruct-bf16")
TASK_ASSETS = {"banking77": ("banking77-train", "banking77-test"), "clinc150": ("clinc150",), "svamp": ("mawps-asdiv", "svamp")}  # of studies.plora.data.sets, which imports torch
STEP_ANSWERS = 16  # studies.plora.measures.tables.ANSWER_TOKENS
PEFT_TOKENS = 20_000  # of a budget that eager PEFT trains in a minute
STEPS = {"rounds": 3, "launches": 2, "warmup_s": 0.1}  # of each composition: there are hundreds


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
    out += [_same(config.same)] if config.same else []
    out += _searches(config.grid, config.replays, config.published)
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
    points += [(b.paper_model, PADDED_TOKENS[name], rank, name, b.replicates if rank == b.rank else 1) for name in b.lengths for rank in b.ranks]
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
    problem = {"tokens": PADDED_TOKENS["gsm8k"], "real_tokens": REAL_TOKENS["gsm8k"], "budget_tokens": 40_000}
    known, out = {}, []
    if p.timed:
        spread = {role: {"spread": {"first": first, "count": count, "tokens": list(p.tokens), "most_tokens": p.most}} for role, first, count in (("fit", 0, p.fit), ("holdout", p.fit, p.holdout))}
        tables = {role: step_times(p.model, table, f"time steps {p.model} {role}") for role, table in spread.items()}
        known = {"model": _plan("cost_model", {}, f"cost model {p.model}", **tables), "memory": _plan("memory_model", {"model": p.model}, f"memory model {p.model}", **tables)}
        out += [*tables.values(), *known.values(), *([_largest(p.model, *p.largest, known["memory"])] if p.largest else [])]
        if p.regret:
            table = step_times(p.model, {"plans": problem}, f"time steps {p.model} plans")
            out += [table, _plan("regret", {"model": p.model, "problem": problem}, f"planners' regret {p.model}", times=table, **known)]
    named = p.model if p.timed else f"by assumed times {p.model}"
    out += [_plan("gaps", {"model": p.model, "problem": problem}, f"planners' gaps {named}", **known)] if p.gaps else []
    cluster = {"model": p.model, **problem, "budget_tokens": 90_000, "gpus": [8, 64], "limit_bytes": 40 * 10**9}
    return out + ([_plan("clusters", cluster, f"clusters {named}", **known)] if p.clusters else [])


def _makespans(m: PaperMakespan) -> list[Cell]:
    """A cell for each kind of rows, with the tables that it reads: packs, single captured adapters, and single ones in eager PEFT."""
    out = []
    for name in m.lengths:
        tokens, named = PADDED_TOKENS[name], f"{m.model} {name}"
        at = {"tokens": tokens, "real_tokens": REAL_TOKENS[name], "budget_tokens": m.budget_tokens, "gpus": m.gpus, "limit_bytes": m.limit_bytes}
        alone = {"alone": {"tokens": tokens, "most_tokens": m.most_tokens}}
        packed = step_times(m.model, {"packs": at | {"most_tokens": m.most_tokens}}, f"time steps {named} packs")
        inputs = {"packed": packed, "graphed": step_times(m.model, alone, f"time steps {named} single captured"),
                  "eager": _timing("measures.baselines:peft_step_times", {"model": m.model, "table": alone, **STEPS}, f"time steps {named} eager PEFT")}  # fmt: skip
        out += [*inputs.values(), _plan("makespan", {"model": m.model} | at, f"makespan of the paper, {named}", **inputs)]
    return out


def step_times(model: str, table: dict[str, Any], label: str) -> Cell:
    return _timing("cells.throughput:step_times", {"model": model, "table": table, **STEPS}, label)


def _largest(model: str, tokens: int, rank: int, memory: Cell) -> Cell:
    params = {"model": model, "tokens": tokens, "rank": rank, "rows": 1, "limits_bytes": [24 * 10**9, 40 * 10**9], "answer_tokens": STEP_ANSWERS}
    return _timing("cells.throughput:largest", params, f"memory {model} T={tokens} r={rank}", inputs={"memory": memory})


def _plan(function: str, params: dict[str, Any], label: str, **inputs: Cell) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.cells.planning:{function}", params=params, label=label, inputs=inputs, needs=Needs(memory_gib=1, packages=("scipy",)))


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


def _searches(g: Grid | None, s: Searches | None, published: Searches | None) -> list[Cell]:
    """The grid and searches replayed on it; where a grid that a GPU recorded is published, searches of `published` on that one instead."""
    found = newest_published() if published else {}
    if found:
        params = _search_params(published, max(found.pop("ranks"))) | found
        return [_replay("replayed_published", params, f"replay published {sampler} {arm} seed {seed}", sampler, arm, seed, {}) for seed in range(1, published.seeds + 1) for sampler, arm in published.arms]
    recorded = _grid(g) if g else {}
    if not (s and g):
        return list(recorded.values())
    params = _search_params(s, max(g.ranks))
    return [*recorded.values(), *(_replay("replayed", params, f"replay {sampler} {arm} seed {seed}", sampler, arm, seed, recorded) for seed in range(1, s.seeds + 1) for sampler, arm in s.arms)]


def _search_params(s: Searches, widest: int) -> dict[str, Any]:
    return {"trials": s.trials, "slots": [widest] * s.slots, "looks": s.looks, "shares": list(s.shares), "eta": s.eta}


def _replay(function: str, params: dict[str, Any], label: str, sampler: str, arm: str, seed: int, inputs: dict[str, Cell]) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.cells.search:{function}", params={"sampler": sampler, "arm": arm, **params}, seed=seed, inputs=inputs, label=label, needs=Needs(memory_gib=1, packages=("optuna",)))


def newest_published(root: Path = ROOT) -> dict[str, Any]:
    """{"grid": bundle id, "times": bundle id, "ranks": of the grid} of what was recorded on a GPU and is published; {} where it is not."""
    found = []
    for path in (root / "reports" / "published" / STUDY).glob("*/*/bundle.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["status"] == "OK" and data["environment"].get("gpu_model"):
            found.append((data["started_at"], sha256_file(path), data["cell"]))
    of = lambda name: sorted((at, id_, cell["params"]) for at, id_, cell in found if cell["measure"].endswith(f".cells.training:{name}"))  # noqa: E731
    for _, grid, params in reversed(of("grid")):
        times = [id_ for _, id_, p in of("pack_times") if all(p[k] == params[k] for k in ("model", "task", "tokens"))]
        if times:
            return {"grid": grid, "times": times[-1], "ranks": params["ranks"]}
    return {}


def _live(t: Training, s: Searches) -> list[Cell]:
    widest = 64 if t.model != "tiny" else 8
    space = {"learning_rate": {"low": 5e-5, "high": 5e-3, "log": True} if t.model != "tiny" else {"low": 1e-3, "high": 6.4e-2, "log": True},
             "rank": [8, 16, 32, 64] if t.model != "tiny" else [4, 8], "batch": [1, 2, 4, 8] if t.model != "tiny" else [1, 4], "alpha_ratio": [1.0, 4.0] if t.model != "tiny" else 2.0}  # fmt: skip
    params = {"model": t.model, "task": t.spec, "tokens": t.tokens, "space": space, "budget_tokens": t.budget_tokens} | _search_params(s, widest)
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
    return [_trains("cells.training:makespan_live", params, f"makespan live {m.gpus} GPU #{i}", t.device, replicate=i, seed=i, exclusive=True, assets=_assets(*m.tasks), **several) for i in range(m.replicates)]


def _same(s: Same) -> Cell:
    t = s.training
    params = {"model": t.model, "task": t.spec, "tokens": t.tokens, "configurations": s.configurations, "budget_tokens": t.budget_tokens}
    return _trains("cells.training:same_adapters", params, f"exactness same adapters {t.model} {t.task}", t.device)


def _quality(q: Quality) -> list[Cell]:
    t = q.training
    at = {"model": t.model, "task": t.spec, "tokens": t.tokens, "seeds": q.seeds, "budget_tokens": t.budget_tokens}
    adapters = [{"rank": r, "alpha": 2.0 * r, "learning_rate": rate, "batch": b} for r, b in ((8, 1), (16, 4), (64, 4)) for rate in (4e-4, 1e-3, 2e-3)]
    out = [_trains("cells.training:quality", at | {"adapters": adapters, "looks": 8}, f"quality {t.model} {t.task}", t.device)]
    peft = {"adapter": {"rank": 16, "alpha": 32.0, "learning_rate": 1e-3, "batch": 4}}
    return out + ([_trains("cells.training:against_peft", at | peft | {"budget_tokens": min(t.budget_tokens, PEFT_TOKENS)}, f"quality against PEFT {t.model} {t.task}", t.device, packages=("transformers", "peft"))] if q.peft else [])


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
