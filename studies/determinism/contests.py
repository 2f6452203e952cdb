"""Timing contests of linear layers on a GPU: all variants of one shape in one process, interleaved.

    linear(ctx, rows=1, n=4096, k=4096, variants=["fma", "layercast", "copy"], rounds=12, launches=16, warmup_s=0.5, eager=False)

Weights and outputs rotate over sets that together exceed the L2 many times, each launch of a variant is one CUDA graph over its sets, and
outputs are poisoned and rechecked between rounds: the exact families bit for bit against their CPU oracles, the others within the error of
their arithmetic. The floors: a decode step must read 2 bytes a weight (LayerCast as written moves 10: read 2, write 4, read 4); prefill
does 2MNK flops. The exact families and LayerCast read fp32 activations, the integer family's slicing of them included.
The compiled variants are what torch.compile makes of "upcast, then multiply, into this buffer" with its coordinate descent on; how many
kernels such a call launches is recorded, and no more is claimed of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kernels.exact.decode import pack_weight
from kernels.exact.integer import linear_integer, linear_integer_ref, prepare_integer
from kernels.exact.linear import DECODE_TOKENS, linear_fma, linear_fma_ref
from kernels.exact.philox import philox_bell, philox_uniform
from studies.determinism.witness import kernels_launched
from suite.measure import Context, Result
from suite.timing import ContestResult, Variant, cache_bytes, contest, copy_variant

BLOCK_ROWS = 128  # of Philox numbers in a weight; the others are these, rolled
X_BLOCK_ROWS = 64  # the same of activations
# Weights rotate over 8 times the L2, above the 3 that suffice for plain loads: fma loads them evict-first, which could let lines
# of an earlier set stay. Measured on an H200: the times at 4 and at 8 times the L2 agree within 1%.
ROTATED_CACHES = 8
CHECKED_ROWS = 64  # outputs checked against the CPU oracle: all columns of the first rows, or all rows of the first columns
# moved per weight at the floor of each variant; the integer family's prefill reads three bytes of digits
BYTES = {"fma": 2, "integer": 2, "integer-b9": 2, "layercast": 10, "layercast_compiled": 2, "sgemm": 4, "bf16": 2, "bf16_padded": 2, "bf16_compiled": 2}
EXACT = {"fma": linear_fma_ref, "integer": linear_integer_ref, "integer-b9": partial(linear_integer_ref, products="b9")}
PADDED_ROWS = 16
# Relative to |x||w| per output: bf16 activations and outputs round at 2^-9 each; fp32 sums of K terms in any order err by K * 2^-24.
BF16_ERROR = 2.0**-8
FP32_TERM_ERROR = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Operands:
    """One shape's operands on the device: rotated weights, one activation, and the oracle for a corner of the result."""

    x_MK: torch.Tensor  # fp32, of 24 significant bits: sums of K products do not fit fp32, so their order shows, and three digits are in use
    weights_NK: tuple[torch.Tensor, ...]
    expected: dict[str, torch.Tensor]  # each exact family's, of the first weight: rows [:CHECKED_ROWS], columns [:CHECKED_ROWS]
    exact: torch.Tensor  # float64 product of the same corner
    scale: torch.Tensor  # |x||w| of the same corner
    size: tuple[int, int, int] = field(default=(0, 0, 0))


def make_operands(rows: int, n: int, k: int, device: str, seed: int) -> Operands:
    """Bell-shaped; both operands are a block of Philox rows rolled along K, block by block, and weights set by set: other bits at every address."""
    corner_x = activations(min(rows, X_BLOCK_ROWS), k, seed)
    block_w = philox_bell((min(n, BLOCK_ROWS), k), seed + 1, torch.bfloat16, scale_log2=-5)
    x_MK, w_NK = rolled(corner_x.to(device), rows), rolled(block_w.to(device), n)
    corner_x, corner_w = corner_x[:CHECKED_ROWS], block_w[:CHECKED_ROWS]
    expected = {name: reference(corner_x, corner_w) for name, reference in EXACT.items()}
    scale = corner_x.abs() @ corner_w.float().abs().T
    sets = -(-ROTATED_CACHES * cache_bytes(device) // (2 * n * k + 4 * rows * n))
    return Operands(x_MK=x_MK, weights_NK=tuple(w_NK.roll(i, dims=1) for i in range(sets)), expected=expected, exact=corner_x.double() @ corner_w.double().T, scale=scale, size=(rows, n, k))


def activations(rows: int, k: int, seed: int) -> torch.Tensor:
    """A bell on a grid of 2^-16 plus uniform numbers below that grid, in one IEEE addition: fp32 with all of its bits in use."""
    low_MK = philox_uniform((rows, k), seed, torch.float32, stream=1)
    return philox_bell((rows, k), seed) + torch.ldexp(low_MK, torch.tensor(-16))


def rolled(block_RK: torch.Tensor, rows: int) -> torch.Tensor:
    """`rows` rows: the block, then the block rolled along K by 7 more each time."""
    return torch.cat([block_RK.roll(7 * i, dims=1) for i in range(-(-rows // len(block_RK)))])[:rows]


def linear(ctx: Context, *, rows: int, n: int, k: int, variants: list[str], rounds: int, launches: int, warmup_s: float, eager: bool) -> Result:
    """One contest; times, log ratios to fma, share of the copy bandwidth, errors and the noise floor. `eager`: also launched call by call."""
    operands = make_operands(rows, n, k, ctx.device, seed=100 + ctx.seed)
    errors: dict[str, float] = {}
    entered = [copy_of(operands, ctx.device) if v == "copy" else variant_of(v, operands, errors) for v in variants]
    kernels = {f"kernels_{v.name}": str(_kernels(v)) for v in entered if v.name.endswith("_compiled") and ctx.device != "cpu"}
    result = contest(entered, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, mode="graph", also_eager=eager, control=variants[0])
    return Result(metrics=metrics_of(result, variants, operands) | errors, arrays=result.to_arrays(), records={"conditions": result.conditions, "telemetry": result.telemetry},
                  facts={"throttle": ",".join(result.throttle_reasons) or "none", "sets": str(len(operands.weights_NK)), **kernels})


def _kernels(variant: Variant) -> int:
    """Launches of one call, the compiling one left out."""
    variant.calls[0]()
    return kernels_launched(variant.calls[0])


def prepare(name: str, w_NK: torch.Tensor, rows: int) -> object:
    """The weight as the variant stores it (outside the timed region: done once, at load)."""
    if name.startswith("integer"):
        return prepare_integer(w_NK, products="b9" if name.endswith("b9") else "b6", prefill=rows > DECODE_TOKENS)
    return {"fma": pack_weight, "sgemm": torch.Tensor.float}.get(name, lambda w: w)(w_NK)


def program(name: str, x_MK: torch.Tensor) -> Callable:
    """(weight, out) -> None: what one call of the variant computes. Outputs are buffers: a graph replay writes where it was captured."""
    x32_MK, x_MK = x_MK, x_MK.to(torch.bfloat16)
    padded_MK = torch.nn.functional.pad(x_MK, (0, 0, 0, max(0, PADDED_ROWS - len(x_MK))))
    return {
        "fma": lambda w, out: linear_fma(x32_MK, w, out=out),  # fp32 activations, as LayerCast has them
        "integer": lambda w, out: linear_integer(x32_MK, w, out=out),
        "integer-b9": lambda w, out: linear_integer(x32_MK, w, out=out),
        "layercast": lambda w, out: torch.mm(x32_MK, w.to(torch.float32).t(), out=out),
        "layercast_compiled": lambda w, out: _compiled()(x32_MK, w, out),
        "sgemm": lambda w, out: torch.mm(x32_MK, w.t(), out=out),
        "bf16": lambda w, out: torch.mm(x_MK, w.t(), out=out),
        "bf16_padded": lambda w, out: torch.mm(padded_MK, w.t(), out=out),
        "bf16_compiled": lambda w, out: _compiled()(x_MK, w, out),
    }[name]


def upcast_and_multiply(x_MK: torch.Tensor, w_NK: torch.Tensor, out_MN: torch.Tensor) -> None:
    out_MN.copy_(x_MK @ w_NK.to(x_MK.dtype).t())


@functools.cache
def _compiled() -> Callable:
    """`upcast_and_multiply` as torch.compile makes it. With coordinate descent on, inductor writes a product with one row as multiply and sum."""
    return torch.compile(upcast_and_multiply, dynamic=False, options={"coordinate_descent_tuning": True})


def variant_of(name: str, operands: Operands, errors: dict[str, float]) -> Variant:
    """One program over its own rotated weights, with its own output buffers and check."""
    rows, n, k = operands.size
    sets = len(operands.weights_NK)
    weights = [prepare(name, w, rows) for w in operands.weights_NK[: max(2, sets // 2 + 1) if name == "sgemm" else sets]]  # fp32: half as many exceed the L2 as far
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    outputs = [torch.empty((max(rows, PADDED_ROWS) if name == "bf16_padded" else rows, n), dtype=dtype, device=operands.x_MK.device) for _ in weights]
    run = program(name, operands.x_MK)

    def poison() -> None:
        for y in outputs:
            y.fill_(float("nan"))

    return Variant(name=name, calls=tuple(partial(run, w, out) for w, out in zip(weights, outputs, strict=True)), check=lambda: check(name, [y[:rows] for y in outputs], operands, errors), poison=poison,
                   bytes_moved=BYTES[name] * n * k + 2 * rows * k + 4 * rows * n, flops=2 * rows * n * k)


def check(name: str, outputs: list[torch.Tensor], operands: Operands, errors: dict[str, float]) -> None:
    """An exact family: equal in every bit to its CPU oracle; the others: within their error. Every element of every set is written."""
    for i, y in enumerate(outputs):
        assert not bool(torch.isnan(y).any()), f"{name} left elements of set {i} unwritten"
    corner = outputs[0][:CHECKED_ROWS, :CHECKED_ROWS].float().cpu()
    if name in ("fma", "integer", "sgemm"):
        errors[f"error_{name}"] = float(((corner.double() - operands.exact).abs() / operands.scale).mean())
    if name in EXACT:
        assert torch.equal(corner, operands.expected[name]), f"{name} differs from its CPU oracle"
        return
    k = operands.size[2]
    limit = operands.scale * (BF16_ERROR if name.startswith("bf16") else 0.0) + operands.scale * k * FP32_TERM_ERROR
    assert bool(((corner - operands.exact).abs() <= limit).all()), f"{name} is outside its error"


def copy_of(operands: Operands, device: str) -> Variant:
    """The ceiling: a copy of at least 128 MiB, counted read plus written."""
    _, n, k = operands.size
    return copy_variant(device, max(2 * n * k, 128 << 20))


def metrics_of(result: ContestResult, variants: list[str], operands: Operands) -> dict[str, float]:
    """Times in us, ln ratios to fma, and the share of copy bandwidth at which fma reads weights."""
    _, n, k = operands.size
    out = {f"{v}_us": result.median_s(v) * 1e6 for v in variants if v != "copy"}
    out |= {f"{v}_eager_us": result.median_s(f"{v} [eager]") * 1e6 for v in variants if v != "copy" and f"{v} [eager]" in result.names}
    out |= {f"log_ratio_{v}": result.log_ratio(v, "fma") for v in variants if v not in ("copy", "fma")}
    out |= {"log_control": result.control_log_ratio, "noise_floor": result.noise_floor}
    if "copy" in variants:
        out["copy_us"] = result.median_s("copy") * 1e6
        out["log_bandwidth_share"] = result.log_ratio("copy", "fma") + math.log(2 * n * k / result.bytes_moved["copy"])
    return out
