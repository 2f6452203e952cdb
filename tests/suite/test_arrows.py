"""Who may import whom, and what stays light."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from suite import identity

ROOT = identity.ROOT
ALLOWED = {"kernels": {"kernels"}, "suite": {"suite"}, "studies": {"studies", "kernels", "suite"}, "reports": {"reports", "suite"}}
COMPOSITION_ROOT = Path("suite/cli.py")  # alone may import reports, inside a command
STARTUP_S = 1.0
STARTUP_SLACK = 3.0  # a shared machine


def first_party_imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at module level?) for every first-party import of a file."""
    tree = ast.parse(path.read_text())
    top = {id(n) for n in tree.body}
    out = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        out += [(n, id(node) in top) for n in names if n.split(".")[0] in ALLOWED]
    return out


def files() -> list[Path]:
    return sorted(p.relative_to(ROOT) for room in ALLOWED for p in (ROOT / room).rglob("*.py"))


def test_imports_follow_the_arrows():
    wrong = []
    for path in files():
        for module, at_top in first_party_imports(ROOT / path):
            room, other = path.parts[0], module.split(".")[0]
            if other not in ALLOWED[room] and not (path == COMPOSITION_ROOT and other in ("reports", "studies") and not at_top):
                wrong.append(f"{path} -> {module}")
    assert wrong == []


def test_no_study_imports_another():
    wrong = []
    for path in files():
        if path.parts[0] == "studies" and len(path.parts) > 2:
            wrong += [f"{path} -> {m}" for m, _ in first_party_imports(ROOT / path) if m.startswith("studies.") and m.split(".")[1] not in (path.parts[1], "models")]
    assert wrong == []


def test_packages_are_tables_of_contents():
    """An __init__ is outside the code digest, so it may hold names, not behaviour."""
    wrong = []
    for path in files():
        if path.name != "__init__.py" or path.parts[0] == "reports":
            continue
        for node in ast.parse((ROOT / path).read_text()).body:
            is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_table = isinstance(node, ast.Assign) and node.targets[0].id in ("_EXPORTS", "__all__")
            is_lookup = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            if not (is_doc or is_table or is_lookup):
                wrong.append(f"{path}:{node.lineno}")
    assert wrong == []


def test_kernels_hide_nothing_that_transformers_would_take_for_another_package():
    import kernels

    assert not hasattr(kernels, "__version__")
    assert (ROOT / "kernels/__init__.py").read_text().strip() == ""


@pytest.mark.parametrize("where", ["repository root", "elsewhere"])
def test_transformers_imports_beside_our_kernels_package(where, tmp_path):
    cwd = ROOT if where == "repository root" else tmp_path
    done = subprocess.run([sys.executable, "-c", "import transformers, transformers.integrations"], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("command", [["list"], ["plan", "determinism", "--preset", "smoke"], ["--help"]])
def test_looking_commands_start_without_torch(command):
    code = "import sys; from suite.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\nprint([m for m in ('torch','mlflow','optuna','matplotlib','scipy') if m in sys.modules])"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < STARTUP_S * STARTUP_SLACK
    assert done.stdout.strip().endswith("[]"), done.stdout[-300:]
