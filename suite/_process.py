"""What keeps a worker from outliving its driver, and its children from outliving the worker.

A worker asks the kernel to be killed when its driver dies (PR_SET_PDEATHSIG). That signal reaches the
worker alone, so a small forked reaper waits for the worker's own death and then kills the whole
process group: compilers and torchrun included. Ranks lead sessions of their own and do the same for
themselves, with torchrun as the parent to die with.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int, parent_pid: int) -> None:
    """Ask for `sig` when the parent dies; leave at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def start_reaper() -> None:
    """Fork the reaper. Call first thing in a worker: before threads, before torch."""
    worker = os.getpid()
    if os.fork():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM, worker)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 64)  # pipes to the driver must close with the worker
    signal.sigwait({signal.SIGTERM})
    os.killpg(os.getpgid(0), signal.SIGKILL)
    sys.exit(0)
