"""The study's claims on rows made by hand: what counts as equal, what as missing, and which n is told."""

import json
import math
from pathlib import Path

import pytest

from studies.determinism import claims
from studies.determinism.presets import cpu, smoke
from studies.determinism.study import STUDY, cells
from suite.claims import Row, View, judge_all
from suite.identity import sha256_file

CPU, H200 = "a CPU", "NVIDIA H200"
OPERATORS = ("layers.0.mlp.down_proj", "ragged.1x5x250.bfloat16")


def row(folder: Path, **fields) -> Row:
    given = {"study": "determinism", "point": fields.get("label", "p"), "key": "k", "bundle_id": f"{len(list(folder.parent.iterdir()))}", "run_id": str(folder), "label": "x", "measure": "m:operators", "params": {},
             "seed": 0, "replicate": 0, "metrics": {}, "facts": {}, "kind": "measured", "status": "OK", "device": CPU, "machine": "m", "environment": {}, "commit": "c", "dirty": False, "code": "d",
             "origin": "here", "started_at": "t", "path": folder, "files": {p.name: sha256_file(p) for p in folder.iterdir()}}
    return Row(**{**given, **fields})


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """An oracle and one fma cell on each device, all digests equal; the manifest names the two."""
    (tmp_path / "manifest.json").write_text(json.dumps({"fma cells": ["fma cpu rows=1", "fma cuda rows=1"]}))
    monkeypatch.setattr(claims, "MANIFEST", tmp_path / "manifest.json")
    out = []
    for name in ("oracle", "cpu", "cuda"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "oracle":
            (folder / "oracle.json").write_text(json.dumps([{"operator": o, "digests": {"1": "aa", "64": "bb"}} for o in OPERATORS]))
            out.append(row(folder, measure="m:oracle", params={"engine": "torch"}, label="oracle torch"))
        else:
            (folder / "operators.json").write_text(json.dumps([{"operator": o, "digest": "aa"} for o in OPERATORS]))
            params = {"impl": "fma", "device": name, "rows": 1, "chunk_rows": 0, "threads": 0, "kernel": {}}
            out.append(row(folder, params=params, label=f"fma {name} rows=1", device=H200 if name == "cuda" else CPU))
    return out


def judged(rows, claim="bitwise_cpu_h200", planned=None, plan_cells=()):
    view = View(study="determinism", rows_=tuple(rows), planned=planned or {}, plan_cells=plan_cells)
    return {j.id: j for j in judge_all(STUDY, view)}[claim]


def rewrite(r: Row, **change: str) -> None:
    records = json.loads((r.path / "operators.json").read_text())
    records[0].update(change)
    (r.path / "operators.json").write_text(json.dumps(records))
    r.files["operators.json"] = sha256_file(r.path / "operators.json")


def test_all_equal_is_reproduced_with_the_count(rows):
    j = judged(rows)
    assert (j.verdict, j.value, j.n, j.bar_met) == ("REPRODUCED", 1.0, 4, True)


def test_one_digest_that_differs_is_not_reproduced(rows):
    rewrite(rows[2], digest="ab")
    j = judged(rows)
    assert (j.verdict, j.value, j.bar_met) == ("NOT REPRODUCED", 0.75, False)


def test_an_operator_without_a_reference_is_missing_not_unequal(rows):
    rewrite(rows[2], operator="layers.29.mlp.down_proj")
    j = judged(rows)
    assert (j.verdict, j.value, j.n) == ("UNDECIDED", 1.0, 3)


@pytest.mark.parametrize("gone, verdict", [("oracle", "NOT MEASURED HERE"), ("cuda", "NOT MEASURED HERE"), ("cpu", "UNDECIDED")])
def test_a_missing_row_never_counts_as_equal(rows, gone, verdict):
    left = [r for r in rows if r.path.name != gone]
    assert judged(left).verdict == verdict


@pytest.mark.parametrize("state, verdict", [("DONE", "REPRODUCED"), ("FAILED", "UNDECIDED"), ("TO RUN", "UNDECIDED"), ("UNAVAILABLE", "REPRODUCED")])
def test_a_planned_cell_that_failed_here_is_not_masked_by_a_published_one(rows, state, verdict):
    cell = next(c for c in cells(smoke()) if c.params.get("impl") == "fma")
    assert judged(rows, planned={cell.point: state}, plan_cells=(cell,)).verdict == verdict


def test_presets_that_capture_different_layers_ask_different_questions():
    ours, theirs = ({c.point for c in cells(p)} for p in (smoke(), cpu()))
    assert not ours & theirs


def contest(folder: Path, n: int, replicate: int, ratio: float) -> Row:
    return row(folder, measure="m:linear", params={"rows": 1, "n": n, "k": 4096}, replicate=replicate, device=H200, metrics={"log_ratio_layercast": math.log(ratio)},
               environment={"process": f"{n}-{replicate}"}, label=f"{n} {replicate}")


def test_a_ratio_claim_takes_the_worst_shape_and_the_fewest_processes(tmp_path):
    many = [contest(tmp_path, 4096, r, 6.0 + 0.01 * r) for r in range(6)]
    few = [contest(tmp_path, 14336, r, 8.0 + 0.01 * r) for r in range(4)]
    j = judged(many + few, "decode_vs_layercast")
    assert 5.9 < j.value < 6.1 and j.n == 4 and j.verdict == "UNDECIDED" and j.bar_met
    enough = judged(many + few + [contest(tmp_path, 14336, 4, 8.0)], "decode_vs_layercast")
    assert (enough.n, enough.verdict) == (5, "EXCEEDED")


def test_cells_of_one_process_count_once(tmp_path):
    same = [contest(tmp_path, 4096, 0, 6.0), contest(tmp_path, 4096, 0, 6.1)]
    assert judged(same, "decode_vs_layercast").verdict == "NOT MEASURED HERE"
