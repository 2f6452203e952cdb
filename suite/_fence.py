"""The fence around a cell: it runs no first-party code outside its code digest, and loads no tracker, searcher or plotter.

    own = loaded_by_the_harness()               # once, before the first cell
    with fenced(job, own):                      # modules that earlier cells loaded are out of sight
        outcome = refuse_foreign(job, execute(job, device="cpu"), own)

A warm worker has the modules of earlier cells in memory. They are hidden while another cell runs: if it reaches for one, the import
shows. It sees imports only; code that travels as text is not its business.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from suite.identity import FIRST_PARTY
from suite.job import Job, Outcome

# A measuring process must stay free of these, unless the cell declares them in needs.packages.
FORBIDDEN = ("mlflow", "optuna", "matplotlib", "ray", "pandas")


def loaded_by_the_harness() -> frozenset[str]:
    """Modules of the harness that are in memory before any cell ran."""
    return frozenset(name for name in sys.modules if name.split(".")[0] == "suite")


@contextlib.contextmanager
def fenced(job: Job, own: frozenset[str]) -> Iterator[None]:
    """While it is entered, first-party modules that are neither the harness's nor in the job's digest have to be imported anew."""
    hidden = {name: sys.modules[name] for name in _foreign(job, own)}
    for name, module in hidden.items():
        del sys.modules[name]
        _unbind(name, module)
    try:
        yield
    finally:
        for name, module in hidden.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, module)


def _unbind(name: str, module: ModuleType) -> None:
    """`from package import module` takes a package's attribute without asking sys.modules."""
    parent, _, child = name.rpartition(".")
    if getattr(sys.modules.get(parent), "__dict__", {}).get(child) is module:
        delattr(sys.modules[parent], child)


def _foreign(job: Job, own: frozenset[str]) -> list[str]:
    out = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if name.split(".")[0] in FIRST_PARTY and name not in own and name not in job.modules and path and not path.endswith("__init__.py"):
            out.append(name)
    return sorted(out)


def refuse_foreign(job: Job, outcome: Outcome, own: frozenset[str]) -> Outcome:
    """The outcome, or FAILED where the cell loaded what its digest does not know. Call inside `fenced`, or in a process of its own."""
    bad = sorted([*(p for p in FORBIDDEN if p in sys.modules and p not in job.needs["packages"]), *_foreign(job, own)])
    if outcome.status != "OK" or not bad:
        return outcome
    rule = f"a cell loads only code inside its digest and no tracker, searcher or plotter, got {bad}; import it statically, or declare it in needs.packages"
    return Outcome(status="FAILED", result=None, error=rule, duration_s=outcome.duration_s)


def declared_leftovers(job: Job) -> list[str]:
    """Packages that this cell may load and others may not: a worker that has one serves no other cell."""
    return [f"package {p}" for p in FORBIDDEN if p in sys.modules and p in job.needs["packages"]]
