"""Findings of the claims about bits: counted, never estimated.

    bitwise_cpu_h200(view)          # every planned cell of manifest.json, on the CPU and on the H200, both exact families

"All equal" needs every cell of the checked-in manifest: a cell that is missing makes the claim UNDECIDED at best, a removed one fails a test.
A result that is its own reference is no evidence and is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from studies.determinism import presets
from studies.determinism.fresh import fresh, preferred
from studies.determinism.golden_manifest import Question
from suite.cell import is_model
from suite.claims import Finding, Row, View

MANIFEST = Path(__file__).with_name("manifest.json")
GPU = "H200"
FAMILIES = ("fma", "integer", "integer-b9")
_GPU = presets.gpu()
# measure of evidence.py -> the parameter by which its rows differ, and the values of which its claim needs a row each
REQUIRED: Mapping[str, tuple[str, tuple]] = {
    "stress": ("sms", _GPU.stress_sms),
    "foreign": ("architecture", _GPU.foreign),
    "engines": ("products", _GPU.engines),
    "audit": ("target", presets.TARGETS),
}
LAUNCHING = ("stress", "foreign")  # where a case that launched no kernel tried nothing
CARDS = {  # architecture -> words of the names of its cards
    "Ampere": ("A100", "A800", "A40", "A30", "A16", "A10", "A10G", "A2", "RTX A6000", "RTX A5500", "RTX A5000", "RTX A4500", "RTX A4000", "RTX A2000", "RTX 3090", "RTX 3080",
               "RTX 3070", "RTX 3060"),
    "Ada": ("L4", "L40", "L40S", "L20", "L2", "Ada", "RTX 4090", "RTX 4080", "RTX 4070", "RTX 4060"),
    "Hopper": ("H100", "H200", "H800", "H20", "GH200"),
}  # fmt: skip
Counts = tuple[int, int, int]  # equal, compared, without a reference


def manifest() -> list[str]:
    """Labels of the cells whose bits must be equal."""
    return json.loads(MANIFEST.read_text())["exact cells"]


# ---- the references ------------------------------------------------------------------------------------------------------------


def oracle_digests(view: View, family: str = "fma") -> tuple[Row | None, dict[str, dict[str, str]]]:
    """operator -> {rows: digest} from the family's exact CPU oracle: of today's code before older, of the machine at hand before others."""
    rows = preferred(view.rows(measure="oracle", where={"family": family, "engine": "auto"}))
    return (rows[0], _oracle(rows[0])) if rows else (None, {})


def _oracle(row: Row) -> dict[str, dict[str, str]]:
    return {r["operator"]: r["digests"] for r in row.record("oracle")}


def text_references(view: View, row: Row) -> dict[int, tuple[str, Row]]:
    """prompt of `row` -> digest of its text and logits by plain batches on a CPU, and whose it is: the first preferred row that wrote as many tokens."""
    where = {"family": row.params["family"], "sampled": row.params["sampled"], "new_tokens": row.params["new_tokens"], "device": "cpu"}
    wanted = {record["prompt"] for record in row.record("texts")}
    found: dict[int, tuple[str, Row]] = {}
    for source in preferred(r for r in view.rows(measure="generation", where=where) if not _varied(r)):
        for record in source.record("texts"):
            if record["prompt"] in wanted:
                found.setdefault(record["prompt"], (record["digest"], source))
    return found


def sources_of(references: Mapping[int, tuple[str, Row]]) -> list[Row]:
    """The rows behind `text_references`, each once."""
    return list({source.bundle_id: source for _, source in references.values()}.values())


def _varied(row: Row) -> bool:
    """A schedule other than plain batches: it is compared, it does not serve as the reference."""
    return bool(row.params["chunk"] or row.params["pad_to"] or not row.params["cache"])


# ---- comparisons ---------------------------------------------------------------------------------------------------------------


def equal_operators(row: Row, digests: Mapping[str, Mapping[str, str]]) -> Counts:
    """Operators whose digest is the reference's at this number of rows."""
    rows = str(row.params["rows"])
    records = row.record("operators")
    found = [r for r in records if rows in digests.get(r["operator"], {})]
    return sum(digests[r["operator"]][rows] == r["digest"] for r in found), len(found), len(records) - len(found)


def equal_texts(row: Row, references: Mapping[int, tuple[str, Row]]) -> Counts:
    """Prompts whose text and logits are the reference's; those that are the reference themselves are left out."""
    records = row.record("texts")
    found = [(r["digest"], *references[r["prompt"]]) for r in records if r["prompt"] in references]
    others = [(digest, wanted) for digest, wanted, source in found if source.bundle_id != row.bundle_id]
    return sum(a == b for a, b in others), len(others), len(records) - len(found)


def equal_engines(row: Row, digests: Mapping[str, Mapping[str, str]]) -> Counts:
    """Operators for which another engine of the oracle has its digest at every number of rows."""
    records = _oracle(row)
    same = [name for name in records if name in digests]
    return sum(records[name] == digests[name] for name in same), len(same), len(records.keys() ^ digests.keys())


def equal_training(rows: Sequence[Row]) -> Counts:
    """Tensors of GPUs' training steps with the CPU's digest of as many steps; one that either side lacks is without a reference."""
    counts = [(0, 0, 0)]
    for gpu in (r for r in rows if r.params["device"] == "cuda"):
        found, cpu = gpu.record("digests"), training_reference(rows, gpu)
        wanted = cpu.record("digests") if cpu else {}
        both = found.keys() & wanted.keys()
        counts.append((sum(found[name] == wanted[name] for name in both), len(both), len(found.keys() ^ wanted.keys())))
    return _total(counts)


def training_reference(rows: Sequence[Row], gpu: Row) -> Row | None:
    """The CPU's row with which a GPU's is compared."""
    return next(iter(preferred(r for r in rows if r.params["device"] == "cpu" and r.params["steps"] == gpu.params["steps"])), None)


def equal_answers(row: Row, questions: Sequence[Question]) -> Counts:
    """Golden questions that this row answered with the manifest's digest; one that it was not asked, or with other inputs, is without a reference."""
    from studies.determinism.exhibits_verify import answers

    found = answers(row)
    same = [q for q in questions if found.get((q.operator, q.case), ("",))[0] == q.input_digest]
    return sum(found[q.operator, q.case][1] == q.output_digest for q in same), len(same), len(questions) - len(same)


def _total(counts: Iterable[Counts]) -> Counts:
    """Element by element."""
    equal, compared, absent = (sum(x) for x in zip(*counts, strict=True))
    return equal, compared, absent


# ---- the claims ----------------------------------------------------------------------------------------------------------------


def bitwise_cpu_h200(view: View) -> Finding | None:
    """The share of results (operators, and prompts of whole texts) of the manifest's cells, on CPU and H200, with the CPU oracle's bits."""
    by_label: dict[str, list[Row]] = {}
    for row in [*view.rows(measure="operators"), *view.rows(measure="generation")]:
        if row.params["device"] == "cpu" or is_model(GPU, row.device):
            by_label.setdefault(row.label, []).append(row)
    used = [r for label in manifest() for r in by_label.get(label, [])]
    if not any(r.params["device"] == "cuda" for r in used):
        return None
    sources: list[Row] = []
    engines = fresh(r for r in view.rows(measure="oracle") if r.params["family"] in FAMILIES and r.params["engine"] != "auto")
    equal, total, absent = _total(_compared(view, row, sources) for row in [*used, *engines])
    if not total:
        return None
    missing = sum(label not in by_label for label in manifest()) + unanswered(view) + absent
    note = f"{equal} of {total} results (operators{', also by the second engine of their oracle' if engines else ''}, and whole texts) in {len(used)} cells"
    return _share(equal, total, [*sources, *used, *engines], missing, note)


def _compared(view: View, row: Row, sources: list[Row]) -> Counts:
    """One row against its reference, which is added to `sources`."""
    if row.measure.endswith(":generation"):
        references = text_references(view, row)
        sources += [r for r in sources_of(references) if r not in sources]
        return equal_texts(row, references)
    second = row.measure.endswith(":oracle")
    source, digests = oracle_digests(view, row.params["family" if second else "impl"])
    sources += [source] if source and source not in sources else []
    return (equal_engines if second else equal_operators)(row, digests)


def unanswered(view: View) -> int:
    """Cells of this machine's plan that should have given bits and did not: failed, blocked, or not run yet."""
    exact = (c for c in view.plan_cells if c.params.get("impl") in FAMILIES or c.params.get("family") in FAMILIES and "prompts" in c.params)
    return sum(view.planned.get(c.point) not in ("DONE", "UNAVAILABLE") for c in exact if not c.measure.endswith((":texts", ":labels")))


def three_archs(view: View) -> Finding | None:
    """Needs executed rows of an Ampere, an Ada and a Hopper card, each of every fma cell of the manifest."""
    labels = [label for label in manifest() if label.startswith("fma cuda rows=")]
    found = [r for r in view.rows(measure="operators", where={"impl": "fma", "device": "cuda"}) if r.label in labels]
    seen = {name: [r for r in found if any(is_model(word, r.device) for word in words)] for name, words in CARDS.items()}
    if not all(seen.values()):
        return None
    source, digests = oracle_digests(view)
    rows = [r for group in seen.values() for r in group]
    equal, total, absent = _total(equal_operators(r, digests) for r in rows)
    missing = sum(len(set(labels) - {r.label for r in group}) for group in seen.values())
    return _share(equal, total, [*rows, *([source] if source else [])], absent + missing, f"{equal} of {total}") if total else None


def golden_questions(view: View) -> Finding | None:
    """Every golden question on an H200 and on a CPU, against the checked-in manifest."""
    from studies.determinism.exhibits_verify import verified
    from studies.determinism.golden_manifest import read

    manifest_ = read()
    answered = sorted((r for r in verified(view) if r.params["device"] == "cpu" or is_model(GPU, r.device)), key=lambda r: r.device)
    rows = [r for _, group in groupby(answered, key=lambda r: r.device) for r in _current(list(group), manifest_.digest)]
    if not any(r.params["device"] == "cuda" for r in rows):
        return None
    equal, total, absent = _total(equal_answers(r, manifest_.questions) for r in rows)
    missing = absent + (not any(r.params["device"] == "cpu" for r in rows))
    return _share(equal, total, rows, missing, f"{len(manifest_.questions)} questions a device") if total else None


def _current(rows: Sequence[Row], questions: str) -> list[Row]:
    """Of one device's rows those that were asked today's questions, else all."""
    return fresh([r for r in rows if r.params.get("questions") == questions] or rows)


def counted(measure: str):
    """A finding over the cases of evidence.py's `measure`; the audit needs no GPU and counts each target once, whoever compiled for it."""

    def test(view: View) -> Finding | None:
        by_value = evidence_rows(view, measure, "" if measure == "audit" else GPU)
        used = [(value, r) for value, found in by_value.items() for r in (found[:1] if measure == "audit" else found)]
        cases = [(value, c) for value, r in used for c in evidence_cases(r, value)]
        if not cases:
            return None
        rows = list({r.bundle_id: r for _, r in used}.values())
        missing = len(set(REQUIRED[measure][1]) - {value for value, _ in cases}) + sum(len(engines_missing(r)) for r in rows)
        return _share(sum(bool(c["equal"]) for _, c in cases), len(cases), rows, missing, f"{len(cases)} cases in {len(rows)} cells")

    return test


def evidence_rows(view: View, measure: str, device: str = "") -> dict[Any, list[Row]]:
    """value of the measure's parameter -> its rows, the preferred one first and stale ones only where none is fresh; required values first."""
    rows = view.rows(measure=measure, device=device)
    order = dict.fromkeys([*REQUIRED[measure][1], *(value for r in rows for value in _values(r))])
    return {value: preferred(fresh(found)) for value in order if (found := [r for r in rows if value in _values(r)])}


def _values(row: Row) -> tuple:
    """The values that a row of evidence speaks of: its parameter is one, or a list."""
    given = row.params[REQUIRED[row.measure.partition(":")[2]][0]]
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def evidence_cases(row: Row, value: Any) -> list[Mapping[str, Any]]:
    """A row's cases of one value that say something: built for the target and, where they should have run on the GPU, with a kernel launched.

    A record without the number of launches counts, and so does a case that is not equal.
    """
    measure = row.measure.partition(":")[2]
    told = [c for c in row.record("cases") if c.get(REQUIRED[measure][0], value) == value and not c.get("skipped")]
    return [c for c in told if not (measure in LAUNCHING and c["equal"] and c.get("launches") == 0)]


def engines_missing(row: Row) -> list[str]:
    """Engines that were not there, by the row's own account."""
    named = row.facts.get("missing", "none")
    return [] if named == "none" else named.split(",")


def training_step(view: View) -> Finding | None:
    steps = view.rows(measure="training")
    gpus = fresh(r for r in steps if is_model(GPU, r.device) and r.params["device"] == "cuda")
    references = {r.bundle_id: r for gpu in gpus if (r := training_reference(steps, gpu)) is not None}
    rows = [*references.values(), *gpus]
    equal, total, absent = equal_training(rows)
    return _share(equal, total, rows, absent, f"{equal} of {total} tensors (loss, gradients, parameters, moments) over the steps") if total else None


def _share(equal: int, total: int, rows: Iterable[Row], missing: int, note: str) -> Finding:
    share = equal / total if total else 0.0
    return Finding(value=share, low=share, high=share, n=total, rows=list(rows), missing=missing, note=note)
