"""Fixtures that every room uses: a checkout of its own with the toy study, and the record of what was skipped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_skipped: set[str] = set()


@pytest.hookimpl
def pytest_runtest_logreport(report) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.add(f"{report.nodeid.partition('[')[0]}: {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish() -> None:
    if out := os.environ.get("SUITE_SKIPS_OUT"):
        Path(out).write_text("".join(f"{line}\n" for line in sorted(_skipped)))


@dataclass(frozen=True)
class Checkout:
    """A copy of the tree with the toy study in it, its own state folder and locks."""

    path: Path
    env: dict[str, str]

    def suite(self, *arguments: str, check: bool = False, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "suite", *arguments], cwd=self.path, env={**self.env, **env}, capture_output=True, text=True, check=check, timeout=timeout_s)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "suite", *arguments], cwd=self.path, env={**self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def state(self) -> Path:
        return self.path / ".state"

    def bundles(self, **fields: str) -> list[dict]:
        """bundle.json of every attempt, oldest first, that has these header fields."""
        found = []
        for path in self.state.glob("bundles/??/*/*/bundle.json"):
            with contextlib.suppress(ValueError):  # a test may have broken one
                found.append(json.loads(path.read_text()))
        return sorted((b for b in found if all(b[k] == v for k, v in fields.items())), key=lambda b: b["started_at"])

    def bundles_ok_points(self) -> set[str]:
        """Points that have a readable OK bundle."""
        return {b["point"] for b in self.bundles(status="OK")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh checkout; without mlflow's cost: `bundles only` unless a test asks for tracking."""
    tree = tmp_path / "tree"
    for room in ("suite", "kernels", "studies", "reports"):
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "published"))
    shutil.copytree(ROOT / "tests" / "toy", tree / "studies" / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    env = {k: v for k, v in os.environ.items() if k not in ("SUITE_STATE", "MLFLOW_TRACKING_URI")}
    env |= {"SUITE_LOCK_DIR": str(tmp_path / "locks"), "SUITE_COMMIT": "0" * 40, "PYTHONPATH": str(tree), "SUITE_NO_TRACKING": "1"}
    return Checkout(tree, env)
