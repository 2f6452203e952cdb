"""What the study claims: a sentence, a target, our bar, and the finding that judges it (report/findings*.py).

    suite claims plora --json

A target is the paper's number where it gives one for the same comparison, else ours. Its 12.8x is over eager jobs of one adapter, so it is the target of
`throughput_paper` alone: over a captured adapter the gain is bounded by eta_max / eta_1, which the same contest prints.
"""

from __future__ import annotations

import math
from functools import partial

from studies.plora.report import findings_plans, findings_speed, findings_training
from suite.claims import Claim

RUN, RUN_GPU, RUN_GPU2 = "make study-plora", "make study-plora PRESET=gpu", "make study-plora PRESET=gpu2"
PAPER = "PLoRA, arXiv 2508.02932"
BARS = {"0.5b": 4.0, "3b": 2.0, "7b": 1.4}
_TIME = partial(Claim, unit="x", smallest_n=5, source="ours", command=RUN_GPU)
_ALL = partial(Claim, target=1.0, bar=1.0, margin=0.0, unit="share", source="ours", device="", command=RUN)
_PLANS = partial(Claim, device="", command=RUN_GPU)  # their cells compute on a CPU from what a GPU measured


def _throughput(model: str) -> Claim:
    bar = BARS[model]
    return _TIME(id=f"throughput_{model.replace('.', '_')}", target=bar, bar=bar, test=partial(findings_speed.throughput, model=model),
                 statement=f"Qwen2.5-{model.upper()} shape, batch 1, 128 tokens: an adapter in our pack over the better of one captured adapter (B1) and several processes (B2).")  # fmt: skip


CLAIMS = (
    *(_throughput(model) for model in BARS),
    _TIME(id="throughput_of_cap", target=0.7, bar=0.7, unit="share", test=findings_speed.throughput_of_cap, statement="The three gains over one captured adapter reach this share of their cap eta_max / eta_1."),
    _TIME(id="throughput_paper", target=12.8, bar=12.8, source=PAPER, test=findings_speed.throughput_paper,
          statement="At batch 1, the paper's ranks and real lengths of GSM8K and MRPC: the best gain over eager PEFT, most of it launch overhead."),
    _TIME(id="saturation_share", target=0.8, bar=0.8, unit="share", test=findings_speed.saturation_share, statement="Packs of at least 8k tokens a step reach this share of the MFU that the same stack has at its best."),
    _PLANS(id="makespan_paper", target=7.52, bar=7.52, unit="x", source=f"{PAPER}, over Min GPU", test=findings_plans.makespan_paper,
          statement="3B shape, the paper's 120 configurations on 8 GPUs, rows as long as GSM8K's and MRPC's: makespan of eager PEFT, one adapter a job, over continuous packing's, from measured step times."),
    Claim(id="makespan_1gpu", target=4.0, bar=4.0, unit="x", source="ours", smallest_n=2, command=RUN_GPU, test=partial(findings_training.makespan_live, gpus=1),
          statement="SmolLM2, 120 configurations on Banking77 and CLINC150, live on one GPU: makespan of one captured adapter after another over that of packs with refill."),
    Claim(id="makespan_2gpu", target=4.0, bar=4.0, unit="x", source="ours", smallest_n=2, command=RUN_GPU2, test=partial(findings_training.makespan_live, gpus=2), statement="The same on two GPUs."),
    _PLANS(id="makespan_pruned", target=4.0, bar=4.0, unit="x", source="ours", smallest_n=5, test=findings_training.makespan_pruned,
           statement="Searches of 64 trials on the recorded grid, same sampler, pruner and seed: device seconds of one captured adapter at a time over those of a pack that prunes and refills, equal in test score to within one point."),
    _TIME(id="kernel_vs_graphed", target=4.0, bar=4.0, test=findings_speed.kernel_vs_graphed,
          statement="LoRA's products of 32 adapters of rank 64, d = 3584, 128 tokens each, forward and backward: our kernels over a captured loop."),
    _TIME(id="kernel_of_cap", target=0.7, bar=0.7, unit="share", test=findings_speed.kernel_of_cap,
          statement="Everywhere on the grid of d and tokens our kernels' gain over a captured loop is this share of what bytes allow."),
    _TIME(id="kernel_roofline", target=0.7, bar=0.7, unit="share", test=findings_speed.kernel_roofline,
          statement="Where one call's tensors exceed three L2s, our kernels take the larger of byte and FLOP time, but for this share."),
    _ALL(id="exactness", test=findings_plans.exactness, statement="Packed training is separate training: the same bits in deterministic mode, in every case tried."),
    _ALL(id="isolation", test=findings_plans.isolation, statement="Permuted slots, a neighbour's NaN and a neighbour pruned and refilled leave an adapter's bits as they were."),
    _PLANS(id="cost_model_mape", target=0.08, bar=0.08, margin=0.0, direction="lower", source="ours; the paper gives no error", smallest_n=12, test=findings_plans.cost_model_mape,
          statement="The cost model's mean absolute relative error on compositions that its fit never saw."),
    _PLANS(id="planner_regret", target=1.05, bar=1.05, margin=0.0, unit="x", direction="lower", source=f"ours; {PAPER} bounds its planner at 1.05 to 1.14 under its own model", smallest_n=6,
          test=findings_plans.planner_regret, statement="The exact planner's plan takes at most so much of the best plan's time, by measured step times of every plan."),
    Claim(id="largest_k", target=1.0, bar=1.0, margin=0.0, unit="adapters", direction="lower", source="ours", command=RUN_GPU, test=findings_plans.largest_k,
          statement="The memory model foretells the most adapters that fit 24 and 40 GB to within one."),
)  # fmt: skip
assert all(math.isfinite(c.target) for c in CLAIMS if c.target is not None), "a target is a finite number"
