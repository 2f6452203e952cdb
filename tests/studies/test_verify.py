"""`suite verify-determinism`: the golden manifest is refused where it must be, a wrong bit is found, and a contribution becomes a column."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from studies.determinism import golden, golden_operators, verify_cells
from studies.determinism.contribution import binary, known_binaries
from studies.determinism.exhibits_verify import contributed, golden_matrix
from studies.determinism.golden_manifest import MANIFEST, MAX_BYTES, SCHEMA, VERSIONS, Manifest, ManifestError, check_operators, dump, read, sign
from studies.determinism.golden_operators import OPERATORS
from studies.determinism.golden_values import seed_of, values
from studies.determinism.study import STUDY
from studies.determinism.verify import judged
from suite.bundle import BundleStore
from suite.claims import make_view
from suite.exhibit import Prose
from suite.measure import Context
from suite.study import Study, study_verbs
from suite.tracking import encode, row_of
from tests.conftest import ROOT, Checkout

SAMPLE = {"linear": "K of one step, fp32 weights", "rmsnorm": "hard values, fp32", "exp": "fp32 bit patterns"}


# ---------------------------------------------------------------- the manifest


def test_a_sample_of_the_golden_answers_is_derived_again_from_scratch():
    known = {(q.operator, q.case): q for q in read().questions}
    assert [golden.answer(OPERATORS[op], case) for op, case in SAMPLE.items()] == [known[key] for key in SAMPLE.items()]


@pytest.mark.soak
def test_every_golden_answer_is_derived_again_from_scratch():
    assert golden.derive().questions == read().questions


def test_the_manifest_asks_every_case_of_every_operator_under_todays_versions():
    manifest = read()
    check_operators(manifest, OPERATORS)
    assert dict(manifest.versions) == VERSIONS
    assert [(q.operator, q.case, q.params, q.seed) for q in manifest.questions] == [(o.name, c, dict(p), seed_of(o.name, c)) for o in OPERATORS.values() for c, p in o.cases.items()]


def body() -> dict:
    return {k: v for k, v in json.loads(MANIFEST.read_text()).items() if k != "sha256"}


def changed(**fields) -> str:
    return sign({**body(), **fields})


def with_question(**fields) -> str:
    questions = body()["questions"]
    questions[1] = {**questions[1], **fields}
    return changed(questions=questions)


REFUSED = {
    "not JSON": (lambda: "{", "not JSON"),
    "not an object": (lambda: "[1]", "JSON object"),
    "not text": (lambda: b"\xff\xfe\x00", "not JSON"),
    "deep": (lambda: "[" * 100_000, "not JSON"),
    "too large": (lambda: " " * (MAX_BYTES + 1), "limit"),
    "NaN": (lambda: MANIFEST.read_text().replace('"seed": ', '"seed": NaN, "x": ', 1), "no manifest holds"),
    "one digit changed": (lambda: MANIFEST.read_text().replace('"output_digest": "', '"output_digest": "0', 1), "was changed"),
    "unsigned": (lambda: json.dumps(body()), "was changed"),
    "other format": (lambda: changed(schema=SCHEMA + 1), "another format"),
    "other order": (lambda: changed(versions={**body()["versions"], "order": 0}), "stale: its order version is 0"),
    "other definitions": (lambda: changed(versions={**body()["versions"], "definitions": 0}), "stale: its definitions version is 0"),
    "no versions": (lambda: changed(versions={}), "stale: its definitions version is None"),
    "a version too many": (lambda: changed(versions={**body()["versions"], "x": 1}), "stale: its x version is 1, this code's is None"),
    "no questions": (lambda: changed(questions=[]), "1 to"),
    "one question twice": (lambda: changed(questions=body()["questions"] + body()["questions"][:1]), "each once"),
    "a digest that is none": (lambda: with_question(output_digest="Z" * 64), "64 hex digits"),
    "a field too many": (lambda: with_question(extra=1), "fields"),
    "control characters": (lambda: with_question(case="a\x1b[31m"), "printable"),
    "fields of other types": (lambda: changed(made_with=[1]), "malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_manifest_that_cannot_be_trusted_is_refused_with_the_reason_and_a_remedy(case, tmp_path):
    text, reason = REFUSED[case]
    path = tmp_path / "golden.json"
    path.write_bytes(text() if isinstance(text(), bytes) else text().encode())
    with pytest.raises(ManifestError, match=reason) as error:
        read(path)
    assert "\n" not in str(error.value) and "golden" in str(error.value).partition(";")[2]


def test_a_missing_manifest_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="cannot be read"):
        read(tmp_path / "golden.json")


@pytest.mark.parametrize("edit, reason", [(lambda qs: [replace(qs[0], operator="unheard-of"), *qs[1:]], "does not have"), (lambda qs: qs[1:], "leaves out")])
def test_unknown_and_missing_operators_are_refused(edit, reason):
    manifest = read()
    with pytest.raises(ManifestError, match=reason):
        check_operators(replace(manifest, questions=tuple(edit(list(manifest.questions)))), OPERATORS)


def test_the_file_is_read_as_it_was_written_and_cubins_change_no_question(tmp_path):
    path, manifest = tmp_path / "golden.json", read()
    cubins = {"sm_90": {"triton 3.6.0": {"kernels.exact.decode:decode_kernel": ["0" * 64]}}}
    path.write_text(dump(replace(manifest, cubins=cubins)))
    assert read(path) == replace(manifest, cubins=cubins)
    assert read(path).digest == manifest.digest


def test_an_answer_that_changed_under_one_version_is_not_written_silently(tmp_path, small):
    path = tmp_path / "golden.json"
    golden.write(path)
    with_exp_off_by_one(small)
    with pytest.raises(ManifestError, match="exp, fp32 bit patterns.*raise the version"):
        golden.write(path)
    assert golden.write(path, changed=True) == read(path)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hard_values_hold_what_they_promise(dtype):
    x = values("hard", (16, 264), seed=5, dtype=dtype)
    tiny = torch.finfo(dtype).tiny
    assert (x[1] == 0).all() and x[1].signbit().any() and not x[1].signbit().all()
    assert ((x[2] != 0) & (x[2].abs() < tiny)).any() and (x[2].abs() < tiny).all()
    assert x[3].isinf().sum() == 1 and x[4].isnan().sum() == 1 and (x[5].abs() == torch.finfo(dtype).max).all()
    assert x[6].isinf().sum() == 2 and x[0].isfinite().all()
    assert golden.joined(x) == golden.joined(values("hard", (16, 264), seed=5, dtype=dtype))


def test_every_16_bit_value_comes_once():
    assert len(set(values("every", (1 << 16,), seed=0, dtype=torch.bfloat16).view(torch.int16).tolist())) == 1 << 16


# ---------------------------------------------------------------- the cell


@pytest.fixture
def small(monkeypatch, tmp_path) -> dict:
    """Three operators with one case each, and their manifest: the cell in a second."""
    operators = {name: replace(OPERATORS[name], cases={case: OPERATORS[name].cases[case]}) for name, case in SAMPLE.items()}
    for module in (golden, golden_operators, verify_cells):
        monkeypatch.setattr(module, "OPERATORS", operators)
    manifest = golden.derive()
    monkeypatch.setattr(verify_cells, "read", lambda: manifest)
    operators["manifest"] = manifest
    return _Small(operators)


class _Small(dict):
    """The operators under their names, and `manifest`."""

    def __init__(self, operators: dict):
        self.manifest: Manifest = operators.pop("manifest")
        self.operators = operators
        super().__init__(operators)


def with_exp_off_by_one(small: _Small) -> None:
    def off_by_one(x: torch.Tensor) -> torch.Tensor:
        y = OPERATORS["exp"].cpu(x)
        y.view(torch.int32)[7] ^= 1
        return y

    small.operators["exp"] = replace(small["exp"], cpu=off_by_one)


def ask(small: _Small):
    return verify_cells.verify(Context(device="cpu"), device="cpu", questions=small.manifest.digest)


def test_all_operators_are_equal_on_this_cpu(small):
    result = ask(small)
    assert result.metrics["equal_operators"] == result.metrics["operators"] == 3
    assert all(r["equal"] for r in result.records["golden"])
    assert set(result.metrics) <= STUDY.metric_names()


def test_one_wrong_bit_fails_exactly_its_operator(small):
    with_exp_off_by_one(small)
    result = ask(small)
    assert [r["operator"] for r in result.records["golden"] if not r["equal"]] == ["exp"]
    assert result.metrics["equal_operators"] == 2 and "max_ulp" not in result.metrics  # no golden output here to measure a distance to


def test_the_distance_of_a_wrong_gpu_result_is_counted_against_the_reference_here(small):
    q = next(q for q in small.manifest.questions if q.operator == "exp")
    inputs = small["exp"].inputs(q.seed, **q.params)
    y = golden.outputs(small["exp"], inputs, q.params)
    at = (y[0].isfinite() & (y[0] > 1)).nonzero()[0]
    y[0].view(torch.int32)[at] += 3
    assert verify_cells.distance(q, y, inputs, "cuda:0") == {"differing": 1, "max_ulp": 3}


def test_where_one_engine_of_the_cpu_is_wrong_the_other_tells_by_how_much(small):
    def off_by_two(x, w):
        y = OPERATORS["linear"].cpu(x, w)
        y.view(torch.int32)[0, 0] += 2
        return y

    small.operators["linear"] = replace(small["linear"], cpu=off_by_two)
    record, = (r for r in ask(small).records["golden"] if not r["equal"])
    assert (record["operator"], record["differing"], record["max_ulp"]) == ("linear", 1, 2)


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.second])
def test_both_cpu_engines_give_the_golden_bits(name):
    for q in (q for q in read().questions if q.operator == name):
        assert golden.joined(golden.outputs(OPERATORS[name], OPERATORS[name].inputs(q.seed, **q.params), q.params, second=True)) == q.output_digest, q.case


def test_an_operator_that_raises_costs_itself_alone(small):
    def broken(x):
        raise RuntimeError("out of resource: shared memory")

    small.operators["exp"] = replace(small["exp"], cpu=broken)
    result = ask(small)
    assert {r["operator"]: r["error"] for r in result.records["golden"]} == {"linear": "", "rmsnorm": "", "exp": "RuntimeError: out of resource: shared memory"}


def test_other_inputs_are_refused_as_a_broken_generator(small):
    small.operators["exp"] = replace(small["exp"], inputs=lambda seed, **p: (OPERATORS["exp"].inputs(seed + 1, **p)))
    with pytest.raises(ManifestError, match="exp, fp32 bit patterns.*Philox generator is broken"):
        ask(small)


def test_a_manifest_swapped_under_the_run_is_refused(small):
    with pytest.raises(ManifestError, match="changed since the run began"):
        verify_cells.verify(Context(device="cpu"), device="cpu", questions="0" * 64)


# ---------------------------------------------------------------- kernels' digests

KERNEL = {"kernel": "kernels.exact.decode:decode_kernel", "target": ["cuda", 90, 32], "triton": "3.6.0", "cubin_sha256": "a" * 64}


def test_binaries_are_compared_where_the_manifest_lists_the_compiler():
    listed = {"sm_90": {"triton 3.6.0": {KERNEL["kernel"]: ["a" * 64]}}}
    other = {**KERNEL, "cubin_sha256": "b" * 64}
    assert known_binaries([KERNEL, other], listed) == (1, 2)
    assert known_binaries([{**KERNEL, "triton": "3.7.1"}], listed) is None


@pytest.mark.parametrize("entry", [{}, 3, {**KERNEL, "cubin_sha256": "x"}, {**KERNEL, "kernel": "a\x1b[2J:b"}, {**KERNEL, "target": 90}])
def test_odd_kernel_records_are_one_clear_error(entry):
    with pytest.raises(ValueError, match="a kernel record") as error:
        binary(entry)
    assert str(error.value).isprintable()


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
    """The bundle with its texts or records replaced, as a stranger may send it."""
    header = json.loads((bundle.path / "bundle.json").read_text())
    edit_header(header)
    records = json.loads((bundle.path / "golden.json").read_text())
    records = edit_records(records) or records
    (bundle.path / "golden.json").write_text(json.dumps(records))
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
def test_records_of_another_shape_give_no_column_and_no_error(elsewhere, records):
    bundle, = elsewhere[1]
    (bundle.path / "golden.json").write_text(json.dumps(records))
    assert contributed(view_of([bundle])) == [] and golden_matrix(view_of([bundle])) == []


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
