"""Bundle: what one attempt at a cell leaves on disk, and the store that holds them.

    store = BundleStore(Path(".state"))
    bundle = store.write(draft, result)         # temp name, fsync, rename; never overwritten
    read_bundle(bundle.path)                    # validated: sizes, names, every file's sha256

Layout: <root>/bundles/<key[:2]>/<key>/<attempt>/{bundle.json, arrays.npz, <record>.json, log.txt}.
`bundle.id` is the sha256 of bundle.json, which names the sha256 of every other file, so one digest
vouches for the whole. Bundles from elsewhere are untrusted: limits are checked before content.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from suite.identity import sha256_bytes, sha256_file
from suite.measure import KINDS, Result

SCHEMA = 1
STATUSES = ("OK", "FAILED", "TIMED OUT", "PAUSED")
MAX_FILES, MAX_JSON_BYTES, MAX_FILE_BYTES = 64, 4 << 20, 1 << 30
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,119}\Z")
_SHA = re.compile(r"[0-9a-f]{64}\Z")
_TAKEN_RECORDS = frozenset({"bundle"})
_TAKEN_ARRAYS = frozenset({"file", "allow_pickle"})  # arguments of np.savez_compressed


class BundleError(Exception):
    """A folder that is no valid bundle: its path and the rule it breaks."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"not a valid bundle: {path}: {reason}")
        self.path, self.reason = path, reason


class Unstorable(ValueError):
    """A result that no bundle can hold: one line with the rule that it breaks. The attempt is stored as FAILED instead."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One validated attempt. `data` is bundle.json as read; `id` is the sha256 of its bytes."""

    id: str
    path: Path
    data: Mapping[str, Any]

    @property
    def key(self) -> str:
        return self.data["key"]

    @property
    def point(self) -> str:
        return self.data["point"]

    @property
    def status(self) -> str:
        return self.data["status"]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics with infinities and NaN restored."""
        odd = {k: float(v) for k, v in self.data.get("nonfinite", {}).items()}
        return {**self.data["metrics"], **odd}

    @property
    def facts(self) -> dict[str, str]:
        return dict(self.data["facts"])

    @property
    def started_at(self) -> str:
        return self.data["started_at"]

    def ended(self) -> float:
        """When the attempt ended, in seconds since 1970, by the clock that made it; NaN where its time cannot be read."""
        try:
            moment = datetime.datetime.fromisoformat(self.started_at)
        except ValueError:
            return math.nan
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp() + self.data["duration_s"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """All of a bundle but its result: identity, environment, how the attempt went."""

    cell: Mapping[str, Any]  # Plan's description: study, label, measure, params, seed, replicate, needs, inputs, assets
    point: str
    key: str
    code: str
    environment: Mapping[str, Any]
    commit: str
    dirty: bool
    started_at: str  # UTC, ISO 8601
    duration_s: float
    status: str
    error: str = ""
    log: str = ""


def _split_finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise Unstorable(f"a metric is a number, got {type(value).__name__} for {name!r} ({error})") from error
    return {k: v for k, v in numbers.items() if math.isfinite(v)}, {k: repr(v) for k, v in numbers.items() if not math.isfinite(v)}


def _check_names(result: Result) -> None:
    """Names that would hide a file of the bundle's own, or that numpy's writer takes for an argument."""
    for kind, names, taken in (("a record", result.records, _TAKEN_RECORDS), ("an array", result.arrays, _TAKEN_ARRAYS)):
        if clash := sorted(taken & names.keys()):
            raise Unstorable(f"{kind} may not be named {clash[0]!r}, the bundle uses that name itself; give it another one")
    if len(result.records) > MAX_FILES:  # before any is written; with arrays and a log the reader counts again
        raise Unstorable(f"a bundle has at most {MAX_FILES} files, got {len(result.records)} records; put several values into one")


def _strict_json(value: Any, what: str, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, indent=indent, allow_nan=False).encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unstorable(f"a {what} is strict JSON, without NaN, infinities and odd types ({error}); store numbers that may not be finite as metrics or arrays") from error


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename_synced(temp: Path, final: Path) -> None:
    """After a power cut the folder is there with all its files, or not at all."""
    _fsync_dir(temp)
    os.rename(temp, final)
    for folder in (final.parent, final.parent.parent):  # the key's folder may be new too
        _fsync_dir(folder)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


class BundleStore:
    """The folder of bundles of one checkout. Opening it creates nothing."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.bundles_dir = self.root / "bundles"

    def state_dir(self, key: str) -> Path:
        """Where a long cell keeps its state between pauses."""
        return self.root / "state" / key

    def write(self, draft: Draft, result: Result | None = None) -> Bundle:
        """Store one attempt durably; raises OSError (disk full, read-only) or Unstorable with nothing half-written left.

        What is written is read by the rules of `read_bundle` before it gets its name, so that no store refuses it later.
        """
        home = self.bundles_dir / draft.key[:2] / draft.key
        home.mkdir(parents=True, exist_ok=True)
        attempt = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        temp = home / f".tmp-{attempt}"
        try:
            temp.mkdir()
            bundle_id = self._fill(temp, draft, result or Result())
            read_bundle(temp, verify_files=False)
            final = home / attempt
            _rename_synced(temp, final)
        except BaseException as error:
            shutil.rmtree(temp, ignore_errors=True)
            if isinstance(error, BundleError):
                raise Unstorable(f"a result must fit a bundle: {error.reason}") from error
            raise
        return Bundle(id=bundle_id, path=final, data=json.loads((final / "bundle.json").read_text()))

    def _fill(self, temp: Path, draft: Draft, result: Result) -> str:
        _check_names(result)
        if result.arrays:
            with open(temp / "arrays.npz", "wb") as f:
                np.savez_compressed(f, **{k: np.asarray(v) for k, v in result.arrays.items()})
                f.flush()
                os.fsync(f.fileno())
        for name, value in result.records.items():
            _write_synced(temp / f"{name}.json", _strict_json(value, f"record {name!r}"))
        if draft.log:
            _write_synced(temp / "log.txt", draft.log.encode("utf-8", "replace"))
        files = {p.name: {"sha256": sha256_file(p), "bytes": p.stat().st_size} for p in sorted(temp.iterdir())}
        finite, odd = _split_finite(result.metrics)
        fields = {k: v for k, v in draft.__dict__.items() if k != "log"}
        body = {"schema": SCHEMA, **fields, "kind": result.kind, "metrics": finite, "nonfinite": odd, "facts": dict(result.facts), "files": files}
        raw = _strict_json(body, "header", indent=1)
        _write_synced(temp / "bundle.json", raw)
        return sha256_bytes(raw)

    def folders(self) -> Iterator[Path]:
        """Every attempt's folder, oldest attempt of a key first."""
        for home in sorted(self.bundles_dir.glob("??/*")):
            yield from sorted(p for p in home.iterdir() if p.is_dir() and not p.name.startswith(".tmp-"))

    def attempts(self, key: str) -> list[Path]:
        """The finished attempts at a key, oldest first."""
        return sorted(_attempts(self.bundles_dir / key[:2] / key))

    def load_all(self) -> tuple[list[Bundle], list[BundleError]]:
        """All bundles (headers checked, payload digests not), and what could not be read."""
        good: list[Bundle] = []
        bad: list[BundleError] = []
        for folder in self.folders():
            try:
                good.append(read_bundle(folder, verify_files=False))
            except BundleError as error:
                bad.append(error)
        return good, bad

    def adopt(self, source: Path, origin: str) -> tuple[Bundle, bool]:
        """Copy a foreign bundle in unchanged, once. Returns it, and whether it was new. Raises BundleError or OSError with nothing left.

        `origin` is kept beside the bundle, not in it: its id must stay what its maker printed. The copy is what is verified.
        """
        bundle = read_bundle(source, verify_files=False)
        home = self.bundles_dir / bundle.key[:2] / bundle.key
        final = home / f"foreign-{bundle.id[:16]}"
        known = next((p for p in _attempts(home) if sha256_file(p / "bundle.json") == bundle.id), None)
        if known is not None:
            return Bundle(id=bundle.id, path=known, data=bundle.data), False
        home.mkdir(parents=True, exist_ok=True)
        temp = home / f".tmp-{secrets.token_hex(6)}"
        try:
            temp.mkdir()
            for name in ("bundle.json", *bundle.data["files"]):
                _write_synced(temp / name, (bundle.path / name).read_bytes())
            try:
                copy = read_bundle(temp)
            except BundleError as error:
                raise BundleError(bundle.path, error.reason) from error
            if copy.id != bundle.id:
                raise BundleError(bundle.path, "it changed while it was copied")
            _write_synced(temp / ".origin", origin.encode())
            _rename_synced(temp, final)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return Bundle(id=bundle.id, path=final, data=bundle.data), True

    def remove_leftovers(self) -> int:
        """Delete temp folders of dead writers (call while holding the store's lock)."""
        temps = [p for p in self.bundles_dir.glob("??/*/.tmp-*") if p.is_dir()]
        for path in temps:
            shutil.rmtree(path, ignore_errors=True)
        return len(temps)


def _attempts(home: Path) -> list[Path]:
    return [p for p in home.iterdir() if not p.name.startswith(".tmp-") and (p / "bundle.json").is_file()] if home.is_dir() else []


def origin_of(path: Path) -> str:
    """'here' for a bundle measured under this store, else what brought it."""
    mark = Path(path) / ".origin"
    return mark.read_text() if mark.is_file() else "here"


def trust(origin: str) -> int:
    """How far a bundle's word counts: ours most, then a published one, then an ingested one. It comes before time: a stranger's clock may say anything."""
    return {"here": 2, "published": 1}.get(origin, 0)


def read_bundle(path: Path, *, verify_files: bool = True) -> Bundle:
    """Read and validate one bundle folder; raises BundleError with the rule that it breaks."""
    path = Path(path)
    raw = _read_header(path)
    try:
        data = json.loads(raw)
        _check_header(path, data)
    except (ValueError, RecursionError, OverflowError) as error:
        raise BundleError(path, f"bundle.json is not JSON that holds a bundle ({error})") from error
    for name, entry in data["files"].items():
        _check_file(path, name, entry, verify_files)
    return Bundle(id=sha256_bytes(raw), path=path, data=data)


def _read_header(path: Path) -> bytes:
    header = path / "bundle.json"
    if not header.is_file() or header.is_symlink():
        raise BundleError(path, "bundle.json is missing")
    if header.stat().st_size > MAX_JSON_BYTES:
        raise BundleError(path, f"bundle.json is over {MAX_JSON_BYTES} bytes")
    return header.read_bytes()


_FIELDS = {"point": str, "key": str, "code": str, "cell": dict, "environment": dict, "commit": str, "status": str, "kind": str,
           "started_at": str, "duration_s": (int, float), "metrics": dict, "nonfinite": dict, "facts": dict, "files": dict, "error": str}


def _check_header(path: Path, data: Any) -> None:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BundleError(path, f"its schema is not {SCHEMA}")
    for name, kind in _FIELDS.items():
        if not isinstance(data.get(name), kind):
            raise BundleError(path, f"field {name!r} is missing or of the wrong type")
    if not (_SHA.match(data["key"]) and _SHA.match(data["point"]) and _SHA.match(data["code"])):
        raise BundleError(path, "point, key and code are 64 hex digits")
    if data["status"] not in STATUSES or data["kind"] not in KINDS:
        raise BundleError(path, f"status or kind is unknown: {data['status']!r}, {data['kind']!r}")
    for name in ("study", "measure", "label"):
        if not isinstance(data["cell"].get(name), str):
            raise BundleError(path, f"cell.{name} is missing")
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in data["metrics"].values()):
        raise BundleError(path, "a metric is not a finite number")
    if not all(isinstance(v, str) for v in (*data["facts"].values(), *data["nonfinite"].values())):
        raise BundleError(path, "a fact is not a string")
    if len(data["files"]) > MAX_FILES:
        raise BundleError(path, f"more than {MAX_FILES} files")


def _check_file(path: Path, name: str, entry: Any, verify: bool) -> None:
    if not _FILE.match(name):
        raise BundleError(path, f"file name {name!r} is not plain")
    if not isinstance(entry, dict) or not _SHA.match(str(entry.get("sha256"))):
        raise BundleError(path, f"file {name!r} has no sha256")
    file = path / name
    if not file.is_file() or file.is_symlink():
        raise BundleError(path, f"file {name!r} is missing")
    size = file.stat().st_size
    if size > MAX_FILE_BYTES or size != entry.get("bytes"):
        raise BundleError(path, f"file {name!r} has {size} bytes, bundle.json says {entry.get('bytes')}")
    if verify and sha256_file(file) != entry["sha256"]:
        raise BundleError(path, f"file {name!r} does not have the sha256 that bundle.json names")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """A bundle's arrays; pickled content is refused by numpy with ValueError."""
    return arrays_of(Path(path) / "arrays.npz")


def arrays_of(source: Path | BinaryIO) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or of its bytes."""
    with np.load(source, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def load_record(path: Path, name: str) -> Any:
    """One JSON payload of a bundle."""
    return json.loads((Path(path) / f"{name}.json").read_text())
