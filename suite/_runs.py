"""What an MLflow run of a bundle holds, both ways: bundle to tags, params and metrics, and these to a Row.

    tags, params, metrics = encode(bundle, study.metric_names(), "ingested")
    row = row_of(run_id, tags, params, metrics, folder)

Pure functions without mlflow. Bundles may come from strangers, so `encode` checks all that bundle.json's
reader leaves open, and MLflow's limits too: it cuts long values silently.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite.bundle import Bundle
from suite.claims import Row

ARTIFACT_BYTES = 4 << 20
MAX_PARAMS, MAX_PARAM_CHARS, MAX_TAG_CHARS = 100, 6000, 8000  # MLflow's
MAX_FACTS = 1000
MAX_DURATION_S = 1e9
_NAME = re.compile(r"\w[\w.\- ]{0,199}\Z")
_STUDY = re.compile(r"[a-z0-9_]{1,64}\Z")


class TrackingError(Exception):
    """The tracking store did not answer, or did not take what was written; bundles are kept."""


class Refused(TrackingError):
    """This one bundle cannot be tracked as it is; the store itself works."""

    def __init__(self, bundle: Bundle, reason: str):
        super().__init__(f"bundle {bundle.id[:12]} cannot be tracked: {reason}")
        self.reason = reason


def encode(bundle: Bundle, study_metrics: frozenset[str], origin: str) -> tuple[dict[str, str], dict[str, str], dict[str, float]]:
    """(tags, params, metrics) of a bundle's run. Raises Refused with the rule that it breaks."""
    cell, environment = bundle.data["cell"], bundle.data["environment"]
    _check(bundle, study_metrics)
    params = {name: _json(value) for name, value in cell["params"].items()}
    for name, text in params.items():
        if len(text) > MAX_PARAM_CHARS:
            raise Refused(bundle, f"a parameter has at most {MAX_PARAM_CHARS} characters as JSON, got {len(text)} for {name!r}")
    odd = bundle.data["nonfinite"]
    metrics = {**{k: float(v) for k, v in bundle.data["metrics"].items()}, **{k: _finite(v) for k, v in odd.items()}}
    tags = {
        "role": "cell", "study": cell["study"], "cell.key": bundle.key, "cell.point": bundle.point, "kind": bundle.data["kind"], "status": bundle.status,
        "label": cell["label"], "measure": cell["measure"], "seed": str(cell["seed"]), "replicate": str(cell["replicate"]), "machine": environment["machine"],
        "device": environment["device_model"], "commit": bundle.data["commit"], "dirty": str(bundle.data["dirty"]).lower(), "code": bundle.data["code"],
        "origin": origin, "started_at": bundle.started_at, "start_ms": str(_start_ms(bundle)), "error": bundle.data["error"].strip()[-500:],
        **_long("environment", _json(environment)), **_long("files", _json({name: entry["sha256"] for name, entry in bundle.data["files"].items()})),
        **{f"nonfinite.{k}": v for k, v in odd.items()}, **{f"fact.{k}": v for k, v in bundle.facts.items()},
    }  # fmt: skip
    _check_text(bundle, tags, params)
    return tags, params, metrics


def row_of(run_id: str, tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float], path: Path) -> Row:
    """The Row that a run's tags, params and metrics stand for. Raises TrackingError where they are no run of ours."""
    try:
        odd = {k.removeprefix("nonfinite."): float(v) for k, v in tags.items() if k.startswith("nonfinite.")}
        return Row(
            study=tags["study"], point=tags["cell.point"], key=tags["cell.key"], bundle_id=tags["bundle.id"], run_id=run_id, label=tags["label"],
            measure=tags["measure"], params={k: json.loads(v) for k, v in params.items()}, seed=int(tags["seed"]), replicate=int(tags["replicate"]),
            metrics={**metrics, **odd}, facts={k.removeprefix("fact."): v for k, v in tags.items() if k.startswith("fact.")}, kind=tags["kind"],
            status=tags["status"], device=tags["device"], machine=tags["machine"], environment=json.loads(_joined(tags, "environment")), commit=tags["commit"],
            dirty=tags["dirty"] == "true", code=tags["code"], origin=tags["origin"], started_at=tags["started_at"], path=path, files=json.loads(_joined(tags, "files")),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise TrackingError(f"run {run_id} has a bundle.id but was changed since: {error!r}; delete it and ingest its bundle again") from error


def _check(bundle: Bundle, study_metrics: frozenset[str]) -> None:
    cell, environment = bundle.data["cell"], bundle.data["environment"]
    if not _STUDY.match(cell["study"]):
        raise Refused(bundle, f"a study's name is lower-case letters, digits and '_', got {cell['study']!r}")
    if not isinstance(cell.get("params"), dict) or not all(type(cell.get(k)) is int for k in ("seed", "replicate")):
        raise Refused(bundle, "a cell has params, and a whole seed and replicate")
    if not isinstance(bundle.data.get("dirty"), bool):
        raise Refused(bundle, "dirty is true or false")
    for name in ("device_model", "machine"):
        if not isinstance(environment.get(name), str) or not environment[name]:
            raise Refused(bundle, f"its environment names a {name}, got {environment.get(name)!r}")
    if not 0 <= bundle.data["duration_s"] < MAX_DURATION_S:
        raise Refused(bundle, f"a cell takes 0 to {MAX_DURATION_S:.0g} s, got {bundle.data['duration_s']!r}")
    if any(text not in ("inf", "-inf", "nan") for text in bundle.data["nonfinite"].values()) or bundle.data["nonfinite"].keys() & bundle.data["metrics"].keys():
        raise Refused(bundle, "nonfinite holds inf, -inf or nan, for metrics that have no finite value")
    undeclared = sorted({*bundle.data["metrics"], *bundle.data["nonfinite"]} - study_metrics)
    if undeclared:
        raise Refused(bundle, f"a metric is declared by its study, got {undeclared[:3]} of {cell['study']!r}; declare it in the study's metrics")
    if len(cell["params"]) > MAX_PARAMS:
        raise Refused(bundle, f"a cell has at most {MAX_PARAMS} params, got {len(cell['params'])}; group them in one")
    if len(bundle.facts) > MAX_FACTS:
        raise Refused(bundle, f"a cell has at most {MAX_FACTS} facts, got {len(bundle.facts)}; put them into a record")
    for name in (*cell["params"], *bundle.facts):
        if not _NAME.match(name):
            raise Refused(bundle, f"a name of a param or fact is up to 200 letters, digits, '_', '.', '-' and spaces, got {name!r}")


def _check_text(bundle: Bundle, tags: dict[str, str], params: dict[str, str]) -> None:
    for name, text in tags.items():
        if len(text) > MAX_TAG_CHARS:
            raise Refused(bundle, f"a text has at most {MAX_TAG_CHARS} characters, got {len(text)} for {name!r}; put it into a record")
    for name, text in (*tags.items(), *params.items()):
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise Refused(bundle, f"text is Unicode without NUL and lone surrogates, got {text[:40]!r} for {name!r}")


def _start_ms(bundle: Bundle) -> int:
    try:
        moment = datetime.fromisoformat(bundle.started_at)
        start_ms = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise Refused(bundle, f"started_at is an ISO 8601 time, got {bundle.started_at!r}") from error
    if start_ms < 0:
        raise Refused(bundle, f"started_at is after 1970, got {bundle.started_at!r}")
    return start_ms


def _finite(text: str) -> float:
    """What MLflow holds in the place of inf or NaN; the tag `nonfinite.<metric>` says what it was."""
    value = float(text)
    return 0.0 if math.isnan(value) else math.copysign(sys.float_info.max, value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _long(name: str, text: str) -> dict[str, str]:
    """A text as one tag, or as several: name, name.1, name.2."""
    pieces = [text[i : i + MAX_TAG_CHARS] for i in range(0, len(text), MAX_TAG_CHARS)]
    return {name if i == 0 else f"{name}.{i}": piece for i, piece in enumerate(pieces)}


def _joined(tags: Mapping[str, str], name: str) -> str:
    text, i = tags[name], 1
    while f"{name}.{i}" in tags:
        text, i = text + tags[f"{name}.{i}"], i + 1
    return text
