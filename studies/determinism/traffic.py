"""Bytes moved per weight in decode, by the profiler's own counters.

    weight_bytes(ctx, rows=1, n=14336, k=4096, variants=["fma", "integer", "layercast"])
    python -m studies.determinism.traffic fma 1 14336 4096          # the program that is profiled

`ncu` counts the bytes that every kernel of one call read from and wrote to the card's memory (`dram__bytes_read.sum`,
`dram__bytes_write.sum`), after other weights have passed through the L2. Clocks are left alone, and the caches are not flushed by ncu.
Before the call, ordinary reads of far more than the L2 holds push out what earlier work had written there: those lines would be written
back during the call and counted as its own (4.3 MB of 117 were, once; weights are read with a hint to leave the L2 first, so passing
them through does not do it). A variant is the name of a family (`studies.models.families`).
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys

import torch

from studies.models.families import FAMILIES
from suite.measure import Context, Result

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def weight_bytes(ctx: Context, *, rows: int, n: int, k: int, variants: list[str]) -> Result:
    """Record "traffic": bytes read and written by one call of each variant, and per weight. Raises RuntimeError where ncu gives no numbers."""
    records = [{"variant": v, **profiled(v, rows, n, k)} for v in variants]
    records = [r | {"per_weight": (r["read"] + r["written"]) / (n * k)} for r in records]
    return Result(records={"traffic": records}, metrics={"bytes_fma": next(r["per_weight"] for r in records if r["variant"] == "fma")})


def profiled(variant: str, rows: int, n: int, k: int) -> dict[str, float]:
    """Bytes of one call, over all its kernels."""
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(COUNTERS),
               sys.executable, "-m", "studies.determinism.traffic", variant, str(rows), str(n), str(k)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    found = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row["ID"].isdigit()]
    if done.returncode or not found:
        raise RuntimeError(f"ncu must count the bytes of {variant}; it ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    read, written = (sum(float(row[c].replace(",", "")) for row in found) for c in COUNTERS)
    return {"read": read, "written": written, "kernels": len(found)}


def program(variant: str, rows: int, n: int, k: int) -> None:
    """One profiled call over a weight that is not in the L2."""
    family = FAMILIES[variant]
    generator = torch.Generator(device="cuda").manual_seed(1)
    handles = [family.prepare(torch.randn((n, k), generator=generator, device="cuda").to(torch.bfloat16)) for _ in range(3)]
    x_MK = torch.randn((rows, k), generator=generator, device="cuda").to(family.activations)
    for handle in handles:
        family.linear(x_MK, handle)
    write_back()
    torch.cuda.cudart().cudaProfilerStart()
    family.linear(x_MK, handles[0])
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def write_back() -> None:
    """Empties the L2 of lines that wait to be written: four passes over 512 MiB."""
    other = torch.zeros(1 << 27, device="cuda")
    for _ in range(4):
        other.sum()
    torch.cuda.synchronize()


if __name__ == "__main__":
    program(sys.argv[1], *map(int, sys.argv[2:]))
