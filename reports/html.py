"""The report as one HTML file: no script, no external resource, everything escaped.

    text = render(report)

Inline SVG and CSS only; a content security policy in the page forbids the rest, so that a stranger's text could not load
anything even if it got through the escaping. Figures carry their table in <details>. It writes no file: see build.py.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports._layout import layout
from reports.blocks import Report

__all__ = ["render"]

TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    """The page as text; the same report gives the same bytes."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    # Both are ours: the CSS is a file of this package, an SVG has passed reports._svg.check when its Figure was made.
    return environment.get_template("report.html.j2").render(css=Markup(css), trusted_svg=Markup, **layout(report))
