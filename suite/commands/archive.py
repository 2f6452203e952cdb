"""`suite archive`, and the archive that a run keeps of itself: replaced whole, at any moment the old one or the new one.

    python -m suite archive results.tar                         # packs this store; it starts no cell
    python -m suite run determinism --archive results.tar       # packs now and then, at the end, and when told to end

The format stands in suite.archive. New parts are written beside the old ones and take their names together, so that a kill, a full disk or
the time limit leaves the earlier archive as it was. `suite ingest` takes an archive in; `suite run --resume-from` goes on from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from suite import cli, locks
from suite.archive import pack, parts_of
from suite.bundle import BundleStore
from suite.session import Session
from suite.text import clean

EVERY_S = 120.0  # between archives of a run: what a SIGKILL can cost
RESCUE_S = 30.0  # what packing may take once a run is to end
_PART = re.compile(r"\.[1-9]\d*\.tar\Z")


def archive_command(args) -> int:
    """Pack what is here. A run on this store holds it: its own `--archive` packs while it measures."""
    out, session = check_name(args.file), Session.here()
    if not session.state_dir.is_dir():
        raise ValueError(f"a store that exists is packed, got {session.state_dir}; run a study, or name the store in SUITE_STATE")
    with locks.hold(session.state_dir / "driver.lock", what=f"the store {session.state_dir}", wait_s=args.wait):
        for part in replace_archive(session.store, out):
            print(f"packed {part}")
        bundles, broken = session.store.load_all()
    for error in broken:
        print(f"suite: skipped: {clean(str(error))}", file=sys.stderr)
    print(f"{len(bundles)} bundles of {session.state_dir}")
    return cli.EXIT_FAILED if broken else 0


def check_name(file: str | Path) -> Path:
    """The path of an archive whose further parts can be found by its name. Raises ValueError."""
    out = Path(file)
    if out.suffix != ".tar" or _PART.search(out.name):
        raise ValueError(f"an archive is named FILE.tar, and its parts FILE.2.tar and so on, got {str(out)!r}")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"an archive lies in a folder that exists, got {str(out)!r}")
    return out


def replace_archive(store: BundleStore, out: Path, *, states: bool = True, **pack_options: int) -> list[Path]:
    """`suite.archive.pack` of everything, or nothing changes. Without `states` the keys that have one are left out: running cells write theirs."""
    keys = None if states else {folder.parent.name for folder in store.folders()} - {p.name for p in (store.root / "state").glob("*")}
    new = out.with_name(f".{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # of one that was killed
    new.mkdir()
    try:
        parts = pack(store, keys, new / out.name, **pack_options)
        old = {p for p in parts_of(out) if p.is_file()}
        made = [out.with_name(part.name) for part in parts]
        for part, path in zip(parts, made, strict=True):
            os.rename(part, path)
        for path in old - set(made):
            path.unlink()
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return made


class TooSlow(Exception):
    """Packing reached its time limit."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises TooSlow inside, wherever it is, after so many seconds. For the main thread."""

    def expire(*_: object) -> None:
        raise TooSlow(f"packing took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class RunArchive:
    """The archive of a run: none, or one that is whole at every moment and holds the cells finished so far."""

    def __init__(self, file: str | None, store: BundleStore):
        self.file, self.store = file, store
        self.attempts, self.renewed = 0, time.monotonic()

    def renew(self) -> None:
        """Every EVERY_S, where attempts were added; called between cells."""
        if not self.file or time.monotonic() < self.renewed + EVERY_S:
            return
        attempts = sum(1 for _ in self.store.folders())
        if attempts != self.attempts:
            with contextlib.suppress(TooSlow, OSError), time_limit(RESCUE_S):  # the older one stays; the end tries again and tells
                replace_archive(self.store, Path(self.file), states=False)
        self.attempts, self.renewed = attempts, time.monotonic()

    def finish(self, limit_s: float | None = None) -> None:
        """Once no worker runs any more. SIGTERM does not cut it short."""
        if not self.file:
            return
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with time_limit(limit_s):
                parts = replace_archive(self.store, Path(self.file))
        finally:
            signal.signal(signal.SIGTERM, before)
        for part in parts:
            print(f"packed {part}", flush=True)

    def rescue(self) -> None:
        """The run ends early: what is finished is packed, in bounded time. Never hides the reason of the end."""
        try:
            self.finish(RESCUE_S)
        except (TooSlow, OSError) as error:
            print(f"suite: {self.file} was not renewed: {clean(str(error))}; the bundles are in the store", file=sys.stderr)
