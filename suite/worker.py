"""Worker: a warm process that runs cells one after another, each into its own bundle.

Started by an executor as `python -m suite.worker --device cpu --reply-fd N --parent PID`. Jobs come in as
JSON lines on standard input, replies go out as JSON lines on the reply descriptor; what a cell prints
goes to its log. It imports neither trackers nor searchers, and checks after each cell that the cell
loaded no code outside its digest and left the process's global state as it found it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from suite import _process, _state
from suite._fence import declared_leftovers, fenced, loaded_by_the_harness, refuse_foreign
from suite.bundle import Bundle, BundleStore, Draft, Unstorable
from suite.identity import ROOT
from suite.job import Job, Outcome, execute
from suite.rank import collect, remove_left

MAX_LOG_BYTES, MAX_ERROR_CHARS = 256 << 10, 64 << 10
PROCESS = secrets.token_hex(6)  # timing claims count process starts, not cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--reply-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    _process.die_with_parent(signal.SIGKILL, args.parent)
    _process.start_reaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt means
    os.set_inheritable(args.reply_fd, False)
    reply = os.fdopen(args.reply_fd, "w", buffering=1)
    jobs = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    own = loaded_by_the_harness()
    for line in jobs:
        reply.write(json.dumps(serve(Job.from_json(line), args.device, own)) + "\n")


def serve(job: Job, device: str, own: frozenset[str]) -> dict:
    """Run one job and store its bundle; returns the reply."""
    _redirect_output(job.log_path)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    if job.needs["ranks"] > 1:
        outcome, leftovers = _run_ranks(job, device), []
    else:
        with fenced(job, own):
            _import_quietly(job)
            before = _state.snapshot()
            outcome = execute(job, device=device)
            leftovers = [*_state.changes(before, _state.snapshot()), *declared_leftovers(job)]
            outcome = refuse_foreign(job, outcome, own)
    sys.stdout.flush()
    try:
        bundle = _store(job, outcome, started)
    except OSError as error:
        return {"event": "done", "status": "NOT STORED", "message": f"{error.strerror or error}: {error.filename or job.store}", "replace": leftovers}
    return {"event": "done", "status": bundle.status, "path": str(bundle.path), "id": bundle.id, "replace": leftovers}


def _import_quietly(job: Job) -> None:
    """Load the measure module before the state is recorded: imports may set up global state, cells may not."""
    try:
        __import__(job.cell["measure"].partition(":")[0])
    except Exception as error:  # execute() imports again and reports this properly
        print(f"import failed: {error!r}", file=sys.stderr)


def _redirect_output(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)  # storing the bundle will report the disk
    for out in (1, 2):
        os.dup2(fd, out)
    os.close(fd)


def _store(job: Job, outcome: Outcome, started: str) -> Bundle:
    """The outcome as a bundle; a result that no bundle can hold is a FAILED one with the reason."""
    pieces = job.state_dir / "spent_s.json"
    spent_s = outcome.duration_s + (json.loads(pieces.read_text()) if pieces.is_file() else 0.0)
    if outcome.status == "PAUSED":
        pieces.write_text(json.dumps(spent_s))
    store, fields = BundleStore(Path(job.store)), {"started": started, "duration_s": spent_s}
    try:
        return store.write(draft(job, status=outcome.status, error=outcome.error, **fields), outcome.result)
    except Unstorable as error:
        return store.write(draft(job, status="FAILED", error=str(error), **fields))


def draft(job: Job, *, status: str, error: str, started: str, duration_s: float) -> Draft:
    """A job as the header of its bundle; the driver uses it too, for workers that died."""
    return Draft(cell=job.cell, point=job.point, key=job.key, code=job.code, environment={**job.environment, "process": PROCESS}, commit=job.commit, dirty=job.dirty,
                 started_at=started, duration_s=duration_s, status=status, error=error[-MAX_ERROR_CHARS:], log=read_log(job.log_path))


def read_log(path: Path) -> str:
    """The log's end, with paths as they are inside the checkout: where it lies on a machine is nobody's business."""
    if not path.is_file():
        return ""
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        return f.read().decode("utf-8", "replace").replace(f"{ROOT}/", "")


def _run_ranks(job: Job, device: str) -> Outcome:
    """A cell of several processes: torchrun, in this worker's process group."""
    job.state_dir.mkdir(parents=True, exist_ok=True)
    remove_left(job)  # of an attempt that was killed: it must not be taken for this one's result
    (job.state_dir / "job.json").write_text(job.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.needs['ranks']}", "-m", "suite.rank",
               str(job.state_dir / "job.json"), device]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run(command, env=env, check=False).returncode
    return collect(job, code)


if __name__ == "__main__":
    main()
