"""What a block refuses, what its digest covers, and how numbers are printed."""

from dataclasses import replace

import pytest

from reports import (
    ClaimLedger, Column, Figure, Group, Heading, Interval, KeyFacts, Matrix, MatrixCell, Missing,
    OtherReading, Prose, Provenance, Report, Table,
)
from reports import _svg
from reports.figures import Ratio, Reading, Series, bar_ratio, claims_plot, dot_interval_plot, line_curves
from reports.format import cell_text, clean, interval, number, quantity, stated, weakest_kind
from sample import COMMIT, H200, RUNS, curves, ledger, matrix, timings

COLUMNS = [Column(name="a"), Column(name="b", align="right")]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1">{}</svg>'
TABLE = Table(caption="c", columns=COLUMNS, rows=[["x", 1.0]], kind="measured")
CLAIM = ledger().rows[3]


def table(**fields: object) -> Table:
    return Table(**({"caption": "c", "columns": COLUMNS, "rows": [["x", 1.0]], "kind": "measured"} | fields))


def figure(svg: str) -> Figure:
    return Figure(caption="c", svg=svg, alt="a", table=TABLE, run_ids=["r"], commit="c")


# Each case breaks one rule; the text is what the message must name.
BAD = {
    "short row": (lambda: table(rows=[["x"]]), "every row is as wide"),
    "empty cell": (lambda: table(rows=[["x", ""]]), "Missing"),
    "none": (lambda: table(rows=[["x", None]]), "Missing"),
    "nan": (lambda: table(rows=[["x", float("nan")]]), "NaN"),
    "control only": (lambda: table(rows=[["\x1b", 1.0]]), "Missing"),
    "no rows": (lambda: table(rows=[]), "at least one row"),
    "no kind": (lambda: table(kind=""), "carries their kind"),
    "wrong kind": (lambda: table(kind="guessed"), "one of measured"),
    "two kinds": (lambda: table(kinds=["measured"]), "drop one"),
    "kinds short": (lambda: table(kind="", kinds=["measured"] * 2), "one entry a row"),
    "too many columns": (lambda: table(columns=[Column(name="a")] * 25, rows=[["x"] * 25]), "split it"),
    "alignment": (lambda: Column(name="a", align="middle"), "aligns"),
    "heading level": (lambda: Heading(level=1, text="x"), "Report.title"),
    "empty prose": (lambda: Prose(text=" "), "non-empty"),
    "interval": (lambda: Interval(value=1.0, low=2.0, high=3.0), "low <= value <= high"),
    "missing": (lambda: Missing(" "), "says why"),
    "matrix state": (lambda: MatrixCell(state="ok"), "one of equal"),
    "matrix differs": (lambda: MatrixCell(state="differs"), "by how much"),
    "matrix text": (lambda: MatrixCell(state="equal", text="x" * 17), "at most 16"),
    "matrix shape": (lambda: replace_matrix(row_labels=["a"]), "like the labels"),
    "matrix groups": (lambda: replace_matrix(row_groups=[Group(label="a", size=1)]), "cover all"),
    "matrix kinds": (lambda: replace_matrix(column_kinds=["measured"]), "every column carries its kind"),
    "matrix measured without kind": (lambda: replace_matrix(column_kinds=[""] * 8), "carries its kind"),
    "matrix runs": (lambda: replace_matrix(run_ids=[]), "names the runs"),
    "figure runs": (lambda: Figure(caption="c", svg=SVG.format(""), alt="a", table=TABLE, run_ids=[], commit="c"), "names the runs"),
    "script in svg": (lambda: figure(SVG.format("<script>1</script>")), "shapes and text only"),
    "handler in svg": (lambda: figure(SVG.format('<path onload="x()"/>')), "runs nothing"),
    "link in svg": (lambda: figure(SVG.format('<use href="https://x/y"/>')), "loads nothing"),
    "url in svg": (lambda: figure(SVG.format('<path style="fill:url(https://x)"/>')), "loads nothing"),
    "foreign in svg": (lambda: figure(SVG.format("<foreignObject/>")), "shapes and text only"),
    "entity in svg": (lambda: figure('<!DOCTYPE a [<!ENTITY b "c">]>' + SVG.format("&b;")), "no entities"),
    "no svg": (lambda: figure("<p>"), "well-formed"),
    "verdict": (lambda: replace(CLAIM, verdict="OK"), "a verdict is one of"),
    "measured nowhere": (lambda: replace(CLAIM, verdict="NOT MEASURED HERE"), "has no value"),
    "verdict without value": (lambda: replace(CLAIM, value=None), "stands on a value"),
    "half interval": (lambda: replace(CLAIM, low=None), "both ends"),
    "claim without n": (lambda: replace(CLAIM, n=None), "carries machine and n"),
    "claim without kind": (lambda: replace(CLAIM, kind=""), "one of measured"),
    "claim without commit": (lambda: replace(CLAIM, commit=""), "names the commit"),
    "bar met without bar": (lambda: replace(CLAIM, bar=None), "no bar"),
    "other without kind": (lambda: OtherReading(machine="m", verdict="EXCEEDED", value=1.0, n=1), "one of measured"),
    "claim twice": (lambda: ClaimLedger(rows=[CLAIM, CLAIM]), "once"),
    "no claims": (lambda: ClaimLedger(rows=[]), "at least one claim"),
    "no facts": (lambda: KeyFacts(items=[]), "at least one item"),
    "no command": (lambda: Provenance(commands=[]), "names the command"),
    "skipped level": (lambda: report(Heading(level=3, text="x")), "do not skip"),
    "no block": (lambda: report("text"), "wrap text"),
    "series": (lambda: Series(label="s", x=[1, 2], y=[1]), "one y per x"),
}


def report(*blocks: object) -> Report:
    return Report(title="t", subtitle="s", generated_from="d", commit="c", blocks=blocks)


def replace_matrix(**fields: object) -> Matrix:
    whole = matrix()
    names = ("caption", "row_labels", "column_labels", "cells", "column_kinds", "run_ids", "commit", "row_groups", "column_groups")
    return Matrix(**({name: getattr(whole, name) for name in names} | fields))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_block_is_refused_with_the_rule_and_what_came(case: str) -> None:
    make, told = BAD[case]
    with pytest.raises(ValueError, match=told) as caught:
        make()
    assert "got" in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize("change", [{"rows": [["x", 1.0000000000000002]]}, {"rows": [["x", 1]]}, {"rows": [["x", "1.0"]]},
                                    {"machine": "m"}, {"kind": "emulated"}, {"columns": [Column(name="a"), Column(name="b", unit="s")]}],
                         ids=["last bit", "type int", "type text", "machine", "kind", "unit"])
def test_the_digest_changes_with_the_data_even_where_the_print_does_not(change: dict) -> None:
    assert table(**change).sha256 != TABLE.sha256


@pytest.mark.parametrize("change", [{"caption": "other"}, {"note": "other"}], ids=str)
def test_the_digest_does_not_change_with_the_words_around_the_data(change: dict) -> None:
    assert table(**change).sha256 == TABLE.sha256


def test_a_figure_takes_its_digest_from_its_table_and_none_from_outside() -> None:
    assert curves().sha256 == curves().table.sha256
    with pytest.raises(TypeError):
        Figure(caption="c", svg=SVG.format(""), alt="a", table=TABLE, run_ids=["r"], commit="c", sha256="0" * 64)


def test_a_matrix_digest_follows_its_cells() -> None:
    cells = [list(row) for row in matrix().cells]
    cells[0][0] = MatrixCell(state="differs", text="1 ULP")
    assert replace_matrix(cells=cells).sha256 != matrix().sha256


def ratio(value: float) -> Interval:
    return Interval(value=value, low=value * 0.9, high=value * 1.1)


DRAWN = {
    "line_curves": lambda: curves(),
    "bar_ratio": lambda: bar_ratio(caption="c", alt="a", x_label="x", source=H200, ratios=[
        Ratio(label="$a_b$ & <i>", interval=ratio(1.3)), Ratio(label="slower", interval=ratio(0.7))]),
    "dot_interval_plot": lambda: dot_interval_plot(caption="c", alt="a", x_label="x", source=H200, readings=[
        Reading(label="l", interval=ratio(2.0), verdict="UNDECIDED", target=2.1, bar=None)]),
    "claims_plot": lambda: claims_plot(ledger(), caption="c", run_ids=RUNS, commit=COMMIT),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_drawn_twice_with_the_same_bytes_and_passes_its_own_check(name: str) -> None:
    first, second = DRAWN[name](), DRAWN[name]()
    assert first.svg == second.svg
    _svg.check(first.svg)
    assert "<style" not in first.svg and "<metadata" not in first.svg and "<!DOCTYPE" not in first.svg


def test_a_claim_that_is_better_lower_is_turned_over_in_the_claims_plot() -> None:
    drawn = DRAWN["claims_plot"]().table
    row = next(row for row in drawn.rows if row[0] == "weight_bytes")
    assert row[1].value == pytest.approx(2.05 / 2.011) and row[1].low < row[1].value < row[1].high


def test_series_of_two_kinds_are_labelled_row_by_row() -> None:
    drawn = line_curves(caption="c", alt="a", x_label="x", y_label="y", source=H200, series=[
        Series(label="a", x=[1, 2], y=[1.0, 2.0]), Series(label="b", x=[1], y=[3.0], kind="emulated")])
    assert drawn.table.kinds == ("measured", "measured", "emulated")


@pytest.mark.parametrize("value, text", [
    (0.000000132, "1.32 × 10⁻⁷"), (43690, "43\u202f690"), (4096, "4096"), (0.5, "0.500"), (123.456, "123"), (-2.5, "−2.50"),
    (2.0e9, "2.00 × 10⁹"), (float("inf"), "∞"), (0.0, "0"), (True, "yes"), (Missing("no GPU"), "— no GPU"),
    (Interval(value=5.12, low=4.98, high=5.27), "5.12 [4.98, 5.27]")])
def test_a_cell_prints(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_an_interval_keeps_enough_decimals_to_be_told_from_a_point() -> None:
    assert interval(1.0001, 1.00005, 1.0003, "×") == "1.0001× [1.0001, 1.0003]"
    assert interval(384, 380, 390) == "384 [380, 390]"


def test_units_stand_after_a_thin_space() -> None:
    assert (quantity(4.25, "TB/s"), quantity(12.0, "%"), stated(0.9), stated(5, "×")) == ("4.25\u2009TB/s", "12.0%", "0.9", "5×")


def test_a_derived_number_takes_the_weakest_kind() -> None:
    assert weakest_kind(["measured", "simulated", "emulated"]) == "simulated"


def test_clean_keeps_letters_of_every_script_and_drops_what_steers_a_terminal() -> None:
    assert clean("Größe 大 עברית\x1b[0m\u202e\n2") == "Größe 大 עברית[0m 2"


def test_numbers_must_be_numbers() -> None:
    with pytest.raises(ValueError, match="got x='3'"):
        number("3")


def test_the_timing_table_prints_its_kind_per_row() -> None:
    assert set(timings().kinds) == {"measured", "emulated"}
