"""A task whose answer can be learnt by a small random model in seconds; the same rows on every machine (integer Philox).

    task = synthetic(vocabulary=512, classes=8, seed=0)
    task = synthetic(vocabulary=512, classes=0, seed=0)        # no classes: answers of three tokens, judged by their loss

A prompt is noise with one of `classes` markers at its end; the answer is the token that belongs to the marker. With `wrong` a share of
the training rows has another class's answer; validation and test rows are always right. It says nothing about language.
"""

from __future__ import annotations

import numpy as np

from kernels.exact.philox import philox_integers
from studies.plora.data.task import Examples, Task

__all__ = ["synthetic"]

_MARKERS = 8  # of a task without classes
_ANSWER_TOKENS = 3


def synthetic(*, vocabulary: int, classes: int = 8, seed: int = 0, rows: tuple[int, int, int] = (256, 64, 64), tokens: tuple[int, int] = (6, 24),
              wrong: float = 0.0) -> Task:  # fmt: skip
    """`rows` of train, validation and test; row lengths are uniform in `tokens`, both ends included. Raises ValueError."""
    markers = classes or _MARKERS
    shortest = 2 if classes else 1 + _ANSWER_TOKENS
    if classes < 0 or vocabulary < 2 * markers + 1:
        raise ValueError(f"a vocabulary holds a marker and an answer a class, and noise, got {vocabulary=} {classes=}; take at least {2 * markers + 1}")
    if min(rows) < 1 or not shortest <= tokens[0] <= tokens[1] or not 0 <= wrong < 1:
        raise ValueError(f"need rows >= 1, {shortest} <= tokens[0] <= tokens[1] and 0 <= wrong < 1, got {rows=} {tokens=} {wrong=}; mend them")
    parts = [_part(vocabulary, classes, markers, seed, index, n, tokens, wrong if index == 0 else 0.0) for index, n in enumerate(rows)]
    return Task(train=parts[0], validation=parts[1], test=parts[2], name=f"synthetic-{classes}", citation="Made by this project")


def _part(vocabulary: int, classes: int, markers: int, seed: int, index: int, n: int, tokens: tuple[int, int], wrong: float) -> Examples:
    """Streams 8 * index and following of the seed: lengths, markers, noise, wrong answers."""
    lengths = tokens[0] + philox_integers(n, seed, 8 * index) % np.uint32(tokens[1] - tokens[0] + 1)
    marker = (philox_integers(n, seed, 8 * index + 1) % np.uint32(markers)).astype(np.int32)
    noise = philox_integers(n * tokens[1], seed, 8 * index + 2).reshape(n, tokens[1])
    noise = (2 * markers + noise % np.uint32(vocabulary - 2 * markers)).astype(np.int32)
    flip = philox_integers(n, seed, 8 * index + 3).astype(np.float64) < wrong * 2**32
    shift = (1 + philox_integers(n, seed, 8 * index + 4) % np.uint32(max(1, markers - 1))).astype(np.int32)
    label = np.where(flip, (marker + shift) % markers, marker).astype(np.int32)
    answer = 1 if classes else _ANSWER_TOKENS
    # ids 0 to markers - 1 are answers, markers to 2 markers - 1 the markers, the rest noise
    ids = tuple(
        np.concatenate([noise[i, : int(lengths[i]) - answer - 1], [markers + marker[i]], (label[i] + np.arange(answer)) % markers]).astype(np.int32)
        for i in range(n)
    )
    choices = np.arange(markers, dtype=np.int32)
    return Examples(ids=ids, answer_from=(lengths.astype(np.int32) - answer), labels=label if classes else None, choices=choices if classes else None)
