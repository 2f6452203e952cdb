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
INNER_DB, GRADIENT_DB, HEAD_DB = 25.6, 21.6, 32.0
FEWEST_ROWS = 16  # of a product: below, FP8 would multiply padding


def questions(config: Config) -> list[Cell]:
    return [*(_map(config.map, config.seed) if config.map else [])]


def site_questions(m: Map) -> dict[tuple, list[tuple[str, Site, str]]]:
    """What is asked -> the (model, site, pass) that ask it: sites whose cut sizes agree share a cell."""
    out: dict[tuple, list[tuple[str, Site, str]]] = {}
    for model, size in m.models:
        for site in model_sites(model, size, m.batch):
            for which in (p for p in site.passes if p in m.passes and site.gemm(p).r >= FEWEST_ROWS):
                out.setdefault(asked(site, which, m), []).append((f"{model} {size}", site, which))
    return out


def asked(site: Site, which: str, m: Map) -> tuple:
    """(pass, op, products, rows, contracted, threshold): a site's sizes, cut to those of the map. Columns do not matter."""
    g = site.gemm(which)
    rows = min(g.r, m.rows)
    threshold = GRADIENT_DB if which != "forward" else HEAD_DB if site.head else INNER_DB
    return which, site.op, min(g.batch, max(1, m.rows // rows)), rows, min(g.c, m.contracted), threshold


def _map(m: Map, seed: int) -> list[Cell]:
    asked_by = list(site_questions(m))
    return [safety(what, d, m, seed) for what in asked_by[: m.first or len(asked_by)] for d in m.distributions]


def safety(what: tuple, distribution: str, m: Map, seed: int) -> Cell:
    which, op, products, rows, contracted, threshold = what
    params = {"which": which, "op": op, "products": products, "rows": rows, "contracted": contracted, "distribution": distribution, "threshold_db": threshold}
    sizes = f"{products} x {rows} rows x {contracted}" if products > 1 else f"{rows} rows x {contracted}"
    return Cell(study=STUDY, measure=f"{HERE}.safety_map:safety", params=params, seed=seed, needs=Needs(device=m.device, memory_gib=1),
                label=f"safety {which} {op} {sizes} {distribution}{' logit' if threshold == HEAD_DB else ''}")  # fmt: skip
