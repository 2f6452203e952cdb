"""What a point, a key and a code digest depend on, and what they do not."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from suite import identity
from suite.cell import Cell, Needs


def make_tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    make_tree(
        tmp_path,
        studies__demo__cells="""
            '''Doc.'''
            from kernels.exact import gemm
            def measure(ctx):
                from suite.timing import contest
                return gemm(1)
        """,
        studies__demo__claims="TARGET = 5",
        kernels__exact__gemm="def gemm(x):\n    return x\n",
        kernels__exact__norm="def norm(x):\n    return x\n",
        suite__timing="def contest(): pass\n",
    )
    (tmp_path / "kernels/exact/__init__.py").write_text("_EXPORTS = {'gemm': 'kernels.exact.gemm', 'norm': 'kernels.exact.norm'}\n")
    return tmp_path


def test_reached_modules_are_those_whose_names_are_imported(tree):
    assert identity.reached_modules("studies.demo.cells", tree) == {"studies.demo.cells", "kernels.exact.gemm", "suite.timing"}


def test_a_changed_kernel_changes_the_digest_of_what_reaches_it_only(tree):
    before = identity.code_digest("studies.demo.cells", tree)
    (tree / "kernels/exact/norm.py").write_text("def norm(x):\n    return x + 1\n")
    assert identity.code_digest("studies.demo.cells", tree) == before
    (tree / "kernels/exact/gemm.py").write_text("def gemm(x):\n    return x + 1\n")
    assert identity.code_digest("studies.demo.cells", tree) != before


def test_captions_comments_docstrings_and_layout_change_no_digest(tree):
    before = identity.code_digest("studies.demo.cells", tree)
    (tree / "studies/demo/claims.py").write_text("TARGET = 6\n")
    (tree / "kernels/exact/gemm.py").write_text('"""New doc."""\n# why\ndef gemm(x):\n    "Doc."\n    return (\n        x\n    )\n')
    assert identity.code_digest("studies.demo.cells", tree) == before


def test_a_name_missing_from_an_init_is_named(tree):
    (tree / "studies/demo/cells.py").write_text("from kernels.exact import nothing\n")
    with pytest.raises(ValueError, match="nothing.*kernels.exact"):
        identity.code_digest("studies.demo.cells", tree)


def test_a_string_that_looks_like_a_docstring_elsewhere_counts(tree):
    before = identity.code_digest("studies.demo.cells", tree)
    (tree / "kernels/exact/gemm.py").write_text("def gemm(x):\n    y = 'Doc.'\n    return x\n")
    assert identity.code_digest("studies.demo.cells", tree) != before


def cell(**changes) -> Cell:
    return Cell(**{"study": "demo", "measure": "studies.demo.cells:measure", "params": {"n": 1}, **changes})


@pytest.mark.parametrize("change", [{"study": "other"}, {"measure": "studies.demo.cells:b"}, {"params": {"n": 2}}, {"params": {"n": 1.0}}, {"seed": 1}, {"replicate": 1}])
def test_a_point_changes_with_what_is_asked(change):
    assert cell(**change).point != cell().point


@pytest.mark.parametrize("change", [{"label": "x"}, {"needs": Needs(exclusive=True)}, {"assets": ("a",)}])
def test_a_point_does_not_change_with_conditions(change):
    assert cell(**change).point == cell().point


def test_a_point_does_not_depend_on_the_order_of_parameters():
    assert cell(params={"a": 1, "b": [1, 2]}).point == cell(params={"b": (1, 2), "a": 1}).point


KEY = {"point": "p", "code": "c", "input_keys": {"a": "k"}, "assets": {"m": "s"}, "versions": {"torch": "1"}, "device_model": "H200"}


@pytest.mark.parametrize("name", sorted(KEY))
def test_a_key_changes_with_every_condition(name):
    other = {**KEY, name: {"x": "y"} if isinstance(KEY[name], dict) else "y"}
    assert identity.key(**other) != identity.key(**KEY)


@pytest.mark.parametrize("params", [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": {1: 2}}])
def test_parameters_without_a_canonical_form_are_refused(params):
    with pytest.raises(ValueError, match="a parameter"):
        cell(params=params)


@pytest.mark.parametrize("fields, rule", [({"device": "tpu"}, "device is one of"), ({"gpus": 1}, "no GPUs"), ({"ranks": 0}, "at least one rank"), ({"time_limit_s": 0}, "positive")])
def test_needs_that_make_no_sense_are_refused(fields, rule):
    with pytest.raises(ValueError, match=rule):
        Needs(**fields)


def test_needs_survive_json():
    needs = Needs(device="cuda", gpus=2, packages=("optuna",), gpu_model="H200")
    assert Needs.from_json(json.loads(json.dumps(needs.to_json()))) == needs


def test_digests_are_equal_in_another_process(tree):
    code = f"from suite.identity import code_digest; print(code_digest('studies.demo.cells', {str(tree)!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=identity.ROOT, env={"PYTHONHASHSEED": "7"}).stdout.strip()
    assert other == identity.code_digest("studies.demo.cells", tree)
