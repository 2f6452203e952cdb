"""The executor's contract: three verbs, and what they promise.

    with LocalExecutor(...) as executor:
        if executor.can_start(job.needs): executor.start(job)
        for done in executor.wait(1.0): ...

An executor runs jobs in processes of its own. Whatever a cell does (raise, exit, fault, hang) costs
that cell alone; `wait` reports every started job exactly once. tests/contracts holds each to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from suite.job import Job


@dataclass(frozen=True, kw_only=True)
class Done:
    """A job that ended. `status` is a bundle status, or DIED (no bundle: the driver writes one) or NOT STORED."""

    job: Job
    status: str
    path: str = ""  # the bundle the worker wrote
    message: str = ""
    duration_s: float = 0.0
    killed: bool = False  # the worker was ended by a signal: the cell may be innocent


class Executor(Protocol):
    def can_start(self, needs: Mapping[str, Any]) -> bool:
        """True if a job with these needs would start now."""

    def start(self, job: Job) -> None:
        """Hand a job to a worker; call only when can_start."""

    def wait(self, timeout_s: float) -> list[Done]:
        """Jobs that ended, waiting up to timeout_s for the first."""

    def close(self) -> None:
        """End every worker and all of its children."""
