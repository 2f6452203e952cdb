"""What the tests of searches share: a toy search, bundles that are three fields, and running one to its end."""

from dataclasses import dataclass, field, replace

import pytest

from suite.cell import Cell
from suite.search import Choice, Float, Int, Search

FLAGS = {
    "random": {},
    "grid": {},
    "tpe": {"constant_liar": True, "group": False, "multivariate": True, "n_ei_candidates": 8, "n_startup_trials": 4},
    "gp": {"deterministic_objective": True, "n_startup_trials": 4},
    "nsga2": {"crossover_prob": 0.9, "mutation_prob": None, "population_size": 4, "swapping_prob": 0.5},
}
SPACES = {"grid": {"x": Int(low=0, high=4), "kind": Choice(options=("a", "b"))}}
SPACE = {"x": Float(low=0.0, high=1.0), "n": Int(low=1, high=64, log=True), "kind": Choice(options=("a", "b"))}
BUDGET = 10


@dataclass
class FakeBundle:
    """What a search reads of a bundle."""

    status: str = "OK"
    metrics: dict = field(default_factory=dict)
    id: str = "b" * 64


def cell_of(params):
    return Cell(study="toy", measure="studies.toy.cells:objective", params=params)


def toy(sampler="random", **changes):
    return replace(Search(name="toy", study="toy", space=SPACES.get(sampler, SPACE), sampler=sampler, sampler_seed=5, sampler_flags=FLAGS[sampler], direction="minimize",
                          objective="loss", budget=BUDGET, make_cell=cell_of), **changes)  # fmt: skip


def measure(cell):
    return FakeBundle(metrics={"loss": (cell.params["x"] - 0.25) ** 2 + cell.params.get("n", 0) / 100})


def drain(run, answer=measure, most=10_000):
    """Run the search to its end, or until `most` cells were measured; returns how many were."""
    done = 0
    while not run.finished and done < most:
        for _, cell in run.next_cells()[: most - done]:
            run.tell(cell.point, answer(cell))
            done += 1
    return done


def params(run):
    return [dict(t.params) for t in run.trials() if t.point]


@pytest.fixture(autouse=True)
def no_storage_from_outside(monkeypatch):
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)
