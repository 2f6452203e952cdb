"""Presets of the PLoRA study: functions that return a whole config.

    smoke()     seconds on a CPU: one small replayed search and one planner instance
    cpu()       what two cores can honestly show: planners, exactness, a real search over a two-layer random model, a replayed grid; no time of a GPU
    gpu()       every timing, the recorded grid, live makespans and searches on one GPU
    gpu2()      the live makespan on two GPUs of one host
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("0.5b", "3b", "7b")  # Qwen2.5's shapes with random weights and a vocabulary of 32k
HEADLINE = {"tokens": 128, "batch": 1}  # the point of the claims about throughput
KERNEL_HEADLINE = {"d": 3584, "tokens": 128}
SINGLES, OURS = ("B1 one graphed", "B1 one graphed, our kernels"), "B7 ours, graphed"
RUNGS = ("one eager", *SINGLES, "B3 looped", "B3 looped, graphed", "B4 padded", "B5 grouped", "B6 ours", OURS)
PAPER_RANKS = (8, 16, 32, 64, 128)
REPLICATES = 5  # process starts behind a ratio of a claim


def answers(tokens: int) -> int:
    """Answer tokens of a timed row: a quarter, as a question's answer may be."""
    return max(1, tokens // 4)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All ways to run k adapters, in one contest. saturated: tokens of the step that shows what the stack can do, as many as memory and time allow."""

    model: str
    k: int
    saturated: int
    tokens: int = HEADLINE["tokens"]
    batch: int = HEADLINE["batch"]
    rank: int = 16
    rungs: tuple[str, ...] = RUNGS
    replicates: int = REPLICATES

    def __post_init__(self) -> None:
        if min(self.k, self.saturated, self.tokens, self.batch, self.rank, self.replicates) < 1:
            raise ValueError(f"sizes are positive, got {self}; mend it")


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Our pack over the best single adapter, at every length, batch and k whose step has at most `most` tokens."""

    model: str
    most: int
    saturated: int
    tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    batches: tuple[int, ...] = (1, 4)
    ks: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    rank: int = 16


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """singles: tokens of a step of one adapter, the best of which is MFU_max."""

    model: str
    k: int
    singles: tuple[int, ...]
    tokens: int = 128
    rank: int = 16
    replicates: int = REPLICATES


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """LoRA's grouped products alone, forward and backward."""

    sizes: tuple[int, ...] = (2048, 3584, 11008)
    tokens: tuple[int, ...] = (32, 128, 512, 1024)
    slots: int = 32
    rank: int = 64
    paths: tuple[str, ...] = ("looped", "padded", "grouped")  # beside ours
    replicates: int = REPLICATES


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Eager PEFT over the paper's regime: ranks at batch 1 on real lengths of `lengths`, and over `tokens` at the headline rank."""

    models: tuple[str, ...] = MODELS
    paper_model: str = "3b"
    lengths: tuple[str, ...] = ("gsm8k", "mrpc")
    ranks: tuple[int, ...] = PAPER_RANKS
    tokens: tuple[int, ...] = (64, 256, 512, 1024)
    processes: tuple[int, ...] = (2, 4, 8)
    k: int = 32
    rank: int = 16
    replicates: int = REPLICATES


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A model's cost model and what plans are worth. Compositions of a Halton sequence: `fit` of them for the model, then `holdout` others for its error.

    timed: step times are measured on a GPU; else there is no cost model to try, and planners are compared under an assumed one. largest: (tokens, rank)
    of slots whose most is sought.
    """

    model: str
    timed: bool = True
    fit: int = 12
    holdout: int = 16
    tokens: tuple[int, ...] = (64, 128, 256, 512)
    most: int = 8192  # tokens of a micro-step
    regret: bool = True
    gaps: bool = True
    clusters: bool = True
    largest: tuple[int, int] | None = (512, 64)


@dataclass(frozen=True, kw_only=True)
class PaperMakespan:
    """PLoRA's 120 configurations on rows of real lengths: every composition timed, the schedule computed."""

    model: str = "3b"
    lengths: tuple[str, ...] = ("gsm8k", "mrpc")
    gpus: int = 8
    budget_tokens: int = 90_000
    limit_bytes: int = 120 * 10**9
    most_tokens: int = 8192  # of a micro-step


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is asked. None or empty: not asked."""

    ladders: tuple[Ladder, ...] = ()
    surfaces: tuple[Surface, ...] = ()
    saturation: tuple[Saturation, ...] = ()
    kernels: Kernels | None = None
    baselines: Baselines | None = None
    planning: tuple[Planning, ...] = ()
    makespan: PaperMakespan | None = None
    seed: int = 0


def smoke() -> Config:
    return Config(planning=(Planning(model="tiny", timed=False, clusters=False),))


def cpu() -> Config:
    return Config(planning=(Planning(model="3b", timed=False),))


def gpu() -> Config:
    few = tuple(r for r in RUNGS if r != "B3 looped, graphed")
    ladders = (Ladder(model="0.5b", k=64, saturated=32768), Ladder(model="3b", k=32, saturated=8192), Ladder(model="7b", k=32, saturated=8192, rungs=few),
               Ladder(model="smollm2", k=64, saturated=32768, replicates=1), Ladder(model="7b", k=4, tokens=1024, saturated=8192, rungs=few, replicates=1))  # fmt: skip
    surfaces = (Surface(model="smollm2", most=32768, saturated=32768), Surface(model="0.5b", most=16384, saturated=32768), Surface(model="3b", most=8192, saturated=8192), Surface(model="7b", most=4096, saturated=8192))
    saturation = (Saturation(model="0.5b", k=64, singles=(8192, 16384, 32768)), Saturation(model="3b", k=64, singles=(4096, 8192)), Saturation(model="7b", k=64, singles=(4096, 8192)))
    return Config(ladders=ladders, surfaces=surfaces, saturation=saturation, kernels=Kernels(), baselines=Baselines(),
                  planning=(Planning(model="3b"), Planning(model="0.5b", regret=False, clusters=False), Planning(model="smollm2", regret=False, gaps=False, clusters=False, largest=None)), makespan=PaperMakespan())  # fmt: skip


def gpu2() -> Config:
    return Config()
