"""The loop of a packed search: ask until the slots are full, train, look at all in one pass, end losers, refill.

    search = search_of(space, name="tpe", sampler="tpe", sampler_seed=0, trials=64, slots=len(pack.shape.slots))
    with SearchRun(search, home) as run:
        found = drive(run, pack, lambda params: space.adapter(params, budget_tokens=100_000, seed=0), Strategy(), home)
    found.best.adapter, found.seconds

A cycle fills free slots, advances the pack by `micro_steps`, and where a trial passed a rung or its budget, evaluates all live adapters in one packed
pass. Optuna hears scores at rungs (step: the rung's tokens, so that equal steps are equal training), pruned trials and finished ones.

What survives a kill -9 of the process at any moment: Optuna's journal, a log of events (saved.py), and a checkpoint of the pack. An event is in
the log before Optuna hears of it, and telling again is no telling. To resume, the search takes all decisions from the log and trains only from the
checkpoint on (or from the last moment when the pack was empty): no trial is lost, none is told twice, and since engines are deterministic the
rest is what an unbroken run would have been. Training that is repeated costs wall time, and is not counted again in `seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from studies.plora.adapter import AdapterConfig, Evaluation, Pack, Progress
from studies.plora.search.pruner import Halving, Rungs
from studies.plora.search.saved import EventLog, load_state, save_state
from studies.plora.search.space import Space
from suite.measure import Pause
from suite.search import Search, SearchRun

__all__ = ["FLAGS", "Found", "Searched", "Strategy", "View", "drive", "search_of"]

FLAGS: Mapping[str, dict[str, Any]] = {
    "random": {},
    "tpe": {"constant_liar": True, "group": False, "multivariate": True, "n_ei_candidates": 24, "n_startup_trials": 10},
    "gp": {"deterministic_objective": False, "n_startup_trials": 5},  # it learns from finished and running trials, not from pruned ones
}


def search_of(space: Space, *, name: str, sampler: str, sampler_seed: int, trials: int, slots: int) -> Search:
    """A search of the space for the highest score, inside one process."""
    if sampler not in FLAGS:
        raise ValueError(f"a sampler is one of {sorted(FLAGS)}, got {sampler=}; choose one")
    return Search(name=name, study="plora", space=space.distributions(), sampler=sampler, sampler_seed=sampler_seed, sampler_flags=FLAGS[sampler], direction="maximize",
                  objective="score", budget=trials, parallelism=slots)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a search uses its pack. prune: rungs and eta (NO_PRUNING: none); refill: a free slot takes a new trial at once, else when all are free;
    micro_steps: between looks."""  # fmt: skip

    prune: Halving = field(default_factory=Halving)
    refill: bool = True
    micro_steps: int = 32
    checkpoint_s: float = 60.0  # a crash loses at most so many seconds of training, or ten times what a checkpoint takes, if that is more

    def __post_init__(self) -> None:
        if self.micro_steps < 1 or self.checkpoint_s < 0:
            raise ValueError(f"micro_steps is at least 1 and checkpoint_s is not negative, got {self.micro_steps=} {self.checkpoint_s=}; raise them")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One trial. state: COMPLETE, PRUNED (diverged ones too), RUNNING. twin_of: the trial of the same proposal that was trained in its place."""

    number: int
    adapter: AdapterConfig
    state: str
    score: float | None
    reports: Mapping[int, float] = field(default_factory=dict)  # rung's tokens -> score
    twin_of: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found. seconds: of the device; progress: (seconds, best finished score) at each improvement."""

    trials: tuple[Searched, ...]
    seconds: float
    progress: tuple[tuple[float, float], ...]
    record: Mapping[str, Any]  # for a bundle's record "trials"

    @property
    def trials_by_number(self) -> dict[int, Searched]:
        return {t.number: t for t in self.trials}

    @property
    def best(self) -> Searched | None:
        """The finished trial of the highest score, the earliest of equals."""
        return max((t for t in self.trials if t.state == "COMPLETE"), key=lambda t: (t.score, -t.number), default=None)


@dataclass(frozen=True, kw_only=True)
class View:
    """What a listener is shown after each look: slots that are free have no entry."""

    cycle: int
    seconds: float
    slots: int
    live: Mapping[int, tuple[int, Progress]]  # slot -> trial number, where it is
    scores: Mapping[int, float]  # trial number -> newest score
    finished: int
    pruned: int
    refilled: int  # times that a slot was taken after another trial had left it
    trials: int  # asked for so far
    budget: int
    best: tuple[int, float] | None
    repeating: bool  # training again what a kill took away


Listener = Callable[[View], None]
Keeper = Callable[[int, AdapterConfig, Evaluation, Any], None]


def drive(
    run: SearchRun, pack: Pack, adapter_of: Callable[[Mapping[str, Any]], AdapterConfig], strategy: Strategy, home: Path, *,
    keep: Keeper | None = None, listen: Listener | None = None, pause: Callable[[], bool] = lambda: False,
) -> Found:  # fmt: skip
    """Search to the end, or go on where a process in `home` stopped.

    adapter_of: the adapter of a proposal; all have one budget of tokens. keep(number, adapter, evaluation, weights): gets every finished adapter,
    after a crash perhaps again. pause(): asked after each cycle; once true, the pack is saved and suite.measure.Pause is raised.
    Raises ValueError for a pack that is not empty, an adapter that no slot holds, budgets that differ, and a home of another search.
    """
    if run.search.parallelism != len(pack.shape.slots) or pack.live():
        raise ValueError(f"a search has as many trials in flight as its empty pack has slots, got {run.search.parallelism=}, {len(pack.shape.slots)} slots, "
                         f"{sorted(pack.live())} taken; make it with search_of(slots=...) and give a new pack")  # fmt: skip
    return _Drive(run=run, pack=pack, adapter_of=adapter_of, strategy=strategy, home=Path(home), keep=keep, listen=listen, pause=pause).to_the_end()


@dataclass(kw_only=True)
class _Drive:
    run: SearchRun
    pack: Pack
    adapter_of: Callable[[Mapping[str, Any]], AdapterConfig]
    strategy: Strategy
    home: Path
    keep: Keeper | None
    listen: Listener | None
    pause: Callable[[], bool]
    rungs: Rungs | None = None  # from the first adapter on: it knows the budget
    cycle: int = 0
    seconds: float = 0.0
    placed: dict[int, int] = field(default_factory=dict)  # slot -> trial
    adapters: dict[int, AdapterConfig] = field(default_factory=dict)  # of trials that were placed
    waiting: list[tuple[int, AdapterConfig]] = field(default_factory=list)  # asked, not placed yet
    scores: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)  # of placed trials that ended
    progress: list[tuple[float, float]] = field(default_factory=list)
    best: tuple[int, float] | None = None
    saved_at: float = field(default_factory=time.monotonic)
    saving_s: float = 0.0  # what the last checkpoint took

    # ------------------------------------------------------------ the loop

    def to_the_end(self) -> Found:
        self.log = EventLog(self.home / f"{self.run.name.rpartition('/')[2]}.events")
        self.state_path = self.log.path.with_suffix(".pack.npz")
        self._same_search()
        self.logged: dict[tuple[str, int], dict[str, Any]] = {(e["event"], e["cycle"]): e for e in self.log.events if "cycle" in e}
        self._resume()
        while self._fill():
            self._look()
            if self.listen is not None:
                self.listen(self._view())
            if self.pause():
                self._save()
                raise Pause
            if time.monotonic() - self.saved_at >= max(self.strategy.checkpoint_s, 10 * self.saving_s):
                self._save()
        self.state_path.unlink(missing_ok=True)  # the pack is empty
        return self._found()

    def _same_search(self) -> None:
        settings = {"slots": [asdict(s) for s in self.pack.shape.slots], "tokens": self.pack.shape.tokens, "prune": {**asdict(self.strategy.prune), "shares": list(self.strategy.prune.shares)},
                    "refill": self.strategy.refill, "micro_steps": self.strategy.micro_steps}  # fmt: skip
        if not self.log.events:
            self.log.append({"event": "opened", "settings": settings})
        elif (then := self.log.events[0].get("settings")) != settings:
            raise ValueError(f"a search goes on as it began, got {settings} and in {self.log.path.name} {then}; give back the old settings, or another folder")

    # ------------------------------------------------------------ filling

    def _fill(self) -> bool:
        """Put trials into free slots; False once there is nothing to train."""
        event = self.logged.get(("filled", self.cycle))
        if event is None and ("looked", self.cycle) not in self.logged:
            event = {"event": "filled", "cycle": self.cycle, "slots": self._choice()}
            if event["slots"]:
                self.log.append(event)
        self._place(event, train=True)
        return bool(self.placed)

    def _place(self, event: Mapping[str, Any] | None, *, train: bool) -> None:
        slots = {int(slot): number for slot, number in event["slots"].items()} if event else {}
        missing = {n for n in slots.values() if n not in self.adapters}
        self.adapters |= {t.number: self.adapter_of(t.params) for t in self.run.trials() if t.number in missing} if missing else {}
        if slots:
            self._admit_cohort([self.adapters[n] for n in slots.values()], list(slots.values()))
        for slot, number in slots.items():
            if train:
                self.pack.admit(slot, self.adapters[number])
            self.placed[slot] = number
        self.waiting = [(n, a) for n, a in self.waiting if n not in slots.values()]

    def _admit_cohort(self, adapters: list[AdapterConfig], numbers: list[int]) -> None:
        budgets = {a.budget_tokens for a in adapters} | ({self.rungs.budget_tokens} if self.rungs else set())
        if len(budgets) > 1:
            raise ValueError(f"adapters that are compared have one budget, got {sorted(budgets)} tokens; let adapter_of give all the same")
        if self.rungs is None:
            self.rungs = Rungs(self.strategy.prune, budgets.pop())
        self.rungs.admit({n: a.rank for n, a in zip(numbers, adapters)})

    def _choice(self) -> dict[str, int]:
        """Slot -> trial of those that start now: the oldest first, each in the narrowest free slot that holds it."""
        width = {i: slot.rank for i, slot in enumerate(self.pack.shape.slots)}
        free = sorted(set(width) - set(self.placed), key=lambda i: (width[i], i))
        if not free or self.placed and not self.strategy.refill:
            return {}
        self._ask()
        chosen: dict[str, int] = {}
        for number, adapter in self.waiting:
            fitting = [i for i in free if width[i] >= adapter.rank]
            if fitting:
                chosen[str(fitting[0])] = number
                free.remove(fitting[0])
        return chosen

    def _ask(self) -> None:
        """Ask until as many trials are in flight as there are slots; a proposal that was trained before is answered by that trial."""
        widest = max(slot.rank for slot in self.pack.shape.slots)
        again = True
        while again:
            again = False
            in_flight = {*self.placed.values(), *(n for n, _ in self.waiting)}
            answered = {t.point: t for t in self.run.trials() if t.state in ("PRUNED", "COMPLETE")}
            for trial in self.run.next_trials():
                if trial.number in in_flight:  # open since before a crash, and placed
                    continue
                if twin := answered.get(trial.point):
                    self._answer(trial.number, twin.state, twin.value, twin.intermediate)
                    again = True
                    continue
                adapter = self.adapter_of(trial.params)
                if adapter.rank > widest:
                    raise ValueError(f"some slot holds every rank of the space, got {adapter.rank=} and slots up to {widest}; widen a slot")
                self.waiting.append((trial.number, adapter))

    # ------------------------------------------------------------ looking

    def _look(self) -> None:
        spent_s = self.pack.advance(self.strategy.micro_steps)
        event = self.logged.get(("looked", self.cycle))
        if event is None:
            event = self._judged(spent_s)
            self.log.append(event, durable=bool(event["scores"]))
        self._take(event, train=True)

    def _judged(self, spent_s: float) -> dict[str, Any]:
        """One look as an event: scores where there was a reason to evaluate, and what follows from them."""
        live = {self.placed[slot]: p for slot, p in self.pack.live().items()}
        done = {n for n, p in live.items() if p.done}
        event: dict[str, Any] = {"event": "looked", "cycle": self.cycle, "seconds": spent_s, "scores": {}, "reached": [], "ended": {}}
        if not done and not self.rungs.due({n: p.tokens_seen for n, p in live.items()}):
            return event
        found, evaluate_s = self.pack.evaluate()
        evaluations = {self.placed[slot]: e for slot, e in found.items()}
        look = self.rungs.look(evaluations)
        ended = {n: "PRUNED" for n in look.losers | look.diverged} | {n: "COMPLETE" for n in done - look.diverged}
        return event | {"seconds": spent_s + evaluate_s, "scores": {str(n): asdict(e) for n, e in sorted(evaluations.items())}, "reached": [list(r) for r in look.reached],
                        "ended": {str(n): state for n, state in sorted(ended.items())}}  # fmt: skip

    def _take(self, event: Mapping[str, Any], *, train: bool) -> None:
        """Let one look count: Optuna hears of it, ended trials leave their slots."""
        self.seconds += event["seconds"]
        evaluations = {int(n): Evaluation(**e) for n, e in event["scores"].items()}
        ended = {int(n): state for n, state in event["ended"].items()}
        self.scores |= {n: e.score for n, e in evaluations.items()}
        slot_of = {n: slot for slot, n in self.placed.items()}
        for number, state in ended.items():
            weights = self.pack.release(slot_of[number]) if train else None
            if state == "COMPLETE" and train and self.keep is not None:
                self.keep(number, self.adapters[number], evaluations[number], weights)
            del self.placed[slot_of[number]]
            self._count(number, state)
        if ("looked", event["cycle"]) in self.logged:  # an event of before: standings are as they were then
            self.rungs.look(evaluations)
        self.rungs.leave(frozenset(ended))
        self._tell(event)
        self.cycle += 1

    def _count(self, number: int, state: str) -> None:
        self.states[number] = state
        score = self.scores[number]
        if state == "COMPLETE" and (self.best is None or score > self.best[1]):
            self.best = (number, score)
            self.progress.append((self.seconds, score))

    def _tell(self, event: Mapping[str, Any]) -> None:
        reports: dict[int, dict[int, float]] = {}
        for number, tokens, score in event["reached"]:
            reports.setdefault(number, {})[tokens] = score
        for number in sorted({*reports, *map(int, event["ended"])}):
            self._answer(number, event["ended"].get(str(number)), event["scores"][str(number)]["score"], reports.get(number, {}))

    def _answer(self, number: int, state: str | None, score: float | None, reports: Mapping[int, float]) -> None:
        """Report to an open trial, and where it ended finish it and its open twins. What was said before is not said again."""
        trials = self.run.trials()
        if trials[number].state != "RUNNING":
            return
        for tokens, value in sorted(reports.items()):
            if tokens not in trials[number].intermediate:
                self.run.report(number, tokens, value)
        if state is None:
            return
        twins = [t for t in trials if t.state == "RUNNING" and t.point == trials[number].point and t.number > number]
        told = {**trials[number].intermediate, **reports}
        self.run.tell_value(number, score, pruned=state == "PRUNED")
        for twin in twins:
            self._answer(twin.number, state, score, told)

    # ------------------------------------------------------------ resuming

    def _resume(self) -> None:
        """Tell what a crash left untold, take the ledger from the log, and the pack from the checkpoint or from where it was empty."""
        looks = [e for e in self.log.events if e["event"] == "looked"]
        for event in looks:
            self._tell(event)
        self.run.recover(lambda point: None)
        saved = load_state(self.state_path)
        start = max(self._last_empty(looks), saved["cycle"] if saved else 0)
        while self.cycle < start:
            self._place(self.logged.get(("filled", self.cycle)), train=False)
            self._take(self.logged["looked", self.cycle], train=False)
        if self.placed:
            self.pack.restore(saved["pack"])

    def _last_empty(self, looks: list[dict[str, Any]]) -> int:
        """The last cycle that began with an empty pack."""
        placed, empty = 0, 0
        for event in looks:
            placed += len(self.logged.get(("filled", event["cycle"]), {"slots": {}})["slots"]) - len(event["ended"])
            empty = event["cycle"] + 1 if placed == 0 else empty
        return empty

    def _save(self) -> None:
        start = time.monotonic()
        if self.placed:
            save_state(self.state_path, {"cycle": self.cycle, "pack": self.pack.state()})
        self.saved_at = time.monotonic()
        self.saving_s = self.saved_at - start

    # ------------------------------------------------------------ showing

    def _view(self) -> View:
        trials = self.run.trials()
        return View(cycle=self.cycle, seconds=self.seconds, slots=len(self.pack.shape.slots), live={slot: (self.placed[slot], p) for slot, p in self.pack.live().items()},
                    scores=dict(self.scores), finished=sum(s == "COMPLETE" for s in self.states.values()), pruned=sum(s == "PRUNED" for s in self.states.values()),
                    refilled=max(0, len(self.adapters) - len(self.pack.shape.slots)), trials=sum(bool(t.point) for t in trials), budget=self.run.search.budget, best=self.best,
                    repeating=("looked", self.cycle) in self.logged)  # fmt: skip

    def _found(self) -> Found:
        trials = [t for t in self.run.trials() if t.point]
        trained = {t.point: t.number for t in trials if t.number in self.adapters}
        made = tuple(
            Searched(number=t.number, adapter=self.adapter_of(t.params), state=t.state, score=t.value, reports=dict(t.intermediate),
                     twin_of=None if t.number in self.adapters else trained[t.point]) for t in trials
        )  # fmt: skip
        return Found(trials=made, seconds=self.seconds, progress=tuple(self.progress), record=self.run.record())
