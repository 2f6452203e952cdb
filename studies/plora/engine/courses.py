"""What passes when: the order of every adapter's data, its batches, and what each micro-step and optimizer step of a pack is to do.

    course = Course(adapter=adapter, rows=len(task.train))
    plan = plan_steps({0: course}, shape, lengths, answers, micro_steps=8)       # moves the courses on
    plan.rows_NB[0], plan.due_N[0]                                             # rows of the first micro-step; whether any batch is full after it

On the host, without torch: a plan is a function of the adapters and of where they are, never of a neighbour. Legend: N micro-steps, B sequences of
a micro-step (slots one after another), S slots. A batch of `adapter.batch` sequences fills over micro-steps of at most the slot's rows; the rest
of a slot's rows stays idle (row number `len(lengths)`, which has no tokens). Each epoch is a permutation of its own, by Philox under the adapter's
seed. An adapter is done at the end of the batch in which it reaches its budget: tokens count when their batch has been stepped on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.exact.philox import philox_integers
from kernels.lora.optimizer import SlotStep
from studies.plora.adapter import AdapterConfig, PackShape

__all__ = ["Course", "Plan", "plan_steps"]

_STREAM = 2**31  # of Philox: above the sites, whose A is drawn under the same seed
_SETTINGS = len(SlotStep(learning_rate=0.0, step=1).settings())


@dataclass
class Course:
    """One adapter's way. passed: sequences; micro_steps: in which it took part (dropout's step); the others as in adapter.Progress.

    filled, open_tokens, open_answers: sequences, real tokens and answer tokens of the batch that is not full yet.
    """

    adapter: AdapterConfig
    rows: int  # of the training part
    passed: int = 0
    micro_steps: int = 0
    tokens_seen: int = 0
    optimizer_steps: int = 0
    filled: int = 0
    open_tokens: int = 0
    open_answers: int = 0
    _epoch: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        return self.tokens_seen >= self.adapter.budget_tokens

    def next_rows(self, count: int) -> list[int]:
        """The next rows of the data."""
        places = [divmod(p, self.rows) for p in range(self.passed, self.passed + count)]
        self.passed += count
        return [int(self._order(epoch)[at]) for epoch, at in places]

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, np.argsort(philox_integers(self.rows, self.adapter.seed, _STREAM + epoch), kind="stable"))
        return self._epoch[1]

    def to_json(self) -> dict[str, Any]:
        numbers = ("rows", "passed", "micro_steps", "tokens_seen", "optimizer_steps", "filled", "open_tokens", "open_answers")
        return {"adapter": self.adapter.to_json()} | {name: getattr(self, name) for name in numbers}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Course:
        return cls(**{**data, "adapter": AdapterConfig.from_json(data["adapter"])})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """rows_NB: int64, rows of the training part. steps_NS: int64, dropout's step. settings_NSF: float32, kernels.lora.optimizer.SlotStep.settings of
    every slot (zeros: not due). due_N: bool, whether an optimizer step follows the micro-step."""  # fmt: skip

    rows_NB: np.ndarray
    steps_NS: np.ndarray
    settings_NSF: np.ndarray
    due_N: np.ndarray

    def __len__(self) -> int:
        return len(self.due_N)


def plan_steps(courses: Mapping[int, Course], shape: PackShape, lengths: np.ndarray, answers: np.ndarray, *, micro_steps: int) -> Plan:
    """Up to so many micro-steps, fewer where every adapter is done before. lengths, answers: tokens and answer tokens of each row."""
    starts = np.cumsum([0, *(s.rows for s in shape.slots)])
    rows = np.full((micro_steps, starts[-1]), len(lengths), np.int64)
    steps = np.zeros((micro_steps, len(shape.slots)), np.int64)
    settings = np.zeros((micro_steps, len(shape.slots), _SETTINGS), np.float32)
    made = 0
    for n in range(micro_steps):
        training = [(slot, course) for slot, course in courses.items() if not course.done]
        if not training:
            break
        made = n + 1
        for slot, course in training:
            take = min(shape.slots[slot].rows, course.adapter.batch - course.filled)
            chosen = course.next_rows(take)
            rows[n, starts[slot] : starts[slot] + take] = chosen
            steps[n, slot] = course.micro_steps
            course.micro_steps += 1
            course.filled += take
            course.open_tokens += sum(int(lengths[row]) for row in chosen)
            course.open_answers += sum(int(answers[row]) for row in chosen)
            if course.filled == course.adapter.batch:
                settings[n, slot] = _full(course).settings()
    return Plan(rows_NB=rows[:made], steps_NS=steps[:made], settings_NSF=settings[:made], due_N=settings[:made, :, 0].any(axis=1))


def _full(course: Course) -> SlotStep:
    """The optimizer step of a full batch; the course goes on with an empty one."""
    adapter = course.adapter
    course.tokens_seen += course.open_tokens
    course.optimizer_steps += 1
    step = SlotStep(
        learning_rate=adapter.rate_at(course.tokens_seen), step=course.optimizer_steps, divisor=float(course.open_answers), weight_decay=adapter.weight_decay, clip=adapter.clip
    )
    course.filled = course.open_tokens = course.open_answers = 0
    return step
