"""`make soak`: the long tier, and a record of it that the report can print.

Writes reports/published/soak.json: commit, date, and per test its outcome and seconds.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from suite.identity import ROOT
from suite.machine import commit, environment

RECORD = ROOT / "reports" / "published" / "soak.json"
LIMIT_S = 3600


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "soak.xml"
        command = [sys.executable, "-m", "pytest", "-m", "soak", "--override-ini", f"timeout={LIMIT_S}", f"--junitxml={xml}", *(arguments or ["tests"])]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not arguments and xml.is_file():
            RECORD.write_text(json.dumps(record(xml), indent=1, sort_keys=True) + "\n")
    return code


def record(xml: Path) -> dict:
    """The junit file as the few facts that matter."""
    sha, dirty = commit(ROOT)
    cases = ET.parse(xml).getroot().iter("testcase")
    tests = {f"{c.get('classname')}::{c.get('name')}": {"outcome": _outcome(c), "seconds": round(float(c.get("time", 0)), 1)} for c in cases}
    env = environment("cpu")
    return {"commit": sha, "dirty": dirty, "date": datetime.date.today().isoformat(), "machine": env["device_model"], "torch": env["torch"], "tests": tests}


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return kind
    return "passed"
