"""Exhibits: what a study wants shown, as plain data. The report draws them; a study never imports it.

    Table(title="Decode", columns=(Column(name="shape"), Column(name="time", unit="us")), rows=[("4096x4096", 12.1)], sources=rows)

Every exhibit names the rows it was made from, so that the report can print run ids and digests, and
carries the kind of its weakest number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from suite.claims import Row


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of str, int, float, (value, low, high) or None (shown as NOT MEASURED HERE)."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence]
    note: str = ""
    sources: Sequence[Row] = ()


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """state: equal, partial, differs, not_claimed, not_measured. `text` is at most ~8 characters."""

    state: str
    text: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The picture of what agrees with what: implementations by (device, schedule).

    `legend` gives the states other words where equality is not the question, and `counted` names the state that the right margin counts.
    """

    title: str
    row_labels: Sequence[str]
    column_labels: Sequence[str]
    cells: Sequence[Sequence[MatrixCell]]
    note: str = ""
    sources: Sequence[Row] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    counted: str = "equal"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: x, y and the interval of y."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Lines over a shared x. `reference` draws a labelled horizontal line (a bar, parity)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    reference: tuple[float, str] | None = None
    note: str = ""
    sources: Sequence[Row] = ()


@dataclass(frozen=True, kw_only=True)
class Prose:
    """A paragraph, with an optional heading above it."""

    text: str
    heading: str = ""
