"""How long real rows are: GSM8K's and MRPC's training rows, prompt and answer, as SmolLM2's tokenizer counts them.

    lengths("gsm8k")                                # int32 [7473], rising; mean 190
    draw("mrpc", 64, seed=0)                        # 64 of them, at random

Speed on the paper's own regime needs these numbers and no text, so they lie beside this file as counts, made by `histogram` from the
sets (a test makes them again where the sets are at hand).
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from kernels.exact.philox import philox_integers

__all__ = ["NAMES", "draw", "histogram", "lengths"]

NAMES = ("gsm8k", "mrpc")
_FILE = Path(__file__).with_name("lengths.json")
_STREAM = 7002


@cache
def _counts() -> dict[str, dict[str, int]]:
    return json.loads(_FILE.read_text("utf-8"))


def lengths(name: str) -> np.ndarray:
    """Tokens of every training row of the set `name`, rising: int32. Raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"lengths are kept of {NAMES}, got {name=}; use the lengths of your own task's rows")
    counts = _counts()[name]
    return np.repeat(np.array([int(k) for k in counts], np.int32), list(counts.values()))


def draw(name: str, count: int, *, seed: int, most: int | None = None) -> np.ndarray:
    """`count` lengths drawn with replacement, of rows of at most `most` tokens: int32 [count]. Raises ValueError."""
    pool = lengths(name)
    pool = pool if most is None else pool[pool <= most]
    if count < 1 or not len(pool):
        raise ValueError(f"draw at least one length among rows that exist, got {count=} {most=}; {name} has {lengths(name)[0]} tokens and more")
    return pool[philox_integers(count, seed, _STREAM) % np.uint32(len(pool))]


def histogram(name: str) -> dict[str, int]:
    """Counts by length, made from the set itself. Raises suite.assets.AssetError."""
    from studies.plora.data.sets import load_task

    task = load_task(name, tokens=4096)
    counts = Counter(int(n) for part in (task.train, task.validation) for n in part.lengths)
    return {str(n): counts[n] for n in sorted(counts)}
