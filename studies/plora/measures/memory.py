"""The most adapters that a card of a given memory trains, foretold by the memory model and found by trying.

    largest(ctx, model="3b", tokens=512, rank=64, rows=1, limits_bytes=[24_000_000_000, 40_000_000_000], answer_tokens=16)

The process may allocate no more than the limit of its GPU (the paper's cards have 24 and 40 GB; 141 never bind for small models). Packs of k equal slots are
built, captured and stepped; k grows from the prediction until one does not fit, or shrinks until one does. The model's calibration is the record of the input
cell "memory" (studies.plora.measures.planning:memory_model), whose peaks had no such limit; without the input shapes are counted as they are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from studies.plora.adapter import SlotShape
from studies.plora.measures.subjects import Subject, subject_of, uniform
from studies.plora.planning.memory import AS_COUNTED, Calibration, largest_k
from suite.measure import Context, Result

__all__ = ["largest", "most"]

NO_LIMIT = 2**60  # bytes: trying, not the model, says what fits
TRIED = 2  # micro-steps, so that the optimizer's states and every lazy workspace are there


def largest(ctx: Context, *, model: str, tokens: int, rank: int, rows: int, limits_bytes: Sequence[int], answer_tokens: int) -> Result:
    """`largest_k_gap`: the greatest |foretold - found| over limits. Record "largest": both by limit; "tried": every k with its peak, null where it did not fit.

    Raises ValueError without a GPU.
    """
    if not ctx.device.startswith("cuda"):
        raise ValueError(f"a limit on memory is a GPU's, got {ctx.device=}; run it on a CUDA device")
    subject = subject_of(ctx, model, tokens=tokens, answer_tokens=answer_tokens)
    calibration = Calibration(**ctx.input_record("memory", "calibration")) if "memory" in ctx.inputs else AS_COUNTED
    found, tried = [], []
    for limit in limits_bytes:
        start = largest_k(subject.config, SlotShape(rank=rank, rows=rows), tokens=tokens, limit_bytes=limit, answer_tokens=answer_tokens, calibration=calibration)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(ctx.device).total_memory), ctx.device)
        try:
            peaks: dict[int, int | None] = {}
            k = most(start, lambda k, peaks=peaks: _fits(ctx, subject, k, rank, rows, peaks))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, ctx.device)
        found.append({"tokens": tokens, "slot": [rank, rows], "limit_bytes": limit, "k": k, "predicted": start})
        tried += [{"limit_bytes": limit, "k": k, "peak_bytes": peak} for k, peak in sorted(peaks.items())]
    return Result(metrics={"largest_k_gap": float(max(abs(x["predicted"] - x["k"]) for x in found))}, records={"largest": found, "tried": tried})


def most(start: int, fits: Callable[[int], bool]) -> int:
    """The largest k that fits, 0 where not one does: from `start` up while it fits, else down, in steps that double until it is bracketed."""
    low, high, step, k = 0, None, 1, max(1, start)
    while high is None or high - low > 1:
        if fits(k):
            low = k
        else:
            high = k
        if high is None:
            k = low + step
        else:
            k = max(1, high - step) if low == 0 else (low + high) // 2
        step *= 2
    return low


def _fits(ctx: Context, subject: Subject, k: int, rank: int, rows: int, peaks: dict[int, int | None]) -> bool:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ctx.device)
    try:
        pack = subject.pack(uniform(subject.tokens, slots=k, rank=rank, rows=rows), memory=NO_LIMIT)
        pack.advance(TRIED)
        peaks[k] = torch.cuda.max_memory_allocated(ctx.device)
    except torch.OutOfMemoryError:
        peaks[k] = None
    return peaks[k] is not None
