"""Training: searches by arm, what pruners do to a pack, live makespans, quality by seeds, and exactness.

    trainings(view)         # [Table, Curves, ...]; one sentence where nothing was trained
    exactness(view)         # the table that stands first

A curve is the mean over seeds of the best score found so far, by device seconds, with the Student-t interval of the mean; it starts when every seed has found something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.plora.report.exhibits_speed import Number, times
from suite.claims import Row, View
from suite.exhibit import Column, Curves, Prose, Series, Table
from suite.stats import mean_interval

POINTS = 12  # of a curve


def trainings(view: View) -> list:
    parts = [*searches(view), *pruners(view), *makespans(view), *quality(view)]
    return parts or [Prose(heading="Training", text="NOT MEASURED HERE: no search was run and no adapter trained.")]


def interval(values: Sequence[float]) -> Number:
    """Mean with its interval over two or more, plain for one, None for none."""
    if len(values) < 2:
        return values[0] if values else None
    i = mean_interval(values)
    return i.value, i.low, i.high


# ---- searches ------------------------------------------------------------------------------------------------------------------


def searches(view: View) -> list:
    out: list = []
    for measure, name in (("replayed", "replayed on a recorded grid"), ("replayed_published", "replayed on the grid that a GPU recorded"), ("live", "live")):
        rows = [r for r in view.rows(measure=measure) if "device_s" in r.metrics]
        for (device, trials, slots), found in _by_pack(rows).items():
            title = f"Searches {name}, {device}: {trials} trials, {slots} slots"
            for sampler in dict.fromkeys(r.params["sampler"] for r in found):
                same = [r for r in found if r.params["sampler"] == sampler]
                at = _seconds(same)
                curves = [c for (_, arm), of in _by_arm(same).items() if (c := _curve(arm, of, at))]
                out += [Curves(title=f"{title}, {sampler}", x_label="device seconds", y_label="best validation score so far", series=curves, log_x=True, sources=same,
                               note="Mean over seeds and its 95% interval. A score is taken when its trial is finished, so a pack's first answer comes late and then many come at once.")] if curves else []  # fmt: skip
            out.append(_arms(title, found))
    return out


def _by_pack(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    out: dict[tuple, list[Row]] = {}
    for r in rows:
        out.setdefault((r.device, r.params["trials"], len(r.params["slots"])), []).append(r)
    return out


def _by_arm(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    out: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        out.setdefault((r.params["sampler"], r.params["arm"]), []).append(r)
    return out


def _seconds(rows: Sequence[Row]) -> list[float]:
    """Where the curves of a figure are read: POINTS from the first answer of any search to the end of the longest, evenly in the logarithm."""
    first, last = min(r.record("progress")[0]["device_s"] for r in rows if r.record("progress")), max(r.metrics["device_s"] for r in rows)
    return [last] if last <= first else [first * (last / first) ** (i / (POINTS - 1)) for i in range(POINTS)]


def _curve(arm: str, rows: Sequence[Row], at: Sequence[float]) -> Series | None:
    """From when every seed has found something, to when the longest search of the arm is over."""
    found = [[(p["device_s"], p["score"]) for p in r.record("progress")] for r in rows]
    begin, end = max((f[0][0] for f in found if f), default=math.inf), max(r.metrics["device_s"] for r in rows)
    within = [t for t in at if begin <= t * (1 + 1e-9) <= end * (1 + 1e-6)] or [t for t in at if t * (1 + 1e-9) >= begin][:1]
    if not all(found) or not within:
        return None
    means = [interval([_best(f, t) for f in found]) for t in within]
    values = [m if isinstance(m, tuple) else (m, m, m) for m in means]
    return Series(name=arm, x=within, y=[v[0] for v in values], low=[v[1] for v in values], high=[v[2] for v in values])


def _best(progress: Sequence[tuple[float, float]], seconds: float) -> float:
    """The score that the search had by then."""
    return max((score for s, score in progress if s <= seconds * (1 + 1e-9)), default=progress[0][1])


def _arms(title: str, rows: Sequence[Row]) -> Table:
    base = {(sampler, r.seed): r.metrics["device_s"] for (sampler, arm), same in _by_arm(rows).items() if arm == "sequential+prune" for r in same}
    lines = []
    for (sampler, arm), same in _by_arm(rows).items():
        faster = times([math.log(base[sampler, r.seed] / r.metrics["device_s"]) for r in same if (sampler, r.seed) in base])
        numbers = (interval([r.metrics[n] for r in same if n in r.metrics]) for n in ("best_score", "test_score", "device_s", "trained", "pruned"))
        lines.append((sampler, arm, *numbers, faster, len(same), same[0].kind))
    columns = [Column(name="sampler"), Column(name="arm"), Column(name="best validation score"), Column(name="its test score"), Column(name="device", unit="s"), Column(name="trained"), Column(name="pruned"),
               Column(name="over sequential+prune", unit="x"), Column(name="seeds"), Column(name="kind")]  # fmt: skip
    return Table(title=f"{title}, by arm", columns=columns, rows=lines, sources=rows, note="Means over seeds with 95% intervals; ratios of seconds are paired by seed. Where step times were recorded on a CPU a pack runs slot by slot, and packing gains nothing.")


def pruners(view: View) -> list:
    rows = view.rows(measure="pruners")[:1]
    lines = [(x["pruner"], x["order"], x["pruned"], "yes" if x["best_pruned"] else "no", "no" if x["order_free"] else "yes") for r in rows for x in r.record("pruners")]
    columns = [Column(name=n) for n in ("pruner", "order in which trials report", "pruned", "the best one pruned", "depends on the order")]
    note = f"{rows[0].params['trials']} trials in lock-step, trial i always better than trial i - 1; Optuna {rows[0].facts.get('optuna', '')}." if rows else ""
    return [Table(title="What pruners do to a pack", columns=columns, rows=lines, sources=rows, note=note)] if lines else []


# ---- makespans and quality -----------------------------------------------------------------------------------------------------


def makespans(view: View) -> list:
    rows = [r for r in view.rows(measure="makespan_live") if "makespan_speedup" in r.metrics]
    lines = []
    for (device, gpus), same in _by_gpus(rows).items():
        ratio = times([math.log(r.metrics["makespan_speedup"]) for r in same])
        lines.append((int(gpus), same[0].params["configurations"], interval([r.metrics["makespan_s"] for r in same]), ratio, interval([r.metrics["tokens_per_s"] for r in same]), len(same), device))
    columns = [Column(name="GPUs"), Column(name="adapters"), Column(name="makespan, packed", unit="s"), Column(name="over one captured adapter after another", unit="x"), Column(name="real tokens", unit="/s"), Column(name="runs"), Column(name="device")]
    return [Table(title="Live makespans on Banking77 and CLINC150", columns=columns, rows=lines, sources=rows, note="Makespan: wall clock from the first admission to the last evaluation. The ratio leaves out the time in which packs are built and captured, of which adapters alone need many.")] if lines else []


def _by_gpus(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    out: dict[tuple[str, float], list[Row]] = {}
    for r in rows:
        out.setdefault((r.device, r.metrics["gpus"]), []).append(r)
    return out


def quality(view: View) -> list:
    out: list = []
    for row in view.rows(measure="quality"):
        lines = [(_adapter(x["adapter"]), *(None if x[part] is None else (x[part][1], x[part][0], x[part][2]) for part in ("validation", "test"))) for x in row.record("quality")]
        more = row.record("more") if "more.json" in row.files else {}
        at = ", ".join(f"{name} {more[key]:.3f}" for key, name in (("base_score", "the untrained base"), ("chance", "the most frequent class")) if more.get(key) is not None)
        out.append(Table(title=f"Quality, {row.params['model']} on {row.params['task']['name']}", columns=[Column(name="adapter"), Column(name="validation"), Column(name="test")], rows=lines, sources=[row],
                         note=f"Means over {row.params['seeds']} seeds with 95% intervals; chosen on validation, reported on test. Test scores: {at or 'of no other'}. SmolLM2's weights are 4-bit ones: never compare with published scores."))  # fmt: skip
    out += _pairs(view, "winner", "The winner trained again", "packed with neighbours", "alone", "packed", "alone")
    return out + _pairs(view, "against_peft", "The same adapter by PEFT", "ours", "PEFT", "ours", "peft")


def _pairs(view: View, measure: str, title: str, ours: str, theirs: str, a: str, b: str) -> list:
    rows = view.rows(measure=measure)
    lines = [(r.params["model"], r.params["task"]["name"], interval([x[a] for x in r.record("seeds")]), interval([x[b] for x in r.record("seeds")]), interval([x[a] - x[b] for x in r.record("seeds")]), len(r.record("seeds")), r.device) for r in rows]
    columns = [Column(name="model"), Column(name="set"), Column(name=ours), Column(name=theirs), Column(name="difference"), Column(name="seeds"), Column(name="device")]
    return [Table(title=title, columns=columns, rows=lines, sources=rows, note="Test scores; pairs of one seed.")] if lines else []


def _adapter(spec: dict) -> str:
    return f"rank {spec['rank']}, alpha {spec['alpha']:g}, rate {spec['learning_rate']:g}, batch {spec['batch']}"


# ---- exactness -----------------------------------------------------------------------------------------------------------------


def exactness(view: View) -> list:
    """Every case of the cells of exactness: what was compared, in which mode, and what came out."""
    rows = [r for m in ("packed_equals_separate", "isolation", "noise_floor") for r in view.rows(measure=m)]
    lines = []
    for r in rows:
        for case in r.record("cases"):
            lines.append((case["case"], r.params["model"], case.get("mode", ""), "equal" if case["equal"] else "differs" if case["equal"] is not None else "measured", case.get("gap"), r.device))
    same = view.rows(measure="same_adapters")
    lines += [(f"{r.params['configurations']} adapters on {r.params['task']['name']}, packed and alone", r.params["model"], "deterministic", f"{r.metrics['equal_share']:.0%} equal", None, r.device) for r in same]
    columns = [Column(name=n) for n in ("case", "model", "mode", "bits", "largest gap", "device")]
    return [Table(title="Exactness: an adapter packed and alone", columns=columns, rows=lines, sources=[*rows, *same])] if lines else []
