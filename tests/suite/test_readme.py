"""The README's worked example runs as it stands, and is as short as it says."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 60


def example_files() -> dict[str, str]:
    """path -> text of every file that the README shows in full."""
    return dict(re.findall(r"`(studies/sums/\w+\.py)`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def test_the_worked_example_is_short():
    files = example_files()
    assert set(files) == {"studies/sums/cells.py", "studies/sums/study.py"}
    assert sum(text.count("\n") for text in files.values()) < MAX_LINES


def test_the_worked_example_runs_judges_and_reports(checkout):
    for name, text in example_files().items():
        path = checkout.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    del checkout.env["SUITE_NO_TRACKING"]
    run = checkout.suite("run", "sums", check=True)
    assert "pairwise_is_close" in run.stdout
    checkout.suite("report", "sums", check=True)
    assert "pairwise" in (checkout.state / "reports" / "sums" / "report.html").read_text()
