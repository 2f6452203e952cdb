"""Timing contests of single products on a GPU: all recipes of one shape in one process, interleaved, checked against the emulation.

    crossover(ctx, m=8192, k=3456, n=512, which="forward", recipes=["rowwise-fast"], backends=["triton", "torch"], fused=[], rounds=6, launches=8, warmup_s=0.3)
    fused_quantise(ctx, m=65536, k=4096, norm="blocknorm", activation="hardswish", granularity="row", keep=False, rounds=12, launches=8, warmup_s=0.5)

What is in a variant's time, from operands in bf16 as training stores them (a product that reads a transpose gets it untransposed):

    bf16                 torch's matmul                    whole      both operands quantised, then the product: what a training step pays
    product              the product of operands that are  frozen     the activation quantised, a weight that was before: what serving pays
                         quantised already                 (forward only)
    norm+bf16 and fused  (forward only) norm and activation in front: compiled by torch and then bf16; the fused kernel, the weight quantised, the product

Operands and outputs rotate over sets beyond three L2s; scratch memory between a variant's kernels does not, as in a model. Numbers are bell-shaped,
the same for time and error. Ratios are of one process; what claims read comes from five (suite.stats). On a CPU there is nothing to time here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.fp8.autograd import backends as using
from kernels.fp8.autograd import product, quantised
from kernels.fp8.epilogue import FEATURES, activate_ref, normalise_ref
from kernels.fp8.gemm import unsupported
from kernels.fp8.norm_quantise import norm_quantise
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import GemmRecipe, OperandRecipe, gemm
from studies.loka.measures.assembler import one_assembler
from studies.loka.measures.contest_inputs import Sink, bell_rows, compiled_norm, snr_db
from studies.loka.site import Gemm, Site
from suite.measure import Context, Result
from suite.timing import ContestResult, Variant, contest, copy_variant, rotations_needed

__all__ = ["Entry", "Operands", "conditions", "crossover", "entered", "fused_quantise", "least_db", "line_of", "make_operands", "variant_of"]

BF16 = torch.bfloat16
CHECKED = 64  # rows and columns of the corner that is compared
COPY_BYTES = 128 << 20
# Hopper's accumulator at C = 4096 (kernels.fp8.emulate: 50 dB for zero-mean sums) and an output in bf16 (57 dB), with room; without promotion the
# lost bits grow with C, at most 6 dB a doubling.
LEAST_DB = 44.0
FUSED_DB = 44.0  # sums of a norm in another order round a few numbers to FP8's neighbour


def least_db(recipe: GemmRecipe, c: int) -> float:
    """SQNR that a product must keep against its emulation."""
    return LEAST_DB - (20 * math.log10(c / 4096) if recipe.fast_accum and c > 4096 else 0.0)


# ---- one product ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Operands:
    """One product's operands, as stored, on the device: `sets` of (a, b), their transposition, and the corner of the result in float64."""

    sets: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    transposed: tuple[bool, bool]
    size: Gemm
    which: str

    @functools.cached_property
    def exact(self) -> torch.Tensor:
        """[CHECKED, CHECKED] of the first set's product (of a batch, the first one), unrounded."""
        a, b = (corner(x, columns=None).double() for x in self.read(0))
        return a @ b.T

    def read(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(a_RC, b_SC) of a set, batch axes in front."""
        return tuple(x.mT if t else x for x, t in zip(self.sets[i], self.transposed, strict=True))

    def emulated(self, recipe: GemmRecipe) -> torch.Tensor:
        """The corner from operands in `recipe`, summed in float64."""
        if not recipe.is_fp8:
            return self.exact
        a, b = (corner(quantise_ref(x, o).dequantise(), columns=None).double() for x, o in zip(self.read(0), (recipe.a, recipe.b), strict=True))
        return a @ b.T


def corner(x: torch.Tensor, columns: int | None = CHECKED) -> torch.Tensor:
    """Of a batch the first matrix; its first CHECKED rows, and so many columns."""
    return x[(0,) * (x.ndim - 2)][:CHECKED, :columns]


def make_operands(site: Site, which: str, device: str, seed: int, sets: int = 0) -> Operands:
    """Sets are the first one's R and S rolled: the same numbers in other places, and so the results. sets: how many, 0 for all that a contest rotates."""
    size, (batch, m, n, k) = site.gemm(which), (site.batch, site.m, site.n, site.k)
    stored = {"forward": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[which]
    first = [bell_rows(batch * rows, columns, seed + i, device).view(*((batch,) if batch > 1 else ()), rows, columns) for i, (rows, columns) in enumerate(stored)]
    count = sets or rotations_needed(batch * (size.r * size.c + size.s * size.c + 2 * size.r * size.s), device=device)
    transposed = {"forward": (False, False), "dgrad": (False, True), "wgrad": (True, True)}[which]
    rolled = tuple(tuple(x.roll(13 * i, dims=-1 if t else -2) for x, t in zip(first, transposed, strict=True)) for i in range(count))
    return Operands(sets=rolled, transposed=transposed, size=size, which=which)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A variant of `crossover`, with what it is compared with."""

    work: str  # of the module's docstring
    recipe: str = "bf16"
    backend: str = ""
    base: str = "bf16"

    @property
    def name(self) -> str:
        return " ".join(p for p in (self.work, self.recipe if self.backend else "", self.backend) if p)


@one_assembler()
def crossover(
    ctx: Context, *, m: int, k: int, n: int, which: str, recipes: Sequence[str], backends: Sequence[str], fused: Sequence[str], rounds: int, launches: int,
    warmup_s: float, norm: str = "blocknorm", activation: str = "hardswish", eager: bool = False,
) -> Result:  # fmt: skip
    """One shape and pass: times, speed-ups and errors by variant (record "variants"), and what cannot run and why (record "unsupported").

    eager: on a GPU time every variant launched call by call too, as who runs without graphs does (`eager_us`).
    """
    torch.compiler.reset()  # a worker runs many shapes: compiled functions of earlier cells would use up the limit of this one's
    operands = make_operands(Site(name="shape", op="linear", batch=1, m=m, n=n, k=k), which, ctx.device, seed=200 + ctx.seed)
    entries, refused = entered(operands, recipes, backends, fused if which == "forward" else (), ctx.device, norm=norm)
    errors: dict[str, float] = {}
    variants = [variant_of(e, operands, errors, norm, activation) for e in entries]
    result = contest(variants, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, also_eager=eager, control="bf16")
    lines = [line_of(e, result, operands, errors) for e in entries]
    best = lambda *works: max((x["log_speedup"] for x in lines if x["work"] in works), default=None)  # noqa: E731
    found = {"log_speedup_whole": best("whole"), "log_speedup_product": best("product"), "log_speedup_frozen": best("frozen"), "log_speedup_fused": best("fused")}
    return Result(
        metrics={"bf16_us": result.median_s("bf16") * 1e6, **{name: v for name, v in found.items() if v is not None}} | conditions(result),
        records={"variants": lines, "unsupported": refused, "conditions": result.conditions, "telemetry": result.telemetry},
        arrays=result.to_arrays(), facts={"throttle": ",".join(result.throttle_reasons) or "none", "sets": str(len(operands.sets))},
    )  # fmt: skip


def entered(
    operands: Operands, recipes: Sequence[str], backends: Sequence[str], fused: Sequence[str], device: str, *, works: Sequence[str] = ("whole", "product", "frozen"),
    norm: str = "none",
) -> tuple[list[Entry], list[dict]]:  # fmt: skip
    """What runs here, and a reason for each that does not."""
    entries, refused = [Entry(work="bf16")], []
    works = [w for w in works if w != "frozen" or operands.which == "forward"]
    wanted = [Entry(work=w, recipe=r, backend=b) for r in recipes for b in backends for w in works]
    if fused and norm == "blocknorm" and operands.size.c % FEATURES:
        refused.append({"variant": "norm+bf16", "why": f"blocks of {FEATURES} features do not divide {operands.size.c}; ask with another norm"})
    elif fused:
        entries.append(Entry(work="norm+bf16", base=""))
        wanted += [Entry(work="fused", recipe=r, backend=b, base="norm+bf16") for r in fused for b in backends]
    for e in wanted:
        why = unsupported(gemm(e.recipe), operands.size, device, backend=e.backend) or fused_refusal(e)
        if why:
            refused.append({"variant": e.name, "why": why})
        else:
            entries.append(e)
    return entries, refused


def fused_refusal(entry: Entry) -> str:
    granularity = gemm(entry.recipe).a.granularity
    return f"norm and quantising in one read have scales by row or block, not by {granularity}" if entry.work == "fused" and granularity not in ("row", "block") else ""


def program(entry: Entry, operands: Operands, norm: str, activation: str) -> Callable[[int], torch.Tensor]:
    """set -> the product of the variant, in bf16."""
    a_t, b_t = operands.transposed
    g, chosen = gemm(entry.recipe), {None: entry.backend} if entry.backend else {}

    def multiplied(a, b, *transposed: bool) -> torch.Tensor:
        with using(chosen):
            return product(a, b, g, BF16, a_transposed=transposed[0], b_transposed=transposed[1])

    if entry.work in ("bf16", "whole"):
        return lambda i: multiplied(*operands.sets[i], a_t, b_t)
    if entry.work == "norm+bf16":
        run = compiled_norm(norm, activation)
        return lambda i: multiplied(run(operands.sets[i][0]), operands.sets[i][1], False, False)
    if entry.work == "fused":
        return lambda i: multiplied(norm_quantise(operands.sets[i][0], norm, activation, g.a)[0], operands.sets[i][1], False, False)
    weights = [quantised(b, g.b, b_t) for _, b in operands.sets]
    if entry.work == "frozen":
        return lambda i: multiplied(operands.sets[i][0], weights[i], a_t, False)
    inputs = [quantised(a, g.a, a_t) for a, _ in operands.sets]
    return lambda i: multiplied(inputs[i], weights[i], False, False)


def variant_of(entry: Entry, operands: Operands, errors: dict[str, float], norm: str, activation: str) -> Variant:
    """The program over all sets; its outputs are checked for the emulation's numbers in the first set, and for its norm in every other."""
    g, size = gemm(entry.recipe), operands.size
    reference = operands
    if entry.work in ("norm+bf16", "fused"):
        rows, weight = operands.sets[0][0][: max(CHECKED, 128)], operands.sets[0][1]
        y = activate_ref(normalise_ref(rows, norm, None, None), activation).to(BF16)
        reference = Operands(sets=((y, weight),), transposed=operands.transposed, size=size, which=operands.which)
    want, exact = reference.emulated(g), reference.exact
    sink = Sink(len(operands.sets), program(entry, operands, norm, activation))

    def check() -> None:
        for y in sink.written():
            db = snr_db(corner(y), want)
            assert db >= least_db(g, size.c), f"{entry.name} is {db:.1f} dB from its emulation, at least {least_db(g, size.c):.1f} are asked for"
            errors[entry.name] = snr_db(corner(y), exact)

    return Variant(name=entry.name, calls=sink.calls, check=check, poison=sink.poison, flops=size.flops,
                   bytes_moved=size.batch * ((1 if entry.work == "product" else 2) * (size.r + size.s) * size.c + 2 * size.r * size.s))  # fmt: skip


def line_of(entry: Entry, result: ContestResult, operands: Operands, errors: dict[str, float]) -> dict:
    """A row of the record. log_speedup: ln(base's time / this one's), of this process."""
    line = {"variant": entry.name, "work": entry.work, "recipe": entry.recipe, "backend": entry.backend, "us": result.median_s(entry.name) * 1e6,
            "tflops": result.tflops(entry.name), "sqnr_db": errors[entry.name]}  # fmt: skip
    if (called := f"{entry.name} [eager]") in result.names:
        line["eager_us"] = result.median_s(called) * 1e6
    return line | ({"log_speedup": result.log_ratio(entry.base, entry.name)} if entry.backend else {"log_speedup": 0.0})


def conditions(result: ContestResult) -> dict[str, float]:
    return {"log_control": result.control_log_ratio, "noise_floor": result.noise_floor}


# ---- norm, activation and quantising -------------------------------------------------------------------------------------------


@one_assembler()
def fused_quantise(ctx: Context, *, m: int, k: int, norm: str, activation: str, granularity: str, keep: bool, rounds: int, launches: int, warmup_s: float) -> Result:
    """The fused kernel against a copy, against torch's compiler doing the same in one function, and against norm first, quantising after.

    `log_bandwidth_share` is ln of the kernel's bytes a second over the copy's: 2 bytes read and 1 written a number, and scales; with `keep`
    the bf16 result that a weight gradient in bf16 reads, 2 more.
    """
    torch.compiler.reset()
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    scales = 4 * m * (1 if granularity == "row" else -(-k // 128))
    moved = m * k * (5 if keep else 3) + scales
    x_MK = bell_rows(m, k, 300 + ctx.seed, ctx.device)
    sets = [x_MK, *(x_MK.roll(13 * i, dims=0) for i in range(1, rotations_needed(moved, device=ctx.device)))]
    y = activate_ref(normalise_ref(x_MK[:CHECKED], norm, None, None), activation).to(BF16)
    want = quantise_ref(y, operand).dequantise().double()
    run, run_whole = compiled_norm(norm, activation), compiled_norm(norm, activation, operand)
    programs = {
        "fused": lambda i: norm_quantise(sets[i], norm, activation, operand, keep=keep)[0],
        "compiled": lambda i: run_whole(sets[i]),
        "separate": lambda i: quantised(run(sets[i]), operand),
    }
    variants = [_quantising(name, call, len(sets), want, moved) for name, call in programs.items()] + [copy_variant(ctx.device, max(COPY_BYTES, moved // 8 * 4))]
    result = contest(variants, device=ctx.device, rounds=rounds, launches_per_round=launches, warmup_s=warmup_s, control="fused")
    share = result.log_ratio("copy", "fused") + math.log(moved / result.bytes_moved["copy"])
    metrics = {"fused_us": result.median_s("fused") * 1e6, "copy_gbps": result.gbps("copy"), "log_bandwidth_share": share} | conditions(result)
    metrics |= {f"log_speedup_over_{name}": result.log_ratio(name, "fused") for name in ("compiled", "separate")}
    return Result(metrics=metrics, arrays=result.to_arrays(), records={"conditions": result.conditions, "telemetry": result.telemetry},
                  facts={"throttle": ",".join(result.throttle_reasons) or "none", "sets": str(len(sets)), "bytes": str(moved)})  # fmt: skip


def _quantising(name: str, call: Callable[[int], Quantised], count: int, want: torch.Tensor, moved: int) -> Variant:
    sink = Sink(count, call)

    def check() -> None:
        for q in sink.written():
            db = snr_db(q.dequantise()[: len(want)], want)
            assert db >= FUSED_DB, f"{name} is {db:.1f} dB from the reference, at least {FUSED_DB} are asked for"

    return Variant(name=name, calls=sink.calls, check=check, poison=sink.poison, bytes_moved=moved)
