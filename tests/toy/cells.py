"""Measure functions of the toy study: each shows one promise of the harness. The tests copy it to studies/toy."""

import ctypes
import json
import os
import signal
import time

import numpy as np

from suite.measure import Context, Pause, Result


def answer(ctx: Context, *, n: int) -> Result:
    """n squared, and n numbers."""
    return Result(metrics={"square": float(n * n)}, facts={"digest": f"{n * n:08x}"}, arrays={"numbers": np.arange(n)})


def total(ctx: Context, *, of: int) -> Result:
    """The sum over what the input cells left."""
    return Result(metrics={"sum": float(sum(int(ctx.input_arrays(role)["numbers"].sum()) for role in ctx.inputs))})


def slow(ctx: Context, *, seconds: float, n: int) -> Result:
    time.sleep(seconds)
    return Result(metrics={"square": float(n * n)})


def fault(ctx: Context, *, how: str) -> Result:
    """One way to die."""
    print(f"about to: {how}", flush=True)
    if how == "raise":
        raise RuntimeError("planned fault")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "hang":
        time.sleep(3600)
    if how == "kill-once":
        mark = ctx.state_dir / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave state":
        os.environ["TOY_LEFT_BEHIND"] = "1"
    if how == "foreign import":
        import importlib

        importlib.import_module("suite.plan")
    if how == "optuna":
        import optuna  # noqa: F401
    if how == "child":
        import subprocess

        subprocess.Popen(["sleep", "3600"])
        time.sleep(3600)
    return Result(metrics={"square": 0.0, "worst": float("inf")})


def unstorable(ctx: Context, *, how: str) -> Result:
    """A result that no bundle can hold; "fine" is one that it can."""
    nested: list = []
    for _ in range(20_000):
        nested = [nested]
    return {
        "fine": Result(records={"ops": [1]}), "nan in a record": Result(records={"ops": [float("nan")]}), "a set in a record": Result(records={"ops": {1, 2}}),
        "mixed keys": Result(records={"ops": {1: 1, "a": 2}}), "deep record": Result(records={"ops": nested}), "record named bundle": Result(records={"bundle": {}}),
        "many files": Result(records={f"r{i}": i for i in range(65)}), "one file too many": Result(records={f"r{i}": i for i in range(64)}, arrays={"x": np.zeros(1)}),
        "array named file": Result(arrays={"file": np.zeros(1)}), "fact is a number": Result(facts={"digest": 3}), "metric is text": Result(metrics={"square": "many"}),
        "metric is huge": Result(metrics={"square": 10**400}), "metric is an array": Result(metrics={"square": np.zeros(2)}),
        "header over its limit": Result(facts={"digest": "x" * (5 << 20)}), "long record name": Result(records={"r" * 118: 1}),
    }[how]  # fmt: skip


def shout(ctx: Context, *, chars: int) -> Result:
    raise RuntimeError("x" * chars + " the end")


def long(ctx: Context, *, steps: int, step_s: float) -> Result:
    """Counts to `steps`, saving after each; pauses when asked to."""
    file = ctx.state_dir / "at.json"
    at, value = json.loads(file.read_text()) if file.is_file() else (0, 1)
    while at < steps:
        time.sleep(step_s)
        at, value = at + 1, (value * 6364136223846793005 + 1442695040888963407) % 2**64
        file.write_text(json.dumps([at, value]))
        if ctx.time_is_up() and at < steps:
            raise Pause
    return Result(facts={"digest": f"{value:016x}"}, metrics={"steps": float(steps)})


def ranks(ctx: Context, *, how: str) -> Result:
    """All-reduce over two processes; or one rank dies, or hangs."""
    import torch
    import torch.distributed as dist

    if how == "foreign import":
        import importlib

        importlib.import_module("suite.plan")
    if how == "odd record":
        return Result(records={"ops": {1, 2}})
    dist.init_process_group("gloo")
    if how == "dead rank" and ctx.rank == 1:
        os._exit(5)
    if how == "hanging rank" and ctx.rank == 1:
        time.sleep(3600)
    x = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return Result(metrics={"sum": float(x)})


def objective(ctx: Context, *, x: float) -> Result:
    return Result(metrics={"loss": (x - 0.25) ** 2})


def visible_devices(ctx: Context) -> Result:
    return Result(facts={"devices": os.environ["CUDA_VISIBLE_DEVICES"]})


def inherited(ctx: Context, *, names: list[str]) -> Result:
    """The environment variables of these names that the worker has."""
    return Result(facts={n: os.environ[n] for n in names if n in os.environ})


def on_gpu(ctx: Context) -> Result:
    return Result(metrics={"square": 1.0})
