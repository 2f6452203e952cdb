"""The one way to an asset's file: sources in order, sha256 of every byte, a cache that two processes and kill -9 cannot spoil.

    from suite.assets import fetch
    path = fetch("gsm8k")                       # Path of a file whose sha256 was just checked

Files that already lie on this machine (below SUITE_DATA, in the package, in the cache) are used in place. Others are written to a
work folder inside the cache, checked, fsynced and renamed, under a file lock. It does not choose another copy when the first one it
finds is wrong: a copy that differs from its checksum is an error, never a reason to look elsewhere in silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from suite.assets._sources import AssetError, Source, SourceError

_REPO = Path(__file__).resolve().parents[2]
_WORK_PREFIX = ".part-"


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One data set or model. `file` is its name in the cache, `loader` the "module:function" that reads it.

    Raises ValueError where a field could not be used safely (a file name with a folder in it, a checksum that is none).
    """

    name: str
    file: str
    sha256: str
    size_bytes: int
    licence: str
    citation: str
    loader: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        for field in (self.name, self.file):
            if not field or field != os.path.basename(field) or field.startswith("."):
                raise ValueError(f"name and file must be plain file names, got {field=}; give the folder to a source instead")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError(f"sha256 must be 64 lower-case hex digits, got {self.sha256=}; use `sha256sum FILE`")
        if self.size_bytes <= 0 or not self.sources:
            raise ValueError(f"an asset needs a size and a source, got {self.size_bytes=} {self.sources=}; use `stat -c %s FILE`")


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache: the argument, else the environment variable SUITE_CACHE, else `.state/assets` in the repository."""
    return Path(cache_dir or os.environ.get("SUITE_CACHE") or _REPO / ".state" / "assets")


def is_offline() -> bool:
    """True where the user set SUITE_OFFLINE: no package and no address is then asked, and errors name what was not."""
    return os.environ.get("SUITE_OFFLINE", "") not in ("", "0")


def may_ask(source: Source) -> bool:
    """True where the store may have `source` make the file: it is no local one, and the user did not forbid the network it needs."""
    return source.remote and not (source.needs_network and is_offline())


def find_asset(asset: Asset, *, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The asset's file if it is on this machine already, checked; None if not. Raises AssetError where it is but differs."""
    path = locate(asset, cache_dir=cache_dir)
    return None if path is None else _checked(asset, path)


def locate(asset: Asset, *, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """As `find_asset` without reading the file: for listings."""
    try:
        for source in asset.sources:
            if not source.remote and (found := source.find()) is not None:
                return found
        cached = cache_folder(cache_dir) / asset.name / asset.file
        return cached if cached.is_file() else None
    except OSError as error:
        raise AssetError(f"asset {asset.name}: {error.filename} cannot be looked at ({error.strerror}); make its folder readable") from error


def fetch_asset(asset: Asset, *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The asset's file, fetched if need be, its sha256 checked in this call.

    Raises AssetError: missing everywhere, different from its checksum, or a cache that cannot be written.
    """
    if (found := find_asset(asset, cache_dir=cache_dir)) is not None:
        return found
    folder = cache_folder(cache_dir) / asset.name
    try:
        with _locked(folder):
            # Another process may have finished while this one waited.
            if (found := find_asset(asset, cache_dir=cache_dir)) is not None:
                return found
            _sweep(folder)
            return _fetch_remote(asset, folder)
    except OSError as error:
        raise AssetError(f"asset {asset.name}: the cache {folder} cannot be written ({error.strerror or error}); "
                         "set SUITE_CACHE to a folder that can, with room for "
                         f"{2 * asset.size_bytes / 1e6:.0f} MB") from error


def file_sha256(path: Path) -> str:
    """sha256 of a file, lower-case hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch_remote(asset: Asset, folder: Path) -> Path:
    tried = [f"{source.describe()} (not there)" for source in asset.sources if not source.remote]
    for source in (source for source in asset.sources if source.remote):
        if not may_ask(source):
            tried.append(f"{source.describe()} (not asked: SUITE_OFFLINE is set)")
            continue
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
        try:
            made = _checked(asset, source.download(work, size_bytes=asset.size_bytes), origin=source.describe())
            return _publish(made, folder / asset.file)
        except SourceError as error:
            tried.append(f"{source.describe()} ({error})")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    local = next((source.describe() for source in asset.sources if not source.remote), f"{folder / asset.file}")
    raise AssetError(f"asset {asset.name}: not found; tried {'; '.join(tried)}; "
                     f"put the file with sha256 {asset.sha256} at {local}, or run this once with network access")


def _checked(asset: Asset, path: Path, *, origin: str | None = None) -> Path:
    try:
        size_bytes = path.stat().st_size
        got = f"{size_bytes} bytes" if size_bytes != asset.size_bytes else f"sha256 {file_sha256(path)}"
    except OSError as error:
        raise AssetError(f"asset {asset.name}: {path} cannot be read ({error.strerror or error}); make it readable") from error
    if got != f"sha256 {asset.sha256}":
        where = f"from {origin}" if origin else f"at {path}"
        raise AssetError(f"asset {asset.name}: the file {where} differs from its checksum: want sha256 {asset.sha256} and "
                         f"{asset.size_bytes} bytes, got {got}; "
                         + ("its source changed or the download was cut short: run again, and report it if it stays" if origin
                            else "remove that file and run again"))
    return path


def _publish(made: Path, target: Path) -> Path:
    """Renames a finished file into place; after a power cut there is the whole file or none."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(made, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return target


def _sweep(folder: Path) -> None:
    """Removes what a killed process left. Safe because the caller holds the lock, which the kernel drops with its holder."""
    for leftover in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
