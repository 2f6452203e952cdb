"""What a search may vary of an adapter, and how a proposal becomes one.

    space = Space(axes={"learning_rate": Float(low=2e-5, high=4e-4, log=True), "rank": Levels(values=(8, 16, 32)), "batch": Choice(options=(1, 4))},
                  fixed={"alpha_ratio": 2.0})
    adapter = space.adapter({"learning_rate": 1e-4, "rank_level": 2, "batch": 4}, budget_tokens=100_000, seed=0)      # rank 32, alpha 64

Axes are fields of an AdapterConfig; `alpha_ratio` (alpha over rank) stands for alpha, because a rank changes what an alpha means.
`Levels` is an ordered list: the sampler sees the place in it, as a parameter `<name>_level`, so that it learns from neighbours, which a Choice
does not let it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from studies.plora.adapter import AdapterConfig
from suite.search import Choice, Distribution, Float, Int

__all__ = ["AXES", "PAPER", "Choice", "Float", "Int", "Levels", "Space"]

AXES = ("rank", "alpha_ratio", "learning_rate", "batch", "dropout", "weight_decay", "clip", "schedule", "warmup")
_NEEDED = ("rank", "alpha_ratio", "learning_rate", "batch")  # the others have defaults in AdapterConfig


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One of some values in their order."""

    values: tuple[int | float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values or list(self.values) != sorted(set(self.values)):
            raise ValueError(f"levels are different numbers, at least one, in rising order, got {self.values!r}; sort them")


@dataclass(frozen=True, kw_only=True)
class Space:
    """axes: what is searched, by name; fixed: values of what is not. rank, alpha_ratio, learning_rate and batch stand in one of the two."""

    axes: Mapping[str, Distribution | Levels]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = [*self.axes, *self.fixed]
        if unknown := sorted(set(named) - set(AXES)):
            raise ValueError(f"an axis is one of {AXES}, got {unknown}; rename it")
        if len(named) != len(set(named)) or (missing := sorted(set(_NEEDED) - set(named))):
            raise ValueError(f"each of {_NEEDED} is searched or fixed, once, got axes={list(self.axes)}, fixed={list(self.fixed)}; name what is missing")
        if not self.axes:
            raise ValueError(f"a space searches at least one axis, got fixed={dict(self.fixed)} alone; move one to axes")
        for corner in (0, -1):  # a bad end is found now, not after an hour
            self.adapter({_named(name, axis): _end(axis, corner) for name, axis in self.axes.items()}, budget_tokens=1, seed=0)

    def distributions(self) -> dict[str, Distribution]:
        """As suite.search takes it: levels are the places in their list."""
        return {_named(name, axis): Int(low=0, high=len(axis.values) - 1) if isinstance(axis, Levels) else axis for name, axis in self.axes.items()}

    def adapter(self, params: Mapping[str, Any], *, budget_tokens: int, seed: int) -> AdapterConfig:
        """The adapter that a proposal (`distributions`) stands for."""
        picked = {name: params[_named(name, axis)] for name, axis in self.axes.items()}
        values = {**self.fixed, **{n: self.axes[n].values[v] if isinstance(self.axes[n], Levels) else v for n, v in picked.items()}}
        return AdapterConfig(**{n: v for n, v in values.items() if n != "alpha_ratio"}, alpha=values["alpha_ratio"] * values["rank"], budget_tokens=budget_tokens, seed=seed)

    @property
    def largest_rank(self) -> int:
        axis = self.axes.get("rank")
        if axis is None:
            return self.fixed["rank"]
        return max(axis.options if isinstance(axis, Choice) else axis.values if isinstance(axis, Levels) else (axis.high,))


def _named(name: str, axis: Distribution | Levels) -> str:
    """What Optuna calls the axis: a place in a list must not look like its value."""
    return f"{name}_level" if isinstance(axis, Levels) else name


def _end(axis: Distribution | Levels, corner: int) -> Any:
    if isinstance(axis, Levels):
        return (0, len(axis.values) - 1)[corner]
    return axis.options[corner] if isinstance(axis, Choice) else (axis.low, axis.high)[corner]


# The ranges of PLoRA, section 6 (arXiv 2508.02932): learning rate 2e-5 to 4e-4, batch 1 to 32, rank 8 to 128, alpha a quarter of the rank to four times it.
PAPER = Space(
    axes={
        "learning_rate": Float(low=2e-5, high=4e-4, log=True),
        "batch": Levels(values=(1, 2, 4, 8, 16, 32)),
        "rank": Levels(values=(8, 16, 32, 64, 128)),
        "alpha_ratio": Levels(values=(0.25, 0.5, 1.0, 2.0, 4.0)),
    }
)
