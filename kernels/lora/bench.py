"""Packed LoRA on a GPU: checked, tuned, and timed against loops, padded bmm and grouped_mm; or what would be timed, without a GPU.

    python -m kernels.lora.bench --tune --json FILE     # on an H200: measures schedules, writes kernels/lora/tuned.py, then times all
    python -m kernels.lora.bench --json FILE            # with the schedules of tuned.py
    python -m kernels.lora.bench --dry-run              # any machine: small cases through the references, floors of the full ones
    python -m kernels.lora.bench --compile              # any machine: registers, stack and shared memory of the kernels, for sm_90

Products of N or K = 8 to 128 (the rank) and d: forward is shrink and expand, backward all four gradients, `n` adapters of T tokens each. Times are medians of
interleaved CUDA-graph replays over operands that rotate through more than three L2s; "looped [eager]" is the loop as PEFT would run it, launches
included. A wrong result is printed and not timed. FILE gets one flat row a case and path: pandas.read_json(FILE).to_parquet(...). The study measures the claims;
this finds what to change.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton

from kernels.exact.bench import copy_tbps
from kernels.fp8.bench import interleaved_us, usage_of
from kernels.lora import _bench_cases as bench_cases
from kernels.lora import forward
from kernels.lora._bench_cases import COPY_TBPS, OURS, PATHS_TIMED, PEAK_TFLOPS, WAYS, Case, cases
from kernels.lora._tune import tune, warm

__all__ = ["main"]

DEVICE = "cuda"
TUNED = Path(__file__).with_name("tuned.py")
SPACES = dict(ds=(2048, 3584, 11008), tokens=(32, 128, 512, 1024), ranks=(8, 16, 32, 64, 128))
EAGER_RUNS = 7


def row_of(case: Case, path: str, us: float, times: dict[str, float], tbps: float) -> dict[str, object]:
    """One line of the table, flat."""
    floor = case.floor_us(tbps)
    return dict(way=case.way, d=case.d, tokens=case.rows, slots=case.slots, rank=case.rank, path=path, us=us, bytes=case.moved_bytes, flops=case.flops,
                byte_us=case.moved_bytes / tbps / 1e6, flop_us=case.flops / PEAK_TFLOPS / 1e6, share_of_floor=floor / us,
                speedup_over_looped=times.get("looped", float("nan")) / us, byte_cap=times.get("looped", float("nan")) / floor)  # fmt: skip


def eager_us(case: Case, path: str, sets: list) -> float:
    """Median us of a call by the host's clock, launches and all."""
    samples = []
    for i in range(EAGER_RUNS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for o in sets:
            case.run(path, o)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / len(sets))
    return statistics.median(samples[2:])


def measure(wanted: list[Case], rounds: int, tbps: float) -> tuple[list[dict[str, object]], list[str]]:
    """(rows of the table, what was wrong)."""
    rows, wrong = [], []
    for case in wanted:
        good = []
        for path in PATHS_TIMED:
            try:
                said = case.problem(path, DEVICE)
            except Exception as error:  # one path that fails must not cost the others' numbers
                said = f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
            if said:
                wrong.append(f"WRONG {case.name} {path}: {said}")
                print(wrong[-1], flush=True)
            else:
                good.append(path)
        sets = case.sets(DEVICE)
        times = interleaved_us({p: [functools.partial(case.run, p, o) for o in sets] for p in good}, rounds) if good else {}
        if "looped" in good:
            times["looped [eager]"] = eager_us(case, "looped", sets)
        rows += [row_of(case, path, us, times, tbps) for path, us in times.items()]
        print(line(case, times, tbps), flush=True)
        del sets
        torch.cuda.empty_cache()
    return rows, wrong


def line(case: Case, times: dict[str, float], tbps: float) -> str:
    floor, ours = case.floor_us(tbps), times.get(OURS, float("nan"))
    cap = times.get("looped", float("nan")) / floor
    said = "; ".join(f"{path} {us:.1f}" for path, us in times.items())
    return f"{case.name:36} floor {floor:7.1f} us, of it {floor / ours:5.2f}; over looped {times.get('looped', float('nan')) / ours:5.1f}x of at most {cap:5.1f}x | {said}"


# ---- on any machine ------------------------------------------------------------------------------------------------------------------


def dry_run(wanted: list[Case]) -> list[str]:
    """Floors of all cases; small ones run through the references and every path that runs here."""
    for way in WAYS:
        small = Case(way=way, d=64, rows=5, slots=3, rank=8)
        for path in ("looped", "padded"):
            if said := small.problem(path, "cpu"):
                raise AssertionError(f"{small.name} {path}: {said}")
    return [f"{c.name:36} bytes {c.moved_bytes / 1e6:8.1f} MB = {c.moved_bytes / COPY_TBPS / 1e6:7.1f} us, {c.flops / 1e9:6.1f} GFLOP = {c.flops / PEAK_TFLOPS / 1e6:6.1f} us" for c in wanted]


def compiled_usage(wanted: list[Case]) -> dict[str, dict[str, int]]:
    """Of every distinct kernel that the cases launch with today's schedules, compiled here for sm_90."""
    from kernels.exact.audit.specimen import captured, compile_specimen

    found, seen = {}, set()
    for case in wanted:
        o = empty(case)
        for specimen in captured(case.name, lambda case=case, o=o: case.run(OURS, o), family="elementwise"):
            compiled = compile_specimen(specimen, "sm_90")
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                found[specimen.name] = usage_of(compiled)
    return found


def empty(case: Case) -> bench_cases.Operands:
    """bf16 tensors without values on the CPU: for launches that are looked at and not made."""
    m, t = case.rows * case.slots, case.rank * case.slots
    seg = bench_cases.Segments.of(rows=(case.rows,) * case.slots, ranks=(case.rank,) * case.slots, scales=(1.0,) * case.slots, device="cpu")
    make = lambda shape, kind=torch.bfloat16: torch.empty(shape, dtype=kind)  # noqa: E731
    return bench_cases.Operands(x_MK=make((m, case.d)), y_MN=make((m, case.d)), dx_MK=make((m, case.d)), a_TK=make((t, case.d)), b_TN=make((t, case.d)), s_MR=make((m, case.rank)),
                                a_grad_TK=make((t, case.d), torch.float32), b_grad_TN=make((t, case.d), torch.float32), seg=seg)  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(v) for v in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SPACES.items():
        parser.add_argument(f"--{name}", type=numbers, default=default, help=f"comma-separated, {','.join(map(str, default))} unless given")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the table there")
    parser.add_argument("--tune", action="store_true", help="measure schedules first")
    parser.add_argument("--tuned", help="with --tune: write a copy of kernels/lora/tuned.py there")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args(arguments)
    wanted = list(cases(o.ds, o.tokens, o.ranks, o.slots))
    if o.dry_run:
        print("\n".join(dry_run(wanted)))
    elif o.compile:
        for name, u in compiled_usage(wanted).items():
            print(f"{name:60} {u['registers']:3} registers x {u['warps']:2} warps, {u['shared']:6} B shared, {u['stack']:3} B stack, {u['spills']:3} spills, {u['wide']:3} wide")
    elif not torch.cuda.is_available():
        print("times need a CUDA device; --dry-run and --compile run here", file=sys.stderr)
        return 2
    elif o.warm:
        warm(Path(o.warm[0]), *(int(v) for v in o.warm[1].split("/")))
    elif o.tune:
        tune(wanted, TUNED)
        if o.tuned:
            shutil.copy(TUNED, o.tuned)
        times = [sys.executable, "-m", "kernels.lora.bench", "--rounds", str(o.rounds), "--slots", str(o.slots)]
        times += [v for name in SPACES for v in (f"--{name}", ",".join(map(str, getattr(o, name))))] + (["--json", o.json] if o.json else [])
        return subprocess.run(times, check=False).returncode  # a fresh process reads the new table
    else:
        return _bench(wanted, o)
    return 0


def _bench(wanted: list[Case], o: argparse.Namespace) -> int:
    tbps = copy_tbps()
    print(f"{torch.cuda.get_device_name()}, copy {tbps:.2f} TB/s, overlapped launches {forward.PDL}")
    rows, wrong = measure(wanted, o.rounds, tbps)
    if o.json:
        common = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, copy_tbps=tbps, pdl=forward.PDL)
        with tempfile.NamedTemporaryFile("w", dir=Path(o.json).absolute().parent, delete=False) as file:
            json.dump([common | row for row in rows], file, indent=0)
        Path(file.name).replace(o.json)
    print(f"{len(wrong)} wrong" if wrong else "every checked result was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
