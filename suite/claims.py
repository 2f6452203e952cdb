"""Claims: sentences with a target, judged on the rows of a snapshot.

    view = make_view(tracker.rows(study.name), plan_points, code_digests, plan_cells)
    judged = judge_all(study, view)             # one Judged per claim, Holm over the study
    view.rows(where={"impl": "fma"}, device="H200")

A claim's `test` sees a View: for each point and device model the newest OK row with today's code
digest, else the newest older one, marked stale; where a point was measured on several device models,
only those of the claim's reference device. It returns a Finding (a value with its interval), or
None where no run exists. The verdict is decided here, in one place, never by the study.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite.bundle import arrays_of, trust
from suite.cell import is_model
from suite.identity import sha256_bytes
from suite.measure import weakest

CONFIDENCE = 0.95  # of a claim alone, and of a study's claims together


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the tracker: a bundle's numbers, and where its payload lies."""

    study: str
    point: str
    key: str
    bundle_id: str
    run_id: str
    label: str
    measure: str
    params: Mapping[str, Any]
    seed: int
    replicate: int
    metrics: Mapping[str, float]
    facts: Mapping[str, str]
    kind: str
    status: str
    device: str  # the device model: GPU name for a cuda cell, CPU name else
    machine: str  # fingerprint digest, first 12 hex digits
    environment: Mapping[str, Any]
    commit: str
    dirty: bool
    code: str
    origin: str  # here, ingested, published
    started_at: str
    path: Path  # the bundle's folder
    files: Mapping[str, str]  # payload name -> sha256
    stale: bool = False

    def arrays(self) -> dict:
        """The bundle's arrays. Raises ValueError where its payload is not at hand, or is not what was measured."""
        return arrays_of(io.BytesIO(self._payload("arrays.npz")))

    def record(self, name: str) -> Any:
        """A JSON value of the bundle. Raises ValueError where its payload is not at hand, or is not what was measured."""
        return json.loads(self._payload(f"{name}.json"))

    def _payload(self, name: str) -> bytes:
        """The file's bytes, read once and checked as read."""
        if name not in self.files:
            raise ValueError(f"a bundle's payload is one of {sorted(self.files)}, got {name!r} of {self.label!r}")
        if not (self.path / name).is_file():
            raise ValueError(f"{name!r} of {self.label!r} is not in the bundle store and too large for MLflow; `suite ingest` the bundle {self.bundle_id[:12]} here")
        data = (self.path / name).read_bytes()
        if sha256_bytes(data) != self.files[name]:
            raise ValueError(f"{name!r} of {self.label!r} does not have the sha256 {self.files[name][:12]} that its bundle names; remove {self.path} and ingest the bundle again")
        return data


@dataclass(frozen=True, kw_only=True)
class View:
    """Rows that a study's claims and figures may use, one per (point, device model, machine kind)."""

    study: str
    rows_: tuple[Row, ...]
    planned: Mapping[str, str]  # point -> plan state of this invocation (DONE, FAILED, UNAVAILABLE, ...)
    plan_cells: tuple = ()  # the planned Cells, in order

    def rows(self, *, where: Mapping[str, Any] | None = None, device: str | None = None, measure: str | None = None) -> list[Row]:
        """OK rows whose params hold `where`, whose device model has the words `device`, whose measure ends in `measure`."""
        out = []
        for row in self.rows_:
            if where and any(row.params.get(k) != v for k, v in where.items()):
                continue
            if device and not is_model(device, row.device):
                continue
            if measure is not None and not row.measure.endswith(f":{measure}"):
                continue
            out.append(row)
        return out


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim's value with its 95% interval, and the rows behind it.

    `interval_at(confidence)` gives the interval again at another level (Holm), (-inf, inf) where there is none. Exact counts (every
    element compared) have low == value == high. `missing` counts planned points without an OK row.
    """

    value: float
    low: float
    high: float
    n: int
    rows: Sequence[Row]
    missing: int = 0
    note: str = ""
    interval_at: Callable[[float], tuple[float, float]] | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence with a target. `bar` is ours and is reported apart from the verdict."""

    id: str
    statement: str
    target: float | None
    bar: float | None
    unit: str = ""
    direction: str = "higher"  # "higher" or "lower" is better
    margin: float = 0.05
    device: str = "H200"  # reference device model (whole words of its name); "" for any
    smallest_n: int = 1
    source: str = ""  # where the target is from
    command: str = ""
    test: Callable[[View], Finding | None]

    def __post_init__(self) -> None:
        if self.direction not in ("higher", "lower"):
            raise ValueError(f"a claim's direction is 'higher' or 'lower', got {self.direction!r}")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One object of `suite claims --json`."""

    study: str
    id: str
    statement: str
    target: float | None
    bar: float | None
    bar_met: bool | None
    value: float | None
    low: float | None
    high: float | None
    unit: str
    n: int
    kind: str
    machine: str
    commit: str
    stale: bool
    verdict: str
    command: str
    others: tuple[str, ...] = ()  # other device models with rows for it
    note: str = ""
    run_ids: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinities: such a number is null, and `note` says what it was."""
        numbers = {k: v if v is None or math.isfinite(v) else None for k in ("value", "low", "high") for v in [getattr(self, k)]}
        return {**self.__dict__, **numbers, "others": list(self.others), "run_ids": list(self.run_ids)}


def kind_of(rows: Sequence[Row]) -> str:
    return weakest([r.kind for r in rows]) if rows else "measured"


# ---------------------------------------------------------------------------------------------- the view


def make_view(rows: Iterable[Row], plan_points: Mapping[str, str], code_digests: Mapping[str, str], plan_cells: Sequence = ()) -> View:
    """The rows that count: of each (point, device model) one OK row with today's code, else one of older code, marked stale.

    Of several, ours comes before a published one and that before an ingested one; of one origin the newest counts.

    plan_points: point -> plan state. code_digests: measure module -> today's digest; a module that is not in it is gone,
    and its rows are stale. Of rows with one label on one device, those of planned points win: another preset may use the
    label for another question. Rows come out in the plan's order, those of no planned point last. Rows of PAUSED and failed
    attempts are left out: a missing point is for the claim to count.
    """
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.status != "OK":
            continue
        row = replace(row, stale=code_digests.get(row.measure.partition(":")[0]) != row.code)
        rival = chosen.get((row.point, row.device))
        if rival is None or _rank(row) > _rank(rival):
            chosen[row.point, row.device] = row
    order = {point: i for i, point in enumerate(plan_points)}
    named = {(r.measure, r.label, r.replicate, r.device) for r in chosen.values() if r.point in order}
    kept = [r for r in chosen.values() if r.point in order or (r.measure, r.label, r.replicate, r.device) not in named]
    used = sorted(kept, key=lambda r: (order.get(r.point, len(order)), r.device, r.point))
    study = plan_cells[0].study if plan_cells else used[0].study if used else ""
    return View(study=study, rows_=tuple(used), planned=dict(plan_points), plan_cells=tuple(plan_cells))


def _rank(row: Row) -> tuple:
    moment = datetime.fromisoformat(row.started_at)
    return not row.stale, trust(row.origin), moment if moment.tzinfo else moment.replace(tzinfo=UTC), row.bundle_id  # the id makes the choice independent of the order of ingest


def _for_reference(view: View, device: str) -> View:
    """Without rows of other device models at points that the reference device has answered too."""
    if not device:
        return view
    answered = {r.point for r in view.rows_ if is_model(device, r.device)}
    return replace(view, rows_=tuple(r for r in view.rows_ if is_model(device, r.device) or r.point not in answered))


# ---------------------------------------------------------------------------------------------- the verdicts


def judge_all(study: Any, view: View, reference_device: str | None = None) -> list[Judged]:
    """One Judged per claim of `study` (its `name` and `claims` are read), in the study's order.

    reference_device: judge every claim that has a reference device on this one instead (a part of the model's name).
    Holm runs over the claims whose finding has an interval of some width; exact counts are judged as they are.
    """
    claims = [c if reference_device is None or not c.device else replace(c, device=reference_device) for c in study.claims]
    found = [_find(c, view) for c in claims]
    levels = _levels(claims, [finding for finding, _ in found])
    return [_judged(study.name, c, finding, others, level) for c, (finding, others), level in zip(claims, found, levels, strict=True)]


def _find(claim: Claim, view: View) -> tuple[Finding | None, tuple[str, ...]]:
    """What the claim's test found, and the other device models with rows for it.

    None where no row of the reference device is behind it: what other devices did is no measurement of this claim.
    """
    finding = claim.test(_for_reference(view, claim.device))
    if finding is None:
        return None, ()
    used = {r.device for r in finding.rows}
    if claim.device and not any(is_model(claim.device, name) for name in used):
        return None, tuple(sorted(used))
    points = {r.point for r in finding.rows}
    return finding, tuple(sorted({r.device for r in view.rows_ if r.point in points} - used))


def _goal(claim: Claim) -> float | None:
    return claim.bar if claim.target is None else claim.target


def _has_width(finding: Finding | None) -> bool:
    return finding is not None and not finding.low == finding.value == finding.high and not _is_nan(finding)


def _is_nan(finding: Finding) -> bool:
    return any(math.isnan(x) for x in (finding.low, finding.value, finding.high))


def _levels(claims: Sequence[Claim], findings: Sequence[Finding | None]) -> list[float | None]:
    """The confidence at which each claim is judged; None for what takes no part in the family."""
    from suite.stats import holm_confidences

    family = [i for i, (c, f) in enumerate(zip(claims, findings, strict=True)) if _has_width(f) and _goal(c) is not None]
    levels: list[float | None] = [None] * len(claims)
    if family:
        adjusted = holm_confidences([_p_value(claims[i], findings[i]) for i in family], CONFIDENCE)
        for i, level in zip(family, adjusted, strict=True):
            levels[i] = float(level)
    return levels


def _p_value(claim: Claim, finding: Finding) -> float:
    """The finding's own, or that of its intervals; 1 where it gives neither, which no family rejects."""
    from suite.stats import p_by_inversion

    if finding.p_value is not None:
        return finding.p_value
    if finding.interval_at is None:
        return 1.0
    return p_by_inversion(lambda confidence: _interval(finding, confidence), _goal(claim))


def _interval(finding: Finding, confidence: float | None = None):
    """The finding as an Interval, at another level if one is given; infinite bounds become the largest float."""
    from suite.stats import Interval

    low, high = (finding.low, finding.high) if confidence is None else finding.interval_at(confidence)
    low, value, high = (max(-sys.float_info.max, min(sys.float_info.max, x)) for x in (low, finding.value, high))
    return Interval(low=min(low, value), value=value, high=max(high, value), n=max(finding.n, 1))


def _verdict(claim: Claim, finding: Finding | None, level: float | None) -> tuple[str, str]:
    """The verdict and, where something but the interval decided, why."""
    from suite.stats import Verdict, judge

    if finding is None:
        return Verdict.NOT_MEASURED_HERE.value, ""
    if _goal(claim) is None:
        return Verdict.UNDECIDED.value, "it has neither target nor bar"
    if _is_nan(finding):
        return Verdict.UNDECIDED.value, "its value or interval is not a number"
    if finding.n < claim.smallest_n:
        return Verdict.UNDECIDED.value, f"n = {finding.n}, and it needs {claim.smallest_n}"
    alone = judge(_interval(finding), _goal(claim), claim.direction, claim.margin)
    verdict, why = alone, ""
    if level is not None:
        verdict, why = _in_family(claim, finding, level, alone)
    if finding.missing and verdict in (Verdict.EXCEEDED, Verdict.REPRODUCED):
        verdict, why = Verdict.UNDECIDED, f"{finding.missing} planned points have no OK run"
    return verdict.value, why


def _in_family(claim: Claim, finding: Finding, level: float, alone):
    """The verdict at the level that Holm leaves the claim, and a word where that changes it."""
    from suite.stats import Verdict, judge

    if finding.interval_at is not None:
        at = _interval(finding, level)
        verdict = judge(at, _goal(claim), claim.direction, claim.margin)
        return verdict, "" if verdict is alone else f"among the study's claims it is judged at {level:.2%}: [{at.low:.4g}, {at.high:.4g}]"
    if finding.p_value is None:
        return Verdict.UNDECIDED, "its test gives neither interval_at nor p_value, so it cannot be judged among the study's claims"
    if finding.p_value > 1 - level:
        return Verdict.UNDECIDED, f"among the study's claims its p = {finding.p_value:.2g} is not below {1 - level:.2g}"
    return (Verdict.REPRODUCED if alone is Verdict.EXCEEDED else alone), ""  # the margin was not tested at this level


def _judged(study: str, claim: Claim, finding: Finding | None, others: tuple[str, ...], level: float | None) -> Judged:
    verdict, why = _verdict(claim, finding, level)
    fixed = {"study": study, "id": claim.id, "statement": claim.statement, "target": claim.target, "bar": claim.bar, "unit": claim.unit,
             "command": claim.command, "verdict": verdict, "others": others}
    if finding is None:
        return Judged(**fixed, bar_met=None, value=None, low=None, high=None, n=0, kind="", machine="", commit="", stale=False)
    rows = list({r.run_id: r for r in finding.rows}.values())
    odd = "" if all(map(math.isfinite, (finding.value, finding.low, finding.high))) else f"value {finding.value} [{finding.low}, {finding.high}]"
    return Judged(
        **fixed, bar_met=_bar_met(claim, finding.value), value=finding.value, low=finding.low, high=finding.high, n=finding.n, kind=kind_of(rows),
        machine=", ".join(sorted({r.device for r in rows})), commit=", ".join(sorted({_commit(r) for r in rows})), stale=any(r.stale for r in rows),
        note="; ".join(x for x in (finding.note, why, odd) if x),
        run_ids=tuple(r.run_id for r in rows),
    )  # fmt: skip


def _bar_met(claim: Claim, value: float) -> bool | None:
    if claim.bar is None:
        return None
    return value >= claim.bar if claim.direction == "higher" else value <= claim.bar


def _commit(row: Row) -> str:
    return f"{row.commit}-dirty" if row.dirty else row.commit
