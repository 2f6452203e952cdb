"""The determinism matrix as a picture: symbols and colours that one understands before reading.

    svg = matrix_svg(matrix)               # a reports.blocks.Matrix

Rows are implementations under their family, columns schedules under their device; a filled circle is equality, a
triangle a difference, a dash a cell that nobody claims. The right margin counts equal among the measured and claimed.
It does not judge: states come from the study. The table behind it is `Matrix.table()`.
"""

import math
from xml.sax.saxutils import escape

from reports._glyphs import GlyphSheet, width, wrap
from reports._palette import GRID, INK, MATRIX_STYLES, MUTED
from reports.blocks import Group, Matrix, MatrixCell
from reports.format import clean

__all__ = ["matrix_svg"]

PAGE = 720.0                        # drawn width in px; 17 cm on A4, so 12 px is 8 pt in print
LEGEND_ROOM = 620.0                 # a small matrix is not as wide as its legend
LABEL, SMALL, TINY = 12.5, 11.5, 10.5   # text sizes in px
LINE = 1.16                         # line pitch over text size
ROOMY_ROWS, ROW, LOW_ROW = 16, 42.0, 24.0   # more rows than this are low, with the text beside the symbol: a picture fits a page
TILT = 50.0                         # degrees of labels that do not fit upright


def matrix_svg(matrix: Matrix) -> str:
    """The whole picture as an SVG fragment of natural width PAGE or more."""
    sheet = GlyphSheet()
    label_width = min(210.0, max(width(label, LABEL) for label in matrix.row_labels) + 14)
    summary_width = 58.0
    n_columns = len(matrix.column_labels)
    cell = min(96.0, max(47.0, (PAGE - label_width - summary_width) / n_columns))
    total = label_width + cell * n_columns + summary_width
    header, y, overhang = _header(sheet, matrix, label_width, cell)
    rows, y = _rows(sheet, matrix, label_width, cell, total, y)
    total = max(total + max(0.0, overhang - summary_width), LEGEND_ROOM)
    legend, y = _legend(sheet, total, y + 8, dict(matrix.legend))
    body = "".join((*header, *rows, *legend))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.1f} {y:.1f}" width="{total:.1f}" '
            f'height="{y:.1f}">{sheet.defs()}{body}</svg>')


def _header(sheet: GlyphSheet, matrix: Matrix, left: float, cell: float) -> tuple[list[str], float, float]:
    """Device groups, then schedules; upright where they fit, else tilted. Returns parts, bottom y, overhang right."""
    parts, top = [], 4.0
    groups = matrix.column_groups
    if groups:
        wrapped = [wrap(group.label, group.size * cell - 8, LABEL, "bold") for group in groups]
        depth = max(len(lines) for lines in wrapped)
        x = left
        for group, lines in zip(groups, wrapped):
            for i, line in enumerate(lines):
                y = top + (depth - len(lines) + i + 1) * LABEL * LINE
                parts.append(sheet.text(x + group.size * cell / 2, y, line, size=LABEL, weight="bold", anchor="middle"))
            rule = top + depth * LABEL * LINE + 5
            parts.append(_line(x + 4, rule, x + group.size * cell - 4, rule, INK, 1.0))
            x += group.size * cell
        top += depth * LABEL * LINE + 9
    upright = [wrap(label, cell - 4, SMALL) for label in matrix.column_labels]
    whole_words = all(width(word, SMALL) <= cell - 4 for label in matrix.column_labels for word in label.split())
    if whole_words and max(len(lines) for lines in upright) <= 4:
        labels, bottom, overhang = _upright(sheet, upright, left, cell, top)
    else:
        labels, bottom, overhang = _tilted(sheet, matrix.column_labels, left, cell, top)
    parts += labels
    if len(set(matrix.column_kinds)) > 1:
        bottom += TINY * LINE
        parts += [sheet.text(left + (j + 0.5) * cell, bottom - 2, kind, size=_fit(kind, cell - 2), style="italic",
                             color=MUTED, anchor="middle") for j, kind in enumerate(matrix.column_kinds)]
    right = left + len(matrix.column_labels) * cell
    parts.append(sheet.text(right + 31, bottom - 2, matrix.counted, size=SMALL, weight="bold", anchor="middle"))
    return parts, bottom + 5, overhang


def _upright(sheet: GlyphSheet, wrapped: list[list[str]], left: float, cell: float, top: float) -> tuple[list[str], float, float]:
    depth = max(len(lines) for lines in wrapped)
    parts = [sheet.text(left + (j + 0.5) * cell, top + (depth - len(lines) + i + 1) * SMALL * LINE, line, size=SMALL,
                        anchor="middle") for j, lines in enumerate(wrapped) for i, line in enumerate(lines)]
    return parts, top + depth * SMALL * LINE + 4, 0.0


def _tilted(sheet: GlyphSheet, labels: tuple[str, ...], left: float, cell: float, top: float) -> tuple[list[str], float, float]:
    """At most two lines a label, rising to the right; the height and the overhang follow from the longest."""
    slope = math.radians(TILT)
    wrapped = [wrap(label, max(200.0, width(label, SMALL) / 2 + 40), SMALL) for label in labels]
    reach = max(width(line, SMALL) for lines in wrapped for line in lines)
    bottom = top + reach * math.sin(slope) + 2 * SMALL + 4
    parts = []
    for j, lines in enumerate(wrapped):
        for i, line in enumerate(lines):
            offset = i * SMALL * LINE / math.sin(slope)
            parts.append(sheet.text(left + (j + 0.4) * cell + offset, bottom - 8, line, size=SMALL, rotate=-TILT))
    return parts, bottom, reach * math.cos(slope) + 2 * SMALL - cell / 2


def _rows(sheet: GlyphSheet, matrix: Matrix, left: float, cell: float, total: float, y: float) -> tuple[list[str], float]:
    parts, index = [], 0
    groups = matrix.row_groups or (Group(label=" .", size=len(matrix.row_labels)),)
    parts.append(_line(0, y, total, y, INK, 1.2))
    for group in groups:
        if matrix.row_groups:
            for line in wrap(group.label, total - 8, LABEL, "bold"):
                y += LABEL * LINE + 4
                parts.append(sheet.text(2, y, line, size=LABEL, weight="bold"))
            y += 4
        for _ in range(group.size):
            least = ROW if len(matrix.row_labels) <= ROOMY_ROWS else LOW_ROW
            drawn, y = _row(sheet, matrix.row_labels[index], matrix.cells[index], left, cell, y, least, dict(matrix.legend))
            parts += drawn
            index += 1
        parts.append(_line(0, y + 1, total, y + 1, GRID, 1.0))
        y += 2
    parts.append(_line(0, y, total, y, INK, 1.2))
    return parts, y


def _row(sheet: GlyphSheet, label: str, cells: tuple[MatrixCell, ...], left: float, cell: float, y: float, least: float, legend: dict[str, str]) -> tuple[list[str], float]:
    lines = wrap(label, left - 14, LABEL)
    height = max(least, len(lines) * LABEL * LINE + 8)
    middle = y + height / 2
    start = middle - (len(lines) - 1) * LABEL * LINE / 2 + LABEL * 0.33
    parts = [sheet.text(10, start + i * LABEL * LINE, line, size=LABEL) for i, line in enumerate(lines)]
    for j, value in enumerate(cells):
        parts.append(_cell(sheet, value, left + j * cell, y, cell, height, legend))
    judged = [value for value in cells if value.state in ("equal", "partial", "differs")]
    count = f"{sum(value.state == 'equal' for value in judged)}/{len(judged)}" if judged else "\u2014"
    parts.append(sheet.text(left + len(cells) * cell + 31, middle + SMALL * 0.36, count, size=LABEL, anchor="middle",
                            weight="bold" if judged else "normal"))
    return parts, y + height


def _cell(sheet: GlyphSheet, value: MatrixCell, x: float, y: float, w: float, h: float, legend: dict[str, str]) -> str:
    background, color, words = MATRIX_STYLES[value.state]
    words = legend.get(value.state, words)
    border = f'stroke="{GRID}" stroke-dasharray="3 2"' if value.state == "not_measured" else 'stroke="none"'
    parts = [f"<title>{escape(clean(', '.join(p for p in (words, value.text, value.detail) if p)))}</title>",
             f'<rect x="{x + 1.5:.2f}" y="{y + 1.5:.2f}" width="{w - 3:.2f}" height="{h - 3:.2f}" rx="2" '
             f'fill="{background}" {border}/>']
    middle = y + h / 2
    if value.text and h < ROW:
        text_width = min(width(value.text, TINY), w - 24)
        start = x + (w - text_width - 17) / 2
        parts.append(_symbol(value.state, start + 6, middle, 6.0, color))
        parts.append(sheet.text(start + 17, middle + TINY * 0.36, value.text, size=_fit(value.text, w - 24), color=INK))
        return "<g>" + "".join(parts) + "</g>"
    parts.append(_symbol(value.state, x + w / 2, middle - (6 if value.text else 0), 7.0 if h >= ROW else 6.0, color))
    if value.text:
        parts.append(sheet.text(x + w / 2, middle + 14, value.text, size=_fit(value.text, w - 5), anchor="middle", color=INK))
    return "<g>" + "".join(parts) + "</g>"


def _fit(text: str, limit: float) -> float:
    """The size at which a short text fits its cell."""
    return min(TINY, TINY * limit / max(width(text, TINY), 1e-6))


def _symbol(state: str, x: float, y: float, r: float, color: str) -> str:
    """One sign per state; no two share an outline, so the colours are not needed to tell them apart."""
    if state == "equal":
        return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{r}" fill="{color}"/>'
    if state == "partial":
        return (f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{r - 0.8:.2f}" fill="#ffffff" stroke="{color}" stroke-width="1.6"/>'
                f'<path d="M{x:.2f} {y - r + 0.8:.2f}A{r - 0.8:.2f} {r - 0.8:.2f} 0 0 0 {x:.2f} {y + r - 0.8:.2f}Z" fill="{color}"/>')
    if state == "differs":
        return (f'<path d="M{x:.2f} {y - r:.2f}L{x + r:.2f} {y + r * 0.8:.2f}L{x - r:.2f} {y + r * 0.8:.2f}Z" '
                f'fill="{color}"/>')
    if state == "not_claimed":
        return _line(x - r * 0.8, y, x + r * 0.8, y, color, 1.6)
    return (f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{r - 0.8:.2f}" fill="none" stroke="{color}" stroke-width="1.4" '
            'stroke-dasharray="2.4 2"/>')


def _legend(sheet: GlyphSheet, total: float, y: float, own: dict[str, str]) -> tuple[list[str], float]:
    """Every state, whether it occurs or not: a reader must be able to see that none was left out."""
    parts, x = [], 10.0
    y += 12
    for state, (_, color, words) in MATRIX_STYLES.items():
        words = own.get(state, words)
        needed = 16 + width(words, SMALL) + 20
        if x > 10 and x + needed > total:
            x, y = 10.0, y + 20
        parts.append(f'<g data-state="{state}">{_symbol(state, x, y - 4, 6.0, color)}'
                     f'{sheet.text(x + 12, y, words, size=SMALL, color=INK)}</g>')
        x += needed
    return parts, y + 10


def _line(x1: float, y1: float, x2: float, y2: float, color: str, thickness: float) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{color}" stroke-width="{thickness:g}"/>'
