"""Set-up of `.venv`, for the Makefile. Standard library only: it runs before anything is installed.

    python3 -m suite.setup_env --venv .venv --torch torch==2.13.0 --triton triton==3.6.0

Two steps: pip installs torch and lets torch's metadata choose its triton; then the rest, under
constraints that name neither. A stamp holds the hash of all that was asked for; a `.venv` without the
right stamp is built anew, and a lock lets two `make`s at once take turns.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_FREE_GIB = 6.0
CONSTRAINTS = ROOT / "constraints" / "lock.txt"


def refusal() -> str | None:
    """Why this machine cannot be set up, in one line; None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the suite runs on Linux x86-64, this is {sys.platform} {platform.machine()}; use VENV=none with your own torch and triton"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"the suite needs Python 3.11 to 3.13, this is {platform.python_version()}; set PYTHON=python3.12 or so"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return "this Python has no venv module; install it (Debian: python3-venv) or set PYTHON"
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < MIN_FREE_GIB:
        return f"set-up needs {MIN_FREE_GIB:.0f} GiB of free disk, {ROOT} has {free_gib:.1f}; free some"
    return None


def wanted(torch: str, triton: str) -> str:
    """Hash of everything that decides what the environment holds."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), CONSTRAINTS.read_bytes(), torch.encode(), triton.encode(), platform.python_version().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def is_ready(venv: Path, stamp: str) -> bool:
    return (venv / f".ok-{stamp}").is_file() and (venv / "bin" / "python").exists()


def build(venv: Path, torch: str, triton: str, stamp: str) -> None:
    """Build the environment anew; raises CalledProcessError where pip fails."""
    shutil.rmtree(venv, ignore_errors=True)
    print(f"setting up {venv.name}: {torch}, then the rest (a few minutes, once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True)
    has_triton = subprocess.run([str(venv / "bin" / "python"), "-c", "import triton"], capture_output=True, check=False).returncode == 0
    if not has_triton:
        subprocess.run([*pip, triton], check=True)
    subprocess.run([*pip, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[test]"], check=True)
    (venv / f".ok-{stamp}").write_text("")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--torch", required=True)
    parser.add_argument("--triton", required=True)
    args = parser.parse_args()
    stamp = wanted(args.torch, args.triton)
    if is_ready(args.venv, stamp):
        return 0
    why_not = refusal()
    if why_not:
        print(f"set-up: {why_not}", file=sys.stderr)
        return 2
    with open(args.venv.with_name(args.venv.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(args.venv, stamp):
            return 0
        start = time.monotonic()
        try:
            build(args.venv, args.torch, args.triton, stamp)
        except subprocess.CalledProcessError as error:
            print(f"set-up: {' '.join(map(str, error.cmd[:6]))} ... ended with {error.returncode}; mend what it says above and run make again", file=sys.stderr)
            return 1
        print(f"set-up took {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
