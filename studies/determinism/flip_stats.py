"""The numbers of the flip study, from two or more runs of the same prompts at different batches: plain numpy, no rows, no report.

    flips = first_flips(tokens_a, tokens_b, ends_a, ends_b)     # [prompts]: index of the first token that differs, -1 where none does
    std_of_top1([top1_1, top1_8, top1_64], compared_steps([tokens_1, tokens_8, tokens_64], [ends_1, ends_8, ends_64]))

Definitions follow arXiv 2506.09501: Div_Index is the number of equal tokens before the first that differs; Avg_Std@top1_prob is the mean,
over prompts and steps, of the standard deviation over batches of the highest probability, before texts part; Std@Acc is the standard
deviation of the accuracy over batches. Legend: P prompts, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two batches compared. Gaps are in nats, of the run at the smaller batch; NaN where no text diverged."""

    prompts: int
    diverged: int
    median_div_index: float
    median_gap_at_flip: float
    gap_at_flip_90: float
    median_gap: float  # over all tokens of the smaller batch's texts


def first_flips(a_PT: np.ndarray, b_PT: np.ndarray, ends_a_P: np.ndarray, ends_b_P: np.ndarray) -> np.ndarray:
    """Index of the first token that differs, -1 where none does. Steps after an end do not count: a text that ended, ended.

    `ends` counts tokens with the end token, so two texts that agree up to the earlier end agree in it too.
    """
    if a_PT.shape != b_PT.shape or ends_a_P.shape != ends_b_P.shape or a_PT.shape[:1] != ends_a_P.shape:
        raise ValueError(
            f"two runs have the same prompts and steps, got {a_PT.shape=} {b_PT.shape=} {ends_a_P.shape=} {ends_b_P.shape=}; compare runs of one preset"
        )
    differ_PT = (a_PT != b_PT) & (np.arange(a_PT.shape[1]) < np.minimum(ends_a_P, ends_b_P)[:, None])
    return np.where(differ_PT.any(1), differ_PT.argmax(1), -1)


def compared(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> Pair:
    """Two runs, each the arrays of `flips:texts`; `a` is the one at the smaller batch."""
    flips_P = first_flips(a["tokens"], b["tokens"], a["ends"], b["ends"])
    at = np.flatnonzero(flips_P >= 0)
    gaps = a["gap"][at, flips_P[at]]
    written_PT = np.arange(a["gap"].shape[1]) < a["ends"][:, None]
    return Pair(
        prompts=len(flips_P),
        diverged=len(at),
        median_div_index=_quantile(flips_P[at], 0.5),
        median_gap_at_flip=_quantile(gaps, 0.5),
        gap_at_flip_90=_quantile(gaps, 0.9),
        median_gap=_quantile(a["gap"][written_PT], 0.5),
    )


def compared_steps(tokens_BPT: Sequence[np.ndarray], ends_BP: Sequence[np.ndarray]) -> np.ndarray:
    """[P]: steps before any run's text leaves the first run's, and before any end."""
    steps_P = np.minimum.reduce(list(ends_BP)).astype(np.int64)
    for tokens_PT, ends_P in zip(tokens_BPT[1:], ends_BP[1:], strict=True):
        flips_P = first_flips(tokens_BPT[0], tokens_PT, ends_BP[0], ends_P)
        steps_P = np.where(flips_P >= 0, np.minimum(steps_P, flips_P), steps_P)
    return steps_P


def std_of_top1(top1_BPT: Sequence[np.ndarray], steps_P: np.ndarray) -> np.ndarray:
    """One number a prompt with at least one such step: the mean over its first `steps_P` steps of the sample standard deviation over batches."""
    if len(top1_BPT) < 2:
        raise ValueError(f"a standard deviation over batches needs two of them, got {len(top1_BPT)}; run another batch")
    std_PT = np.std(np.stack(top1_BPT).astype(np.float64), axis=0, ddof=1)
    return np.array([std_PT[p, :n].mean() for p, n in enumerate(steps_P) if n > 0])


def still_equal(flips_P: np.ndarray, positions: Sequence[int]) -> list[float]:
    """Share of prompts whose first n tokens are equal, for each n of `positions`."""
    return [float(np.mean((flips_P < 0) | (flips_P >= n))) for n in positions]


def labels_that_change(margins_BS: Sequence[np.ndarray]) -> int:
    """Sentences whose label is not the same at every batch; the label is the sign of the margin."""
    signs_BS = np.stack(margins_BS) > 0
    return int((signs_BS != signs_BS[0]).any(0).sum())


def largest_change(margins_BS: Sequence[np.ndarray]) -> float:
    """The largest distance, in nats, between two batches' margins of one sentence."""
    return float(np.ptp(np.stack(margins_BS).astype(np.float64), axis=0).max())


def std_of_accuracy(accuracies_B: Sequence[float]) -> float:
    """Std@Acc: the sample standard deviation over batches."""
    return float(np.std(accuracies_B, ddof=1)) if len(accuracies_B) > 1 else float("nan")


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else float("nan")
