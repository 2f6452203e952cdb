"""The truth table of verdicts, and which rows a claim may use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from suite.claims import Claim, Finding, Row, judge_all, make_view
from suite.identity import sha256_file
from suite.stats import ratio_interval

EXCEEDED, REPRODUCED, NOT_REPRODUCED, UNDECIDED, NOT_MEASURED = "EXCEEDED", "REPRODUCED", "NOT REPRODUCED", "UNDECIDED", "NOT MEASURED HERE"
MODULE, TODAY, OLD = "studies.demo.cells", "1" * 64, "0" * 64
INF, NAN = math.inf, math.nan


def row(point: str = "p", **fields) -> Row:
    usual = dict(study="demo", point=point, key="k", bundle_id=f"{point} {sorted(fields.items())}", label=point, measure=f"{MODULE}:answer", params={}, seed=0, replicate=0, metrics={}, facts={},
                 kind="measured", status="OK", device="NVIDIA H200", machine="0" * 12, environment={}, commit="c0ffee", dirty=False, code=TODAY, origin="here",
                 started_at="2026-01-02T03:04:05+00:00", path=Path("."), files={})
    usual |= fields
    return Row(**usual, run_id=f"run of {usual['bundle_id']}")


def view_of(*rows: Row, planned: tuple[str, ...] = ()):
    return make_view(rows, {p: "DONE" for p in planned}, {MODULE: TODAY})


def claim(test, **fields) -> Claim:
    return Claim(**{**dict(id="c", statement="s", target=2.0, bar=None, test=test), **fields})


def found(low, value, high, *, n: int = 5, rows=None, **fields):
    """A test that finds this whatever the view holds."""
    return lambda view: Finding(low=low, value=value, high=high, n=n, rows=view.rows() if rows is None else rows, interval_at=lambda confidence: (low, high), **fields)


def judge_one(a_claim: Claim, *rows: Row):
    (judged,) = judge_all(SimpleNamespace(name="demo", claims=(a_claim,)), view_of(*(rows or (row(),))))
    return judged


# ---------------------------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("low", "value", "high", "direction", "verdict"),
    [
        (2.2, 2.3, 2.4, "higher", EXCEEDED),  # beyond 2.0 plus its margin of 5%
        (2.1, 2.3, 2.4, "higher", REPRODUCED),  # touches the margin
        (2.0, 2.3, 2.4, "higher", REPRODUCED),
        (1.9, 2.3, 2.4, "higher", UNDECIDED),
        (1.9, 1.95, 2.0, "higher", UNDECIDED),  # reaches the target
        (1.7, 1.8, 1.9, "higher", NOT_REPRODUCED),
        (1.7, 1.8, 1.85, "lower", EXCEEDED),
        (1.7, 1.8, 2.0, "lower", REPRODUCED),
        (1.9, 2.0, 2.1, "lower", UNDECIDED),
        (2.1, 2.2, 2.3, "lower", NOT_REPRODUCED),
        (2.0, 2.0, 2.0, "higher", REPRODUCED),  # exact counts
        (2.5, 2.5, 2.5, "higher", EXCEEDED),
        (1.99, 1.99, 1.99, "higher", NOT_REPRODUCED),
        (INF, INF, INF, "lower", NOT_REPRODUCED),  # a perplexity that diverged
        (INF, INF, INF, "higher", EXCEEDED),
        (1.9, INF, INF, "higher", UNDECIDED),
        (-INF, 1.0, INF, "higher", UNDECIDED),
        (NAN, NAN, NAN, "higher", UNDECIDED),
        (1.0, NAN, 3.0, "lower", UNDECIDED),
    ],
)
def test_the_verdict_follows_the_whole_interval(low, value, high, direction, verdict):
    assert judge_one(claim(found(low, value, high), direction=direction)).verdict == verdict


@pytest.mark.parametrize(
    ("finding", "verdict", "why"),
    [
        (dict(n=4), UNDECIDED, "n = 4, and it needs 5"),
        (dict(n=5), EXCEEDED, ""),
        (dict(missing=1), UNDECIDED, "1 planned points have no OK run"),
        (dict(missing=1, n=4), UNDECIDED, "n = 4, and it needs 5"),
    ],
)
def test_too_few_or_missing_points_make_a_good_result_undecided(finding, verdict, why):
    judged = judge_one(claim(found(3.0, 3.1, 3.2, **finding), smallest_n=5))
    assert (judged.verdict, judged.note) == (verdict, why)


def test_a_missing_point_does_not_hide_a_failure():
    assert judge_one(claim(found(1.0, 1.0, 1.0, missing=3))).verdict == NOT_REPRODUCED


def test_all_equal_needs_every_planned_cell():
    assert judge_one(claim(found(1.0, 1.0, 1.0, missing=1), target=1.0, margin=0.0)).verdict == UNDECIDED
    assert judge_one(claim(found(1.0, 1.0, 1.0), target=1.0, margin=0.0)).verdict == REPRODUCED


def test_not_measured_here_is_only_where_no_run_exists():
    judged = judge_one(claim(lambda view: None, bar=1.0))
    assert (judged.verdict, judged.value, judged.bar_met, judged.n, judged.machine, judged.kind) == (NOT_MEASURED, None, None, 0, "", "")


@pytest.mark.parametrize("rival", ["ingested", "published"])
@pytest.mark.parametrize("year", [1999, 2999])
def test_our_own_row_counts_whatever_time_a_foreign_one_claims(rival, year):
    ours, theirs = row(started_at="2026-01-01T00:00:00+00:00"), row(origin=rival, started_at=f"{year}-01-01T00:00:00+00:00")
    for rows in ((ours, theirs), (theirs, ours)):
        assert [r.origin for r in view_of(*rows).rows()] == ["here"]


def test_a_published_row_counts_before_an_ingested_one_and_todays_code_before_both():
    published, ingested = row(origin="published", started_at="2026-01-01T00:00:00+00:00"), row(origin="ingested", started_at="2999-01-01T00:00:00+00:00")
    assert [r.origin for r in view_of(published, ingested).rows()] == ["published"]
    assert [r.origin for r in view_of(row(code=OLD), ingested).rows()] == ["ingested"]
    newer = row(origin="ingested", started_at="2999-01-02T00:00:00+00:00")
    assert [r.started_at[:10] for r in view_of(newer, ingested).rows()] == ["2999-01-02"]


def test_a_claim_about_an_h200_takes_no_gh200():
    judged = judge_one(claim(found(3.0, 3.1, 3.2)), row(device="NVIDIA GH200 480GB"))
    assert (judged.verdict, judged.others) == (NOT_MEASURED, ("NVIDIA GH200 480GB",))
    assert judge_one(claim(found(3.0, 3.1, 3.2)), row(device="NVIDIA H200 NVL")).verdict == EXCEEDED
    both = view_of(row(), row(device="NVIDIA GH200 480GB"))
    assert [r.device for r in both.rows(device="H200")] == ["NVIDIA H200"] and len(both.rows(device="")) == 2


@pytest.mark.parametrize(("value", "direction", "bar", "met"), [(1.5, "higher", 1.5, True), (1.4, "higher", 1.5, False), (1.4, "lower", 1.5, True), (1.6, "lower", 1.5, False), (NAN, "lower", 1.5, False), (1.0, "lower", None, None)])
def test_the_bar_is_met_by_the_value_whatever_the_verdict(value, direction, bar, met):
    judged = judge_one(claim(found(-INF, value, INF) if not math.isnan(value) else found(value, value, value), direction=direction, bar=bar))
    assert (judged.bar_met, judged.verdict) == (met, UNDECIDED)


def test_a_claim_without_target_is_judged_on_its_bar():
    assert judge_one(claim(found(3.0, 3.1, 3.2), target=None, bar=2.0)).verdict == EXCEEDED
    assert judge_one(claim(found(3.0, 3.1, 3.2), target=None)).verdict == UNDECIDED


def test_json_has_no_infinity_and_the_note_says_what_it_was():
    data = json.loads(json.dumps(judge_one(claim(found(INF, INF, INF))).to_json(), allow_nan=False))
    assert data["value"] is None and data["low"] is None and data["note"] == "value inf [inf, inf]"


# ---------------------------------------------------------------------------------------------- the family


def ratio_claim(name: str, logs: list[float], **fields) -> Claim:
    def test(view):
        at = ratio_interval(logs)
        return Finding(value=at.value, low=at.low, high=at.high, n=at.n, rows=view.rows(), interval_at=lambda level: ((i := ratio_interval(logs, level)).low, i.high))

    return claim(test, id=name, target=1.0, margin=0.0, **fields)


NARROW = [0.50, 0.51, 0.49, 0.50, 0.52]
BARELY = [0.02, 0.35, 0.20, 0.10, 0.25]  # alone at 95% just above a ratio of 1


def verdicts(*claims: Claim) -> dict[str, str]:
    return {j.id: j.verdict for j in judge_all(SimpleNamespace(name="demo", claims=claims), view_of(row()))}


def test_a_result_that_stands_alone_may_not_stand_among_the_studys_claims():
    assert verdicts(ratio_claim("barely", BARELY)) == {"barely": EXCEEDED}
    noise = [ratio_claim(f"noise {i}", [0.3, -0.3, 0.2, -0.2, 0.1]) for i in range(5)]
    crowded = judge_all(SimpleNamespace(name="demo", claims=(ratio_claim("barely", BARELY), ratio_claim("narrow", NARROW), *noise)), view_of(row()))
    assert [j.verdict for j in crowded[:2]] == [UNDECIDED, EXCEEDED]
    assert "among the study's claims it is judged at 99" in crowded[0].note
    assert crowded[0].low == ratio_interval(BARELY).low, "the interval shown is the 95% one"


def test_exact_counts_take_no_part_in_the_family():
    exact = [claim(found(1.0, 1.0, 1.0), id=f"exact {i}", target=1.0, margin=0.0) for i in range(20)]
    assert verdicts(ratio_claim("barely", BARELY), *exact)["barely"] == EXCEEDED


@pytest.mark.parametrize(("p", "verdict"), [(0.001, REPRODUCED), (0.2, UNDECIDED), (None, UNDECIDED)])
def test_an_interval_at_one_level_only_is_judged_by_its_p_value(p, verdict):
    def test(view):
        return Finding(value=3.1, low=3.0, high=3.2, n=5, rows=view.rows(), p_value=p)

    assert judge_one(claim(test)).verdict == verdict


# ---------------------------------------------------------------------------------------------- the view


def test_of_one_point_the_newest_row_with_todays_code_is_used():
    rows = [row(code=TODAY, started_at=f"2026-01-0{d}T00:00:00+00:00", commit=f"today {d}") for d in (1, 2)] + [row(code=OLD, started_at="2026-01-09T00:00:00+00:00", commit="old")]
    for order in (rows, rows[::-1]):
        (used,) = view_of(*order).rows()
        assert (used.commit, used.stale) == ("today 2", False)


def test_else_the_newest_older_one_is_used_and_marked_stale_with_its_commit():
    view = view_of(*(row(code=OLD, started_at=f"2026-01-0{d}T00:00:00+00:00", commit=f"old {d}") for d in (1, 3, 2)))
    (judged,) = judge_all(SimpleNamespace(name="demo", claims=(claim(found(3.0, 3.0, 3.0)),)), view)
    assert (judged.stale, judged.commit, judged.verdict) == (True, "old 3", EXCEEDED)


def test_a_row_whose_module_is_gone_is_stale():
    assert view_of(row(measure="studies.demo.gone:answer")).rows()[0].stale


def test_newest_is_told_by_the_moment_not_by_its_text():
    view = view_of(row(started_at="2026-01-01T12:00:00+09:00", commit="earlier"), row(started_at="2026-01-01T04:00:00+00:00", commit="later"))
    assert view.rows()[0].commit == "later"


@pytest.mark.parametrize("status", ["FAILED", "TIMED OUT", "PAUSED"])
def test_only_ok_rows_are_used_even_where_a_failure_is_newer(status):
    view = view_of(row(commit="ok"), row(status=status, started_at="2027-01-01T00:00:00+00:00"), row("other", status=status))
    assert [r.commit for r in view.rows()] == ["ok"]


def test_device_models_stand_side_by_side_in_the_plans_order():
    view = view_of(row("z"), row("b", device="CPU 9000"), row("b"), row("a"), planned=("b", "a"))
    assert [(r.point, r.device) for r in view.rows()] == [("b", "CPU 9000"), ("b", "NVIDIA H200"), ("a", "NVIDIA H200"), ("z", "NVIDIA H200")]
    assert view.planned == {"b": "DONE", "a": "DONE"}


def test_a_claim_is_judged_on_its_reference_device_and_names_the_others():
    def mean(view):
        rows = view.rows(measure="answer")
        value = sum(r.metrics["speed"] for r in rows) / len(rows)
        return Finding(value=value, low=value, high=value, n=len(rows), rows=rows)

    rows = [row("a", metrics={"speed": 3.0}), row("a", device="NVIDIA L4", metrics={"speed": 1.0}), row("b", metrics={"speed": 3.0}), row("b", device="CPU 9000", metrics={"speed": 0.0})]
    study = SimpleNamespace(name="demo", claims=(claim(mean),))
    (judged,) = judge_all(study, view_of(*rows))
    assert (judged.value, judged.n, judged.machine, judged.others, judged.verdict) == (3.0, 2, "NVIDIA H200", ("CPU 9000", "NVIDIA L4"), EXCEEDED)
    (elsewhere,) = judge_all(study, view_of(*(r for r in rows if "H200" not in r.device)))
    assert (elsewhere.verdict, elsewhere.value, elsewhere.others) == (NOT_MEASURED, None, ("CPU 9000", "NVIDIA L4"))
    (on_l4,) = judge_all(study, view_of(*rows[:2]), reference_device="L4")
    assert (on_l4.verdict, on_l4.value, on_l4.others) == (NOT_REPRODUCED, 1.0, ("NVIDIA H200",))


def test_what_is_derived_takes_the_weakest_kind_and_names_its_commits():
    judged = judge_one(claim(found(3.0, 3.0, 3.0), device=""), row("a", kind="simulated"), row("b", device="CPU 9000", dirty=True), row("c", kind="emulated"))
    assert (judged.kind, judged.machine, judged.commit) == ("simulated", "CPU 9000, NVIDIA H200", "c0ffee, c0ffee-dirty")
    assert len(judged.run_ids) == 3


def test_payload_is_checked_each_time_it_is_read(tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.arange(3))
    (tmp_path / "plan.json").write_text("[1]")
    whole = row(path=tmp_path, files={p.name: sha256_file(p) for p in tmp_path.iterdir()})
    assert list(whole.arrays()["x"]) == [0, 1, 2] and whole.record("plan") == [1]
    (tmp_path / "plan.json").write_text("[2]")
    np.savez(tmp_path / "arrays.npz", x=np.arange(4))
    for read in (whole.arrays, lambda: whole.record("plan")):
        with pytest.raises(ValueError, match="does not have the sha256"):
            read()


def test_payload_that_is_not_at_hand_says_so(tmp_path):
    lost = row(path=tmp_path, files={"arrays.npz": "0" * 64})
    with pytest.raises(ValueError, match="suite ingest"):
        lost.arrays()
    with pytest.raises(ValueError, match=r"one of \['arrays.npz'\]"):
        lost.record("plan")
