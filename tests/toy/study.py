"""The toy study: every feature of the harness once, in seconds, without a GPU. The tests copy it to studies/toy."""

import random
from dataclasses import dataclass

from suite.cell import Cell, Needs
from suite.claims import Claim, Finding, View
from suite.search import Float, Search
from suite.study import Metric, Study

HERE = "studies.toy.cells"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which parts of the toy a preset runs."""

    answers: int = 3
    faults: tuple[str, ...] = ()
    long_steps: int = 0
    step_s: float = 0.02
    ranks: tuple[str, ...] = ()
    slow: int = 0
    slow_s: float = 0.2
    gpu: bool = False
    trials: int = 0
    order: int = 0  # shuffles the plan
    fresh: bool = False  # a process for each cell


def cells(config: Config) -> list[Cell]:
    needs = Needs(fresh_process=config.fresh)
    answers = [Cell(study="toy", measure=f"{HERE}:answer", params={"n": n}, label=f"answer {n}", needs=needs) for n in range(1, config.answers + 1)]
    out = [*answers]
    if answers:
        out.append(Cell(study="toy", measure=f"{HERE}:total", params={"of": len(answers)}, inputs={f"a{i}": a for i, a in enumerate(answers)}, label="total", needs=needs))
    out += [Cell(study="toy", measure=f"{HERE}:fault", params={"how": how}, needs=Needs(time_limit_s=1.0 if how == "hang" else 60.0), label=f"fault {how}") for how in config.faults]
    out += [Cell(study="toy", measure=f"{HERE}:slow", params={"n": n, "seconds": config.slow_s}, label=f"slow {n}") for n in range(config.slow)]
    if config.long_steps:
        out.append(Cell(study="toy", measure=f"{HERE}:long", params={"steps": config.long_steps, "step_s": config.step_s}, label="long"))
    out += [Cell(study="toy", measure=f"{HERE}:ranks", params={"how": how}, needs=Needs(ranks=2, time_limit_s=60 if how != "hanging rank" else 15), label=f"ranks {how}") for how in config.ranks]
    if config.gpu:
        out.append(Cell(study="toy", measure=f"{HERE}:on_gpu", needs=Needs(device="cuda"), label="on gpu"))
    if config.order:
        random.Random(config.order).shuffle(out)
    return out


def searches(config: Config) -> list[Search]:
    if not config.trials:
        return []
    return [Search(name="parabola", study="toy", space={"x": Float(low=0.0, high=1.0)}, sampler="random", sampler_seed=7, sampler_flags={}, direction="minimize",
                   objective="loss", budget=config.trials, parallelism=1, make_cell=objective_cell)]


def objective_cell(params: dict) -> Cell:
    return Cell(study="toy", measure=f"{HERE}:objective", params=params, label=f"x={params['x']:.6f}")


def squares_add_up(view: View) -> Finding | None:
    rows = view.rows(measure="total")
    if not rows:
        return None
    value = rows[0].metrics["sum"]
    return Finding(value=value, low=value, high=value, n=1, rows=rows)


def gpu_answers(view: View) -> Finding | None:
    rows = view.rows(measure="on_gpu")
    return Finding(value=1.0, low=1.0, high=1.0, n=1, rows=rows) if rows else None


STUDY = Study(
    name="toy",
    title="A toy",
    summary="Shows what the harness promises.",
    presets={"smoke": Config, "faults": lambda: Config(faults=("raise", "exit", "kill-once")), "long": lambda: Config(answers=0, long_steps=40, step_s=0.05),
             "ranks": lambda: Config(answers=0, ranks=("sum",)), "slow": lambda: Config(slow=12), "gpu": lambda: Config(gpu=True), "search": lambda: Config(answers=0, trials=6)},
    cells=cells,
    searches=searches,
    metrics=tuple(Metric(name=n) for n in ("square", "sum", "steps", "loss", "worst")),
    claims=(
        Claim(id="adds_up", statement="0+...+n adds up", target=4.0, bar=4.0, device="", test=squares_add_up, command="suite run toy"),
        Claim(id="gpu_answers", statement="a GPU answers", target=1.0, bar=1.0, test=gpu_answers, command="suite run toy --preset gpu"),
    ),
)
