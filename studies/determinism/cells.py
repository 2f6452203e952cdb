"""Measure functions of the determinism study: capture, oracle, and one digest cell per implementation and schedule.

    operators(ctx, impl="fma", device="cpu", rows=16, chunk_rows=0, threads=1, kernel={})

Every digest is over the first `rows` rows of an operator's output, so that results of different batch
sizes can be compared across bundles: the oracle leaves the digest of every prefix. Contests (timing)
stand in contests.py.
"""

from __future__ import annotations

import hashlib

import torch

from kernels.exact.activations import silu_ref, swiglu_ref
from kernels.exact.digests import digest
from kernels.exact.integer import linear_integer_ref
from kernels.exact.linear import linear_fma_ref
from kernels.exact.norm import rmsnorm_ref
from studies.determinism.compare import compare
from studies.determinism.implementations import Schedule, output_dtype, run
from studies.determinism.operators import MAX_ROWS, load_operators, to_bits
from suite.measure import Context, Result

ROWS = (1, 2, 4, 8, 16, 64)


def capture(ctx: Context, *, layers: list[int], sequences: int, tokens: int) -> Result:
    """Weights and inputs of the linear layers, from prompts run through the exact decoder on this CPU.

    The forward pass uses our exact operators alone, so that every IEEE machine captures the same bits.
    """
    from studies.models.capture import capture_prompts

    captured = capture_prompts(layers=tuple(layers), sequences=sequences, tokens=tokens)
    arrays = {f"x.{name}": to_bits(x) for name, x in captured.inputs.items()} | {f"w.{name}": to_bits(w) for name, w in captured.weights.items()}
    facts = {"digest": combined(digest(t) for name in sorted(captured.inputs) for t in (captured.inputs[name], captured.weights[name])), "prompts": captured.prompts}
    return Result(arrays=arrays, facts=facts, metrics={"operators": float(len(captured.inputs))})


def oracle(ctx: Context, *, family: str, engine: str) -> Result:
    """Expected outputs of all operators, by the family's exact CPU arithmetic, and the digest of every row prefix."""
    ops = load_operators(ctx.input_arrays("capture"))
    if family == "fma":
        outputs = {name: linear_fma_ref(op.x_MK, op.w_NK, engine=engine) for name, op in ops.items()}
        outputs |= elementwise(ops, outputs, torch.device("cpu"))
    else:
        products = "b9" if family.endswith("b9") else "b6"
        outputs = {name: linear_integer_ref(op.x_MK, op.w_NK, products=products, engine=engine) for name, op in ops.items()}
    records = [{"operator": name, "shape": list(y.shape), "digests": prefix_digests(y, MAX_ROWS)} for name, y in outputs.items()]
    arrays = {name: y.numpy() for name, y in outputs.items()}
    return Result(arrays=arrays, records={"oracle": records}, facts={"digest": combined(r["digests"][str(MAX_ROWS)] for r in records)},
                  metrics={"operators": float(len(records)), "elements": float(sum(y.numel() for y in outputs.values()))})


def operators(ctx: Context, *, impl: str, device: str, rows: int, chunk_rows: int, threads: int, kernel: dict) -> Result:
    """One implementation under one schedule against the oracle: equal, max ULP, differing elements, digests."""
    schedule = Schedule(rows=rows, chunk_rows=chunk_rows, threads=threads, kernel=kernel)
    ops, expected = load_operators(ctx.input_arrays("capture")), ctx.input_arrays("oracle")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        outputs = {name: run(impl, op.x_MK.to(ctx.device), op.w_NK.to(ctx.device), schedule) for name, op in ops.items()}
        if impl == "fma":
            full = {n: torch.from_numpy(expected[n]).to(ctx.device) for n in ops}
            outputs |= {n: y[:rows] for n, y in elementwise(ops, full, torch.device(ctx.device)).items()}
    finally:
        torch.set_num_threads(before)
    records = [_compared(name, y.cpu(), torch.from_numpy(expected[name][:rows]), output_dtype(impl), rows) for name, y in outputs.items()]
    return Result(records={"operators": records}, facts={"digest": combined(r["digest"] for r in records)}, metrics=summary(records))


def elementwise(ops: dict, linear_outputs: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """RMSNorm, SiLU and SwiGLU over the model's own activations: kernels on a GPU, references on a CPU."""
    if device.type == "cuda":
        from kernels.exact.activations import silu, swiglu
        from kernels.exact.norm import rmsnorm
    else:
        silu, swiglu, rmsnorm = silu_ref, swiglu_ref, rmsnorm_ref
    out = {}
    for name in ops:
        if not name.endswith(".mlp.gate_proj"):
            continue
        layer = name.removesuffix(".mlp.gate_proj")
        gate, up = linear_outputs[name].contiguous(), linear_outputs[f"{layer}.mlp.up_proj"].contiguous()
        weight = ops[f"{layer}.mlp.down_proj"].w_NK[0].float().to(device)
        out[f"{layer}.rmsnorm"] = rmsnorm(gate, weight)
        out[f"{layer}.silu"] = silu(gate)
        out[f"{layer}.swiglu"] = swiglu(gate, up)
    return out


def prefix_digests(y: torch.Tensor, rows: int) -> dict[str, str]:
    """Digest of the first 1, 2, 4, ... rows: what a run at a smaller batch must give if the batch does not matter."""
    return {str(r): digest(y[:r]) for r in ROWS if r <= rows}


def _compared(name: str, y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, rows: int) -> dict:
    d = compare(y.to(dtype), expected.to(dtype))
    return {"operator": name, "digest": digest(y), "digests": prefix_digests(y, rows), "equal": d.equal, "differing": d.differing, "max_ulp": d.max_ulp, "elements": d.elements}


def combined(digests) -> str:
    """One digest over the digests of all operators, in their fixed order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def summary(records: list[dict]) -> dict[str, float]:
    return {"operators": float(len(records)), "equal_operators": float(sum(r["equal"] for r in records)), "max_ulp": float(max(r["max_ulp"] for r in records)),
            "differing": float(sum(r["differing"] for r in records)), "elements": float(sum(r["elements"] for r in records))}
