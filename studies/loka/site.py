"""Site: one matrix product of a model's forward pass, and with it the three products of training. A plan says in which recipe each runs.

    site.gemm("wgrad")                        # Gemm(batch=1, r=1024, s=512, c=8192): the product of that pass
    plan.recipe("interaction.0.fmb.0:linear", "forward").name

Products are named as everywhere here (kernels.fp8.recipes): out_RS = a_RC b_SC^T. A plan is a readable JSON file with a version; what it
does not name runs in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kernels.fp8.recipes import PASSES, GemmRecipe, gemm

__all__ = ["Gemm", "Plan", "Site", "read_plan", "write_plan"]

VERSION = 1
BASE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """`batch` products out_RS = a_RC b_SC^T."""

    batch: int
    r: int
    s: int
    c: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.r * self.s * self.c


@dataclass(frozen=True, kw_only=True)
class Site:
    """One product y = x w^T of the forward pass, `batch` of them at once. `w` is a parameter of a linear layer, or a second activation."""

    name: str  # "<module path>:<op>", and "#2" where the module has a second one
    op: str  # "linear": w is a parameter (F.linear, addmm, x @ parameter); "bmm": both operands are activations (matmul, bmm, einsum)
    batch: int
    m: int  # rows of x
    n: int  # rows of w
    k: int
    producer: tuple[str, ...] = ()  # operators in front that could be fused with quantising x, nearest last: ("layernorm", "silu")
    consumer: tuple[str, ...] = ()  # operators behind that could run in the product's epilogue, nearest first: ("blocknorm", "hardswish")
    head: bool = False  # its output is the logit, up to elementwise operators
    trains_x: bool = True  # x needs a gradient: it has a dgrad

    def gemm(self, which: str) -> Gemm:
        """The product of a pass of PASSES."""
        sizes = {"forward": (self.m, self.n, self.k), "dgrad": (self.m, self.k, self.n), "wgrad": (self.n, self.k, self.m)}
        if which not in sizes:
            raise ValueError(f"a pass is one of {PASSES}, got {which!r}")
        r, s, c = sizes[which]
        return Gemm(batch=self.batch, r=r, s=s, c=c)

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(p for p in PASSES if p != "dgrad" or self.trains_x)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Recipes by site and pass; `fused` names the sites whose producer is fused with quantising."""

    recipes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # site -> pass -> a product's recipe by name
    fused: tuple[str, ...] = ()
    model: str = ""
    made_by: str = ""  # the rule or allocator, with its threshold or budget
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"this code reads plans of version {VERSION}, got {self.version}; make the plan again")
        for site, passes in self.recipes.items():
            for which, name in passes.items():
                if which not in PASSES:
                    raise ValueError(f"a pass is one of {PASSES}, got {which!r} at {site}")
                gemm(name)
        if unknown := [s for s in self.fused if s not in self.recipes]:
            raise ValueError(f"a fused site has a recipe, got none for {unknown}")

    def recipe(self, site: str, which: str) -> GemmRecipe:
        return gemm(self.recipes.get(site, {}).get(which, BASE))


def write_plan(plan: Plan, path: Path | str) -> None:
    """Writes `plan` as JSON: keys sorted, one site a line."""
    Path(path).write_text(json.dumps(asdict(plan), indent=1, sort_keys=True) + "\n")


def read_plan(path: Path | str) -> Plan:
    """Raises ValueError for what is no plan, naming the file and what to do."""
    try:
        found = json.loads(Path(path).read_text())
        return Plan(**{**found, "fused": tuple(found.get("fused", ()))})
    except (json.JSONDecodeError, TypeError, AttributeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a plan that this code reads: {error}; write one with write_plan") from error
