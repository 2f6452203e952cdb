"""Presets of the determinism study: functions that return a whole config.

    cpu()       what two cores can honestly show: bits on this CPU, beside the published H200 bits
    gpu()       the same operators on one GPU under many schedules, and the timing contests
    verify()    the golden questions alone, on the CPU and a GPU: what `suite verify-determinism` runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CPU_BASELINES = ("layercast", "sgemm", "bf16")


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One timing comparison: y_MN = x_MK w_NK^T at this shape, all variants in one process."""

    rows: int  # M
    n: int
    k: int
    variants: tuple[str, ...]
    rounds: int = 12
    launches: int = 16
    eager: bool = False  # also timed without a graph, as most users run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is captured, which schedules are compared, what is timed."""

    layers: tuple[int, ...] = (0, 14, 29)
    sequences: int = 4
    tokens: int = 16
    cpu_schedules: tuple[Mapping[str, Any], ...] = ()
    cpu_baselines: tuple[str, ...] = CPU_BASELINES
    gpu_rows: tuple[int, ...] = ()
    gpu_kernels: bool = False  # every schedule that the kernels export
    contests: tuple[Contest, ...] = ()
    replicates: int = 5
    seed: int = field(default=0)
    verify: tuple[str, ...] = ()  # devices that are asked the golden questions, and nothing else is run

    def __post_init__(self) -> None:
        if self.sequences * self.tokens != 64:
            raise ValueError(f"64 rows are captured, so sequences * tokens is 64, got {self.sequences} * {self.tokens}")


CPU_SCHEDULES = (
    {"rows": 64},
    {"rows": 1},
    {"rows": 16},
    {"rows": 64, "chunk_rows": 16},
    {"rows": 64, "threads": 1},
)
DECODE = ("fma", "layercast", "sgemm", "bf16", "copy")
PREFILL = ("fma", "layercast", "sgemm", "bf16")


def smoke() -> Config:
    """CPU, seconds: one layer, two schedules, one control."""
    return Config(layers=(0,), cpu_schedules=CPU_SCHEDULES[:2], cpu_baselines=("sgemm",))


def cpu() -> Config:
    return Config(cpu_schedules=CPU_SCHEDULES)


def gpu() -> Config:
    shapes = ((4096, 4096), (14336, 4096))
    decode = tuple(Contest(rows=m, n=n, k=k, variants=DECODE, eager=m == 1) for n, k in shapes for m in (1, 2, 4, 8, 16))
    prefill = tuple(Contest(rows=m, n=4096, k=4096, variants=PREFILL, rounds=8, launches=4) for m in (512, 4096))
    return Config(cpu_schedules=CPU_SCHEDULES, gpu_rows=(1, 2, 4, 8, 16, 64), gpu_kernels=True, contests=decode + prefill)


def verify() -> Config:
    return Config(verify=("cpu", "cuda"))
