"""The report as a tagged A4 PDF by Typst: no system library, no system font, the same bytes each time.

    data = render(report)                  # bytes

Text reaches Typst as JSON, never as markup, so `#import` or `$x$` in a stranger's bundle is printed as it stands. It
writes no file: see build.py.
"""

import json
from pathlib import Path

import typst

from reports._layout import layout
from reports.blocks import Report

__all__ = ["render"]

TEMPLATE = Path(__file__).with_name("templates") / "report.typ"


def render(report: Report) -> bytes:
    """The file as bytes: PDF/UA-1 (accessible), without a date."""
    data = json.dumps(layout(report), ensure_ascii=False, sort_keys=True)
    return typst.compile(TEMPLATE, format="pdf", root=TEMPLATE.parent, ignore_system_fonts=True, timestamp=0,
                         sys_inputs={"data": data}, pdf_standards=["ua-1"])
