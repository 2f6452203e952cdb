"""The paper's probe, as read second-hand: a Gaussian for activations, a matrix normal for weights, 100 draws, and a mean relative error.

    x_law, w_law = GaussianRows(features=K), MatrixNormal(rows=N, columns=K)
    x_law.update(x_MK); w_law.update(w_NK)
    surrogate(x_law, w_law, gemm("tensorwise"), rows=512, draws=20, seed=0).p01_db

Source: notes on LoKA (arXiv 2605.10886), section "Probe", whose text was not at hand. What they say is done so: a batched Welford merge of mean and
covariance in float32; Kronecker factors of the weight by flip-flop, W = M + L_U Z L_V^T, with an exponential moving average, eps 1e-6 tr(U) / rows,
Cholesky solves and factors of mean variance 1 beside one scale; x = 1 mu^T + Z L^T; MERE = the mean elementwise relative error. Where they leave it
open: the reference is float64, and MERE is read both ways, as a mean of ratios and as a ratio of sums.

It stands here to be compared with. Two things that it cannot do, each a test: a mean of |error / output| has no finite expectation where outputs
have a density at zero, so its value is that of the seed; and a mean with a covariance has no rows of different scale, so the rows
that one scale for a tensor destroys are not in what it draws. studies.loka.probing.predict is what this study uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8.emulate import product_ref
from kernels.fp8.recipes import GemmRecipe

__all__ = ["DRAWS", "THRESHOLD", "GaussianRows", "MatrixNormal", "Surrogate", "mere", "row_db", "surrogate"]

DRAWS = 100
THRESHOLD = 0.2  # of MERE, in the paper's Dispatch
MOMENTUM, EPS = 0.95, 1e-6  # "0.9 - 0.99", "1e-6 tr(U) / M"
FLIP_FLOPS = 3  # from a first weight on; later ones move the factors once each
_TINY = 1e-30


class GaussianRows:
    """Rows as draws of one multivariate normal: mean [K] and covariance [K, K] of all rows seen, float32 as in the paper."""

    def __init__(self, features: int) -> None:
        if features < 1:
            raise ValueError(f"rows have at least one feature, got {features=}")
        self.count, self.mean, self.scatter = 0, torch.zeros(features), torch.zeros(features, features)

    def update(self, x_MK: torch.Tensor) -> GaussianRows:
        """Merges a batch: d = mean_b - mean, mean += (B / n) d, S += S_b + (n0 B / n) d d^T."""
        x = x_MK.detach().float().reshape(-1, x_MK.shape[-1]).cpu()
        if x.shape[1] != len(self.mean) or not len(x):
            raise ValueError(f"a batch has rows of {len(self.mean)} features, got {tuple(x_MK.shape)=}")
        before, self.count = self.count, self.count + len(x)
        mean = x.mean(0)
        gap = mean - self.mean
        centred = x - mean
        self.mean = self.mean + len(x) / self.count * gap
        self.scatter = self.scatter + centred.T @ centred + before * len(x) / self.count * torch.outer(gap, gap)
        return self

    @property
    def covariance(self) -> torch.Tensor:
        if self.count < 2:
            raise ValueError(f"a covariance needs two rows, got {self.count}; update with more")
        return self.scatter / (self.count - 1)

    def draw(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """1 mu^T + Z L^T, float32 [rows, K]."""
        z = torch.randn(rows, len(self.mean), generator=generator)
        return self.mean + z @ _cholesky(self.covariance).T


class MatrixNormal:
    """A weight as a draw of MN(mean, scale^2 U, V): U [N, N] over its rows and V [K, K] over its columns, both of mean variance 1."""

    def __init__(self, rows: int, columns: int, momentum: float = MOMENTUM) -> None:
        if min(rows, columns) < 1 or not 0 <= momentum < 1:
            raise ValueError(f"a weight has rows and columns, and a momentum lies in [0, 1), got {rows=} {columns=} {momentum=}")
        self.momentum, self.seen = momentum, 0
        self.mean, self.scale = torch.zeros(rows, columns), 1.0
        self.u, self.v = torch.eye(rows), torch.eye(columns)

    def update(self, w_NK: torch.Tensor) -> MatrixNormal:
        """One step of a weight. The mean is one number, that of all elements: of a single weight's own elements nothing would be left to vary."""
        w = w_NK.detach().float().cpu()
        if w.shape != self.mean.shape:
            raise ValueError(f"a weight of this law is {tuple(self.mean.shape)}, got {tuple(w.shape)}")
        kept = self.momentum if self.seen else 0.0
        self.mean = kept * self.mean + (1 - kept) * torch.full_like(w, float(w.mean()))
        centred = w - self.mean
        variance = float(centred.square().mean())
        self.scale = (kept * self.scale**2 + (1 - kept) * variance) ** 0.5
        unit = centred / max(variance, _TINY) ** 0.5
        for _ in range(1 if self.seen else FLIP_FLOPS):
            u = unit @ torch.cholesky_solve(unit.T, _cholesky(self.v)) / w.shape[1]
            self.u = _unit_trace(kept * self.u + (1 - kept) * u)
            v = unit.T @ torch.cholesky_solve(unit, _cholesky(self.u)) / w.shape[0]
            self.v = _unit_trace(kept * self.v + (1 - kept) * v)
        self.seen += 1
        return self

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """M + L_U Z L_V^T, float32 [N, K]."""
        z = torch.randn(self.mean.shape, generator=generator)
        return self.mean + self.scale * (_cholesky(self.u) @ z @ _cholesky(self.v).T)


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """What draws of the learned laws say of one recipe."""

    mean_of_ratios: float  # MERE, first reading
    ratio_of_sums: float  # MERE, second reading
    p01_db: float  # 1st percentile of the rows' SQNR
    median_db: float


def surrogate(x_law: GaussianRows, w_law: MatrixNormal, recipe: GemmRecipe, *, rows: int, draws: int = DRAWS, seed: int = 0) -> Surrogate:
    """Emulated products of `draws` draws of (x [rows, K], w [N, K]) against float64. Raises ValueError for rows or draws < 1."""
    if rows < 1 or draws < 1:
        raise ValueError(f"a surrogate draws rows, at least once, got {rows=} {draws=}")
    generator = torch.Generator().manual_seed(seed)
    ratios, sums, values = [], [], []
    for _ in range(draws):
        x, w = x_law.draw(rows, generator), w_law.draw(generator)
        exact, found = x.double() @ w.double().T, product_ref(x, w, recipe).double()
        first, second = mere(exact, found)
        ratios.append(first)
        sums.append(second)
        values.append(row_db(exact, found))
    db = torch.cat(values)
    return Surrogate(mean_of_ratios=sum(ratios) / draws, ratio_of_sums=sum(sums) / draws, p01_db=float(torch.quantile(db, 0.01)), median_db=float(db.median()))


def mere(exact: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """The mean elementwise relative error in both readings: (mean of |error / output|, sum |error| / sum |output|); outputs of 0 are left out."""
    error, size = (found.double() - exact.double()).abs(), exact.double().abs()
    kept = size > 0
    if not kept.any():
        raise ValueError("a relative error needs an output other than zero, got none")
    return float((error[kept] / size[kept]).mean()), float(error.sum() / size.sum())


def row_db(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """SQNR of each row in dB; rows of zeros are left out."""
    signal, noise = exact.square().sum(-1).flatten(), (found - exact).square().sum(-1).flatten()
    return 10 * torch.log10(signal[signal > 0] / noise[signal > 0].clamp(min=_TINY))


def _cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Of a covariance, with eps of its mean variance on the diagonal; more, tenfold each time, where float32 still finds it indefinite."""
    jitter = EPS * float(matrix.diagonal().mean()) + _TINY
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix + jitter * torch.eye(len(matrix)))
        if not failed:
            return factor
        jitter *= 10


def _unit_trace(matrix: torch.Tensor) -> torch.Tensor:
    return matrix * (len(matrix) / matrix.trace().clamp(min=_TINY))
