"""Training a recommender, reproducibly: one seed gives the initial values, the examples come in a fixed order, a run may pause and go on.

    learner = Learner(Training(size="small", steps=100, batch=1024), seed=1, device="cpu")
    learner.transform(lambda model, example: apply(model, plan, *example))       # the dense part in another arithmetic, same parameters
    train(learner, lambda i: planted.batch(i, 1024), ctx)
    logits_B = learner.logits(batch)

Tables learn by rowwise Adagrad, the rest by Adam, as Wukong was trained (arXiv 2403.02545, section 5.1); both rates rise over the first tenth
of the steps and then fall to zero along a line, so that a run's end does not hang on its last batches. Parameters are float32 and what is
between products is float32: arms differ in their products alone.

A model may have more fields than the data (Wukong's 760): column j then looks up field j mod F in a table of its own, with a hash of its own.
Missing dense features are zeros. It does no dropout, no weight decay, no clipping and no loss scaling, and one epoch of a stream only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from studies.loka.data.batch import Batch
from studies.models.recommenders import LOKA_MODS, MODELS, PUBLISHED, Mods, embeddings
from suite.measure import Context, Pause

__all__ = ["Learner", "MODS", "Training", "in_order", "mods_named", "perturb", "train"]

STATE = "training.pt"
SAVE_EVERY_S = 120.0
AHEAD = 8  # batches drawn beside the training of a GPU
_SALT = 0x632BE5AB  # odd: columns that look up one field hash its ids apart
MODS = {"nobias": {"bias": LOKA_MODS.bias}, "blocknorm": {"norm": LOKA_MODS.norm}, "hardswish": {"activation": LOKA_MODS.activation}}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained and how; examples seen are steps * batch."""

    model: str = "wukong"
    size: str = "small"
    mods: str = ""  # of `mods_named`
    steps: int
    batch: int
    table_rows: int = 1000  # a field
    dense_rate: float = 2e-3
    table_rate: float = 0.05

    def __post_init__(self) -> None:
        if self.model not in MODELS or self.model == "hstu":
            raise ValueError(f"trained are the models of dense features and fields, {sorted(set(MODELS) - {'hstu'})}, got {self.model=}")
        mods_named(self.mods, PUBLISHED[self.model])
        if self.steps < 1 or self.batch < 2 or not (self.dense_rate > 0 and self.table_rate > 0):
            raise ValueError(f"need steps >= 1, batch >= 2 and rates above 0, got {self.steps=} {self.batch=} {self.dense_rate=} {self.table_rate=}")

    def rate(self, step: int) -> float:
        """The share of the rates that update `step` (from 0) gets."""
        rise = max(self.steps // 10, 1)
        return min((step + 1) / rise, (self.steps - step) / max(self.steps - rise, 1), 1.0)


def mods_named(names: str, published: Mods) -> Mods:
    """`published` with some of LoKA's Mods, joined by "+": "" for none, "nobias+blocknorm+hardswish" for all three."""
    wanted = names.split("+") if names else []
    if unknown := [n for n in wanted if n not in MODS]:
        raise ValueError(f"mods are some of {list(MODS)} joined by '+', got {unknown} in {names!r}")
    for name in wanted:
        published = replace(published, **MODS[name])
    return published


class Learner:
    """A model, its tables and both optimizers; `step` is the number of updates made."""

    def __init__(self, config: Training, *, seed: int, device: torch.device | str) -> None:
        self.config, self.device, self.step = config, torch.device(device), 0
        self.losses: list[torch.Tensor] = []  # of each update
        self.model = MODELS[config.model](mods_named(config.mods, PUBLISHED[config.model]), config.size, seed=seed, device=device)
        shape = self.model.config
        self.dense, self.fields = shape.dense, shape.fields
        self.tables = embeddings(fields=shape.fields, rows=config.table_rows, dim=getattr(shape, "field_dim", None) or shape.dim, seed=seed + 1, device=device)
        self.table_sums = torch.zeros(len(self.tables.table), 1, device=device)  # rowwise Adagrad's sum of mean squares
        self.adam = torch.optim.Adam(self.model.parameters(), lr=config.dense_rate)
        self.run: nn.Module = self.model

    def transform(self, change: Callable[[nn.Module, tuple], nn.Module]) -> None:
        """Runs `change(model, example)` from now on, which shares the model's parameters."""
        self.run = change(self.model, self.model.example(2, 0, device=self.device))

    def logits(self, batch: Batch) -> torch.Tensor:
        """float32 [B], differentiable in the model's parameters and the tables."""
        if batch.dense.shape[1] > self.dense:
            raise ValueError(f"a model reads at least the data's dense features, got {batch.dense.shape[1]} for {self.dense}; take another size")
        dense_BF = F.pad(batch.dense, (0, self.dense - batch.dense.shape[1]))
        return self.run(dense_BF, self.tables(self.columns(batch.ids)))

    def columns(self, ids_BF: torch.Tensor) -> torch.Tensor:
        """[B, N]: the data's ids, again and again until each of the model's fields has a column."""
        if ids_BF.shape[1] > self.fields:
            raise ValueError(f"a model has at least the data's fields, got {ids_BF.shape[1]} for {self.fields}; take another size")
        column = torch.arange(self.fields, device=ids_BF.device)
        return ids_BF[:, column % ids_BF.shape[1]] + column // ids_BF.shape[1] * _SALT

    def update(self, batch: Batch) -> None:
        """One step on the mean log-loss of the batch."""
        share = self.config.rate(self.step)
        loss = F.binary_cross_entropy_with_logits(self.logits(batch), batch.y)
        self.adam.zero_grad(set_to_none=True)
        self.tables.table.grad = None
        loss.backward()
        for group in self.adam.param_groups:
            group["lr"] = self.config.dense_rate * share
        self.adam.step()
        self._update_tables(self.config.table_rate * share)
        self.step += 1
        self.losses.append(loss.detach())  # unread: no wait for a GPU

    def _update_tables(self, rate: float) -> None:
        """Rowwise Adagrad: a row's step is divided by the root of its summed mean squares; rows without a gradient stay."""
        table, grad = self.tables.table, self.tables.table.grad
        with torch.no_grad():
            self.table_sums += grad.square().mean(1, keepdim=True)
            table -= rate * grad / (self.table_sums.sqrt() + 1e-8)

    def state(self) -> dict:
        return {"step": self.step, "model": self.model.state_dict(), "tables": self.tables.state_dict(), "table_sums": self.table_sums, "adam": self.adam.state_dict(),
                "losses": torch.stack(self.losses)}  # fmt: skip

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.tables.load_state_dict(state["tables"])
        self.table_sums.copy_(state["table_sums"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.losses = state["step"], list(state["losses"])


def perturb(model: nn.Module, *, seed: int, size: float = 2.0**-20) -> None:
    """Multiplies each parameter by 1 + size or 1 - size, by a coin of `seed`: a difference below bf16's rounding, to see what chaos makes of it."""
    for p in model.parameters():
        generator = torch.Generator(device=p.device).manual_seed(seed)
        sign = torch.randint(2, p.shape, generator=generator, device=p.device) * 2 - 1
        with torch.no_grad():
            p.mul_(1 + size * sign)


def train(learner: Learner, batch_at: Callable[[int], Batch], ctx: Context) -> None:
    """The steps that are left, on batches `batch_at(step)`.

    It goes on from the state in `ctx.state_dir`, if one is there, and saves there now and then. Raises Pause, after saving, when time is up.
    """
    file = Path(ctx.state_dir) / STATE
    if file.is_file():
        learner.restore(torch.load(file, map_location=learner.device, weights_only=True))
    saved = time.monotonic()
    steps = range(learner.step, learner.config.steps)
    for batch in in_order(batch_at, steps, ahead=AHEAD if learner.device.type == "cuda" else 0):
        learner.update(batch.to(learner.device))
        left = learner.step < learner.config.steps
        if left and (ctx.time_is_up() or time.monotonic() - saved > SAVE_EVERY_S):
            _save(learner.state(), file)
            saved = time.monotonic()
        if left and ctx.time_is_up():
            raise Pause


def in_order(batch_at: Callable[[int], Batch], indices: range, *, ahead: int = 0) -> Iterator[Batch]:
    """`batch_at(i)` for each index in turn; with `ahead` that many are drawn by threads before they are asked for. The order never depends on it."""
    if not ahead:
        yield from map(batch_at, indices)
        return
    with ThreadPoolExecutor(ahead) as pool:
        waiting = [pool.submit(batch_at, i) for i in indices[:ahead]]
        for i in range(len(indices)):
            batch = waiting.pop(0).result()
            if i + ahead < len(indices):
                waiting.append(pool.submit(batch_at, indices[i + ahead]))
            yield batch


def _save(state: dict, file: Path) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, file)
