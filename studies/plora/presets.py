"""Presets of the PLoRA study: functions that return a whole config.

    smoke()     seconds on a CPU: one small replayed search and one planner instance
    cpu()       what two cores can honestly show: planners, exactness, a real search over a two-layer random model, a replayed grid; no time of a GPU
    gpu()       every timing, the recorded grid, live makespans and searches on one GPU
    gpu2()      the live makespan on two GPUs of one host
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class Training:
    """What real training reads: a model that learns, rows of a set (training, validation, test; None: all), positions of a row, tokens of a budget."""

    model: str
    task: str
    rows: tuple[int | None, int | None, int | None]
    tokens: int
    budget_tokens: int
    classes: int = 0  # of the synthetic task
    device: str = "cuda"

    def __post_init__(self) -> None:
        if min(self.tokens, self.budget_tokens, *(n for n in self.rows if n is not None)) < 1:
            raise ValueError(f"a training has tokens, a budget and rows to look at, got {self}; mend it")

    @property
    def spec(self) -> dict:
        return {"name": self.task, "rows": list(self.rows)} | ({"classes": self.classes} if self.classes else {})


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Learning curves of every configuration under every seed, recorded once, and the step times that replays count with."""

    training: Training
    learning_rates: tuple[float, ...] = (5e-5, 1.5e-4, 4e-4, 1e-3, 2e-3, 5e-3)
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    alpha_ratios: tuple[float, ...] = (1.0, 4.0)
    seeds: int = 3
    looks: int = 16
    slots: int = 64


@dataclass(frozen=True, kw_only=True)
class Searches:
    """Arms and samplers; each pair with `seeds` seeds. slots: of a packed arm, each as wide as the widest rank."""

    arms: tuple[tuple[str, str], ...]  # sampler, arm
    trials: int
    slots: int
    seeds: int
    looks: int = 16
    shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    eta: int = 2


@dataclass(frozen=True, kw_only=True)
class Makespan:
    """The paper's configurations trained live, packed and alone, on `gpus` of one host."""

    training: Training
    tasks: tuple[str, ...] = ("banking77", "clinc150")
    configurations: int = 120
    slots: int = 40
    chunk: int = 32
    gpus: int = 1
    replicates: int = 3


@dataclass(frozen=True, kw_only=True)
class Same:
    """Some of the paper's configurations trained in deterministic mode, packed and alone: their bits are equal."""

    training: Training
    configurations: int = 8


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Finished adapters on test rows, by seeds: several configurations, and the same ones by PEFT."""

    training: Training
    seeds: int = 5
    peft: bool = True


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
    exactness: str = ""  # the model whose bits are compared, packed and alone
    same: Same | None = None
    grid: Grid | None = None
    replays: Searches | None = None
    published: Searches | None = None  # instead of grid and replays, where a grid that a GPU recorded travels with the source
    live: tuple[tuple[Training, Searches], ...] = ()
    makespans: tuple[Makespan, ...] = ()
    quality: tuple[Quality, ...] = ()
    pruners: bool = False  # what Optuna's own do to a pack
    seed: int = 0


ARMS = ("sequential", "sequential+prune", "packed", "packed+prune", "packed+prune+refill")
BANKING = Training(model="smollm2", task="banking77", rows=(None, 400, 1000), tokens=48, budget_tokens=60_000)
TINY = Training(model="tiny", task="synthetic", rows=(256, 32, 64), tokens=12, budget_tokens=2_000, classes=6, device="cpu")
REPLAYED = (*(("tpe", arm) for arm in ARMS), *(("random", arm) for arm in ARMS), ("gp", "sequential+prune"), ("gp", "packed+prune+refill"))
PRUNED_TRIALS = 64  # of the searches behind a claim


def smoke() -> Config:
    return Config(planning=(Planning(model="tiny", timed=False, clusters=False),), pruners=True)


def cpu() -> Config:
    grid = Grid(training=TINY, learning_rates=(1e-3, 4e-3, 1.6e-2, 6.4e-2), ranks=(4, 8), batches=(1, 4), alpha_ratios=(2.0,), seeds=2, looks=8, slots=8)
    tpe = tuple(("tpe", arm) for arm in ARMS)
    replays, published = Searches(arms=tpe, trials=12, slots=4, seeds=3, looks=8), Searches(arms=tpe, trials=PRUNED_TRIALS, slots=16, seeds=3)
    live = Searches(arms=(("tpe", "packed+prune+refill"), ("tpe", "sequential+prune")), trials=12, slots=4, seeds=1, looks=8)
    return Config(planning=(Planning(model="3b", timed=False),), exactness="tiny", same=Same(training=replace(TINY, budget_tokens=400), configurations=4), grid=grid, replays=replays, published=published, live=((TINY, live),), pruners=True)


def gpu() -> Config:
    few = tuple(r for r in RUNGS if r != "B3 looped, graphed")  # every rung has adapters of its own in memory, and every captured one its activations
    fewer = tuple(r for r in few if r != "B4 padded")
    ladders = (Ladder(model="0.5b", k=64, saturated=16384), Ladder(model="3b", k=24, saturated=8192, rungs=few), Ladder(model="7b", k=16, saturated=8192, rungs=fewer),
               Ladder(model="smollm2", k=64, saturated=32768, replicates=1), Ladder(model="7b", k=2, tokens=1024, saturated=8192, rungs=few, replicates=1))  # fmt: skip
    surfaces = (Surface(model="smollm2", most=32768, saturated=32768), Surface(model="0.5b", most=16384, saturated=32768), Surface(model="3b", most=4096, saturated=8192, ks=(2, 4, 8, 16, 32)),
                Surface(model="7b", most=2048, saturated=8192, ks=(2, 4, 8, 16, 24)))  # fmt: skip
    saturation = (Saturation(model="0.5b", k=64, singles=(8192, 16384, 32768)), Saturation(model="3b", k=64, singles=(4096, 8192)), Saturation(model="7b", k=16, tokens=512, singles=(8192,)))
    planning = (Planning(model="3b"), Planning(model="0.5b", regret=False, clusters=False), Planning(model="smollm2", regret=False, gaps=False, clusters=False, largest=None))
    live = (Searches(arms=(("tpe", "packed+prune+refill"),), trials=PRUNED_TRIALS, slots=16, seeds=5), Searches(arms=(("tpe", "sequential+prune"),), trials=PRUNED_TRIALS, slots=16, seeds=1))
    sums = Training(model="smollm2", task="svamp", rows=(None, 200, None), tokens=128, budget_tokens=200_000)
    return Config(
        ladders=ladders, surfaces=surfaces, saturation=saturation, kernels=Kernels(), baselines=Baselines(), planning=planning, makespan=PaperMakespan(), exactness="smollm2", same=Same(training=replace(BANKING, budget_tokens=4_000)), grid=Grid(training=BANKING),
        replays=Searches(arms=REPLAYED, trials=PRUNED_TRIALS, slots=16, seeds=8), live=tuple((BANKING, s) for s in live), makespans=(Makespan(training=live_makespan()),),
        quality=(Quality(training=BANKING), Quality(training=replace(BANKING, task="clinc150")), Quality(training=sums, peft=False)), pruners=True,
    )  # fmt: skip


def gpu2() -> Config:
    return Config(makespans=(Makespan(training=live_makespan(), gpus=2),))


def live_makespan() -> Training:
    """Budgets that let 120 adapters, one after another, end in minutes."""
    return replace(BANKING, rows=(None, 200, 500), budget_tokens=20_000)
