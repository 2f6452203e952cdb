"""The nouns of the PLoRA study: what is tuned, where it runs, and what is known of it.

    adapter = AdapterConfig(rank=16, alpha=32.0, learning_rate=2e-4, batch=4, budget_tokens=200_000)
    shape = PackShape(tokens=128, slots=(SlotShape(rank=16), SlotShape(rank=64)))

An adapter is one configuration to train. A slot is a place in a pack: a rank capacity and a fixed number of sequences of `tokens`
positions that pass in one micro-step. All live slots pass the same number of sequences a micro-step; an adapter reaches its own batch by
accumulating micro-steps, and takes its optimizer step when its batch is full. The axis of training is tokens seen (real ones: prompt and
answer, padding not counted), never steps, because the batch is tuned.

Importing it imports no torch: planning and the command line read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["MODULES", "SCHEDULES", "AdapterConfig", "Evaluation", "Pack", "PackShape", "Progress", "SlotShape"]

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # every linear of a layer carries an adapter
SCHEDULES = ("constant", "linear", "cosine")  # of the learning rate over tokens seen / budget, after the warm-up
MAX_RANK = 128


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """One LoRA to train. rank 1..128; alpha: the product is scaled by alpha / rank; batch: sequences an optimizer step; dropout: of the
    adapter's input; clip: of its gradient's norm (inf: none); warmup: share of the budget; seed: of A's start, dropout and the data's order.
    AdamW (Loshchilov and Hutter 2019) with betas 0.9, 0.999 and eps 1e-8.
    """

    rank: int
    alpha: float
    learning_rate: float
    batch: int
    budget_tokens: int
    seed: int = 0
    dropout: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    schedule: str = "linear"
    warmup: float = 0.03

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"a rank is from 1 to {MAX_RANK}, got {self.rank=}; choose one in this range")
        if self.batch < 1 or self.budget_tokens < 1:
            raise ValueError(f"batch and budget are at least 1, got {self.batch=} {self.budget_tokens=}; raise them")
        if not (0 < self.learning_rate < math.inf and 0 < self.alpha < math.inf and self.clip > 0 and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"learning_rate, alpha and clip are positive and weight_decay is not negative, got {self}; mend it")
        if not (0 <= self.dropout < 1 and 0 <= self.warmup < 1):
            raise ValueError(f"dropout and warmup are in [0, 1), got {self.dropout=} {self.warmup=}; lower them")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"a schedule is one of {SCHEDULES}, got {self.schedule!r}; choose one")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def rate_at(self, tokens_seen: int) -> float:
        """Learning rate of the optimizer step that is taken after `tokens_seen` tokens of the budget."""
        share = min(1.0, tokens_seen / self.budget_tokens)
        if share < self.warmup:
            return self.learning_rate * share / self.warmup
        left = (1.0 - share) / (1.0 - self.warmup)
        return self.learning_rate * {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[self.schedule]

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterConfig:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """rank: capacity of rank rows; rows: sequences a micro-step."""

    rank: int
    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """tokens: positions of every sequence (longer examples are refused, shorter ones padded)."""

    tokens: int
    slots: tuple[SlotShape, ...]

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.slots or any(not 1 <= s.rank <= MAX_RANK or s.rows < 1 for s in self.slots):
            raise ValueError(f"a pack has tokens, and slots with a rank of 1 to {MAX_RANK} and at least one row, got {self}; mend it")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One look at an adapter on its validation rows. score: higher is better (accuracy, or minus the answer loss where there are no labels)."""

    tokens_seen: int
    score: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a live adapter is. loss: mean answer loss of its last full batch (NaN before the first)."""

    adapter: AdapterConfig
    tokens_seen: int
    optimizer_steps: int
    loss: float

    @property
    def done(self) -> bool:
        return self.tokens_seen >= self.adapter.budget_tokens


class Pack(Protocol):
    """A pack as a search sees it: the engine's (studies.plora.engine.pack) trains, the recorded one (studies.plora.search.recorded) replays."""

    shape: PackShape

    def admit(self, slot: int, adapter: AdapterConfig) -> None:
        """Start `adapter` in an empty slot: fresh A, B, Adam state, schedule, random streams, data order. Raises ValueError where it does not fit."""

    def release(self, slot: int) -> Any:
        """Empty the slot; returns the adapter's weights (engine: dict of float32 arrays by PEFT names), whatever stage it is in."""

    def advance(self, micro_steps: int) -> float:
        """Up to so many micro-steps (an adapter that reaches its budget stops there and idles); returns device-seconds spent."""

    def live(self) -> dict[int, Progress]:
        """Slot -> progress of every admitted adapter."""

    def evaluate(self) -> tuple[dict[int, Evaluation], float]:
        """All live adapters on the validation rows in one packed pass; and the device-seconds spent."""

    def state(self) -> dict[str, Any]:
        """All that training depends on, as numpy arrays, numbers and strings in nested dicts, for `restore`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
