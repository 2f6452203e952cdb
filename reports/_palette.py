"""Colours, markers and line styles of every figure: Okabe and Ito's set, darkened where text or thin lines need it.

    from reports._palette import SERIES_STYLES, VERDICT_STYLES
    color, marker, line = SERIES_STYLES[0]

Every colour has a second sign beside it (a marker, a dash pattern, a symbol, a word), so that a black-and-white print
says the same. The page's own colours live in templates/report.css and templates/report.typ.
"""

__all__ = ["FONTS", "GRID", "INK", "MATRIX_STYLES", "MUTED", "SERIES_STYLES", "VERDICT_STYLES"]

FONTS = ["STIXGeneral", "DejaVu Sans"]  # both travel with matplotlib, so figures look the same on every machine
INK, MUTED, GRID = "#1a1a1a", "#5c5c5c", "#d9d9d9"

# Okabe & Ito (2008), ordered so that neighbours differ in lightness too; yellow is left out (too pale on white).
SERIES_STYLES = (
    ("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", (0, (1, 1.2))),
    ("#56B4E9", "v", (0, (5, 1, 1, 1, 1, 1))), ("#E69F00", "P", (0, (7, 2))), ("#000000", "X", (0, (3, 1.5))),
)

# verdict -> (symbol of the page, marker of matplotlib, filled, colour)
VERDICT_STYLES = {
    "EXCEEDED": ("▲", "^", True, "#005a8d"),
    "REPRODUCED": ("●", "o", True, "#006b4e"),
    "UNDECIDED": ("◆", "D", False, "#7a5200"),
    "NOT REPRODUCED": ("✕", "X", True, "#a63a00"),
    "NOT MEASURED HERE": ("○", "o", False, "#5c5c5c"),
}

# state -> (background, symbol colour, legend)
MATRIX_STYLES = {
    "equal": ("#dcebf6", "#0072B2", "equal, bit for bit"),
    "partial": ("#fdf0d2", "#9a6b00", "equal in part (count)"),
    "differs": ("#fbe2d5", "#c24e00", "differs"),
    "not_claimed": ("none", "#8a8a8a", "not claimed"),
    "not_measured": ("none", "#8a8a8a", "NOT MEASURED HERE"),
}
