"""`make test` and `make soak`: python -m tests [--soak] [pytest arguments].

Two pytest processes: the main one, and one with the Triton interpreter (it is chosen when a kernel is
decorated, so it needs a process of its own). The set of skipped tests is compared with
tests/skips.txt: a test that silently stops running fails the suite.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPS = HERE / "skips.txt"


def run_pytest(arguments: list[str], skips: Path, **env: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=HERE.parent, env={**os.environ, "SUITE_SKIPS_OUT": str(skips), **env}, check=False).returncode


def unexpected_skips(seen: set[str]) -> list[str]:
    """Differences to the checked-in set, as lines to print."""
    expected = {line for line in SKIPS.read_text().splitlines() if line and not line.startswith("#")}
    return [f"skipped, but not in {SKIPS.name}: {s}" for s in sorted(seen - expected)] + [f"in {SKIPS.name}, but it was not skipped: {s}" for s in sorted(expected - seen)]


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] == "--soak":
        from tests.soak.run import main as soak

        return soak(arguments[1:])
    with tempfile.TemporaryDirectory() as folder:
        skips = [Path(folder) / "main.txt", Path(folder) / "interpreter.txt"]
        main_code = run_pytest(arguments, skips[0])
        if arguments:
            return main_code
        interpreter_code = run_pytest(["-m", "interpreter", "tests/kernels/interpreter"], skips[1], TRITON_INTERPRET="1")
        seen = {line for path in skips if path.is_file() for line in path.read_text().splitlines()}
    problems = [] if has_gpu() else unexpected_skips(seen)
    for problem in problems:
        print(problem)
    return main_code or interpreter_code or bool(problems)


def has_gpu() -> bool:
    return subprocess.run([sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
