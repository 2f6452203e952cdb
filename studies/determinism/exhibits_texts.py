"""Whole results: texts with all their logits, a training step, and the attempts to break the bits.

texts(view)             # [Matrix]: family by (device, schedule), equal prompts of all
evidence(view)          # [Table]: few SMs, other architectures' code, other engines, the training step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from studies.determinism.bits import REQUIRED, equal_texts, equal_training, engines_missing, evidence_cases, evidence_rows, sources_of, text_references, training_reference
from studies.determinism.fresh import fresh
from studies.determinism.exhibits_matrix import packed
from studies.determinism.shown import MISSING, STALE, TITLES, by_device, counted, known
from suite.claims import Row, View
from suite.exhibit import Column, Matrix, MatrixCell, Prose, Table

TITLE = "Do whole texts have the same bits?"
NOTE = (
    "SmolLM2-135M-Instruct with its real weights writes a text for each prompt; a prompt is equal where its tokens and every logit of every "
    "step have the bits of the CPU's plain run. "
    "Reference: the CPU's plain batches, with which the others are compared."
)
_FIELDS = ("prompts", "new_tokens", "batch", "chunk", "pad_to", "cache", "graph", "sampled", "ranks")
Belongs = Callable[[Row], bool]


def texts(view: View) -> list:
    rows = known(view.rows(measure="generation"), "family")
    if not rows:
        return [Prose(heading=TITLE, text="NOT MEASURED HERE: no text of the whole model was made; the presets cpu, golden and gpu make them.")]
    devices = sorted(by_device(rows), key=lambda item: (item[1][0].params["device"] != "cpu", item[1][0].origin != "here", item[0]))
    packs = packed((device, _columns(found)) for device, found in devices)
    families = sorted({r.params["family"] for r in rows}, key=list(TITLES).index)
    return [_matrix(view, rows, families, pack, f"{TITLE} ({i} of {len(packs)})" if len(packs) > 1 else TITLE) for i, pack in enumerate(packs, 1)]


def _columns(rows: Sequence[Row]) -> list[tuple[str, Belongs]]:
    """(label, which rows) of one device; families share columns."""
    order = lambda r: (r.params["ranks"], r.params["sampled"], _varied(r), r.params["batch"], r.params["prompts"])  # noqa: E731
    schedules = {tuple(r.params[k] for k in _FIELDS): r for r in sorted(rows, key=order)}
    labels = [words(r) for r in schedules.values()]
    out = []
    for wanted, row in schedules.items():
        more = f", {row.params['prompts']} prompts" if labels.count(words(row)) > 1 else ""
        out.append(
            (
                f"{row.device}, {words(row)}{more}",
                lambda r, wanted=wanted, device=row.device: r.device == device and tuple(r.params[k] for k in _FIELDS) == wanted,
            )
        )
    return out


def _varied(row: Row) -> bool:
    return bool(row.params["chunk"] or row.params["pad_to"] or not row.params["cache"])


def words(row: Row) -> str:
    """A schedule as a column's label."""
    p = row.params
    found = [
        f"batch {p['batch']}",
        "sampled" * p["sampled"],
        f"chunks of {p['chunk']}" * bool(p["chunk"]),
        f"padded to {p['pad_to']}" * bool(p["pad_to"]),
        "no cache" * (not p["cache"]),
        "CUDA graph" * p["graph"],
        f"{p['ranks']} GPUs" * (p["ranks"] > 1),
    ]
    return " ".join(w for w in found if w)


def _matrix(view: View, rows: Sequence[Row], families: Sequence[str], shown: Sequence[tuple[str, Belongs]], title: str) -> Matrix:
    cells, used = [], []
    for family in families:
        line = []
        for _, belongs in shown:
            row = next((r for r in rows if r.params["family"] == family and belongs(r)), None)
            if row is None:
                line.append(counted(0, 0, 0, None))
                continue
            found, sources = _cell(view, row)
            used += [r for r in (row, *sources) if r not in used]
            line.append(found)
        cells.append(line)
    return Matrix(
        title=title, row_labels=[TITLES[f] for f in families], column_labels=[label for label, _ in shown], cells=cells, note=NOTE, sources=used
    )


def _cell(view: View, row: Row) -> tuple[MatrixCell, list[Row]]:
    """A run against the CPU's texts, and the rows that hold them."""
    references = text_references(view, row)
    sources = sources_of(references)
    if [r.bundle_id for r in sources] == [row.bundle_id]:
        return MatrixCell(state="equal", text="reference" + STALE * row.stale, detail="the family's other texts are compared with these"), sources
    oldest = next((r for r in (row, *sources) if r.stale), row)
    return counted(*equal_texts(row, references), oldest), sources


# ---- attempts to break the bits ------------------------------------------------------------------------------------------------

# measure, what is asked, what it is equal to
ATTEMPTS = (
    ("stress", "golden questions on {} SMs", "the golden manifest"),
    ("foreign", "golden questions by sm_{} code", "the golden manifest"),
    ("engines", "integer {} by every engine", "the reference engine, on a CPU"),
)


def evidence(view: View) -> list:
    """Each attempt with its equal cases of all, by device; what was not run says so."""
    lines, used = [], []
    for measure, question, against in ATTEMPTS:
        devices = {device: evidence_rows(view, measure, device) for device, _ in by_device(view.rows(measure=measure))}
        for value in dict.fromkeys([*REQUIRED[measure][1], *(value for by_value in devices.values() for value in by_value)]):
            found = [r for device, by_value in devices.items() for r in by_value.get(value, ()) if r.device == device]
            lines += [_attempt(r, value, question.format(value), against) for r in found]
            used += [r for r in found if r not in used]
        if absent := [str(v) for v in REQUIRED[measure][1] if not any(v in by_value for by_value in devices.values())]:
            lines.append((question.format(", ".join(absent)), "no run", "-", against, MISSING))
    training, behind = _training(view.rows(measure="training"))
    lines += training
    return [
        Table(
            title="Attempts to break the bits",
            columns=[Column(name=n) for n in ("attempt", "device", "equal of all", "equal to", "result")],
            rows=lines,
            sources=[*used, *behind],
            note="A green context leaves a kernel that many SMs; sm_80 and sm_89 code is PTX of other architectures, compiled by the driver "
            "for the GPU at hand. Questions that launch no kernel there are not counted. The training step compares the loss, every gradient, "
            "parameter and moment after each step.",
        )
    ]


def _attempt(row: Row, value: Any, question: str, against: str) -> tuple:
    cases = evidence_cases(row, value)
    equal, failed = sum(bool(c["equal"]) for c in cases), sum(bool(c.get("error")) for c in cases)
    result = ("all equal" if equal == len(cases) else f"{len(cases) - equal} differ") if cases else MISSING
    result += f", {failed} of them did not run" if failed else ""
    result += f"; {len(row.record('loaded'))} kernels loaded as that code" if "loaded.json" in row.files else ""
    seen = {limit["sms"]: limit["seen"] for limit in row.record("limits")} if "limits.json" in row.files else {}
    result += f"; programs ran on {seen[value]} SMs" if value in seen else ""
    result += f"; not there: {', '.join(absent)}" if (absent := engines_missing(row)) else ""
    return question, row.device, f"{equal}/{len(cases)}", against, result + (f" {STALE}" if row.stale else "")


def _training(rows: Sequence[Row]) -> tuple[list[tuple], list[Row]]:
    """One line a GPU: its tensors with the CPU's digests; and the rows behind the lines."""
    lines, used = [], []
    cpu = [r for r in rows if r.params["device"] == "cpu"]
    for device, same in by_device([r for r in rows if r.params["device"] == "cuda"]):
        found = fresh(same)
        equal, compared, absent = equal_training([*cpu, *found])
        result = (
            f"{MISSING}: no CPU run"
            if not compared
            else "all equal"
            if equal == compared and not absent
            else f"{compared - equal} differ, {absent} on one side alone"
        )
        lines.append(("training step", device, f"{equal}/{compared + absent}" if compared else "-", "the CPU's training step", result))
        used += [r for r in (*found, *(training_reference(rows, gpu) for gpu in found)) if r is not None and r not in used]
    missing = f"{MISSING}{'; the CPU side was run' if cpu else ''}"
    return (lines, used) if lines else ([("training step on a GPU", "no run", "-", "the CPU's training step", missing)], cpu)
