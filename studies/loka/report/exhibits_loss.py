"""Log-loss: training arms against bf16, the Mods, and predicted against measured changes of single products.

    losses(view)            # [Table, Curves, ...]; one sentence where nothing was trained

A change is relative to bf16's loss of the same seed; its interval is the 90% one that TOST reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from studies.loka.learning.tost import MARGIN, neutrality, relative_changes
from studies.loka.presets import MODS_2K
from studies.loka.report.findings_loss import by_seed, points_of, rank, runs, slope
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table
from suite.stats import mean_interval

ARMS = {
    "bf16-perturbed": "bf16, start perturbed by 2^-20", "ours": "our plan", "loka": "LoKA's rule", "naive": "tensorwise everywhere", "planted-bad": "E5M2 forward (planted bad)",
}  # fmt: skip
MODELS = ("model", "size", "mods", "data", "steps", "batch", "test_rows")
PLANNERS = {
    "bf16": "bf16", "torchao": "torchao, every linear layer", "torchao-filter": "torchao's automatic filter", "best-single": "best single recipe", "best-single-in-budget": "best single recipe in the budget",
    "loka": "LoKA's rule, mean of ratios", "loka-sums": "LoKA's rule, ratio of sums", "greedy": "ours, greedy", "ours": "ours", "oracle": "oracle: measured losses",
}  # fmt: skip
SHOWN = 1e5  # changes in thousandths of a percent
CALIBRATION = "Predicted and measured change of log-loss, one product in FP8 at a time"


def losses(view: View) -> list:
    rows = view.rows(measure="quality")
    parts = [*calibration(view), *planners(view), *logs(view), *arms(view, rows), *mods(rows)]
    return parts or [Prose(heading="Log-loss", text="NOT MEASURED HERE: no model was trained.")]


# ---- training arms -------------------------------------------------------------------------------------------------------------


def arms(view: View, rows: Sequence[Row]) -> list:
    lines, used = [], []
    for device, where in dict.fromkeys((r.device, tuple(r.params[k] for k in MODELS)) for r in rows):
        params = dict(zip(MODELS, where, strict=True))
        found = {arm: [r for r in of if r.device == device] for arm, of in runs(view, **params).items()}
        if not set(ARMS) & set(found) or not found.get("bf16"):
            continue
        used += [r for of in found.values() for r in of]
        base, losses = by_seed(found["bf16"]), {arm: by_seed(of) for arm, of in found.items()}
        name = f"{params['model']} {params['size']}"
        lines.append((name, device, "bf16", len(base), float(np.mean(list(base.values()))), "-", "-"))
        for arm in (a for a in ARMS if found.get(a)):
            lines.append((name, device, ARMS[arm], len(losses[arm]), float(np.nanmean(list(losses[arm].values()))), *_judged(arm, losses)))
    if not lines:
        return []
    columns = [Column(name=n) for n in ("model", "device", "arm", "seeds", "log-loss", "change", "within 0.02%?")]
    columns[5] = Column(name="change", unit="%")
    return [Table(title="Training in FP8 against bf16", columns=columns, rows=lines, sources=used,
                  note=f"Pairs of one seed: same start, same examples in the same order. Change: mean over pairs with its 90% interval; EQUIVALENT within {MARGIN:.2%} by two one-sided tests, "
                       "given the pairs that the pilot (bf16 against itself, perturbed) asks for and a planted-bad arm that the test rejects.")]  # fmt: skip


def _judged(arm: str, losses: dict) -> tuple:
    changes = [100 * c for c in relative_changes(losses[arm], losses["bf16"]).values() if math.isfinite(c)]
    if len(changes) < 2:
        return None, "fewer than two pairs"
    i = mean_interval(changes, 0.9)
    if arm in ("bf16-perturbed", "planted-bad"):
        return (i.value, i.low, i.high), "the pilot" if arm == "bf16-perturbed" else "must not be"
    n = neutrality(losses[arm], losses["bf16"], perturbed=losses.get("bf16-perturbed", {}), planted_bad=losses.get("planted-bad", {}))
    return (i.value, i.low, i.high), f"{n.verdict.value}: {n.why}"


def mods(rows: Sequence[Row]) -> list:
    """What each combination of LoKA's Mods does to the loss, all in bf16."""
    found = [r for r in rows if r.params["arm"] == "bf16"]
    lines, used = [], []
    for device, where in dict.fromkeys((r.device, tuple(r.params[k] for k in MODELS if k != "mods")) for r in found):
        same = [r for r in found if r.device == device and tuple(r.params[k] for k in MODELS if k != "mods") == where]
        of = {m: by_seed([r for r in same if r.params["mods"] == m]) for m in MODS_2K if any(r.params["mods"] == m for r in same)}
        if len(of) < 2 or "" not in of:
            continue
        used += same
        for name, runs_of in of.items():
            changes = [100 * c for c in relative_changes(runs_of, of[""]).values()]
            i = mean_interval(changes, 0.9) if name and len(changes) >= 2 else None
            lines.append((name or "as published", device, len(runs_of), float(np.mean(list(runs_of.values()))), (i.value, i.low, i.high) if i else "-"))
    names = ("Mods", "device", "seeds", "log-loss")
    return [Table(title="LoKA's Mods, trained in bf16", columns=[*(Column(name=n) for n in names), Column(name="change", unit="%")], rows=lines, sources=used)] if lines else []


# ---- predicted and measured ----------------------------------------------------------------------------------------------------


def calibration(view: View) -> list:
    rows = view.rows(measure="flips")
    points = [{**p, "loss": r.metrics["log_loss"]} for r in rows for p in points_of(r)]
    if not points:
        return []
    return [*_curve(points, rows), _by_recipe(points, rows)]


def _curve(points: Sequence[dict], rows: Sequence[Row]) -> list:
    """Means of measured changes over bins of predicted ones, each twice as wide as the one before; a bin's interval is over its products."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for p in points:
        if p["error"] > 0:
            bins.setdefault(math.floor(math.log2(p["error"] / p["loss"])), []).append((SHOWN * p["error"] / p["loss"], SHOWN * p["measured"] / p["loss"]))
    kept = {k: v for k, v in sorted(bins.items()) if np.mean([m for _, m in v]) > 0}
    if len(kept) < 2:
        return []
    x, y = ([float(np.mean([pair[i] for pair in v])) for v in kept.values()] for i in (0, 1))
    spread = [1.96 * float(np.std([m for _, m in v], ddof=1)) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for v in kept.values()]
    series = [Series(name="measured", x=x, y=y, low=[max(v - s, v / 100) for v, s in zip(y, spread, strict=True)], high=[v + s for v, s in zip(y, spread, strict=True)]),
              Series(name="as predicted", x=x, y=x)]  # fmt: skip
    return [Curves(title=CALIBRATION, x_label="predicted change (0.001% of log-loss)", y_label="measured change (0.001% of log-loss)", series=series, log_x=True, log_y=True, sources=rows,
                   note=f"{len(points)} products whose change is clear of its own error, averaged over factors of two; bars are 95% over the products of a bin.")]  # fmt: skip


def _by_recipe(points: Sequence[dict], rows: Sequence[Row]) -> Table:
    lines = []
    for name in ("all", *sorted({p["recipe"] for p in points})):
        group = [p for p in points if name in ("all", p["recipe"])]
        if len(group) >= 4:
            ranks = [rank(group, how) for how in ("error", "noise_to_signal")]
            lines.append((name, len(group), *(None if math.isnan(v) else v for v in (*ranks, slope(group)))))
    names = ("recipe", "products", "rank correlation of our price", "of noise over signal alone", "slope, log-log")
    return Table(title="How well the price ranks products", columns=[Column(name=n) for n in names], rows=lines, sources=rows,
                 note="Against the measured change of expected log-loss, products within two standard errors of 0 left out.")  # fmt: skip


def planners(view: View) -> list:
    """Every planner's plan of one training step: what it gains and what it costs."""
    out = []
    for row in view.rows(measure="planners"):
        found = {line["planner"]: line for line in row.record("planners")}
        lines = [(PLANNERS.get(name, name), f["products"], f["heads"], f["speedup"], _percent(f["predicted"]), tuple(100 * f[k] for k in ("measured", "low", "high")) if f["products"] else "-") for name, f in found.items()]
        kind = next(iter(found.values()))["time_kind"]
        columns = [Column(name="planner"), Column(name="products in FP8"), Column(name="heads"), Column(name=f"speed-up ({kind})", unit="x"), Column(name="predicted change", unit="%"), Column(name="measured change, forward", unit="%")]
        p = row.params
        out.append(Table(title=f"All planners side by side: wukong {p['training'].get('size', 'small')}, {row.device}", columns=columns, rows=lines, sources=[row],
                         note=f"A budget of {p['budget']:.2%} of log-loss for a training step of {p['examples']:,} examples. Speed-up: of the products alone, forward and backward, with quantising. "
                              + (f"Times are simulated by a roofline, for sites {p['width']} times as wide as the model's. " if kind == "simulated" else "")
                              + "Measured: expected log-loss under the known probabilities, forward products in the plan's recipes, 95% over paired rows."))  # fmt: skip
    return out


def _percent(share: float | None) -> float | str:
    return "not priced" if share is None else 100 * share


def logs(view: View) -> list:
    """Real logs, read with FP8 in every inner forward product."""
    rows, lines = view.rows(measure="real_change"), []
    for r in rows:
        more = r.record("more")
        change = tuple(100 * more[k] for k in ("loss_change", "loss_low", "loss_high"))
        lines.append((r.params["data"], r.params["recipe"], r.device, int(more["rows"]), r.metrics["auc"], change, 100 * more["detectable"], r.facts["verdict"]))
    columns = [Column(name=n, unit="%" if n in ("change", "detectable") else "") for n in ("log", "recipe", "device", "test rows", "AUC", "change", "detectable", "within 0.02%?")]
    return [Table(title="Real logs: a trained model with FP8 in every inner forward product", columns=columns, rows=lines, sources=rows,
                  note="Change of log-loss over labels with its 95% interval over users, where a log has them. Detectable: the change that these rows show with 80% power.")] if lines else []  # fmt: skip
