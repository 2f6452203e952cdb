"""Tables as nodes: cells of styled lines, and the widths that make them fit an A4 page without clipping.

    node = plain_table(table)              # {"caption", "tag", "columns", "rows", "note", "size_pt", "widths_pt", ...}

`plain_table` prints a `Table`, `claim_table` a `ClaimLedger`. Widths are estimates from character classes, on the safe
side; a word longer than its column is broken by the renderer, never cut off. HTML ignores widths and scrolls.
"""

from reports._palette import VERDICT_STYLES
from reports.blocks import ClaimLedger, ClaimRow, OtherReading, Table
from reports.format import cell_text, clean, interval, missing, number, quantity, short_commits, stated

__all__ = ["claim_table", "plain_table", "span"]

PORTRAIT_PT, LANDSCAPE_PT = 480.0, 728.0    # A4 less margins of 2 cm
PAGES = ((False, PORTRAIT_PT), (True, LANDSCAPE_PT))
SIZES_PT = (9.0, 8.5, 8.0, 7.5, 7.0)        # tried in this order, upright first
INSET_PT = 8.0                              # left and right inset of a column together
LONGEST_UNBROKEN = 14                       # characters of a word that a column must hold in one line


def span(text: str, style: str = "plain") -> dict:
    """A piece of text in one style."""
    return {"t": clean(text), "s": style}


def _cell(*lines: list[dict], verdict: str = "") -> dict:
    return {"lines": [[one for one in line if one["t"]] for line in lines if any(one["t"] for one in line)], "verdict": verdict}


def plain_table(table: Table) -> dict:
    """A `Table`: kinds that differ by row become a last column, one kind for all stands under the caption."""
    columns = [{"name": clean(c.name), "unit": clean(c.unit or ""), "align": c.align} for c in table.columns]
    rows = [[_cell([span(text, "muted" if text.startswith("— ") else "plain")]) for text in row] for row in table.text_rows()]
    if table.kinds:
        columns.append({"name": "Kind", "unit": "", "align": "left"})
        rows = [[*row, _cell([span(kind)])] for row, kind in zip(rows, table.kinds)]
    node = {"caption": clean(table.caption), "tag": " · ".join(p for p in (table.kind, clean(table.machine)) if p),
            "columns": columns, "rows": rows, "note": clean(table.note), "ledger": False}
    return node | _fit(node)


def claim_table(ledger: ClaimLedger) -> dict:
    """The ledger: verdict, claim, reading, target, bar, evidence. No cell is empty."""
    names = (("Verdict", "left"), ("Claim", "left"), ("Reading [95% CI]", "left"), ("Target", "left"), ("Our bar", "left"),
             ("Evidence", "left"))
    columns = [{"name": name, "unit": "", "align": align} for name, align in names]
    studies = list(dict.fromkeys(row.study for row in ledger.rows))
    # One study is named once, in the caption; several are named in every row.
    rows = [_claim(row, name_study=len(studies) > 1) for row in ledger.rows]
    node = {"caption": clean(ledger.caption), "tag": clean(studies[0]) if len(studies) == 1 else "", "columns": columns, "rows": rows,
            "note": "The verdict compares the 95% interval with the target; the bar is our own aim and is judged apart.",
            "ledger": True}
    return node | {"size_pt": 8.0, "landscape": False, "widths_pt": [72.0, 150.0, 70.0, 62.0, 54.0, 72.0]}


def _claim(row: ClaimRow, name_study: bool) -> list[dict]:
    claim = [[span(f"{row.study} " if name_study else ""), span(row.id, "code")], [span(row.statement)], [span(row.command, "muted-code")]]
    claim += [[span(row.note, "muted")]] * bool(clean(row.note).strip()) + [[span(_other(other, row.unit), "muted")] for other in row.others]
    if row.value is None:
        reading = _cell([span(missing("not measured here" if row.verdict == "NOT MEASURED HERE" else "no reading yet"), "muted")])
    elif row.low is None:
        reading = _cell([span(quantity(row.value, row.unit), "strong")], [span(missing("no interval"), "muted")])
    else:
        value, bounds = interval(row.value, row.low, row.high, row.unit).split(" [")
        reading = _cell([span(value, "strong")], [span("[" + bounds)])
    evidence = [[span(row.machine)], [span(f"{row.kind}, n\u00a0=\u00a0{row.n}")], [span("commit "), span(short_commits(row.commit), "code")]]
    if row.stale:
        evidence.append([span("STALE", "strong"), span(": older code")])
    if not row.machine:
        evidence = [[span(missing("no run exists"), "muted")]]
    elif not row.commit:
        evidence[2] = [span(missing("no commit"), "muted")]
    met = {True: "✓ met", False: "✗ not met", None: "— not judged"}[row.bar_met]
    bar = [[span(_goal(row.bar, row))], [span(met, "strong" if row.bar_met is not None else "muted")]] if row.bar is not None else \
        [[span(missing("none"), "muted")]]
    badge = _cell([span(f"{VERDICT_STYLES[row.verdict][0]} {row.verdict}")], verdict=row.verdict)
    return [badge, _cell(*claim), reading, _cell([span(_goal(row.target, row), "muted" if row.target is None else "plain")]),
            _cell(*bar), _cell(*evidence)]


def _goal(goal: float | str | None, row: ClaimRow) -> str:
    if goal is None:
        return missing("none stated")
    if isinstance(goal, str):
        return cell_text(goal)
    return f"{'≥' if row.direction == 'higher' else '≤'} {stated(goal, row.unit)}"


def _other(other: OtherReading, unit: str) -> str:
    if other.value is None:
        return f"{other.machine}: {other.verdict}"
    read = quantity(other.value, unit) if other.low is None else interval(other.value, other.low, other.high, unit)
    return f"{other.machine}: {read}, {other.kind}, n = {number(other.n)}, {other.verdict}"


def _fit(node: dict) -> dict:
    """Type size, page orientation and column widths in pt: upright and large first, small and landscape last."""
    natural, least = zip(*(_demand(node, j) for j in range(len(node["columns"]))))
    # First without any broken line at a comfortable size, then with wrapped lines, upright before landscape.
    for wanted, pages, sizes in ((natural, PAGES[:1], SIZES_PT[:3]), (least, PAGES, SIZES_PT)):
        for landscape, room_pt in pages:
            for size_pt in sizes:
                room = (room_pt - INSET_PT * len(natural)) / size_pt
                if sum(wanted) <= room:
                    return {"size_pt": size_pt, "landscape": landscape, "widths_pt": _share(natural, least, room, size_pt)}
    # Not even the longest words fit: columns in proportion, and the renderer breaks inside words.
    room = (LANDSCAPE_PT - INSET_PT * len(natural)) / SIZES_PT[-1]
    shrunk = [need * room / sum(least) for need in least]
    return {"size_pt": SIZES_PT[-1], "landscape": True, "widths_pt": _share(shrunk, shrunk, room, SIZES_PT[-1])}


def _share(natural: "tuple | list", least: "tuple | list", room: float, size_pt: float) -> list[float]:
    """Column widths: natural where all fit, else what each needs at least plus a share of the rest by its appetite."""
    if sum(natural) <= room:
        return [round(need * size_pt + INSET_PT, 1) for need in natural]
    appetite = [min(n, 40.0) - min(m, 40.0) for n, m in zip(natural, least)]
    rest = (room - sum(least)) / (sum(appetite) or 1.0)
    return [round((m + a * rest) * size_pt + INSET_PT, 1) for m, a in zip(least, appetite)]


def _demand(node: dict, j: int) -> tuple[float, float]:
    """Widest line and widest unbreakable piece of column j, in em."""
    column = node["columns"][j]
    header = f"{column['name']} {column['unit']}"
    # Bold headers are wider; a header wraps, so that only its words count for the natural width.
    lines = [word + "m" for word in header.split()]
    words = list(lines)
    for row in node["rows"]:
        for line in row[j]["lines"]:
            text = "".join(one["t"] for one in line)
            lines.append(text)
            # A number with its interval reads badly when broken, so a numeric column keeps its cells whole.
            whole = column["align"] == "right" and len(text) <= 24 and not text.startswith("—")
            words += [text] if whole else text.split()
    return max(map(_em, lines)) + 0.3, max(_em(word[:LONGEST_UNBROKEN] if len(word) > 24 else word) for word in words) + 0.3


def _em(text: str) -> float:
    return sum(0.72 if c.isupper() or c in "mwMW×≤≥—" else 0.3 if c in " .,:;il'|()[]" else 0.52 for c in text)
