"""Cells of exactness: the bits of adapters packed and alone, beside neighbours that move, fail or are replaced, and what another padding changes.

    packed_equals_separate(ctx, model="tiny")       # equal_share: 1.0, or the engine is wrong
    isolation(ctx, model="smollm2")                 # isolated_share: likewise
    noise_floor(ctx, model="smollm2")               # noise_ratio: at most about 2

Adapters are of mixed ranks (some below their slot's), rows, batches, rates, schedules and clips; they train on the planted task. Record
"cases": {"case", "mode", "equal", "gap"}: `gap` is the largest distance of two trained adapters, over all their weights, relative to how far the first
has moved from its start (None: not finite). `equal` is that of weights, losses, progress and evaluation, bit for bit; None where no
bits are promised: without deterministic mode a GPU's library may choose other tiles for other shapes. Modes: "float32" on a CPU; "deterministic" and
"default" (both bf16) on a GPU.

The noise floor is what another padding does to an adapter alone: the same rows, in longer sequences. Adapters of `noise_floor` have no dropout, which is
drawn by a token's place in its segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from studies.plora.adapter import AdapterConfig, PackShape, SlotShape
from studies.plora.data.planted import synthetic
from studies.plora.data.task import Task
from studies.plora.engine.base import Base
from studies.plora.engine.pack import EnginePack
from studies.plora.engine.shapes import SHAPES
from suite.measure import Context, Result

__all__ = ["isolation", "noise_floor", "packed_equals_separate"]

TOKENS, STEPS, CHANGED_AT = 24, 20, 7  # micro-steps; every batch is full at least once before a neighbour changes and after
PADDINGS = (32, 40, 64)  # other lengths of sequences, for the same rows
CLASSES, ROWS = 8, (256, 32, 8)
SLOTS = (SlotShape(rank=16, rows=2), SlotShape(rank=16), SlotShape(rank=64, rows=3), SlotShape(rank=16, rows=4))
_ONE = AdapterConfig(rank=5, alpha=10.0, learning_rate=3e-3, batch=4, budget_tokens=10**6, seed=1, weight_decay=0.1)
ADAPTERS = (
    _ONE,
    replace(_ONE, rank=16, alpha=32.0, batch=2, seed=2**64 - 2, learning_rate=1e-3, schedule="cosine"),
    replace(_ONE, rank=30, alpha=7.0, batch=8, seed=3, clip=float("inf"), weight_decay=0.0),
    replace(_ONE, rank=16, batch=3, seed=4, schedule="constant", warmup=0.0, clip=0.05, dropout=0.25),
)
NEIGHBOUR = 1  # the slot in which things happen
OTHER = replace(_ONE, rank=7, batch=1, seed=9, learning_rate=5e-2, schedule="constant", warmup=0.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A base, a task, and the mode in which packs run."""

    base: Base
    task: Task
    mode: str

    @property
    def exact(self) -> bool:
        """Whether bits are promised whatever the shape of the pack."""
        return self.mode != "default"

    def pack(self, slots: Sequence[SlotShape], adapters: Mapping[int, AdapterConfig], *, tokens: int = TOKENS, steps: int = STEPS) -> EnginePack:
        made = EnginePack(self.base, PackShape(tokens=tokens, slots=tuple(slots)), self.task, deterministic=self.mode == "deterministic")
        for slot, adapter in adapters.items():
            made.admit(slot, adapter)
        if steps:
            made.advance(steps)
        return made

    def alone(self, slot: int, adapter: AdapterConfig, *, tokens: int = TOKENS) -> EnginePack:
        return self.pack((SLOTS[slot],), {0: adapter}, tokens=tokens)


def packed_equals_separate(ctx: Context, *, model: str) -> Result:
    """Every adapter of a mixed pack against itself in a pack of its own slot."""
    cases = []
    for setting in settings(ctx, model):
        pack = setting.pack(SLOTS, dict(enumerate(ADAPTERS)))
        for slot, adapter in enumerate(ADAPTERS):
            cases.append(_case(f"{_named(adapter)}, packed and alone", setting, [Pair.of(pack, slot, setting.alone(slot, adapter), 0)], promised=setting.exact))
    return Result(metrics={"equal_share": _share(cases)}, records={"cases": cases})


def isolation(ctx: Context, *, model: str) -> Result:
    """The other adapters of a pack against themselves, as if nothing had happened in the neighbour's slot; and in other slots."""
    cases = []
    for setting in settings(ctx, model):
        calm = setting.pack(SLOTS, dict(enumerate(ADAPTERS)))
        others = [s for s in range(len(SLOTS)) if s != NEIGHBOUR]
        for name, happening in HAPPENINGS.items():
            pack = setting.pack(SLOTS, dict(enumerate(ADAPTERS)), steps=0)
            happening(pack)
            if NEIGHBOUR in pack.live() and Pair.of(calm, NEIGHBOUR, pack, NEIGHBOUR).equal:
                raise AssertionError(f"a case in which nothing happens to the neighbour proves nothing, got its own bits after {name!r}; mend the case")
            cases.append(_case(name, setting, [Pair.of(calm, s, pack, s) for s in others], promised=True))
        order = (2, 0, 3, 1)
        moved = setting.pack([SLOTS[old] for old in order], {new: ADAPTERS[old] for new, old in enumerate(order)})
        cases.append(_case("slots in another order", setting, [Pair.of(calm, old, moved, new) for new, old in enumerate(order)], promised=setting.exact))
    return Result(metrics={"isolated_share": _share(cases)}, records={"cases": cases})


def noise_floor(ctx: Context, *, model: str) -> Result:
    """noise_ratio: distance of packed and alone over that of two paddings alone, each the mean over adapters (and paddings); 0 where packed and alone are equal."""
    setting = settings(ctx, model)[-1]
    adapters = [replace(a, dropout=0.0) for a in ADAPTERS]
    pack, cases, packed, padded = setting.pack(SLOTS, dict(enumerate(adapters))), [], [], []
    for slot, adapter in enumerate(adapters):
        alone = setting.alone(slot, adapter)
        beside = Pair.of(alone, 0, pack, slot)
        longer = [Pair.of(alone, 0, setting.alone(slot, adapter, tokens=tokens), 0) for tokens in PADDINGS]
        cases += [_case(f"{_named(adapter)}, alone and packed", setting, [beside], promised=False), _case(f"{_named(adapter)}, alone under other paddings", setting, longer, promised=False)]
        packed.append(beside.gap)
        padded += [pair.gap for pair in longer]
    return Result(metrics={"noise_ratio": ratio(packed, padded)}, records={"cases": cases})


def ratio(packed: Sequence[float], padded: Sequence[float]) -> float:
    floor, gap = float(np.mean(padded)), float(np.mean(packed))
    return gap / floor if floor else (0.0 if gap == 0 else float("inf"))


def settings(ctx: Context, model: str) -> list[Setting]:
    """One for each mode of the device. Raises ValueError for a model without a shape."""
    if model not in SHAPES:
        raise ValueError(f"a model is one of {sorted(SHAPES)}, got {model!r}; its shape stands in studies.plora.engine.shapes")
    cuda = ctx.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    base = Base.smollm2(device=ctx.device, dtype=dtype) if model == "smollm2" else Base.random(SHAPES[model], seed=ctx.seed, device=ctx.device, dtype=dtype)
    task = synthetic(vocabulary=base.config.vocabulary, classes=CLASSES, seed=ctx.seed, rows=ROWS, tokens=(6, TOKENS))
    return [Setting(base=base, task=task, mode=mode) for mode in (("deterministic", "default") if cuda else ("float32",))]


# ---- what happens to a neighbour -----------------------------------------------------------------------------------------------


def _poisoned(value: float) -> Callable[[EnginePack], None]:
    """Some of its weights are no numbers from the first step on."""

    def happening(pack: EnginePack) -> None:
        for name in ("master", "compute"):
            for view in pack.adapters.state.slot_views(NEIGHBOUR, name)[:4]:
                view[0, 0] = value
        pack.advance(STEPS)

    return happening


def _replaced(pack: EnginePack) -> None:
    pack.advance(CHANGED_AT)
    pack.release(NEIGHBOUR)
    pack.admit(NEIGHBOUR, OTHER)
    pack.advance(STEPS - CHANGED_AT)


def _another(pack: EnginePack) -> None:
    pack.release(NEIGHBOUR)
    pack.admit(NEIGHBOUR, OTHER)
    pack.advance(STEPS)


def _absent(pack: EnginePack) -> None:
    pack.advance(CHANGED_AT)
    pack.release(NEIGHBOUR)
    pack.advance(STEPS - CHANGED_AT)


HAPPENINGS: Mapping[str, Callable[[EnginePack], None]] = {
    "a neighbour with a NaN": _poisoned(float("nan")),
    "a neighbour with an infinity": _poisoned(float("inf")),
    "a neighbour of another rank, rate, batch and data order": _another,
    "a neighbour pruned and its slot refilled": _replaced,
    "a neighbour pruned and its slot left empty": _absent,
}


# ---- two adapters --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same adapter, trained twice."""

    equal: bool
    gap: float

    @staticmethod
    def of(pack: EnginePack, slot: int, other: EnginePack, there: int) -> Pair:
        mine, theirs = pack.weights(slot), other.weights(there)
        equal = mine.keys() == theirs.keys() and all(np.array_equal(mine[n], theirs[n]) for n in mine)
        equal = equal and pack.live()[slot] == other.live()[there] and pack.evaluate()[0][slot] == other.evaluate()[0][there]
        return Pair(equal=equal, gap=distance(mine, theirs, pack, slot) if mine.keys() == theirs.keys() and _shapes(mine) == _shapes(theirs) else float("inf"))


def distance(mine: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], pack: EnginePack, slot: int) -> float:
    """|mine - theirs| over |B of mine|, both by norm: B starts at zero, so its norm is how far it moved."""
    apart = sum(float(np.square(mine[n].astype(np.float64) - theirs[n]).sum()) for n in mine)
    moved = sum(float(np.square(mine[n].astype(np.float64)).sum()) for n in mine if "lora_B" in n)
    if not moved:
        raise AssertionError(f"an adapter that never moved proves nothing, got {pack.live()[slot]}; train it longer")
    return (apart / moved) ** 0.5


def _shapes(weights: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    return [w.shape for w in weights.values()]


def _case(name: str, setting: Setting, pairs: Iterable[Pair], *, promised: bool) -> dict[str, Any]:
    pairs = list(pairs)
    gaps = [p.gap for p in pairs]
    return {"case": name, "mode": setting.mode, "equal": all(p.equal for p in pairs) if promised else None, "gap": max(gaps) if all(map(math.isfinite, gaps)) else None}


def _share(cases: Sequence[Mapping[str, Any]]) -> float:
    """Of the cases whose bits are promised."""
    judged = [c["equal"] for c in cases if c["equal"] is not None]
    return sum(judged) / len(judged)


def _named(adapter: AdapterConfig) -> str:
    return f"rank {adapter.rank}, batch {adapter.batch}{', dropout' if adapter.dropout else ''}"
