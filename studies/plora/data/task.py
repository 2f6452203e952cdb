"""Task: what adapters are trained and judged on, as token ids. Examples: rows of a prompt and its answer.

    rows = Examples(ids=(np.array([5, 6, 9], np.int32),), answer_from=np.array([2], np.int32))      # prompt 5 6, answer 9
    rows.lengths, rows.answer_tokens                                                               # [3], [1]

The answer is all that is learnt: the loss of a row is over the targets ids[answer_from:], each predicted at the position before it.
Where the rows have classes, each class has one answer token of its own and a row's answer is that token alone: accuracy is the argmax
over `choices` of the logits at position answer_from - 1. A task without classes is judged by minus its answer loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Examples", "Task"]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """n rows. ids: n int32 arrays, prompt then answer. answer_from: int32 [n], where the answer begins, at least 1. labels: int32 [n] or
    None, indices into `choices`: int32 [C] token ids, distinct.
    """

    ids: tuple[np.ndarray, ...]
    answer_from: np.ndarray
    labels: np.ndarray | None = None
    choices: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        if n == 0 or self.answer_from.shape != (n,) or (self.labels is None) != (self.choices is None):
            raise ValueError(f"examples have at least one row, an answer_from each, and labels with choices or neither, got {n=} "
                             f"{self.answer_from.shape=} labels={self.labels is not None} choices={self.choices is not None}; give what is missing")
        dtypes = {a.dtype for a in (*self.ids, self.answer_from, self.labels, self.choices) if a is not None}
        if dtypes != {np.dtype(np.int32)}:
            raise ValueError(f"token ids, positions and labels are int32, got {sorted(map(str, dtypes))}; convert them")
        no_answer = np.flatnonzero((self.answer_from < 1) | (self.answer_from >= self.lengths))
        if len(no_answer):
            raise ValueError(f"a row has at least one prompt token and one answer token, got {len(no_answer)} that have not, first row {no_answer[0]}; drop them")
        if any(int(row.min()) < 0 for row in self.ids):
            raise ValueError("token ids are not negative, got one that is; was padding written into the row? rows are stored without it")
        if self.labels is not None:
            self._check_classes(self.labels, self.choices)

    def _check_classes(self, labels: np.ndarray, choices: np.ndarray) -> None:
        if len(np.unique(choices)) != len(choices) or labels.shape != (len(self),):
            raise ValueError(f"every class has an answer token of its own and every row a label, got {len(choices)} choices, "
                             f"{len(np.unique(choices))} of them distinct, and {labels.shape=}; choose other answer tokens")
        if labels.min() < 0 or labels.max() >= len(choices):
            raise ValueError(f"labels lie below the {len(choices)} classes, got {labels.min()} to {labels.max()}; mend them")
        answers = np.array([row[at] for row, at in zip(self.ids, self.answer_from, strict=True)])
        if (self.answer_tokens != 1).any() or (answers != choices[labels]).any():
            raise ValueError("the answer of a row with a class is the class's one token, got a row where it is not; end rows with choices[label]")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, prompt and answer: int32 [n]."""
        return np.array([len(row) for row in self.ids], np.int32)

    @property
    def answer_tokens(self) -> np.ndarray:
        """Answer tokens of each row: int32 [n]."""
        return self.lengths - self.answer_from

    def take(self, rows: np.ndarray) -> Examples:
        """The rows of these indices, in their order."""
        labels = None if self.labels is None else self.labels[rows]
        return Examples(ids=tuple(self.ids[int(i)] for i in rows), answer_from=self.answer_from[rows], labels=labels, choices=self.choices)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Selection looks at `validation`; `test` is for the report alone. `citation` names the source of the text, `dropped` counts rows of each
    part that were too long."""  # fmt: skip

    train: Examples
    validation: Examples
    test: Examples
    name: str
    citation: str
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = [None if part.choices is None else part.choices.tolist() for part in self.parts]
        if not choices[0] == choices[1] == choices[2]:
            raise ValueError(f"the parts of a task have the same classes, got different choices in {self.name}; tokenize them together")

    @property
    def parts(self) -> tuple[Examples, Examples, Examples]:
        return self.train, self.validation, self.test

    @property
    def classes(self) -> int:
        """Number of classes; 0 where the task is judged by its answer loss."""
        return 0 if self.train.choices is None else len(self.train.choices)

    @property
    def longest(self) -> int:
        """Tokens of the longest row of any part: the least `PackShape.tokens` that takes it."""
        return max(int(part.lengths.max()) for part in self.parts)

    @property
    def largest_id(self) -> int:
        """The largest token id: a model's vocabulary must exceed it."""
        ids = max(int(row.max()) for part in self.parts for row in part.ids)
        return ids if self.train.choices is None else max(ids, int(self.train.choices.max()))
