"""Tune LoRA on a model of your own: many adapters at once on one frozen base, searched, pruned and refilled.

    found = tune(model, task, PAPER, Budget(trials=64, tokens=200_000), home="out/tuning")
    found.best.adapter, found.folder(found.best.number)         # its configuration, and its weights in PEFT's format

The model is a transformers model of the Llama or Qwen2 family (or a studies.plora.engine.base.Base), which is not changed. All that is known lies
in `home`: the same call goes on after a crash or Ctrl-C, and loses at most `checkpoint_s` of training. `optuna-dashboard` opens the journal in it.
Selection looks at the task's validation rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, SlotShape
from studies.plora.data.task import Task
from studies.plora.search.display import Display
from studies.plora.search.driver import Found, Searched, Strategy, drive, search_of
from studies.plora.search.pruner import Halving
from studies.plora.search.space import PAPER, Space
from suite.search import SearchRun

__all__ = ["Budget", "Tuned", "looks_of", "tune"]

LOOKS = 4  # between two rungs: a trial passes its rung by a quarter of that distance at most


@dataclass(frozen=True, kw_only=True)
class Budget:
    """trials: configurations to try. tokens: real ones that a trial sees if nobody ends it. slots: adapters at once."""

    trials: int
    tokens: int
    slots: int = 8

    def __post_init__(self) -> None:
        if min(self.trials, self.tokens, self.slots) < 1:
            raise ValueError(f"trials, tokens and slots are at least 1, got {self}; raise them")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found and where it lies. journal: for `optuna-dashboard`, or optuna.load_study."""

    found: Found
    home: Path
    journal: Path

    @property
    def best(self) -> Searched | None:
        return self.found.best

    @property
    def trials(self) -> tuple[Searched, ...]:
        return self.found.trials

    def folder(self, number: int) -> Path:
        """A finished trial's adapter: adapter_config.json and adapter_model.safetensors, for peft.PeftModel.from_pretrained."""
        trial = self.found.trials_by_number[number]
        if trial.state != "COMPLETE":
            raise ValueError(f"adapters of finished trials are kept, got trial {number}, which is {trial.state}; take one of {[t.number for t in self.trials if t.state == 'COMPLETE']}")
        return _folder(self.home, number if trial.twin_of is None else trial.twin_of)


def tune(
    model: Any, task: Task, space: Space = PAPER, budget: Budget = Budget(trials=64, tokens=200_000), *, home: str | Path, sampler: str = "tpe", seed: int = 0, prune: Halving = Halving(),
    refill: bool = True, checkpoint_s: float = 60.0, show: bool = True, path: str = "triton", deterministic: bool = False,
) -> Tuned:  # fmt: skip
    """seed: of the sampler and of every adapter. prune: NO_PRUNING trains all to their end. path: of the kernels, "triton" on a GPU.

    Raises ValueError for a model of another family, a task whose rows or ids do not suit it, a pack that does not fit the memory.
    """
    from studies.plora.engine.base import Base
    from studies.plora.engine.pack import EnginePack
    from studies.plora.engine.peft_format import export_adapter

    base = model if isinstance(model, Base) else Base.from_hf(model)
    home = Path(home)
    shape = PackShape(tokens=math.ceil(task.longest / 16) * 16, slots=(SlotShape(rank=space.largest_rank),) * budget.slots)
    pack: Pack = EnginePack(base, shape, task, path=path, deterministic=deterministic, graphed=base.device.type == "cuda")
    strategy = Strategy(prune=prune, refill=refill, micro_steps=looks_of(task, budget.tokens, prune), checkpoint_s=checkpoint_s)

    def keep(number: int, adapter: AdapterConfig, evaluation: Evaluation, weights: Any) -> None:
        export_adapter(_folder(home, number), adapter, weights, base_name=base.name)

    return searched(pack, space, budget, strategy, home=home, sampler=sampler, seed=seed, show=show, keep=keep, conditions=f"{base.name} on {task.name}, {budget.tokens} tokens")


def searched(
    pack: Pack, space: Space, budget: Budget, strategy: Strategy, *, home: Path, sampler: str, seed: int, show: bool, keep: Callable[..., None], conditions: str,
) -> Tuned:  # fmt: skip
    """`tune` over any pack."""
    search = search_of(space, name="tune", sampler=sampler, sampler_seed=seed, trials=budget.trials, slots=budget.slots)
    with SearchRun(search, home, conditions=conditions) as run, Display() as display:
        found = drive(
            run, pack, lambda params: space.adapter(params, budget_tokens=budget.tokens, seed=seed), strategy, home,
            keep=keep, listen=display.show if show else None,
        )  # fmt: skip
        return Tuned(found=found, home=home, journal=home / f"plora-tune-{run.name.rpartition('/')[2]}.journal")


def looks_of(task: Task, budget_tokens: int, prune: Halving) -> int:
    """Micro-steps between looks, of slots that pass one sequence each."""
    ends = (0.0, *prune.shares, 1.0)
    closest = min(b - a for a, b in zip(ends, ends[1:]))
    return max(1, math.floor(closest * budget_tokens / LOOKS / float(task.train.lengths.mean())))


def _folder(home: Path, number: int) -> Path:
    return home / "adapters" / f"trial-{number:04}"
