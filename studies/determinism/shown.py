"""Rows as the exhibits need them: one device model at a time, one value a process, and a mark where other code measured.

for device, rows in by_device(view.rows(measure="linear")): ...     # GPU models are never pooled
over_processes(rows, lambda r: r.metrics.get("log_ratio_sgemm"))    # (ratio, low, high) or None
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from studies.determinism.speed import by_process
from suite.claims import Row
from suite.exhibit import MatrixCell
from suite.stats import ratio_interval

STALE = "†"  # beside a result that was measured with other code than today's; the report explains it
MISSING = "NOT MEASURED HERE"
TITLES = {
    "fma": "fma (ours)", "integer": "integer b6 (ours)", "integer-b9": "integer b9 (ours)", "layercast": "LayerCast",
    "layercast-stored": "LayerCast, stored in fp32", "layercast_compiled": "LayerCast, compiled",
    "sgemm": "fp32 SGEMM", "tf32": "TF32 GEMM", "bf16": "bf16 GEMM", "bf16_padded": "bf16, padded to 16", "bf16_compiled": "bf16, compiled",
    "bf16-serving": "bf16 serving", "batch-invariant": "batch-invariant bf16", "copy": "copy",
}  # fmt: skip
Value = Callable[[Row], float | None]
Ratio = tuple[float, float, float]


def by_device(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """(device model, its rows), in the order of their names."""
    return [(device, [r for r in rows if r.device == device]) for device in sorted({r.device for r in rows})]


def known(rows: Sequence[Row], parameter: str) -> list[Row]:
    """Rows of implementations that this code has a name for: a bundle of other code may hold others."""
    return [r for r in rows if r.params.get(parameter) in TITLES]


def of_device(title: str, device: str, devices: Sequence) -> str:
    """A title that names the device where several have one."""
    return title if len(devices) < 2 else f"{title}, {device}"


def processes(rows: Sequence[Row]) -> int:
    """Process starts behind the rows: the sampled unit of every timing."""
    return len({r.environment.get("process", r.bundle_id) for r in rows})


def over_processes(rows: Sequence[Row], logs: Value) -> Ratio | None:
    """A ratio and its Student-t interval over processes, from one ln ratio each; None for fewer than two."""
    values = by_process(rows, logs)
    if len(values) < 2:
        return None
    i = ratio_interval(values)
    return i.value, i.low, i.high


def middle(rows: Sequence[Row], value: Value) -> float | None:
    """The median over processes; None where none has it."""
    values = by_process(rows, value)
    return statistics.median(values) if values else None


def counted(equal: int, compared: int, absent: int, row: Row | None, detail: str = "") -> MatrixCell:
    """A matrix cell: `equal` of `compared` results; `absent` more have no reference here, so the cell says nothing of them but their number."""
    if row is None or not compared:
        return MatrixCell(state="not_measured", detail="no run" if row is None else "there is nothing to compare with: its reference was not run")
    state = "equal" if equal == compared else "differs" if not equal else "partial"
    text = f"{equal}/{compared}" + (f" of {compared + absent}" if absent else "")
    words = [f"{absent} without a reference" * bool(absent), detail, "measured with other code" * row.stale]
    return MatrixCell(state=state, text=text + STALE * row.stale, detail=", ".join(w for w in words if w))
