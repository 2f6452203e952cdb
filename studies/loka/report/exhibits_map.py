"""The safety map as tables: how many sites of each model are safe in each recipe, and which recipes each site may use.

    safety_maps(view)       # [Prose, Table, ...]: a table over all models, then one for each model and pass, by device
    real(view)              # the same for models trained here, by their own activations and gradients

A cell of the map is one shape; sites that share it share its verdict. Emulated and measured maps are never mixed: each device has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from studies.loka.presets import SYNTHETIC, Map, cpu, gpu, smoke
from studies.loka.questions import GRADIENT_DB, HEAD_DB, INNER_DB, site_questions
from suite.claims import Row, View
from suite.exhibit import Column, Matrix, MatrixCell, Prose, Table

if TYPE_CHECKING:  # a site imports torch, and a study is listed without it
    from studies.loka.site import Site

TITLE = "Safety map"
LETTERS = {"tensorwise": "T", "rowwise": "R", "rowwise-p2": "P", "blockwise": "B", "tensorwise-grad": "t", "rowwise-grad": "r", "blockwise-both": "b"}
FORWARD, BACKWARD = ("tensorwise", "rowwise", "rowwise-p2", "blockwise"), ("tensorwise-grad", "rowwise-grad", "rowwise", "rowwise-p2", "blockwise-both")
PASS_TITLES = {"forward": "forward products", "dgrad": "gradients of inputs", "wgrad": "gradients of weights"}
RULE = (
    "Safe: with 95% confidence 99 rows in 100 have the threshold's signal-to-noise ratio or more, against float64 of the same bf16 inputs. Inner "
    f"products: {INNER_DB} dB, twice the noise that E4M3's rounding leaves anywhere. Gradients: {GRADIENT_DB} dB, under 1% of a gradient's power. "
    f"Last layer: {HEAD_DB:g} dB, where its noise alone costs 0.02% of log-loss."
)
Key = tuple  # (pass, op, products, rows, contracted, threshold)


def key_of(row: Row) -> Key:
    return tuple(row.params[k] for k in ("which", "op", "products", "rows", "contracted", "threshold_db"))


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
    distributions = [d for d in SYNTHETIC if any(r.params["distribution"] == d for r in rows)]
    m, known = max(((m, site_questions(m)) for m in _maps()), key=lambda item: sum(key in item[1] for key, _ in by))
    asked = {key: sites for key, sites in known.items() if any((key, d) in by for d in distributions)}
    if not any(key[0] == "forward" for key in asked):
        return [Prose(heading=title, text=f"{len(rows)} cells belong to no forward site of the presets' maps; another preset asked them.")]
    parts = [_summary(title, asked, by, distributions, rows)]
    for which in PASS_TITLES:
        parts += [_model(title, model, which, asked, by, distributions, m) for model in _models(asked, which)]
    return parts


def _maps() -> list[Map]:
    """The maps of the presets: they know which sites share a cell."""
    return [config.map for config in (cpu(), gpu(), smoke()) if config.map]


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


LEGEND = {"equal": "every site safe", "partial": "safe at some (count)", "differs": "safe nowhere", "not_claimed": "not asked"}


def picture(view: View) -> list:
    """The summary as pictures, one a device: what a reader sees first."""
    return [_picture(t) for t in safety_maps(view) if isinstance(t, Table) and t.title.endswith(": forward sites that are safe")]


def _picture(table: Table) -> Matrix:
    """Recipes of models by distribution; the count of sites stands in a cell."""
    device = table.sources[0].device
    return Matrix(
        title="Which forward products of recommenders are safe in FP8?", row_labels=[f"{line[0].split()[0]}: {line[1]}" for line in table.rows],
        column_labels=[f"{device}, {c.name}" for c in table.columns[2:]], cells=[[_counted(text) for text in line[2:]] for line in table.rows],
        note=table.note + " The last layer, the logit, is among the sites of each model and never safe.", sources=table.sources, legend=LEGEND, counted="safe",
    )  # fmt: skip


def _counted(text: str | None) -> MatrixCell:
    """All but the logit counts as every site."""
    if text is None:
        return MatrixCell(state="not_measured")
    safe, total = (int(n) for n in text.split(" of "))
    return MatrixCell(state="equal" if safe >= total - 1 else "partial" if safe else "differs", text=f"{safe}/{total}")


def _share(keys: Iterable[tuple[Key, int]], by: Mapping, distribution: str, recipe: str) -> str | None:
    safe = total = 0
    for key, count in keys:
        if count and (row := by.get((key, distribution))):
            safe, total = safe + count * (_verdict(row, recipe) == "safe"), total + count
    return f"{safe} of {total}" if total else None


def _verdict(row: Row, recipe: str) -> str:
    return next(r["verdict"] for r in row.record("recipes") if r["recipe"] == recipe)


# ---- site by site --------------------------------------------------------------------------------------------------------------


def _model(title: str, model: str, which: str, asked: Mapping[Key, Sequence], by: Mapping, distributions: Sequence[str], m: Map) -> Table:
    lines, used = [], []
    recipes = FORWARD if which == "forward" else BACKWARD
    for key, sites in asked.items():
        own = [site for name, site, w in sites if name == model and w == which]
        cells = [by.get((key, d)) for d in distributions]
        used += [r for r in cells if r is not None and own]
        lines += [(_short(name, count), size, *(_safe(r, recipes) for r in cells)) for (name, size), count in families(own).items()]
    letters = ", ".join(f"{LETTERS[r]} {r}" for r in recipes)
    columns = [Column(name="site"), Column(name="N x K"), *(Column(name=d) for d in distributions)]
    return Table(
        title=f"{title}: {model}, {PASS_TITLES[which]}", columns=columns, rows=lines, sources=used,
        note=f"The recipes that are safe there: {letters}; ? undecided. N x K: outputs and inputs. At a batch of {m.batch:,} "
        f"examples; at most {m.rows} rows and {m.contracted:,} contracted elements of a draw are computed, and sites of equal cut sizes share a cell.",
    )  # fmt: skip


def families(sites: Sequence[Site]) -> dict[tuple[str, str], int]:
    """(name, second operand) -> how many: sites of one size whose names differ only in numbers stand in one line."""
    out: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        out.setdefault((re.sub(r"\d+", "*", site.name), _second_operand(site)), []).append(site.name)
    return {(names[0] if len(names) == 1 else family, size): len(names) for (family, size), names in out.items()}


def _short(name: str, count: int) -> str:
    """A linear layer needs no word for what it is."""
    return name.removesuffix(":linear") + (f" ({count})" if count > 1 else "")


def _second_operand(site: Site) -> str:
    """Outputs and inputs of the forward product's second operand, a weight mostly; spaces that do not break."""
    return f"{site.n} x {site.k}".replace(" ", "\u00a0")


def _safe(row: Row | None, recipes: Sequence[str]) -> str | None:
    if row is None:
        return None
    return _letters({r["recipe"]: r["verdict"] for r in row.record("recipes")}, recipes) + ("†" if row.stale else "")


def _letters(found: Mapping[str, str], recipes: Sequence[str]) -> str:
    letters = [LETTERS[r] + ("?" if found[r] == "undecided" else "") for r in recipes if found[r] != "unsafe"]
    return "all" if letters == [LETTERS[r] for r in recipes] else " ".join(letters) or "none"


# ---- torchao's filter ----------------------------------------------------------------------------------------------------------


def torchao_filter(view: View) -> list:
    rows = view.rows(measure="torchao_filter")[:1]
    found = [f for r in rows for f in r.record("filter")]
    lines = [(f["model"], f["products"], f["seen"], *(f["converted"][r] for r in ("tensorwise", "rowwise")), *(100 * f["flops_share"][r] for r in ("tensorwise", "rowwise"))) for f in found]
    names = ("model", "products", "seen as nn.Linear", "converted, tensorwise", "converted, rowwise", "of all FLOPs, tensorwise", "of all FLOPs, rowwise")
    columns = [Column(name=n, unit="%" if n.startswith("of all") else "") for n in names]
    note = "By its thresholds on inputs and outputs of a layer (torchao 0.18.0). MLPerf's cross network reads raw parameters, and products of two activations are no layer."
    return [Table(title="What torchao's automatic filter converts", columns=columns, rows=lines, sources=rows, note=note)] if lines else []


# ---- models trained here -------------------------------------------------------------------------------------------------------


def real(view: View) -> list:
    """Site by site: which recipes are safe for the activations, weights and gradients of a trained model."""
    rows, out = view.rows(measure="captured"), []
    for r in rows:
        sites = r.record("sites")
        names = list(dict.fromkeys(s["site"] for s in sites))
        of = {(s["site"], s["which"]): s for s in sites}
        lines = [(name + (" (logit)" if of[name, "forward"]["head"] else ""), *(_cell(of.get((name, which)), which) for which in PASS_TITLES), *_worst(of[name, "forward"])) for name in names]
        columns = [Column(name="site"), *(Column(name=PASS_TITLES[w]) for w in PASS_TITLES), Column(name="tensorwise", unit="dB"), Column(name="rowwise", unit="dB")]
        p = r.params
        title = f"Real activations: {p['model']} {p['size']}{' with ' + p['mods'].replace('+', ', ') if p['mods'] else ''}, {r.device}"
        letters = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
        out.append(Table(title=title, columns=columns, rows=lines, sources=[r],
                         note=f"Trained here for {p['steps']} steps of {p['batch']:,} planted examples. The recipes that are safe: {letters}; ? undecided. The last columns: 1st percentile "
                              "over rows, forward. Products of fewer than 16 rows stay in bf16."))  # fmt: skip
    return out


def _cell(site: Mapping | None, which: str) -> str:
    if site is None:
        return "-"
    return _letters({v["recipe"]: v["verdict"] for v in site["recipes"]}, FORWARD if which == "forward" else BACKWARD)


def _worst(site: Mapping) -> tuple[float, float]:
    found = {v["recipe"]: v["p01_db"] for v in site["recipes"]}
    return found["tensorwise"], found["rowwise"]
