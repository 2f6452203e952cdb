"""Metrics of click-through models in float64, and relative changes between two models on the same examples.

    a, b = losses(logits_fp8, p), losses(logits_bf16, p)        # one number an example, in nats
    relative_change(a, b)                                       # Interval of (mean a - mean b) / mean b

`losses` takes labels or known probabilities alike: with p it is the log-loss expected over labels, which has none of their noise. The
normalised entropy is torchrec's (torchrec/metrics/ne.py), so on fixed examples its relative change is that of the log-loss. Whether two
models are equivalent is another question (TOST, over seeds); the intervals here are over examples.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from suite.stats import Interval, mean_interval

__all__ = ["auc", "detectable_change", "log_loss", "losses", "normalised_entropy", "relative_change"]

ETA = 1e-12  # torchrec's clamp of probabilities
_POWER = 0.8416212335729143  # normal quantile of 80% power


def losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-target log p - (1 - target) log(1 - p) of each example, p = sigmoid(logits), in nats, float64. `target` in [0, 1]: labels or probabilities."""
    _same_rows(logits, target)
    if target.numel() and not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError(f"a target is a label or a probability, got values from {float(target.min())} to {float(target.max())}; pass y or p, not a logit")
    z, t = logits.double(), target.double()
    return F.softplus(z) - t * z


def log_loss(logits: torch.Tensor, target: torch.Tensor) -> float:
    """The mean of `losses`. Raises ValueError for no example."""
    if not len(logits):
        raise ValueError("a mean loss needs an example, got none")
    return float(losses(logits, target).mean())


def normalised_entropy(probabilities: torch.Tensor, y: torch.Tensor, eta: float = ETA) -> float:
    """Cross entropy over that of the constant predictor at the mean label (He et al. 2014, section 3), by torchrec's definition and clamps."""
    _same_rows(probabilities, y)
    if not len(y):
        raise ValueError("a normalised entropy needs an example, got none")
    p, label = probabilities.double().clamp(eta, 1 - eta), y.double()
    rate = label.mean().clamp(eta, 1 - eta)
    cross = -(label * p.log2() + (1 - label) * (1 - p).log2()).sum()
    constant = -(label.sum() * rate.log2() + (1 - label).sum() * (1 - rate).log2())
    return float(cross / constant)


def auc(scores: torch.Tensor, y: torch.Tensor) -> float:
    """P(score of a positive > score of a negative), ties count one half. Raises ValueError where one class is missing."""
    _same_rows(scores, y)
    positive = y > 0.5
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise ValueError(f"an AUC needs both classes, got {n_positive} positives and {n_negative} negatives; take more examples")
    _, group, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)  # sorted
    middle_ranks = counts.cumsum(0).double() - (counts - 1) / 2
    rank_sum = middle_ranks[group[positive]].sum()
    return float((rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def relative_change(a: torch.Tensor, b: torch.Tensor, confidence: float = 0.95) -> Interval:
    """(mean a - mean b) / mean b over paired examples, by linearising the ratio. Raises ValueError for fewer than two or a mean of b <= 0."""
    change = _linearised(a, b)
    return mean_interval(change.numpy(), confidence)


def detectable_change(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative change that these examples would show at 95% confidence (two-sided) with 80% power: 2.80 standard errors."""
    change = _linearised(a, b)
    return (1.959963984540054 + _POWER) * float(change.std()) / math.sqrt(len(change))


def _linearised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One number an example with the ratio as its mean and the ratio's sampling error as the error of that mean (delta method)."""
    _same_rows(a, b)
    if len(a) < 2:
        raise ValueError(f"a paired change needs two examples or more, got {len(a)}")
    x, y = a.double().cpu(), b.double().cpu()
    base = float(y.mean())
    if not base > 0:
        raise ValueError(f"a relative change needs a baseline above 0, got a mean of {base}; pass the losses of the baseline second")
    ratio = float((x - y).mean()) / base
    return ratio + (x - y - ratio * y) / base


def _same_rows(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape or a.dim() != 1:
        raise ValueError(f"one number an example on both sides, got shapes {tuple(a.shape)} and {tuple(b.shape)}; squeeze or cut them alike")
