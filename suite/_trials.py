"""Trials and where they are kept: distributions, Optuna's journal, and replaying a recorded search.

    study, lock = open_study(import_optuna(), Path("lr.journal"), "demo/lr/0123", "minimize")
    replay(load_record(bundle.path, "trials"), storage_dir=Path(".state/searches"), source=bundle.id)

The private half of suite.search, which re-exports what is public. It proposes nothing and dispatches nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from suite import locks

POINT, BUNDLE, REASON = "point", "bundle", "reason"  # user attributes of a trial
MAX_REPLAYED_TRIALS = 100_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,79}\Z")
_FINISHED = ("COMPLETE", "PRUNED", "FAIL")


class SearchError(ValueError):
    """A search cannot be opened, or its journal or record cannot be read: one line that says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Float:
    """A real number in [low, high]; `log` draws its logarithm evenly."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"a range is finite with low <= high, got low={self.low}, high={self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range is positive, got low={self.low}")


@dataclass(frozen=True, kw_only=True)
class Int:
    """An integer in {low, low + step, ..., high}; `log` draws its logarithm evenly and needs step=1."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high or self.step < 1 or (self.high - self.low) % self.step:
            raise ValueError(f"an integer range has low <= high, a whole number of steps apart, got low={self.low}, high={self.high}, step={self.step}")
        if self.log and (self.low <= 0 or self.step != 1):
            raise ValueError(f"a logarithmic range is positive with step=1, got low={self.low}, step={self.step}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of some strings, numbers, booleans or None."""

    options: tuple[str | int | float | bool | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        if not self.options or not all(o is None or isinstance(o, (str, int, float, bool)) for o in self.options):
            raise ValueError(f"a choice is between strings, numbers, booleans or None, at least one, got options={self.options!r}")


Distribution = Float | Int | Choice
_KINDS = {"float": Float, "int": Int, "choice": Choice}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One proposal. state: RUNNING, COMPLETE, PRUNED, FAIL, WAITING; `point` is "" until its cell may be dispatched."""

    number: int
    state: str
    params: Mapping[str, Any]
    point: str = ""
    value: float | None = None
    bundle: str = ""
    reason: str = ""
    intermediate: Mapping[int, float] = field(default_factory=dict)


# ---------------------------------------------------------------- to and from optuna


def import_optuna() -> Any:
    """Optuna, quiet below warnings; raises SearchError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise SearchError(f"a search needs optuna, got {error}; install it with `pip install 'optuna>=5,<6'`") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def space_json(space: Mapping[str, Distribution]) -> dict[str, dict[str, Any]]:
    kind = {v: k for k, v in _KINDS.items()}
    return {name: {"kind": kind[type(d)], **asdict(d)} for name, d in space.items()}


def to_optuna(optuna: Any, space: Mapping[str, Distribution]) -> dict[str, Any]:
    d = optuna.distributions
    kind = {Float: d.FloatDistribution, Int: d.IntDistribution}
    return {name: d.CategoricalDistribution(x.options) if isinstance(x, Choice) else kind[type(x)](**asdict(x)) for name, x in space.items()}


def trial_of(frozen: Any) -> Trial:
    attrs = frozen.user_attrs
    value = frozen.values[0] if frozen.values else None
    return Trial(number=frozen.number, state=frozen.state.name, params=dict(frozen.params), point=attrs.get(POINT, ""), value=value,
                 bundle=attrs.get(BUNDLE, ""), reason=attrs.get(REASON, ""), intermediate=dict(frozen.intermediate_values))


def trial_json(trial: Trial) -> dict[str, Any]:
    """A trial as strict JSON: numbers that are not finite become text."""
    steps = [[step, _json_number(v)] for step, v in sorted(trial.intermediate.items())]
    return {**asdict(trial), "value": None if trial.value is None else _json_number(trial.value), "intermediate": steps}


def _json_number(x: float) -> float | str:
    return float(x) if math.isfinite(x) else repr(float(x))


# ---------------------------------------------------------------- storage


def open_study(optuna: Any, path: Path, name: str, direction: str) -> tuple[Any, int]:
    """The named study in the journal `path`, or in OPTUNA_STORAGE as it stands; and the lock that makes us its one writer."""
    lock_fd = locks.acquire(path.with_suffix(".lock"), what=f"the search {name}")
    try:
        storage = os.environ.get("OPTUNA_STORAGE") or _journal(optuna, path)
        sampler, pruner = optuna.samplers.RandomSampler(seed=0), optuna.pruners.NopPruner()  # an ask brings its own sampler
        return optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True, sampler=sampler, pruner=pruner), lock_fd
    except BaseException:
        os.close(lock_fd)
        raise


def _journal(optuna: Any, path: Path) -> Any:
    """Optuna's journal file, mended after a crash. Call while holding our lock."""
    _mend(path)
    Path(f"{path}.lock").unlink(missing_ok=True)  # Optuna's own: a writer killed while holding it costs the next one 30 s
    journal = optuna.storages.journal
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))


def _mend(path: Path) -> None:
    """Cut an unfinished last line off: Optuna would append to it and never read the file again. Raises SearchError on other damage."""
    if not path.exists():
        return
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    for number, line in enumerate(raw[:whole].splitlines(), start=1):
        try:
            ok = isinstance(json.loads(line), dict)
        except ValueError:
            ok = False
        if not ok:
            raise SearchError(f"each line of a search's journal is a JSON object, got another in line {number} of {path}; move the file away: bundles that exist are not measured again")
    if whole < len(raw):
        os.truncate(path, whole)


# ---------------------------------------------------------------- replay


def replay(record: Any, *, storage_dir: Path, source: str) -> int:
    """Copy a recorded search (SearchRun.record) into a study of its own; returns how many trials were new.

    `source` is the id of the bundle that holds the record: replaying it again adds nothing, also after a crash half-way.
    The record may come from a stranger; raises SearchError where it is not what SearchRun.record writes.
    """
    optuna = import_optuna()
    name, direction, trials = _checked(optuna, record, source)
    study, lock_fd = open_study(optuna, Path(storage_dir) / "replayed.journal", f"{name}/replayed/{source[:12]}", direction)
    try:
        there = {t.user_attrs.get("number") for t in study.get_trials(deepcopy=False)}
        new = [t for t in trials if t.user_attrs["number"] not in there]
        for trial in new:
            study.add_trial(trial)
        return len(new)
    finally:
        os.close(lock_fd)


def read_trials(record: Any, *, source: str) -> list[Trial]:
    """The finished trials of a recorded search, as `replay` copies them. Raises SearchError where it would."""
    frozen = _checked(import_optuna(), record, source)[2]
    return [replace(trial_of(f), number=f.user_attrs["number"]) for f in frozen]


def _checked(optuna: Any, record: Any, source: str) -> tuple[str, str, list[Any]]:
    try:
        return _read_record(optuna, record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SearchError(f"a record of trials is what SearchRun.record wrote, got {type(error).__name__}: {error} in that of {source[:12]}; leave this bundle out") from error


def _read_record(optuna: Any, record: Any) -> tuple[str, str, list[Any]]:
    definition = record["definition"]
    space = {}
    for name, fields in definition["space"].items():
        fields = dict(fields)
        space[name] = _KINDS[fields.pop("kind")](**fields)
    if not (NAME.match(definition["study"]) and NAME.match(definition["name"])):
        raise ValueError(f"study={definition['study']!r}, name={definition['name']!r}")
    if definition["direction"] not in ("minimize", "maximize") or len(record["trials"]) > MAX_REPLAYED_TRIALS:
        raise ValueError(f"direction={definition['direction']!r} with {len(record['trials'])} trials")
    distributions = to_optuna(optuna, space)
    trials = [_frozen(optuna, t, distributions) for t in record["trials"] if t["state"] in _FINISHED and set(t["params"]) == set(space)]
    if len({t.user_attrs["number"] for t in trials}) != len(trials):
        raise ValueError("two trials have one number")
    return f"{definition['study']}/{definition['name']}", definition["direction"], trials


def _frozen(optuna: Any, t: Mapping[str, Any], distributions: Mapping[str, Any]) -> Any:
    attrs = {"number": int(t["number"]), POINT: str(t["point"]), BUNDLE: str(t["bundle"]), REASON: str(t["reason"])}
    return optuna.trial.create_trial(state=optuna.trial.TrialState[t["state"]], value=None if t["value"] is None else float(t["value"]), params=dict(t["params"]),
                                     distributions=dict(distributions), user_attrs=attrs, intermediate_values={int(s): float(v) for s, v in t["intermediate"]})
