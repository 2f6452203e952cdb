"""Numbers and words as a report prints them: one place, so that HTML, PDF and figures can never disagree.

    from reports.format import interval, number, quantity
    number(0.000000132)                    # '1.32 × 10⁻⁷'
    quantity(4.25, "TB/s")                 # '4.25 TB/s' (thin space)
    interval(5.12, 4.98, 5.27)             # '5.12 [4.98, 5.27]'

Text from strangers' bundles passes `clean` before it reaches a page. It does not escape for HTML or Typst: the
renderers pass text as data. It does not localise.
"""

import math
import unicodedata
from dataclasses import dataclass
from numbers import Integral, Real

from suite.measure import KINDS, weakest

__all__ = [
    "KINDS", "NOT_MEASURED_HERE", "Interval", "Missing", "cell_text", "clean", "interval", "missing", "number",
    "quantity", "require_kind", "short_commits", "short_digest", "stated", "weakest_kind",
]

THIN_SPACE, NARROW_NBSP, MINUS, DASH = "\u2009", "\u202f", "\u2212", "\u2014"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")



@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its 95% interval, all three in the unit of the column that holds it."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if any(math.isnan(x) for x in (self.value, self.low, self.high)) or not self.low <= self.value <= self.high:
            raise ValueError(f"an interval needs low <= value <= high, got {self.low=}, {self.value=}, {self.high=}; "
                             "pass Missing(reason) where a number does not exist")


@dataclass(frozen=True)
class Missing:
    """A cell without a number, and the reason why: a table never shows an empty cell."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"a missing cell says why, got {self.reason=}; name the reason in a few words")


NOT_MEASURED_HERE = Missing("NOT MEASURED HERE")


def clean(text: str) -> str:
    """Drop control, surrogate, private-use and direction-overriding characters; tab and line ends become a space.

    A bundle may hold terminal escapes or U+202E, which would show a reader something else than the bytes say.
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a str, got {text=}; format numbers with reports.format.number")
    spaced = text.replace("\t", " ").replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
    zero_width_joiners = "\u200c\u200d"
    return "".join(c for c in spaced if c in zero_width_joiners or unicodedata.category(c) not in
                   ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def number(x: float, digits: int = 3) -> str:
    """`x` with `digits` significant digits; integers in full, powers of ten outside 1e-3 .. 1e6."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise ValueError(f"a number must be an int or a float, got {x=}; pass text as text")
    if math.isnan(x):
        raise ValueError(f"NaN is not a result, got {x=}; pass Missing(reason)")
    if math.isinf(x):
        return "∞" if x > 0 else MINUS + "∞"
    if isinstance(x, Integral):
        return _grouped(f"{int(x):d}")
    if x == 0:
        return "0"
    if not 1e-3 <= abs(x) < 1e6:
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
        return f"{_signed(mantissa)} × 10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return _grouped(f"{x:.{_decimals(x, digits)}f}")


def stated(x: float, unit: str | None = None) -> str:
    """A number that somebody chose (a target, a tick): no padded zeros, '0.9' and not '0.900'."""
    text = number(x, 6)
    if "." in text and "×" not in text:
        text = text.rstrip("0").rstrip(".")
    return text + _unit_suffix(unit)


def quantity(x: float, unit: str | None, digits: int = 3) -> str:
    """A number that was read, and its unit with a thin space between (none before a percent or multiplication sign)."""
    return number(x, digits) + _unit_suffix(unit)


def interval(value: float, low: float, high: float, unit: str | None = None, digits: int = 3) -> str:
    """'5.12 [4.98, 5.27]': all three with the same decimals, so that they can be compared by eye."""
    largest = max(abs(value), abs(low), abs(high))
    if all(isinstance(x, Integral) for x in (value, low, high)):
        texts = [number(x) for x in (value, low, high)]
    elif largest and not 1e-3 <= largest < 1e6:
        texts = [number(x, digits) for x in (value, low, high)]
    else:
        # One significant digit of the width keeps a narrow interval from printing as [1.00, 1.00].
        decimals = max(_decimals(largest, digits), min(_decimals(high - low, 1), 6) if high > low else 0)
        texts = [_grouped(f"{float(x):.{decimals}f}") for x in (value, low, high)]
    return f"{texts[0]}{_unit_suffix(unit)} [{texts[1]}, {texts[2]}]"


def missing(reason: str) -> str:
    """'— reason'."""
    return f"{DASH} {clean(reason)}"


def cell_text(value: object, digits: int = 3) -> str:
    """One table cell as text. Raises ValueError for what a table may not hold (None, NaN, an empty string)."""
    if isinstance(value, Missing):
        return missing(value.reason)
    if isinstance(value, Interval):
        return interval(value.value, value.low, value.high, digits=digits)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Real):
        return number(value, digits)
    if isinstance(value, str) and clean(value).strip():
        return clean(value).strip()
    raise ValueError(f"a cell holds text, a number, an Interval or Missing(reason), got {value=}; "
                     "say why a cell is empty with Missing(reason)")


def short_digest(digest: str, length: int = 12) -> str:
    """The first characters of a digest or commit, enough to find it again."""
    return clean(digest)[:length]


def short_commits(commits: str, length: int = 8) -> str:
    """Commits joined by commas, each cut short; a `-dirty` mark is never cut off."""
    return ", ".join(c[:length] + ("-dirty" if c.endswith("-dirty") else "") for c in clean(commits).split(", "))


def require_kind(kind: str) -> str:
    """`kind` if it is one of KINDS, else ValueError."""
    if kind not in KINDS:
        raise ValueError(f"every number carries its kind, one of {', '.join(KINDS)}, got {kind=}; "
                         "take the kind of the bundle that holds the number")
    return kind


def weakest_kind(kinds: "list[str] | tuple[str, ...]") -> str:
    """The kind of a number derived from several others."""
    if not kinds:
        raise ValueError(f"a derived number has at least one input, got {kinds=}; pass the kinds of its inputs")
    return weakest([require_kind(kind) for kind in kinds])


def _decimals(x: float, digits: int) -> int:
    return 0 if x == 0 else max(0, digits - 1 - math.floor(math.log10(abs(x))))


def _signed(text: str) -> str:
    return text.replace("-", MINUS)


def _grouped(text: str) -> str:
    """Narrow spaces between thousands from five digits on, and a true minus sign."""
    whole, dot, rest = text.lstrip("-").partition(".")
    if len(whole) >= 5:
        whole = f"{int(whole):,}".replace(",", NARROW_NBSP)
    return (MINUS if text.startswith("-") else "") + whole + dot + rest


def _unit_suffix(unit: str | None) -> str:
    if not unit:
        return ""
    return clean(unit) if unit in ("%", "×") else THIN_SPACE + clean(unit)
