"""The cells of the LoKA study: a config becomes the list of questions that it asks.

    questions(presets.cpu())        # [Cell, ...] in the order in which they run

Importing it imports neither torch nor kernels: planning takes no second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from studies.loka.measures.shapes import SHAPES, Shape
from studies.loka.presets import ALL_MODS, DGRAD, FORWARD, MODELS, WGRAD, Config, Logs, Map, Pricing, Probe, Quality, Real, Steps, Timing
from studies.loka.sites.model_sites import model_sites
from suite.cell import Cell, Needs

if TYPE_CHECKING:  # a site imports torch, and a study is listed without it
    from studies.loka.site import Site

STUDY, HERE = "loka", "studies.loka"
# of the 1st percentile of rows, in dB; safety_map derives them, and a test holds these to its
INNER_DB, GRADIENT_DB, HEAD_DB = 25.6, 21.6, 32.0
FEWEST_ROWS = 16  # of a product: below, FP8 would multiply padding
PARQUET = ("open-bandit", "adult")  # logs that pandas reads


def questions(config: Config) -> list[Cell]:
    out = _map(config.map, config.seed) if config.map else []
    out += _real(config.real, config.seed) if config.real else []
    out += _probe(config.probe) if config.probe else []
    out += [_filter()] if config.torchao_filter else []
    priced = {p.size: _pricing(p) for p in config.pricing}
    out += [cell for cells in priced.values() for cell in cells]
    out += _logs(config.logs) if config.logs else []
    out += [cell for q in config.quality for cell in _quality(q, priced[q.size][-1] if q.planned else None)]
    out += _timing(config.timing) if config.timing else []
    return out + _whole_models(config, {size: cells[-1] for size, cells in priced.items()})


# ---- the safety map ------------------------------------------------------------------------------------------------------------


def site_questions(m: Map) -> dict[tuple, list[tuple[str, Site, str]]]:
    """What is asked -> the (model, site, pass) that ask it: sites whose cut sizes agree share a cell."""
    out: dict[tuple, list[tuple[str, Site, str]]] = {}
    for model, size in m.models:
        for site in model_sites(model, size, m.batch):
            for which in (p for p in site.passes if p in m.passes and site.gemm(p).r >= FEWEST_ROWS):
                out.setdefault(asked(site, which, m), []).append((f"{model} {size}", site, which))
    return out


def asked(site: Site, which: str, m: Map) -> tuple:
    """(pass, op, products, rows, contracted, threshold): a site's sizes, cut to those of the map. Columns do not matter."""
    g = site.gemm(which)
    rows = min(g.r, m.rows)
    threshold = GRADIENT_DB if which != "forward" else HEAD_DB if site.head else INNER_DB
    return which, site.op, min(g.batch, max(1, m.rows // rows)), rows, min(g.c, m.contracted), threshold


def _map(m: Map, seed: int) -> list[Cell]:
    asked_by = list(site_questions(m))
    return [safety(what, d, m, seed) for what in asked_by[: m.first or len(asked_by)] for d in m.distributions]


def safety(what: tuple, distribution: str, m: Map, seed: int) -> Cell:
    which, op, products, rows, contracted, threshold = what
    params = {"which": which, "op": op, "products": products, "rows": rows, "contracted": contracted, "distribution": distribution, "threshold_db": threshold}
    sizes = f"{products} x {rows} rows x {contracted}" if products > 1 else f"{rows} rows x {contracted}"
    return Cell(study=STUDY, measure=f"{HERE}.measures.safety_map:safety", params=params, seed=seed, needs=Needs(device=m.device, memory_gib=1),
                label=f"safety {which} {op} {sizes} {distribution}{' logit' if threshold == HEAD_DB else ''}")  # fmt: skip


def _real(r: Real, seed: int) -> list[Cell]:
    return [
        Cell(study=STUDY, measure=f"{HERE}.probing.captured:captured", seed=seed, needs=Needs(device=r.device, memory_gib=2), label=f"real activations {model} {r.size} {mods}".strip(),
             params={"model": model, "size": r.size, "mods": mods, "steps": r.steps, "batch": r.batch, "examples": r.examples})
        for model in r.models for mods in r.mods
    ]  # fmt: skip


def _probe(p: Probe) -> list[Cell]:
    needs = Needs(device=p.device, memory_gib=2)
    sizes = {"m": p.m, "k": p.k, "n": p.n}

    def cell(function: str, params: dict[str, Any], label: str) -> Cell:
        return Cell(study=STUDY, measure=f"{HERE}.cells.probing:{function}", params=params, needs=needs, label=label)

    stream = {"m": 512, "k": 256, "n": 128, "draws": 16, "streams": 100, "threshold_db": INNER_DB}
    overhead = {"model": "wukong", "size": "5.6", "mods": ALL_MODS, "batch": 6144, "every": 100, "pieces": 6, "warmup": 10, "compiled": True}
    return [
        *(cell("validation", {"distribution": d, **sizes}, f"predicted and true rows, {d}") for d in p.distributions),
        *(cell("stopping", {"distribution": d, "recipe": r, **stream}, f"when the probe stops, {d} {r}") for d in ("gaussian", "row-scaled") for r in ("tensorwise", "rowwise")),
        cell("surrogate_failures", {"m": 4096, "k": 256, "n": 128, "rows": 512, "draws": 20, "seeds": 8}, "the paper's probe beside the truth"),
        *(_exclusive("cells.probing:overhead", overhead, f"time training with the probe #{i}", i) for i in range(p.overhead)),
    ]  # fmt: skip


def _filter() -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.measures.filter:torchao_filter", params={"models": [list(m) for m in MODELS]}, label="torchao's automatic filter on the models")


# ---- training ------------------------------------------------------------------------------------------------------------------


def _quality(q: Quality, planners: Cell | None) -> list[Cell]:
    """`planners`: the cell whose plans the arms "ours" and "loka" run."""
    arms = [(arm, None) for arm in q.arms] + [(arm, planners) for arm in ("ours", "loka") if planners]
    return [quality(q, arm, seed, plan) for seed in range(1, q.pairs + 1) for arm, plan in arms]


def quality(q: Quality, arm: str, seed: int, planners: Cell | None = None) -> Cell:
    params = {"arm": arm, "model": "wukong", "size": q.size, "mods": q.mods, "data": q.data, "steps": q.steps, "batch": q.batch, "test_rows": q.test_rows}
    return Cell(study=STUDY, measure=f"{HERE}.learning.quality:quality", params=params, seed=seed, needs=Needs(device=q.device, memory_gib=3, time_limit_s=1800),
                inputs={"planners": planners} if planners else {}, label=" ".join(filter(None, ("quality", arm, f"wukong {q.size}", q.mods, q.data, f"seed {seed}"))))  # fmt: skip


def _logs(g: Logs) -> list[Cell]:
    training = {"model": "wukong", "size": "small", "steps": g.steps, "batch": g.batch}
    return [
        Cell(study=STUDY, measure=f"{HERE}.cells.real:real_change", seed=1, needs=Needs(device=g.device, memory_gib=3, time_limit_s=1800, packages=("pandas", "pyarrow") if data in PARQUET else ()), label=f"{recipe} on {data}",
             params={"data": data, "training": training, "recipe": recipe, "heads": False, "rows": g.rows, "chunk": 4096})
        for data in g.data for recipe in g.recipes
    ]  # fmt: skip


# ---- prices --------------------------------------------------------------------------------------------------------------------


def _pricing(p: Pricing) -> list[Cell]:
    """The trained model, its flips and its gradients, and last the planners."""
    shared = {"training": {"size": p.size, "steps": p.steps, "batch": p.batch, "dense_rate": p.dense_rate, "table_rows": p.table_rows}, "data": {"largest": p.largest, "interaction": p.interaction}}
    chunk = min(p.rows, 4096)

    def cell(function: str, label: str, params: dict[str, Any], inputs: dict[str, Cell]) -> Cell:
        needs = Needs(device=p.device, memory_gib=3, time_limit_s=1800, packages=("scipy",))
        return Cell(study=STUDY, measure=f"{HERE}.cells.pricing:{function}", params={**shared, **params}, inputs=inputs, label=f"{label}, wukong {p.size}", seed=1, needs=needs)

    trained = cell("trained", "trained on known probabilities", {}, {})
    flips = cell("flips", "every site in FP8 alone, predicted and measured loss", {"recipes": list(p.forward), "rows": p.rows, "calibration": p.calibration, "chunk": chunk}, {"trained": trained})
    backward = {"dgrad": list(DGRAD), "wgrad": list(WGRAD)}
    gradients = cell("gradients", "every site's gradients in FP8, error and bias", {"products": backward, "batches": 4, "batch": p.calibration // 4, "rate": 1e-3}, {"trained": trained})
    times = {"times": site_times(Steps(model="wukong", size=p.size, batch=p.examples, mods=""))} if p.timed else {}
    sizes = {"rows": p.rows, "chunk": chunk, "budget": p.budget, "examples": p.examples, "width": 1 if p.timed else p.width}
    plans = cell("planners", "all planners side by side", sizes, {"trained": trained, "flips": flips, "gradients": gradients, **times})
    return [trained, flips, gradients, *times.values(), plans]


# ---- time ----------------------------------------------------------------------------------------------------------------------


def _timing(t: Timing) -> list[Cell]:
    asked = {(which, s.m, s.k, s.n): (name, s, which) for which in t.passes for name, s in SHAPES.items() if which == "forward" or name.startswith(t.backward_of)}
    map_ = [crossover(name, shape, which, t) for name, shape, which in asked.values()]
    first, *others = t.bandwidth
    bar = [fused_quantise(*first, replicate=i) for i in range(t.replicates)]
    return map_ + bar + [fused_quantise(m, k) for m, k in others] + [fused_quantise(*first, norm=n, activation=a) for n, a in (("layernorm", "silu"), ("rmsnorm", "silu"))]


def crossover(name: str, shape: Shape, which: str, t: Timing) -> Cell:
    recipes = {"forward": FORWARD, "dgrad": DGRAD, "wgrad": WGRAD}[which]
    params: dict[str, Any] = {"m": shape.m, "k": shape.k, "n": shape.n, "which": which, "recipes": list(recipes), "backends": list(t.backends),
                              "fused": ["rowwise-fast"] if which == "forward" else [], "rounds": 6, "launches": 8, "warmup_s": 0.2}  # fmt: skip
    return _exclusive("cells.contests:crossover", params, f"time {which} {name}")


def fused_quantise(m: int, k: int, *, norm: str = "blocknorm", activation: str = "hardswish", replicate: int = 0) -> Cell:
    params = {"m": m, "k": k, "norm": norm, "activation": activation, "granularity": "row", "keep": False, "rounds": 12, "launches": 8, "warmup_s": 0.5}
    return _exclusive("cells.contests:fused_quantise", params, f"time {norm} + {activation} + quantise {m}x{k} #{replicate}", replicate)


def _whole_models(config: Config, planners: dict[str, Cell]) -> list[Cell]:
    """Times of every product first, of each model, Mods and batch once; then steps, replicate by replicate."""
    times = {(s.model, s.size, s.mods, s.batch): site_times(s) for s in config.steps}
    inputs = {s: {"times": times[s.model, s.size, s.mods, s.batch], **({"planners": planners[s.size]} if s.planned else {})} for s in config.steps}
    steps = [dense_step(s, inputs[s], i) for i in range(max((s.replicates for s in config.steps), default=0)) for s in config.steps if i < s.replicates]
    contest = {"size": "5.6", "batch": 6144, "training": True, "rounds": 8, "launches": 8, "warmup_s": 0.5}
    asked = {c.point for p in planners.values() for c in p.inputs.values()}  # times that planners ask for already
    return [*(c for c in times.values() if c.point not in asked), *steps, *(_exclusive("cells.speed:mods_latency", contest, f"time a layer of Wukong-5.6 in 8 Mods #{i}", i) for i in range(5) if config.mods_latency)]


def site_times(s: Steps) -> Cell:
    params = {"model": s.model, "size": s.size, "mods": s.mods, "batch": s.batch, "recipes": {"forward": list(FORWARD), "dgrad": list(DGRAD), "wgrad": list(WGRAD)},
              "backends": ["triton", "torch"], "rounds": 6, "launches": 8, "warmup_s": 0.2}  # fmt: skip
    return _exclusive("cells.speed:site_times", params, f"time every product of {_model_name(s)}")


def dense_step(s: Steps, inputs: dict[str, Cell], replicate: int) -> Cell:
    params = {"model": s.model, "size": s.size, "mods": s.mods, "batch": s.batch, "training": s.training, "variants": list(s.variants), "rounds": 6, "launches": 4, "warmup_s": 1.0,
              "table_rows": s.table_rows}  # fmt: skip
    return _exclusive("cells.speed:dense_step", params, f"time {'training' if s.training else 'inference'} {_model_name(s)} #{replicate}", replicate, inputs)


def _model_name(s: Steps) -> str:
    return f"{s.model} {s.size} {s.mods or 'as published'} B={s.batch}"


def _exclusive(measure: str, params: dict[str, Any], label: str, replicate: int = 0, inputs: dict[str, Cell] | None = None) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.{measure}", params=params, replicate=replicate, label=label, inputs=inputs or {},
                needs=Needs(device="cuda", exclusive=True, gpu_memory_gib=60, time_limit_s=1800))  # fmt: skip
