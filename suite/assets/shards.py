"""An asset's file as shards that fit through narrow channels, cut from its bytes as they are and put together again elsewhere.

    made = pack("smollm2-135m-instruct", folder=Path("."), max_mib=48)      # two files: the GGUF's blocks stay quantised
    unpack(made[0])                             # staged; .missing == (2,)
    unpack(made[1]).installed                   # the cached file, sha256 checked: fetch() finds it from now on

A shard is a magic line, the length of a header, a JSON header and a piece of the file. It may come from anybody: what it says of
itself is compared with the catalogue, it names no path, and every length is checked before bytes are read. Shards arrive in any
order, in one call or in several; one that is here already changes nothing. It packs what an asset is computed from, not what our
own code can compute again, and it does not compress.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from suite.assets._catalogue import fetch, get_asset
from suite.assets._sources import AssetError, Derived
from suite.assets._store import _WORK_PREFIX, Asset, _locked, _publish, _sweep, cache_folder, file_sha256

MAGIC = b"BITBENCH ASSET SHARD 1\n"
MAX_HEADER_BYTES, MAX_SHARDS = 4096, 4096
MIN_MIB = 1.0
_STAGE = ".shards"
_BLOCK_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class ShardError(AssetError):
    """A file that is no whole shard of an asset of ours: one line with its name, the rule it breaks and what to do."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"shard {path.name}: {reason}")


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """Piece `number` (from 1) of `count` of the asset's file: bytes size * (number - 1) // count to size * number // count."""

    asset: str
    licence: str
    number: int
    count: int
    sha256: str  # of this piece
    file_sha256: str
    file_bytes: int

    def span(self) -> tuple[int, int]:
        """(first byte, byte after the last) of the piece."""
        return self.file_bytes * (self.number - 1) // self.count, self.file_bytes * self.number // self.count


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What one shard did: the asset, which shards are still missing, and the installed file once none is."""

    asset: Asset
    number: int
    count: int
    missing: tuple[int, ...] = ()
    installed: Path | None = None
    was_here: bool = False  # nothing changed: this shard, or the whole file, was here already


# ---------------------------------------------------------------------------------------------- packing


def sources_of(name: str) -> tuple[str, ...]:
    """Names of the assets whose files carry this one: itself, or what it is computed from. Raises ValueError for an unknown name."""
    computed = [source for source in get_asset(name).sources if isinstance(source, Derived) and source.inputs]
    return tuple(dict.fromkeys(n for given in computed[0].inputs for n in sources_of(given))) if computed else (name,)


def pack(name: str, *, folder: Path, max_mib: float = 48.0) -> list[Path]:
    """Write the asset's file as shards of at most `max_mib` MiB, header included; returns their paths, in order.

    Equal arguments give equal bytes. Raises ValueError for an unknown name, a size out of range or a folder that is none,
    AssetError where the asset cannot be had.
    """
    asset, folder = get_asset(name), Path(folder)
    if not MIN_MIB <= max_mib < float("inf"):
        raise ValueError(f"a shard has at least {MIN_MIB:g} MiB, got {max_mib=}; 48 is a usual size")
    if not folder.is_dir():
        raise ValueError(f"shards go into a folder that exists, got {str(folder)!r}; create it first")
    count = -(-asset.size_bytes // (int(max_mib * 2**20) - len(MAGIC) - _LENGTH.size - MAX_HEADER_BYTES))
    if count > MAX_SHARDS:
        raise ValueError(f"an asset has at most {MAX_SHARDS} shards, got {count} with {max_mib=}; allow larger ones")
    with fetch(name).open("rb") as source:
        return [_write(source, asset, number, count, folder) for number in range(1, count + 1)]


def _write(source: BinaryIO, asset: Asset, number: int, count: int, folder: Path) -> Path:
    blank = ShardHeader(asset=asset.name, licence=asset.licence, number=number, count=count, sha256="", file_sha256=asset.sha256, file_bytes=asset.size_bytes)
    digest = hashlib.sha256()
    for block in _blocks(source, *blank.span()):
        digest.update(block)
    head = json.dumps({**asdict(blank), "sha256": digest.hexdigest()}, sort_keys=True).encode()
    target = folder / f"{asset.name}.{number}-of-{count}.shard"
    temp = folder / f".{target.name}.tmp"
    try:
        with temp.open("wb") as out:
            out.write(MAGIC + _LENGTH.pack(len(head)) + head)
            for block in _blocks(source, *blank.span()):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temp, target)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise AssetError(f"asset {asset.name}: a shard cannot be written to {folder} ({error.strerror or error}); free some space or use --to FOLDER") from error
    return target


def _blocks(source: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    source.seek(start)
    while start < stop and (block := source.read(min(_BLOCK_BYTES, stop - start))):
        start += len(block)
        yield block


# ---------------------------------------------------------------------------------------------- unpacking


def read_header(path: Path) -> tuple[ShardHeader, int]:
    """A shard's header and the offset of its piece, checked against the catalogue and the file's size. Raises ShardError."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ShardError(path, "it is not a file; name the files that `assets pack` wrote")
        with path.open("rb") as stream:
            start = stream.read(len(MAGIC) + _LENGTH.size)
            if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
                raise ShardError(path, "it is no shard of an asset; name the files that `assets pack` wrote")
            (length,) = _LENGTH.unpack(start[len(MAGIC) :])
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ShardError(path, f"a header has 2 to {MAX_HEADER_BYTES} bytes, got {length}; copy the shard again")
            header = _parsed(path, stream.read(length))
    except OSError as error:
        raise ShardError(path, f"it cannot be read ({error.strerror or error}); make it readable") from error
    offset = len(MAGIC) + _LENGTH.size + length
    first, last = header.span()
    if path.stat().st_size != offset + last - first:
        raise ShardError(path, f"it has {path.stat().st_size} bytes instead of {offset + last - first}; copy the shard again")
    return header, offset


def _parsed(path: Path, raw: bytes) -> ShardHeader:
    try:
        fields = json.loads(raw)
        header = ShardHeader(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ShardError(path, "its header is not one that `assets pack` writes; copy the shard again") from error
    if any(type(getattr(header, k)) is not {"number": int, "count": int, "file_bytes": int}.get(k, str) for k in fields):
        raise ShardError(path, "a field of its header has a wrong type; copy the shard again")
    if len(header.sha256) != 64 or set(header.sha256) - set("0123456789abcdef"):
        raise ShardError(path, "its header has no sha256; copy the shard again")
    try:
        asset = get_asset(header.asset)
    except ValueError as error:
        raise ShardError(path, f"it is of an asset that this checkout does not know, {header.asset[:60]!r}; see `python -m suite assets`") from error
    if (header.file_sha256, header.file_bytes) != (asset.sha256, asset.size_bytes):
        raise ShardError(path, f"it is of another version of {asset.name} than this checkout's; pack it again with this checkout")
    if not 1 <= header.number <= header.count <= min(MAX_SHARDS, asset.size_bytes):
        raise ShardError(path, f"a shard is number 1 to {MAX_SHARDS} of as many, got {header.number} of {header.count}; copy the shard again")
    return header


def unpack(path: Path, *, cache_dir: str | os.PathLike[str] | None = None) -> Unpacked:
    """Take one shard in; with the last of a set the asset is installed in the cache, where `fetch` finds it.

    Raises ShardError for what is no whole shard of ours, AssetError where the shards do not make the file up (they are then dropped)
    or the cache cannot be written.
    """
    path = Path(path)
    header, offset = read_header(path)
    asset = get_asset(header.asset)
    folder = cache_folder(cache_dir) / asset.name
    try:
        with _locked(folder):
            _sweep(folder)
            target, stage = folder / asset.file, folder / _STAGE / str(header.count)
            if target.is_file() and target.stat().st_size == asset.size_bytes and file_sha256(target) == asset.sha256:
                _verify(path, header, offset, None)
                shutil.rmtree(folder / _STAGE, ignore_errors=True)
                return Unpacked(asset=asset, number=header.number, count=header.count, installed=target, was_here=True)
            new = _staged(path, header, offset, stage, folder)
            missing = tuple(n for n in range(1, header.count + 1) if not (stage / str(n)).is_file())
            installed = None if missing else _installed(asset, stage, header.count, folder)
            return Unpacked(asset=asset, number=header.number, count=header.count, missing=missing, installed=installed, was_here=not new and installed is None)
    except OSError as error:
        raise AssetError(f"asset {asset.name}: the cache {folder} cannot be written ({error.strerror or error}); "
                         f"set SUITE_CACHE to a folder that can, with room for {2 * asset.size_bytes / 1e6:.0f} MB") from error


def _verify(path: Path, header: ShardHeader, offset: int, out: BinaryIO | None) -> None:
    """Read the piece once, checked (and copied to `out`). Raises ShardError."""
    digest = hashlib.sha256()
    first, last = header.span()
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ShardError(path, f"it cannot be read ({error.strerror or error}); make it readable") from error
    with stream:
        for block in _blocks(stream, offset, offset + last - first):
            digest.update(block)
            if out is not None:
                out.write(block)
    if digest.hexdigest() != header.sha256:
        raise ShardError(path, f"its bytes do not have the sha256 of its header, {header.sha256[:12]}; copy the shard again")


def _staged(path: Path, header: ShardHeader, offset: int, stage: Path, folder: Path) -> bool:
    """The checked piece under its number; False where the same bytes are staged already. Another piece of that number is replaced."""
    stage.mkdir(parents=True, exist_ok=True)
    place = stage / str(header.number)
    if place.is_file() and file_sha256(place) == header.sha256:
        _verify(path, header, offset, None)
        return False
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
    try:
        with (work / "piece").open("xb") as out:
            _verify(path, header, offset, out)
        _publish(work / "piece", place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _installed(asset: Asset, stage: Path, count: int, folder: Path) -> Path:
    """The pieces put together, checked as a whole and moved to their place in the cache. Raises AssetError."""
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
    try:
        with (work / "whole").open("xb") as out:
            for number in range(1, count + 1):
                with (stage / str(number)).open("rb") as piece:
                    shutil.copyfileobj(piece, out, _BLOCK_BYTES)
        if file_sha256(work / "whole") != asset.sha256:
            shutil.rmtree(stage, ignore_errors=True)
            raise AssetError(f"asset {asset.name}: its {count} shards together do not have sha256 {asset.sha256}: "
                             "one was changed after it was packed; pack them again, and unpack all of them")
        installed = _publish(work / "whole", folder / asset.file)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(folder / _STAGE, ignore_errors=True)
    return installed
