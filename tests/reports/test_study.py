"""A study's report marks what other code measured wherever it is shown, and no two devices have one name."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reports import blocks
from reports._devices import device_names, shortened
from reports.study import stale_note, study_report
from suite import exhibit
from suite.claims import Claim, Finding, Row, View, judge_all
from suite.study import Study

FIRST = "Intel(R) Xeon(R) Processor family 6 model 207 stepping 2 avx512"
SECOND = "Intel(R) Xeon(R) Processor family 6 model 143 stepping 8 avx512"
GPU = "NVIDIA H200"


@dataclass
class Measured:
    device: str
    origin: str = "published"
    environment: dict = field(default_factory=dict)

    def here(self) -> "Measured":
        return Measured(self.device, "here", {"cpu_model": self.device})


def row(name: str, *, stale: bool = False, device: str = GPU, origin: str = "published") -> Row:
    return Row(
        study="s",
        point=name,
        key="k",
        bundle_id=name,
        run_id=f"run-{name}",
        label=name,
        measure="m:x",
        params={},
        seed=0,
        replicate=0,
        metrics={},
        facts={},
        kind="measured",
        status="OK",
        device=device,
        machine="m",
        environment={"cpu_model": FIRST},
        commit="c",
        dirty=False,
        code="d",
        origin=origin,
        started_at="2026-01-01T00:00:00+00:00",
        path=Path("."),
        files={},
        stale=stale,
    )


# ---- names of devices ----------------------------------------------------------------------------------------------------------


def test_the_cpu_that_measured_here_is_this_cpu_and_others_have_their_family():
    assert device_names([Measured(FIRST).here(), Measured(SECOND), Measured(GPU)]) == {FIRST: "this CPU", SECOND: "Intel Xeon", GPU: GPU}


@pytest.mark.parametrize(
    "rows, kind", [([Measured(FIRST), Measured(SECOND)], "Intel Xeon"), ([Measured(FIRST).here(), Measured(SECOND).here()], "this CPU")]
)
def test_two_cpus_of_one_family_are_told_apart_by_what_differs(rows, kind):
    assert device_names(rows) == {FIRST: f"{kind} (model 207 stepping 2)", SECOND: f"{kind} (model 143 stepping 8)"}


def test_a_name_whose_words_are_all_in_another_stays_whole():
    longer = FIRST + " amx"
    assert device_names([Measured(FIRST), Measured(longer)]) == {FIRST: FIRST, longer: "Intel Xeon (amx)"}


def test_a_gpu_that_measured_here_keeps_its_name_and_a_device_without_a_known_family_too():
    names = device_names([Measured(GPU, "here", {"cpu_model": FIRST}), Measured("Processor")])
    assert names == {GPU: GPU, "Processor": "Processor"}


def test_titles_carry_short_names():
    assert shortened(f"Time, {FIRST}", {FIRST: "this CPU", GPU: GPU}) == "Time, this CPU"


# ---- what other code measured --------------------------------------------------------------------------------------------------


@pytest.fixture
def report():
    """Every kind of exhibit over three rows, one of them stale, and a claim on them."""

    def made(stale: int) -> blocks.Report:
        rows = tuple(row(str(i), stale=i < stale) for i in range(3))
        cell = exhibit.MatrixCell(state="equal", text="1/1†" if stale else "1/1")
        shown = [
            exhibit.Matrix(title="M", row_labels=["a"], column_labels=[f"{GPU}, batch 1"], cells=[[cell]], sources=rows, note="first."),
            exhibit.Table(title="T", columns=[exhibit.Column(name="device"), exhibit.Column(name="x")], rows=[(GPU, 1.0), (GPU, None)], sources=rows),
            exhibit.Curves(title="C", x_label="x", y_label="y", series=[exhibit.Series(name="s", x=[1, 2], y=[1.0, 2.0])], sources=rows),
            exhibit.Matrix(title="later", row_labels=["a"], column_labels=[f"{GPU}, batch 1"], cells=[[cell]], sources=rows),
        ]
        claim = Claim(id="c", statement="s", target=1.0, bar=1.0, test=lambda view: Finding(value=2.0, low=1.5, high=2.5, n=9, rows=rows, note="read at M=1"))
        study = Study(
            name="s", title="t", summary="u", presets={"smoke": lambda: None}, cells=lambda c: [], claims=(claim,), exhibits=lambda view: shown
        )
        view = View(study="s", rows_=rows, planned={})
        return study_report(study, view, judge_all(study, view), {}, "c0ffee")

    return made


def found(report: blocks.Report, kind: type) -> list:
    return [b for b in report.blocks if isinstance(b, kind)]


def test_every_exhibit_over_a_stale_row_is_marked_and_says_how_many(report):
    made = report(1)
    matrix, table, (plot, curve) = found(made, blocks.Matrix)[0], found(made, blocks.Table)[0], found(made, blocks.Figure)
    assert [b.caption for b in (matrix, table, curve)] == ["M (STALE in part)", "T (STALE in part)", "C (STALE in part)"] and plot.caption.endswith(
        "(STALE)"
    )
    sentence = "STALE: 1 of the 3 results behind it were measured with other code than today's"
    assert matrix.note == f"first. {sentence}, those of the cells marked †." and table.note == f"{sentence}."
    assert any(b.text == f"{sentence}." for b in found(made, blocks.Prose))
    assert any("1 STALE" in item.detail for item in found(made, blocks.KeyFacts)[0].items)


def test_where_all_rows_are_stale_the_caption_says_so(report):
    assert {b.caption for b in found(report(3), blocks.Table)} == {"T (STALE)"}


def test_rows_of_todays_code_carry_no_mark(report):
    made = report(0)
    assert stale_note([row("a")]) == "" and not any(
        "STALE" in b.caption for kind in (blocks.Matrix, blocks.Table, blocks.Figure) for b in found(made, kind)
    )
    assert not any("STALE" in item.detail for item in found(made, blocks.KeyFacts)[0].items)


def test_the_matrices_that_a_study_puts_first_stand_above_its_claims_and_later_ones_in_their_place(report):
    order = [
        type(b).__name__ if not isinstance(b, blocks.Matrix) else b.caption
        for b in report(0).blocks
        if isinstance(b, (blocks.Matrix, blocks.ClaimLedger, blocks.Table))
    ]
    assert order == ["M", "ClaimLedger", "Table", "later"]


def test_the_ledger_says_what_was_read_and_what_decided(report):
    from reports._tables import claim_table

    row, = found(report(0), blocks.ClaimLedger)[0].rows
    assert row.note.startswith("read at M=1") and "its test gives neither interval_at nor p_value" in row.note and row.verdict == "UNDECIDED"
    lines = [one["t"] for line in claim_table(blocks.ClaimLedger(rows=(row,)))["rows"][0][1]["lines"] for one in line]
    assert row.note in lines


def test_a_gap_in_a_table_is_not_measured_here(report):
    assert [r[1] for r in found(report(0), blocks.Table)[0].text_rows()] == ["1.00", "— NOT MEASURED HERE"]
