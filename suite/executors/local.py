"""Local executor: one warm worker per device of this machine.

    executor = LocalExecutor(gpus=(0,), jobs=1)

By default one CPU worker uses all cores; `jobs` splits them. A worker is its own process group; killing
it kills its compilers and ranks. A worker that died, overran its time or changed global state is
replaced before the next cell. It schedules nothing: the driver decides what runs when.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite import locks
from suite.cell import Needs
from suite.executors._base import Done
from suite.executors._environment import worker_environment
from suite.identity import ROOT
from suite.job import Job
from suite.machine import Gpu, Machine, gpus_for, this_machine


@dataclass
class _Slot:
    """A device and the worker on it. Mutable by nature: it is the executor's only state."""

    name: str  # "cpu0", "cuda1"
    device: str  # "cpu" or "cuda"
    lock_fd: int
    process: subprocess.Popen | None = None
    reply: Any = None
    job: Job | None = None
    lent_to: _Slot | None = None  # a cell of several GPUs borrows the other slots
    started: float = 0.0
    used: bool = False
    replicate: int = 0
    gpu: Gpu | None = None


class LocalExecutor:
    """See the module's docstring. Takes the device locks at construction; raises locks.Held.

    gpus: indices as nvidia-smi counts; a cell gets those of one model that fits it. One that `machine` does not list serves cells that name no model.
    left_out: names of environment variables that workers do not inherit.
    """

    def __init__(self, *, gpus: tuple[int, ...] = (), jobs: int = 1, wait_s: float = 0.0, cores: int | None = None, machine: Machine | None = None):
        if jobs < 1:
            raise ValueError(f"at least one CPU worker is needed, got jobs={jobs}")
        self._environment, self.left_out = worker_environment(os.environ, threads=max(1, (cores or len(os.sched_getaffinity(0))) // jobs))
        self._selector = selectors.DefaultSelector()
        self._locks = self._take_locks(gpus, wait_s)
        self._slots = [_Slot(name=f"cpu{i}", device="cpu", lock_fd=self._locks[0]) for i in range(jobs)]
        known = {g.index: g for g in (machine or this_machine()).gpus} if gpus else {}
        unknown = {i: Gpu(index=i, name="", memory_gib=math.inf) for i in gpus}
        self._slots += [_Slot(name=f"cuda{i}", device="cuda", lock_fd=fd, gpu={**unknown, **known}[i]) for i, fd in zip(gpus, self._locks[1:], strict=True)]

    def _take_locks(self, gpus: tuple[int, ...], wait_s: float) -> list[int]:
        taken: list[int] = []
        try:
            for device in ["cpu", *(f"cuda{i}" for i in gpus)]:
                taken.append(locks.acquire(locks.lock_dir() / f"{device}.lock", what=f"device {device}", wait_s=wait_s))
        except locks.Held:
            for fd in taken:
                os.close(fd)
            raise
        return taken

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ contract

    def can_start(self, needs: Mapping[str, Any]) -> bool:
        busy = [s for s in self._slots if s.job or s.lent_to]
        if needs["exclusive"] and busy:
            return False
        if any(s.job and s.job.needs["exclusive"] for s in busy):
            return False
        return len(self._free(needs)) >= max(1, needs["gpus"])

    def start(self, job: Job) -> None:
        free = self._free(job.needs)
        slot, lent = free[0], free[1 : max(1, job.needs["gpus"])]
        if slot.process is not None and (slot.process.poll() is not None or lent or (slot.used and self._needs_new_process(slot, job))):
            self._stop(slot)
        if slot.process is None:
            self._spawn(slot, [slot, *lent])
        for other in lent:
            other.lent_to = slot
        slot.job, slot.started, slot.used, slot.replicate = job, time.monotonic(), True, job.cell["replicate"]
        with contextlib.suppress(BrokenPipeError):  # the worker just died: wait() sees its pipe close and reports the job
            slot.process.stdin.write(job.to_json() + "\n")
            slot.process.stdin.flush()

    def wait(self, timeout_s: float) -> list[Done]:
        until = time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(until, self._next_limit()) - time.monotonic())
            done = [d for key, _ in self._selector.select(left) if (d := self._read(key.data)) is not None]
            done += [self._time_out(s) for s in self._slots if s.job and self._overran(s)]
            if done or time.monotonic() >= until:
                return done

    def close(self) -> None:
        for slot in self._slots:
            self._stop(slot)
        for fd in self._locks:
            os.close(fd)
        self._locks = []

    # ------------------------------------------------------------ inside

    def _free(self, needs: Mapping[str, Any]) -> list[_Slot]:
        """Idle slots of the device; for a GPU cell those of the model that fits it, by the rule that gave it its key."""
        fitting = {g.index for g in gpus_for(Needs.from_json(needs), [s.gpu for s in self._slots if s.gpu])}
        return [s for s in self._slots if s.device == needs["device"] and s.job is None and s.lent_to is None and (s.gpu is None or s.gpu.index in fitting)]

    @staticmethod
    def _needs_new_process(slot: _Slot, job: Job) -> bool:
        """Asked for, or a timing cell of another replicate: replicates are process starts."""
        return job.needs["fresh_process"] or (job.needs["exclusive"] and job.cell["replicate"] != slot.replicate)

    def _spawn(self, slot: _Slot, group: list[_Slot]) -> None:
        read_fd, write_fd = os.pipe()
        env = dict(self._environment)
        if slot.device == "cuda":
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which nvidia-smi, and so suite.machine, counts
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(s.gpu.index) for s in group)
        command = [sys.executable, "-m", "suite.worker", "--device", slot.device, "--reply-fd", str(write_fd), "--parent", str(os.getpid())]
        slot.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, env=env,
                                        cwd=ROOT, start_new_session=True, pass_fds=(write_fd, *{s.lock_fd for s in group}))
        os.close(write_fd)
        slot.reply, slot.used = os.fdopen(read_fd, "r"), False
        self._selector.register(slot.reply, selectors.EVENT_READ, slot)

    def _stop(self, slot: _Slot) -> None:
        if slot.process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the reaper was faster
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        self._selector.unregister(slot.reply)
        slot.reply.close()
        with contextlib.suppress(BrokenPipeError):  # an unsent job dies with its worker
            slot.process.stdin.close()
        slot.process = None

    def _read(self, slot: _Slot) -> Done | None:
        line = slot.reply.readline()
        return self._answered(slot, line) if line else self._died(slot)

    def _answered(self, slot: _Slot, line: str) -> Done:
        message = json.loads(line)
        job, elapsed_s = self._release(slot)
        if message["replace"] or job.needs["gpus"] > 1:
            self._stop(slot)
        notes = f"worker replaced: {', '.join(message['replace'])}" if message["replace"] else ""
        return Done(job=job, status=message["status"], path=message.get("path", ""), message=message.get("message", notes), duration_s=elapsed_s)

    def _died(self, slot: _Slot) -> Done | None:
        code = slot.process.wait()
        self._stop(slot)
        if slot.job is None:
            return None
        job, elapsed_s = self._release(slot)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Done(job=job, status="DIED", message=f"the worker {how}", duration_s=elapsed_s, killed=code < 0)

    def _release(self, slot: _Slot) -> tuple[Job, float]:
        job, slot.job = slot.job, None
        for other in self._slots:
            if other.lent_to is slot:
                other.lent_to = None
        return job, time.monotonic() - slot.started

    def _next_limit(self) -> float:
        return min((s.started + s.job.needs["time_limit_s"] for s in self._slots if s.job), default=float("inf"))

    def _overran(self, slot: _Slot) -> bool:
        return time.monotonic() >= slot.started + slot.job.needs["time_limit_s"]

    def _time_out(self, slot: _Slot) -> Done:
        """TIMED OUT, or what the worker reported at the last moment: then its bundle is stored, and the cell must not be reported twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        told = select.select([slot.reply], [], [], 0)[0]  # what a dead worker wrote is there by now
        line = slot.reply.readline() if told else ""
        if line.endswith("\n"):
            done = self._answered(slot, line)
            self._stop(slot)
            return done
        self._stop(slot)
        job, elapsed_s = self._release(slot)
        return Done(job=job, status="TIMED OUT", message=f"it ran past its limit of {job.needs['time_limit_s']:g} s", duration_s=elapsed_s)
