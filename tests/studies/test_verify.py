"""The golden manifest is refused where it must be, its answers are derived again, and the cell that asks its questions finds a wrong bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from studies.determinism import golden, golden_operators, verify_cells
from studies.determinism.contribution import binary, known_binaries
from studies.determinism.golden_manifest import MANIFEST, MAX_BYTES, SCHEMA, VERSIONS, Manifest, ManifestError, check_operators, dump, read, sign
from studies.determinism.golden_operators import OPERATORS
from studies.determinism.golden_values import seed_of, values
from studies.determinism.study import STUDY
from suite.measure import Context

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


def test_what_a_gpu_launches_is_recorded_beside_the_answers(small):
    records, kernels = verify_cells._recorded(small.manifest, "cpu")  # on a CPU nothing is launched
    assert kernels == [] and all(r["equal"] for r in records)


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
