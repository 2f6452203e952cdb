"""The static audit: every kernel by target, PASS or FAIL, and whether what a GPU executed is what was audited.

audit(view)             # [Prose, Table] or one sentence where no target was audited
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.determinism.bits import evidence_rows
from studies.determinism.contribution import binary
from studies.determinism.golden_manifest import ManifestError, read
from studies.determinism.presets import TARGETS
from suite.claims import Row, View
from suite.exhibit import Column, Prose, Table

TITLE = "What the compiler made of every kernel"
ORDERS = ("wrong", "not traced", "opcodes only", "proved")  # weakest first


def audit(view: View) -> list:
    by_target = {target: rows[0] for target, rows in evidence_rows(view, "audit").items()}
    if not by_target:
        return [
            Prose(
                heading=TITLE,
                text="NOT MEASURED HERE: no kernel was audited; the preset golden compiles every kernel for every target, without a GPU.",
            ),
            *executed(view, {}),
        ]
    targets = list(by_target)
    cases = {t: {c["kernel"]: c for c in by_target[t].record("cases")} for t in targets}
    names = list(dict.fromkeys(name for t in targets for name in cases[t]))
    absent = [t for t in TARGETS if t not in by_target]
    columns = [
        Column(name="kernel"),
        *(Column(name=t) for t in targets),
        Column(name="order"),
        Column(name="spills", unit="B"),
        Column(name="shared", unit="B"),
    ]
    rows = [_line(name, [cases[t].get(name) for t in targets]) for name in names]
    note = (
        "PASS: the floating-point instructions are those of an allow-list (IEEE operations; nothing approximate, nothing that flushes "
        "subnormals, no tensor core but for integers), and the order of the sums is the stated "
        "one where it is traced. Order: proved from the compiled code, or opcodes only. Spills and shared memory: the largest over targets."
    )
    note += f" Not compiled for {', '.join(absent)}: NOT MEASURED HERE." if absent else ""
    table = Table(title="Kernels by target", columns=columns, rows=rows, note=note, sources=list(by_target.values()))
    return [Prose(heading=TITLE, text=summary(cases)), *failures(cases), table, *executed(view, cases)]


def summary(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in one paragraph."""
    built = [c for by in cases.values() for c in by.values() if not c.get("skipped")]
    failed = sum(not c["equal"] for c in built)
    proved = sum(c.get("order") == "proved" for c in built)
    spilled = sum(bool(c.get("spill_bytes")) for c in built)
    return (
        f"{len(built)} compiled kernels for {', '.join(cases)}: {len(built) - failed} PASS, {failed} FAIL. The order of the sums was proved "
        f"in {proved} of them; the other {len(built) - proved} were held to their opcodes. "
        f"{spilled or 'None'} of them {'spills' if spilled == 1 else 'spill'} registers. This is what a compiler made of the code: executed "
        f"are the architectures of the GPUs that the matrices name, and no other."
    )


def failures(cases: Mapping[str, Mapping[str, Any]]) -> list:
    wrong = [
        (name, target, "; ".join(c["problems"])[:200] or "no reason given")
        for target, by in cases.items()
        for name, c in by.items()
        if not c["equal"]
    ]
    return [Table(title="Kernels that failed the audit", columns=[Column(name=n) for n in ("kernel", "target", "rule")], rows=wrong)] if wrong else []


def _line(name: str, cases: Sequence[Mapping[str, Any] | None]) -> tuple:
    built = [c for c in cases if c and not c.get("skipped")]
    orders = [str(c.get("order", "opcodes only")) for c in built]
    traced = [o for o in orders if o != "opcodes only"]  # a target without PTX is held to its opcodes alone
    order = min(traced or orders, key=lambda o: ORDERS.index(o) if o in ORDERS else -1, default="-")
    largest = lambda key: int(max((c.get(key) or 0 for c in built), default=0))  # noqa: E731
    return name, *(_state(c) for c in cases), order, largest("spill_bytes"), largest("shared_bytes")


def _state(case: Mapping[str, Any] | None) -> str | None:
    if case is None:
        return None
    return "not built" if case.get("skipped") else "PASS" if case["equal"] else "FAIL"


# ---- audited = executed --------------------------------------------------------------------------------------------------------


def executed(view: View, cases: Mapping[str, Mapping[str, Any]]) -> list:
    """A line a GPU: the kernel binaries that it executed, how many the checked-in manifest lists, how many were audited as they are."""
    try:
        cubins = read().cubins
    except ManifestError:
        cubins = {}
    listed = {(a, t, n, s) for a, by in cubins.items() for t, kernels in by.items() for n, shas in kernels.items() for s in shas}
    audited = {c["sha256"] for by in cases.values() for c in by.values() if c.get("sha256") and c["equal"]}
    lines, used = [], []
    for row in (r for r in view.rows(measure="verify") if r.params.get("device") == "cuda"):
        found = launched(row)
        used.append(row)
        lines.append(
            (
                row.device,
                len(found) if found else None,
                sum(b in listed for b in found) if found else None,
                sum(b[3] in audited for b in found) if found and audited else None,
            )
        )
    if not lines:
        return [
            Prose(
                heading="Audited = executed",
                text="NOT MEASURED HERE: no GPU has recorded which kernel binaries it executed; `python -m suite verify-determinism` on a GPU does.",
            )
        ]
    columns = [Column(name=n) for n in ("device", "binaries executed", "in the checked-in manifest", "audited as the same bytes")]
    return [
        Table(
            title="Audited = executed",
            columns=columns,
            rows=lines,
            sources=used,
            note="A binary is named by its sha256. Those that the catalogue of audited launches does not hold can be compiled again from the "
            "record and audited: python -m kernels.exact.audit --executed FILE.",
        )
    ]


def launched(row: Row) -> set[tuple[str, str, str, str]]:
    """(architecture, compiler, kernel, sha256) of a bundle; empty where its record is not at hand or not of this shape."""
    try:
        return {binary(k) for k in row.record("kernels")}
    except (ValueError, TypeError, OSError, RecursionError):
        return set()
