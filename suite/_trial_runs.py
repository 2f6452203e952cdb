"""A recorded search as MLflow runs: one a trial, children of the run of its cell; and as an Optuna study.

    searched = searched_of(bundle)              # None where its cell was no search; Refused where its record is none
    for run in searched.runs: ...               # tags, params, (metric, value, step)
    searched.replay(state / "searches")         # `optuna-dashboard .state/searches/replayed.journal` opens it

A bundle may come from a stranger: the whole record is checked before anything is written. mlflow is not imported here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite._runs import MAX_PARAM_CHARS, MAX_PARAMS, Refused, TrackingError
from suite._trials import SearchError, Trial, read_trials, replay
from suite.bundle import Bundle, load_record
from suite.locks import Held

__all__ = ["RECORD", "Searched", "TrialRun", "searched_of"]

RECORD = "trials"  # name of a bundle's record that SearchRun.record made
MAX_RUNS, MAX_REPORTS, MAX_STEP, MAX_RECORD_BYTES = 2000, 900, 2**53, 16 << 20
RUN_STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
_METRIC = re.compile(r"[A-Za-z_][\w.\- ]{0,99}\Z")


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    """metrics: (name, value, step), finite ones; a value that is not finite stands in the tag `nonfinite.<name>`."""

    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: tuple[tuple[str, float, int], ...]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A checked search of one bundle, with its finished trials."""

    bundle: Bundle
    record: Mapping[str, Any]
    trials: tuple[Trial, ...]

    @property
    def runs(self) -> list[TrialRun]:
        return [_run(t, self.record["definition"]["objective"], self.bundle.data["cell"]["study"]) for t in self.trials]

    def replay(self, storage_dir: Path) -> int:
        """Into Optuna's journal, once. Raises TrackingError while another process holds it."""
        try:
            return replay(self.record, storage_dir=storage_dir, source=self.bundle.id)
        except Held as error:
            raise TrackingError(str(error)) from error


def searched_of(bundle: Bundle) -> Searched | None:
    """Raises Refused for a record that SearchRun.record did not write, or that MLflow cannot hold."""
    entry = bundle.data["files"].get(f"{RECORD}.json")
    if bundle.status != "OK" or entry is None:
        return None
    if entry["bytes"] > MAX_RECORD_BYTES:
        raise Refused(bundle, f"a record of trials has at most {MAX_RECORD_BYTES} bytes, got {entry['bytes']}; leave this bundle out")
    try:
        record = load_record(bundle.path, RECORD)
        trials = tuple(read_trials(record, source=bundle.id))
        _check(record["definition"].get("objective"), trials)
    except (ValueError, RecursionError) as error:  # SearchError is a ValueError, and so is what JSON and UTF-8 refuse
        raise Refused(bundle, str(error)) from error
    return Searched(bundle=bundle, record=record, trials=trials)


def _check(objective: Any, trials: tuple[Trial, ...]) -> None:
    names = [objective, *sorted({name for t in trials for name in t.params})]
    if not all(isinstance(n, str) and _METRIC.match(n) for n in names):
        raise SearchError(f"an objective and the names of a space are letters, digits, '_', '.', '-' and spaces, got {str(names)[:200]}; rename them")
    if len(trials) > MAX_RUNS or len(names) > MAX_PARAMS:
        raise SearchError(f"a search that is tracked has at most {MAX_RUNS} trials of {MAX_PARAMS} parameters, got {len(trials)} of {len(names)}; split it")
    if any(len(t.intermediate) > MAX_REPORTS or any(abs(step) > MAX_STEP for step in t.intermediate) for t in trials):
        raise SearchError(f"a trial reports at most {MAX_REPORTS} values at steps up to 2^53, got more in a trial; thin them out")
    if longest := max((len(json.dumps(v)) for t in trials for v in t.params.values() if len(json.dumps(v)) > MAX_PARAM_CHARS), default=0):
        raise SearchError(f"a parameter has at most {MAX_PARAM_CHARS} characters, got {longest}; shorten it")


def _run(trial: Trial, objective: str, study: str) -> TrialRun:
    values = [(objective, v, step) for step, v in sorted(trial.intermediate.items())]
    if trial.value is not None:
        values.append((f"{objective}.final", trial.value, max(trial.intermediate, default=0)))
    odd = {f"nonfinite.{name}": repr(v) for name, v, _ in values if not math.isfinite(v)}
    reason = {"reason": json.dumps(trial.reason)[1:-1][:500]} if trial.reason else {}  # escaped: a stranger wrote it
    return TrialRun(name=f"trial {trial.number}", status=RUN_STATUS[trial.state], params={k: json.dumps(v) for k, v in trial.params.items()},
                    tags={"role": "trial", "study": study, "trial": str(trial.number), "state": trial.state, **reason, **odd}, metrics=tuple(m for m in values if math.isfinite(m[1])))  # fmt: skip
