"""The PLoRA study: what packing LoRA adapters gains, over what, and that it changes no bit of any of them.

    python -m suite run plora --preset cpu

Source: PLoRA (arXiv 2508.02932), whose code is not public.
"""

from __future__ import annotations

from studies.plora.claims import CLAIMS
from studies.plora.presets import cpu, gpu, gpu2, smoke
from studies.plora.questions import questions
from studies.plora.report.exhibits import exhibits
from studies.plora.warm import warm
from suite.study import Metric, Study


def best_preset(machine) -> tuple[str, str]:
    if len(machine.gpus) > 1:
        return "gpu", f"{len(machine.gpus)} GPUs are present; --preset gpu2 adds what two of them do together"
    if machine.gpus:
        return "gpu", f"{machine.gpus[0].name} is present"
    return "cpu", "no GPU here: nothing is timed, searches run over a two-layer random model"


METRICS = (
    *(Metric(name=n, better="higher", meaning=m) for n, m in (
        ("log_pack_speedup", "ln(time of one adapter, captured, x k / time of the pack of k), this process"),
        ("log_pack_cap", "ln(real tokens a second of the saturated stack / of one captured adapter): eta_max / eta_1"),
        ("log_saturation_share", "ln(FLOP/s of the pack / the best of one adapter)"),
        ("log_pack_over_peft", "ln(time of eager PEFT, one adapter after another / the pack's), PEFT's fp32 adapters"),
        ("log_pack_over_peft_bf16", "the same with autocast_adapter_dtype=False"),
        ("log_processes_over_graphed", "ln(tokens a second of the best number of processes on one GPU / of one captured adapter)"),
        ("log_kernel_speedup", "ln(time of a captured loop over adapters / our kernels')"),
        ("log_kernel_over_eager", "ln(time of an eager loop over adapters / our kernels')"),
        ("log_kernel_cap_share", "ln(byte time / our kernels')"),
        ("log_kernel_roofline_share", "ln(the larger of byte and FLOP time / our kernels')"),
        ("mfu_single", "model FLOPs of one captured adapter over the dense bf16 peak"), ("mfu_pack", "the same of the pack"), ("mfu_max", "the same of the saturated stack"),
        ("makespan_over_eager", "makespan of eager jobs of one adapter over that of continuous packing"),
        ("makespan_over_graphed", "makespan of captured jobs of one adapter over that of continuous packing"),
        ("makespan_speedup", "wall clock of one captured adapter after another over that of packs with refill, captures left out"),
        ("simulated_over_sequential", "makespan of one adapter a job over continuous packing's, largest cluster"),
        ("equal_share", "share of adapters whose bits are equal packed and alone"), ("isolated_share", "share of cases in which a neighbour changes no bit"),
        ("best_score", "validation score of the best adapter found"), ("test_score", "of the adapter that was chosen on validation rows, mean over seeds"))),
    Metric(name="tokens_per_s", unit="1/s", better="higher", meaning="real tokens trained on, a second"),
    Metric(name="host_us_per_op", unit="us", better="lower", meaning="host time of eager PEFT an operation"),
    Metric(name="step_ms", unit="ms", better="lower", meaning="median time of the pack's step, the optimizer's inside"),
    Metric(name="kernel_us", unit="us", better="lower", meaning="median time of our kernels, one linear's products"),
    Metric(name="peak_gib", unit="GiB", better="lower", meaning="most memory allocated, all variants of a contest together"),
    Metric(name="padding_share", better="lower", meaning="positions that are padding"),
    Metric(name="mape", better="lower", meaning="mean absolute relative error of the cost model, held-out compositions"),
    Metric(name="memory_mape", better="lower", meaning="the same of the memory model"),
    Metric(name="largest_k_gap", unit="adapters", better="lower", meaning="largest gap of predicted and tried largest packs"),
    Metric(name="planner_regret", unit="x", better="lower", meaning="time of the chosen plan over the best of all, worst case"),
    Metric(name="makespan_s", unit="s", better="lower", meaning="from the first start to the last end"),
    Metric(name="device_s", unit="s", better="lower", meaning="time of the device"),
    Metric(name="noise_ratio", better="lower", meaning="|packed - separate| over |separate - separate under another padding|"),
    Metric(name="trained", meaning="trials that were trained, not answered by one of the same proposal"),
    Metric(name="pruned", meaning="trials that ended before their budget"),
    Metric(name="gpus", meaning="GPUs that took part"),
    Metric(name="log_control", meaning="ln ratio of a program to itself"),
    Metric(name="noise_floor", meaning="95% of |ln ratio| of a program to itself, over rounds"),
)  # fmt: skip
STUDY = Study(
    name="plora",
    title="What packing LoRA adapters gains",
    summary="Many LoRA adapters train on one frozen base: their throughput and makespan against one captured adapter, several processes and eager PEFT, beside the cap that physics sets; a search that fills, prunes and refills the pack; a planner with its error; and the bits of every adapter, packed and alone.",
    presets={"smoke": smoke, "cpu": cpu, "gpu": gpu, "gpu2": gpu2},
    cells=questions,
    metrics=METRICS,
    claims=CLAIMS,
    exhibits=exhibits,
    best_preset=best_preset,
    warm=warm,
)
