"""Safety map: is a product safe in FP8, at one site and pass, under one distribution of inputs? Every recipe of kernels.fp8.recipes beside the others.

    safety(ctx, which="forward", op="linear", products=1, rows=512, contracted=1024, distribution="row-scaled", threshold_db=25.6)

A row of a forward product is an example: a user, an impression. Its SQNR is |y_r|^2 / |y_r - y_r(recipe)|^2 against the float64 product of the same
bfloat16 inputs, the recipe's result rounded to bfloat16 as models store it (so bf16 itself has about 55 dB). It is read over OUTPUTS columns of the
second operand whatever the site has, so that the figure's own spread is the same at every site (about 0.8 dB: |y|^2 and |e|^2 each vary by
sqrt(2 / 128)). A cell reads the 1st percentile over rows, with one-sided 95% bounds by order statistics (299 rows are the fewest with a lower one),
and says of each recipe:

    safe        the lower bound is at the threshold or above: with 95% confidence 99 rows in 100 are
    unsafe      the upper bound is below it
    undecided   else

The threshold is the site's (`threshold_db`), each derived from what is inevitable or from what may be spent:

    inner     25.6 dB. Rounding to E4M3 costs a product 28.6 dB, the same at every shape and scale. 3 dB below it a row has twice the noise that
              is inevitable, so that pricing a site by that noise is wrong by a factor of 2 at most in 99 of 100 rows.
    gradient  21.6 dB, 3 dB below the 24.6 dB of a gradient in E5M2 times E4M3: 0.7% of the gradient's power, where drawing the minibatch alone
              leaves noise of the order of the gradient itself.
    logit     32 dB: all of the 0.02% of log-loss that the study may spend, by dL = E[p(1-p)] s^2 / 2 (`budget_db`). E4M3 cannot reach it.

On a CPU products are emulated: exact FP8 operands, summed in float64. On a GPU the real kernels run and are held to the emulation as well. Sizes are
cut before (studies.loka.questions.asked): the error of a product hardly depends on them. Rows of one draw share the scale of a tensor, so a cell
pools at least DRAWS draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kernels.fp8.emulate import product_ref
from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import GEMMS, GemmRecipe
from studies.loka.probing.distributions import draw
from suite.measure import Context, Result

__all__ = ["GRADIENT_DB", "HEAD_DB", "INNER_DB", "budget_db", "hardware", "judged", "kind", "quantile_bounds", "row_sqnr_db", "safety", "verdict"]

INNER_DB = 28.6 - 3.0  # E4M3 by E4M3
GRADIENT_DB = 24.6 - 3.0  # E5M2 by E4M3
HEAD_DB = 32.0
BUDGET = 2e-4  # relative log-loss
QUANTILE, CONFIDENCE = 0.01, 0.95
OUTPUTS, DRAWS, ROWS, MAX_DB = 128, 2, 512, 200.0


def budget_db(*, share: float = 1.0, logloss: float = 0.451, variance_of_click: float = 0.1467, logit_sd: float = 1.4) -> float:
    """SQNR at the logit that costs `share` of the budget: NSR logit_sd^2 E[p(1-p)] / 2 = share BUDGET logloss. Defaults: a click rate of 0.26 (Criteo)."""
    return -10 * math.log10(share * BUDGET * logloss * 2 / (variance_of_click * logit_sd**2))


def quantile_bounds(values: torch.Tensor, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> tuple[float | None, float, float | None]:
    """(lower, estimate, upper) of a quantile: order statistics as one-sided bounds, each at `confidence`; None where too few values give one.

    The k-th smallest of n is below the quantile with P(Binomial(n, q) >= k), and not below it with P(Binomial(n, q) <= k - 1): no
    distribution is assumed (Conover, Practical Nonparametric Statistics, section 3.2).
    """
    x = values.double().flatten().sort().values
    n, below, lower, upper = len(x), 0.0, 0, 0  # below: P(Binomial <= k - 1)
    if n == 0:
        raise ValueError("a quantile needs at least one value, got none")
    for k in range(1, n + 1):
        below += math.exp(math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 2) + (k - 1) * math.log(quantile) + (n - k + 1) * math.log1p(-quantile))
        lower = k if 1 - below >= confidence else lower
        if below >= confidence:
            upper = k
            break
    estimate = float(torch.quantile(x, quantile))
    return (float(x[lower - 1]) if lower else None), estimate, (float(x[upper - 1]) if upper else None)


def verdict(low_db: float | None, high_db: float | None, threshold: float) -> str:
    """safe, unsafe or undecided, from the bounds of the 1st percentile."""
    if low_db is not None and low_db >= threshold:
        return "safe"
    return "unsafe" if high_db is not None and high_db < threshold else "undecided"


def row_sqnr_db(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """SQNR of each row [..., R, S] -> [rows]: at most MAX_DB; rows of zeros have none and are left out."""
    signal = exact.double().square().sum(-1).flatten()
    noise = (found.double() - exact.double()).square().sum(-1).flatten()
    kept = signal > 0
    return (10 * torch.log10(signal[kept] / noise[kept])).clamp(max=MAX_DB)


# ---- a cell --------------------------------------------------------------------------------------------------------------------


def operands(seed: int, *, which: str, op: str, products: int, rows: int, contracted: int, distribution: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draws of (a [products, rows, C], b [products, OUTPUTS, C]) in bfloat16: at least ROWS rows together, and DRAWS draws.

    The activation or gradient that comes first has the distribution; a weight is normal. In wgrad both operands have it, over the examples that
    are contracted; in a product of two activations both have it too, but scales of rows, which are those of examples, the first alone.
    """
    for i in range(max(DRAWS, -(-ROWS // (rows * products)))):

        def of(name: str, shape: tuple[int, int], stream: int, i: int = i) -> torch.Tensor:
            return torch.stack([draw(name, *shape, seed=seed + 1000 * i + 10 * j + stream) for j in range(products)]).to(torch.bfloat16)

        if which == "wgrad":  # dy^T [N, M] by x^T [K, M]
            yield of(distribution, (contracted, rows), 0).mT, of(distribution, (contracted, OUTPUTS), 1).mT
        else:
            yield of(distribution, (rows, contracted), 0), of(distribution if op == "bmm" and distribution != "row-scaled" else "gaussian", (OUTPUTS, contracted), 1)


def safety(ctx: Context, *, which: str, op: str, products: int, rows: int, contracted: int, distribution: str, threshold_db: float) -> Result:
    """The verdict of every product's recipe at one site and pass. Record "recipes": one object each."""
    asked = operands(ctx.seed, which=which, op=op, products=products, rows=rows, contracted=contracted, distribution=distribution)
    records = judged([(a.to(ctx.device), b.to(ctx.device)) for a, b in asked], threshold_db, ctx.device)
    by = {record["recipe"]: record for record in records}
    metrics = {"safe_recipes": float(sum(r["verdict"] == "safe" and r["fp8"] for r in records)),
               "p01_db_tensorwise": by["tensorwise"]["p01_db"], "p01_db_rowwise": by["rowwise"]["p01_db"], "flushed_share": by["tensorwise"]["flushed"]}  # fmt: skip
    return Result(metrics=metrics | hardware(records), records={"recipes": records}, kind=kind(ctx.device))


def judged(draws: list[tuple[torch.Tensor, torch.Tensor]], threshold_db: float, device: str) -> list[dict]:
    """Every recipe on these operands (bf16 [..., R, C] and [..., S, C]): its verdict, 1st percentile of rows, and what the format lost."""
    exact = [a.double() @ b.double().mT for a, b in draws]
    return [_recipe(recipe, draws, exact, threshold_db, device) for recipe in _recipes()]


def hardware(records: list[dict]) -> dict[str, float]:
    """The metric that a GPU adds: its kernels against the emulation, the worst row of all recipes."""
    found = [r["hardware_db"] for r in records if r["hardware_db"] is not None]
    return {"hardware_db": min(found)} if found else {}


def kind(device: str) -> str:
    return "measured" if device.startswith("cuda") else "emulated"


def _recipes() -> list[GemmRecipe]:
    """FP8 and bf16; fast accumulation is no recipe of its own here, for it does no harm at these contractions (C <= 4096)."""
    return [g for g in GEMMS.values() if g.dtype in ("fp8", "bf16") and not g.fast_accum]


def _recipe(recipe: GemmRecipe, draws: list, exact: list, threshold: float, device: str) -> dict:
    """Rows of all draws under one recipe, their 1st percentile, and what became of the first operand's elements."""
    emulated = [_emulated(a, b, recipe) for a, b in draws]
    outputs, hardware = emulated, None
    if device.startswith("cuda"):
        outputs = [_on_device(a, b, recipe) for a, b in draws]
        hardware = min(float(row_sqnr_db(e, y).min()) for e, y in zip(emulated, outputs, strict=True)) if recipe.is_fp8 else None
    rows_db = torch.cat([row_sqnr_db(y, out.to(torch.bfloat16)) for y, out in zip(exact, outputs, strict=True)])
    low, middle, high = quantile_bounds(rows_db)
    flushed, subnormal = _lost(draws, recipe)
    return {"recipe": recipe.name, "fp8": recipe.is_fp8, "verdict": verdict(low, high, threshold), "p01_db": middle, "low_db": low, "high_db": high,
            "median_db": float(rows_db.median()), "rows": len(rows_db), "flushed": flushed, "subnormal": subnormal, "hardware_db": hardware}  # fmt: skip


def _emulated(a_RC: torch.Tensor, b_SC: torch.Tensor, recipe: GemmRecipe) -> torch.Tensor:
    """Exact operands of the recipe, multiplied in float64."""
    return product_ref(a_RC, b_SC, recipe, accumulate="float64")


def _on_device(a_RC: torch.Tensor, b_SC: torch.Tensor, recipe: GemmRecipe) -> torch.Tensor:
    from kernels.fp8.autograd import product

    return product(a_RC, b_SC, recipe, torch.float32)


def _lost(draws: list, recipe: GemmRecipe) -> tuple[float, float]:
    """Shares of the first operand's non-zero elements that become 0, and that become subnormal."""
    if not recipe.is_fp8:
        return 0.0, 0.0
    flushed = subnormal = total = 0
    for a, _ in draws:
        q = quantise_ref(a, recipe.a).data_RC.float().abs()
        nonzero = a != 0
        total += int(nonzero.sum())
        flushed += int((nonzero & (q == 0)).sum())
        subnormal += int((nonzero & (q > 0) & (q < recipe.a.format.min_normal)).sum())
    return flushed / max(total, 1), subnormal / max(total, 1)
