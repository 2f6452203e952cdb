"""From blocks to the plain nodes that both templates print: one tree of text, so HTML and PDF say the same words.

    tree = layout(report)                  # dict of str, list and dict only; JSON-ready
    tree["nodes"][0]                       # {"type": "heading", "level": 2, "text": ..., "id": ...}

A table cell is {"lines": [[{"t": text, "s": style}]], "verdict": str}; styles: plain, strong, code, muted. Every text
passes `format.clean` here. It knows nothing of HTML or Typst.
"""

import re
from collections.abc import Callable

from reports import _svg
from reports._palette import VERDICT_STYLES
from reports._tables import claim_table, plain_table, span
from reports.blocks import (
    Block, ClaimLedger, Column, Figure, Heading, KeyFacts, Matrix, Prose, Provenance, Report, Table, VERDICTS,
)
from reports.format import clean, short_commits, short_digest

__all__ = ["layout"]

INLINE = re.compile(r"\*\*(?P<strong>[^*\s][^*]*?)\*\*|`(?P<code>[^`]+)`")


def layout(report: Report) -> dict:
    """The whole report as nodes: title matter, body, and the data behind the figures."""
    writer = _Writer()
    nodes = [node for block in report.blocks for node in writer.nodes(block)]
    return {
        "title": clean(report.title), "subtitle": clean(report.subtitle), "commit": clean(report.commit),
        "commit_short": short_digest(report.commit), "snapshot": clean(report.generated_from),
        "snapshot_short": short_digest(report.generated_from), "tally": _tally(report), "nodes": nodes,
        "figures": [node for node in nodes if node["type"] == "figure"],
        "toc": [node for node in nodes if node["type"] == "heading" and node["level"] <= 3],
    }


class _Writer:
    """Numbers headings, tables and figures in the order of the report."""

    def __init__(self) -> None:
        self.headings = self.tables = self.figures = 0
        self.sources: list[tuple[str, str, str, str]] = []
        self.first_with: dict[tuple[str, ...], str] = {}
        self.by_type: dict[type, Callable[..., list[dict]]] = {
            Heading: self.heading, Prose: self.prose, Table: self.table, ClaimLedger: self.ledger, Figure: self.figure,
            Matrix: self.matrix, KeyFacts: self.facts, Provenance: self.provenance,
        }

    def nodes(self, block: Block) -> list[dict]:
        return self.by_type[type(block)](block)

    def heading(self, block: Heading) -> list[dict]:
        self.headings += 1
        return [{"type": "heading", "level": block.level, "text": clean(block.text), "id": f"section-{self.headings}"}]

    def prose(self, block: Prose) -> list[dict]:
        paragraphs = [p for p in re.split(r"\n\s*\n", block.text) if clean(p).strip()]
        return [{"type": "prose", "paragraphs": [_inline(clean(p).strip()) for p in paragraphs]}]

    def facts(self, block: KeyFacts) -> list[dict]:
        return [{"type": "facts", "items": [{"label": clean(i.label), "value": clean(i.value), "detail": clean(i.detail)}
                                            for i in block.items]}]

    def table(self, block: Table) -> list[dict]:
        return [plain_table(block) | self._table_number()]

    def ledger(self, block: ClaimLedger) -> list[dict]:
        return [claim_table(block) | self._table_number()]

    def figure(self, block: Figure) -> list[dict]:
        tag = plain_table(block.table)["tag"]
        return [self._figure(block, block.table, block.svg, block.alt, tag)]

    def matrix(self, block: Matrix) -> list[dict]:
        from reports._matrix import matrix_svg  # matplotlib takes a second: only reports with a picture pay it

        cells = [cell for row in block.cells for cell in row]
        counts = ", ".join(f"{sum(c.state == state for c in cells)} {words}" for state, words in
                           (("equal", "equal"), ("partial", "partly equal"), ("differs", "different"),
                            ("not_claimed", "not claimed"), ("not_measured", "not measured")))
        alt = f"Matrix of {len(block.row_labels)} implementations by {len(block.column_labels)} columns: {counts}."
        return [self._figure(block, block.table(), matrix_svg(block), alt, ", ".join(dict.fromkeys(filter(None, block.column_kinds))))]

    def provenance(self, block: Provenance) -> list[dict]:
        rows: list[list[str]] = [["Command", command] for command in block.commands]
        rows += [[f"Machine: {name}", detail] for name, detail in block.machines]
        rows += [[f"Package: {name}", version] for name, version in block.packages]
        facts = plain_table(Table(caption="How to derive this report again", columns=[Column(name="What"), Column(name="Value")],
                                  rows=rows))
        nodes = [facts | self._table_number()]
        if self.sources:
            columns = [Column(name=name) for name in ("Figure", "Runs (first 8 digits)", "Commit", "sha256 of the table behind it")]
            nodes.append(plain_table(Table(caption="Figures of this report", columns=columns, rows=self.sources))
                         | self._table_number())
        return nodes

    def _table_number(self) -> dict:
        self.tables += 1
        return {"type": "table", "label": f"Table {self.tables}", "id": f"table-{self.tables}"}

    def _figure(self, block: Figure | Matrix, table: Table, svg: str, alt: str, tag: str) -> dict:
        self.figures += 1
        number = self.figures
        runs = self.first_with.setdefault(block.run_ids, f"the runs of Figure {number}")
        self.sources.append((f"Figure {number}", ", ".join(short_digest(r, 8) for r in block.run_ids) if runs.endswith(f" {number}") else runs,
                             short_commits(block.commit), block.sha256))
        prefixed = _svg.prefix_ids(svg, f"fig{number}-")
        width, height = _svg.size_px(prefixed)
        caption = f"{block.caption} {block.note}" if isinstance(block, Matrix) and block.note else block.caption
        data = plain_table(table) | {"type": "table", "label": f"Data of Figure {number}", "id": f"data-{number}"}
        return {"type": "figure", "label": f"Figure {number}", "id": f"figure-{number}", "caption": clean(caption),
                "svg": prefixed, "alt": clean(alt), "width_px": round(width, 1), "height_px": round(height, 1), "data": data,
                "tag": tag,
                "source": [span("runs "), span(", ".join(short_digest(r) for r in block.run_ids[:4]), "code"),
                           span(f" and {len(block.run_ids) - 4} more" if len(block.run_ids) > 4 else ""), span(" · commit "),
                           span(short_commits(block.commit), "code"), span(" · data sha256 "), span(short_digest(block.sha256), "code")]}


def _inline(text: str) -> list[dict]:
    """`**bold**` and backquoted code as spans; everything else is literal."""
    spans, start = [], 0
    for match in INLINE.finditer(text):
        spans.append(span(text[start:match.start()]))
        spans.append(span(match["strong"], "strong") if match["strong"] else span(match["code"], "code"))
        start = match.end()
    return [one for one in (*spans, span(text[start:])) if one["t"]]


def _tally(report: Report) -> list[dict]:
    """How many claims have which verdict, for the head of the first page; all five, so that a zero is seen."""
    verdicts = [row.verdict for block in report.blocks if isinstance(block, ClaimLedger) for row in block.rows]
    if not verdicts:
        return []
    return [{"verdict": verdict, "symbol": VERDICT_STYLES[verdict][0], "count": verdicts.count(verdict)} for verdict in VERDICTS]
