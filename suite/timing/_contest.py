"""One contest: enter the variants and the A/A control, warm up, time rounds interleaved, recheck poisoned outputs between.

    contest([Variant(name="ours", calls=calls, check=check, poison=poison), ...],
            device="cuda", rounds=20, launches_per_round=30, warmup_s=1.0)

It draws no conclusion (`suite.stats.compare` does) and starts no process: five fresh processes are the caller's loop.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from suite.telemetry import Sensor, open_sensor
from suite.timing._entry import Entry, enter, orders
from suite.timing._host import HostRunner
from suite.timing._result import ContestResult
from suite.timing._variant import CACHE_MULTIPLE, Variant, cache_bytes

__all__ = ["WrongOutput", "contest"]

_REWARM_LIMIT_S = 0.5


class WrongOutput(AssertionError):
    """A variant's check failed on outputs that were poisoned and computed again by the timed path."""


def contest(
    variants: Iterable[Variant],
    *,
    device: str,
    rounds: int,
    launches_per_round: int,
    warmup_s: float,
    mode: str | None = None,
    also_eager: bool = False,
    control: str | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    min_replay_s: float = 200e-6,
) -> ContestResult:
    """Time `variants` against each other in this process, interleaved at launch granularity, and return all samples.

    A launch of a variant is one pass over its rotated calls (on CUDA in graph mode one replay, which holds the pass as
    often as it takes to last `min_replay_s`); each of `launches_per_round` visits every entry once, in balanced orders.
    device: "cpu", "cuda" or "cuda:N". mode: "graph" or "eager"; by default graph on CUDA and eager on a CPU.
    also_eager: in graph mode enter each variant a second time, un-graphed, as "<name> [eager]", launch costs included.
    control: name of the variant that is entered twice, as "<name> [A/A]"; by default the first.
    clock: nanoseconds, monotonic; times a CPU contest. CUDA uses events.
    Outputs are poisoned, computed again and checked before the first round and after the first, middle and last.

    Raises ValueError for arguments that break a rule, for a check that passes on poisoned outputs (it proves nothing)
    and for a time of 0 s; WrongOutput (an AssertionError) where a check fails; RuntimeError where a capture fails.
    Source: repeated rounds and fresh processes after Georges, Buytaert, Eeckhout, OOPSLA 2007, section 3.
    """
    device, variants = str(device), tuple(variants)
    mode = _checked_mode(device, mode, also_eager)
    _check_counts(rounds, launches_per_round, warmup_s, min_replay_s)
    entries, control_names = enter(variants, control=control, graphed=mode == "graph", also_eager=also_eager)
    rotation = _rotation_over_cache(variants, device)
    with open_sensor(device) as sensor, _runner(entries, device, clock, min_replay_s) as runner:
        conditions = runner.prepare() | {"sensor": sensor.source, "sensor_problems": list(sensor.problems)}
        _check(entries, runner, "before the first round", blind=True)
        conditions["warmup"] = runner.warm(warmup_s, sensor, until_steady=True)
        if conditions["warmup"]["steady"] is False:
            warnings.warn("the SM clock still had a trend when the warm-up gave up; see conditions['warmup']", stacklevel=2)
        times_s, telemetry, checked = _rounds(entries, runner, sensor, rounds, launches_per_round, warmup_s)
        calls = {entry.name: runner.calls_per_launch(index) for index, entry in enumerate(entries)}
    conditions |= {
        "checked_rounds": checked,
        "unchecked": [entry.name for entry in entries if entry.variant.check is None],
        "rotation_over_cache": rotation,
    }
    return ContestResult(
        samples={entry.name: np.ascontiguousarray(times_s[:, :, index]) for index, entry in enumerate(entries)},
        control=control_names,
        device=device,
        mode=mode,
        calls_per_launch=calls,
        bytes_moved={entry.name: entry.variant.bytes_moved for entry in entries},
        flops={entry.name: entry.variant.flops for entry in entries},
        telemetry=telemetry,
        conditions=conditions,
    )


def _rounds(
    entries: Sequence[Entry],
    runner: HostRunner,
    sensor: Sensor,
    rounds: int,
    launches_per_round: int,
    warmup_s: float,
) -> tuple[np.ndarray, list[dict], list[int]]:
    """All timed rounds: seconds per call [rounds, launches, entries], telemetry, and the rounds followed by a check."""
    period = orders(len(entries))
    times_s = np.empty((rounds, launches_per_round, len(entries)))
    telemetry, check_after = [], sorted({0, (rounds - 1) // 2, rounds - 1})
    for this_round in range(rounds):
        first = this_round * launches_per_round  # orders run on from round to round, or short rounds would not see them all
        visits = [period[(first + launch) % len(period)] for launch in range(launches_per_round)]
        telemetry.append({"round": this_round, "when": "before"} | sensor.read())
        times_s[this_round] = _without_gc(runner.round_s, visits)
        telemetry.append({"round": this_round, "when": "after"} | sensor.read())
        if this_round in check_after:
            _check(entries, runner, f"after round {this_round}", blind=False)
            if this_round + 1 < rounds:
                runner.warm(min(warmup_s, _REWARM_LIMIT_S), sensor, until_steady=False)
    return times_s, telemetry, check_after


def _without_gc(function: Callable, *args: object) -> np.ndarray:
    """Call with the garbage collector off: a collection inside a launch would be charged to whoever runs then."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return function(*args)
    finally:
        if was_on:
            gc.enable()


def _check(entries: Sequence[Entry], runner: HostRunner, when: str, *, blind: bool) -> None:
    """Poison, compute by the timed path, check; `blind` first sees to it that the check fails on poison alone."""
    for index, entry in enumerate(entries):
        variant = entry.variant
        if variant.check is None:
            continue
        variant.poison()
        runner.synchronize()
        if blind and _passes(variant.check):
            raise ValueError(
                f"a check needs to fail on poisoned outputs, got one that passes for {entry.name!r}; "
                "let poison overwrite all outputs that check reads"
            )
        runner.recompute(index)
        try:
            variant.check()
        except AssertionError as error:
            raise WrongOutput(f"outputs of {entry.name!r} are wrong {when}: {error}") from error
        runner.synchronize()


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


def _runner(entries: Sequence[Entry], device: str, clock: Callable[[], int], min_replay_s: float) -> HostRunner:
    if device == "cpu":
        return HostRunner(entries, clock)
    from suite.timing._cuda import CudaRunner

    return CudaRunner(entries, device, min_replay_s)


def _checked_mode(device: str, mode: str | None, also_eager: bool) -> str:
    """The mode that runs. Raises ValueError for an unknown or absent device, an unknown mode, or a graph on a CPU."""
    kind = device.partition(":")[0]
    if device != "cpu" and kind != "cuda":
        raise ValueError(f"a contest needs a device 'cpu', 'cuda' or 'cuda:N', got {device=}; name one of these")
    if mode not in (None, "graph", "eager"):
        raise ValueError(f"a contest needs mode 'graph', 'eager' or None, got {mode=}; leave it out for the device's own")
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"a CUDA contest needs a visible CUDA device, got {device=} where torch sees none; use device='cpu'")
        index, count = torch.device(device).index, torch.cuda.device_count()
        if index is not None and index >= count:
            raise ValueError(f"a CUDA contest needs one of the {count} visible devices, got {device=}; use 'cuda:0'")
    elif mode == "graph":
        raise ValueError(f"graphs need a CUDA device, got {mode=} with {device=}; leave mode out")
    mode = mode or ("graph" if kind == "cuda" else "eager")
    if also_eager and mode != "graph":
        raise ValueError(f"also_eager needs mode 'graph', got {mode=} on {device=}; all entries are eager already, leave it out")
    return mode


def _check_counts(rounds: int, launches_per_round: int, warmup_s: float, min_replay_s: float) -> None:
    if rounds < 1 or launches_per_round < 1:
        raise ValueError(f"a contest needs at least one round and launch, got {rounds=}, {launches_per_round=}; raise them")
    for name, seconds in (("warmup_s", warmup_s), ("min_replay_s", min_replay_s)):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{name} needs to be finite and not negative, got {seconds!r} s; 0 leaves it out")


def _rotation_over_cache(variants: Sequence[Variant], device: str) -> float | None:
    """Least size of a variant's rotated sets over the last-level cache; None where a variant tells no bytes_moved.

    On CUDA a rotation below three caches warns: such a contest measures a warm L2, which may be meant and must be seen.
    """
    if any(variant.bytes_moved is None for variant in variants):
        return None
    ratio = min(variant.bytes_moved * len(variant.calls) for variant in variants) / cache_bytes(device)
    if device != "cpu" and ratio <= CACHE_MULTIPLE:
        warnings.warn(f"rotated sets need {CACHE_MULTIPLE} x L2 for cold times, got {ratio:.2f} x; see rotations_needed", stacklevel=3)
    return ratio
