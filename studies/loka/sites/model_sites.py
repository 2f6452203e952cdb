"""The sites of the recommenders at full size, as a table: planning a safety map builds and traces no model.

    model_sites("dlrm_v2", "mlperf", batch=8192)        # (Site(name="bottom.0:linear", op="linear", m=8192, ...), ...)
    python -m studies.loka.sites.model_sites                  # writes model_sites.json from the registry's trace; a test compares the two

The table is for one example; `grows` says what a batch multiplies: the rows of a product, or the number of products.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a site imports torch, and a study is listed without it
    from studies.loka.site import Site

TABLE = Path(__file__).with_name("model_sites.json")
FIELDS = ("name", "op", "grows", "batch", "m", "n", "k", "head", "trains_x")


def model_sites(model: str, size: str, batch: int) -> tuple[Site, ...]:
    """Sites of a training step of `batch` examples. Raises ValueError for a model that is not in the table."""
    table = _table()
    if f"{model} {size}" not in table:
        raise ValueError(f"a model of the table is one of {sorted(table)}, got {model!r} {size!r}; write it with python -m studies.loka.sites.model_sites")
    return tuple(_site(dict(zip(FIELDS, line, strict=True)), batch) for line in table[f"{model} {size}"])


@cache
def _table() -> dict[str, list[list]]:
    return json.loads(TABLE.read_text())


def _site(line: dict, batch: int) -> Site:
    from studies.loka.site import Site

    grows = line.pop("grows")
    return Site(**{**line, grows: line[grows] * batch})


def traced(model: str, size: str) -> list[list]:
    """The model's lines of the table, by tracing it with one example and with two. On the meta device: it takes no memory."""
    import torch

    from studies.loka.sites.registry import trace
    from studies.models.recommenders.catalogue import MODELS, PUBLISHED
    from studies.models.recommenders.dlrm import DLRM_SIZES
    from studies.models.recommenders.hstu import HSTU_SIZES
    from studies.models.recommenders.rankmixer import RANKMIXER_SIZES
    from studies.models.recommenders.wukong import WUKONG_SIZES

    configs = {"dlrm_v2": DLRM_SIZES, "wukong": WUKONG_SIZES, "hstu": HSTU_SIZES, "rankmixer": RANKMIXER_SIZES}
    kind = type(MODELS[model](PUBLISHED[model], "small"))
    with torch.device("meta"):
        built = kind(configs[model][size], PUBLISHED[model])
    one, two = (trace(built, *(x.to("meta") for x in built.example(b, 0))).sites for b in (1, 2))
    lines = []
    for a, b in zip(one, two, strict=True):
        grows = "m" if b.m == 2 * a.m else "batch"
        assert getattr(b, grows) == 2 * getattr(a, grows) and (a.name, a.n, a.k) == (b.name, b.n, b.k), f"a batch multiplies the rows or the products, got {a} and {b}"
        lines.append([a.name, a.op, grows, a.batch, a.m, a.n, a.k, a.head, a.trains_x])
    return lines


def main() -> None:
    from studies.models.recommenders.catalogue import SIZES

    table = {f"{model} {size}": traced(model, size) for model, sizes in SIZES.items() for size in sizes}
    lines = [f' "{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in sites) + "\n ]" for name, sites in table.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
