"""`make test` and `make soak`: python -m tests [--soak] [pytest arguments].

Two pytest processes side by side: the main one, and one with the Triton interpreter (it is chosen when a kernel is decorated, so it needs
a process of its own), whose output follows. The set of skipped tests is compared with tests/skips.txt: a test that silently stops
running fails the suite.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPS = HERE / "skips.txt"


def start_pytest(arguments: list[str], skips: Path, output=None, **env: str) -> subprocess.Popen:
    """pytest in a process of its own; `output`: a file in place of the terminal."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.Popen(command, cwd=HERE.parent, env={**os.environ, "SUITE_SKIPS_OUT": str(skips), **env}, stdout=output, stderr=output)


def unexpected_skips(seen: set[str]) -> list[str]:
    """Differences to the checked-in set, as lines to print."""
    expected = {line for line in SKIPS.read_text().splitlines() if line and not line.startswith("#")}
    return [f"skipped, but not in {SKIPS.name}: {s}" for s in sorted(seen - expected)] + [f"in {SKIPS.name}, but it was not skipped: {s}" for s in sorted(expected - seen)]


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] == "--soak":
        from tests.soak.run import main as soak

        return soak(arguments[1:])
    with tempfile.TemporaryDirectory() as folder:
        skips, log = [Path(folder) / "main.txt", Path(folder) / "interpreter.txt"], Path(folder) / "interpreter.log"
        if arguments:
            return start_pytest(arguments, skips[0]).wait()
        with log.open("w") as output:
            interpreter = start_pytest(["-m", "interpreter", "tests/kernels/interpreter"], skips[1], output, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
            try:
                codes = [start_pytest([], skips[0]).wait(), interpreter.wait()]
            finally:
                interpreter.kill()
        print(f"\nunder the Triton interpreter:\n{log.read_text()}")
        seen = {line for path in skips if path.is_file() for line in path.read_text().splitlines()}
    problems = [] if has_gpu() else unexpected_skips(seen)
    for problem in problems:
        print(problem)
    return max(*codes, bool(problems))


def has_gpu() -> bool:
    return subprocess.run([sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
