"""One rank of a cell of several processes; torchrun starts it, rank 0's result is the cell's.

    torchrun --standalone --nproc-per-node 2 -m suite.rank JOB.json cuda

The measure function sets up its own process group; `ctx.rank` and `ctx.world_size` tell it who it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from suite import _process
from suite._fence import loaded_by_the_harness, refuse_foreign
from suite.job import Job, Outcome, execute
from suite.measure import Result


def main(job_file: str, device: str) -> int:
    launcher = os.getppid()  # torchrun puts each rank in a session of its own: killing the worker's group does not reach it
    if launcher == 1:
        return 1
    _process.die_with_parent(signal.SIGKILL, launcher)
    _process.start_reaper()
    job = Job.from_json(Path(job_file).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = "cpu" if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
    own = loaded_by_the_harness()
    outcome = refuse_foreign(job, execute(job, device=where, rank=rank, world_size=world), own)
    if outcome.status != "FAILED" and rank == 0:
        outcome = _left(job, outcome)
    if outcome.status == "FAILED":
        print(outcome.error, file=sys.stderr)
        (job.state_dir / f"error.{rank}.txt").write_text(outcome.error)
        return 1
    return 0


def _left(job: Job, outcome: Outcome) -> Outcome:
    """The outcome, once its result lies where the worker finds it; FAILED with one line where it cannot be written as JSON and numbers."""
    try:
        _leave(job, outcome)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Outcome(status="FAILED", result=None, error=f"a result holds numbers, text, arrays and JSON, got {type(error).__name__}: {error}", duration_s=outcome.duration_s)
    return outcome


def _leave(job: Job, outcome: Outcome) -> None:
    r = outcome.result
    if r is not None and r.arrays:
        np.savez(job.state_dir / "rank0.npz", **r.arrays)
    head = None if r is None else {"metrics": {k: repr(float(v)) for k, v in r.metrics.items()}, "facts": dict(r.facts), "records": dict(r.records), "kind": r.kind}
    (job.state_dir / "rank0.json").write_text(json.dumps({"status": outcome.status, "duration_s": outcome.duration_s, "result": head}))


def remove_left(job: Job) -> None:
    """Delete what the ranks of an attempt left in the state folder."""
    for path in [job.state_dir / "rank0.json", job.state_dir / "rank0.npz", *job.state_dir.glob("error.*.txt"), job.state_dir / "job.json"]:
        path.unlink(missing_ok=True)


def collect(job: Job, returncode: int) -> Outcome:
    """Read in the worker what rank 0 left; a rank that failed fails the cell."""
    left, arrays = job.state_dir / "rank0.json", job.state_dir / "rank0.npz"
    errors = [p.read_text() for p in sorted(job.state_dir.glob("error.*.txt"))]
    if returncode or not left.is_file():
        outcome = Outcome(status="FAILED", result=None, error="\n".join(errors) or f"torchrun ended with status {returncode}", duration_s=0.0)
    else:
        data = json.loads(left.read_text())
        result = data["result"]
        if result is not None:
            loaded = dict(np.load(arrays, allow_pickle=False)) if arrays.is_file() else {}
            result = Result(metrics={k: float(v) for k, v in result["metrics"].items()}, facts=result["facts"], records=result["records"], kind=result["kind"], arrays=loaded)
        outcome = Outcome(status=data["status"], result=result, error="", duration_s=data["duration_s"])
    remove_left(job)
    return outcome


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
