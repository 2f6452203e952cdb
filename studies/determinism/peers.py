"""Other projects after equal bits: what their own documents promise, what they cover, and what they say it costs. Nothing here was measured by us.

    tables()                # two suite.exhibit.Table; every line of the second names where it was read

"not stated" is what the sources leave open. Promises are theirs; "statistical" stands for work that narrows differences without equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.exhibit import Column, Table


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One project; each field is a word or two, `source` is where they are from."""

    name: str
    run_to_run: str
    batch: str
    tensor_parallel: str
    architectures: str
    cpu_equals_gpu: str
    covers: str
    cost: str
    source: str


PEERS = (
    Peer(
        name="batch_invariant_ops",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="no",
        architectures="no",
        cpu_equals_gpu="no",
        covers="matrix products, log-softmax, mean; forward",
        cost="61.5% of time, as quoted by SGLang's authors",
        source="github.com/thinking-machines-lab/batch_invariant_ops; lmsys.org, 2025-09-22",
    ),
    Peer(
        name="vLLM, batch-invariant mode",
        run_to_run="yes",
        batch="yes (beta)",
        tensor_parallel="no",
        architectures="no: tuned per architecture",
        cpu_equals_gpu="no",
        covers="attention, norms, softmax, matrix products, MoE, all-reduce; inference",
        cost="not stated",
        source="docs.vllm.ai, features/batch_invariance",
    ),
    Peer(
        name="SGLang, deterministic inference",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="proposed (PR 15041)",
        architectures="no",
        cpu_equals_gpu="no",
        covers="as batch_invariant_ops, and attention, seeded sampling, radix cache, CUDA graphs",
        cost="34% on average, 25-45%",
        source="lmsys.org, 2025-09-22; docs.sglang.ai",
    ),
    Peer(
        name="TBIK",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="yes",
        architectures="no",
        cpu_equals_gpu="no",
        covers="row-parallel products and their all-reduce; RL training and serving agree",
        cost="not found",
        source="arXiv 2511.17826",
    ),
    Peer(
        name="RepDL",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="not applicable",
        architectures="yes",
        cpu_equals_gpu="yes",
        covers="matrix products, convolution, softmax, batch norm, cross-entropy, optimizers; fp32; training. No attention, no RMSNorm",
        cost="none published",
        source="arXiv 2510.09180; github.com/microsoft/RepDL",
    ),
    Peer(
        name="Gensyn RepOps (closed)",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="not stated",
        architectures="claimed",
        cpu_equals_gpu="claimed",
        covers="ONNX graphs through a compiler; training by Verde",
        cost="not found",
        source="docs.gensyn.ai/tech; arXiv 2502.19405",
    ),
    Peer(
        name="HEAL",
        run_to_run="statistical",
        batch="statistical",
        tensor_parallel="not stated",
        architectures="statistical",
        cpu_equals_gpu="no",
        covers="16-bit integer Q, K, V; error-compensated 16-bit products on tensor cores",
        cost="overhead of fp32 cut up to 7.1x",
        source="arXiv 2606.21023",
    ),
    Peer(
        name="ReproBLAS",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="yes: free of order",
        architectures="yes, any IEEE machine",
        cpu_equals_gpu="CPU only",
        covers="BLAS levels 1 to 3",
        cost="dot product 4x of MKL's time",
        source="bebop.cs.berkeley.edu/reproblas; UCB/EECS-2015-229",
    ),
    Peer(
        name="GEMMul8 (Ozaki II)",
        run_to_run="yes",
        batch="yes",
        tensor_parallel="sums are exact",
        architectures="equal error statistics on A100 and GH200",
        cpu_equals_gpu="no",
        covers="matrix products by int8 tensor cores",
        cost="faster than SGEMM when large, slower at 1024^3",
        source="github.com/RIKEN-RCCS/GEMMul8; arXiv 2504.08009",
    ),
)


def tables() -> list[Table]:
    """What they promise, and what they cover."""
    promises = [(p.name, p.run_to_run, p.batch, p.tensor_parallel, p.architectures, p.cpu_equals_gpu) for p in PEERS]
    covers = [(p.name, p.covers, p.cost, p.source) for p in PEERS]
    return [
        Table(
            title="Who else promises equal bits",
            columns=[Column(name=n) for n in ("project", "run to run", "batch size", "tensor parallel", "across architectures", "CPU = GPU")],
            rows=promises,
            note="What each promises in its own documents: none was run here but the batch-invariant GEMM, written after the first one's manner.",
        ),
        Table(
            title="What they cover, and at what cost",
            columns=[Column(name=n) for n in ("project", "covers", "cost", "read in")],
            rows=covers,
            note="None of them offers equal bits across architectures and on a CPU together with attention, norms and sampling at a published speed.",
        ),
    ]
