"""A user's own rows as a task: pairs of a prompt and its answer.

    task = from_pairs([("Where is my card?\\nIntent:", "card_arrival"), ...], AutoTokenizer.from_pretrained(name), tokens=64, classes=True)

With `classes` every different answer is a class, judged by accuracy over one token each; without, answers are free text, judged by their loss.
Validation and test rows are drawn by the seed, stratified by class. What is longer than `tokens` is dropped, and counted in `task.dropped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.plora.data.sets import tokenize
from studies.plora.data.sources import Source
from studies.plora.data.split import held_out
from studies.plora.data.task import Task
from studies.plora.data.tokens import Tokenizer, from_huggingface

__all__ = ["from_pairs"]


def from_pairs(
    rows: Sequence[tuple[str, str]], tokenizer: Any, *, tokens: int, classes: bool = False, validation: float = 0.1, test: float = 0.1, seed: int = 0, name: str = "own rows",
) -> Task:  # fmt: skip
    """tokenizer: of transformers, or a data.tokens.Tokenizer. validation, test: shares of the rows. Raises ValueError for shares that leave a part
    empty, too few rows, and what tokenizing refuses."""  # fmt: skip
    if not (0 < validation < 1 and 0 < test < 1 and validation + test < 1):
        raise ValueError(f"validation and test are shares that leave rows to train on, got {validation=} {test=}; lower them")
    parts = [max(1, round(share * len(rows))) for share in (validation, test)]
    if len(rows) < 1 + sum(parts):
        raise ValueError(f"each part has at least one row, got {len(rows)} rows; give more")
    rows = [(prompt, answer) for prompt, answer in rows]
    names = tuple(sorted({answer for _, answer in rows})) if classes else ()
    index = {answer: c for c, answer in enumerate(names)}
    labels = np.array([index.get(answer, 0) for _, answer in rows])
    rest, tested = held_out(labels, parts[1], seed=seed)
    trained, validated = held_out(labels[rest], parts[0], seed=seed + 1)
    source = Source(name=name, citation="given by the user", classes=names, train=[rows[rest[i]] for i in trained], validation=[rows[rest[i]] for i in validated], test=[rows[i] for i in tested])
    return tokenize(source, tokens=tokens, tokenizer=tokenizer if isinstance(tokenizer, Tokenizer) else from_huggingface(tokenizer), seed=seed, drop_longer=True)
