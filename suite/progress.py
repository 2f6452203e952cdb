"""What a person sees while a plan runs: a live line on a terminal, one line per event elsewhere.

    with Display(status_path=state / "status.json", expected_s=None, study="determinism") as display:
        run_plan(plan, executor=executor, store=store, conditions=conditions, listener=display.update)

rich draws the live line where it imports; without it, or when not on a terminal, only failures and the
summary are printed. `status.json` beside the bundles lets `suite status` look on from another terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from suite.driver import Progress
from suite.text import clean

try:
    import rich.console
    import rich.live
    import rich.text
except ImportError:  # a GPU host has only torch, triton and numpy
    rich = None


def line_of(progress: Progress, started: float, expected_s: float | None) -> str:
    """One line: counts, what runs, and an honest time left ('?' where nothing like it has run before)."""
    elapsed_s = time.monotonic() - started
    left = "?" if expected_s is None else _duration(max(0.0, expected_s - elapsed_s))
    running = ", ".join(f"{clean(label)} {_duration(time.monotonic() - since)}" for label, since in list(progress.running.items())[:2])
    failed = f"  {progress.failed} failed" if progress.failed else ""
    return f"{progress.done + progress.cached}/{progress.total} done ({progress.cached} cached){failed}  left {left}  {running}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Display:
    """Listener for the driver; a context manager so that the live line is always taken down."""

    def __init__(self, *, status_path: Path, expected_s: float | None = None, study: str = ""):
        self.started, self.expected_s = time.monotonic(), expected_s
        self.status_path, self.study, self._seen = status_path, study, 0
        self.live = None
        if rich is not None and sys.stdout.isatty():
            self.live = rich.live.Live(console=rich.console.Console(), refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
        self.status_path.unlink(missing_ok=True)

    def update(self, progress: Progress) -> None:
        for message in progress.messages[self._seen :]:
            print(clean(message), file=sys.stderr if self.live is None else sys.stdout, flush=True)
        self._seen = len(progress.messages)
        line = line_of(progress, self.started, self.expected_s)
        if self.live:
            self.live.update(rich.text.Text(line, overflow="ellipsis", no_wrap=True))
        write_status(self.status_path, {"pid": os.getpid(), "study": self.study, "line": line, "at": time.time(), "running": sorted(progress.running)})


def write_status(path: Path, status: dict) -> None:
    """Written whole or not at all; a full disk must not end a run for a status line."""
    temp = path.with_suffix(".tmp")
    try:
        temp.write_text(json.dumps(status))
        os.replace(temp, path)
    except OSError:
        temp.unlink(missing_ok=True) if os.access(path.parent, os.W_OK) else None


def read_status(path: Path) -> dict | None:
    """What a running driver last said, or None when none runs."""
    try:
        status = json.loads(path.read_text())
        os.kill(status["pid"], 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    except PermissionError:
        return status
    return status
