"""The HTML and the PDF of one report hold the same tables, and strangers' text stays text in both.

The tests read the real files: html.parser for the page, pypdf for the PDF. Whitespace is dropped before comparing, since
a PDF breaks lines where it must; nothing else is.
"""

import hashlib
import io
import re
from html.parser import HTMLParser

import pytest
from pypdf import PdfReader

from reports import Column, Heading, Interval, Matrix, Missing, Prose, Report, Table, html, pdf, write
from reports._palette import MATRIX_STYLES
from reports.blocks import MATRIX_STATES, VERDICTS
from sample import COLUMNS, H200, ROWS, matrix, sample_report

HOSTILE = ("#import \"@preview/x:1.0.0\": *", "$x^2$ *a* _b_ `c`", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>",
           "{{ 7*7 }}{% raw %}", "#sys.inputs #eval(\"1\")", "= heading", "<label> @ref", "&lt;b&gt; &amp;", "\\u{41} // c /* d */",
           "\"]], [#panic()]", "https://example.org/a.js", "--- 'quoted' -> ...")
CONTROLS = "a\x1b[31mb\x00c\x07\u202ed\u2066e\ud800f"


class Page(HTMLParser):
    """Tables (lists of rows of cell texts), ids, tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._table = self._cell = self._style = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = {key: value or "" for key, value in attrs}
        self.attributes += [(tag, key, value) for key, value in given.items()]
        self.ids += [given["id"]] if "id" in given else []
        if tag == "table":
            self._table = self.tables.setdefault(given["id"], [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            assert tag == "td" or given.get("scope") in ("row", "col"), "every th has a scope"
            self._table[-1].append("")
            self._cell = True
        elif tag in ("style", "title"):
            self._style = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = None
        elif tag in ("style", "title"):
            self._style = None

    def handle_data(self, data: str) -> None:
        if self._style:
            return
        self.text += data
        if self._cell:
            self._table[-1][-1] += data


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def pdf_text(data: bytes) -> str:
    return "".join(page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)


def assert_same_tables(page: Page, data: bytes) -> None:
    """Every cell of every HTML table occurs in the PDF's text, in order; figure data comes last in the PDF."""
    text, at = squeeze(pdf_text(data)), 0
    ordered = sorted(page.tables, key=lambda name: name.startswith("data-"))  # stable: body first
    for name in ordered:
        for row in page.tables[name]:
            for cell in row:
                assert squeeze(cell), f"{name} has an empty cell"
                found = text.find(squeeze(cell), at)
                assert found >= 0, f"{name}: {cell!r} is not in the PDF after {text[max(0, at - 60):at]!r}"
                at = found + len(squeeze(cell))


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_report()


@pytest.fixture(scope="module")
def page_text(report: Report) -> str:
    return html.render(report)


@pytest.fixture(scope="module")
def page(page_text: str) -> Page:
    return Page(page_text)


@pytest.fixture(scope="module")
def pdf_bytes(report: Report) -> bytes:
    return pdf.render(report)


def one_table(*rows: tuple[str, ...], columns: int = 2) -> Report:
    table = Table(caption="t", columns=[Column(name=f"c{i}") for i in range(columns)], rows=rows)
    return Report(title="T", subtitle="s", generated_from="0" * 64, commit="0" * 40, blocks=[table])


def test_every_table_of_the_page_is_in_the_pdf_cell_by_cell(page: Page, pdf_bytes: bytes) -> None:
    assert len(page.tables) == 8  # ledger, timings, two of provenance, four behind figures
    assert_same_tables(page, pdf_bytes)


def test_a_cell_that_one_renderer_lost_is_noticed(page: Page) -> None:
    """Guards the comparison itself: another report's PDF does not pass."""
    with pytest.raises(AssertionError):
        assert_same_tables(page, pdf.render(one_table(("a", "b"))))


def test_hostile_text_is_printed_as_it_stands() -> None:
    rows = [(text, text) for text in HOSTILE]
    given = one_table(*rows)
    text, data = html.render(given), pdf.render(given)
    page, printed = Page(text), squeeze(pdf_text(data))
    assert [row[1] for row in page.tables["table-1"][1:]] == list(HOSTILE)
    assert not {"script", "img", "iframe", "object", "link"} & set(page.tags)
    for one in HOSTILE:
        assert squeeze(one) in printed
    assert_same_tables(page, data)


def test_hostile_text_is_literal_in_every_place_that_shows_text() -> None:
    bad = "<script>#panic(1)</script> $x$"
    given = Report(title=bad, subtitle=bad, generated_from=bad, commit=bad, blocks=[
        Heading(level=2, text=bad), Prose(text=bad),
        Table(caption=bad, columns=[Column(name=bad, unit=bad)], rows=[[Missing(bad)]], note=bad, machine=bad)])
    text = html.render(given)
    assert "<script>" not in text
    # Title, subtitle, heading, prose, caption, machine, column, unit, cell, note; commit and snapshot are cut short.
    assert Page(text).text.count(bad) >= 10
    assert squeeze(pdf_text(pdf.render(given))).count(squeeze(bad)) >= 10


def test_control_and_direction_characters_are_stripped_in_both() -> None:
    given = one_table((CONTROLS, "x"))
    text = html.render(given)
    assert "a[31mbcdef" in text and not set("\x1b\x00\x07\u202e\u2066\ud800") & set(text)
    assert "a[31mbcdef" in squeeze(pdf_text(pdf.render(given)))


def test_the_page_loads_and_runs_nothing(page: Page) -> None:
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form", "image", "foreignObject"} & set(page.tags)
    for tag, key, value in page.attributes:
        assert not key.startswith("on"), (tag, key)
        if key in ("href", "xlink:href", "src", "srcset", "data", "action"):
            assert value.startswith("#"), (tag, key, value)
        assert not re.search(r"url\((?!#)", value), (tag, key, value)


def test_the_style_sheet_loads_nothing(page_text: str) -> None:
    css = "".join(re.findall(r"<style>(.*?)</style>", page_text, re.DOTALL))
    assert css and "url(" not in css and "@import" not in css


def test_ids_are_unique_over_all_inline_pictures_and_every_reference_resolves(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    references = {value[1:] for _, key, value in page.attributes if key in ("href", "xlink:href")}
    references |= {name for _, _, value in page.attributes for name in re.findall(r"url\(#([^)]+)\)", value)}
    assert references and references <= set(page.ids)


def test_no_picture_leaks_a_style_into_the_page(page: Page, page_text: str) -> None:
    assert page.tags.count("style") == 1 and "*{stroke" not in page_text


def test_the_page_is_accessible(page: Page) -> None:
    assert page.tags.count("h1") == 1 and page.tags.count("main") == 1
    pictures = [value for tag, key, value in page.attributes if tag == "div" and (key, value) == ("role", "img")]
    assert len(pictures) == page.tags.count("figure") == page.tags.count("details") == 4
    assert all(value for tag, key, value in page.attributes if key == "aria-label")


def test_the_same_report_gives_the_same_bytes(report: Report, page_text: str, pdf_bytes: bytes) -> None:
    assert html.render(sample_report()) == page_text
    assert hashlib.sha256(pdf.render(sample_report())).digest() == hashlib.sha256(pdf_bytes).digest()


def test_the_pdf_is_tagged_titled_undated_and_in_a4(report: Report, pdf_bytes: bytes) -> None:
    reader = PdfReader(io.BytesIO(pdf_bytes))
    root = reader.trailer["/Root"]
    assert root["/MarkInfo"]["/Marked"] and root["/Lang"] and "/StructTreeRoot" in root
    assert reader.metadata.title == report.title and reader.metadata.creation_date is None
    sizes = {tuple(sorted(round(float(x)) for x in (page.mediabox.width, page.mediabox.height))) for page in reader.pages}
    assert sizes == {(595, 842)}


def test_every_pdf_page_says_which_of_how_many(pdf_bytes: bytes) -> None:
    pages = [page.extract_text() for page in PdfReader(io.BytesIO(pdf_bytes)).pages]
    for i, text in enumerate(pages, start=1):
        assert squeeze(f"page {i} of {len(pages)}") in squeeze(text)


def test_a_long_table_spans_pages_and_repeats_its_header() -> None:
    given = one_table(*((f"row {i}", f"value {i}") for i in range(150)))
    data = pdf.render(given)
    pages = [squeeze(page.extract_text()) for page in PdfReader(io.BytesIO(data)).pages]
    assert len(pages) >= 3
    assert all("c0c1" in text for text in pages)
    assert_same_tables(Page(html.render(given)), data)


@pytest.mark.parametrize("columns", [8, 16, 24], ids="{} columns".format)
def test_a_wide_table_stays_on_the_page(columns: int) -> None:
    """8 fit upright, 16 lie down, 24 break inside words; text positions tell whether anything ran off the paper."""
    rows = [tuple(f"r{r}c{c}" + "_measurement" * (c % 3) for c in range(columns)) for r in range(4)]
    given = one_table(*rows, columns=columns)
    data = pdf.render(given)
    for page in PdfReader(io.BytesIO(data)).pages:
        seen: list[tuple[float, str]] = []
        page.extract_text(visitor_text=lambda text, cm, tm, font, size, into=seen: into.append((tm[4] * cm[0] + cm[4], text)))
        margin_pt = 56  # 2 cm, less rounding
        # A run starts at x and is at least a third of an em a character wide (no size is under 6 pt).
        right = max(x + 2.0 * len(text.strip()) for x, text in seen if text.strip())
        assert right < float(page.mediabox.width) - margin_pt
    assert_same_tables(Page(html.render(given)), data)


def test_two_wide_tables_in_a_row_leave_no_empty_page() -> None:
    wide = one_table(tuple(f"{'long' * 3}{c}" for c in range(16)), columns=16).blocks[0]
    given = Report(title="T", subtitle="s", generated_from="0" * 64, commit="0" * 40, blocks=[wide, wide, wide])
    pages = [page.extract_text() for page in PdfReader(io.BytesIO(pdf.render(given))).pages]
    assert len(pages) == 4 and all("longlonglong" in squeeze(text) for text in pages[1:])


def test_a_64_character_digest_is_broken_not_clipped() -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    given = one_table(*[(digest, digest, digest, digest)], columns=4)
    data = pdf.render(given)
    assert squeeze(pdf_text(data)).count(digest) == 4


def test_every_matrix_state_has_a_legend_entry_and_its_own_sign() -> None:
    from reports.figures import matrix_svg

    svg = matrix_svg(matrix())
    legend = dict(re.findall(r'<g data-state="(\w+)">(<\w+)', svg))
    assert set(legend) == set(MATRIX_STATES) == set(MATRIX_STYLES)


def test_a_matrix_of_ten_by_twelve_with_long_labels_stays_in_its_picture() -> None:
    from reports.figures import matrix_svg

    long = Matrix(caption="c", row_labels=[f"implementation with a rather long name, variant {i}" for i in range(10)],
                  column_labels=[f"schedule_with_a_long_unbroken_name_{j}" for j in range(12)], column_kinds=["measured"] * 12,
                  cells=[[matrix().cells[i % 8][j % 7] for j in range(12)] for i in range(10)], run_ids=["r"], commit="c")
    svg = matrix_svg(long)
    width, height = (float(x) for x in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    assert width / 720 < 1.35  # 12 px text is then still above 6 pt in print
    for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", svg):
        assert 0 <= float(x) <= width and 0 <= float(y) <= height


def test_a_matrix_of_forty_rows_is_no_taller_than_a_page() -> None:
    """Rows get low, and the PDF scales what is taller still: heading, picture and caption stay on one page."""
    tall = Matrix(caption="A tall matrix", row_labels=[f"operator {i}" for i in range(40)], column_labels=["torch 2"], column_kinds=["measured"],
                  cells=[[matrix().cells[i % 8][0]] for i in range(40)], run_ids=["r"], commit="c", note="the end of the caption")
    given = Report(title="T", subtitle="s", generated_from="0" * 64, commit="0" * 40, blocks=[Heading(level=2, text="Tall heading"), tall])
    pages = [squeeze(page.extract_text()) for page in PdfReader(io.BytesIO(pdf.render(given))).pages]
    assert "theendofthecaption" in next(p for p in pages if "Tallheading" in p)
    text_x, text_y = zip(*((float(x), float(y)) for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", html.render(given))))
    assert min(text_x) >= 0 and max(text_y) < 40 * 42


def test_all_five_verdicts_are_shown_with_symbol_word_and_colour(page: Page, page_text: str, pdf_bytes: bytes) -> None:
    printed = squeeze(pdf_text(pdf_bytes))
    for verdict in VERDICTS:
        assert f'class="verdict v-{verdict.lower().replace(" ", "-")}"' in page_text
        assert squeeze(verdict) in printed


def test_write_makes_both_files_and_leaves_nothing_else(report: Report, page_text: str, tmp_path) -> None:
    html_path, pdf_path = write(report, tmp_path / "new" / "out")
    assert html_path.read_text(encoding="utf-8") == page_text and pdf_path.read_bytes().startswith(b"%PDF-")
    assert {path.name for path in html_path.parent.iterdir()} == {"report.html", "report.pdf"}


def test_a_failed_render_leaves_the_earlier_report(report: Report, tmp_path, monkeypatch) -> None:
    html_path, _ = write(one_table(("old", "old")), tmp_path)
    before = html_path.read_bytes()

    def fail(report: Report) -> bytes:
        raise RuntimeError("no PDF today")

    monkeypatch.setattr(pdf, "render", fail)
    with pytest.raises(RuntimeError, match="no PDF today"):
        write(report, tmp_path)
    assert html_path.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_the_sample_is_as_large_as_a_real_study() -> None:
    assert len(ROWS) == 8 and len(COLUMNS) == 8 and H200.kind == "measured"
    assert Interval(value=1, low=1, high=1)
