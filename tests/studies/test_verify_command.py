"""`suite verify-determinism` as a user runs it: PASS, FAIL, refusals; and what becomes of a contribution file on another machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from studies.determinism.exhibits_verify import contributed, golden_matrix
from studies.determinism.golden_manifest import VERSIONS, ManifestError, read, sign
from studies.determinism.golden_operators import OPERATORS
from studies.determinism.study import STUDY
from studies.determinism.verify import judged
from suite.bundle import BundleStore
from suite.claims import make_view
from suite.exhibit import Prose
from suite.identity import sha256_file
from suite.study import Study, study_verbs
from suite.tracking import encode, row_of
from tests.conftest import ROOT, Checkout

# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Checkout:
    """One checkout for the runs below: each takes seconds."""
    home = tmp_path_factory.mktemp("verify")
    for room in ("suite", "kernels", "studies", "reports"):
        shutil.copytree(ROOT / room, home / "tree" / room, ignore=shutil.ignore_patterns("__pycache__", "published"))
    env = {k: v for k, v in os.environ.items() if k not in ("SUITE_STATE", "MLFLOW_TRACKING_URI")}
    return Checkout(home / "tree", env | {"SUITE_LOCK_DIR": str(home / "locks"), "SUITE_COMMIT": "0" * 40, "PYTHONPATH": str(home / "tree"), "SUITE_NO_TRACKING": "1"})


@pytest.fixture(scope="module")
def first(tree) -> tuple[subprocess.CompletedProcess, dict]:
    done = tree.suite("verify-determinism", "--device", "cpu", "--json")
    return done, json.loads(done.stdout) if done.returncode in (0, 1) else {}


@pytest.fixture
def manifest_file(tree):
    """The checkout's manifest, as it was after the test."""
    path = tree.path / "studies" / "determinism" / "golden.json"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_this_cpu_gives_the_golden_bits(first):
    done, report = first
    assert done.returncode == 0, done.stderr
    assert report["equal"] == len(report["operators"]) == len(OPERATORS)
    assert all(o["verdict"] == "PASS" and o["equal"] == o["cases"] for o in report["operators"])


def test_a_second_run_finds_the_first_and_writes_the_same_file(tree, first):
    _, report = first
    path = tree.state / "contributions"
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    again = tree.suite("verify-determinism", "--device", "cpu")
    assert again.returncode == 0 and "--rerun measures again" in again.stdout
    assert f"{len(OPERATORS)} of {len(OPERATORS)} operators equal to the golden manifest on {report['device']}" in again.stdout
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before and len(tree.bundles(status="OK")) == 1


def test_it_needs_neither_mlflow_nor_rich(tree, first):
    code = "import sys; sys.modules.update(dict.fromkeys(['mlflow', 'rich', 'optuna', 'pandas', 'scipy', 'jinja2', 'typst'])); from suite.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {k: v for k, v in tree.env.items() if k != "SUITE_NO_TRACKING"}
    done = subprocess.run([sys.executable, "-c", code, "verify-determinism", "--device", "cpu"], cwd=tree.path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(OPERATORS)} of {len(OPERATORS)} operators" in done.stdout, done.stderr


def test_a_wrong_golden_digest_fails_exactly_its_operator(tree, first, manifest_file):
    content = json.loads(manifest_file.read_text())
    index = next(i for i, q in enumerate(content["questions"]) if (q["operator"], q["case"]) == ("rmsnorm", "hard values, fp32"))
    content["questions"][index]["output_digest"] = "0" * 64
    manifest_file.write_text(sign(content))
    done = tree.suite("verify-determinism", "--device", "cpu", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(o["operator"], o["first"]) for o in report["operators"] if o["verdict"] == "FAIL"] == [("rmsnorm", "hard values, fp32")]
    table = tree.suite("verify-determinism", "--device", "cpu")
    assert table.returncode == 1 and "FAIL" in table.stdout and f"{len(OPERATORS) - 1} of {len(OPERATORS)} operators" in table.stdout


def test_a_wrong_constant_in_an_operator_fails_exactly_that_operator(tree, first):
    path = tree.path / "kernels" / "exact" / "activations.py"
    before = path.read_text()
    assert before.count("0.044715)") == 1
    path.write_text(before.replace("0.044715)", "0.0447151)"))
    try:
        done = tree.suite("verify-determinism", "--device", "cpu", "--json")
    finally:
        path.write_text(before)
    assert done.returncode == 1, done.stderr
    assert [o["operator"] for o in json.loads(done.stdout)["operators"] if o["verdict"] == "FAIL"] == ["gelu"]


@pytest.mark.parametrize("text, reason", [(lambda t: t.replace('"output_digest": "', '"output_digest": "0', 1), "was changed"), (lambda t: sign({**json.loads(t), "versions": {**VERSIONS, "order": 0}}), "stale")])
def test_the_command_refuses_a_tampered_and_a_stale_manifest(tree, manifest_file, text, reason):
    manifest_file.write_text(text(manifest_file.read_text()))
    done = tree.suite("verify-determinism", "--device", "cpu")
    assert done.returncode == 2 and done.stdout == "" and reason in done.stderr and done.stderr.count("\n") == 1


def test_the_command_refuses_inputs_that_are_not_the_manifests(tree, manifest_file):
    content = json.loads(manifest_file.read_text())
    content["questions"][0]["input_digest"] = "0" * 64
    manifest_file.write_text(sign(content))
    done = tree.suite("verify-determinism", "--device", "cpu")
    assert done.returncode == 2 and "the Philox generator is broken here" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused(tree):
    done = tree.suite("verify-determinism", "--device", "cuda")
    assert done.returncode == 2 and "--device cuda is not possible here" in done.stderr


# ---------------------------------------------------------------- contributions


@pytest.fixture
def elsewhere(first, tree, tmp_path) -> tuple[BundleStore, list]:
    """A fresh store that ingested the contribution."""
    env = {"SUITE_STATE": str(tmp_path / "state")}
    for new in (1, 0):
        done = tree.suite("ingest", first[1]["contribution"], **env)
        assert done.returncode == 0 and f"{new} new, {1 - new} known, 0 skipped" in done.stdout, done.stderr
    store = BundleStore(tmp_path / "state")
    return store, store.load_all()[0]


def view_of(bundles):
    rows = []
    for bundle in bundles:
        tags, params, metrics = encode(bundle, STUDY.metric_names(), "ingested")
        rows.append(row_of("run", tags | {"bundle.id": bundle.id}, params, metrics, bundle.path))
    return make_view(rows, {}, {})


def test_a_contribution_becomes_a_column_of_another_machines_matrix(elsewhere):
    (label, states), = contributed(view_of(elsewhere[1]))
    assert states == {name: "equal" for name in OPERATORS} and "torch" in label
    matrix, = golden_matrix(view_of(elsewhere[1]))
    assert matrix.column_labels == [label] and len(matrix.cells) == len(OPERATORS)


def forged(bundle, edit_header=lambda d: None, edit_records=lambda r: None):
    """The bundle with its texts or records replaced and all digests mended, as a stranger may send it."""
    header = json.loads((bundle.path / "bundle.json").read_text())
    edit_header(header)
    path = bundle.path / "golden.json"
    records = json.loads(path.read_text())
    path.write_text(json.dumps(edit_records(records) or records))
    header["files"]["golden.json"] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    return replace(bundle, data=header)


def test_what_a_bundle_says_of_itself_is_not_taken_on_trust(elsewhere):
    def lie(records):
        records[0]["output_digest"], records[0]["equal"] = "0" * 64, True

    (_, states), = contributed(view_of([forged(elsewhere[1][0], edit_records=lie)]))
    assert states["linear"] == "partial" and states["exp"] == "equal"


def test_a_strangers_label_is_cleaned_and_cut(elsewhere):
    def shout(header):
        header["environment"]["device_model"] = "GPU\x1b]0;owned\x07\n\u202eevil" + "x" * 500
        header["environment"]["torch"] = {"a": "\x1b[2J"}

    (label, _), = contributed(view_of([forged(elsewhere[1][0], shout)]))
    assert label.isprintable() and len(label) < 300


@pytest.mark.parametrize("records", [{}, [1], "x", [{"operator": "exp"}], None])
def test_records_of_another_shape_give_no_column_and_one_sentence(elsewhere, records):
    bundle = forged(elsewhere[1][0])
    (bundle.path / "golden.json").write_text(json.dumps(records))
    bundle.data["files"]["golden.json"]["sha256"] = sha256_file(bundle.path / "golden.json")
    assert contributed(view_of([bundle])) == []
    shown, = golden_matrix(view_of([bundle]))
    assert isinstance(shown, Prose) and "could not be read: 1" in shown.text


def test_answers_to_other_questions_are_shown_as_not_measured(elsewhere):
    def other_inputs(records):
        for r in records:
            r["input_digest"] = "1" * 64

    (_, states), = contributed(view_of([forged(elsewhere[1][0], edit_records=other_inputs)]))
    assert set(states.values()) == {"not_measured"}


def test_the_report_says_why_there_are_no_columns_where_the_manifest_is_refused(elsewhere, monkeypatch):
    def refuse():
        raise ManifestError("the manifest was changed")

    monkeypatch.setattr("studies.determinism.exhibits_verify.read", refuse)
    shown, = golden_matrix(view_of(elsewhere[1]))
    assert isinstance(shown, Prose) and "was changed" in shown.text


def test_the_verdict_is_derived_from_digests_alone(elsewhere):
    def lie(records):
        records[0] |= {"output_digest": "0" * 64, "equal": True, "differing": 2, "elements": 9, "max_ulp": 1}

    report = judged(forged(elsewhere[1][0], edit_records=lie), read())
    first, = (o for o in report["operators"] if o["verdict"] == "FAIL")
    assert first["operator"] == "linear" and first["why"] == "2 of 9 elements differ, by up to 1 ULP"


# ---------------------------------------------------------------- verbs of studies


def test_verbs_are_found_without_importing_their_study():
    code = "import sys; from suite.study import study_verbs; print(list(study_verbs()), [m for m in sys.modules if m.startswith('studies')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['verify-determinism'] []"
    assert study_verbs() == STUDY.verbs


@pytest.mark.parametrize("verbs", [{"run": ("studies.toy.x", "")}, {"Verify-It": ("studies.toy.x", "")}, {"verify-it": ("studies.other.x", "")}])
def test_a_verb_that_could_hide_a_command_is_refused(verbs):
    with pytest.raises(ValueError, match="two or more words"):
        Study(name="toy", title="", summary="", presets={"smoke": dict}, cells=lambda c: [], verbs=verbs)


def test_two_studies_cannot_share_a_verb(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "studies" / name).mkdir(parents=True)
        (tmp_path / "studies" / name / "study.py").write_text(f'VERBS = {{"do-it": ("studies.{name}.x", "")}}')
    with pytest.raises(ValueError, match="belongs to one study"):
        study_verbs(tmp_path)
