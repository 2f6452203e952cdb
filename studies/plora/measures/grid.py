"""The recorded grid: learning curves of many configurations under several seeds, trained in packs, for searches that replay them.

    grid(ctx, model="smollm2", task={"name": "banking77", "rows": [None, 400, 1000]}, tokens=64, learning_rates=[...], ranks=[8, 16, 32, 64],
         batches=[1, 2, 4, 8], alpha_ratios=[1, 4], seeds=3, budget_tokens=200_000, looks=12, slots=64)
    pack_times(ctx, model="smollm2", task=..., tokens=64, packs=[[[64, 1]] * 64, [[16, 4]]], micro_steps=64, repeats=5)

`grid` trains every configuration under every seed, a wave of slots at a time, and looks at all of a wave at once. Record "curves": a line for
each adapter, as studies.plora.search.recorded reads it, with the score of the finished adapter on the test rows, which no search sees.
`pack_times`: record "times", as studies.plora.search.recorded.StepTimes takes them: lines of (live adapters, rows a slot, widest rank, seconds of a
micro-step), and of (live adapters, seconds of a packed evaluation), medians of `repeats`. Every slot's batch is its rows, so every micro-step
ends with the optimizer's: times of the dearest kind.

Long: it saves its curves after every wave, and pauses there where the next wave would not end in time: the state is small then. Where time is up
inside a wave, the adapters are saved too (gigabytes for a wide pack). A resumed run gives the curves of an unbroken one.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, PackShape, SlotShape
from studies.plora.measures.live import Setting, add_looks, setting_of, slots_for
from studies.plora.search.saved import load_state, save_state
from suite.measure import Context, Pause, Result

__all__ = ["configurations", "grid", "pack_times"]

STATE = "grid.npz"


def configurations(
    *, learning_rates: Sequence[float], ranks: Sequence[int], batches: Sequence[int], alpha_ratios: Sequence[float], seeds: int, budget_tokens: int,
) -> list[AdapterConfig]:  # fmt: skip
    """Every configuration under every seed, seed by seed."""
    return [
        AdapterConfig(rank=rank, alpha=ratio * rank, learning_rate=rate, batch=batch, budget_tokens=budget_tokens, seed=seed)
        for seed in range(seeds) for rank in ranks for batch in batches for ratio in alpha_ratios for rate in learning_rates
    ]  # fmt: skip


def grid(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, learning_rates: Sequence[float], ranks: Sequence[int], batches: Sequence[int], alpha_ratios: Sequence[float], seeds: int,
    budget_tokens: int, looks: int, slots: int, path: str = "triton",
) -> Result:  # fmt: skip
    """Metrics: curves, tokens_per_s (real ones, of training alone), padding_share (of the positions of rows), best_score, device_s, diverged."""
    adapters = configurations(learning_rates=learning_rates, ranks=ranks, batches=batches, alpha_ratios=alpha_ratios, seeds=seeds, budget_tokens=budget_tokens)
    setting = setting_of(ctx, model=model, task=task, tokens=tokens)
    shape = PackShape(tokens=tokens, slots=slots_for(tuple(a.rank for a in adapters), slots))
    recording = _Recording(ctx=ctx, setting=setting, shape=shape, path=path, waves=_waves(adapters, shape), every=_every(setting, budget_tokens, looks))
    recording.run()
    return recording.result()


def _waves(adapters: Sequence[AdapterConfig], shape: PackShape) -> list[dict[int, AdapterConfig]]:
    """Slot -> adapter of each wave. The widest adapters choose first: the earliest wave that has a free slot for them, there the narrowest such slot."""
    waves: list[dict[int, AdapterConfig]] = []
    for adapter in sorted(adapters, key=lambda a: -a.rank):
        fitting = sorted((i for i, slot in enumerate(shape.slots) if slot.rank >= adapter.rank), key=lambda i: (shape.slots[i].rank, i))
        wave = next((w for w in waves if any(i not in w for i in fitting)), None)
        if wave is None:
            waves.append(wave := {})
        wave[next(i for i in fitting if i not in wave)] = adapter
    return waves


def _every(setting: Setting, budget_tokens: int, looks: int) -> int:
    """Micro-steps between looks, of slots that pass one sequence each."""
    return max(1, math.ceil(budget_tokens / setting.tokens_a_sequence / looks))


@dataclass(kw_only=True)
class _Recording:
    """The state of a cell between two pieces: the wave, its pack, and the looks so far."""

    ctx: Context
    setting: Setting
    shape: PackShape
    path: str
    waves: list[dict[int, AdapterConfig]]
    every: int
    wave: int = 0
    curves: list[dict[str, Any]] = field(default_factory=list)
    looks: dict[int, list[Evaluation]] = field(default_factory=dict)  # of this wave, by slot
    train_s: float = 0.0
    evaluate_s: float = 0.0
    passed: int = 0  # real tokens
    longest_wave_s: float = 0.0  # in this piece

    def run(self) -> None:
        pack = self.setting.pack(self.shape, path=self.path)
        self._resume(pack)
        while self.wave < len(self.waves):
            began = time.monotonic()
            if self.ctx.deadline is not None and self.longest_wave_s and began + self.longest_wave_s > self.ctx.deadline:
                raise Pause  # saved after the last wave
            if not pack.live():
                for slot, adapter in self.waves[self.wave].items():
                    pack.admit(slot, adapter)
                self.looks = {slot: [] for slot in self.waves[self.wave]}
            while not all(p.done for p in pack.live().values()):
                self._look(pack)
                if self.ctx.time_is_up():
                    self._save(pack)
                    raise Pause
            self._close(pack)
            self._save(pack)
            self.longest_wave_s = max(self.longest_wave_s, time.monotonic() - began)

    def _look(self, pack: Pack) -> None:
        before = sum(p.tokens_seen for p in pack.live().values())
        self.train_s += pack.advance(self.every)
        self.passed += sum(p.tokens_seen for p in pack.live().values()) - before
        found, spent_s = pack.evaluate()
        self.evaluate_s += spent_s
        add_looks(self.looks, found)

    def _close(self, pack: Pack) -> None:
        """The wave's curves, with test scores from the finished adapters."""
        tested = self.setting.tested(pack)
        steps = {slot: p.optimizer_steps for slot, p in pack.live().items()}
        for slot, adapter in self.waves[self.wave].items():
            pack.release(slot)
            self.curves.append(_line(adapter, self.looks[slot], steps[slot], tested[slot]))
        self.wave, self.looks = self.wave + 1, {}

    def _save(self, pack: Pack) -> None:
        self.ctx.state_dir.mkdir(parents=True, exist_ok=True)
        looks = {str(slot): [asdict(e) for e in looks] for slot, looks in self.looks.items()}
        ledger = {"wave": self.wave, "curves": self.curves, "looks": looks, "train_s": self.train_s, "evaluate_s": self.evaluate_s, "passed": self.passed}
        save_state(self.ctx.state_dir / STATE, {"ledger": json.dumps(ledger), "pack": pack.state() if self.looks else None})

    def _resume(self, pack: Pack) -> None:
        saved = load_state(self.ctx.state_dir / STATE)
        if saved is None:
            return
        ledger = json.loads(saved["ledger"])
        self.looks = {int(slot): [Evaluation(**e) for e in looks] for slot, looks in ledger.pop("looks").items()}
        for name, value in ledger.items():
            setattr(self, name, value)
        if saved["pack"] is not None:
            pack.restore(saved["pack"])

    def result(self) -> Result:
        sequences = sum(line["sequences"] for line in self.curves)
        real = sum(line["tokens"][-1] for line in self.curves)
        scores = [line["scores"][-1] for line in self.curves if line["scores"][-1] is not None]
        if not scores:
            raise ValueError(f"some adapter of a grid ends with a finite score, got none of {len(self.curves)}; lower the learning rates")
        task = self.setting.task
        return Result(
            metrics={"curves": float(len(self.curves)), "tokens_per_s": self.passed / self.train_s, "padding_share": 1 - real / (sequences * self.shape.tokens), "best_score": max(scores),
                     "device_s": self.train_s + self.evaluate_s, "diverged": float(len(self.curves) - len(scores))},
            records={"curves": self.curves, "task": {"name": task.name, "citation": task.citation, "rows": [len(p) for p in task.parts], "classes": task.classes, "dropped": dict(task.dropped)}},
        )  # fmt: skip


def _line(adapter: AdapterConfig, looks: Sequence[Evaluation], steps: int, test: Evaluation) -> dict[str, Any]:
    seen = looks[-1].tokens_seen
    sequences = steps * adapter.batch  # tokens count when their batch was stepped on
    return {"adapter": adapter.to_json(), "tokens": [e.tokens_seen for e in looks], "scores": [_finite(e.score) for e in looks], "losses": [_finite(e.loss) for e in looks],
            "sequences": sequences, "tokens_a_sequence": seen / sequences, "test_score": _finite(test.score)}  # fmt: skip


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def pack_times(
    ctx: Context, *, model: str, task: Mapping[str, Any], tokens: int, packs: Sequence[Sequence[Sequence[int]]], micro_steps: int, repeats: int, path: str = "triton", single_path: str = "looped",
) -> Result:  # fmt: skip
    """packs: of each the (rank, rows) of its slots; packs of one slot take `single_path`. Metrics: micro_step_s and evaluate_s of the largest pack."""
    setting = setting_of(ctx, model=model, task=task, tokens=tokens)
    steps: dict[tuple[int, int, int], list[float]] = {}
    looks: dict[int, list[float]] = {}
    samples = []
    for pairs in packs:
        slots = tuple(SlotShape(rank=rank, rows=rows) for rank, rows in pairs)
        timed = _timed(setting.pack(PackShape(tokens=tokens, slots=slots), path=path if len(slots) > 1 else single_path), slots, micro_steps, repeats)
        samples.append({"slots": [list(pair) for pair in pairs], **timed})
        steps[len(slots), max(s.rows for s in slots), max(s.rank for s in slots)] = timed["micro_step_s"]
        looks.setdefault(len(slots), []).extend(timed["evaluate_s"])
        gc.collect()  # a pack refers to itself by its captured functions
    middle = lambda table: {key: statistics.median(values) for key, values in table.items()}  # noqa: E731
    step, look = middle(steps), middle(looks)
    largest = max(step)
    return Result(metrics={"micro_step_s": step[largest], "evaluate_s": look[largest[0]]},
                  records={"times": {"micro_step_s": [[*key, s] for key, s in step.items()], "evaluate_s": [[key, s] for key, s in look.items()]}, "samples": samples})  # fmt: skip


def _timed(pack: Pack, slots: Sequence[SlotShape], micro_steps: int, repeats: int) -> dict[str, list[float]]:
    for i, slot in enumerate(slots):
        pack.admit(i, AdapterConfig(rank=slot.rank, alpha=2.0 * slot.rank, learning_rate=2e-5, batch=slot.rows, budget_tokens=2**60, seed=i, schedule="constant", warmup=0.0))
    pack.advance(2)
    pack.evaluate()  # warm
    return {"micro_step_s": [pack.advance(micro_steps) / micro_steps for _ in range(repeats)], "evaluate_s": [pack.evaluate()[1] for _ in range(repeats)]}
