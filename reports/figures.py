"""Figures with the table they were drawn from: byte-stable SVG, colour-blind safe, readable in black and white.

    source = Source(run_ids=["r1"], commit="0123abcd", kind="measured", machine="NVIDIA H200")
    figure = line_curves(caption="Time against M", alt="...", x_label="M", y_label="time", y_unit="µs", source=source,
                         series=[Series(label="family A", x=[1, 2, 4], y=[5.1, 5.2, Interval(value=5.6, low=5.4, high=5.9)])])

Each function takes typed readings and returns a `reports.blocks.Figure` whose picture and table come from the same
readings, so they cannot disagree. It reads no runs and fits nothing. `matrix_svg` draws a `Matrix` block.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from reports import _svg
from reports._glyphs import width, wrap
from reports._matrix import matrix_svg
from reports._palette import FONTS, GRID, INK, MUTED, SERIES_STYLES, VERDICT_STYLES
from reports.blocks import ClaimLedger, Column, Figure, Table
from reports.format import Interval, Missing, clean, number, quantity, stated, weakest_kind

__all__ = ["Ratio", "Reading", "Series", "Source", "bar_ratio", "claims_plot", "dot_interval_plot", "line_curves", "matrix_svg"]

RATIO_TICKS = (*(2.0 ** e for e in range(-20, -1)), 0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.5, *(2.0 ** e for e in range(1, 21)))
WIDTH_IN = 6.7  # the text width of the A4 page
STYLE = {
    "font.family": FONTS, "font.size": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9.5,
    "legend.fontsize": 9, "text.parse_math": False, "text.usetex": False, "svg.fonttype": "path",
    "svg.hashsalt": "reports", "axes.edgecolor": INK, "axes.linewidth": 0.7, "text.color": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.direction": "out", "lines.linewidth": 1.5, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "axes.unicode_minus": True,
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a figure's readings come from: runs, commit, kind and machine."""

    run_ids: tuple[str, ...]
    commit: str
    kind: str
    machine: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: `y` holds numbers, or Interval where there is one. `kind` only where it is not the source's."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | Interval, ...]
    kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", tuple(self.x))
        object.__setattr__(self, "y", tuple(self.y))
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a series has one y per x and at least one, got {len(self.x)=}, {len(self.y)=}; mend it")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One row of a dot plot. `target` and `bar` share the reading's unit; `verdict` chooses marker and colour."""

    label: str
    interval: Interval
    verdict: str
    target: float | None = None
    bar: float | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICT_STYLES:
            raise ValueError(f"a verdict is one of {', '.join(VERDICT_STYLES)}, got {self.verdict=}; judge it first")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One bar: a ratio with its interval, read inside one bundle."""

    label: str
    interval: Interval


def line_curves(*, caption: str, alt: str, series: Sequence[Series], x_label: str, y_label: str, source: Source,
                y_unit: str | None = None, log_y: bool = False, reference: tuple[float, str] | None = None) -> Figure:
    """Curves over a log2 x axis with interval bars; `reference` is a labelled horizontal line."""
    if len(series) > len(SERIES_STYLES):
        raise ValueError(f"a plot tells {len(SERIES_STYLES)} curves apart, got {len(series)=}; draw two figures")
    with matplotlib.rc_context(STYLE):
        canvas, axes = _axes(3.5)
        for one, (color, marker, dashes) in zip(series, SERIES_STYLES):
            middle = [y.value if isinstance(y, Interval) else y for y in one.y]
            ends = [(y.low, y.high) if isinstance(y, Interval) else (y, y) for y in one.y]
            axes.errorbar(one.x, middle, color=color, marker=marker, linestyle=dashes, label=clean(one.label), markersize=5,
                          capsize=2.2, elinewidth=1, yerr=[[m - e[0] for m, e in zip(middle, ends)],
                                                           [e[1] - m for m, e in zip(middle, ends)]])
        ticks = sorted({x for one in series for x in one.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks if len(ticks) <= 12 else ticks[::2], labels=[number(x) for x in (ticks if len(ticks) <= 12 else ticks[::2])])
        axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: stated(value)))
        if reference is not None:
            axes.axhline(reference[0], color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
            axes.annotate(clean(reference[1]), (1, reference[0]), xycoords=("axes fraction", "data"), xytext=(4, 0),
                          textcoords="offset points", va="center", color=MUTED, fontsize=9)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(clean(x_label))
        axes.set_ylabel(clean(f"{y_label} ({y_unit})" if y_unit else y_label))
        entries_pt = [width(one.label, 9) + 9 * (2.8 + 0.8 + 1.3) for one in series]  # text, handle, its gap, column gap
        fits = WIDTH_IN * 72 - 12
        ncols = len(series) if sum(entries_pt) <= fits else max(1, int(fits / max(entries_pt)))
        canvas.legend(loc="outside upper left", ncols=ncols, frameon=False, handlelength=2.8, columnspacing=1.3)
        svg = _svg_of(canvas)
    rows = [(one.label, x, y) for one in series for x, y in zip(one.x, one.y)]
    kinds = [one.kind or source.kind for one in series for _ in one.x]
    columns = [Column(name="Series"), Column(name=x_label, align="right"), Column(name=y_label, unit=y_unit, align="right")]
    return _figure(caption, svg, alt, columns, rows, kinds, source)


def dot_interval_plot(*, caption: str, alt: str, readings: Sequence[Reading], x_label: str, source: Source,
                      unit: str | None = None, log_x: bool = False, kinds: Sequence[str] = ()) -> Figure:
    """One row a reading: dot and 95% interval, a bar for its target, a hollow diamond for our own bar."""
    with matplotlib.rc_context(STYLE):
        labels = ["\n".join(wrap(reading.label, 190, 9.5)) for reading in readings]
        canvas, axes = _axes(0.95 + 0.27 * sum(1 + 0.45 * label.count("\n") for label in labels))
        for y, reading in enumerate(readings):
            _, marker, filled, color = VERDICT_STYLES[reading.verdict]
            middle = reading.interval
            axes.plot([middle.low, middle.high], [y, y], color=color, linewidth=2.2, solid_capstyle="butt", zorder=2)
            axes.plot([middle.value], [y], marker=marker, color=color, markerfacecolor=color if filled else "white",
                      markersize=6.5, linestyle="none", zorder=3)
            if reading.target is not None:
                axes.plot([reading.target], [y], marker="|", color=INK, markersize=13, markeredgewidth=1.6, linestyle="none")
            if reading.bar is not None:
                axes.plot([reading.bar], [y], marker="d", color=MUTED, markerfacecolor="none", markersize=9,
                          linestyle="none", zorder=1)
        _finish_rows(axes, labels, log_x, f"{x_label} ({unit})" if unit else x_label)
        handles = _verdict_handles(readings)
        canvas.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, columnspacing=1.1,
                      handletextpad=0.3, handlelength=1.4, fontsize=8.5)
        svg = _svg_of(canvas)
    columns = [Column(name="Claim"), Column(name=x_label, unit=unit, align="right"), Column(name="Target", unit=unit, align="right"),
               Column(name="Bar", unit=unit, align="right"), Column(name="Verdict")]
    rows = [(r.label, r.interval, _or_missing(r.target), _or_missing(r.bar), r.verdict) for r in readings]
    return _figure(caption, svg, alt, columns, rows, list(kinds) or [source.kind] * len(rows), source)


def claims_plot(ledger: ClaimLedger, *, caption: str, run_ids: Sequence[str], commit: str) -> Figure:
    """All measured claims with a numeric bar (else target) on one axis: 1 is the bar, further right is better.

    A claim that is better lower is turned over (bar / value). Claims without a positive number are not in the picture;
    the ledger has them all.
    """
    readings, kinds, machines = [], [], []
    for row in ledger.rows:
        goal = row.bar if isinstance(row.bar, (int, float)) else row.target
        if not isinstance(goal, (int, float)) or not goal > 0 or row.value is None or row.low is None or not row.low > 0:
            continue
        turn = (lambda x, g=goal: x / g) if row.direction == "higher" else (lambda x, g=goal: g / x)
        low, high = sorted((turn(row.low), turn(row.high)))
        target = turn(row.target) if isinstance(row.target, (int, float)) and row.target > 0 else None
        bar = 1.0 if goal is row.bar else None
        readings.append(Reading(label=row.id, interval=Interval(value=turn(row.value), low=low, high=high),
                                target=target, bar=bar, verdict=row.verdict))
        kinds.append(row.kind)
        machines.append(row.machine)
    if not readings:
        raise ValueError("a claims plot needs one measured claim with a positive number to reach, got none; leave it out")
    source = Source(run_ids=tuple(run_ids), commit=commit, kind=weakest_kind(kinds), machine=", ".join(dict.fromkeys(name for joined in machines for name in joined.split(", "))))
    told = "; ".join(f"{r.label} {number(r.interval.value)} ({r.verdict})" for r in readings)
    return dot_interval_plot(caption=caption, alt=f"Share of the bar that each claim reached: {told}.", readings=readings,
                             x_label="share of the bar (1 = bar; further right is better)", source=source, log_x=True, kinds=kinds)


def bar_ratio(*, caption: str, alt: str, ratios: Sequence[Ratio], x_label: str, source: Source, baseline: float = 1.0) -> Figure:
    """Horizontal bars of ratios from `baseline`, their 95% intervals as whiskers, each bar labelled with its number."""
    with matplotlib.rc_context(STYLE):
        labels = ["\n".join(wrap(ratio.label, 190, 9.5)) for ratio in ratios]
        canvas, axes = _axes(0.75 + 0.3 * sum(1 + 0.45 * label.count("\n") for label in labels))
        for y, ratio in enumerate(ratios):
            middle = ratio.interval
            better = middle.value >= baseline
            color = SERIES_STYLES[0][0] if better else SERIES_STYLES[1][0]
            axes.barh(y, middle.value - baseline, left=baseline, height=0.58, color=color, alpha=0.85 if better else 0.6)
            axes.errorbar(middle.value, y, xerr=[[middle.value - middle.low], [middle.high - middle.value]], color=INK,
                          capsize=2.5, elinewidth=1)
            axes.annotate(quantity(middle.value, "×"), (max(middle.high, baseline), y), xytext=(5, 0), va="center",
                          textcoords="offset points", fontsize=9)
        axes.axvline(baseline, color=INK, linewidth=0.9)
        _finish_rows(axes, labels, False, x_label)
        axes.margins(x=0.12)
        svg = _svg_of(canvas)
    columns = [Column(name="Comparison"), Column(name=x_label, unit="×", align="right")]
    return _figure(caption, svg, alt, columns, [(r.label, r.interval) for r in ratios], [source.kind] * len(ratios), source)


def _figure(caption: str, svg: str, alt: str, columns: list[Column], rows: list[tuple], kinds: list[str], source: Source) -> Figure:
    same = len(set(kinds)) == 1
    table = Table(caption=caption, columns=columns, rows=rows, machine=source.machine, kind=kinds[0] if same else "",
                  kinds=() if same else kinds)
    return Figure(caption=caption, svg=svg, alt=alt, table=table, run_ids=tuple(source.run_ids), commit=source.commit)


def _or_missing(value: float | None) -> float | Missing:
    return Missing("none stated") if value is None else value


def _axes(height_in: float) -> tuple[Canvas, Axes]:
    canvas = Canvas(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasSVG(canvas)
    return canvas, canvas.add_subplot()


def _finish_rows(axes: Axes, labels: list[str], log_x: bool, x_label: str) -> None:
    """Shared by the plots whose rows are names: first row on top, light grid, plain numbers on the axis."""
    axes.set_yticks(range(len(labels)), labels=labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if log_x:
        axes.set_xscale("log", base=2)
        low, high = axes.get_xlim()
        inside = [tick for tick in RATIO_TICKS if low <= tick <= high]
        # Over three octaves the halves and thirds would crowd: keep the powers of two.
        axes.set_xticks([t for t in inside if high / low < 8 or math.log2(t).is_integer()])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axvline(1.0, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: stated(value)))
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(clean(x_label))


def _verdict_handles(readings: Sequence[Reading]) -> list[Line2D]:
    """Legend of the verdicts that occur, then target and bar."""
    handles = []
    for verdict, (_, marker, filled, color) in VERDICT_STYLES.items():
        if any(reading.verdict == verdict for reading in readings):
            handles.append(Line2D([], [], marker=marker, color=color, markerfacecolor=color if filled else "white",
                                  linestyle="none", markersize=6.5, label=verdict))
    if any(reading.target is not None for reading in readings):
        handles.append(Line2D([], [], marker="|", color=INK, markersize=11, markeredgewidth=1.6, linestyle="none", label="target"))
    if any(reading.bar is not None for reading in readings):
        handles.append(Line2D([], [], marker="d", color=MUTED, markerfacecolor="none", markersize=8, linestyle="none", label="our bar"))
    return handles


def _svg_of(canvas: Canvas) -> str:
    """Without date and version, so that the same table gives the same bytes."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _svg.normalise(buffer.getvalue())
