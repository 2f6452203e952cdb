"""The probe: predictions held to the truth, beside the paper's Gaussian probe; when it stops; what it costs.

    probes(view)            # [Table, ...]; one sentence where it was not run
"""

from __future__ import annotations

from studies.loka.report.exhibits_speed import times_faster
from studies.loka.report.findings_probe import laws
from suite.claims import View
from suite.exhibit import Column, Prose, Table


def probes(view: View) -> list:
    return [*validation(view), *surrogates(view), *mere(view), *stopping(view), *overhead(view)] or [Prose(heading="The probe", text="NOT MEASURED HERE: no prediction was held to the truth.")]


def validation(view: View) -> list:
    """By distribution: the true tail, and how far predictions from one sketch are off over recipes and passes."""
    lines, rows = [], view.rows(measure="validation")
    for r in rows:
        found = r.record("recipes")
        of = {(f["which"], f["recipe"]): f for f in found}
        tail = [of["forward", name] for name in ("tensorwise", "rowwise")]
        gaps = [max(abs(f["p01_gap_db"]) for f in found if f["which"] == which) for which in ("forward", "dgrad", "wgrad")]
        lines.append((r.params["distribution"], r.device, *(x for f in tail for x in (f["true_p01_db"], f["predicted_p01_db"])), *gaps))
    names = ("inputs", "device", "tensorwise, true", "tensorwise, predicted", "rowwise, true", "rowwise, predicted", "largest gap, forward", "largest gap, dgrad", "largest gap, wgrad")
    columns = [Column(name=n, unit="" if n in ("inputs", "device") else "dB") for n in names]
    note = "1st percentile over rows of a product's SQNR; gaps over all FP8 recipes, capped at 40 dB. Predictions read one sketch of each operand, once, for every recipe."
    return [Table(title="The probe's predictions and the truth", columns=columns, rows=lines, sources=rows, note=note)] if lines else []


def surrogates(view: View) -> list:
    rows = view.rows(measure="surrogate_failures")
    lines = [(name, law["true_p01_db"], law["ours_p01_db"], law["surrogate_p01_db"], law["surrogate_p01_db"] - law["true_p01_db"]) for name, law in laws(rows).items()]
    names = ("inputs", "true", "our probe", "Gaussian probe", "the Gaussian probe's error")
    return [Table(title="What a Gaussian probe sees of the worst rows, tensorwise", columns=[Column(name=n, unit="" if n == "inputs" else "dB") for n in names], rows=lines, sources=rows,
                  note="1st percentile over rows of SQNR. The Gaussian probe is LoKA's as far as reading notes tell: mean and covariance of activations, a matrix normal for weights, draws from both.")] if lines else []  # fmt: skip


def mere(view: View) -> list:
    rows = view.rows(measure="surrogate_failures")
    lines = []
    for r in rows:
        tries = r.record("mere")
        for key, name in (("mean_of_ratios", "mean of |error| / |output|"), ("ratio_of_sums", "sum of |error| / sum of |output|")):
            values = [t[key] for t in tries]
            lines.append((name, r.device, len(values), min(values), max(values), max(values) / min(values)))
    names = ("reading of MERE", "device", "seeds", "smallest", "largest", "largest over smallest")
    return [Table(title="One Gaussian product, tensorwise: MERE by seed", columns=[Column(name=n) for n in names], rows=lines, sources=rows,
                  note="The mean of ratios has no finite expectation where outputs have mean zero; LoKA's rule asks for less than 0.2.")] if lines else []  # fmt: skip


def stopping(view: View) -> list:
    rows = view.rows(measure="stopping")
    lines = []
    for r in rows:
        (stream,) = r.record("stream")
        lines.append((r.params["distribution"], r.params["recipe"], r.device, stream["truth"], 100 * stream["share_below"], r.metrics.get("stop_rows"), stream["rows"], 100 * r.metrics["stop_error_share"]))
    names = ("inputs", "recipe", "device", "truth", "rows below the threshold", "rows until a verdict", "rows there are", "wrong verdicts")
    columns = [Column(name=n, unit="%" if n in ("rows below the threshold", "wrong verdicts") else "") for n in names]
    return [Table(title="When the probe stops", columns=columns, rows=lines, sources=rows, note="A confidence sequence that holds at every row: rows in random order, the median over streams.")] if lines else []


def overhead(view: View) -> list:
    rows = view.rows(measure="overhead")
    lines = []
    for device, model, size, batch, every in dict.fromkeys((r.device, *(r.params[k] for k in ("model", "size", "batch", "every"))) for r in rows):
        found = [r for r in rows if (r.device, *(r.params[k] for k in ("model", "size", "batch", "every"))) == (device, model, size, batch, every)]
        lines.append((f"{model} {size}", device, f"{batch:,}", every, sum(r.metrics["step_us"] for r in found) / len(found) / 1e3, times_faster(found, "log_probe_overhead"), len(found)))
    columns = [Column(name=n, unit={"a plain step": "ms", "time with the probe": "x"}.get(n, "")) for n in ("model", "device", "batch", "every", "a plain step", "time with the probe", "processes")]
    return [Table(title="What the probe costs", columns=columns, rows=lines, sources=rows, note="Whole runs of compiled training steps, all sites, activations, weights and gradients, over runs without.")] if lines else []
