"""Reports: the same blocks rendered as one self-contained HTML file and one tagged PDF.

    from reports import Heading, Prose, Report, write
    report = Report(title="Determinism", subtitle="cpu preset", generated_from="ab" * 32, commit="0123abcd",
                    blocks=[Heading(level=2, text="Result"), Prose(text="All **equal**.")])
    html_path, pdf_path = write(report, "out/")

It does not read MLflow, judge claims or know any study: a caller hands it plain data. Importing this package is cheap;
matplotlib is imported by `reports.figures`, jinja2 and typst only when a report is written.
"""

from reports.blocks import (
    ClaimLedger, ClaimRow, Column, Figure, Group, Heading, KeyFact, KeyFacts, Matrix, MatrixCell, OtherReading, Prose,
    Provenance, Report, Table,
)
from reports.build import write
from reports.format import NOT_MEASURED_HERE, Interval, Missing

__all__ = [
    "ClaimLedger", "ClaimRow", "Column", "Figure", "Group", "Heading", "Interval", "KeyFact", "KeyFacts", "Matrix",
    "MatrixCell", "Missing", "NOT_MEASURED_HERE", "OtherReading", "Prose", "Provenance", "Report", "Table", "write",
]
