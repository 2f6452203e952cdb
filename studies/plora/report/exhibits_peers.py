"""Peers: what other systems do of what this study measures, by their papers and repositories in November 2026. Nothing in it was measured here.

    peers()                 # [Table]
"""

from __future__ import annotations

from suite.exhibit import Column, Table

COLUMNS = ("system", "adapters of one pass", "adapter kernels, both ways", "search", "ends losers in the pack", "refills slots", "plans by a cost model", "packed equals separate", "code")
PEERS = (
    ("PLoRA, arXiv 2508.02932", "many", "CUTLASS", "a list of 120", "no", "no, by jobs", "yes, no error given", "said", "closed"),
    ("ALTO, arXiv 2604.05426", "many", "grouped products", "grid", "yes", "yes", "yes", "said: no loss of quality", "none found"),
    ("mLoRA, arXiv 2312.02515", "many", "a loop", "no", "by the user", "from a queue", "of memory", "a figure of losses", "open"),
    ("LoRAFusion, arXiv 2510.00206", "many", "Triton", "no", "no", "no", "bins of micro-batches", "each kernel to 5e-3", "no licence"),
    ("tLoRA, arXiv 2602.07263", "many", "fused", "no", "no", "groups change", "not found", "not found", "none found"),
    ("RapidFire AI", "one, by turns", "none", "Optuna", "between chunks", "yes", "of several GPUs", "-", "open"),
    ("SkyRL", "many", "ragged products, ranks padded", "no", "no", "slots", "no", "tests of isolation", "open"),
    ("prime-rl", "one (its layer takes many)", "grouped_mm", "no", "no", "no", "no", "not found", "open"),
    ("PEFT", "many at inference, one in training", "none", "no", "no", "no", "no", "-", "open"),
    ("Unsloth, LLaMA-Factory", "one", "none", "no", "no", "no", "no", "-", "open"),
    ("this study", "many", "Triton, captured", "Optuna: TPE, GP, random", "yes, order-free", "yes", "yes, with its error and regret", "tests of bits", "open"),
)  # fmt: skip


def peers() -> list:
    return [Table(title="Peers", columns=[Column(name=n) for n in COLUMNS], rows=PEERS, note="Read from papers and repositories; none of these systems was run here but PEFT, as a baseline.")]
