"""Measure functions that try to break the bits: few SMs, other engines, other architectures' code, a training step, the static audit.

    stress(ctx, sms=[8, 64, 128])       # every golden question under green contexts of so many SMs
    engines(ctx, products="b6")         # family B by engines that share no instruction
    foreign(ctx, architecture=80)       # sm_80 code on this GPU
    training(ctx, device="cuda", steps=3)
    audit(ctx, target="sm_80")          # no GPU: what the compiler made of every kernel

Each leaves one record a case with `equal`, beside what it is equal to: the golden manifest, the reference engine, or the stated rules.
Cases that ran on a GPU say how many kernels they launched: one that launched none is evidence of nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kernels.exact.digests import digest
from kernels.exact.philox import philox_bell
from studies.determinism.golden_manifest import read
from studies.determinism.verify_cells import asked
from studies.determinism.witness import distinct_sms, triton_launches
from suite.measure import Context, Result

# x [M, K] and w [N, K]: a decode shape, a prefill shape, and a ragged one
ENGINE_SHAPES = ((4, 192, 1024), (64, 256, 4096), (33, 65, 777))
REFERENCE = "cpu_float64"  # the engine that the others are compared with
ENGINES = ("cpu_groups", "cpu_int64", "cpu_c", "triton_prefill", "triton_decode", "cublas_int8", "fp64_tensor_cores", "dp4a")


def counted(records: list[dict], **facts: str) -> Result:
    """A result of `records`, each with `equal`; those with `skipped` were no cases."""
    cases = [r for r in records if not r.get("skipped")]
    return Result(records={"cases": records}, facts=facts, metrics={"cases": float(len(cases)), "equal_cases": float(sum(r["equal"] for r in cases))})


def golden_cases(device: str, launched: list, **fields: Any) -> list[dict[str, Any]]:
    """Every golden question on the device, one record each; `launched` grows with each kernel that is launched."""
    records = []
    for q in read().questions:
        before = len(launched)
        r = asked(q, device)
        records.append({"operator": r["operator"], "case": r["case"], "equal": r["equal"], "error": r["error"], "launches": len(launched) - before, **fields})
    return records


def stress(ctx: Context, *, sms: list[int]) -> Result:
    """Every question of the golden manifest on so many SMs of the GPU (multiples of 8), by green contexts.

    Record "limits": on how many SMs the programs of a witness ran. Raises AssertionError where they were more than asked for.
    """
    records, limits = [], []
    contexts = {count: green_context(count, ctx.device) for count in sms}  # all live to the end: kernels loaded under one serve the others
    for count, context in contexts.items():
        with few_sms(context), triton_launches() as launched:
            seen = distinct_sms(ctx.device)
            assert 1 <= seen <= count, f"{seen} SMs ran programs where {count} were asked for: the limit does not hold"
            limits.append({"sms": count, "seen": seen})
            records += golden_cases(ctx.device, launched, sms=count)
    result = counted(records, seen=",".join(str(limit["seen"]) for limit in limits))
    return replace(result, records={**result.records, "limits": limits})


def green_context(count: int, device: str) -> Any:
    from torch.cuda.green_contexts import GreenContext

    return GreenContext.create(num_sms=count, device_id=torch.device(device).index or 0)


@contextmanager
def few_sms(context: Any) -> Iterator[None]:
    """What is launched inside runs on the context's SMs."""
    context.set_context()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        context.pop_context()


def engines(ctx: Context, *, products: str) -> Result:
    """The integer family by every engine, against the reference engine on the CPU, over shapes and dtypes. Facts name those that ran."""
    from kernels.exact.integer_engines import engines as all_engines

    found, records = dict(all_engines()), []
    reference = found.pop(REFERENCE)
    for place, (m, n, k) in enumerate(ENGINE_SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            x_MK, w_NK = philox_bell((m, k), 40 + place, dtype), philox_bell((n, k), 50 + place, torch.bfloat16, scale_log2=-3)
            expected = digest(reference.run(x_MK, w_NK, products))
            at = {"m": m, "n": n, "k": k, "x": str(dtype).removeprefix("torch."), "reference": REFERENCE}
            for name, engine in found.items():
                y, error = _digest_of(lambda engine=engine: engine.run(x_MK, w_NK, products))
                records.append({"engine": name, "device": engine.device, **at, "digest": y, "equal": y == expected, "error": error})
    ran = [name for name in found if not any(r["error"] for r in records if r["engine"] == name)]
    missing = [name for name in dict.fromkeys([*ENGINES, *found]) if name not in ran]
    return counted(records, reference=REFERENCE, engines=",".join(ran), missing=",".join(missing) or "none")


def _digest_of(call: Callable[[], torch.Tensor]) -> tuple[str, str]:
    """(digest, "") or ("", what went wrong): an engine that does not run here is a case that is not equal, and the others still have one."""
    try:
        return digest(call()), ""
    except Exception as error:
        traceback.print_exc()
        return "", f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def foreign(ctx: Context, *, architecture: int) -> Result:
    """Every golden question with the kernels compiled for another architecture and loaded as its PTX; what was loaded is recorded."""
    from kernels.exact.foreign import foreign as foreign_code

    with foreign_code(architecture) as launches:
        records = golden_cases(ctx.device, launches)
    loaded = sorted({(launch.kernel, launch.target, launch.ptx_sha256) for launch in launches})
    result = counted(records, launches=str(len(launches)))
    return replace(result, records={**result.records, "loaded": [{"kernel": k, "target": t, "ptx_sha256": d} for k, t, d in loaded]})


def training(ctx: Context, *, device: str, steps: int) -> Result:
    """Digests of the loss, every gradient, parameter and optimizer state after each step of the small model."""
    from studies.models import training as t

    state = t.initial_state(t.SMALL, seed=1, device=ctx.device)
    ids_BT = t.token_batch(t.SMALL, batch=2, tokens=64, seed=2).to(ctx.device)
    found = t.training_digests(state, ids_BT, t.cpu_operators() if ctx.device == "cpu" else t.gpu_operators(), steps=steps)
    return Result(records={"digests": found}, facts={"digest": t.evidence_digest(found)}, metrics={"cases": float(len(found))})


def audit(ctx: Context, *, target: str) -> Result:
    """Every kernel of the catalogue compiled for `target` and held to the rules; needs no GPU and no other card."""
    from kernels.exact.audit.catalogue import catalogue
    from kernels.exact.audit.check import audit as checked

    records = []
    for specimen in catalogue():
        if target not in specimen.targets:
            records.append({"kernel": specimen.name, "equal": True, "skipped": "not built for this target", "problems": []})
            continue
        result = checked(specimen, target)
        records.append({"kernel": specimen.name, "equal": not result.problems, "problems": list(result.problems), **{k: v for k, v in result.facts.items()}})
    return counted(records, target=target)
