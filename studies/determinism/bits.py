"""Findings of the claims about bits: counted, never estimated.

    bitwise_cpu_h200(view)          # every planned cell of manifest.json, on the CPU and on the H200, both exact families

"All equal" needs every cell of the checked-in manifest: a cell that is missing makes the claim UNDECIDED at best, a removed one fails a test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from suite.claims import Finding, Row, View

MANIFEST = Path(__file__).with_name("manifest.json")
GPU = "H200"
FAMILIES = ("fma", "integer", "integer-b9")
COUNTED = ("stress", "foreign", "engines", "audit")  # measures of evidence.py whose cases are equal or not


def manifest() -> list[str]:
    """Labels of the cells whose bits must be equal."""
    return json.loads(MANIFEST.read_text())["exact cells"]


# ---- the references ------------------------------------------------------------------------------------------------------------


def oracle_digests(view: View, family: str = "fma") -> tuple[Row | None, dict[str, dict[str, str]]]:
    """operator -> {rows: digest} from the family's exact CPU oracle on the machine at hand, else on any machine."""
    rows = view.rows(measure="oracle", where={"family": family, "engine": "auto"})
    if not rows:
        return None, {}
    chosen = next((r for r in rows if r.origin == "here"), rows[0])
    return chosen, {r["operator"]: r["digests"] for r in chosen.record("oracle")}


def text_digests(view: View, family: str, sampled: bool) -> tuple[list[Row], dict[int, str]]:
    """prompt -> digest of its text and logits on a CPU: this one's where it made the text, else another's."""
    rows = [r for r in view.rows(measure="generation", where={"family": family, "sampled": sampled, "device": "cpu"}) if not _varied(r)]
    found: dict[int, str] = {}
    for row in sorted(rows, key=lambda r: r.origin != "here"):
        for record in row.record("texts"):
            found.setdefault(record["prompt"], record["digest"])
    return rows, found


def _varied(row: Row) -> bool:
    """A schedule other than plain batches: it is compared, it does not serve as the reference."""
    return bool(row.params["chunk"] or row.params["pad_to"] or not row.params["cache"])


# ---- comparisons: (equal, compared, without a reference) ------------------------------------------------------------------------


def equal_operators(row: Row, digests: dict[str, dict[str, str]]) -> tuple[int, int, int]:
    """Operators whose digest is the reference's at this number of rows."""
    rows = str(row.params["rows"])
    records = row.record("operators")
    found = [r for r in records if rows in digests.get(r["operator"], {})]
    return sum(digests[r["operator"]][rows] == r["digest"] for r in found), len(found), len(records) - len(found)


def equal_texts(row: Row, digests: dict[int, str]) -> tuple[int, int, int]:
    """Prompts whose text and logits are the reference's."""
    records = row.record("texts")
    found = [r for r in records if r["prompt"] in digests]
    return sum(digests[r["prompt"]] == r["digest"] for r in found), len(found), len(records) - len(found)


def equal_training(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Tensors of a GPU's training steps with the CPU's digest."""
    cpu = next((r.record("digests") for r in rows if r.params["device"] == "cpu"), {})
    pairs = [(cpu.get(name), digest) for r in rows if r.params["device"] == "cuda" for name, digest in r.record("digests").items()]
    return sum(a == b for a, b in pairs), sum(a is not None for a, _ in pairs), sum(a is None for a, _ in pairs)


# ---- the claims ----------------------------------------------------------------------------------------------------------------


def bitwise_cpu_h200(view: View) -> Finding | None:
    """The share of results (operators, and prompts of whole texts) of the manifest's cells, on CPU and H200, with the CPU oracle's bits."""
    by_label: dict[str, list[Row]] = {}
    for row in [*view.rows(measure="operators"), *view.rows(measure="generation")]:
        if row.params["device"] == "cpu" or row in view.rows(device=GPU):
            by_label.setdefault(row.label, []).append(row)
    used = [r for label in manifest() for r in by_label.get(label, [])]
    if not any(r.params["device"] == "cuda" for r in used):
        return None
    sources: list[Row] = []
    equal = total = absent = 0
    for row in used:
        e, t, a = _compared(view, row, sources)
        equal, total, absent = equal + e, total + t, absent + a
    if not total:
        return None
    missing = sum(label not in by_label for label in manifest()) + unanswered(view) + absent
    return _share(equal, total, [*sources, *used], missing, f"{equal} of {total} results (operators and whole texts) in {len(used)} cells")


def _compared(view: View, row: Row, sources: list[Row]) -> tuple[int, int, int]:
    if row.measure.endswith(":operators"):
        source, digests = oracle_digests(view, row.params["impl"])
        sources += [source] if source and source not in sources else []
        return equal_operators(row, digests)
    rows, digests = text_digests(view, row.params["family"], row.params["sampled"])
    sources += [r for r in rows if r not in sources]
    return equal_texts(row, digests)


def unanswered(view: View) -> int:
    """Cells of this machine's plan that should have given bits and did not: failed, blocked, or not run yet."""
    exact = (c for c in view.plan_cells if c.params.get("impl") in FAMILIES or c.params.get("family") in FAMILIES and "prompts" in c.params)
    return sum(view.planned.get(c.point) not in ("DONE", "UNAVAILABLE") for c in exact if not c.measure.endswith((":texts", ":labels")))


def three_archs(view: View) -> Finding | None:
    """Needs executed rows of an Ampere, an Ada and a Hopper card."""
    cards = {"Ampere": ("A100", "A40", "RTX A"), "Ada": ("L4", "L40", "RTX 40"), "Hopper": ("H100", "H200")}
    seen = {name: [r for r in view.rows(measure="operators", where={"impl": "fma"}) if any(g in r.device for g in models)] for name, models in cards.items()}
    if not all(seen.values()):
        return None
    _, digests = oracle_digests(view)
    rows = [r for group in seen.values() for r in group]
    equal, total, absent = (sum(x) for x in zip(*(equal_operators(r, digests) for r in rows), strict=True))
    return _share(equal, total, rows, absent, f"{equal} of {total}") if total else None


def golden_questions(view: View) -> Finding | None:
    """Every golden question on an H200 and on a CPU, against the checked-in manifest."""
    from studies.determinism.exhibits_verify import column, verified
    from studies.determinism.golden_manifest import read

    rows = [r for r in verified(view) if r.params["device"] == "cpu" or r in view.rows(device=GPU)]
    if not any(r.params["device"] == "cuda" for r in rows):
        return None
    manifest_ = read()
    cells = [cell for r in rows for cell in column(r, manifest_).values()]
    counts = [tuple(map(int, c.text.split("/"))) for c in cells if c.text]
    return _share(sum(e for e, _ in counts), sum(t for _, t in counts), rows, sum(not c.text for c in cells), f"{len(manifest_.questions)} questions a device")


def counted(measure: str):
    """A finding over the cases of evidence.py's `measure`; "audit" needs no GPU."""

    def test(view: View) -> Finding | None:
        rows = view.rows(measure=measure, device=None if measure == "audit" else GPU)
        cases = [c for r in rows for c in r.record("cases") if not c.get("skipped")]
        if not cases:
            return None
        planned = {tuple(sorted(c.params.items(), key=str)) for c in view.plan_cells if c.measure.endswith(f":{measure}")}
        return _share(sum(c["equal"] for c in cases), len(cases), rows, max(0, len(planned) - len(rows)) if measure == "audit" else 0, f"{len(cases)} cases in {len(rows)} cells")

    return test


def training_step(view: View) -> Finding | None:
    rows = [r for r in view.rows(measure="training") if r.params["device"] == "cpu" or r in view.rows(device=GPU)]
    equal, total, absent = equal_training(rows)
    return _share(equal, total, rows, absent, f"{equal} of {total} tensors (loss, gradients, parameters, moments) over the steps") if total else None


def _share(equal: int, total: int, rows: Iterable[Row], missing: int, note: str) -> Finding:
    share = equal / total if total else 0.0
    return Finding(value=share, low=share, high=share, n=total, rows=list(rows), missing=missing, note=note)
