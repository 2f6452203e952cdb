"""Cells about the probe: is what it predicts what happens, does it stop rightly, what does it cost, and what would the paper's have said.

    validation(ctx, distribution="row-scaled", m=2048, k=512, n=256)
    stopping(ctx, distribution="row-scaled", recipe="tensorwise", m=512, k=256, n=128, draws=16, threshold_db=25.6, streams=100)
    overhead(ctx, model="wukong", size="5.6", mods="nobias+blocknorm+hardswish", batch=6144, every=100, pieces=6, warmup=10, compiled=True)
    surrogate_failures(ctx, m=4096, k=256, n=128, rows=512, draws=20, seeds=8)

On a CPU products are emulated, exact FP8 operands summed in float64; on a GPU the real kernels run. Timing needs a GPU; elsewhere `overhead` only shows that
it runs, and its numbers are of no use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

from kernels.fp8.emulate import product_ref
from kernels.fp8.recipes import GEMMS, GemmRecipe, gemm
from studies.loka.measures.site_times import built
from studies.loka.probing.distributions import DISTRIBUTIONS, draw
from studies.loka.probing.predict import predict
from studies.loka.probing.probe import Probe, bytes_read
from studies.loka.probing.readings import SiteReading
from studies.loka.probing.sequential import Stopping
from studies.loka.probing.sketch import sketch
from studies.loka.probing.surrogate import GaussianRows, MatrixNormal, mere, row_db, surrogate
from studies.loka.site import Site
from suite.measure import Context, Result

__all__ = ["CAP_DB", "overhead", "stopping", "surrogate_failures", "validation"]

CAP_DB = 40.0  # above it no recipe is in question, and rounding's bias counts, which predictions leave out
WEIGHT, GRADIENT = 0.05, 1e-4  # sizes of a weight and of a gradient; scales follow them, so results do not
LIMIT = 0.01  # of rows below the threshold
CHUNK = 64  # rows between two looks of `stopping`


def validation(ctx: Context, *, distribution: str, m: int, k: int, n: int) -> Result:
    """Predicted and true SQNR of rows, every FP8 recipe and pass of one layer. Record "recipes": one object each."""
    x, dy = draw(distribution, m, k, seed=ctx.seed).bfloat16(), (draw(distribution, m, n, seed=ctx.seed + 2) * GRADIENT).bfloat16()
    w = (draw("gaussian", n, k, seed=ctx.seed + 1) * WEIGHT).bfloat16()
    site = Site(name="layer:linear", op="linear", batch=1, m=m, n=n, k=k)
    reading = SiteReading(site=site, x=sketch(x, step=0, seed=ctx.seed), w=sketch(w, step=0, parameter=True), dy=sketch(dy, step=0, seed=ctx.seed))
    operands = {"forward": (x, w), "dgrad": (dy, w.mT.contiguous()), "wgrad": (dy.mT.contiguous(), x.mT.contiguous())}
    records = []
    for which, (a, b) in operands.items():
        exact = a.double() @ b.double().mT
        for recipe in (g for g in GEMMS.values() if g.is_fp8 and not g.fast_accum):
            p, true = predict(reading, which, recipe, seed=ctx.seed), row_db(exact, _product(a, b, recipe, ctx.device))
            records.append({"which": which, "recipe": recipe.name, "rows": len(true), **_compared(p.row_db, true)})
    of_rows = [abs(r["p01_gap_db"]) for r in records if r["which"] != "wgrad"]
    metrics = {"prediction_error_db": max(of_rows), "prediction_median_db": max(abs(r["median_gap_db"]) for r in records)}
    metrics |= {f"p01_db_{name}": next(r["true_p01_db"] for r in records if (r["which"], r["recipe"]) == ("forward", name)) for name in ("tensorwise", "rowwise")}
    return Result(metrics=metrics, records={"recipes": records}, kind=_kind(ctx.device))


def stopping(ctx: Context, *, distribution: str, recipe: str, m: int, k: int, n: int, draws: int, threshold_db: float, streams: int) -> Result:
    """Rows of one product in random order, `streams` times: when a verdict on "under 1% of rows are below the threshold" came, and how often it was wrong."""
    found = []
    for i in range(draws):
        a, b = draw(distribution, m, k, seed=ctx.seed + 10 * i).bfloat16(), (draw("gaussian", n, k, seed=ctx.seed + 1) * WEIGHT).bfloat16()
        found.append(row_db(a.double() @ b.double().mT, _product(a, b, gemm(recipe), ctx.device)))
    below = (torch.cat(found) < threshold_db).numpy()
    share, rng = float(below.mean()), np.random.default_rng(ctx.seed)
    outcomes = [_stopped(rng.permutation(below)) for _ in range(streams)]
    right = "safe" if share < LIMIT else "unsafe"
    wrong = sum(verdict not in (right, "undecided") for verdict, _ in outcomes)
    decided = [rows for verdict, rows in outcomes if verdict != "undecided"]
    metrics = {"stop_error_share": wrong / streams, "stop_decided_share": len(decided) / streams, "stop_rows": float(median(decided)) if decided else float(len(below))}
    records = [{"share_below": share, "rows": len(below), "truth": right, "low": low, "high": high} for low, high in [_bounds(below)]]
    return Result(metrics=metrics, records={"stream": records}, kind=_kind(ctx.device))


def surrogate_failures(ctx: Context, *, m: int, k: int, n: int, rows: int, draws: int, seeds: int) -> Result:
    """The paper's probe beside the truth and beside ours, by distribution (record "laws"), and both readings of MERE over seeds (record "mere")."""
    w = draw("gaussian", n, k, seed=ctx.seed + 1) * WEIGHT
    recipe, laws = gemm("tensorwise"), []
    for distribution in DISTRIBUTIONS:
        x = draw(distribution, m, k, seed=ctx.seed)
        exact, found = x.double() @ w.double().mT, _product(x, w, recipe, ctx.device)
        said = surrogate(GaussianRows(k).update(x), MatrixNormal(n, k).update(w), recipe, rows=rows, draws=draws, seed=ctx.seed)
        reading = SiteReading(site=Site(name="s", op="linear", batch=1, m=m, n=n, k=k), x=sketch(x, step=0, seed=ctx.seed), w=sketch(w, step=0, parameter=True))
        ours = predict(reading, "forward", recipe, seed=ctx.seed)
        laws.append({"distribution": distribution, "true_p01_db": float(torch.quantile(row_db(exact, found), 0.01)), "surrogate_p01_db": said.p01_db, "ours_p01_db": ours.quantile(0.01).value,
                     "mean_of_ratios": said.mean_of_ratios, "ratio_of_sums": said.ratio_of_sums, "true_ratio_of_sums": mere(exact, found)[1]})  # fmt: skip
    tries = []
    for seed in range(seeds):
        x, v = draw("gaussian", k, k, seed=ctx.seed + 100 + 2 * seed), draw("gaussian", k, k, seed=ctx.seed + 101 + 2 * seed)
        tries.append(mere(x.double() @ v.double().mT, _product(x, v, recipe, ctx.device)))
    ratios, sums = zip(*tries, strict=True)
    scaled = next(law for law in laws if law["distribution"] == "row-scaled")
    metrics = {
        "surrogate_gap_db": scaled["surrogate_p01_db"] - scaled["true_p01_db"], "prediction_gap_db": scaled["ours_p01_db"] - scaled["true_p01_db"],
        "mere_spread": max(ratios) / min(ratios), "mere_sums_spread": max(sums) / min(sums),
    }  # fmt: skip
    return Result(metrics=metrics, records={"laws": laws, "mere": [{"mean_of_ratios": a, "ratio_of_sums": b} for a, b in tries]}, kind=_kind(ctx.device))


def overhead(ctx: Context, *, model: str, size: str, mods: str, batch: int, every: int, pieces: int, warmup: int, compiled: bool) -> Result:
    """Wall time of `every` training steps (forward, backward, no optimizer) with the probe over that without, in turns with a second plain run.

    A piece with the probe has one probed step of all sites and x, w, dy. ln ratios are of medians over pieces; records hold every piece.
    """
    module, example = built(model, size, mods, batch, ctx.device, ctx.seed)
    plain = torch.compile(module) if compiled else module
    watch = Probe(module, *example, every=every, plain=plain)
    watch.watched = torch.compile(watch.watched) if compiled else watch.watched
    labels = (torch.arange(batch, device=ctx.device) % 4 == 0).float()
    leaves = [*module.parameters(), *(x for x in example if x.requires_grad)]

    def steps(run: Callable, count: int) -> float:
        _wait(ctx.device)
        start = time.perf_counter()
        for _ in range(count):
            F.binary_cross_entropy_with_logits(run(*example).float(), labels).backward()
            for leaf in leaves:
                leaf.grad = None
        _wait(ctx.device)
        return time.perf_counter() - start

    runs = {"plain": plain, "probed": watch, "plain again": plain}
    steps(plain, warmup)
    steps(watch, 1)
    steps(watch, every - 1)  # to the next probed step
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(pieces):
        for name in np.roll(list(runs), i):
            times[name].append(steps(runs[name], every))
    base = median(times["plain"] + times["plain again"])
    metrics = {
        "log_probe_overhead": math.log(median(times["probed"]) / base), "log_control": math.log(median(times["plain again"]) / median(times["plain"])),
        "step_us": base / every * 1e6, "probed_step_us": (median(times["probed"]) - base * (every - 1) / every) * 1e6,
    }  # fmt: skip
    sites = watch.registry.sites
    return Result(metrics=metrics, arrays={name.replace(" ", "_"): np.array(t) for name, t in times.items()}, facts={"sites": str(len(sites)), "read": str(len(watch.readings.sites))},
                  records={"reads": {"bytes_read": bytes_read(sites), "every": every}}, kind="measured")  # fmt: skip


# ---- shared ----------------------------------------------------------------------------------------------------------------------


def _kind(device: str) -> str:
    return "measured" if device.startswith("cuda") else "emulated"


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _product(a: torch.Tensor, b: torch.Tensor, recipe: GemmRecipe, device: str) -> torch.Tensor:
    """float64 on the CPU: emulated there, on a GPU the kernels' own."""
    if not device.startswith("cuda"):
        return product_ref(a, b, recipe).double()
    from kernels.fp8.autograd import product

    return product(a.to(device), b.to(device), recipe, torch.float32).double().cpu()


def _compared(predicted: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    out = {}
    for name, q in (("p01", 0.01), ("median", 0.5)):
        p, t = (float(torch.quantile(v.double(), q)) for v in (predicted, true))
        out |= {f"predicted_{name}_db": p, f"true_{name}_db": t, f"{name}_gap_db": min(p, CAP_DB) - min(t, CAP_DB)}
    return out


def _stopped(below: np.ndarray) -> tuple[str, int]:
    """(verdict, rows read by then) of rows in this order."""
    stop = Stopping(limit=LIMIT)
    for chunk in np.array_split(below, max(1, len(below) // CHUNK)):
        if stop.update(rows_below=int(chunk.sum()), rows=len(chunk)).verdict != "undecided":
            break
    return stop.verdict, stop.units


def _bounds(below: np.ndarray) -> tuple[float, float]:
    """Of the share, after all rows."""
    return Stopping(limit=LIMIT).update(rows_below=int(below.sum()), rows=len(below)).bounds
