"""Claims as a report shows them: the rows of the ledger, one per claim, as `suite claims --json` prints them.

    ClaimRow(study="determinism", id="weight_bytes", statement="Weight bytes moved per weight in decode", target=None,
             bar=2.05, direction="lower", bar_met=True, value=2.01, low=2.00, high=2.02, unit="B", n=5, kind="measured",
             machine="NVIDIA H200", commit="0123abcd", stale=False, verdict="REPRODUCED", command="make study-determinism")

It does not judge: verdicts come from `suite.claims`. It refuses rows that contradict themselves.
"""

from dataclasses import dataclass

from reports.format import Interval, clean, require_kind

__all__ = ["VERDICTS", "ClaimLedger", "ClaimRow", "OtherReading"]

VERDICTS = ("EXCEEDED", "REPRODUCED", "UNDECIDED", "NOT REPRODUCED", "NOT MEASURED HERE")


def _check_verdict(verdict: str) -> None:
    if verdict not in VERDICTS:
        raise ValueError(f"a verdict is one of {', '.join(VERDICTS)}, got {verdict=}; judge with suite.claims")


def _check_reading(owner: str, row: "ClaimRow | OtherReading") -> None:
    """A verdict other than NOT MEASURED HERE stands on a value with kind, machine, n; the interval holds the value."""
    _check_verdict(row.verdict)
    if row.verdict == "NOT MEASURED HERE":
        if row.value is not None:
            raise ValueError(f"{owner} is NOT MEASURED HERE and has no value, got {row.value=}; mend the verdict")
        return
    if row.value is None and row.verdict != "UNDECIDED":
        raise ValueError(f"{owner} with {row.verdict=} stands on a value, got {row.value=}; only UNDECIDED may lack one")
    if not row.machine or row.n is None or row.n < 0:
        raise ValueError(f"{owner} carries machine and n, got {row.machine=}, {row.n=}; take them from the bundles")
    require_kind(row.kind)
    if (row.low is None) != (row.high is None):
        raise ValueError(f"{owner} has both ends of its interval or none, got {row.low=}, {row.high=}; pass both")
    if row.value is not None and row.low is not None:
        Interval(value=row.value, low=row.low, high=row.high)


@dataclass(frozen=True, kw_only=True)
class OtherReading:
    """The same claim read on another device model than the reference: shown beside, never judged for the ledger."""

    machine: str
    verdict: str
    kind: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        _check_reading("another reading", self)


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim: what it says, what was asked of it, what was read, and how to read it again.

    `target` is the paper's number (or ours), `bar` our own aim; both may be a number, a text or None. `direction` says
    whether `higher` or `lower` is better. `bar_met` is None where the bar was not judged. `note` says what was read, and what decided
    the verdict where the interval did not.
    """

    study: str
    id: str
    statement: str
    verdict: str
    command: str
    target: float | str | None = None
    bar: float | str | None = None
    bar_met: bool | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    n: int | None = None
    kind: str = ""
    machine: str = ""
    commit: str = ""
    stale: bool = False
    others: tuple[OtherReading, ...] = ()
    direction: str = "higher"
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "others", tuple(self.others))
        for name in ("study", "id", "statement", "command"):
            if not clean(getattr(self, name)).strip():
                raise ValueError(f"a claim has a {name}, got {getattr(self, name)!r}; copy it from the study's claims")
        if self.direction not in ("higher", "lower"):
            raise ValueError(f"a claim is better higher or lower, got {self.direction=}; choose one")
        _check_reading(f"claim {self.id!r}", self)
        if self.value is not None and not self.commit:
            raise ValueError(f"claim {self.id!r} names the commit it was measured at, got {self.commit=}; pass it")
        if self.bar is None and self.bar_met is not None:
            raise ValueError(f"claim {self.id!r} has no bar to meet, got {self.bar_met=}; pass bar or drop bar_met")


@dataclass(frozen=True, kw_only=True)
class ClaimLedger:
    """Every claim of one or more studies, in the order of the specification."""

    rows: tuple[ClaimRow, ...]
    caption: str = "Claim ledger"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        if not self.rows:
            raise ValueError(f"a ledger has at least one claim, got {self.rows=}; leave the block out")
        names = [(row.study, row.id) for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"a claim stands in the ledger once, got {twice=}; judge each claim on one reference device")
