"""Presets of the determinism study: functions that return a whole config.

    cpu()       what two cores can honestly show: bits on this CPU, beside the published H200 bits
    gpu()       the same questions on one GPU under many schedules, the attempts to break the bits, the flip study, and the timing contests
    gpu2()      whole texts by two GPUs, tensor-parallel
    golden()    the CPU's side of everything that the GPU presets ask: minutes to an hour, run once a release
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CPU_IMPLS = ("fma", "integer", "layercast", "sgemm", "bf16")
GPU_IMPLS = ("fma", "integer", "integer-b9", "layercast", "sgemm", "tf32", "bf16", "batch-invariant")
EXACT = ("fma", "integer")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One timing comparison: y_MN = x_MK w_NK^T at this shape, all variants in one process."""

    rows: int  # M
    n: int
    k: int
    variants: tuple[str, ...]
    rounds: int = 8
    launches: int = 12
    warmup_s: float = 0.2
    replicates: int = 0  # process starts; 0: the config's
    eager: bool = False  # also timed without a graph, as most users run


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts of the whole model in one family, the same `prompts` and `new_tokens` under every schedule."""

    family: str
    prompts: int
    schedules: tuple[Mapping[str, Any], ...]  # fields of studies.models.generation.Schedule, and sampled
    new_tokens: int = 16


@dataclass(frozen=True, kw_only=True)
class Flips:
    """GSM8K texts and SST-2 labels of implementations at several batches."""

    texts: Mapping[str, tuple[int, ...]]  # implementation -> batches
    labels: Mapping[str, tuple[int, ...]]
    prompts: int = 256  # whole batches of 8 and of 64
    new_tokens: int = 128
    sentences: int = 872


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The 7B-shaped decoder: decode at batches, prefill of prompts, all variants in one process."""

    batches: tuple[int, ...] = (1, 8)
    context: int = 1024
    prompts: tuple[int, ...] = (2048,)
    variants: tuple[str, ...] = ("fma", "integer", "layercast", "sgemm", "bf16")
    rounds: int = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is captured, which schedules are compared, what is tried to break the bits, what is timed. Empty: not asked."""

    layers: tuple[int, ...] = (0, 14, 29)
    sequences: int = 4
    tokens: int = 16
    cpu_schedules: tuple[Mapping[str, Any], ...] = ()
    cpu_impls: tuple[str, ...] = CPU_IMPLS
    gpu_rows: tuple[int, ...] = ()
    gpu_impls: tuple[str, ...] = GPU_IMPLS
    gpu_kernels: bool = False  # every schedule of schedules.py
    texts: tuple[Texts, ...] = ()
    text_device: str = "cpu"
    ranks: int = 1  # of the texts
    training: tuple[str, ...] = ()  # devices
    audit: tuple[str, ...] = ()  # targets
    stress_sms: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()  # architectures
    engines: tuple[str, ...] = ()  # products of family B
    flips: Flips | None = None
    traffic: bool = False
    contests: tuple[Contest, ...] = ()
    serving: Serving | None = None
    replicates: int = 5
    verify: tuple[str, ...] = ()  # devices that are asked the golden questions
    seed: int = field(default=0)

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
CPU_TEXTS = (Texts(family="fma", prompts=8, schedules=({"batch": 8}, {"batch": 3, "chunk": 16}, {"batch": 4, "sampled": True})),
             Texts(family="integer", prompts=4, schedules=({"batch": 4}, {"batch": 1, "chunk": 16})))  # fmt: skip
GPU_TEXTS = (
    {"batch": 1, "graph": True}, {"batch": 8, "graph": True}, {"batch": 64, "graph": True}, {"batch": 16, "chunk": 16}, {"batch": 8, "pad_to": 128},
    {"batch": 64, "cache": False}, {"batch": 64, "sampled": True, "graph": True}, {"batch": 7, "sampled": True},
)  # fmt: skip
DECODE = ("fma", "integer", "layercast", "sgemm", "bf16", "copy")
PADDED = (*DECODE, "bf16_padded")  # cuBLAS with rows padded to 16: below 16 rows only
COMPILED = ("fma", "integer", "layercast_compiled", "bf16_compiled")
PREFILL = ("fma", "integer", "integer-b9", "layercast", "sgemm", "bf16")


def smoke() -> Config:
    """CPU, seconds: one layer, two schedules, one control."""
    return Config(layers=(0,), cpu_schedules=CPU_SCHEDULES[:2], cpu_impls=("fma", "sgemm"))


def cpu() -> Config:
    return Config(cpu_schedules=CPU_SCHEDULES, texts=CPU_TEXTS, training=("cpu",), verify=("cpu",))


def golden() -> Config:
    """The CPU's answers at the sizes of `gpu`, and the static audit of every kernel for every target."""
    texts = tuple(Texts(family=f, prompts=50, schedules=({"batch": 10}, {"batch": 10, "sampled": True})) for f in EXACT)
    return Config(cpu_schedules=CPU_SCHEDULES, texts=texts, training=("cpu",), verify=("cpu",), audit=TARGETS)


def gpu() -> Config:
    shapes = ((4096, 4096), (14336, 4096))
    decode = tuple(Contest(rows=m, n=n, k=k, variants=PADDED, eager=m == 1) for n, k in shapes for m in (1, 2, 4, 8))
    curve = tuple(Contest(rows=m, n=n, k=k, variants=DECODE, replicates=2) for n, k in shapes for m in (16, 64))
    prefill = (Contest(rows=512, n=4096, k=4096, variants=PREFILL, rounds=5, launches=2, replicates=2), Contest(rows=4096, n=4096, k=4096, variants=PREFILL, rounds=5, launches=2))
    every, some = (1, 8, 64), (8, 64)
    compiled = (Contest(rows=1, n=14336, k=4096, variants=COMPILED),)
    flips = Flips(texts={"bf16": every, "sgemm": every, "layercast": every, "fma": every, "tf32": some, "batch-invariant": some, "integer": some},
                  labels={impl: (16, 64) for impl in ("bf16", "layercast", "fma")})
    return Config(
        cpu_schedules=CPU_SCHEDULES[:1], gpu_rows=(1, 2, 4, 8, 16, 64), gpu_kernels=True, texts=tuple(Texts(family=f, prompts=50, schedules=GPU_TEXTS) for f in EXACT),
        text_device="cuda", training=("cuda",), stress_sms=(8, 16, 32, 64, 96, 128), foreign=(80, 89), engines=("b6", "b9"), flips=flips, traffic=True,
        contests=decode + curve + prefill + compiled, serving=Serving(), verify=("cuda",),
    )  # fmt: skip


def gpu2() -> Config:
    return Config(texts=tuple(Texts(family=f, prompts=50, schedules=({"batch": 8}, {"batch": 64, "sampled": True})) for f in EXACT), text_device="cuda", ranks=2, cpu_impls=())


def verify() -> Config:
    return Config(verify=("cpu", "cuda"))
