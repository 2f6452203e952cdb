"""Presets of the LoKA study: functions that return a whole config.

    smoke()     seconds on a CPU: two cells of the safety map
    cpu()       what two cores can honestly show, emulated: the safety map, real activations, small training arms; no time of any kind
    gpu()       the same with the real kernels, and every timing: crossover map, fused quantising, whole models, quality
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = (("dlrm_v2", "mlperf"), ("wukong", "5.6"), ("hstu", "dlrm-v3"), ("rankmixer", "100m"))  # a model and its size
TRAINED = ("wukong", "dlrm_v2", "rankmixer")  # have dense features and fields, as the data do
ALL_MODS = "nobias+blocknorm+hardswish"
SYNTHETIC = ("gaussian", "student-t3", "log-normal", "row-scaled", "outliers", "post-relu")
MODS_2K = ("", "nobias", "blocknorm", "hardswish", "nobias+blocknorm", "nobias+hardswish", "blocknorm+hardswish", ALL_MODS)
ARMS = ("bf16", "bf16-perturbed", "naive", "planted-bad")
SERVING = ("bf16", "single rowwise", "single blockwise", "dispatch", "dispatch fused", "dispatch epilogues")  # of inference
PLANNERS = ("bf16", "single tensorwise", "single rowwise", "planner torchao-filter", "planner loka", "planner ours", "planner oracle")
FORWARD, DGRAD, WGRAD = ("tensorwise-fast", "rowwise-fast", "blockwise"), ("tensorwise-grad", "rowwise-p2", "blockwise"), ("tensorwise-grad", "rowwise-p2", "blockwise-both")


@dataclass(frozen=True, kw_only=True)
class Map:
    """The safety map: sites of these models (a model and its size), each pass of each under each distribution."""

    models: tuple[tuple[str, str], ...] = MODELS
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
class Real:
    """Models trained here, whose activations and gradients are judged site by site."""

    models: tuple[str, ...] = TRAINED
    size: str = "small"
    mods: tuple[str, ...] = ("",)
    steps: int = 100
    batch: int = 256
    examples: int = 512
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Training runs: each arm with seeds 1 to `pairs`, on one teacher and one set of test rows."""

    arms: tuple[str, ...] = ARMS
    pairs: int = 8  # the pilot's
    size: str = "small"
    mods: str = ""
    data: str = "planted"
    planned: bool = False  # also the arms "ours" and "loka", by the plans of the `pricing` of this size
    steps: int = 60
    batch: int = 256
    test_rows: int = 16384
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Predictions against the truth, stopping, and the paper's probe; `overhead` times whole runs of Wukong-5.6."""

    distributions: tuple[str, ...] = SYNTHETIC
    m: int = 1024
    k: int = 256
    n: int = 128
    overhead: int = 0  # process starts
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Real logs: a model trained in float32, read again with FP8 in every inner forward product."""

    data: tuple[str, ...]
    recipes: tuple[str, ...] = ("rowwise", "tensorwise")
    steps: int = 200
    batch: int = 512
    rows: int = 200_000  # of the test part, at most
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A Wukong trained on known probabilities; every site in every recipe, one at a time; all planners from those prices."""

    size: str = "small"
    steps: int = 400
    batch: int = 1024
    largest: int = 50  # ids of the largest field: a model near its optimum needs few steps
    interaction: float = 0.1  # of the teacher's logit; prices are second-order, so they hold where the first-order change of a model off its optimum is small
    dense_rate: float = 1e-2
    table_rows: int = 64
    forward: tuple[str, ...] = ("tensorwise-fast", "rowwise-fast", "rowwise-p2", "rowwise-grad", "blockwise", "e5m2-tensorwise")
    rows: int = 32768
    calibration: int = 4096
    budget: float = 2e-4
    examples: int = 8192  # of the step that planners plan
    width: int = 32  # simulated times are those of sites so many times as wide
    timed: bool = False  # planners take measured times of this model's products instead
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Contests of single products and of fused quantising, on a GPU."""

    passes: tuple[str, ...] = ("forward", "dgrad", "wgrad")
    backward_of: tuple[str, ...] = ("dlrm-v2 ", "wukong-5.6 ")  # shapes whose gradients are timed too begin so
    backends: tuple[str, ...] = ("triton", "torch")
    bandwidth: tuple[tuple[int, int], ...] = ((65536, 4096), (8192, 512), (8192, 1024), (8192, 3456), (8192, 4096), (6144, 7680), (65536, 512))  # rows and features
    replicates: int = 5  # process starts, of the first


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A model's dense part, timed whole: first each of its products, then a step of every variant in one contest."""

    model: str
    size: str
    batch: int
    mods: str = ALL_MODS  # of baseline and plans alike
    training: bool = True
    variants: tuple[str, ...] = ("bf16", "single rowwise", "single rowwise-hp-wgrad", "dispatch", "dispatch fused")
    table_rows: int = 0  # ids a field: with them embeddings and optimizers are timed beside the dense part
    planned: bool = False  # with the plans of the `pricing` of this size, for variants "planner NAME"
    replicates: int = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is asked. None or empty: not asked."""

    map: Map | None = None
    real: Real | None = None
    probe: Probe | None = None
    torchao_filter: bool = False  # what it makes of MODELS
    pricing: tuple[Pricing, ...] = ()
    logs: Logs | None = None
    quality: tuple[Quality, ...] = ()
    timing: Timing | None = None
    steps: tuple[Steps, ...] = ()
    mods_latency: bool = False  # of one inner layer of Wukong-5.6 in all 2^3 combinations
    seed: int = 0


def smoke() -> Config:
    return Config(map=Map(models=MODELS[:1], distributions=("gaussian", "row-scaled"), passes=("forward",), contracted=128, first=1))


def cpu() -> Config:
    return Config(map=Map(), real=Real(), probe=Probe(), torchao_filter=True, pricing=(Pricing(),), logs=Logs(data=("movielens-100k",)), quality=(Quality(planned=True),))


def gpu() -> Config:
    wukong = {"model": "wukong", "size": "5.6", "batch": 6144}  # LoKA's batch on an H100
    naive = ("bf16", "torchao", "single tensorwise", "single rowwise", "single rowwise-hp-wgrad", "dispatch")
    others = (("dlrm_v2", "mlperf", 8192), ("wukong", "1.25", 6144), ("rankmixer", "100m", 8192))
    steps = (Steps(**wukong, mods="", variants=naive), Steps(**wukong, table_rows=10_000), Steps(**wukong, training=False, variants=SERVING))
    steps += (Steps(model="wukong", size="0.53", batch=4096, mods="", variants=PLANNERS, planned=True),)
    steps += tuple(Steps(model=m, size=s, batch=b, training=t, replicates=2, **({} if t else {"variants": SERVING})) for m, s, b in others for t in (True, False))
    pricing = (Pricing(steps=2000, rows=1_048_576, device="cuda"),
               Pricing(size="0.53", batch=4096, largest=100_000, interaction=0.3, dense_rate=1e-4, table_rows=1000, rows=262_144, calibration=1024, examples=4096, timed=True, device="cuda"))  # fmt: skip
    quality = (Quality(size="0.53", planned=True, steps=400, batch=4096, test_rows=2_097_152, device="cuda"), *(Quality(mods=m, arms=("bf16",), steps=2000, batch=2048, test_rows=1_048_576, device="cuda") for m in MODS_2K))
    return Config(map=Map(rows=512, contracted=4096, device="cuda"), real=Real(mods=("", ALL_MODS), steps=2000, batch=2048, device="cuda"), probe=Probe(m=4096, k=1024, n=512, overhead=5, device="cuda"), torchao_filter=True, pricing=pricing, quality=quality, logs=Logs(data=("movielens-1m", "movielens-100k", "open-bandit", "adult"), steps=2000, batch=2048, rows=2_000_000, device="cuda"), timing=Timing(), steps=steps, mods_latency=True)
