"""Checks every FP8 kernel against its reference on a GPU, then times them against copies, torch and bf16; or says what it would do.

    python -m kernels.fp8.bench --json FILE         # on an H200, under four minutes; one table last
    python -m kernels.fp8.bench --dry-run           # any machine: builds small inputs on the CPU, runs the references, lists cases and floors
    python -m kernels.fp8.bench --compile           # any machine: registers, stack and shared memory of every kernel, compiled for sm_90

Times are medians of interleaved CUDA-graph replays over inputs and outputs that rotate through more than 185 MB, three times an H200's L2 (at most 64
sets, so that tiny products stay in L2, as behind their producer). A wrong result is printed and its case not timed. Copies in a graph would be
copy-engine nodes, so `neg` stands for a copy there, and shares are of the eager copy of 1 GiB. It tunes nothing; --sweep times every
schedule of the products too. The studies measure the claims; this finds what to change.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import triton
from triton.compiler import CompiledKernel

from kernels.exact.bench import copy_tbps, graph_of
from kernels.exact.philox import philox_bell
from kernels.fp8._bench_cases import COPY_TBPS, FUSED_MK, GEMM_RSC, PEAK_TFLOPS, ROW, Case, cases, operands, problem
from kernels.fp8.gemm import kind_of, scaled_gemm
from kernels.fp8.norm_quantise import norm_quantise, row_schedule
from kernels.fp8.recipes import gemm
from kernels.fp8.schedule import GemmSchedule, schedules

__all__ = ["compiled_usage", "main", "usage_of"]

ROTATE_BYTES = 185_000_000
MOST_SETS = 64
WORKERS = 12
GROUPS = ("quantise", "fused", "gemm", "layer")
SHRINK = 32  # of a dry run's shapes
DEVICE = "cuda"
WARM_ROUNDS = 3
SPIN_CYCLES = 400_000  # 200 us: what the host needs for a replay of 64 calls


# ---- on any machine ------------------------------------------------------------------------------------------------------------


def usage_of(compiled: CompiledKernel) -> dict[str, int]:
    """Registers a thread, stack and shared bytes, and how many instructions spill, access 16 bytes of global memory, copy in bulk, multiply fp8, add."""
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([os.path.join(tools, "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([os.path.join(tools, "nvdisasm"), file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(v) for v in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    count = lambda pattern: len(re.findall(rf"\b{pattern}", sass))  # noqa: E731
    return dict(registers=registers, stack=stack, shared=compiled.metadata.shared, warps=compiled.metadata.num_warps, spills=count(r"LDL") + count(r"STL"),
                wide=count(r"LDG\.E\.128") + count(r"STG\.E\.128"), tma=count(r"UTMALDG"), fp8_mma=count(r"QGMMA"), adds=count(r"FADD") + count(r"FFMA"))  # fmt: skip


def compiled_usage(only: tuple[str, ...] = GROUPS) -> dict[str, dict[str, int]]:
    """Usage of every kernel that the cases launch, by case and kernel, compiled here for sm_90; distinct kernels once."""
    from kernels.exact.audit.specimen import captured, compile_specimen

    found: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    for case in cases(only=only):
        if case.ref is None or "torch" in case.name.split():
            continue
        inputs = case.inputs("empty", 0)
        for specimen in captured(case.name, lambda case=case, inputs=inputs: case.run(*inputs), family="elementwise"):
            compiled = compile_specimen(specimen, "sm_90")
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                found[f"{case.group} {specimen.name}"] = usage_of(compiled)
    return found


def dry_run(only: tuple[str, ...]) -> list[str]:
    """Runs the reference of every case on small CPU inputs -> lines; raises where an input or a reference does not work."""
    lines = []
    for case, full in zip(cases(only=only, shrink=SHRINK), cases(only=only), strict=True):
        inputs = case.inputs("cpu", 0)
        if case.ref is not None:
            out = case.ref(*inputs)
            if wrong := problem(case, out, case.ref(*inputs)):
                raise AssertionError(f"a reference differs from itself: {wrong}")
        lines.append(f"{full.group:26} {full.name:44} floor {full.floor_us:8.1f} us   {'reference ran' if case.ref else 'baseline'}")
    return lines


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


def _sets(case: Case) -> int:
    return max(2, min(MOST_SETS, int(ROTATE_BYTES / case.moved_bytes) + 1))


def _checked(group: list[Case], wrong: list[str]) -> list[Case]:
    """The cases that give what their references give; what raises or differs goes into `wrong`."""
    good = []
    for case in group:
        inputs = case.inputs(DEVICE, 0)
        try:
            out = case.run(*inputs)
            said = problem(case, out, case.ref(*inputs)) if case.ref else ""
        except Exception as error:  # one kernel that fails must not cost the others' numbers
            said = f"FAILED {case.group} {case.name}: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
        if said:
            wrong.append(said)
            print(said, flush=True)
        else:
            good.append(case)
    return good


def measure(only: tuple[str, ...], rounds: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """({group: {case: us}}, what was wrong)."""
    groups: dict[str, list[Case]] = {}
    for case in cases(only=only):
        groups.setdefault(case.group, []).append(case)
    results: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for name, group in groups.items():
        good = _checked(group, wrong)
        made = {}
        for case in good:
            if (key := (case.shares_inputs_with, _sets(case))) not in made:
                made[key] = [case.inputs(DEVICE, i) for i in range(_sets(case))]
        calls = {c.name: [functools.partial(c.run, *x) for x in made[c.shares_inputs_with, _sets(c)]] for c in good}
        results[name] = interleaved_us(calls, rounds) if calls else {}
        del made, calls
        torch.cuda.empty_cache()
    return results, wrong


def interleaved_us(variants: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Median us of a call, variants taking turns. Outputs of all sets stay, so that they rotate beyond L2 like the inputs; a replay is enqueued while
    the device spins, so that no launch is in its time."""
    kept: list[object] = []
    graphs = {name: graph_of(keeping(calls, kept)) for name, calls in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + WARM_ROUNDS):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if i >= WARM_ROUNDS:
                samples[name].append(start.elapsed_time(stop) * 1e3 / len(variants[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def keeping(calls: list[Callable[[], object]], kept: list[object]) -> list[Callable[[], object]]:
    """The calls, each leaving its output in `kept`: memory that is given back is written again by the next set."""
    return [lambda call=call: kept.append(call()) for call in calls]


def warm(shard: int, shards: int, only: tuple[str, ...]) -> None:
    """Compiles this shard's kernels into Triton's cache by running each case once."""
    for case in cases(only=only)[shard::shards]:
        if case.ref is not None:
            with contextlib.suppress(Exception):  # the check that follows says what fails
                case.run(*case.inputs(DEVICE, 0))
            torch.cuda.empty_cache()


def sweep(rounds: int) -> dict[str, dict[str, float]]:
    """{"sweep RxSxC recipe": {schedule: us}} for the eight schedules that the model likes best, and the same of norm_quantise's rows."""
    results: dict[str, dict[str, float]] = {}
    for r, s, c in GEMM_RSC:
        for name in ("rowwise-fast", "rowwise", "blockwise"):
            recipe, sets = gemm(name), [operands(DEVICE, i, r, s, c, name) for i in range(2)]
            calls = {short(p): [functools.partial(scaled_gemm, *x, recipe, schedule=p) for x in sets] for p in schedules(r, s, c, kind=kind_of(recipe))[:8]}
            results[f"sweep {r}x{s}x{c} {name}"] = interleaved_us(calls, rounds)
    for m, k in FUSED_MK:
        x = [philox_bell((1 << 20,), i).cuda().repeat(-(-m * k // (1 << 20)))[: m * k].view(m, k).bfloat16() for i in range(3)]
        plans = {p: row_schedule(k, at_least=256, per_thread=p) for p in (8, 16, 32, 64)}
        calls = {f"{p} a thread": [functools.partial(norm_quantise, v, "blocknorm", "hardswish", ROW, schedule=s) for v in x] for p, s in plans.items()}
        results[f"sweep {m}x{k} norm_quantise"] = interleaved_us(calls, rounds)
    return results


def short(p: GemmSchedule) -> str:
    return f"{p.block_r}x{p.block_s} w{p.num_warps} s{p.stages} split{p.split}"


def table(results: dict[str, dict[str, float]], tbps: float) -> list[str]:
    """Short lines: us, rate, share of the copy (or of the peak), and how often as fast as the group's first case."""
    lines = []
    for case in cases():
        us = results.get(case.group, {}).get(case.name)
        if us is None:
            continue
        first = next(iter(results[case.group].values()))
        rate = f"{case.flops / us / 1e6:6.0f} TFLOP/s {case.flops / us / 1e6 / PEAK_TFLOPS[case.precision]:5.2f} of peak" if case.flops else f"{case.moved_bytes / us / 1e6:6.2f} TB/s    {case.moved_bytes / us / 1e6 / tbps:5.2f} of copy"
        lines.append(f"{case.group:26} {case.name:44} {us:9.1f} us {rate} {first / us:5.2f}x")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write every median there")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="time every schedule of the products too")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    only = tuple(v for v in options.only.split(",") if v)
    if unknown := set(only) - set(GROUPS):
        parser.error(f"groups are {GROUPS}, got {sorted(unknown)}")
    if options.dry_run:
        print("\n".join(dry_run(only)))
    elif options.compile:
        for name, u in compiled_usage(only or GROUPS).items():
            print(f"{name:64} {u['registers']:3} registers x {u['warps']:2} warps, {u['shared']:6} B shared, {u['stack']:3} B stack, {u['spills']:3} spills, {u['wide']:3} wide, {u['tma']:2} TMA, {u['fp8_mma']} fp8 MMA")
    elif not torch.cuda.is_available():
        print("times need a CUDA device; --dry-run and --compile run here", file=sys.stderr)
        return 2
    elif options.warm:
        warm(*(int(v) for v in options.warm.split("/")), only)
    else:
        return _bench(options, only)
    return 0


def _bench(options: argparse.Namespace, only: tuple[str, ...]) -> int:
    workers = [subprocess.Popen([sys.executable, "-m", "kernels.fp8.bench", "--warm", f"{i}/{WORKERS}", "--only", options.only], stdout=subprocess.DEVNULL) for i in range(WORKERS)]
    for worker in workers:
        worker.wait()
    tbps = copy_tbps()
    results, wrong = measure(only, options.rounds)
    if options.sweep:
        results |= sweep(options.rounds)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, copy_tbps=tbps, us=results, wrong=wrong), file, indent=1)
    print(f"{torch.cuda.get_device_name()}  copy {tbps:.2f} TB/s (notes: {COPY_TBPS})")
    for name, times in results.items():
        if name.startswith("sweep"):
            print(f"{name:44} " + "; ".join(f"{us:.1f} {which}" for which, us in sorted(times.items(), key=lambda item: item[1])))
    print("\n".join(table(results, tbps)))
    print(f"{len(wrong)} wrong" if wrong else "every checked result was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
