"""Times the exact linear layer on a GPU against LayerCast, SGEMM and a copy, over every schedule.

    python -m kernels.exact.bench                    # about two minutes on one GPU; prints one table; --json FILE keeps every median

Decode: CUDA graphs over weights that rotate through more than 180 MB (three times an H200's L2), variants interleaved round by round,
medians. LayerCast "as written" is `F.linear(x.float(), w.to(torch.float32))`. Before timing, every variant's output is compared bit for
bit with the CPU oracle. It tunes nothing by itself: defaults are written by hand into `decode_schedule` and `prefill_schedule`.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable

import torch

from kernels.exact.decode import DecodeSchedule, PackedWeight, pack_weight
from kernels.exact.linear import linear_fma, linear_fma_ref
from kernels.exact.philox import philox_bell
from kernels.exact.prefill import PrefillSchedule, prefill_schedules

ROTATE_BYTES = 185_000_000
ROUNDS = 15
SHAPES_NK = ((4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 2, 4, 8, 16)


def sweep(m: int) -> list[DecodeSchedule]:
    """Schedules worth timing for m tokens."""
    found = []
    for rows, unroll, split, by_chunk, ahead in itertools.product((1, 2, 4), (2, 4, 8, 16), (1, 2, 4), (False, True), (True, False)):
        in_flight = rows * unroll
        if rows * m > 32 or unroll * m > 32 or not (8 if m <= 2 else 4) <= in_flight <= 16 or (split > 2 and m <= 2):
            continue
        if (split > 1 and not by_chunk) or (m >= 4 and rows == 1):
            continue
        found.append(DecodeSchedule(rows=rows, unroll=unroll, split=split, block_m=m, x_ahead=ahead, by_chunk=by_chunk))
    return found


def short(s: DecodeSchedule | PrefillSchedule) -> str:
    if isinstance(s, DecodeSchedule):
        return f"rows{s.rows} lanes{s.lanes} b{s.block_m} unroll{s.unroll} split{s.split} ahead{int(s.x_ahead)} chunk{int(s.by_chunk)}"
    return f"rows{s.rows} b{s.block_m} lanes{s.lanes} warps_m{s.warps_m} unroll{s.unroll}"


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def interleaved_us(variants: dict[str, list[Callable[[], object]]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median time of one call of each variant in microseconds, variants taking turns."""
    graphs = {name: graph_of(calls) for name, calls in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(rounds + 3):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if round_index >= 3:
                samples[name].append(start.elapsed_time(stop) * 1e3 / len(variants[name]))
    return {name: sorted(times)[len(times) // 2] for name, times in samples.items()}


def copy_tbps() -> float:
    """Bytes read plus written by a device copy, TB/s."""
    a = philox_bell((1 << 20,), 5, torch.float32).cuda().repeat(256)
    b, times = torch.empty_like(a), []
    for _ in range(40):  # eager: in a graph the copy would become a copy-engine node
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return 2 * a.numel() * 4 / sorted(times[10:])[15] / 1e6


def weights(n: int, k: int) -> list[torch.Tensor]:
    base = philox_bell((n, k), 7, torch.bfloat16, scale_log2=-5).cuda()
    return [base.roll(i, 0).contiguous() for i in range(-(-ROTATE_BYTES // (2 * n * k)))]


def decode_table(results: dict[str, float], tokens: tuple[int, ...]) -> None:
    for n, k in SHAPES_NK:
        w_list = weights(n, k)
        packed = [pack_weight(w) for w in w_list]
        for m in tokens:
            x = philox_bell((m, k), 8, torch.float32).cuda()
            want = linear_fma_ref(x, w_list[0]).cuda()
            variants: dict[str, list[Callable[[], object]]] = {
                "layercast": [lambda w=w: torch.nn.functional.linear(x.float(), w.to(torch.float32)) for w in w_list],
                "bf16": [lambda w=w, xb=x.bfloat16(): torch.nn.functional.linear(xb, w) for w in w_list],
                "default": [lambda p=p: linear_fma(x, p) for p in packed],
            }
            for schedule in sweep(m):
                y = linear_fma(x, packed[0], schedule=schedule)
                if not torch.equal(y, want):
                    print("WRONG BITS", m, n, k, short(schedule), (y - want).abs().max().item())
                    continue
                variants[short(schedule)] = [lambda p=p, s=schedule: linear_fma(x, p, schedule=s) for p in packed]
            for name, us in interleaved_us(variants).items():
                results[f"decode {n}x{k} M={m} {name}"] = us
            replay_check(x, packed)
            torch.cuda.empty_cache()


def replay_check(x: torch.Tensor, packed: list[PackedWeight]) -> None:
    """Back-to-back replays write every element of poisoned outputs, with the bits of separate launches."""
    want = []
    for p in packed:
        want.append(linear_fma(x, p))
        torch.cuda.synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for p in packed:
            outputs.append(linear_fma(x, p))
    for _ in range(20):
        for y in outputs:
            y.fill_(float("nan"))
        graph.replay()
        if not all(torch.equal(y, w) for y, w in zip(outputs, want, strict=True)):
            print("WRONG BITS in replay", tuple(x.shape), packed[0].shape)


def prefill_table(results: dict[str, float]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for m, n, k in ((4096, 4096, 4096), (512, 4096, 4096)):
        x = philox_bell((m, k), 9, torch.float32).cuda()
        w = philox_bell((n, k), 10, torch.bfloat16).cuda()
        packed, w32 = pack_weight(w), w.float()
        want = linear_fma_ref(x[:96], w).cuda()
        variants: dict[str, list[Callable[[], object]]] = {"sgemm": [lambda: x @ w32.t()]}
        for schedule in prefill_schedules():
            if not torch.equal(linear_fma(x, packed, schedule=schedule)[:96], want):
                print("WRONG BITS prefill", m, n, k, short(schedule))
            variants[short(schedule)] = [lambda s=schedule: linear_fma(x, packed, schedule=s)]
        for name, us in interleaved_us(variants, rounds=5).items():
            results[f"prefill {m}x{n}x{k} {name}"] = us


def warm(shard: int, shards: int) -> None:
    """Compiles (into Triton's cache) this shard's kernels by running each once on a small problem."""
    every = [(m, s) for m in TOKENS for s in sweep(m)] + [(64, s) for s in prefill_schedules()]
    w = pack_weight(philox_bell((256, 4096), 1, torch.bfloat16).cuda())
    for m, schedule in every[shard::shards]:
        linear_fma(philox_bell((m, 4096), 2).cuda(), w, schedule=schedule)
    torch.cuda.synchronize()


def show(results: dict[str, float], copy: float) -> None:
    print(f"{torch.cuda.get_device_name()}  copy {copy:.2f} TB/s")
    for n, k in SHAPES_NK:
        for m in TOKENS:
            prefix = f"decode {n}x{k} M={m} "
            us = {key.removeprefix(prefix): value for key, value in results.items() if key.startswith(prefix)}
            if not us:
                continue
            best = sorted((value, name) for name, value in us.items() if name.startswith("rows"))[:3]
            share = (2 * n * k + 4 * m * (n + k)) / us["default"] / 1e6 / copy
            print(f"{n}x{k} M={m:2d} default {us['default']:.2f} us = {share:.2f} of copy, {us['layercast'] / us['default']:.2f}x layercast "
                  f"({us['layercast']:.1f}), bf16 {us['bf16']:.2f} | " + "; ".join(f"{v:.2f} {name}" for v, name in best))  # fmt: skip
    for key, us in results.items():
        if key.startswith("prefill"):
            m, n, k = (int(v) for v in key.split()[1].split("x"))
            print(f"{key}: {us:.0f} us, {2 * m * n * k / us / 1e6:.1f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--warm", help="internal: SHARD/SHARDS")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--no-prefill", action="store_true")
    options = parser.parse_args()
    if options.warm:
        warm(*(int(v) for v in options.warm.split("/")))
        return
    workers = [subprocess.Popen([sys.executable, "-m", "kernels.exact.bench", "--warm", f"{i}/12"]) for i in range(12)]
    for worker in workers:
        worker.wait()
    results: dict[str, float] = {}
    copy = copy_tbps()
    decode_table(results, tuple(int(m) for m in options.tokens.split(",")))
    if not options.no_prefill:
        prefill_table(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "copy_tbps": copy, "us": results}, file, indent=1)
    show(results, copy)


if __name__ == "__main__":
    main()
