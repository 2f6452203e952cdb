"""Measures schedules of packed LoRA on a GPU and writes them down: kernels.lora.bench --tune.

For every (d, T, n, r) of the cases: all candidates of narrow, wide and outer are compiled by workers side by side, timed once round by round, and the
fastest is kept; then both passes of backward with the best two of each product, against two launches; last whether overlapped launches (PDL) pay, by whole
forwards and backwards of the smallest cases, whose bits they must not change. The table is code (kernels/lora/tuned.py). What cannot be compiled or launched is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.fp8.bench import interleaved_us
from kernels.lora import backward, forward, schedules
from kernels.lora._bench_cases import OURS, Case, Operands
from kernels.lora.schedules import PASSES, PRODUCTS, Schedule, candidates, key

__all__ = ["tune", "warm"]

WORKERS = 14
ROUNDS = 3
BEST = 2  # of each product, tried in a pass
Job = tuple[str, int, int, int, int, tuple[Schedule, ...]]  # product or pass, d, rows, slots, rank, schedules; () where a pass runs as two launches


def call_of(name: str, o: Operands, s: tuple[Schedule, ...], singles: tuple[Schedule, ...] = ()) -> Callable[[], object]:
    """One launch, or two, of a product or a pass. singles: of a pass apart."""
    if name == "narrow":
        return functools.partial(backward.grad_s, o.y_MN, o.b_TN, o.seg, schedule=s[0])
    if name == "wide":
        return functools.partial(backward.grad_x, o.dx_MK, o.s_MR, o.a_TK, o.seg, schedule=s[0])
    if name == "outer":
        return functools.partial(backward.grad_b, o.s_MR, o.y_MN, o.seg, o.b_grad_TN, schedule=s[0])
    if s and name == "dy":
        return functools.partial(backward.grad_sb, o.y_MN, o.s_MR, o.b_TN, o.seg, o.b_grad_TN, schedules=s)
    if s:
        return functools.partial(backward.grad_ax, o.dx_MK, o.s_MR, o.x_MK, o.a_TK, o.seg, o.a_grad_TK, schedules=s)
    calls = [call_of(product, o, (one,)) for product, one in zip(PASSES[name], singles, strict=True)]
    return lambda: [call() for call in calls]


def compiled(jobs: list[Job]) -> None:
    """Into Triton's cache, by processes of their own; a kernel is compiled once, whatever shapes ask for it."""
    distinct = list({(j[0], j[1] % 256 == 0, j[4], j[5]): j for j in jobs}.values())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[*j[:5], [dataclasses.astuple(s) for s in j[5]]] for j in distinct], file)
        file.flush()
        workers = [subprocess.Popen([sys.executable, "-m", "kernels.lora.bench", "--warm", file.name, f"{i}/{WORKERS}"], stderr=subprocess.DEVNULL) for i in range(WORKERS)]
        for worker in workers:
            worker.wait()


def warm(path: Path, shard: int, shards: int) -> None:
    """Runs this worker's share of the jobs once."""
    made: dict[tuple[int, ...], Operands] = {}
    for name, d, rows, slots, rank, flat in json.loads(path.read_text())[shard::shards]:
        if (d, rows, slots, rank) not in made:
            made.clear()
            made[d, rows, slots, rank] = Case(way="backward", d=d, rows=rows, slots=slots, rank=rank).operands("cuda", 0)
        works(call_of(name, made[d, rows, slots, rank], tuple(Schedule(*s) for s in flat)))


def works(call: Callable[[], object]) -> bool:
    """Whether it can be compiled and launched: shared memory and registers of a device set limits that only it knows."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not fit is not chosen
        print(f"left out: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return False
    return True


def ranked(name: str, sets: list[Operands], choices: list[tuple[Schedule, ...]], singles: tuple[Schedule, ...] = ()) -> list[tuple[float, tuple[Schedule, ...]]]:
    """(us, schedules), fastest first."""
    good = [s for s in choices if works(call_of(name, sets[0], s, singles))]
    times = interleaved_us({str(i): [call_of(name, o, s, singles) for o in sets] for i, s in enumerate(good)}, ROUNDS) if good else {}
    return sorted(((times[str(i)], s) for i, s in enumerate(good)), key=lambda found: found[0])


def rotated(shape: tuple[int, int, int, int]) -> list[Operands]:
    """Operands that one product alone does not find in L2 again."""
    case = Case(way="backward", d=shape[0], rows=shape[1], slots=shape[2], rank=shape[3])
    return case.sets("cuda", case.least_bytes)


def tune(wanted: list[Case], path: Path) -> None:
    """Writes `path`, after every case, so that a run that is stopped leaves what it found."""
    shapes = list(dict.fromkeys((c.d, c.rows, c.slots, c.rank) for c in wanted))
    where = {s: dict(d=s[0], rows=s[1], slots=s[2], rank=s[3]) for s in shapes}
    compiled([(p, *s, (c,)) for s in shapes for p in PRODUCTS for c in candidates(p, **where[s])])
    best: dict[tuple, dict[str, list]] = {}
    table: dict[tuple, tuple[int, ...]] = {}
    for shape in shapes:
        sets = rotated(shape)
        best[shape] = {p: ranked(p, sets, [(c,) for c in candidates(p, **where[shape])]) for p in PRODUCTS}
        for product, found in best[shape].items():
            table[key(product, **where[shape])] = dataclasses.astuple(found[0][1][0])
            print(f"{product:7} {shape} {found[0][0]:8.1f} us {short(found[0][1])}; the rule's {next((us for us, s in found if s[0] == schedules.rule(product, **where[shape])), math.nan):8.1f}", flush=True)
        write(path, table, False)
    pairs = {(n, s): list(dict.fromkeys(pair for first in best[s][PASSES[n][0]][:BEST] for pair in joined(first[1][0], best[s][PASSES[n][1]]))) for s in shapes for n in PASSES}
    compiled([(n, *s, pair) for (n, s), found in pairs.items() for pair in found])
    for (name, shape), choices in pairs.items():
        sets = rotated(shape)
        singles = tuple(best[shape][p][0][1][0] for p in PASSES[name])
        us, chosen = ranked(name, sets, [(), *choices], singles)[0]
        table[key(name, **where[shape])] = tuple(itertools.chain.from_iterable(dataclasses.astuple(s) for s in chosen))
        print(f"{name:7} {shape} {us:8.1f} us {short(chosen) or 'two launches'}", flush=True)
        write(path, table, False)
    write(path, table, overlap_pays(wanted))


def joined(first: Schedule, seconds: list[tuple[float, tuple[Schedule, ...]]]) -> list[tuple[Schedule, Schedule]]:
    """With the second product's best that have as many warps."""
    return [(first, s[0]) for _, s in seconds if s[0].warps == first.warps][:BEST]


def overlap_pays(wanted: list[Case]) -> bool:
    """Whether programmatic dependent launches are faster by the geometric mean over cases of few tokens, and give the same bits."""
    logs = []
    for case in [c for c in wanted if c.rows <= 128][:12]:
        sets, bits = case.sets("cuda"), {}
        for on in (False, True):
            forward.PDL, o = on, case.operands("cuda", 0)
            case.run(OURS, o)
            bits[on] = [t.clone() for t in (o.y_MN, o.dx_MK, o.a_grad_TK, o.b_grad_TN)]
        if not all(torch.equal(a, b) for a, b in zip(bits[False], bits[True], strict=True)):
            print(f"overlapped launches change bits at {case.name}: they stay off", flush=True)
            return False
        calls = {str(on): [functools.partial(switched, on, case, o) for o in sets] for on in (False, True)}
        times = interleaved_us(calls, 9)
        logs.append(math.log(times["True"] / times["False"]))
        print(f"overlapped launches {case.name}: {times['True']:.1f} us, apart {times['False']:.1f} us", flush=True)
    forward.PDL = False
    return bool(logs) and sum(logs) / len(logs) < 0


def switched(on: bool, case: Case, o: Operands) -> object:
    """A run that is captured with overlapped launches, or without."""
    forward.PDL = on
    return case.run(OURS, o)


def short(s: tuple[Schedule, ...]) -> str:
    return " + ".join(f"{v.block_m}x{v.block_d}x{v.block_r} w{v.warps} s{v.stages} split{v.split}" for v in s)


def write(path: Path, table: dict[tuple, tuple[int, ...]], pdl: bool) -> None:
    """The module, with what it held for other shapes; its docstring stays."""
    kept = schedules.TUNED | table
    head = Path(schedules.__file__).with_name("tuned.py").read_text().split("\nPDL =")[0]
    lines = "".join(f"    {k!r}: {v!r},\n" for k, v in sorted(kept.items()))
    path.write_text(f"{head}\nPDL = {pdl}\nTUNED: dict[tuple[str, int, int, int, int], tuple[int, ...]] = {{\n{lines}}}\n".replace("{\n}", "{}"))
