"""Tracking: the one writer and reader of MLflow. Whatever it holds can be rebuilt from bundles.

    tracker = open_tracker(None, Path(".state"))                        # an embedded sqlite store
    run_id, new = tracker.ingest(bundle, None, study.metric_names(), "here")
    rows = tracker.rows("determinism")                                  # one suite.claims.Row per bundle

An experiment is a study, a parent run an invocation, a child run a cell's attempt, whatever its status. A
child's `bundle.id` tag is written last: a run without it is half-written, is read by nobody, and goes at
the next ingest. The trials of a cell that searched are children of its run, and are replayed into Optuna's journal
under `searches`. mlflow is imported when a tracker is opened. Nothing is measured or judged here, and
payload is read from the bundle store; MLflow's copy serves where that one is absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from suite import locks
from suite._runs import ARTIFACT_BYTES, Refused, TrackingError, encode, row_of
from suite._trial_runs import TrialRun, searched_of
from suite.bundle import Bundle, BundleStore
from suite.claims import Row
from suite.identity import sha256_file
from suite.text import masked

__all__ = ["Refused", "Tracker", "TrackingError", "encode", "open_tracker"]

PAGE = 1000
BATCH = 100  # params or tags in one log_batch
RUN_STATUS = {"OK": "FINISHED", "FAILED": "FAILED", "TIMED OUT": "FAILED", "PAUSED": "KILLED"}
CREATION_LIMIT_S = 120.0  # a fresh store takes seconds; other processes wait for it
_SETTINGS = {  # read by mlflow when it is imported or calls; the user's own values stand, telemetry's are ours
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def open_tracker(uri: str | None, state_dir: Path) -> Tracker:
    """The tracker of a store: `uri`, or without one the embedded store under `state_dir`. Raises TrackingError.

    An embedded (sqlite) store that does not exist is created, by one process while others wait.
    """
    state_dir = Path(state_dir).resolve()
    database = state_dir / "tracking" / "mlflow.db" if uri is None else _database(uri)
    uri = uri if database is None else f"sqlite:///{database}"
    with _speaking(uri):
        _import_mlflow()
        if database is not None:
            _create_once(database)
        return Tracker(uri=uri, store=BundleStore(state_dir), database=database)


class Tracker:
    """One open store. Methods raise TrackingError, with one clear line, where it does not answer or refuses to write."""

    def __init__(self, *, uri: str, store: BundleStore, database: Path | None):
        from mlflow.tracking import MlflowClient

        self.uri, self.store, self.database = uri, store, database
        self._client = MlflowClient(tracking_uri=uri)
        self._experiments: dict[str, str] = {}
        self._known: dict[str, dict[str, str]] = {}  # study -> bundle id -> run id; read once, then kept
        self._plans: dict[str, Any] = {}
        self._unfinished: set[str] = set()  # runs of this process that an error left half-written

    # ------------------------------------------------------------------------------------ invocations

    def start_invocation(self, study: str, plan_json: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """A parent run for one invocation; parents that dead drivers left RUNNING become KILLED. Returns its run id."""
        with _speaking(self.uri):
            experiment = self._experiment(study)
            for run in self._search(study, "attributes.status = 'RUNNING' and tags.role = 'invocation'"):
                if self._abandoned(run.data.tags):
                    self._client.set_terminated(run.info.run_id, "KILLED")
            name = f"{study} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}"
            own = {**{k: v for k, v in tags.items() if v}, "role": "invocation", "driver": driver_id()}
            parent = self._client.create_run(experiment, tags=own, run_name=name).info.run_id
        self._plans[parent] = plan_json
        return parent

    def end_invocation(self, parent_run_id: str, status: str, point_to_run: Mapping[str, str]) -> None:
        """Store plan.json, with the run of each point (cached ones too), and close the parent as FINISHED, FAILED or KILLED."""
        plan = {"plan": self._plans.pop(parent_run_id, None), "runs": dict(sorted(point_to_run.items()))}
        with _speaking(self.uri):
            self._client.log_text(parent_run_id, json.dumps(plan, indent=1, sort_keys=True), "plan.json")
            self._client.set_terminated(parent_run_id, status)

    # ------------------------------------------------------------------------------------ writing

    def ingest(self, bundle: Bundle, parent_run_id: str | None, study_metrics: frozenset[str], origin: str) -> tuple[str, bool]:
        """The run of a bundle, and whether it is new. Raises Refused for what MLflow cannot hold as it is."""
        tags, params, metrics = encode(bundle, study_metrics, origin)
        searched = searched_of(bundle)
        study = tags["study"]
        with _speaking(self.uri):
            known = self._index(study)
            self._remove_half_written()
            if bundle.id in known:
                return known[bundle.id], False
            if parent_run_id:
                tags["mlflow.parentRunId"] = parent_run_id
            run_id = self._write(bundle, {**tags, "driver": driver_id()}, params, metrics, searched.runs if searched else [])
            if searched:
                searched.replay(self.store.root / "searches")
            self._client.set_tag(run_id, "bundle.id", bundle.id)
            self._unfinished.discard(run_id)
            known[bundle.id] = run_id
            return run_id, True

    def _write(self, bundle: Bundle, tags: dict[str, str], params: dict[str, str], metrics: dict[str, float], trials: list[TrialRun]) -> str:
        """All of a run but its `bundle.id`."""
        from mlflow.entities import Metric, Param, RunTag

        start_ms = int(tags["start_ms"])
        first, rest = dict(list(tags.items())[:BATCH]), list(tags.items())[BATCH:]
        run_id = self._client.create_run(self._experiment(tags["study"]), start_time=start_ms, tags=first, run_name=tags["label"][:250]).info.run_id
        self._unfinished.add(run_id)
        batches = [rest[i : i + BATCH] for i in range(0, len(rest), BATCH)] or [[]]
        for i, some in enumerate(batches):
            numbers = [Metric(k, v, start_ms, 0) for k, v in metrics.items()] if i == 0 else []
            asked = [Param(k, v) for k, v in params.items()] if i == 0 else []
            self._client.log_batch(run_id, metrics=numbers, params=asked, tags=[RunTag(k, v) for k, v in some])
        for path in _artifacts(bundle):
            self._client.log_artifact(run_id, str(path))
        end_ms = start_ms + int(1000 * bundle.data["duration_s"])
        for trial in trials:
            self._write_trial(run_id, self._experiment(tags["study"]), trial, start_ms, end_ms)
        self._client.set_terminated(run_id, RUN_STATUS[bundle.status], end_time=end_ms)
        return run_id

    def _write_trial(self, parent: str, experiment: str, trial: TrialRun, start_ms: int, end_ms: int) -> None:
        from mlflow.entities import Metric, Param

        run_id = self._client.create_run(experiment, start_time=start_ms, tags={**trial.tags, "mlflow.parentRunId": parent}, run_name=trial.name).info.run_id
        self._client.log_batch(run_id, metrics=[Metric(k, v, start_ms, step) for k, v, step in trial.metrics], params=[Param(k, v) for k, v in trial.params.items()])
        self._client.set_terminated(run_id, trial.status, end_time=end_ms)

    def _index(self, study: str) -> dict[str, str]:
        if study not in self._known:
            known: dict[str, str] = {}
            for run in sorted(self._search(study, "tags.role = 'cell'"), key=lambda r: r.info.run_id):
                tags = run.data.tags
                if "bundle.id" in tags:
                    known.setdefault(tags["bundle.id"], run.info.run_id)
                elif self._abandoned(tags):
                    self._unfinished.add(run.info.run_id)
            self._known[study] = known
        return self._known[study]

    def _remove_half_written(self) -> None:
        for run_id in sorted(self._unfinished):
            experiment = self._client.get_run(run_id).info.experiment_id
            for trial in self._pages(experiment, f"tags.`mlflow.parentRunId` = '{run_id}'"):
                self._client.delete_run(trial.info.run_id)
            self._client.delete_run(run_id)
            self._unfinished.discard(run_id)

    def _abandoned(self, tags: Mapping[str, str]) -> bool:
        """Whether no living driver is at work on the run. On a server a driver of another host may be: its runs are left alone."""
        host, _, process = tags.get("driver", "").partition(":")
        if host == driver_id().partition(":")[0]:
            return driver_id(int(process.partition(":")[0])) != tags["driver"]
        return self.database is not None

    # ------------------------------------------------------------------------------------ reading

    def rows(self, study: str) -> list[Row]:
        """A Row for each ingested bundle of the study, every status, oldest attempt first; independent of the order of ingest."""
        with _speaking(self.uri):
            found: dict[str, Row] = {}
            for run in sorted(self._search(study, "tags.role = 'cell'"), key=lambda r: r.info.run_id):
                tags = run.data.tags
                if tags.get("bundle.id") and tags["bundle.id"] not in found:  # two drivers of one server may have met
                    path = self._local(tags["cell.key"], tags["bundle.id"]) or self._downloaded(run.info.run_id, tags)
                    found[tags["bundle.id"]] = row_of(run.info.run_id, tags, run.data.params, run.data.metrics, path)
        return sorted(found.values(), key=lambda r: (r.started_at, r.bundle_id))

    def run_ids_by_bundle(self, study: str) -> dict[str, str]:
        """bundle id -> run id of every ingested bundle of the study."""
        with _speaking(self.uri):
            return dict(self._index(study))

    def _search(self, study: str, filter_string: str) -> list:
        experiment = self._experiment(study, create=False)
        return [] if experiment is None else self._pages(experiment, filter_string)

    def _pages(self, experiment: str, filter_string: str) -> list:
        runs, token = [], None
        while True:
            page = self._client.search_runs([experiment], filter_string=filter_string, max_results=PAGE, page_token=token)
            runs += page
            token = page.token
            if not token:
                return runs

    def _local(self, key: str, bundle_id: str) -> Path | None:
        """The bundle's folder in our store: the attempt whose bundle.json has this sha256."""
        for header in sorted((self.store.bundles_dir / key[:2] / key).glob("*/bundle.json")):
            if sha256_file(header) == bundle_id:
                return header.parent
        return None

    def _downloaded(self, run_id: str, tags: Mapping[str, str]) -> Path:
        """MLflow's copy, fetched once. What it does not hold (payload above 4 MiB) is not in the folder either."""
        home = self.store.root / "tracking" / "payload"
        folder = home / tags["bundle.id"]
        if not folder.is_dir() and tags["status"] == "OK":
            home.mkdir(parents=True, exist_ok=True)
            temp = home / f".tmp-{os.getpid()}-{tags['bundle.id']}"
            temp.mkdir(exist_ok=True)
            self._client.download_artifacts(run_id, "", str(temp))
            os.rename(temp, folder)
        return folder

    def _experiment(self, study: str, create: bool = True) -> str | None:
        if study in self._experiments:
            return self._experiments[study]
        name, place = f"suite/{study}", None if self.database is None else (self.database.parent / "artifacts" / study).as_uri()
        found = self._client.get_experiment_by_name(name)
        if found is None:
            if not create:
                return None
            self._experiments[study] = self._create_experiment(name, place)
            return self._experiments[study]
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        if place is not None and found.artifact_location != place:
            raise TrackingError(f"the tracking store was moved: its artifacts are at {masked(str(found.artifact_location))}; delete {self.database}, then "
                                f"`suite ingest {self.store.bundles_dir}` rebuilds it here")  # fmt: skip
        self._experiments[study] = found.experiment_id
        return found.experiment_id

    def _create_experiment(self, name: str, place: str | None) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(name, artifact_location=place)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # a driver on another host was first
                raise
            return self._client.get_experiment_by_name(name).experiment_id


def driver_id(pid: int | None = None) -> str:
    """host:pid:start of a process of this host (ours by default): equal only while it is that same process.

    The host is a digest of its boot and process namespace, so it names nobody. Start is '-' for a dead process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        start = "-" if fields[0] == "Z" else fields[19]
    except OSError:
        start = "-"
    return f"{hashlib.sha256(boot.encode()).hexdigest()[:12]}:{pid}:{start}"


# ---------------------------------------------------------------------------------------------- the store


def _database(uri: str) -> Path | None:
    """The file of a sqlite URI, absolute; None for any other store."""
    if not uri.startswith("sqlite:"):
        return None
    path = uri.removeprefix("sqlite:///")
    if path == uri or not path or re.search(r"[?#]", path):
        raise TrackingError(f"a sqlite store is named sqlite:///PATH without options, got {masked(uri)!r}")
    return Path(path).resolve()


def _import_mlflow() -> None:
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow

    assert mlflow.__version__.startswith("3."), mlflow.__version__
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs a traceback beside the error that we word
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _create_once(database: Path) -> None:
    """A file under the final name is always whole: it is made aside, under our lock, and renamed."""
    if _exists(database):
        return
    with locks.hold(database.parent / ".creating.lock", what="the tracking store that is being created", wait_s=CREATION_LIMIT_S):
        if _exists(database):
            return
        for left in database.parent.glob(f"{database.name}.new*"):
            left.unlink()
        new = database.with_name(f"{database.name}.new")
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        root = (database.parent / "artifacts").as_uri()
        made = SqlAlchemyStore(f"sqlite:///{new}", root)
        made.engine.dispose()
        os.rename(new, database)
        SqlAlchemyStore._engine_map.pop(f"sqlite:///{new}", None)
        SqlAlchemyStore._get_or_create_engine(f"sqlite:///{database}").dispose()  # connections to a file that was deleted meanwhile


def _exists(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0


@contextlib.contextmanager
def _speaking(uri: str) -> Iterator[None]:
    """Turn what a store can raise into one TrackingError with one line; passwords in the URI stay out of it."""
    try:
        yield
    except TrackingError:
        raise
    except (OSError, ImportError, sqlite3.Error, locks.Held) as error:  # ImportError: a database whose driver is not installed
        raise TrackingError(_line(uri, error)) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("mlflow", "sqlalchemy", "requests", "urllib3", "alembic"):
            raise
        raise TrackingError(_line(uri, error)) from error


def _line(uri: str, error: Exception) -> str:
    text = masked(" ".join(str(error).split()))  # before it is cut: half an address shows its password
    text = re.sub(r"\(Background on this error.*?\)|\[SQL:.*?\]|\[parameters:.*", "", text).strip()
    cause = re.search(r"Max retries exceeded.*?(\[Errno -?\d+\] [^'\")]+)", text)  # requests wraps it four times
    text = cause[1] if cause else text[:300] or type(error).__name__
    return masked(f"the tracking store {uri} did not take it: {text}")


def _artifacts(bundle: Bundle) -> list[Path]:
    """bundle.json, and the payload if all of it is at most 4 MiB; of more than that MLflow holds the digests alone."""
    files = bundle.data["files"]
    small = sum(entry["bytes"] for entry in files.values()) <= ARTIFACT_BYTES
    return [bundle.path / name for name in ("bundle.json", *(files if small else ()))]
