"""What the study claims, and the rows each claim is read from.

    suite claims determinism --json

Bits are counted, not estimated: "all equal" needs every planned cell of the checked-in manifest. Ratios
come from one number per process start, with a Student-t interval over processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from suite.claims import Claim, Finding, Row, View
from suite.stats import ratio_interval

MANIFEST = Path(__file__).with_name("manifest.json")
DECODE_SHAPES = ((4096, 4096), (14336, 4096))
PREFILL_SHAPE = (4096, 4096, 4096)
GPU = "H200"


def manifest() -> list[str]:
    """Labels of the cells whose bits must be equal; a cell removed from the study fails the claim and a test."""
    return json.loads(MANIFEST.read_text())["fma cells"]


def oracle_digests(view: View) -> tuple[Row | None, dict[str, dict[str, str]]]:
    """operator -> {rows: digest} from the exact CPU oracle of the machine at hand, else of any machine."""
    rows = view.rows(measure="oracle", where={"engine": "torch"})
    if not rows:
        return None, {}
    chosen = next((r for r in rows if r.origin == "here"), rows[0])
    return chosen, {r["operator"]: r["digests"] for r in chosen.record("oracle")}


def equal_operators(row: Row, digests: dict[str, dict[str, str]]) -> tuple[int, int, int]:
    """(operators whose digest is the reference's at this number of rows, operators compared, operators without a reference)."""
    rows = str(row.params["rows"])
    records = row.record("operators")
    found = [r for r in records if rows in digests.get(r["operator"], {})]
    return sum(digests[r["operator"]][rows] == r["digest"] for r in found), len(found), len(records) - len(found)


def unanswered(view: View) -> int:
    """Cells of this machine's plan that should have given bits and did not: failed, blocked, or not run yet."""
    return sum(c.params.get("impl") == "fma" and view.planned.get(c.point) not in ("DONE", "UNAVAILABLE") for c in view.plan_cells)


def bitwise_cpu_h200(view: View) -> Finding | None:
    """The share of operator results of the manifest's cells, CPU and H200, whose digest is the CPU oracle's."""
    source, digests = oracle_digests(view)
    by_label: dict[str, list[Row]] = {}
    for row in view.rows(measure="operators", where={"impl": "fma"}):
        if row.params["device"] == "cpu" or GPU in row.device:
            by_label.setdefault(row.label, []).append(row)
    if source is None or not any(GPU in r.device for rows in by_label.values() for r in rows):
        return None
    used = [r for label in manifest() for r in by_label.get(label, [])]
    if not used:
        return None
    equal, total, absent = (sum(x) for x in zip(*(equal_operators(r, digests) for r in used), strict=True))
    missing = sum(label not in by_label for label in manifest()) + unanswered(view) + absent
    share = equal / total if total else 0.0
    return Finding(value=share, low=share, high=share, n=total, rows=[source, *used], missing=missing, note=f"{equal} of {total} operator results in {len(used)} cells")


def _smallest_ratio(view: View, metric: str, contests: Sequence[dict]) -> Finding | None:
    """The worst of several contests: each one's interval over its process starts; the claim takes the smallest value and the smallest n."""
    worst: Finding | None = None
    missing, fewest = 0, math.inf
    for where in contests:
        rows = [r for r in view.rows(measure="linear", where=where, device=GPU) if metric in r.metrics]
        by_process = {r.environment.get("process", r.bundle_id): r.metrics[metric] for r in rows}
        if len(by_process) < 2:
            missing += 1
            continue
        values = list(by_process.values())
        at = ratio_interval(values)
        finding = Finding(value=at.value, low=at.low, high=at.high, n=at.n, rows=rows, interval_at=_interval_at(values), note=f"smallest at M={where['rows']}, {where['n']}x{where['k']}")
        worst, fewest = finding if worst is None or finding.value < worst.value else worst, min(fewest, at.n)
    if worst is None:
        return None
    return Finding(**{**worst.__dict__, "missing": missing, "n": int(fewest)})


def _interval_at(values: list[float]):
    def at(confidence: float) -> tuple[float, float]:
        interval = ratio_interval(values, confidence)
        return interval.low, interval.high

    return at


def decode_contests(rows: Sequence[int], shapes=DECODE_SHAPES) -> list[dict]:
    return [{"rows": m, "n": n, "k": k} for m in rows for n, k in shapes]


def decode_vs_layercast(view: View) -> Finding | None:
    return _smallest_ratio(view, "log_ratio_layercast", decode_contests((1,)))


def decode_vs_fp32_stored(view: View) -> Finding | None:
    return _smallest_ratio(view, "log_ratio_sgemm", decode_contests((1,)))


def decode_bandwidth(view: View) -> Finding | None:
    return _smallest_ratio(view, "log_bandwidth_share", decode_contests((1,), shapes=((14336, 4096),)))


def decode_vs_bf16(view: View) -> Finding | None:
    return _smallest_ratio(view, "log_ratio_bf16", decode_contests((1, 2, 4, 8)))


def prefill_fma_vs_sgemm(view: View) -> Finding | None:
    m, n, k = PREFILL_SHAPE
    return _smallest_ratio(view, "log_ratio_sgemm", [{"rows": m, "n": n, "k": k}])


def three_archs(view: View) -> Finding | None:
    """Needs executed rows of an Ampere, an Ada and a Hopper card."""
    seen = {name: [r for r in view.rows(measure="operators", where={"impl": "fma"}) if any(g in r.device for g in cards)]
            for name, cards in {"Ampere": ("A100", "A40", "RTX A"), "Ada": ("L4", "L40", "RTX 40"), "Hopper": ("H100", "H200")}.items()}
    if not all(seen.values()):
        return None
    _, digests = oracle_digests(view)
    rows = [r for group in seen.values() for r in group]
    equal, total, absent = (sum(x) for x in zip(*(equal_operators(r, digests) for r in rows), strict=True))
    share = equal / total if total else 0.0
    return Finding(value=share, low=share, high=share, n=total, rows=rows, missing=absent)


RUN_GPU = "make study-determinism PRESET=gpu"
CLAIMS = (
    Claim(id="bitwise_cpu_h200", statement="Every fma operator of the manifest has the CPU oracle's bits, on the CPU and on the H200, at every batch, tile and thread count.",
          target=1.0, bar=1.0, margin=0.0, unit="share", test=bitwise_cpu_h200, command="make study-determinism", source="ours"),
    Claim(id="bitwise_three_archs", statement="Linear layers give equal bits on Ampere, Ada and Hopper.", target=1.0, bar=None, margin=0.0, unit="share", device="",
          test=three_archs, command="suite ingest BUNDLES-OF-OTHER-CARDS", source="the paper's abstract"),
    Claim(id="decode_vs_layercast", statement="Decode at M = 1 is faster than LayerCast as its authors run it (weights upcast in memory at each call).", target=5.0, bar=5.0, unit="x", smallest_n=5,
          test=decode_vs_layercast, command=RUN_GPU, source="ours; floor 10 bytes a weight against 2"),
    Claim(id="decode_vs_fp32_stored", statement="Decode at M = 1 is faster than SGEMM on weights stored in fp32.", target=1.9, bar=1.9, unit="x", smallest_n=5,
          test=decode_vs_fp32_stored, command=RUN_GPU, source="ours; floor 4 bytes a weight against 2"),
    Claim(id="decode_bandwidth", statement="Decode at M = 1, 14336x4096, reads weights at this share of the copy bandwidth.", target=0.80, bar=0.80, unit="share", smallest_n=5,
          test=decode_bandwidth, command=RUN_GPU, source="ours"),
    Claim(id="decode_vs_bf16", statement="Decode at M <= 8 keeps up with cuBLAS in bf16.", target=0.95, bar=0.95, unit="x", smallest_n=5, test=decode_vs_bf16, command=RUN_GPU, source="ours"),
    Claim(id="prefill_fma_vs_sgemm", statement="Prefill at 4096^3 keeps up with fp32 SGEMM.", target=1.0, bar=0.9, unit="x", smallest_n=5, test=prefill_fma_vs_sgemm, command=RUN_GPU,
          source="the paper's abstract: about 1x of its range"),
)
assert all(math.isfinite(c.target) for c in CLAIMS if c.target is not None), "a target is a finite number"
