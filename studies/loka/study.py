"""The LoKA study: where in a recommender FP8 is safe and fast, what it costs in log-loss, and the plan that follows.

    python -m suite run loka --preset cpu

Source: LoKA (arXiv 2605.10886, Meta, ISCA 2026), whose code is not public and whose text was read second-hand: what is said here of its
method is from notes on it.
"""

from __future__ import annotations

from studies.loka.claims import CLAIMS
from studies.loka.presets import cpu, gpu, smoke
from studies.loka.questions import questions
from studies.loka.report.exhibits import exhibits
from studies.loka.warm import warm
from suite.study import Metric, Study


def best_preset(machine) -> tuple[str, str]:
    if machine.gpus:
        return "gpu", f"{machine.gpus[0].name} is present"
    return "cpu", "no GPU here: FP8 is emulated, bit for bit, and nothing is timed"


METRICS = (
    Metric(name="safe_recipes", better="higher", meaning="FP8 recipes that are safe at this site and pass, or at all inner forward sites of a model together"),
    *(Metric(name=f"p01_db_{r}", unit="dB", better="higher", meaning=f"1st percentile over rows of a product's SQNR, {r}") for r in ("tensorwise", "rowwise")),
    Metric(name="flushed_share", better="lower", meaning="share of an operand's non-zero elements that one scale a tensor turns to 0"),
    Metric(name="hardware_db", unit="dB", better="higher", meaning="SQNR of the kernels against the emulation, the worst row"),
    Metric(name="log_loss", unit="nats", better="lower", meaning="of fresh examples, expected under their known probabilities where the data are planted"),
    Metric(name="bayes_log_loss", unit="nats", meaning="what no model can beat on these examples"),
    Metric(name="normalised_entropy", better="lower", meaning="log-loss over that of the base rate"),
    Metric(name="auc", better="higher", meaning="area under the ROC curve"),
    Metric(name="diverged", better="lower", meaning="1 where training gave no finite loss"),
    Metric(name="points", meaning="single products in FP8 whose change of loss is clear of its own error"),
    Metric(name="rank_correlation", better="higher", meaning="of predicted and measured changes of log-loss, over those products"),
    Metric(name="slope", meaning="of ln measured on ln predicted change"),
    Metric(name="gradient_bias", better="lower", meaning="the largest |<g_fp8, g> / |g|^2 - 1| over products of the backward passes"),
    Metric(name="plan_speedup", unit="x", better="higher", meaning="of a step's products by our plan, over bf16"),
    Metric(name="plan_loss_change", better="lower", meaning="relative change of log-loss by our plan's forward products, measured"),
    Metric(name="prediction_error_db", unit="dB", better="lower", meaning="the largest gap of predicted and true 1st percentiles of rows, over recipes"),
    Metric(name="stop_error_share", better="lower", meaning="share of streams that stopped with the wrong verdict"),
    Metric(name="stop_rows", better="lower", meaning="rows read until a verdict, the median over streams"),
    Metric(name="surrogate_gap_db", unit="dB", better="lower", meaning="the paper's Gaussian probe above the true 1st percentile, rows of different scale"),
    Metric(name="mere_spread", better="lower", meaning="largest over smallest mean of elementwise relative errors of one Gaussian product, over seeds"),
    Metric(name="log_probe_overhead", better="lower", meaning="ln(time with the probe / without), this process"),
    Metric(name="bf16_us", unit="us", better="lower", meaning="median time of torch's bf16 product"),
    *(Metric(name=f"log_speedup_{w}", better="higher", meaning=f"ln(time of bf16 / time of the fastest FP8 recipe), {what}, this process") for w, what in (
        ("whole", "both operands quantised"), ("product", "quantising left out"), ("frozen", "the activation quantised"), ("fused", "norm and activation in front, fused"))),
    Metric(name="fused_us", unit="us", better="lower", meaning="median time of norm, activation and quantising in one kernel"),
    Metric(name="log_bandwidth_share", better="higher", meaning="ln(bytes a second of the fused kernel / copy bandwidth), this process"),
    *(Metric(name=f"log_speedup_over_{w}", better="higher", meaning=f"ln(time of {what} / time of the fused kernel), this process") for w, what in (
        ("compiled", "the same in one compiled function"), ("separate", "norm first, quantising after"))),
    Metric(name="step_us", unit="us", better="lower", meaning="median time of a model's step in bf16"),
    *(Metric(name=f"log_speedup_{w}", better="higher", meaning=f"ln(time of a step in bf16 / time of {what}), this process") for w, what in (
        ("single", "the fastest single recipe"), ("dispatch", "the plan"), ("torchao", "torchao on every linear layer"), ("mods", "a layer with all three Mods, both in bf16"))),
    Metric(name="log_dispatch_over_single", better="higher", meaning="ln(time of the fastest single recipe / time of the plan), this process"),
    Metric(name="amdahl_cap", better="higher", meaning="1 / ((1 - share) + share / speed-up): what a step could gain"),
    Metric(name="log_control", meaning="ln ratio of a program to itself"),
    Metric(name="noise_floor", meaning="95% of |ln ratio| of a program to itself, over rounds"),
)  # fmt: skip
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
    warm=warm,
)
