"""Search: a source of cells. Optuna proposes parameters, cells measure them, bundles answer.

    search = Search(name="lr", study="demo", space={"lr": Float(low=1e-5, high=1e-2, log=True)}, sampler="random", sampler_seed=0,
                    sampler_flags={}, direction="minimize", objective="loss", budget=20, parallelism=1, make_cell=cell_of)
    with SearchRun(search, storage_dir) as run:
        run.recover(done)                       # done(point) -> bundle or None: finishes what a crash left open
        while not run.finished:
            for number, cell in run.next_cells():
                run.tell(cell.point, measure(cell))

A trial holds its cell's point before the cell is dispatched, so a crash loses nothing and tells nothing
twice. Each ask seeds its sampler from (sampler_seed, trials so far): a sequential search that was killed
gives the same trials as an unbroken one. With parallelism > 1 proposals depend on the order in which cells
finish, and the search is reproducible by its journal only. It does not prune by itself (a cell that searches
inside one process uses `next_trials`, `report` and `tell_value`) and has one objective. Optuna is imported
when a search is opened, not before.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from suite._trials import BUNDLE, NAME, POINT, REASON, Choice, Distribution, Float, Int, SearchError, Trial, import_optuna, open_study, replay
from suite._trials import space_json, to_optuna, trial_json, trial_of
from suite.cell import Cell
from suite.identity import canonical_json, sha256_json

__all__ = ["SAMPLERS", "Answer", "Choice", "Distribution", "Float", "Int", "Search", "SearchError", "SearchRun", "Trial", "import_optuna", "replay"]

# Every flag of a sampler is named by the search, because Optuna's defaults change between versions.
SAMPLERS = {
    "random": (),
    "grid": (),
    "tpe": ("constant_liar", "group", "multivariate", "n_ei_candidates", "n_startup_trials"),
    "gp": ("deterministic_objective", "n_startup_trials"),
    "nsga2": ("crossover_prob", "mutation_prob", "population_size", "swapping_prob"),
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched and how. `make_cell` must give a cell for every point of the space; without it trials stay in one process."""

    name: str
    study: str
    space: Mapping[str, Distribution]
    sampler: str
    sampler_seed: int
    sampler_flags: Mapping[str, Any]
    direction: str  # "minimize" or "maximize"
    objective: str  # metric of the cell's bundle
    budget: int  # trials whose cell was dispatched
    parallelism: int = 1
    make_cell: Callable[[dict[str, Any]], Cell] | None = None

    def __post_init__(self) -> None:
        if not (NAME.match(self.name) and NAME.match(self.study)):
            raise ValueError(f"a search's names are letters, digits, '_', '.', '-', got name={self.name!r}, study={self.study!r}")
        if not self.space:
            raise ValueError(f"a search has at least one parameter, got space={dict(self.space)!r}")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"a sampler is one of {sorted(SAMPLERS)}, got sampler={self.sampler!r}")
        if set(self.sampler_flags) != set(SAMPLERS[self.sampler]):
            raise ValueError(f"a search names every flag of its sampler, {list(SAMPLERS[self.sampler])}, got sampler_flags={sorted(self.sampler_flags)}")
        if self.direction not in ("minimize", "maximize"):
            raise ValueError(f"a direction is 'minimize' or 'maximize', got direction={self.direction!r}")
        if self.budget < 1 or self.parallelism < 1:
            raise ValueError(f"budget and parallelism are at least 1, got budget={self.budget}, parallelism={self.parallelism}")
        if self.sampler == "grid" and self.budget > len(self.grid()):
            raise ValueError(f"a grid's budget is at most its size {len(self.grid())}, got budget={self.budget}")
        canonical_json(self.definition())

    def definition(self) -> dict[str, Any]:
        """All that shapes the sequence of trials, as JSON. Budget and parallelism may change between runs."""
        return {"study": self.study, "name": self.name, "space": space_json(self.space), "sampler": self.sampler, "sampler_seed": self.sampler_seed,
                "sampler_flags": dict(self.sampler_flags), "direction": self.direction, "objective": self.objective}

    def grid(self) -> list[dict[str, Any]]:
        """Every point of a finite space, in the order that `sampler_seed` shuffles them to."""
        axes = []
        for name, d in self.space.items():
            if isinstance(d, Float):
                raise ValueError(f"a grid has no Float, got {name}={d}; list its values in a Choice")
            axes.append(d.options if isinstance(d, Choice) else range(d.low, d.high + 1, d.step))
        points = [dict(zip(self.space, values)) for values in itertools.product(*axes)]
        random.Random(self.sampler_seed).shuffle(points)
        return points

    def corner(self) -> dict[str, Any]:
        """The first point of the space: stands for the search where a cell is needed before any was asked for."""
        return {name: d.options[0] if isinstance(d, Choice) else d.low for name, d in self.space.items()}

    def point(self, params: dict[str, Any]) -> str:
        """The point of the cell that measures these parameters."""
        return self.make_cell(params).point if self.make_cell else sha256_json([self.study, self.name, params])


class Answer(Protocol):
    """What a search reads of a bundle (suite.bundle.Bundle has it)."""

    id: str
    status: str
    metrics: Mapping[str, float]


class SearchRun:
    """A search on its journal, opened by one process at a time. Raises SearchError, locks.Held.

    The journal is a file in `storage_dir`, or wherever OPTUNA_STORAGE says. `conditions` (a cell's key) keeps
    answers of other code or another machine apart: they are another run of the search.
    """

    def __init__(self, search: Search, storage_dir: Path, *, conditions: str = ""):
        self.search, self._optuna = search, import_optuna()
        digest = sha256_json([search.definition(), conditions])[:12]
        self.name = f"{search.study}/{search.name}/{digest}"
        path = Path(storage_dir) / f"{search.study}-{search.name}-{digest}.journal"
        self._study, self._lock_fd = open_study(self._optuna, path, self.name, search.direction)
        self._distributions = to_optuna(self._optuna, search.space)
        self._handles: dict[int, Any] = {}  # number -> optuna's Trial
        self._failed_here: set[str] = set()  # points that this process saw fail: not measured twice in one run
        self._again: list[Trial] = []  # recovered, waiting for their turn
        self._in_flight: dict[int, str] = {}
        self._recovered = not self._running()

    def __enter__(self) -> SearchRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process open the search. Trials in flight stay RUNNING for `recover`."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # ------------------------------------------------------------ looking

    def trials(self) -> list[Trial]:
        return [trial_of(t) for t in self._study.get_trials(deepcopy=False)]

    @property
    def finished(self) -> bool:
        """True once the budget is spent and every trial is answered."""
        return self._num_dispatched() >= self.search.budget and not self._running()

    def best(self) -> Trial | None:
        """The complete trial with the best value, the earliest of equals; None while there is none."""
        complete = [t for t in self.trials() if t.state == "COMPLETE"]
        sign = 1 if self.search.direction == "minimize" else -1
        return min(complete, key=lambda t: (sign * t.value, t.number), default=None)

    def record(self) -> dict[str, Any]:
        """The whole search as JSON, for a bundle's record `trials`; `replay` reads it."""
        return {"definition": self.search.definition(), "optuna": self._optuna.__version__, "trials": [trial_json(t) for t in self.trials()]}

    # ------------------------------------------------------------ asking

    def next_cells(self) -> list[tuple[int, Cell]]:
        """(trial number, cell) of every cell to dispatch now, so that at most `parallelism` are in flight."""
        if self.search.make_cell is None:
            raise ValueError(f"a search that gives cells has make_cell, got make_cell=None in {self.search.name!r}; use next_trials")
        return [(t.number, self.search.make_cell(dict(t.params))) for t in self.next_trials()]

    def next_trials(self) -> list[Trial]:
        """Trials to evaluate now: first those that a crash left open, then new ones.

        A proposal that repeats an answered point takes that answer, one that repeats a point in flight waits
        for it: neither is returned.
        """
        if not self._recovered:
            raise ValueError(f"trials that a crash left open are finished first, got {len(self._running())} RUNNING; call recover(done)")
        out = []
        while self._again and len(self._in_flight) < self.search.parallelism:
            trial = self._again.pop(0)
            if trial.point not in self._in_flight.values():
                out.append(trial)
            self._in_flight[trial.number] = trial.point
        while len(self._in_flight) < self.search.parallelism and self._num_dispatched() < self.search.budget:
            trial = self._ask()
            if not self._answer_from_twin(trial):
                if trial.point not in self._in_flight.values():
                    out.append(trial)
                self._in_flight[trial.number] = trial.point
        return out

    def _ask(self) -> Trial:
        self._study.sampler = self._sampler(self._num_dispatched())
        if self.search.sampler == "grid":
            self._enqueue_grid_point()
        handle = self._study.ask(self._distributions)
        self._handles[handle.number] = handle
        params = {name: handle.params[name] for name in self.search.space}
        point = self.search.point(params)
        handle.set_user_attr(POINT, point)  # before dispatch: from here on the trial survives a crash
        return Trial(number=handle.number, state="RUNNING", params=params, point=point)

    def _enqueue_grid_point(self) -> None:
        trials = self.trials()
        if any(t.state == "WAITING" for t in trials):  # a crash came between enqueue and ask
            return
        used = [dict(t.params) for t in trials if t.point]
        self._study.enqueue_trial(next(p for p in self.search.grid() if p not in used))

    def _sampler(self, index: int) -> Any:
        """The named sampler for the index-th dispatched trial. A resumed sampler with one seed would repeat its first proposals."""
        seed = int.from_bytes(hashlib.sha256(f"{self.search.sampler_seed}:{index}".encode()).digest()[:4], "big")
        samplers, flags = self._optuna.samplers, dict(self.search.sampler_flags)
        kind = {"random": samplers.RandomSampler, "grid": samplers.RandomSampler, "tpe": samplers.TPESampler, "gp": samplers.GPSampler, "nsga2": samplers.NSGAIISampler}
        with warnings.catch_warnings():  # a flag is named on purpose, experimental or not
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return kind[self.search.sampler](seed=seed, **flags)

    def _answer_from_twin(self, trial: Trial) -> bool:
        twin = next((t for t in self.trials() if t.state == "COMPLETE" and t.point == trial.point), None)
        if twin is not None:
            self._finish(trial.number, "COMPLETE", value=twin.value, bundle=twin.bundle, reason=f"the point of trial {twin.number}")
        elif trial.point in self._failed_here:
            self._finish(trial.number, "FAIL", reason="a point that failed in this run")
        else:
            return False
        return True

    # ------------------------------------------------------------ telling

    def tell(self, point: str, bundle: Answer) -> list[int]:
        """Answer every open trial of this point from a bundle; returns their numbers. Told again, or of another's point, it does nothing.

        OK gives the objective (NaN fails), PAUSED leaves the trial open, anything else fails it.
        """
        if bundle.status == "PAUSED":
            return []
        numbers = [t.number for t in self._running() if t.point == point]
        if bundle.status == "OK" and numbers and self.search.objective not in bundle.metrics:
            raise ValueError(f"a search's objective is a metric of its cells, got objective={self.search.objective!r} and metrics {sorted(bundle.metrics)}")
        for number in numbers:
            if bundle.status == "OK":
                self.tell_value(number, bundle.metrics[self.search.objective], bundle=bundle.id)
            else:
                self._failed_here.add(point)
                self._finish(number, "FAIL", bundle=bundle.id, reason=bundle.status)
        return numbers

    def report(self, number: int, step: int, value: float) -> None:
        """Record an intermediate value of an open trial."""
        self._handle(number).report(float(value), int(step))

    def tell_value(self, number: int, value: float | None, *, pruned: bool = False, bundle: str = "") -> None:
        """Finish an open trial: with its value, as pruned (its value is then the last one reported), or, with None or NaN, as failed."""
        if pruned:
            self._finish(number, "PRUNED", bundle=bundle)
        elif value is None or math.isnan(value):
            self._finish(number, "FAIL", bundle=bundle, reason="its objective is not a number")
        else:
            self._finish(number, "COMPLETE", value=float(value), bundle=bundle)

    def recover(self, done: Callable[[str], Answer | None]) -> dict[str, list[int]]:
        """Finish by number what a crash left RUNNING; returns the numbers "told", "again" and "failed".

        Told if done(point) is an OK bundle, dispatched again if not, failed if incomplete: a crash came before
        its point was recorded, or the search now makes another cell of its parameters.
        """
        out: dict[str, list[int]] = {"told": [], "again": [], "failed": []}
        for trial in self._running():
            if trial.number in self._in_flight:
                continue
            if not trial.point or set(trial.params) != set(self.search.space) or self.search.point(dict(trial.params)) != trial.point:
                self._finish(trial.number, "FAIL", reason="incomplete after a crash")
                out["failed"].append(trial.number)
                continue
            bundle = done(trial.point)
            if bundle is not None and bundle.status == "OK":
                self.tell(trial.point, bundle)
                out["told"].append(trial.number)
            elif trial.number not in {t.number for t in self._again}:
                self._again.append(trial)
                out["again"].append(trial.number)
        self._recovered = True
        return out

    def _finish(self, number: int, state: str, *, value: float | None = None, bundle: str = "", reason: str = "") -> None:
        handle = self._handle(number)
        for name, text in ((BUNDLE, bundle), (REASON, reason)):
            if text:
                handle.set_user_attr(name, text)
        self._study.tell(number, value, state=self._optuna.trial.TrialState[state])
        self._handles.pop(number, None)
        self._in_flight.pop(number, None)
        self._again = [t for t in self._again if t.number != number]

    def _handle(self, number: int) -> Any:
        if number not in self._handles:
            frozen = self._study.get_trials(deepcopy=False)[number]
            self._handles[number] = self._optuna.trial.Trial(self._study, frozen._trial_id)  # asked by a process that is gone
        return self._handles[number]

    def _running(self) -> list[Trial]:
        return [t for t in self.trials() if t.state == "RUNNING"]

    def _num_dispatched(self) -> int:
        return sum(bool(t.point) for t in self.trials())
