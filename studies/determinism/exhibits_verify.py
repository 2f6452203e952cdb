"""Columns that contributors add: what each device's `verify-determinism` gave, compared here with the checked-in golden manifest.

    contributed(view)        # [("NVIDIA L4, torch 2.11.0, triton 3.6.0", {"linear": "equal", "rmsnorm": "differs"})]

A bundle may come from a stranger: only its digests are used, they are compared anew, and its texts are cut and cleaned. A digest can be
copied, so a column says what was reported; whoever doubts it runs the command on such a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from studies.determinism.golden_manifest import Manifest, ManifestError, read
from suite.claims import Row, View
from suite.exhibit import Matrix, MatrixCell, Prose
from suite.text import clean

MAX_LABEL = 80
TITLE = "Which devices give the golden bits?"


def contributed(view: View) -> list[tuple[str, dict[str, str]]]:
    """(column label, operator -> state) for each device that answered; states are those of suite.exhibit.MatrixCell. Raises ManifestError."""
    manifest = read()
    return [(label(row), {op: cell.state for op, cell in column(row, manifest).items()}) for row in verified(view)]


def verified(view: View) -> list[Row]:
    """Rows with a record that can be read, in a stable order."""
    return sorted((r for r in view.rows(measure="verify") if answers(r)), key=lambda r: (r.params.get("device") != "cpu", label(r), r.bundle_id))


def label(row: Row) -> str:
    """Device and toolchain as a column can show them, without control codes and of bounded length."""
    parts = [row.device, *(f"{name} {str(row.environment.get(name, '?')).partition('+')[0]}" for name in ("torch", "triton"))]
    return clean(", ".join(" ".join(str(p).split())[:MAX_LABEL] for p in parts)).replace("\n", " ")


def answers(row: Row) -> dict[tuple[str, str], tuple[str, str]]:
    """(operator, case) -> (input digest, output digest); {} where the record is not at hand or not of this shape."""
    try:
        records = row.record("golden")
        return {(str(r["operator"]), str(r["case"])): (str(r["input_digest"]), str(r["output_digest"])) for r in records}
    except (ValueError, KeyError, TypeError, OSError, RecursionError):  # of the shapes that strangers' JSON can take
        return {}


def column(row: Row, manifest: Manifest) -> dict[str, MatrixCell]:
    """One cell per operator of the manifest: equal cases of those that were asked the same question."""
    found = answers(row)
    out = {}
    for operator in manifest.operators():
        questions = [q for q in manifest.questions if q.operator == operator]
        same = [q for q in questions if found.get((operator, q.case), ("",))[0] == q.input_digest]
        equal = sum(found[operator, q.case][1] == q.output_digest for q in same)
        state = "not_measured" if not same else "equal" if equal == len(questions) else "partial" if equal else "differs"
        asked, code = f", {len(same)} asked" if len(same) < len(questions) else "", ", with other code than today's" if row.stale else ""
        detail = f"{equal} of {len(questions)} cases equal{asked}{code}"
        out[operator] = MatrixCell(state=state, text=f"{equal}/{len(questions)}" if same else "", detail=detail)
    return out


def golden_matrix(view: View) -> list[Any]:
    """The exhibit: operators by device. Nothing where no device was verified; one sentence where the manifest or every record is refused."""
    rows = verified(view)
    unread = len(view.rows(measure="verify")) - len(rows)
    left_out = f" Bundles whose record could not be read: {unread}." if unread else ""
    if not rows:
        return [Prose(heading=TITLE, text=f"Not shown.{left_out}")] if unread else []
    try:
        manifest = read()
    except ManifestError as error:
        return [Prose(heading=TITLE, text=f"Not shown: {error}.")]
    columns: list[Mapping[str, MatrixCell]] = [column(r, manifest) for r in rows]
    cells = [[c[operator] for c in columns] for operator in manifest.operators()]
    note = (f"Equal cases of all, against the golden manifest {manifest.digest[:12]} ({len(manifest.questions)} questions, answered by exact CPU arithmetic). "
            "A column is a bundle of `python -m suite verify-determinism`; columns of other machines are shown as their owners reported them."
            f"{left_out}")
    return [Matrix(title=TITLE, row_labels=manifest.operators(), column_labels=[label(r) for r in rows], cells=cells, note=note, sources=rows)]
