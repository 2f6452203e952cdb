"""The determinism study: do the same bits come out of a CPU and a GPU, at every batch size and schedule?

    python -m suite run determinism --preset cpu

Linear layers on real weights and activations, every other operator of a decoder on golden questions, whole texts of SmolLM2, a training
step, attempts to break the bits, the flips of implementations that promise less, and what exactness costs in time. Source: arXiv
2506.09501 (LayerCast) and the abstract of a paper on fixed-configuration fused-upcast GEMM kernels.
"""

from __future__ import annotations

from studies.determinism.claims import CLAIMS
from studies.determinism.exhibits import exhibits
from studies.determinism.presets import cpu, golden, gpu, gpu2, smoke, verify
from studies.determinism.questions import questions
from studies.determinism.warm import warm
from suite.study import Metric, Study

VERBS = {"verify-determinism": ("studies.determinism.verify", "PASS or FAIL for every exact operator on this device, against the golden manifest")}


def best_preset(machine) -> tuple[str, str]:
    if machine.gpus:
        return "gpu", f"{machine.gpus[0].name} is present"
    return "cpu", "no GPU here: bits on this CPU, beside the published GPU bits"


TIMED = ("fma", "integer", "integer-b9", "layercast", "sgemm", "bf16", "bf16_padded", "layercast_compiled", "bf16_compiled")
METRICS = (
    Metric(name="operators", meaning="operators compared"),
    Metric(name="equal_operators", better="higher", meaning="of them, equal to the oracle in every bit"),
    Metric(name="max_ulp", unit="ULP", better="lower", meaning="largest distance to the oracle"),
    Metric(name="differing", better="lower", meaning="elements that differ from the oracle"),
    Metric(name="elements", meaning="elements compared"),
    Metric(name="cases", meaning="cases asked"),
    Metric(name="equal_cases", better="higher", meaning="of them, equal, or within the stated rules"),
    Metric(name="tokens", meaning="tokens written"),
    Metric(name="accuracy", better="higher", meaning="share of sentences labelled right"),
    *(Metric(name=f"{v}_us", unit="us", better="lower", meaning=f"median time of {v}") for v in (*TIMED, "copy")),
    *(Metric(name=f"{v}_eager_us", unit="us", better="lower", meaning=f"median time of {v}, launched call by call") for v in ("fma", "integer", "layercast", "sgemm", "bf16", "bf16_padded")),
    *(Metric(name=f"log_ratio_{v}", meaning=f"ln(time of {v} / time of fma), this process") for v in TIMED[1:]),
    Metric(name="log_bandwidth_share", meaning="ln(weight bytes a second of fma / copy bandwidth), this process"),
    Metric(name="log_control", meaning="ln ratio of a program to itself"),
    Metric(name="noise_floor", meaning="95% of |ln ratio| of a program to itself, over rounds"),
    Metric(name="bytes_fma", unit="B", better="lower", meaning="bytes moved per weight by fma in decode, by the profiler"),
    *(Metric(name=f"error_{v}", better="lower", meaning=f"mean |error| / (|x||w|) of {v}") for v in ("fma", "integer", "sgemm")),
)
STUDY = Study(
    name="determinism",
    title="The same bits on every device",
    summary="A whole decoder, SmolLM2-135M-Instruct with its real weights, and every operator in it, computed on a CPU and on an H200 under many schedules: which implementations agree in every bit, and what that costs in time.",
    presets={"smoke": smoke, "cpu": cpu, "golden": golden, "gpu": gpu, "gpu2": gpu2, "verify": verify},
    cells=questions,
    metrics=METRICS,
    claims=CLAIMS,
    exhibits=exhibits,
    best_preset=best_preset,
    warm=warm,
    verbs=VERBS,
)
