"""The LoKA study: where in a recommender FP8 is safe and fast, what it costs in log-loss, and the plan that follows.

    python -m suite run loka --preset cpu

Source: LoKA (arXiv 2605.10886, Meta, ISCA 2026), whose code is not public and whose text was read second-hand: what is said here of its
method is from notes on it.
"""

from __future__ import annotations

from studies.loka.claims import CLAIMS
from studies.loka.exhibits import exhibits
from studies.loka.presets import cpu, gpu, smoke
from studies.loka.questions import questions
from suite.study import Metric, Study


def best_preset(machine) -> tuple[str, str]:
    if machine.gpus:
        return "gpu", f"{machine.gpus[0].name} is present"
    return "cpu", "no GPU here: FP8 is emulated, bit for bit, and nothing is timed"


METRICS = (
    Metric(name="rows", meaning="rows (examples) behind a quantile"),
    *(Metric(name=f"{v}_recipes", meaning=f"FP8 recipes that are {v} there") for v in ("safe", "unsafe", "undecided")),
    *(Metric(name=f"p01_db_{r}", unit="dB", better="higher", meaning=f"1st percentile over rows of the product's SQNR, {r}") for r in ("tensorwise", "rowwise", "blockwise")),
    Metric(name="flushed_share", better="lower", meaning="share of an operand's non-zero elements that one scale a tensor turns to 0"),
    Metric(name="hardware_db", unit="dB", better="higher", meaning="SQNR of the kernels against the emulation, the worst row"),
)
STUDY = Study(
    name="loka",
    title="Where FP8 is safe in recommenders, and what it costs",
    summary="Every product of DLRM-v2, Wukong, HSTU and RankMixer, forward and backward, in every FP8 recipe: which are safe for every example, what they cost in log-loss, what they save in time, and the plan that follows.",
    presets={"smoke": smoke, "cpu": cpu, "gpu": gpu},
    cells=questions,
    metrics=METRICS,
    claims=CLAIMS,
    exhibits=exhibits,
    best_preset=best_preset,
)
