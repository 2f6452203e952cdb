"""Predict: from one sketch of a site, the SQNR of its products' rows in every recipe, and the tail of rows that an average hides.

    p = predict(readings.sites["over.0:linear"], "forward", gemm("tensorwise"))
    p.quantile(0.01)                   # Interval in dB: 1 row in 100 is below, with 95% bounds over what was sampled
    predictions(reading)               # every recipe of every pass: {("forward", "rowwise"): Prediction, ...}

The rows of the product are those of the reservoir; the noise that each meets is that of studies.loka.pricing.noise, with the scales of the whole operands,
which the sketch kept: a step's amax for a tensor, a row's own, a column's typical one where rows of the transpose are quantised. No cast is made.
What is asked of a sample where a real product would contract all (wgrad: the examples; dgrad of a large layer: its outputs) is estimated from it.

A row's SQNR is its signal over its noise; the noise of one product varies about its expectation like a chi^2 of `freedom` degrees, of which SPREADS
seeded values stand for each row. Rounding the result (bf16: 55 dB) is not part of it. What it assumes: errors of different elements independent,
rows that are sampled like those to come. Against emulation, 512 rows of forward and dgrad products, 8 recipes, 4 seeds, predicted less true in dB:

                  median, from ... to    1st percentile, mean and from ... to
    gaussian         -0.14 ... 0.04        -0.03   -0.46 ... 0.23
    student-t3       -0.18 ... 0.06        -0.03   -0.68 ... 0.50
    log-normal       -0.33 ... 0.07        -0.12   -0.85 ... 0.71
    row-scaled       -0.12 ... 0.05        -0.05   -0.33 ... 0.27
    outliers         -0.12 ... 0.09         0.02   -0.68 ... 1.77    the error of a row's one outlier is a number, not a distribution
    post-relu        -0.23 ... 0.14        -0.05   -0.39 ... 0.23

On activations and gradients of small Wukong, DLRM-v2 and RankMixer after 60 steps (215 products and recipes of at least 299 rows) the 1st percentile is
off by 0.3 dB in the median, by more than 1 dB in 5 of them, by 1.4 dB at most. Products of fewer rows have no 1st percentile to compare, and a few
outputs that move together (the weight gradient of a narrow layer) err by chance: 2 to 5 dB in the noise of all rows. Above 40 dB predictions are up to
5 dB high: sums of one sign over many elements, as in the wgrad of two activations behind a ReLU, keep rounding's bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.fp8.recipes import BLOCK, GEMMS, PASSES, GemmRecipe
from studies.loka.pricing.noise import Known, known, output_variance, product_noise
from studies.loka.probing.readings import SiteReading
from studies.loka.probing.sketch import Sketch
from suite.stats import Interval

__all__ = ["FEWEST_ROWS", "Prediction", "output_noise", "predict", "predict_tensors", "predictions"]

FEWEST_ROWS = 299  # ln(0.05) / ln(0.99): with fewer no row is below the 1st percentile with 95% confidence
MAX_ROWS, MAX_OUTPUTS = 512, 256
SPREADS = 16
RESAMPLES = 200
STEPS_TO_RESAMPLE = 20  # from so many steps on, whole steps are drawn again, for rows of one step share its scale
MAX_DB = 200.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """SQNR of the rows of one product in one recipe."""

    which: str
    recipe: str
    row_db: torch.Tensor  # float64 [rows, SPREADS]
    expected_db: torch.Tensor  # float64 [rows]: signal over expected noise
    groups: torch.Tensor  # int64 [rows], what was sampled together: the step, or the row itself
    noise_share: float  # noise / signal of all rows together

    @property
    def rows(self) -> int:
        return len(self.row_db)

    def quantile(self, q: float = 0.01, *, confidence: float = 0.95, seed: int = 0) -> Interval:
        """The q-quantile over rows in dB, its bounds by drawing steps (or rows) again. Raises ValueError for a sample without rows in that tail."""
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q=}")
        if self.rows * min(q, 1 - q) < 0.01 * FEWEST_ROWS:
            raise ValueError(f"the {q:g}-quantile of rows needs {round(0.01 * FEWEST_ROWS / min(q, 1 - q))} of them, got {self.rows}; sample more, or ask for a quantile nearer the middle")
        value = float(torch.quantile(self.row_db, q))
        drawn = [float(np.quantile(self.row_db.numpy()[rows], q)) for rows in self._resamples(seed)]
        low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Interval(low=min(float(low), value), value=value, high=max(float(high), value), n=self.rows, confidence=confidence)

    def share_below(self, threshold_db: float) -> float:
        """Share of rows whose SQNR is below a threshold."""
        return float((self.row_db < threshold_db).double().mean())

    def _resamples(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        units = np.unique(self.groups.numpy())
        if len(units) < STEPS_TO_RESAMPLE:
            return [rng.integers(0, self.rows, self.rows) for _ in range(RESAMPLES)]
        members = [np.flatnonzero(self.groups.numpy() == unit) for unit in units]
        return [np.concatenate([members[i] for i in rng.integers(0, len(units), len(units))]) for _ in range(RESAMPLES)]


def predictions(reading: SiteReading, recipes: list[str] | None = None, *, seed: int = 0) -> dict[tuple[str, str], Prediction]:
    """Every pass that the reading tells of, in every recipe of kernels.fp8.recipes, or in those named."""
    return {(which, name): predict(reading, which, GEMMS[name], seed=seed) for which in reading.passes for name in (recipes or GEMMS)}


def predict(reading: SiteReading, which: str, recipe: GemmRecipe, *, seed: int = 0) -> Prediction:
    """The rows of one pass of a site in one recipe, from its sketches.

    Raises ValueError for a pass that the reading does not tell of, and where no row of the product is other than zero.
    """
    a, b, length, groups = _operands(reading, which)
    rows, outputs = _chosen(a.x.shape[:2], MAX_ROWS), _chosen(b.x.shape[:2], MAX_OUTPUTS)
    groups = groups.view(a.x.shape[:2])[:, rows].flatten()
    return _prediction(_cut(a, rows), _cut(b, outputs), recipe, which, length, groups, seed)


def predict_tensors(a_RC: torch.Tensor, b_SC: torch.Tensor, recipe: GemmRecipe, *, seed: int = 0) -> Prediction:
    """The same of whole operands at hand, [..., R, C] and [..., S, C]."""
    a, b = known(a_RC), known(b_SC)
    return _prediction(a, b, recipe, "forward", a.x.shape[-1], torch.arange(a.x.shape[0] * a.x.shape[1]), seed)


def output_noise(reading: SiteReading, which: str, recipe: GemmRecipe) -> torch.Tensor:
    """Expected squared error of each output [B, R, S] of the reservoir's rows. Raises ValueError where the contracted axis was only sampled."""
    a, b, length, _ = _operands(reading, which)
    if length != a.x.shape[-1]:
        raise ValueError(f"an output's noise needs all of the contracted axis, got {a.x.shape[-1]} of {length} in {which}; ask for the forward pass")
    return output_variance(a, b, recipe)


def _prediction(a: Known, b: Known, recipe: GemmRecipe, which: str, length: int, groups: torch.Tensor, seed: int) -> Prediction:
    n = product_noise(a, b, recipe, length=length)
    signal, mean, variance, freedom = (x.flatten() for x in (n.signal, n.mean, n.variance, n.freedom))
    live = (signal > 0) & torch.isfinite(signal)
    if not live.any():
        raise ValueError(f"an SQNR needs a row other than zero, got none of {len(live)} in {which}; read other steps")
    signal, mean, variance, freedom = (x[live] for x in (signal, mean, variance, freedom))
    chi = torch.from_numpy(np.random.default_rng(seed).standard_gamma((freedom / 2).numpy()[:, None], (len(freedom), SPREADS))) / (freedom / 2)[:, None]
    db = lambda noise, of: (10 * torch.log10(of / noise)).clamp(max=MAX_DB)  # noqa: E731
    return Prediction(
        which=which, recipe=recipe.name, row_db=db(mean[:, None] + variance[:, None] * chi, signal[:, None]), expected_db=db(mean + variance, signal),
        groups=groups[live],
        noise_share=float((mean + variance).sum() / signal.sum()),
    )  # fmt: skip


# ---- a site's products, from its sketches --------------------------------------------------------------------------------------------


def _operands(reading: SiteReading, which: str) -> tuple[Known, Known, int, torch.Tensor]:
    """(a, b, contracted length, the group of each row) of out = a b^T; see kernels.fp8.recipes for which operand is which."""
    if which not in PASSES or which not in reading.passes:
        raise ValueError(f"a pass is one that {reading.site.name} was seen in, {reading.passes}, got {which!r}; run a backward pass under the probe")
    site, x, w, dy = reading.site, reading.x, reading.w, reading.dy
    if dy is not None and not torch.equal(x.reservoir.keys, dy.reservoir.keys):
        raise ValueError(f"x and dy of {site.name} keep the same rows, got other ones; sketch both in the same steps with the same seed")
    if which == "forward":
        a, b, length = (_matrices(x), _matrices(w), site.k) if site.op == "bmm" else (_rows(x), _rows(w), site.k)
    elif which == "dgrad":
        a, b, length = (_matrices(dy), _transposed(_matrices(w)), site.n) if site.op == "bmm" else (_rows(dy), _columns(w), site.n)
    else:
        a, b, length = (*(_transposed(_matrices(s)) for s in (dy, x)), site.m) if site.op == "bmm" else (_columns(dy), _columns(x), _seen_at_once(x))
    steps = x.reservoir.steps[:, None] if site.op == "bmm" else x.reservoir.steps[_order(x)][None]
    groups = torch.arange(a.x.shape[:2].numel()) if which == "wgrad" and site.op == "linear" else steps.expand(a.x.shape[:2]).flatten()
    return a, b, max(length, a.x.shape[-1]), groups


def _seen_at_once(s: Sketch) -> int:
    """Items of one step."""
    return -(-s.rows // (len(s.steps) * s.reservoir.items.shape[1]))


def _order(s: Sketch) -> torch.Tensor:
    """Rows of a parameter as they stand in it, so that 128 x 128 groups are the real ones where all of it is kept; others by step."""
    return torch.from_numpy(np.lexsort((s.reservoir.index.numpy(), s.reservoir.steps.numpy())))


def _step_amax(s: Sketch) -> torch.Tensor:
    """amax of the tensor in which each kept item stood, [I, 1, 1]."""
    return s.amax[torch.searchsorted(s.steps, s.reservoir.steps)][:, None, None]


def _items(s: Sketch) -> torch.Tensor:
    x = s.reservoir.items.double()
    return torch.where(x.abs() < float("inf"), x, 0.0)


def _matrices(s: Sketch) -> Known:
    """Items of a batched operand: [I, R, C]."""
    x = _items(s)
    return Known(x=x, tensor_amax=_step_amax(s), row_amax=_row_amax(x))


def _transposed(k: Known) -> Known:
    x = k.x.mT
    return Known(x=x, tensor_amax=k.tensor_amax, row_amax=_row_amax(x))


def _rows(s: Sketch) -> Known:
    """Rows of a layer's operand, of T layers: [T, rows, C]."""
    order = _order(s)
    x = _items(s)[order].transpose(0, 1)
    return Known(x=x, tensor_amax=_step_amax(s)[order].transpose(0, 1), row_amax=_row_amax(x))


def _columns(s: Sketch) -> Known:
    """The transpose of a layer's operand: [T, C, rows]; a row's amax is that over all rows of a step, which the sketch kept."""
    order = _order(s)
    x = _items(s)[order].permute(1, 2, 0)
    row_amax = torch.maximum(s.column_amax.view(*x.shape[:2], 1), _row_amax(x))
    return Known(x=x, tensor_amax=_step_amax(s)[order].permute(1, 2, 0), row_amax=row_amax)


def _row_amax(x: torch.Tensor) -> torch.Tensor:
    """[..., R, 1], 0 of a row without numbers."""
    return torch.nn.functional.pad(x.abs(), (0, 1)).amax(-1, keepdim=True)


def _chosen(shape: tuple[int, int], rows: int) -> torch.Tensor:
    """Of each matrix its part of so many rows, 128 at least, in evenly placed blocks of 128, so that square groups stay whole."""
    batch, count = shape
    blocks = max(1, rows // batch // BLOCK)
    if count <= blocks * BLOCK:
        return torch.arange(count)
    places = torch.linspace(0, count // BLOCK - 1, blocks).round().long()
    return (places[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


def _cut(k: Known, rows: torch.Tensor) -> Known:
    cut = lambda amax: amax[:, rows] if amax.ndim == 3 and amax.shape[1] > 1 else amax  # noqa: E731
    return Known(x=k.x[:, rows], tensor_amax=cut(k.tensor_amax), row_amax=cut(k.row_amax))
