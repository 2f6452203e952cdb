"""Session: the folders, machine and tracker that one command works with.

    session = Session.here()
    plan = session.plan(load_study("determinism"), "cpu", Options())

State lies under SUITE_STATE (default: .state in the checkout). The tracker is MLFLOW_TRACKING_URI, or an
embedded sqlite store beside the bundles. Without mlflow a session has bundles only, and says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

from suite import identity
from suite.bundle import Bundle, BundleError, BundleStore
from suite.cell import Cell
from suite.claims import View
from suite.driver import Conditions
from suite.machine import Machine, commit, environment, this_machine, versions
from suite.plan import Entry, Options, Plan, make_plan, planned_modules
from suite.study import Study, load_config
from suite.text import masked

PUBLISHED = identity.ROOT / "reports" / "published"


@dataclass(frozen=True, kw_only=True)
class Session:
    state_dir: Path
    store: BundleStore
    machine: Machine
    uri: str | None  # None: the embedded store

    @classmethod
    def here(cls) -> Session:
        state = Path(os.environ.get("SUITE_STATE") or identity.ROOT / ".state").resolve()
        return cls(state_dir=state, store=BundleStore(state), machine=this_machine(), uri=os.environ.get("MLFLOW_TRACKING_URI") or None)

    @property
    def has_tracker(self) -> bool:
        return "SUITE_NO_TRACKING" not in os.environ and importlib.util.find_spec("mlflow") is not None

    def store_name(self) -> str:
        """The store as a person may see it: without credentials."""
        if not self.has_tracker:
            return f"{self.state_dir / 'bundles'} (bundles only, no MLflow here; elsewhere `suite ingest PATH` takes them in)"
        return masked(self.store_uri())

    def store_uri(self) -> str:
        """The tracking store's address as MLflow takes it. It may hold a password: never print it."""
        return self.uri or f"sqlite:///{self.state_dir / 'tracking' / 'mlflow.db'}"

    def open_tracker(self):
        """The tracker, or None where mlflow is not installed. Raises TrackingError."""
        if not self.has_tracker:
            return None
        from suite.tracking import open_tracker

        return open_tracker(self.uri, self.state_dir)

    def conditions(self) -> Conditions:
        sha, dirty = commit(identity.ROOT)
        return Conditions(environment=environment, commit=sha, dirty=dirty)

    def preset(self, study: Study, preset: str | None) -> tuple[str, str]:
        """The preset to use and why: the user's, else the best that this machine can measure."""
        if preset:
            return preset, "asked for"
        if study.best_preset is not None:
            return study.best_preset(self.machine)
        return "smoke", "the only preset that every study has"

    def plan(self, study: Study, preset: str, options: Options, bundles: list[Bundle] | None = None) -> Plan:
        config = load_config(study, preset)
        if bundles is None:
            bundles, _ = self.store.load_all()
        return make_plan(study.name, preset, study.cells(config), bundles=bundles, machine=self.machine, versions=versions, asset_sha256=_asset_sha256, options=options)

    def entries(self, study: Study, cell: Cell, bundles: list[Bundle]) -> tuple[Entry, ...]:
        """One cell that joins a running plan (a search asked for it), after its inputs."""
        return make_plan(study.name, "", [cell], bundles=bundles, machine=self.machine, versions=versions, asset_sha256=_asset_sha256).entries

    def view(self, study: Study, plan: Plan, tracker) -> View:
        """The rows that claims and exhibits may use: what the tracker holds, chosen by the rule of suite.claims."""
        from suite.claims import make_view

        rows = tracker.rows(study.name)
        codes = {m: identity.code_digest(m) for m in planned_modules(plan) | {r.measure.partition(":")[0] for r in rows if _exists(r.measure)}}
        return make_view(rows, plan.points(), codes, [e.cell for e in plan.entries])

    def adopt_published(self, study: Study) -> list[str]:
        """Take the checked-in bundles of the study into the store; returns what could not be read."""
        problems = []
        for header in sorted((PUBLISHED / study.name).glob("**/bundle.json")):
            try:
                self.store.adopt(header.parent, "published")
            except BundleError as error:
                problems.append(str(error))
        return problems

    def soak_record(self) -> dict | None:
        """What `make soak` last recorded, if it ever did."""
        path = PUBLISHED / "soak.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def remember_preset(self, study: str, preset: str) -> None:
        (self.state_dir / "last").mkdir(parents=True, exist_ok=True)
        (self.state_dir / "last" / f"{study}.json").write_text(json.dumps({"preset": preset}))

    def last_preset(self, study: str) -> str | None:
        path = self.state_dir / "last" / f"{study}.json"
        return json.loads(path.read_text())["preset"] if path.is_file() else None


def _exists(measure: str) -> bool:
    return identity.module_path(measure.partition(":")[0], identity.ROOT) is not None


def _asset_sha256(name: str) -> str:
    from suite.assets import get_asset

    return get_asset(name).sha256
