"""The sets by name: one entry each, from text to a task.

    task = load_task("banking77", tokens=64, drop_longer=True)
    task.dropped                                               # {"train": 41, "validation": 3, "test": 6}
    task = load_task("clinc150", tokens=64, tokenizer=from_huggingface(theirs), rows=(2000, 300, 300))

Rows longer than `tokens` are refused with their count, or dropped and counted in `dropped`. `rows` takes stratified parts of that many
rows, for short runs; None takes all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.plora.data import banking, clinc, glue, math_word
from studies.plora.data.sources import Source
from studies.plora.data.split import subset
from studies.plora.data.task import Task
from studies.plora.data.tokens import Tokenizer, class_tokens, encode_answers, encode_classes, fitting, smollm2

__all__ = ["ASSETS", "SETS", "load_task", "tokenize"]

SETS: dict[str, Callable[[int], Source]] = {
    "banking77": banking.read,
    "clinc150": clinc.read,
    "gsm8k": math_word.read_gsm8k,
    "svamp": math_word.read_svamp,
    "cola": glue.read_cola,
    "mrpc": glue.read_mrpc,
    "sst2": glue.read_sst2,
}
ASSETS: dict[str, tuple[str, ...]] = {  # what a cell that reads the set declares
    "banking77": ("banking77-train", "banking77-test"),
    "clinc150": ("clinc150",),
    "gsm8k": ("gsm8k-train", "gsm8k"),
    "svamp": ("mawps-asdiv", "svamp"),
    "cola": ("cola-train", "cola-dev"),
    "mrpc": ("mrpc-train", "mrpc-test"),
    "sst2": ("sst2-train", "sst2-dev", "sst2-test"),
}


def load_task(name: str, *, tokens: int, tokenizer: Tokenizer | None = None, seed: int = 0, drop_longer: bool = False,
              rows: tuple[int | None, int | None, int | None] = (None, None, None)) -> Task:  # fmt: skip
    """The set `name` as a task; SmolLM2's tokenizer where none is given; `seed` draws held-out rows and subsets.

    Raises ValueError for an unknown name, rows that are too long, more rows than there are; suite.assets.AssetError.
    """
    if name not in SETS:
        raise ValueError(f"a set is one of {sorted(SETS)}, got {name=}; choose one")
    return tokenize(SETS[name](seed), tokens=tokens, tokenizer=tokenizer or smollm2(), seed=seed, drop_longer=drop_longer, rows=rows)


def tokenize(source: Source, *, tokens: int, tokenizer: Tokenizer, seed: int = 0, drop_longer: bool = False,
             rows: tuple[int | None, int | None, int | None] = (None, None, None)) -> Task:  # fmt: skip
    """A source of text as a task of at most `tokens` tokens a row. Subsets are drawn before rows are dropped. Raises ValueError."""
    choices = class_tokens(source.classes, tokenizer) if source.classes else None
    parts, dropped = [], {}
    for part, count in zip(("train", "validation", "test"), rows, strict=True):
        taken = _taken(getattr(source, part), source.classes, count, seed)
        examples = encode_classes(taken, source.classes, choices, tokenizer) if choices is not None else encode_answers(taken, tokenizer)
        kept, dropped[part] = fitting(examples, tokens, what=f"{source.name}, {part}", drop_longer=drop_longer)
        parts.append(kept)
    return Task(train=parts[0], validation=parts[1], test=parts[2], name=source.name, citation=source.citation, dropped=dropped)


def _taken(rows: list[tuple[str, str]], classes: tuple[str, ...], count: int | None, seed: int) -> list[tuple[str, str]]:
    if count is None:
        return rows
    index = {name: c for c, name in enumerate(classes)}
    labels = np.array([index[name] for _, name in rows]) if classes else np.zeros(len(rows), np.int64)
    return [rows[int(i)] for i in subset(labels, count, seed=seed)]
