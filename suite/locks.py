"""File locks that name their holder.

    with hold(state_dir / "driver.lock", what="this store"):
        ...

flock belongs to the open file: a lock whose descriptor a driver hands to its workers (subprocess's `pass_fds`)
stays held until the last of them is gone, and no stale lock survives a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Held(Exception):
    """Another process holds the lock; the message names it."""


def lock_dir() -> Path:
    """Where this host's device locks lie; SUITE_LOCK_DIR moves them."""
    return Path(os.environ.get("SUITE_LOCK_DIR") or f"/tmp/bitbench-locks-{os.getuid()}")


def acquire(path: Path, *, what: str, wait_s: float = 0.0) -> int:
    """Take the lock, waiting up to `wait_s`; returns the file descriptor that holds it. Raises Held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                holder = _holder(fd)
                os.close(fd)
                raise Held(f"{what} is in use by {holder}; wait for it, or pass --wait SECONDS") from None
            time.sleep(0.05)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"pid": os.getpid(), "since": time.strftime("%H:%M:%S")}).encode(), 0)
    return fd


def _holder(fd: int) -> str:
    try:
        data = json.loads(os.pread(fd, 200, 0))
    except ValueError:
        return "another process"
    return f"process {data['pid']} since {data['since']}"


@contextlib.contextmanager
def hold(path: Path, *, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """The lock as a context."""
    fd = acquire(path, what=what, wait_s=wait_s)
    try:
        yield
    finally:
        os.close(fd)
