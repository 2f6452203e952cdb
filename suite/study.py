"""Study: a set of claims, the cells that measure them, and how they are shown.

    STUDY = Study(name="demo", title="...", presets={"smoke": smoke}, cells=cells, claims=(...), ...)

A study is one module-level `STUDY` in `studies/<name>/study.py`. Nothing is registered elsewhere: the
folder's name is the study's name. Presets are functions that return a whole frozen config; `cells`
turns a config into cells; `claims` judge rows; `exhibits` turns rows into the tables, matrices and
curves that the report draws (suite.exhibit), so that no study imports the report.

A study may add commands of its own to the command line. They stand as a literal in its `study.py`, so that
`suite --help` finds them without importing the study:

    VERBS = {"verify-sums": ("studies.sums.verify", "compare this machine's sums with the checked-in ones")}

The module named there has `add_arguments(parser)` and `command(args) -> exit code`; pass the table on as `Study(verbs=VERBS)`.

`warm` lists work for `suite warm`: launches that fill the compilers' caches on disk before cells are measured, and leave nothing else.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.identity import ROOT

MAX_METRICS = 40  # the MLflow UI keeps its columns
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_VERB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+\Z")  # two words or more: the harness's own commands are one


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that cells of the study may report."""

    name: str
    unit: str = ""
    better: str = ""  # "higher", "lower" or "" where neither is
    meaning: str = ""


@dataclass(frozen=True, kw_only=True)
class WarmTask:
    """`run` ("module:function") called as `function(device, **params)` for what it leaves in the compilers' caches; its result is thrown away."""

    label: str
    run: str
    params: Mapping[str, Any] = field(default_factory=dict)  # plain JSON
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda") or not _FUNCTION.match(self.run):
            raise ValueError(f"a warm task names 'module:function' and the device cpu or cuda, got {self.run=} {self.device=}")


@dataclass(frozen=True, kw_only=True)
class Study:
    """See the module's docstring. All callables are plain functions."""

    name: str
    title: str
    summary: str
    presets: Mapping[str, Callable[[], Any]]
    cells: Callable[[Any], list]  # config -> [Cell]
    metrics: tuple[Metric, ...] = ()
    claims: tuple = ()  # of suite.claims.Claim
    exhibits: Callable[[Any], list] = field(default=lambda view: [])  # suite.claims.View -> [suite.exhibit.*]
    searches: Callable[[Any], list] = field(default=lambda config: [])  # config -> [suite.search.Search]
    best_preset: Callable[[Any], tuple[str, str]] | None = None  # machine -> (preset, why)
    warm: Callable[[Any], list[WarmTask]] = field(default=lambda config: [])  # config -> tasks, those that take longest first
    verbs: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # command -> (module, one line of help), see above

    def __post_init__(self) -> None:
        if "smoke" not in self.presets:
            raise ValueError(f"a study has at least the preset 'smoke', got presets={sorted(self.presets)}")
        if len(self.metrics) > MAX_METRICS:
            raise ValueError(f"a study declares at most {MAX_METRICS} metrics, got {len(self.metrics)}")
        names = [c.id for c in self.claims]
        if len(set(names)) != len(names):
            raise ValueError(f"claim ids are unique within a study, got {names}")
        _check_verbs(self.name, self.verbs)

    def metric_names(self) -> frozenset[str]:
        return frozenset(m.name for m in self.metrics)


def study_names(root: Path = ROOT) -> list[str]:
    """Names of the studies in the tree, found by their file, without importing any."""
    return sorted(p.parent.name for p in (Path(root) / "studies").glob("*/study.py"))


def study_verbs(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Commands that studies add: name -> (module, help), read from the `VERBS` literals without importing any study."""
    found: dict[str, tuple[str, str]] = {}
    for name in study_names(root):
        tree = ast.parse((Path(root) / "studies" / name / "study.py").read_text(encoding="utf-8"))
        tables = [n.value for n in tree.body if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "VERBS" for t in n.targets)]
        for table in tables:
            verbs = ast.literal_eval(table)
            _check_verbs(name, verbs)
            if taken := sorted(set(verbs) & set(found)):
                raise ValueError(f"a command belongs to one study, got {taken} again in {name!r}; rename it there")
            found |= verbs
    return found


def _check_verbs(study: str, verbs: Mapping[str, tuple[str, str]]) -> None:
    for verb, (module, _) in verbs.items():
        if not _VERB.match(verb) or not module.startswith(f"studies.{study}."):
            raise ValueError(f"a study's command is two or more words joined by '-' and its module lies in studies.{study}, got {verb!r} in {module!r}")


def load_study(name: str) -> Study:
    """Import one study; an unknown name raises ValueError that lists the known ones."""
    if name not in study_names():
        raise ValueError(f"a study is one of {study_names()}, got {name!r}")
    return importlib.import_module(f"studies.{name}.study").STUDY


def load_config(study: Study, preset: str) -> Any:
    """The config of a preset by name, or of `path/to/file.py:function`."""
    if preset in study.presets:
        return study.presets[preset]()
    path, _, function = preset.rpartition(":")
    if path.endswith(".py") and function:
        if not Path(path).is_file():
            raise ValueError(f"a preset file must exist, got {path!r}")
        return _from_file(study, path, function)
    raise ValueError(f"a preset of {study.name!r} is one of {sorted(study.presets)} or 'path/to/file.py:function', got {preset!r}")


def _from_file(study: Study, path: str, function: str) -> Any:
    """A user's own preset; whatever is wrong with the file is one ValueError."""
    spec = importlib.util.spec_from_file_location("user_preset", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_preset"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        config = getattr(module, function)()
    except Exception as error:
        raise ValueError(f"a preset is a function in {path!r} that returns a config, got {function!r}: {type(error).__name__}: {error}") from error
    expected = type(study.presets["smoke"]())
    if not isinstance(config, expected):
        raise ValueError(f"a preset of {study.name!r} returns {expected.__name__}, got {type(config).__name__} from {path}:{function}")
    return config
