"""Text as glyph outlines for SVG that is drawn by hand: exact widths, the same look in every viewer, nothing to load.

    sheet = GlyphSheet()
    body = sheet.text(10, 20, "family A", size=12, anchor="end")
    svg = f"<svg ...>{sheet.defs()}{body}</svg>"

Outlines come from the fonts inside matplotlib. It does not kern or shape: labels are short, and the table behind the
figure holds the same words as text.
"""

from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath, text_to_path

from reports._palette import FONTS, INK
from reports.format import clean

__all__ = ["GlyphSheet", "wrap", "width"]

EM = 100.0  # outlines are kept at this size and scaled
COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


@lru_cache(maxsize=4)
def _font(weight: str, style: str) -> FontProperties:
    return FontProperties(family=FONTS, weight=weight, style=style, size=EM)


@lru_cache(maxsize=4096)
def _glyph(character: str, weight: str, style: str) -> tuple[str, float]:
    """Outline as SVG path data (y up) and advance, both at EM."""
    font = _font(weight, style)
    # "||" fences the glyph so that a blank keeps its advance.
    fence = text_to_path.get_text_width_height_descent("||", font, ismath=False)[0]
    advance = text_to_path.get_text_width_height_descent(f"|{character}|", font, ismath=False)[0] - fence
    if character.isspace():
        return "", advance
    parts = []
    for points, code in TextPath((0, 0), character, prop=font, usetex=False).iter_segments(simplify=False, curves=True):
        # `code` is numpy's uint8; a closing segment repeats a point that SVG does not want.
        letter = COMMANDS[int(code)]
        parts.append(letter if letter == "Z" else letter + " ".join(f"{v:.1f}" for v in points))
    return "".join(parts), advance


def width(text: str, size: float, weight: str = "normal", style: str = "normal") -> float:
    """Width of a line in the unit of `size`."""
    return sum(_glyph(c, weight, style)[1] for c in clean(text)) * size / EM


def wrap(text: str, limit: float, size: float, weight: str = "normal") -> list[str]:
    """Lines no wider than `limit`; a word that is wider alone is cut."""
    lines, line = [], ""
    for word in clean(text).split():
        while width(word, size, weight) > limit:
            keep = max(1, next((i for i in range(len(word), 0, -1) if width(word[:i], size, weight) <= limit), 1))
            if line:
                lines.append(line)
                line = ""
            lines.append(word[:keep])
            word = word[keep:]
            if not word:
                break
        candidate = f"{line} {word}".strip()
        if width(candidate, size, weight) <= limit:
            line = candidate
        else:
            lines.append(line)
            line = word
    return [*lines, line] if line else lines


class GlyphSheet:
    """Collects the outlines one picture uses; `text` places lines, `defs` gives the outlines once."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str, str], str] = {}

    def text(self, x: float, y: float, text: str, *, size: float, anchor: str = "start", color: str = INK,
             weight: str = "normal", style: str = "normal", rotate: float = 0.0) -> str:
        """One line whose baseline starts, centres (`middle`) or ends at (x, y)."""
        text = clean(text)
        shift = {"start": 0.0, "middle": -0.5, "end": -1.0}[anchor] * width(text, EM, weight, style)
        uses, pen = [], shift
        for character in text:
            outline, advance = _glyph(character, weight, style)
            if outline:
                name = self._ids.setdefault((character, weight, style), f"g{len(self._ids)}")
                uses.append(f'<use href="#{name}" x="{pen:.1f}"/>')
            pen += advance
        turn = f" rotate({rotate:g})" if rotate else ""
        scale = size / EM
        return (f'<g transform="translate({x:.2f} {y:.2f}){turn} scale({scale:g} {-scale:g})" fill="{color}">'
                f'{"".join(uses)}</g>')

    def defs(self) -> str:
        """The outlines used so far."""
        return "<defs>" + "".join(f'<path id="{name}" d="{_glyph(*key)[0]}"/>' for key, name in self._ids.items()) + "</defs>"
