"""SVG as a report embeds it: checked against an allow-list, without global styles, ids prefixed per figure.

    svg = normalise(matplotlib_svg)        # no metadata, no <style>, no doctype
    check(svg)                             # ValueError for scripts, links, foreign elements
    prefix_ids(svg, "fig-3-")              # several inline pictures share one page's id space

It does not draw. It is strict because a figure may travel inside a bundle that a stranger made.
"""

import re
import xml.etree.ElementTree as ET

__all__ = ["check", "normalise", "prefix_ids", "size_px"]

SVG_NS, XLINK_HREF = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
ELEMENTS = frozenset(
    "svg g defs use path rect circle ellipse line polyline polygon text tspan title desc clipPath pattern".split())
EXTERNAL = re.compile(r"url\(\s*['\"]?(?!#)|@import|javascript:|expression\(", re.IGNORECASE)

ET.register_namespace("", SVG_NS)
ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def _parse(svg: str) -> ET.Element:
    if "<!ENTITY" in svg:
        raise ValueError("an SVG declares no entities, got '<!ENTITY'; draw the figure with reports.figures")
    try:
        return ET.fromstring(svg)
    except ET.ParseError as error:
        raise ValueError(f"an SVG is well-formed XML, got {svg[:60]!r} ({error}); draw it with reports.figures") from error


def check(svg: str) -> None:
    """Raise ValueError unless `svg` holds only shapes and text, and points nowhere outside itself."""
    root = _parse(svg)
    if root.tag != f"{{{SVG_NS}}}svg":
        raise ValueError(f"a figure's root element is svg, got {root.tag=}; draw it with reports.figures")
    for element in root.iter():
        name = str(element.tag).removeprefix(f"{{{SVG_NS}}}")
        if name not in ELEMENTS:
            raise ValueError(f"an SVG holds shapes and text only, got element {name!r}; draw it with reports.figures")
        for key, value in element.attrib.items():
            local = key.rsplit("}", 1)[-1].lower()
            if local.startswith("on") or (local == "href" and not value.startswith("#")) or EXTERNAL.search(value):
                raise ValueError(f"an SVG runs nothing and loads nothing, got {key}={value[:60]!r} on {name!r}; remove it")


def normalise(svg: str) -> str:
    """Matplotlib's file as a fragment: its page-wide style moved to the root, metadata and doctype dropped."""
    root = _parse(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG_NS}}}metadata", f"{{{SVG_NS}}}style"):
                parent.remove(child)
        for style in [c for c in parent if c.tag == f"{{{SVG_NS}}}defs" and not len(c)]:
            parent.remove(style)
    # Both properties are inherited, so the root carries what `*{...}` said, for this picture alone.
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    root.attrib.pop("version", None)
    return ET.tostring(root, encoding="unicode")


def prefix_ids(svg: str, prefix: str) -> str:
    """Prefix every id and every reference to one."""
    root = _parse(svg)
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.set(key, prefix + value)
            elif key in (XLINK_HREF, "href") and value.startswith("#"):
                element.set(key, f"#{prefix}{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{prefix}"))
    return ET.tostring(root, encoding="unicode")


def size_px(svg: str) -> tuple[float, float]:
    """Natural width and height, from the viewBox in CSS pixels (matplotlib's points are scaled by 4/3)."""
    root = _parse(svg)
    _, _, width, height = (float(x) for x in root.attrib["viewBox"].split())
    scale = 4 / 3 if root.attrib.get("width", "").endswith("pt") else 1.0
    return width * scale, height * scale
