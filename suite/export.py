"""Export: the tracker's rows as one tidy CSV, one line per attempt, for whatever reads CSV.

    export_csv(tracker.rows("determinism"), Path("determinism.csv"))

Columns: identity and provenance, then `param.*`, `metric.*` and `fact.*` of all rows, sorted. A value that
a row does not have is an empty field; params are JSON where they are no plain text. Payload is not exported.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.claims import Row

FIELDS = ("study", "label", "status", "kind", "device", "machine", "seed", "replicate", "started_at", "commit", "dirty", "origin", "measure", "point", "key", "code", "bundle_id", "run_id")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # text that a spreadsheet would run


def export_csv(rows: Sequence[Row], out: Path) -> None:
    """Write `rows` to `out`, whole or not at all."""
    groups = {"param": lambda r: r.params, "metric": lambda r: r.metrics, "fact": lambda r: r.facts}
    names = {group: sorted({n for r in rows for n in get(r)}) for group, get in groups.items()}
    out = Path(out)
    temp = out.with_name(f".{out.name}.tmp")
    with open(temp, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow([*FIELDS, *(f"{group}.{n}" for group, ns in names.items() for n in ns)])
        for row in rows:
            fields = [_field(getattr(row, name)) for name in FIELDS]
            writer.writerow(fields + [_field(get(row)[n]) if n in get(row) else "" for group, get in groups.items() for n in names[group]])
    os.replace(temp, out)


def _field(value: Any) -> str:
    if isinstance(value, str):  # bundles may be strangers'
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(value) if isinstance(value, float) else json.dumps(value, sort_keys=True, ensure_ascii=False)
