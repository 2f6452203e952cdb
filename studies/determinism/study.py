"""The determinism study: do the same bits come out of a CPU and a GPU, at every batch size and schedule?

    python -m suite run determinism --preset cpu

Cells: one capture of real weights and activations, one exact CPU oracle, one digest cell per
implementation and schedule, and timing contests on the GPU. Source: arXiv 2506.09501 (LayerCast) and
the abstract of a paper on fixed-configuration fused-upcast GEMM kernels. Attention and whole
generations are not part of it yet.
"""

from __future__ import annotations

from studies.determinism.claims import CLAIMS
from studies.determinism.exhibits import exhibits
from studies.determinism.presets import Config, Contest, cpu, gpu, smoke, verify
from studies.determinism.schedules import decode_choices, prefill_choices
from studies.determinism.verify import verify_cell
from suite.cell import Cell, Needs
from suite.study import Metric, Study

HERE = "studies.determinism"
VERBS = {"verify-determinism": ("studies.determinism.verify", "PASS or FAIL for every exact operator on this device, against the golden manifest")}


def cells(config: Config) -> list[Cell]:
    if config.verify:
        return [verify_cell(device) for device in config.verify]
    captured = Cell(study="determinism", measure=f"{HERE}.cells:capture", params={"layers": list(config.layers), "sequences": config.sequences, "tokens": config.tokens},
                    assets=("smollm2-135m-instruct", "own-prompts"), label="capture", needs=Needs(memory_gib=3))
    inputs = {"capture": captured, "oracle": _oracle(captured, "torch")}
    out = [captured, inputs["oracle"], _oracle(captured, "auto")]
    for schedule in config.cpu_schedules:
        out += [operators(inputs, impl, "cpu", schedule) for impl in ("fma", *config.cpu_baselines)]
    for rows in config.gpu_rows:
        out += [operators(inputs, impl, "cuda", {"rows": rows}) for impl in ("fma", "layercast", "sgemm", "bf16")]
    if config.gpu_rows:
        out += [operators(inputs, impl, "cuda", {"rows": 64, "chunk_rows": 16}) for impl in ("fma", "layercast", "sgemm", "bf16")]
    if config.gpu_kernels:
        out += [operators(inputs, "fma", "cuda", {"rows": r, "kernel": k}) for r, k in (*decode_choices(), *prefill_choices())]
    return out + [contest_cell(c, replicate) for replicate in range(config.replicates) for c in config.contests]


def _oracle(captured: Cell, engine: str) -> Cell:
    return Cell(study="determinism", measure=f"{HERE}.cells:oracle", params={"engine": engine}, inputs={"capture": captured}, label=f"oracle {engine}", needs=Needs(memory_gib=2))


def operators(inputs: dict[str, Cell], impl: str, device: str, schedule: dict) -> Cell:
    params = {"impl": impl, "device": device, "rows": 64, "chunk_rows": 0, "threads": 0, "kernel": {}, **schedule}
    words = [f"rows={params['rows']}"] + [f"{k}={params[k]}" for k in ("chunk_rows", "threads") if params[k]] + [f"{k}={v}" for k, v in params["kernel"].items()]
    return Cell(study="determinism", measure=f"{HERE}.cells:operators", params=params, inputs=inputs, label=f"{impl} {device} {' '.join(words)}",
                needs=Needs(device=device, memory_gib=2))


def contest_cell(c: Contest, replicate: int) -> Cell:
    params = {"rows": c.rows, "n": c.n, "k": c.k, "variants": list(c.variants), "rounds": c.rounds, "launches": c.launches, "eager": c.eager}
    return Cell(study="determinism", measure=f"{HERE}.contests:linear", params=params, replicate=replicate, label=f"time M={c.rows} {c.n}x{c.k} #{replicate}",
                needs=Needs(device="cuda", exclusive=True, gpu_memory_gib=16))


def best_preset(machine) -> tuple[str, str]:
    if machine.gpus:
        return "gpu", f"{machine.gpus[0].name} is present"
    return "cpu", "no GPU here: bits on this CPU, beside the published GPU bits"


METRICS = (
    Metric(name="operators", meaning="operators compared"),
    Metric(name="equal_operators", better="higher", meaning="of them, equal to the oracle in every bit"),
    Metric(name="max_ulp", unit="ULP", better="lower", meaning="largest distance to the oracle"),
    Metric(name="differing", better="lower", meaning="elements that differ from the oracle"),
    Metric(name="elements", meaning="elements compared"),
    Metric(name="rows", meaning="rows captured"),
    *(Metric(name=f"{v}_us", unit="us", better="lower", meaning=f"median time of {v}") for v in ("fma", "layercast", "sgemm", "bf16", "copy")),
    *(Metric(name=f"{v}_eager_us", unit="us", better="lower", meaning=f"median time of {v}, launched call by call") for v in ("fma", "layercast", "sgemm", "bf16")),
    *(Metric(name=f"log_ratio_{v}", meaning=f"ln(time of {v} / time of fma), this process") for v in ("layercast", "sgemm", "bf16")),
    Metric(name="log_bandwidth_share", meaning="ln(weight bytes a second of fma / copy bandwidth), this process"),
    Metric(name="log_control", meaning="ln ratio of a program to itself"),
    Metric(name="noise_floor", meaning="95% of |ln ratio| of a program to itself, over rounds"),
)

STUDY = Study(
    name="determinism",
    title="The same bits on every device",
    summary="Linear layers of SmolLM2-135M-Instruct with real weights and real activations, computed on a CPU and on an H200 under many schedules: which implementations agree in every bit, and what that costs in time.",
    presets={"smoke": smoke, "cpu": cpu, "gpu": gpu, "verify": verify},
    cells=cells,
    metrics=METRICS,
    claims=CLAIMS,
    exhibits=exhibits,
    best_preset=best_preset,
    verbs=VERBS,
)
