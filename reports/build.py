"""Write a report to disk: HTML and PDF side by side, whole or not at all.

    html_path, pdf_path = write(report, "out/")        # out/report.html, out/report.pdf

Both are rendered before either is written, into temporary names that are renamed: a reader never sees half a file, and a
failure leaves the earlier report as it was.
"""

import os
import tempfile
from pathlib import Path

from reports.blocks import Report

__all__ = ["write"]


def write(report: Report, out_dir: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Render `report` into `out_dir` (made if absent); returns the paths of the HTML and the PDF."""
    # Imported here so that `import reports` needs neither jinja2 nor typst.
    from reports import html, pdf

    pages = {"report.html": html.render(report).encode(), "report.pdf": pdf.render(report)}
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in pages.items():
        _replace(folder / name, data)
    return folder / "report.html", folder / "report.pdf"


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a report is for reading
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
