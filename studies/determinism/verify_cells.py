"""The measure function behind `suite verify-determinism`: every golden question, asked of one device.

    verify(ctx, device="cuda", questions="<digest of the manifest's questions>")

It leaves a record per question (digests of inputs and outputs, equal or not, and how far off), and from a GPU the digest of every
kernel binary that was launched. Digests are compared again by whoever reads the bundle: what it says of itself is not taken on trust.
"""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch

from studies.determinism.compare import compare
from studies.determinism.golden import joined, outputs
from studies.determinism.golden_manifest import Manifest, ManifestError, Question, check_operators, read
from studies.determinism.golden_operators import OPERATORS
from suite.measure import Context, Result


def verify(ctx: Context, *, device: str, questions: str) -> Result:
    """Raises ManifestError where the manifest is not the one asked about, or not this code's."""
    manifest = read()
    if manifest.digest != questions:
        raise ManifestError(f"the manifest changed since the run began: {manifest.digest[:12]} is not {questions[:12]}; run again")
    check_operators(manifest, OPERATORS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other on a busy machine
    try:
        records, kernels = _recorded(manifest, ctx.device) if device == "cuda" else ([asked(q, "cpu") for q in manifest.questions], [])
    finally:
        torch.set_num_threads(before)
    return Result(records={"golden": records, "kernels": kernels}, facts={"questions": questions}, metrics=_summary(records))


def _recorded(manifest: Manifest, device: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """On a GPU, with what was launched."""
    from kernels.exact.audit.record import record_compiles

    with record_compiles() as kernels:
        records = [asked(q, device) for q in manifest.questions]
    return records, list(kernels)


def asked(q: Question, device: str) -> dict[str, Any]:
    """One question on one device. What goes wrong inside an operator costs that question alone."""
    operator = OPERATORS[q.operator]
    inputs = operator.inputs(q.seed, **q.params)
    found = joined(inputs)
    if found != q.input_digest:
        raise ManifestError(f"the inputs of {q.name!r} are not the manifest's ({found[:12]}, it states {q.input_digest[:12]}): the Philox generator is broken here, "
                            "or the manifest is of other code; run tests/kernels/test_exact_elementwise.py")
    record = {"operator": q.operator, "case": q.case, "family": q.family, "input_digest": found, "output_digest": "", "equal": False, "error": ""}
    start = time.monotonic()
    try:
        y = outputs(operator, inputs, q.params, device)
    except Exception as error:  # an operator that does not run here is a result, and the others still have one
        traceback.print_exc()
        return record | {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    record |= {"output_digest": joined(y), "elements": sum(t.numel() for t in y), "seconds": round(time.monotonic() - start, 3)}
    record["equal"] = record["output_digest"] == q.output_digest
    return record if record["equal"] else record | distance(q, y, inputs, device)


def distance(q: Question, y: list[torch.Tensor], inputs: Any, device: str) -> dict[str, Any]:
    """How far a wrong output is off: from the CPU reference computed here (a CPU's own: from its second engine), where that is the golden one."""
    operator = OPERATORS[q.operator]
    if device == "cpu" and operator.second is None:
        return {"note": "this CPU's own reference differs, so there is nothing here to measure the distance to"}
    expected = outputs(operator, inputs, q.params, second=device == "cpu")
    if joined(expected) != q.output_digest:
        return {"note": f"the {'second engine of this CPU' if device == 'cpu' else 'CPU reference of this host'} differs from the manifest too"}
    if [(t.shape, t.dtype) for t in y] != [(t.shape, t.dtype) for t in expected]:
        return {"note": f"shapes or dtypes differ: {[tuple(t.shape) for t in y]}, and the manifest's are {[tuple(t.shape) for t in expected]}"}
    found = [_compared(a, b) for a, b in zip(y, expected, strict=True)]
    return {"differing": sum(n for n, _ in found), "max_ulp": max(ulp for _, ulp in found)}


def _compared(y: torch.Tensor, expected: torch.Tensor) -> tuple[int, int]:
    """(differing elements, largest distance): ULP between floats, the plain difference between integers."""
    if y.dtype.is_floating_point:
        d = compare(y, expected)
        return d.differing, d.max_ulp
    gap = (y.to(torch.int64) - expected.to(torch.int64)).abs()
    return int((gap != 0).sum()), int(gap.max()) if gap.numel() else 0


def _summary(records: list[dict[str, Any]]) -> dict[str, float]:
    names = list(dict.fromkeys(r["operator"] for r in records))
    equal = [n for n in names if all(r["equal"] for r in records if r["operator"] == n)]
    known = {"differing": [r["differing"] for r in records if "differing" in r], "max_ulp": [r["max_ulp"] for r in records if "max_ulp" in r]}
    complete = all(r["equal"] or "differing" in r for r in records)
    distances = {"differing": float(sum(known["differing"])), "max_ulp": float(max(known["max_ulp"], default=0))} if complete else {}
    return {"operators": float(len(names)), "equal_operators": float(len(equal)), "elements": float(sum(r.get("elements", 0) for r in records)), **distances}
