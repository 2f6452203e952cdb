"""Whole results: texts with all their logits, a training step, and the attempts to break the bits.

texts(view)             # [Matrix]: family by (device, schedule), equal prompts of all
evidence(view)          # [Table]: few SMs, other architectures' code, other engines, the training step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from studies.determinism.bits import equal_texts, equal_training, text_digests
from studies.determinism.exhibits_matrix import packed
from studies.determinism.shown import MISSING, STALE, TITLES, by_device, counted, known
from suite.claims import Row, View
from suite.exhibit import Column, Matrix, Prose, Table

TITLE = "Do whole texts have the same bits?"
NOTE = (
    "SmolLM2-135M-Instruct with its real weights writes a text for each prompt; a prompt is equal where its tokens and every logit of every "
    "step have the bits of the CPU's plain run. "
    "The CPU's plain batches are the reference and equal themselves."
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
            sources, digests = text_digests(view, family, row.params["sampled"])
            used += [r for r in (row, *sources) if r not in used]
            line.append(counted(*equal_texts(row, digests), row))
        cells.append(line)
    return Matrix(
        title=title, row_labels=[TITLES[f] for f in families], column_labels=[label for label, _ in shown], cells=cells, note=NOTE, sources=used
    )


# ---- attempts to break the bits ------------------------------------------------------------------------------------------------

# measure, parameter, its values in the preset gpu, what is asked, what it is equal to
ATTEMPTS = (
    ("stress", "sms", (8, 16, 32, 64, 96, 128), "golden questions on {} SMs", "the golden manifest"),
    ("foreign", "architecture", (80, 89), "golden questions by sm_{} code", "the golden manifest"),
    ("engines", "products", ("b6", "b9"), "integer {} by every engine", "the first engine, on a CPU"),
)


def evidence(view: View) -> list:
    """Each attempt with its equal cases of all, by device; what was not run says so."""
    lines, used = [], []
    for measure, name, values, question, against in ATTEMPTS:
        rows = view.rows(measure=measure)
        used += rows
        for value in dict.fromkeys([*values, *(r.params[name] for r in rows)]):
            lines += [_attempt(r, question.format(value), against) for r in rows if r.params[name] == value]
        if absent := [str(v) for v in values if v not in {r.params[name] for r in rows}]:
            lines.append((question.format(", ".join(absent)), "no run", "-", against, MISSING))
    training = view.rows(measure="training")
    lines += _training(training)
    return [
        Table(
            title="Attempts to break the bits",
            columns=[Column(name=n) for n in ("attempt", "device", "equal of all", "equal to", "result")],
            rows=lines,
            sources=[*used, *training],
            note="A green context leaves a kernel that many SMs; sm_80 and sm_89 code is PTX of other architectures, compiled by the driver "
            "for the GPU at hand. The training step compares the loss, every gradient, "
            "parameter and moment after each step.",
        )
    ]


def _attempt(row: Row, question: str, against: str) -> tuple:
    cases = row.record("cases")
    equal, failed = sum(bool(c["equal"]) for c in cases), sum(bool(c.get("error")) for c in cases)
    result = ("all equal" if equal == len(cases) else f"{len(cases) - equal} differ") if cases else MISSING
    result += f", {failed} of them did not run" if failed else ""
    result += f"; {len(row.record('loaded'))} kernels loaded as that code" if "loaded.json" in row.files else ""
    return question, row.device, f"{equal}/{len(cases)}", against, result + (f" {STALE}" if row.stale else "")


def _training(rows: Sequence[Row]) -> list[tuple]:
    """One line a GPU: its tensors with the CPU's digests."""
    cpu, lines = [r for r in rows if r.params["device"] == "cpu"], []
    for device, found in by_device([r for r in rows if r.params["device"] == "cuda"]):
        equal, compared, absent = equal_training([*cpu, *found])
        result = (
            f"{MISSING}: no CPU run"
            if not compared
            else "all equal"
            if equal == compared and not absent
            else f"{compared - equal} differ, {absent} without a reference"
        )
        lines.append(("training step", device, f"{equal}/{compared + absent}" if compared else "-", "the CPU's training step", result))
    return lines or [("training step on a GPU", "no run", "-", "the CPU's training step", f"{MISSING}{'; the CPU side was run' if cpu else ''}")]
