"""`suite warm`: compile ahead, in parallel, what the cells of a preset would compile one kernel after another.

    python -m suite warm determinism --preset gpu --jobs 16
    python -m suite warm determinism --preset gpu --only 'time *' 'texts *'

Triton compiles a kernel in the process that first launches it and keeps the binary on disk (TRITON_CACHE_DIR, by default under ~/.triton),
where every later process of this user finds it. A study's `warm` list names work that launches its kernels; the command runs it in N
processes with the environment of a worker, so that the cache keys are a worker's, and throws the results away.

It measures nothing and writes no bundle, and no cell needs it: without it the cells compile for themselves. It holds the devices' locks,
so it disturbs no timing. Two processes that want one kernel at the same time both compile it. Kernels that torch.compile makes are kept
in torch's own cache and are not in the count.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from suite import _process, cli, locks
from suite.cell import Needs
from suite.executors._environment import worker_environment
from suite.identity import ROOT
from suite.machine import Machine, gpus_for, refusal
from suite.session import Session
from suite.study import WarmTask, load_config, load_study
from suite.text import clean

TASK_LIMIT_S = 300.0
GPU = Needs(device="cuda")


def warm_command(args) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study, session = load_study(args.study), Session.here()
    preset, why = session.preset(study, args.preset)
    tasks, gpus = _chosen(study.warm(load_config(study, preset)), args.only), gpus_for(GPU, session.machine.gpus)[:1]
    print(f"study {study.name}, preset {preset} ({why}): {len(tasks)} tasks", flush=True)
    no_gpu = refusal(GPU, session.machine)
    if left := [t for t in tasks if no_gpu and t.device == "cuda"]:
        print(f"{len(left)} tasks are left out, and nothing is compiled ahead for a GPU: {no_gpu}", flush=True)
    tasks = [t for t in tasks if t not in left]
    if not tasks:
        return 0
    jobs = min(args.jobs or session.machine.cores, len(tasks))
    with contextlib.ExitStack() as held:
        for device in ["cpu", *(f"cuda{g.index}" for g in gpus)]:
            held.enter_context(locks.hold(locks.lock_dir() / f"{device}.lock", what=f"device {device}", wait_s=args.wait))
        tally = run_tasks(tasks, jobs=jobs, environment=_environment(session.machine), say=lambda line: print(clean(line), file=sys.stderr, flush=True))
    print(tally.summary(len(tasks), jobs))
    return cli.EXIT_FAILED if tally.failed else 0


def _chosen(tasks: list[WarmTask], globs: Sequence[str]) -> list[WarmTask]:
    for glob in globs:
        if not any(fnmatch.fnmatchcase(t.label, glob) for t in tasks):
            raise ValueError(f"--only must name at least one task, got {glob!r}; labels are, e.g., {[t.label for t in tasks[:3]]}")
    return [t for t in tasks if not globs or any(fnmatch.fnmatchcase(t.label, glob) for glob in globs)]


def _environment(machine: Machine) -> dict[str, str]:
    """A worker's: what steers the compiler is part of the cache's keys. Without the one GPU of the tasks none is seen."""
    chosen = ",".join(str(g.index) for g in gpus_for(GPU, machine.gpus)[:1])
    return {**worker_environment(os.environ, threads=1)[0], "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}


# ---------------------------------------------------------------------------------------------- the driver


@dataclass(kw_only=True)
class Tally:
    """What the tasks left in Triton's cache, by the cache's own hashes."""

    compiled: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)  # in the cache already
    compiles: int = 0  # those of the same kernel by several processes counted each
    failed: int = 0
    seconds: float = 0.0
    longest: tuple[float, str] = (0.0, "")

    def add(self, task: WarmTask, reply: Mapping[str, Any], seconds: float) -> None:
        self.compiled.update(reply["compiled"])
        self.found.update(reply["found"])
        self.compiles += len(reply["compiled"])
        self.failed += bool(reply["error"])
        self.longest = max(self.longest, (seconds, task.label))

    def summary(self, tasks: int, jobs: int) -> str:
        again = self.compiles - len(self.compiled)
        return (f"{len(self.compiled)} kernels compiled{f' ({again} more than once)' if again else ''}, {len(self.found - self.compiled)} found in the cache, by {tasks} tasks "
                f"({self.failed} failed) in {jobs} processes: {self.seconds:.1f} s; the longest was {clean(self.longest[1])!r}, {self.longest[0]:.1f} s")


def run_tasks(tasks: Sequence[WarmTask], *, jobs: int, environment: Mapping[str, str], say: Callable[[str], None], limit_s: float = TASK_LIMIT_S) -> Tally:
    """Hands each free process the next task, in order. What goes wrong in a task, its process's death included, is one line and costs that task."""
    waiting, tally, began = list(reversed(tasks)), Tally(), time.monotonic()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stopping:
        processes = [_Process(environment, selector) for _ in range(jobs)]
        for process in processes:
            stopping.callback(process.stop)
        while waiting or any(p.task for p in processes):
            for process in [p for p in processes if p.task is None][: len(waiting)]:
                process.give(waiting.pop())
            ready = {key.data for key, _ in selector.select(0.5)}
            for process in [p for p in processes if p.task]:
                reply = process.read() if process in ready else process.overran(limit_s)
                if reply is not None:
                    tally.add(process.task, reply, time.monotonic() - process.started)
                    if reply["error"]:
                        say(f"suite: {process.task.label}: {reply['error']}")
                    process.task = None
    tally.seconds = time.monotonic() - began
    return tally


class _Process:
    """A process that runs one task after another, replaced where it died. Mutable by nature."""

    def __init__(self, environment: Mapping[str, str], selector: selectors.BaseSelector):
        self._environment, self._selector = environment, selector
        self._popen: subprocess.Popen | None = None
        self.task: WarmTask | None = None
        self.started = 0.0

    def give(self, task: WarmTask) -> None:
        if self._popen is not None and self._popen.poll() is not None:
            self.stop()
        if self._popen is None:
            self._spawn()
        self.task, self.started = task, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it just died: read() says so
            self._popen.stdin.write(json.dumps(asdict(task)) + "\n")
            self._popen.stdin.flush()

    def _spawn(self) -> None:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "suite.commands.warm", "--reply-fd", str(write_fd), "--parent", str(os.getpid())]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
                                       env=dict(self._environment), cwd=ROOT, start_new_session=True, pass_fds=(write_fd,))
        os.close(write_fd)
        self._reply = os.fdopen(read_fd, "r")
        self._selector.register(self._reply, selectors.EVENT_READ, self)

    def read(self) -> dict[str, Any]:
        line = self._reply.readline()
        if line.endswith("\n"):
            reply = json.loads(line)
            if reply["last"]:
                self.stop()
            return reply
        code = self._popen.wait()
        self.stop()
        return _reply(f"its process {f'was killed by {signal.Signals(-code).name}' if code < 0 else f'ended with status {code}'}")

    def overran(self, limit_s: float) -> dict[str, Any] | None:
        if time.monotonic() < self.started + limit_s:
            return None
        self.stop()
        return _reply(f"it ran past its limit of {limit_s:g} s")

    def stop(self) -> None:
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the reaper was faster
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._selector.unregister(self._reply)
        self._reply.close()
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen = None


def _reply(error: str, compiled: Sequence[str] = (), found: Sequence[str] = (), *, last: bool = False) -> dict[str, Any]:
    """`last`: the process can run no other task."""
    return {"error": error, "compiled": list(compiled), "found": list(found), "last": last}


# ---------------------------------------------------------------------------------------------- one process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    _process.die_with_parent(signal.SIGKILL, args.parent)
    _process.start_reaper()
    os.set_inheritable(args.reply_fd, False)
    reply = os.fdopen(args.reply_fd, "w", buffering=1)
    compiled, found = _listen()
    for line in sys.stdin:
        task = WarmTask(**json.loads(line))
        error = run_task(task)
        reply.write(json.dumps(_reply(error, compiled, found, last=not _settle(task.device))) + "\n")
        compiled.clear()
        found.clear()


def _listen() -> tuple[list[str], list[str]]:
    """(hashes of kernels that Triton compiles from now on in this process, hashes of those that it reads from its cache)."""
    from triton import knobs

    compiled: list[str] = []
    found: list[str] = []

    def note(*, metadata: Mapping[str, Any], cache_hit: bool, **_: object) -> None:
        (found if cache_hit else compiled).append(metadata["hash"])

    knobs.compilation.listener = note
    return compiled, found


def run_task(task: WarmTask) -> str:
    """"", or what went wrong in one line."""
    module, _, function = task.run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(task.device, **task.params)
    except Exception as error:  # whatever it is: the other tasks go on, and the cell will say it again
        return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return ""


def _settle(device: str) -> bool:
    """Give the device's memory back for the other processes; False where a fault of the device stays with this one."""
    gc.collect()
    if device == "cuda" and "torch" in sys.modules:
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


if __name__ == "__main__":
    main()
