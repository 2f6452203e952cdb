"""The safety map as tables: how many sites of each model are safe in each recipe, and which recipes each site may use.

    safety_maps(view)       # [Prose, Table, ...]: a table over all models, then one for each model and pass, by device

A cell of the map is one shape; sites that share it share its verdict. Emulated and measured maps are never mixed: each device has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from studies.loka.presets import MODELS, SYNTHETIC, Map
from studies.loka.questions import HEAD_DB, INNER_DB, site_shapes
from studies.loka.site import Site
from suite.claims import Row, View
from suite.exhibit import Column, Prose, Table

TITLE = "Safety map"
LETTERS = {"tensorwise": "T", "rowwise": "R", "rowwise-p2": "P", "blockwise": "B", "tensorwise-grad": "t", "rowwise-grad": "r", "blockwise-both": "b"}
FORWARD, BACKWARD = ("tensorwise", "rowwise", "rowwise-p2", "blockwise"), ("tensorwise-grad", "rowwise-grad", "rowwise", "rowwise-p2", "blockwise-both")
PASS_TITLES = {"forward": "forward products", "dgrad": "gradients of inputs", "wgrad": "gradients of weights"}
RULE = (
    "Safe: with 95% confidence 99 rows in 100 have the threshold's signal-to-noise ratio or more, against float64 of the same bf16 inputs. Inner "
    f"products: {INNER_DB} dB, at most twice the noise that E4M3's rounding leaves anywhere. Last layer: {HEAD_DB:g} dB, where its noise alone costs 0.02% of log-loss."
)
Key = tuple  # (pass, op, batch, r, s, c, threshold)


def key_of(row: Row) -> Key:
    p = row.params
    return p["which"], p["op"], p["batch"], p["r"], p["s"], p["c"], p["threshold_db"]


def safety_maps(view: View) -> list:
    rows = view.rows(measure="safety")
    if not rows:
        return [Prose(heading=TITLE, text="NOT MEASURED HERE: no product was held to float64.")]
    out: list = []
    for device in sorted({r.device for r in rows}):
        found = [r for r in rows if r.device == device]
        named = f"{TITLE}, {device}" if len({r.device for r in rows}) > 1 else TITLE
        out += _device(named, found)
    return out


def _device(title: str, rows: Sequence[Row]) -> list:
    by = {(key_of(r), r.params["distribution"]): r for r in rows}
    distributions = [d for d in (*SYNTHETIC, "real") if any(r.params["distribution"] == d for r in rows)]
    known = site_shapes(Map(models=MODELS))
    asked = {key: sites for key, sites in known.items() if any((key, d) in by for d in distributions)}
    parts = [_summary(title, asked, by, distributions, rows)]
    for which in PASS_TITLES:
        parts += [_model(title, model, which, asked, by, distributions) for model in _models(asked, which)]
    return parts


def _models(asked: Mapping[Key, Sequence], which: str) -> list[str]:
    return list(dict.fromkeys(model for key, sites in asked.items() if key[0] == which for model, _, _ in sites))


# ---- all models at a glance ----------------------------------------------------------------------------------------------------


def _summary(title: str, asked: Mapping[Key, Sequence], by: Mapping, distributions: Sequence[str], rows: Sequence[Row]) -> Table:
    """Sites that are safe, of those asked: model and recipe by distribution, forward."""
    which = "forward"
    lines = []
    for model in _models(asked, which):
        keys = [(key, sum(m == model for m, _, _ in sites)) for key, sites in asked.items() if key[0] == which]
        for recipe in FORWARD:
            lines.append((model, recipe, *(_share(keys, by, d, recipe) for d in distributions)))
    return Table(
        title=f"{title}: forward sites that are safe", columns=[Column(name="model"), Column(name="recipe"), *(Column(name=d) for d in distributions)], rows=lines,
        sources=[r for r in rows if r.params["which"] == which], note=RULE,
    )  # fmt: skip


def _share(keys: Iterable[tuple[Key, int]], by: Mapping, distribution: str, recipe: str) -> str | None:
    safe = total = 0
    for key, count in keys:
        if count and (row := by.get((key, distribution))):
            safe, total = safe + count * (_verdict(row, recipe) == "safe"), total + count
    return f"{safe} of {total}" if total else None


def _verdict(row: Row, recipe: str) -> str:
    return next(r["verdict"] for r in row.record("recipes") if r["recipe"] == recipe)


# ---- site by site --------------------------------------------------------------------------------------------------------------


def _model(title: str, model: str, which: str, asked: Mapping[Key, Sequence], by: Mapping, distributions: Sequence[str]) -> Table:
    lines, used = [], []
    recipes = FORWARD if which == "forward" else BACKWARD
    for key, sites in asked.items():
        own = [site for m, site, w in sites if m == model and w == which]
        if not own:
            continue
        cells = [by.get((key, d)) for d in distributions]
        used += [r for r in cells if r is not None]
        for name, count in families(own).items():
            lines.append((name, count, _product(key), *(_safe(r, recipes) for r in cells)))
    letters = ", ".join(f"{LETTERS[r]} {r}" for r in recipes)
    columns = [Column(name="site"), Column(name="of them"), Column(name="product"), *(Column(name=d) for d in distributions)]
    return Table(
        title=f"{title}: {model}, {PASS_TITLES[which]}", columns=columns, rows=lines, sources=used,
        note=f"The recipes that are safe there: {letters}; ? undecided. A product is rows x contracted x columns at a batch of {Map(models=MODELS).batch:,} examples.",
    )  # fmt: skip


def families(sites: Sequence[Site]) -> dict[str, int]:
    """Sites whose names differ only in numbers stand in one line, with their count."""
    out: dict[str, list[str]] = {}
    for site in sites:
        out.setdefault(re.sub(r"\d+", "*", site.name), []).append(site.name)
    return {(names[0] if len(names) == 1 else family): len(names) for family, names in out.items()}


def _product(key: Key) -> str:
    _, _, batch, r, s, c, _ = key
    return (f"{batch} of " if batch > 1 else "") + f"{r} x {c} x {s}"


def _safe(row: Row | None, recipes: Sequence[str]) -> str | None:
    if row is None:
        return None
    found = {r["recipe"]: r["verdict"] for r in row.record("recipes")}
    letters = [LETTERS[r] + ("?" if found[r] == "undecided" else "") for r in recipes if found[r] != "unsafe"]
    text = "all" if letters == [LETTERS[r] for r in recipes] else " ".join(letters) or "none"
    return text + ("†" if row.stale else "")
