"""LoRA's products of a pack alone: our kernels against every other way to compute them, captured and eager, with the times that bytes and FLOPs allow.

    kernels(ctx, which="forward", d=3584, tokens=128, slots=32, rank=64, paths=["looped", "padded", "grouped"], rounds=6, launches=8, warmup_s=0.2)

One linear of d inputs and d outputs, `slots` adapters of one rank with `tokens` rows each. Forward: s = x A^T and y += scale s B^T. Backward: ds, dB, dA
and dx += ds A, gradients added in fp32; ours in two launches, as a layer's autograd runs it. Inputs rotate through more than three L2s. The byte time counts every tensor once, however often an implementation
reads it, at the bandwidth of a copy in the same contest: nothing can be faster than that. The FLOP time is at the dense peak of the data sheet.
Outputs accumulate, so a check compares directions (cosines) of the first and last adapter's part with a float64 product, after they were set to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.exact.philox import philox_bell
from kernels.lora.backward import grad_ax, grad_sb
from kernels.lora.paths import PATHS, Path
from kernels.lora.segments import Segments
from studies.plora.measures.flops import peak_flops
from suite.measure import Context, Result
from suite.timing import ContestResult, Variant, cache_bytes, contest, copy_variant, rotations_needed

__all__ = ["WAYS", "kernels", "operands_of", "program", "work"]

WAYS = ("forward", "backward")
OURS, LOOPED, EAGER = "triton", "looped", "looped [eager]"
SCALE = 0.5
LEAST_COSINE = 0.999  # bf16 operands and sums of d terms in fp32 give 0.99998; a wrong tile of a slot gives less than 0.99
COPY_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Operands:
    """One set. Legend as in kernels.lora: M rows, K inputs, N outputs, T rank rows; K = N = d. y_MN: the output, or dy of the backward pass."""

    x_MK: torch.Tensor
    y_MN: torch.Tensor
    a_TK: torch.Tensor
    b_TN: torch.Tensor
    s_MR: torch.Tensor
    dx_MK: torch.Tensor
    grad_a_TK: torch.Tensor
    grad_b_TN: torch.Tensor
    seg: Segments

    def outputs(self, which: str) -> list[torch.Tensor]:
        return [self.y_MN] if which == "forward" else [self.dx_MK, self.grad_a_TK, self.grad_b_TN]


def kernels(
    ctx: Context, *, which: str, d: int, tokens: int, slots: int, rank: int, paths: Sequence[str], rounds: int, launches: int, warmup_s: float,
) -> Result:  # fmt: skip
    """Record "variants": us and eager us of each path. Metrics are ln ratios of this process: over the captured and the eager loop, and of what bytes and FLOPs allow."""
    if which not in WAYS:
        raise ValueError(f"a way is one of {WAYS}, got {which=}; choose one")
    cuda = ctx.device.startswith("cuda")
    moved, flops = work(which, d=d, rows=slots * tokens, slots=slots, rank=rank)
    operands = operands_of(ctx, which, d, tokens, slots, rank, sets=rotations_needed(moved, device=ctx.device) if cuda else 2)
    names = list(dict.fromkeys((OURS, LOOPED, *paths)))
    made = [_variant(name, operands, which, moved, flops) for name in names]
    copied = copy_variant(ctx.device, COPY_BYTES if cuda else 2**20)
    result = contest([*made, copied], device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, also_eager=cuda, control=OURS)
    lines = [{"path": n, "us": result.median_s(n) * 1e6, "eager_us": result.median_s(f"{n} [eager]") * 1e6 if cuda else None, "log_speedup": result.log_ratio(LOOPED, n)} for n in names]
    return Result(metrics=_summary(ctx, result, moved, flops), arrays=result.to_arrays(), records={"variants": lines, "conditions": result.conditions, "telemetry": result.telemetry},
                  facts={"throttle": ",".join(result.throttle_reasons) or "none", "bytes": str(moved), "flops": str(flops)})  # fmt: skip


def work(which: str, *, d: int, rows: int, slots: int, rank: int) -> tuple[int, int]:
    """(bytes, FLOPs) that no implementation can do without: bf16 operands read once, outputs read and written, fp32 gradients read and written."""
    matrices = slots * rank * d
    if which == "forward":
        return 2 * (rows * d + 2 * matrices + 2 * rows * rank + 2 * rows * d), 4 * rows * rank * d  # x, a and b, s out and in, y in and out
    return 2 * (2 * rows * d + 2 * matrices + 3 * rows * rank + 2 * rows * d) + 16 * matrices, 8 * rows * rank * d  # dy and x, a and b, s, ds out and in, dx; dA and dB


def operands_of(ctx: Context, which: str, d: int, tokens: int, slots: int, rank: int, *, sets: int) -> list[Operands]:
    """Sets are one set with its columns in another order: all are read from memory, none is found in a cache."""
    dtype = torch.bfloat16 if ctx.device.startswith("cuda") else torch.float32
    rows, ranks = slots * tokens, slots * rank

    def bell(shape: tuple[int, int], stream: int) -> torch.Tensor:
        block = philox_bell((min(shape[0], 128), shape[1]), 900 + stream + ctx.seed, dtype).to(ctx.device)
        return torch.cat([block.roll(7 * i, dims=1) for i in range(-(-shape[0] // len(block)))])[: shape[0]].contiguous()

    back = which == "backward"
    x, y, a, b, s = (bell(shape, i) for i, shape in enumerate(((rows, d), (rows, d), (ranks, d), (ranks, d), (rows, rank))))
    seg = Segments.of(rows=[tokens] * slots, ranks=[rank] * slots, scales=[SCALE] * slots, device=ctx.device)
    zeros = lambda of, *shape, kind=dtype: torch.zeros(shape if of else (0,), dtype=kind, device=ctx.device)  # noqa: E731
    turned = lambda t, i: t.roll(13 * i, dims=1)  # noqa: E731
    return [
        Operands(x_MK=turned(x, i), y_MN=turned(y, i) if back else zeros(True, rows, d), a_TK=turned(a, i), b_TN=turned(b, i), s_MR=s.clone(), dx_MK=zeros(back, rows, d),
                 grad_a_TK=zeros(back, ranks, d, kind=torch.float32), grad_b_TN=zeros(back, ranks, d, kind=torch.float32), seg=seg)
        for i in range(sets)
    ]  # fmt: skip


def _forward(path: Path, o: Operands) -> None:
    path.expand(o.y_MN, path.shrink(o.x_MK, o.a_TK, o.seg), o.b_TN, o.seg)


def _ours_backward(path: Path, o: Operands) -> None:
    """dy is read by one launch, and x by another."""
    ds_MR = grad_sb(o.y_MN, o.s_MR, o.b_TN, o.seg, o.grad_b_TN)
    grad_ax(o.dx_MK, ds_MR, o.x_MK, o.a_TK, o.seg, o.grad_a_TK)


def _backward(path: Path, o: Operands) -> None:
    ds_MR = path.grad_s(o.y_MN, o.b_TN, o.seg)
    path.grad_b(o.s_MR, o.y_MN, o.seg, o.grad_b_TN)
    path.grad_a(ds_MR, o.x_MK, o.seg, o.grad_a_TK)
    path.grad_x(o.dx_MK, ds_MR, o.a_TK, o.seg)


def program(name: str, which: str) -> Callable[[Operands], None]:
    """The products of a path on one set."""
    run = _forward if which == "forward" else _ours_backward if name == OURS else _backward
    return partial(run, PATHS[name])


def _variant(name: str, sets: Sequence[Operands], which: str, moved: int, flops: int) -> Variant:
    run = program(name, which)

    def poison() -> None:
        for o in sets:
            for t in o.outputs(which):
                t.zero_()

    def check() -> None:
        for i, o in enumerate(sets):
            assert all(bool(t.any()) for t in o.outputs(which)), f"{name} wrote nothing to an output of set {i}"
        _check(name, sets[0], which)

    return Variant(name=name, calls=tuple(partial(run, o) for o in sets), check=check, poison=poison, bytes_moved=moved, flops=flops)


def _check(name: str, o: Operands, which: str) -> None:
    """Of the first and the last adapter."""
    bounds = o.seg.bounds()
    for slot in (0, len(bounds) - 1):
        for what, found, want in _expected(o, which, *bounds[slot]):
            cosine = torch.nn.functional.cosine_similarity(found.double().flatten(), want.flatten(), dim=0, eps=1e-300).item()
            assert cosine >= LEAST_COSINE, f"{what} of {name}, adapter {slot}, has a cosine of {cosine:.5f} with the exact one, at least {LEAST_COSINE} is asked for"


def _expected(o: Operands, which: str, m: slice, t: slice) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, found, exact in float64 but for a positive factor)."""
    a, b, x, y = (w.double() for w in (o.a_TK[t], o.b_TN[t], o.x_MK[m], o.y_MN[m]))
    if which == "forward":
        return [("y", y, (x @ a.T) @ b)]
    ds = y @ b.T
    return [("dx", o.dx_MK[m], ds @ a), ("dB", o.grad_b_TN[t], o.s_MR[m].double().T @ y), ("dA", o.grad_a_TK[t], ds.T @ x)]


def _summary(ctx: Context, result: ContestResult, moved: int, flops: int) -> dict[str, float]:
    ours = result.median_s(OURS)
    byte_s = moved / (result.gbps("copy") * 1e9)
    peak = peak_flops(torch.cuda.get_device_name(ctx.device)) if ctx.device.startswith("cuda") else None
    flop_s = flops / peak if peak else 0.0
    out = {"kernel_us": ours * 1e6, "log_kernel_speedup": result.log_ratio(LOOPED, OURS), "log_kernel_cap_share": math.log(byte_s / ours), "log_kernel_cap": math.log(result.median_s(LOOPED) / byte_s),
           "log_kernel_roofline_share": math.log(max(byte_s, flop_s) / ours), "over_cache": moved / cache_bytes(ctx.device), "copy_gbps": result.gbps("copy")}  # fmt: skip
    out |= {"log_kernel_over_eager": result.log_ratio(EAGER, OURS)} if EAGER in result.names else {}
    return out | {"log_control": result.control_log_ratio, "noise_floor": result.noise_floor}
