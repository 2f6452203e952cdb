"""Ingest: bundles that were made elsewhere, into our bundle store and the tracker.

    report = ingest_paths([Path("results.tar")], store, tracker, {"determinism": study.metric_names()})
    report.skipped                                  # [(path, reason)]: the caller exits non-zero

Takes bundle folders, folders that hold some at any depth, and `.tar` archives with their parts. What comes
is untrusted: it is checked whole before it is copied, and one bad bundle costs only itself. A bundle that is
here already is known by its id. Nothing is executed or unpickled, and no bundle is changed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from suite._trial_runs import searched_of
from suite.archive import ArchiveError, extract, parts_of
from suite.bundle import Bundle, BundleError, BundleStore, origin_of, read_bundle
from suite.driver import StoreFull
from suite.tracking import Refused, Tracker, encode

MAX_BUNDLES, MAX_DEPTH = 100_000, 12
ORIGIN = "ingested"


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """Bundle ids that were new (to the store or the tracker) and known, and what was skipped, each with its reason."""

    new: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    skipped: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """Bundles as they lie in our store, by id, each with whether it was new there; and what was skipped."""

    bundles: Mapping[str, tuple[Bundle, bool]]
    skipped: tuple[tuple[Path, str], ...]


def ingest_paths(paths: Iterable[Path], store: BundleStore, tracker: Tracker | None, metrics_by_study: Mapping[str, frozenset[str]]) -> IngestReport:
    """Take in every valid bundle under `paths`. Raises TrackingError where the tracker stops: then all bundles are in the store.

    metrics_by_study: the metrics that each known study declares; bundles of other studies are skipped.
    Raises StoreFull where our own store cannot be written.
    """
    return track(adopt_paths(paths, store, metrics_by_study), tracker, metrics_by_study)


def adopt_paths(paths: Iterable[Path], store: BundleStore, metrics_by_study: Mapping[str, frozenset[str]]) -> Adopted:
    """The first half: into the bundle store. Raises StoreFull where it cannot be written."""
    taken: dict[str, tuple[Bundle, bool]] = {}
    skipped: list[tuple[Path, str]] = []
    for shown, found in _bundles(paths, skipped):
        bundle = _valid(shown, found, metrics_by_study, skipped)
        if bundle is not None and bundle.id not in taken:
            taken[bundle.id] = _adopted(store, found)
    return Adopted(bundles=taken, skipped=tuple(skipped))


def track(adopted: Adopted, tracker: Tracker | None, metrics_by_study: Mapping[str, frozenset[str]]) -> IngestReport:
    """The second half: into the tracker, where there is one. Raises TrackingError."""
    new_ids, known_ids = [], []
    for bundle, new in adopted.bundles.values():
        if tracker is not None:
            new |= tracker.ingest(bundle, None, metrics_by_study[bundle.data["cell"]["study"]], origin_of(bundle.path))[1]
        (new_ids if new else known_ids).append(bundle.id)
    return IngestReport(new=tuple(new_ids), known=tuple(known_ids), skipped=adopted.skipped)


def _valid(shown: Path, found: Path, metrics_by_study: Mapping[str, frozenset[str]], skipped: list[tuple[Path, str]]) -> Bundle | None:
    """The bundle, or None and a line in `skipped`."""
    try:
        bundle = read_bundle(found)
        study = bundle.data["cell"]["study"]
        if study not in metrics_by_study:
            raise BundleError(found, f"a study is one of {sorted(metrics_by_study)}, got {study[:80]!r}")
        encode(bundle, metrics_by_study[study], ORIGIN)
        searched_of(bundle)
    except (BundleError, Refused) as error:
        skipped.append((shown, error.reason))
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError, OSError) as error:  # of the shapes that strangers' JSON can take
        skipped.append((shown, f"unreadable ({type(error).__name__}: {error})"))
    else:
        return bundle
    return None


def _adopted(store: BundleStore, found: Path) -> tuple[Bundle, bool]:
    """The bundle as it lies in our store, and whether it is new."""
    try:
        return store.adopt(found, ORIGIN)
    except OSError as error:
        raise StoreFull(f"{error.strerror}: {store.bundles_dir}") from error


def _bundles(paths: Iterable[Path], skipped: list[tuple[Path, str]]) -> Iterator[tuple[Path, Path]]:
    """(path to show, folder) of every bundle; folders out of archives live until the next one is asked for."""
    archives: dict[tuple[Path, ...], None] = {}
    count = 0
    for path in map(Path, paths):
        holds_some = False
        for found in _walk(path, skipped):
            holds_some = True
            if found.suffix == ".tar" and not found.is_dir():
                archives[tuple(parts_of(found))] = None
                continue
            count += 1
            if count > MAX_BUNDLES:
                skipped.append((path, f"more than {MAX_BUNDLES} bundles; the rest was left out"))
                return
            yield found, found
        if not holds_some and path.is_dir():
            skipped.append((path, "it holds no bundle"))
    for parts in archives:
        yield from _from_archive(parts, skipped)


def _from_archive(parts: tuple[Path, ...], skipped: list[tuple[Path, str]]) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="ingest-") as temp:
        try:
            extract(parts, Path(temp))
        except ArchiveError as error:  # bundles that came before the fault vouch for themselves
            skipped.append((error.path, error.reason))
        found = [p for p in _walk(Path(temp), skipped) if p.is_dir()]
        if not found and (not skipped or skipped[-1][0] not in parts):
            skipped.append((parts[0], "it holds no bundle"))
        for folder in found:
            yield parts[0] / folder.relative_to(temp), folder


def _walk(path: Path, skipped: list[tuple[Path, str]]) -> Iterator[Path]:
    """Bundle folders and archives under a path, sorted; links are not followed, unfinished bundles not looked at."""
    if path.is_file() and path.suffix == ".tar":
        yield path
        return
    if not path.is_dir():
        skipped.append((path, "it is neither a folder nor a .tar file" if path.exists() else "no such file or folder"))
        return
    top = len(path.parts)
    for here, folders, files in os.walk(path):
        folder = Path(here)
        folders[:] = sorted(f for f in folders if not f.startswith(".tmp-"))
        if "bundle.json" in files:
            folders.clear()
            yield folder
            continue
        yield from (folder / f for f in sorted(files) if f.endswith(".tar"))
        if len(folder.parts) - top >= MAX_DEPTH and folders:
            skipped.append((folder, f"deeper than {MAX_DEPTH} folders"))
            folders.clear()
