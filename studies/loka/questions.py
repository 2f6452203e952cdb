"""The cells of the LoKA study: a config becomes the list of questions that it asks.

    questions(presets.cpu())        # [Cell, ...] in the order in which they run

Importing it imports neither torch nor kernels: planning takes no second.
"""

from __future__ import annotations

from studies.loka.model_sites import model_sites
from studies.loka.presets import Config, Map
from studies.loka.site import Site
from suite.cell import Cell, Needs

STUDY, HERE = "loka", "studies.loka"
# of the 1st percentile of rows, in dB; safety_map derives them, and a test holds these to its
INNER_DB, HEAD_DB = 25.6, 32.0


def questions(config: Config) -> list[Cell]:
    return [*(_map(config.map, config.seed) if config.map else [])]


def site_shapes(m: Map) -> dict[tuple, list[tuple[str, Site, str]]]:
    """(pass, op, batch, r, s, c, threshold) -> the (model, site, pass) that ask it: sites of one shape share a cell."""
    out: dict[tuple, list[tuple[str, Site, str]]] = {}
    for model, size in m.models:
        for site in model_sites(model, size, m.batch):
            for which in (p for p in site.passes if p in m.passes):
                out.setdefault(asked(site, which), []).append((f"{model} {size}", site, which))
    return out


def asked(site: Site, which: str) -> tuple:
    """What the map asks of a site and pass."""
    g = site.gemm(which)
    return which, site.op, g.batch, g.r, g.s, g.c, HEAD_DB if site.head and which == "forward" else INNER_DB


def _map(m: Map, seed: int) -> list[Cell]:
    shapes = list(site_shapes(m))
    return [safety(shape, d, m, seed) for shape in shapes[: m.first or len(shapes)] for d in m.distributions]


def safety(shape: tuple, distribution: str, m: Map, seed: int) -> Cell:
    which, op, batch, r, s, c, threshold = shape
    params = {"which": which, "op": op, "batch": batch, "r": r, "s": s, "c": c, "distribution": distribution, "rows": m.rows, "contracted": m.contracted,
              "threshold_db": threshold}  # fmt: skip
    sizes = f"{batch}x{r}x{c}x{s}" if batch > 1 else f"{r}x{c}x{s}"
    return Cell(study=STUDY, measure=f"{HERE}.safety_map:safety", params=params, seed=seed, needs=Needs(device=m.device, memory_gib=1),
                label=f"safety {which} {op} {sizes} {distribution}{'' if threshold == INNER_DB else ' logit'}")  # fmt: skip
