"""Measure functions that try to break the bits: few SMs, other engines, other architectures' code, a training step, the static audit.

    stress(ctx, sms=16)                 # every golden question under a green context of 16 SMs
    engines(ctx, products="b6")         # family B by engines that share no instruction
    foreign(ctx, architecture=80)       # sm_80 code on this GPU
    training(ctx, device="cuda", steps=3)
    audit(ctx, target="sm_80")          # no GPU: what the compiler made of every kernel

Each leaves one record a case with `equal`, beside what it is equal to: the golden manifest, the CPU oracle, or the stated rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from kernels.exact.digests import digest
from kernels.exact.philox import philox_bell
from studies.determinism.golden_manifest import read
from studies.determinism.verify_cells import asked
from suite.measure import Context, Result

# x [M, K] and w [N, K]: a decode shape, a prefill shape, and a ragged one
ENGINE_SHAPES = ((4, 192, 1024), (64, 256, 4096), (33, 65, 777))


def counted(records: list[dict], **facts: str) -> Result:
    """A result of `records`, each with `equal`."""
    return Result(records={"cases": records}, facts=facts, metrics={"cases": float(len(records)), "equal_cases": float(sum(r["equal"] for r in records))})


def stress(ctx: Context, *, sms: int) -> Result:
    """Every question of the golden manifest on `sms` SMs of the GPU (a multiple of 8), by a green context."""
    with few_sms(sms, ctx.device):
        records = [asked(q, ctx.device) for q in read().questions]
    return counted([{"operator": r["operator"], "case": r["case"], "equal": r["equal"], "error": r["error"]} for r in records])


@contextmanager
def few_sms(count: int, device: str) -> Iterator[None]:
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=count, device_id=torch.device(device).index or 0)
    context.set_context()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        context.pop_context()


def engines(ctx: Context, *, products: str) -> Result:
    """The integer family by every engine, against the oracle's first one, over shapes and dtypes."""
    from kernels.exact.integer_engines import engines as all_engines

    records = []
    for place, (m, n, k) in enumerate(ENGINE_SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            x_MK, w_NK = philox_bell((m, k), 40 + place, dtype), philox_bell((n, k), 50 + place, torch.bfloat16, scale_log2=-3)
            expected = None
            for name, engine in all_engines().items():
                y = digest(engine.run(x_MK, w_NK, products))
                expected = expected or y
                records.append({"engine": name, "device": engine.device, "m": m, "n": n, "k": k, "x": str(dtype).removeprefix("torch."), "digest": y, "equal": y == expected})
    return counted(records)


def foreign(ctx: Context, *, architecture: int) -> Result:
    """Every golden question with the kernels compiled for another architecture and loaded as its PTX; what was loaded is recorded."""
    from kernels.exact.foreign import foreign as foreign_code

    with foreign_code(architecture) as launches:
        records = [asked(q, ctx.device) for q in read().questions]
    loaded = sorted({(launch.kernel, launch.target, launch.ptx_sha256) for launch in launches})
    result = counted([{"operator": r["operator"], "case": r["case"], "equal": r["equal"], "error": r["error"]} for r in records], launches=str(len(launches)))
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
