"""Job: a cell on its way to a worker, as plain JSON; and how one is run inside a process.

    outcome = execute(job, device="cpu")        # in this very process: workers and ranks call it

`execute` knows nothing of drivers and pipes. It imports the measure function, calls it, and turns any
exception into a FAILED outcome with its traceback.
"""

from __future__ import annotations

import importlib
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from suite.measure import Context, Pause, Result


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a worker needs to run one cell and to write its bundle."""

    cell: Mapping[str, Any]  # Entry.describe()
    point: str
    key: str
    code: str
    modules: tuple[str, ...]  # first-party modules inside the code digest
    store: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    stop_at: float | None = None  # time.time() by which a long cell should pause
    environment: Mapping[str, Any] = field(default_factory=dict)
    commit: str = "unknown"
    dirty: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(**{**data, "modules": tuple(data["modules"])})

    @property
    def needs(self) -> Mapping[str, Any]:
        return self.cell["needs"]

    @property
    def log_path(self) -> Path:
        return Path(self.store) / "logs" / f"{self.key}.log"

    @property
    def state_dir(self) -> Path:
        return Path(self.store) / "state" / self.key


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a measure function ended."""

    status: str  # OK, FAILED, PAUSED
    result: Result | None
    error: str
    duration_s: float


def execute(job: Job, *, device: str, rank: int = 0, world_size: int = 1) -> Outcome:
    """Import and call the measure function; never raises for what the function does."""
    module, _, name = job.cell["measure"].partition(":")
    job.state_dir.mkdir(parents=True, exist_ok=True)
    left_s = None if job.stop_at is None else time.monotonic() + (job.stop_at - time.time())
    ctx = Context(device=device, seed=job.cell["seed"], replicate=job.cell["replicate"], inputs={k: Path(v) for k, v in job.inputs.items()},
                  state_dir=job.state_dir, deadline=left_s, rank=rank, world_size=world_size)
    start = time.monotonic()
    try:
        function = getattr(importlib.import_module(module), name)
        start = time.monotonic()
        result = function(ctx, **job.cell["params"])
        if not isinstance(result, Result):
            raise TypeError(f"a measure function returns suite.measure.Result, got {type(result).__name__} from {job.cell['measure']}")
        status, error = "OK", ""
    except Pause:
        status, result, error = "PAUSED", None, ""
    except Exception:
        status, result, error = "FAILED", None, traceback.format_exc()
    return Outcome(status=status, result=result, error=error, duration_s=time.monotonic() - start)
