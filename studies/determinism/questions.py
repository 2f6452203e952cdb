"""The cells of the determinism study: a config becomes the list of questions that it asks.

    questions(presets.cpu())        # [Cell, ...] in the order in which they run

Importing it imports neither torch nor kernels: planning takes no second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from studies.determinism.presets import Config, Contest, Flips, Serving, Texts
from studies.determinism.schedules import kernel_choices
from studies.determinism.verify import verify_cell
from suite.cell import Cell, Needs

STUDY, HERE = "determinism", "studies.determinism"
MODEL = ("smollm2-135m-instruct", "smollm2-135m-instruct-bf16", "own-prompts")
TEXT_FIELDS: Mapping[str, Any] = {"batch": 1, "chunk": 0, "pad_to": 0, "cache": True, "graph": False, "sampled": False}


def questions(config: Config) -> list[Cell]:
    out = [*_operators(config)] if config.cpu_schedules or config.gpu_rows else []
    out += [verify_cell(device) for device in config.verify]
    out += [texts(t, schedule, config.text_device, config.ranks) for t in config.texts for schedule in t.schedules]
    out += [_evidence("training", device, {"device": device, "steps": 3}, f"training step {device}") for device in config.training]
    out += [_evidence("audit", "cpu", {"target": target}, f"static audit {target}", memory_gib=3) for target in config.audit]
    out += [_evidence("engines", "cuda", {"products": p}, f"integer engines {p}") for p in config.engines]
    out += [_evidence("foreign", "cuda", {"architecture": a}, f"sm_{a} code on this GPU") for a in config.foreign]
    out += [_stress(config.stress_sms)] if config.stress_sms else []
    out += _flips(config.flips) if config.flips else []
    out += [_traffic()] if config.traffic else []
    out += [contest(c, replicate) for replicate in range(config.replicates) for c in config.contests if replicate < (c.replicates or config.replicates)]
    return out + ([serving(config.serving, replicate) for replicate in range(config.replicates)] if config.serving else [])


def _operators(config: Config) -> Iterator[Cell]:
    """Capture, oracles, and one cell per implementation and schedule."""
    captured = Cell(study=STUDY, measure=f"{HERE}.cells:capture", params={"layers": list(config.layers), "sequences": config.sequences, "tokens": config.tokens},
                    assets=MODEL, label="capture", needs=Needs(memory_gib=3))
    used = {*(config.cpu_impls if config.cpu_schedules else ()), *(config.gpu_impls if config.gpu_rows else ())}
    wanted = used | {"fma"} | ({"integer-b9"} if "integer" in used else set())  # of b9 a GPU's published rows are compared, whatever runs here
    oracles = {family: oracle(captured, family) for family in ("fma", "integer", "integer-b9") if family in wanted}
    yield captured
    yield from oracles.values()
    if config.cpu_schedules:
        yield oracle(captured, "fma", "torch")
    inputs = {impl: {"capture": captured, "oracle": oracles.get(impl, oracles["fma"])} for impl in used}
    for schedule in config.cpu_schedules:
        yield from (operators(inputs[impl], impl, "cpu", schedule) for impl in config.cpu_impls)
    for schedule in [{"rows": rows} for rows in config.gpu_rows] + ([{"rows": 64, "chunk_rows": 16}] if config.gpu_rows else []):
        yield from (operators(inputs[impl], impl, "cuda", schedule) for impl in config.gpu_impls)
    if config.gpu_kernels:
        yield from (operators(inputs[impl], impl, "cuda", {"rows": rows, "kernel": kernel}) for impl, rows, kernel in kernel_choices())


def oracle(captured: Cell, family: str, engine: str = "auto") -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.cells:oracle", params={"family": family, "engine": engine}, inputs={"capture": captured}, label=f"oracle {family} {engine}", needs=Needs(memory_gib=2))


def operators(inputs: dict[str, Cell], impl: str, device: str, schedule: Mapping[str, Any]) -> Cell:
    params = {"impl": impl, "device": device, "rows": 64, "chunk_rows": 0, "threads": 0, "kernel": {}, **schedule}
    words = [f"rows={params['rows']}"] + [f"{k}={params[k]}" for k in ("chunk_rows", "threads") if params[k]] + [f"{k}={v}" for k, v in params["kernel"].items()]
    return Cell(study=STUDY, measure=f"{HERE}.cells:operators", params=params, inputs=inputs, label=f"{impl} {device} {' '.join(words)}", needs=Needs(device=device, memory_gib=2))


def texts(t: Texts, schedule: Mapping[str, Any], device: str, ranks: int) -> Cell:
    """Whole texts of one family under one schedule."""
    params = {"family": t.family, "device": device, "prompts": t.prompts, "new_tokens": t.new_tokens, "ranks": ranks, **TEXT_FIELDS, **schedule}
    words = [f"{k}={v}" for k, v in {**schedule, **({"ranks": ranks} if ranks > 1 else {})}.items()]
    return Cell(study=STUDY, measure=f"{HERE}.whole_model:generation", params=params, assets=MODEL, label=f"texts {t.family} {device} {t.prompts} prompts {' '.join(words)}",
                needs=Needs(device=device, gpus=ranks if device == "cuda" else 0, ranks=ranks, memory_gib=4, time_limit_s=3600,
                            programs=("cc",) if device == "cpu" and t.family == "fma" else ()))  # without its C engine a text takes hours


def _evidence(measure: str, device: str, params: dict[str, Any], label: str, memory_gib: float = 2) -> Cell:
    return Cell(study=STUDY, measure=f"{HERE}.evidence:{measure}", params=params, label=label, needs=Needs(device=device, memory_gib=memory_gib, time_limit_s=1800))


def _stress(sms: tuple[int, ...]) -> Cell:
    """One cell for all numbers of SMs: compilers and drivers start once. A process of its own: what it loads belongs to its contexts."""
    return Cell(study=STUDY, measure=f"{HERE}.evidence:stress", params={"sms": list(sms)}, label=f"golden questions on {', '.join(map(str, sms))} SMs",
                needs=Needs(device="cuda", memory_gib=2, time_limit_s=1800, fresh_process=True))


def _flips(f: Flips) -> list[Cell]:
    out = []
    for impl, batches in f.texts.items():
        out += [Cell(study=STUDY, measure=f"{HERE}.flips:texts", params={"impl": impl, "batch": b, "prompts": f.prompts, "new_tokens": f.new_tokens}, assets=(*MODEL[:2], "gsm8k"),
                     label=f"GSM8K texts {impl} batch={b}", needs=Needs(device="cuda", memory_gib=4)) for b in batches]
    for impl, batches in f.labels.items():
        out += [Cell(study=STUDY, measure=f"{HERE}.flips:labels", params={"impl": impl, "batch": b, "sentences": f.sentences}, assets=(*MODEL[:2], "sst2-dev"),
                     label=f"SST-2 labels {impl} batch={b}", needs=Needs(device="cuda", memory_gib=4)) for b in batches]
    return out


def _traffic() -> Cell:
    params = {"rows": 1, "n": 14336, "k": 4096, "variants": ["fma", "integer", "layercast"]}
    return Cell(study=STUDY, measure=f"{HERE}.traffic:weight_bytes", params=params, label="bytes by the profiler M=1 14336x4096",
                needs=Needs(device="cuda", exclusive=True, gpu_memory_gib=16, programs=("ncu",)))


def contest(c: Contest, replicate: int) -> Cell:
    params = {"rows": c.rows, "n": c.n, "k": c.k, "variants": list(c.variants), "rounds": c.rounds, "launches": c.launches, "warmup_s": c.warmup_s, "eager": c.eager}
    return Cell(study=STUDY, measure=f"{HERE}.contests:linear", params=params, replicate=replicate, label=f"time{' compiled' if 'layercast_compiled' in c.variants else ''} M={c.rows} {c.n}x{c.k} #{replicate}",
                needs=Needs(device="cuda", exclusive=True, gpu_memory_gib=16))


def serving(s: Serving, replicate: int) -> Cell:
    params = {"batches": list(s.batches), "context": s.context, "prompts": list(s.prompts), "variants": list(s.variants), "rounds": s.rounds}
    return Cell(study=STUDY, measure=f"{HERE}.end_to_end:serving", params=params, replicate=replicate, label=f"time a 7B-shaped decoder #{replicate}",
                needs=Needs(device="cuda", exclusive=True, gpu_memory_gib=130))
