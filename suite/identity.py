"""Identity: what makes two questions, or two answers, the same one.

    point      what is asked, about what (Cell.point)
    key        asked under which conditions  (key)
    bundle.id  one answer                (Bundle.id)

    code_digest("studies.determinism.cells")     # sha256 over the syntax trees that the module reaches

The code digest follows first-party imports statically, so that editing a caption changes no key and
editing a kernel changes exactly the keys of the cells that reach it. It does not look into
third-party packages: their versions are in the key.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST_PARTY = ("kernels", "suite", "studies", "reports")


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no spaces, UTF-8. NaN, infinities and odd types are refused."""
    _check_canonical(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _check_canonical(value: Any) -> None:
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a parameter is a finite number, got {value!r}")
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_canonical(item)
        return
    if isinstance(value, Mapping):
        for k, item in value.items():
            if not isinstance(k, str):
                raise ValueError(f"a parameter's keys are strings, got {k!r}")
            _check_canonical(item)
        return
    raise ValueError(f"a parameter is None, bool, int, float, str, list or dict, got {type(value).__name__}: {value!r}")


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def key(*, point: str, code: str, input_keys: Mapping[str, str], assets: Mapping[str, str], versions: Mapping[str, str], device_model: str) -> str:
    """sha256 over a point and the conditions under which it is asked.

    `versions` holds torch with its build, triton, numpy and (for a GPU cell) the driver; `assets` name -> sha256.
    """
    return sha256_json([point, code, dict(input_keys), dict(assets), dict(versions), device_model])


# ---------------------------------------------------------------- code digest


def code_digest(module: str, root: Path = ROOT) -> str:
    """sha256 over the syntax trees of `module` and of every first-party module it reaches by import."""
    root = Path(root)
    parts = [[name, _tree_digest(module_path(name, root))] for name in sorted(reached_modules(module, root))]
    return sha256_json(parts)


def reached_modules(module: str, root: Path = ROOT) -> frozenset[str]:
    """First-party modules whose code `module` can run, itself included.

    A package's `__init__` is a table of contents (a test holds it to that): `from package import name`
    is followed to the module that defines the name, and the `__init__` itself is not part of the set.
    """
    root, found, todo = Path(root), set(), [module]
    while todo:
        name = todo.pop()
        path = module_path(name, root)
        if name in found or path is None:
            continue
        if path.name != "__init__.py":
            found.add(name)
        todo.extend(imported_modules(path, name, root))
    if not found:
        raise ValueError(f"a measure module is a file under {root}, got module={module!r}")
    return frozenset(found)


def module_path(name: str, root: Path) -> Path | None:
    base = Path(root).joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported_modules(path: Path, name: str, root: Path) -> list[str]:
    """First-party modules that the file imports anywhere, each resolved to where its name is defined."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    if path.name == "__init__.py":
        return []
    out: list[str] = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            out += [a.name for a in node.names if a.name.split(".")[0] in FIRST_PARTY]
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, package)
            if source.split(".")[0] in FIRST_PARTY:
                out += [_defining_module(source, a.name, root) for a in node.names]
    return out


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")
    base = base[: len(base) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def _defining_module(source: str, name: str, root: Path) -> str:
    if module_path(f"{source}.{name}", root) is not None:
        return f"{source}.{name}"
    path = module_path(source, root)
    if path is None or path.name != "__init__.py":
        return source
    exported = _exports(path, source)
    if name not in exported:
        raise ValueError(f"a name imported from a package is listed in its __init__, got {name!r} from {source!r}")
    return exported[name]


def _exports(init: Path, package: str) -> dict[str, str]:
    """name -> defining module, from an `__init__`'s imports or its literal `_EXPORTS` table."""
    out: dict[str, str] = {}
    for node in ast.walk(_parse(init)):
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, package)
            out.update({a.asname or a.name: source for a in node.names})
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_EXPORTS" for t in node.targets):
            out.update(ast.literal_eval(node.value))
    return out


@lru_cache(maxsize=None)
def _parse_cached(path: str, mtime_ns: int, size: int) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)


def _parse(path: Path) -> ast.Module:
    stat = path.stat()
    return _parse_cached(str(path), stat.st_mtime_ns, stat.st_size)


def _tree_digest(path: Path) -> str:
    digest = hashlib.sha256()
    for token in _tokens(_parse(path)):
        digest.update(token.encode())
        digest.update(b"\0")
    return digest.hexdigest()


_WITH_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _tokens(node: ast.AST) -> Iterable[str]:
    """A tree as text that is equal across Python versions: empty fields (new ones appear) are left out."""
    yield type(node).__name__
    for name, value in sorted(ast.iter_fields(node)):
        if name == "body" and isinstance(node, _WITH_BODY) and _is_docstring(value):
            value = value[1:]
        if isinstance(node, ast.JoinedStr) and name == "values":
            value = _joined(value)
        if value is None or value == [] or name in ("kind", "type_comment", "ctx"):
            continue
        yield name
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _tokens(item)
            else:
                yield repr(item)
    yield "/"


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string with neighbouring texts merged and empty ones dropped: Python versions cut them differently."""
    out: list[ast.expr] = []
    for part in values:
        is_text = isinstance(part, ast.Constant) and isinstance(part.value, str)
        if is_text and out and isinstance(out[-1], ast.Constant):
            out[-1] = ast.Constant(out[-1].value + part.value)
        elif not (is_text and not part.value):
            out.append(part)
    return out


def _is_docstring(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
