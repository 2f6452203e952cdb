"""The blocks of a report: frozen plain data, checked on construction, that both renderers print.

    table = Table(caption="Decode, M = 1", kind="measured", machine="NVIDIA H200",
                  columns=[Column(name="implementation"), Column(name="time", unit="µs", align="right")],
                  rows=[["family A", Interval(value=5.12, low=4.98, high=5.27)], ["LayerCast", Missing("not run")]])

Rules enforced here: no empty cell, no number without a kind, no figure without the table behind it (its sha256 is
computed from that table, never passed). Claims live in `reports/_claims.py` and are re-exported here. Nothing here
renders, reads a store or imports anything heavy.
"""

import hashlib
import json
from dataclasses import dataclass, field
from numbers import Integral, Real

from reports import _svg
from reports._claims import VERDICTS, ClaimLedger, ClaimRow, OtherReading
from reports.format import Interval, Missing, cell_text, clean, require_kind

__all__ = [
    "ALIGNMENTS", "MATRIX_STATES", "VERDICTS", "Block", "ClaimLedger", "ClaimRow", "Column", "Figure", "Group",
    "Heading", "KeyFact", "KeyFacts", "Matrix", "MatrixCell", "OtherReading", "Prose", "Provenance", "Report", "Table",
]

ALIGNMENTS = ("left", "right", "center")
MATRIX_STATES = ("equal", "partial", "differs", "not_claimed", "not_measured")
MAX_COLUMNS = 24  # what a landscape A4 page still shows at a readable size


def _freeze(block: object, **values: object) -> None:
    """Set fields of a frozen dataclass inside its own __post_init__ (lists become tuples)."""
    for name, value in values.items():
        object.__setattr__(block, name, value)


def _need_text(owner: str, **texts: str) -> None:
    for name, text in texts.items():
        if not isinstance(text, str) or not clean(text).strip():
            raise ValueError(f"{owner}.{name} must be a non-empty text, got {text!r}; write what the reader needs")


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A section title. Level 1 is the report's own title, so a block starts at 2."""

    level: int
    text: str

    def __post_init__(self) -> None:
        _need_text("Heading", text=self.text)
        if self.level not in (2, 3, 4):
            raise ValueError(f"a heading has level 2, 3 or 4, got {self.level=}; level 1 is Report.title")


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Paragraphs split by blank lines; `**bold**` and backquoted code are the only markup."""

    text: str

    def __post_init__(self) -> None:
        _need_text("Prose", text=self.text)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name, unit (printed in the header), alignment and significant digits."""

    name: str
    unit: str | None = None
    align: str = "left"
    digits: int = 3

    def __post_init__(self) -> None:
        _need_text("Column", name=self.name)
        if self.align not in ALIGNMENTS:
            raise ValueError(f"a column aligns {' or '.join(ALIGNMENTS)}, got {self.align=}; numbers align right")
        if not 1 <= self.digits <= 9:
            raise ValueError(f"a column shows 1 to 9 significant digits, got {self.digits=}; float32 has 7")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text, numbers, Interval or Missing. A table with numbers has `kind`, or `kinds` with one per row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[object, ...], ...]
    kind: str = ""
    kinds: tuple[str, ...] = ()
    machine: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        _freeze(self, columns=tuple(self.columns), rows=tuple(tuple(row) for row in self.rows), kinds=tuple(self.kinds))
        _need_text("Table", caption=self.caption)
        if not 1 <= len(self.columns) <= MAX_COLUMNS:
            raise ValueError(f"a table has 1 to {MAX_COLUMNS} columns, got {len(self.columns)=}; split it in two")
        if not self.rows:
            raise ValueError(f"a table has at least one row, got {self.rows=}; say in a Prose block why there is none")
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"every row is as wide as the columns ({len(self.columns)}), got {len(row)} cells in row "
                                 f"{index}: {row!r}; fill a gap with Missing(reason)")
            for value, column in zip(row, self.columns):
                cell_text(value, column.digits)
        self._check_kinds()

    def _check_kinds(self) -> None:
        if self.kind and self.kinds:
            raise ValueError(f"a table has one kind or one per row, got {self.kind=} and {self.kinds=}; drop one of them")
        if self.kinds and len(self.kinds) != len(self.rows):
            raise ValueError(f"kinds has one entry a row ({len(self.rows)}), got {len(self.kinds)=}; add the missing ones")
        for kind in self.kinds or ((self.kind,) if self.kind else ()):
            require_kind(kind)
        if not (self.kind or self.kinds) and any(_is_number(value) for row in self.rows for value in row):
            raise ValueError(f"a table that shows numbers carries their kind, got {self.kind=} and {self.kinds=}; "
                             "pass kind='measured' (or another of reports.format.KINDS)")

    def text_rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells as both renderers print them, without the kind column that `kinds` adds."""
        return tuple(tuple(cell_text(value, column.digits) for value, column in zip(row, self.columns)) for row in self.rows)

    @property
    def sha256(self) -> str:
        """Digest of the unrounded data: columns, rows, kinds and machine; captions and notes do not count."""
        data = {"columns": [[c.name, c.unit] for c in self.columns], "kind": self.kind, "kinds": list(self.kinds),
                "machine": self.machine, "rows": [[_canonical(value) for value in row] for row in self.rows]}
        return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _is_number(value: object) -> bool:
    return isinstance(value, Interval) or (isinstance(value, Real) and not isinstance(value, bool))


def _canonical(value: object) -> list:
    """A cell as JSON with its type, so that 1, 1.0, "1" and True have four digests."""
    if isinstance(value, Interval):
        return ["interval", *(float(x).hex() for x in (value.value, value.low, value.high))]
    if isinstance(value, Missing):
        return ["missing", value.reason]
    if isinstance(value, (bool, str)):
        return [type(value).__name__, value]
    return ["int", int(value)] if isinstance(value, Integral) else ["float", float(value).hex()]


def _check_source(owner: str, run_ids: tuple[str, ...], commit: str) -> None:
    if not run_ids:
        raise ValueError(f"{owner} names the runs that it was drawn from, got {run_ids=}; pass their run ids")
    for run_id in run_ids:
        _need_text(owner, run_id=run_id)
    _need_text(owner, commit=commit)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture, the table it was drawn from, and where that came from. `reports.figures` makes both from one input."""

    caption: str
    svg: str
    alt: str
    table: Table
    run_ids: tuple[str, ...]
    commit: str
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        _freeze(self, run_ids=tuple(self.run_ids), sha256=self.table.sha256)
        _need_text("Figure", caption=self.caption, alt=self.alt)
        _check_source("Figure", self.run_ids, self.commit)
        _svg.check(self.svg)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A run of neighbouring matrix rows or columns under one label (a family, a device)."""

    label: str
    size: int

    def __post_init__(self) -> None:
        _need_text("Group", label=self.label)
        if self.size < 1:
            raise ValueError(f"a group spans at least one row or column, got {self.size=}; drop the group")


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One implementation on one (device, schedule): a state, a short text under the symbol, a detail for the table."""

    state: str
    text: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.state not in MATRIX_STATES:
            raise ValueError(f"a matrix cell is one of {', '.join(MATRIX_STATES)}, got {self.state=}; choose one")
        if self.state in ("differs", "partial") and not self.text.strip():
            raise ValueError(f"a cell that is not wholly equal says by how much, got {self.text=}; e.g. text='3/48'")
        if len(self.text) > 16:
            raise ValueError(f"the text under a symbol has at most 16 characters, got {self.text=}; move it to detail")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Implementations (rows) against devices and schedules (columns): drawn as a picture, with its table behind it."""

    caption: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    cells: tuple[tuple[MatrixCell, ...], ...]
    column_kinds: tuple[str, ...]
    run_ids: tuple[str, ...]
    commit: str
    row_groups: tuple[Group, ...] = ()
    column_groups: tuple[Group, ...] = ()
    note: str = ""
    legend: tuple[tuple[str, str], ...] = ()  # (state, its words) where equality is not the question
    counted: str = "equal"  # what the right margin counts
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        _freeze(self, legend=tuple((str(state), str(words)) for state, words in self.legend))
        if unknown := sorted({state for state, _ in self.legend} - set(MATRIX_STATES)):
            raise ValueError(f"a legend has words for {', '.join(MATRIX_STATES)}, got {unknown}; choose among them")
        _freeze(self, **{name: tuple(getattr(self, name)) for name in
                         ("row_labels", "column_labels", "column_kinds", "run_ids", "row_groups", "column_groups")})
        _freeze(self, cells=tuple(tuple(row) for row in self.cells))
        _need_text("Matrix", caption=self.caption)
        _check_source("Matrix", self.run_ids, self.commit)
        n_rows, n_columns = len(self.row_labels), len(self.column_labels)
        if not n_rows or not n_columns:
            raise ValueError(f"a matrix has rows and columns, got {n_rows=} and {n_columns=}; leave the block out")
        if len(self.cells) != n_rows or any(len(row) != n_columns for row in self.cells):
            raise ValueError(f"cells is {n_rows} x {n_columns} like the labels, got rows of {[len(r) for r in self.cells]} "
                             "cells; fill a gap with MatrixCell(state='not_measured')")
        if len(self.column_kinds) != n_columns:
            raise ValueError(f"every column carries its kind, got {self.column_kinds=} for {n_columns} columns; add them")
        for j, kind in enumerate(self.column_kinds):
            if kind or any(row[j].state not in ("not_claimed", "not_measured") for row in self.cells):
                require_kind(kind)
        for name, groups, size in (("row_groups", self.row_groups, n_rows), ("column_groups", self.column_groups, n_columns)):
            if groups and sum(group.size for group in groups) != size:
                raise ValueError(f"{name} cover all {size} labels, got sizes {[g.size for g in groups]}; mend the sizes")
        _freeze(self, sha256=self.table().sha256)

    def table(self) -> Table:
        """The matrix in words, one row an implementation: what a screen reader and `suite verify` read."""
        families = [group.label for group in self.row_groups for _ in range(group.size)]
        devices = [group.label for group in self.column_groups for _ in range(group.size)] or [""] * len(self.column_labels)
        columns = [Column(name="Family")] if families else []
        columns += [Column(name="Implementation")]
        columns += [Column(name=(f"{device}: " if device else "") + label + (f" ({kind})" if kind else ""))
                    for device, label, kind in zip(devices, self.column_labels, self.column_kinds)]
        rows = [([families[i]] if families else []) + [label] + [_matrix_words(cell, dict(self.legend)) for cell in self.cells[i]]
                for i, label in enumerate(self.row_labels)]
        return Table(caption=self.caption, columns=columns, rows=rows, note=self.note)


def _matrix_words(cell: MatrixCell, legend: dict[str, str]) -> str:
    words = {"equal": "equal", "partial": "partly equal", "differs": "differs", "not_claimed": "not claimed",
             "not_measured": "NOT MEASURED HERE", **legend}[cell.state]
    return ", ".join(part for part in (words, cell.text.strip(), cell.detail.strip()) if part)


@dataclass(frozen=True, kw_only=True)
class KeyFact:
    """One line of the first page: what it is, its value, and a remark."""

    label: str
    value: str
    detail: str = ""

    def __post_init__(self) -> None:
        _need_text("KeyFact", label=self.label, value=self.value)


@dataclass(frozen=True, kw_only=True)
class KeyFacts:
    """The first page at a glance: what was measured, on which machines, how many cells of which kind."""

    items: tuple[KeyFact, ...]

    def __post_init__(self) -> None:
        _freeze(self, items=tuple(self.items))
        if not self.items:
            raise ValueError(f"key facts have at least one item, got {self.items=}; leave the block out")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How to derive this report again: commands, package versions, machines. Figures add their own rows."""

    commands: tuple[str, ...]
    packages: tuple[tuple[str, str], ...] = ()
    machines: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, commands=tuple(self.commands), packages=tuple(tuple(p) for p in self.packages),
                machines=tuple(tuple(m) for m in self.machines))
        if not self.commands:
            raise ValueError(f"provenance names the command that derives the report, got {self.commands=}; pass it")
        for pair in (*self.packages, *self.machines):
            if len(pair) != 2:
                raise ValueError(f"packages and machines are pairs of (name, detail), got {pair=}; pass two texts")


Block = Heading | Prose | Table | Matrix | Figure | ClaimLedger | KeyFacts | Provenance


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole report. `generated_from` is the digest of the snapshot that it is a pure function of."""

    title: str
    subtitle: str
    blocks: tuple[Block, ...]
    generated_from: str
    commit: str

    def __post_init__(self) -> None:
        _freeze(self, blocks=tuple(self.blocks))
        _need_text("Report", title=self.title, subtitle=self.subtitle, generated_from=self.generated_from, commit=self.commit)
        for block in self.blocks:
            if not isinstance(block, Block):
                raise ValueError(f"a report holds the blocks of reports.blocks, got {block=}; wrap text in Prose(text=...)")
        level = 1
        for block in self.blocks:
            if isinstance(block, Heading):
                if block.level > level + 1:
                    raise ValueError(f"headings do not skip a level (readers navigate by them), got {block.level=} after "
                                     f"level {level}: {block.text!r}; use level {level + 1}")
                level = block.level
