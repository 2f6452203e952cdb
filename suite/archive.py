"""Archive: bundles and the states of paused cells as tar files that fit through narrow channels.

    pack(store, None, Path("results.tar"))          # results.tar, results.2.tar, ... of at most 15 MiB each
    unpack([Path("results.tar")], store)            # finds its other parts beside it

Equal contents give equal bytes. A file larger than a part is cut into pieces. An archive that is read is
untrusted: plain files and folders only, relative paths, bounded sizes and depth, no compression. `unpack`
restores what was ours, so that a run goes on where it stopped; bundles of strangers go through `suite.ingest`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from suite.bundle import BundleError, BundleStore, read_bundle

__all__ = ["ArchiveError", "Unpacked", "extract", "pack", "parts_of", "unpack"]

PART_BYTES = 15 << 20
MAX_MEMBERS, MAX_BYTES, MAX_DEPTH, MAX_NAME = 200_000, 64 << 30, 12, 1024
_PART = re.compile(r"(?P<stem>.+?)(?:\.(?P<n>[1-9]\d*))?\.tar\Z")
_MARK = re.compile(r"part-(?P<n>\d{1,6})-of-(?P<of>\d{1,6})\Z")
_PIECE = re.compile(r"pieces/(?P<i>\d{1,6})-of-(?P<n>\d{1,6})/(?P<name>.+)\Z")
_HOME = re.compile(r"bundles/(?P<two>[0-9a-f]{2})/(?P<key>[0-9a-f]{64})/(?P<attempt>[A-Za-z0-9][A-Za-z0-9_\-]{0,99})\Z")
_STATE = re.compile(r"[0-9a-f]{64}\Z")


class ArchiveError(ValueError):
    """An archive that breaks a rule: its path and the rule."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"not a readable archive: {path}: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What an archive brought: attempts and states that were new, and those that were here already."""

    bundles: tuple[Path, ...]
    states: tuple[Path, ...]
    kept: tuple[Path, ...]


# ---------------------------------------------------------------------------------------------- packing


def pack(store: BundleStore, keys: Iterable[str] | None, out: Path, max_part_bytes: int = PART_BYTES) -> list[Path]:
    """Write attempts and states (of `keys`, or all) to `out` and its further parts; returns their paths.

    Each part is at most `max_part_bytes`. Parts of an earlier archive of this name are replaced, or removed.
    """
    out = Path(out)
    if out.suffix != ".tar" or (_PART.match(out.name) or {"n": "1"})["n"]:
        raise ValueError(f"an archive is named FILE.tar, and its parts FILE.2.tar and so on, got {str(out)!r}")
    if max_part_bytes < 2 * tarfile.RECORDSIZE:
        raise ValueError(f"a part has at least {2 * tarfile.RECORDSIZE} bytes, got {max_part_bytes=}")
    wanted = None if keys is None else frozenset(keys)
    parts = list(_filled(_groups(store, wanted), max_part_bytes))
    paths = [out if n == 1 else out.with_name(f"{out.name.removesuffix('.tar')}.{n}.tar") for n in range(1, len(parts) + 1)]
    old = [p for p in parts_of(out) if p.is_file()]
    for n, (path, members) in enumerate(zip(paths, parts, strict=True), 1):
        _write_part(path, members, f"part-{n}-of-{len(parts)}")
    for path in set(old) - set(paths):
        path.unlink()
    return paths


@dataclass(frozen=True, kw_only=True)
class _Member:
    name: str
    source: Path
    start: int
    length: int

    def cost(self) -> int:
        """Bytes in the archive: a header, an extended one for a long name, and the padded content."""
        extra = 0 if len(self.name.encode()) <= 100 else 3 * tarfile.BLOCKSIZE + len(self.name.encode())
        return tarfile.BLOCKSIZE + extra + -(-self.length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _groups(store: BundleStore, keys: frozenset[str] | None) -> Iterator[list[_Member]]:
    """The files of one attempt, or of one state, at a time: kept in one part where they fit."""
    for folder in store.folders():
        if keys is None or folder.parent.name in keys:
            try:
                names = ["bundle.json", *sorted(read_bundle(folder, verify_files=False).data["files"])]
            except BundleError:
                continue  # `suite run` reports it
            if (folder / ".origin").is_file():
                names.append(".origin")
            yield [_member(store, folder / name) for name in names]
    states = store.root / "state"
    for folder in sorted(p for p in states.glob("*") if _STATE.match(p.name)):
        if keys is None or folder.name in keys:
            files = [_member(store, p) for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]
            if files:
                yield files


def _member(store: BundleStore, path: Path) -> _Member:
    return _Member(name=path.relative_to(store.root).as_posix(), source=path, start=0, length=path.stat().st_size)


def _filled(groups: Iterable[list[_Member]], limit: int) -> Iterator[list[_Member]]:
    room = limit // tarfile.RECORDSIZE * tarfile.RECORDSIZE - 3 * tarfile.BLOCKSIZE  # two end an archive, one is the part's mark
    part, used = [], 0
    for group in groups:
        members = [piece for m in group for piece in _pieces(m, room)]
        whole = sum(m.cost() for m in members)
        if part and used + whole > room >= whole:
            yield part
            part, used = [], 0
        for m in members:
            if part and used + m.cost() > room:
                yield part
                part, used = [], 0
            part.append(m)
            used += m.cost()
    yield part


def _pieces(m: _Member, room: int) -> list[_Member]:
    if m.cost() <= room:
        return [m]
    size = (room - 16 * tarfile.BLOCKSIZE) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
    n = -(-m.length // size)
    return [_Member(name=f"pieces/{i}-of-{n}/{m.name}", source=m.source, start=i * size, length=min(size, m.length - i * size)) for i in range(n)]


def _write_part(path: Path, members: list[_Member], mark: str) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temp, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(mark))
        for m in members:
            info = tarfile.TarInfo(m.name)  # owner, time and mode are constants: equal contents, equal bytes
            info.size, info.mode = m.length, 0o644
            with open(m.source, "rb") as f:
                f.seek(m.start)
                tar.addfile(info, f)
    with open(temp, "rb") as f:
        os.fsync(f.fileno())
    os.rename(temp, path)


# ---------------------------------------------------------------------------------------------- reading


def parts_of(path: Path) -> list[Path]:
    """All parts of the archive that `path` is a part of, found beside it, in order."""
    match = _PART.match(path.name)
    if not match:
        return [path]
    found = {}
    for other in path.parent.glob("*.tar"):
        m = _PART.match(other.name)
        if m and m["stem"] == match["stem"]:
            found[int(m["n"] or 1)] = other
    return [found[n] for n in sorted(found)] or [path]


def unpack(paths: Path | Sequence[Path], store: BundleStore) -> Unpacked:
    """Restore attempts and states from our own archives. What is here already is kept as it is. Raises ArchiveError.

    Every digest is checked before anything is moved into the store.
    """
    paths = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
    store.root.mkdir(parents=True, exist_ok=True)
    new: dict[str, list[Path]] = {"bundles": [], "states": [], "kept": []}
    for parts in {tuple(parts_of(p)): None for p in paths}:
        with tempfile.TemporaryDirectory(dir=store.root, prefix=".unpack-") as temp:
            folder = Path(temp)
            extract(parts, folder)
            for group, source, target in _checked(parts[0], folder, store):
                _move(source, target, new[group], new["kept"])
    return Unpacked(**{k: tuple(v) for k, v in new.items()})


def _checked(archive: Path, folder: Path, store: BundleStore) -> list[tuple[str, Path, Path]]:
    """(kind, where it is, where it goes) of each attempt and state, all of them valid."""
    out = []
    for header in sorted(folder.glob("bundles/*/*/*/bundle.json")):
        name = header.parent.relative_to(folder).as_posix()
        home = _HOME.match(name)
        try:
            bundle = read_bundle(header.parent)
        except BundleError as error:
            raise ArchiveError(archive, f"{name}: {error.reason}") from error
        if not home or home["key"] != bundle.key or home["two"] != bundle.key[:2]:
            raise ArchiveError(archive, f"{name} is not where a bundle of key {bundle.key[:12]} lies")
        out.append(("bundles", header.parent, store.root / name))
    for state in sorted(folder.glob("state/*")):
        if not _STATE.match(state.name):
            raise ArchiveError(archive, f"state/{state.name} is not named by a key")
        out.append(("states", state, store.state_dir(state.name)))
    return out


def _move(source: Path, target: Path, new: list[Path], kept: list[Path]) -> None:
    if target.exists():
        kept.append(target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)
    new.append(target)


def extract(parts: Sequence[Path], folder: Path) -> None:
    """Unpack the parts of one archive into an empty folder. Raises ArchiveError for anything but bounded plain files.

    Where it raises, what came before the fault lies in the folder.
    """
    members = total = 0
    marks: set[tuple[int, int]] = set()
    pieces: dict[str, tuple[int, int]] = {}  # name -> (next piece, pieces)
    for path in parts:
        with _reading(path), tarfile.open(path, "r:") as tar:
            for info in tar:
                members, total = members + 1, total + info.size
                if members > MAX_MEMBERS or total > MAX_BYTES:
                    raise ArchiveError(path, f"more than {MAX_MEMBERS} members or {MAX_BYTES} bytes")
                if mark := _MARK.match(info.name):
                    marks.add((int(mark["n"]), int(mark["of"])))
                    continue
                if info.isdir():
                    _safe(path, info.name)
                    continue
                if not info.isreg() or info.issparse():
                    raise ArchiveError(path, f"{info.name[:200]!r} is no plain file")
                _extract_one(path, tar.extractfile(info), info.name, folder, pieces)
    if marks and marks != {(n, max(marks)[1]) for n in range(1, max(marks)[1] + 1)}:
        raise ArchiveError(parts[0], f"it has {max(marks)[1]} parts, and {sorted(n for n, _ in marks)} are here; put all of them into one folder")
    left = [name for name, (done, n) in pieces.items() if done != n]
    if left:
        raise ArchiveError(parts[0], f"pieces of {left[0][:200]!r} are missing; put all parts of the archive into one folder")


def _extract_one(archive: Path, source: io.BufferedIOBase, name: str, folder: Path, pieces: dict[str, tuple[int, int]]) -> None:
    piece = _PIECE.match(name)
    if piece:
        name, i, n = piece["name"], int(piece["i"]), int(piece["n"])
        if (i, n) != pieces.get(name, (0, n)):
            raise ArchiveError(archive, f"piece {i} of {n} of {name[:200]!r} is out of order; put all parts of the archive into one folder")
        pieces[name] = (i + 1, n)
    target = folder.joinpath(*_safe(archive, name).parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab" if piece and i else "xb") as f:
        shutil.copyfileobj(source, f, 1 << 20)


def _safe(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name or not name.isprintable():
        raise ArchiveError(archive, f"{name[:200]!r} is no plain relative path")
    if len(path.parts) > MAX_DEPTH or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        raise ArchiveError(archive, f"{name[:200]!r} is too deep or too long")
    return path


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ArchiveError:
        raise
    except FileNotFoundError as error:
        raise ArchiveError(path, "no such file") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ArchiveError(path, "it names one path twice, as files or as a file and a folder") from error
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ArchiveError(path, f"not a whole uncompressed tar file ({error})") from error
