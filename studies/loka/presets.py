"""Presets of the LoKA study: functions that return a whole config.

    smoke()     seconds on a CPU: two cells of the safety map
    cpu()       what two cores can honestly show, emulated: the safety map, the probe, pricing, small training arms; no time of any kind
    gpu()       the same with the real kernels, and every timing: crossover map, fused quantising, whole models, quality
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = (("dlrm_v2", "mlperf"), ("wukong", "5.6"), ("hstu", "dlrm-v3"), ("rankmixer", "100m"))  # a model and its size
SYNTHETIC = ("gaussian", "student-t3", "log-normal", "row-scaled", "outliers", "post-relu")


@dataclass(frozen=True, kw_only=True)
class Map:
    """The safety map: sites of these models (a model and its size), each pass of each under each distribution."""

    models: tuple[tuple[str, str], ...]
    distributions: tuple[str, ...] = SYNTHETIC
    passes: tuple[str, ...] = ("forward", "dgrad", "wgrad")
    batch: int = 8192  # examples of a step
    rows: int = 256  # of a product, at most; safety_map.ROWS are pooled
    contracted: int = 512
    device: str = "cpu"
    first: int = 0  # only so many questions; 0: all

    def __post_init__(self) -> None:
        if min(self.batch, self.rows, self.contracted) < 1:
            raise ValueError(f"sizes are positive, got {self.batch=} {self.rows=} {self.contracted=}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is asked. None or empty: not asked."""

    map: Map | None = None
    seed: int = 0


def smoke() -> Config:
    return Config(map=Map(models=(("dlrm_v2", "mlperf"),), distributions=("gaussian", "row-scaled"), passes=("forward",), contracted=128, first=1))


def cpu() -> Config:
    return Config(map=Map(models=MODELS))


def gpu() -> Config:
    return Config(map=Map(models=MODELS, rows=2048, contracted=4096, device="cuda"))
