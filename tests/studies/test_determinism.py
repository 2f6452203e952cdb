"""The determinism study: comparison of bits, the manifest, that a wrong kernel is found, and what each measure function leaves."""

import json
import math

import numpy as np
import pytest
import torch

from kernels.exact.linear import linear_fma_ref
from studies.determinism import cells as measure
from studies.determinism import implementations, presets
from studies.determinism.bits import MANIFEST
from studies.determinism.compare import Difference, compare, ordered
from studies.determinism.implementations import KINDS, Schedule
from studies.determinism.manifest import exact_cells
from studies.determinism.operators import from_bits, load_operators, ragged_operators, to_bits
from studies.determinism.questions import questions
from studies.determinism.schedules import kernel_choices
from studies.determinism.study import STUDY
from suite.bundle import BundleStore, Draft
from suite.measure import Context

NAN = float("nan")


@pytest.mark.parametrize(
    "y, expected, differing, max_ulp",
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([1.0], [math.nextafter(1.0, 2.0)], 0, 0),  # below fp32's step: the same float32
        ([1.0], [1.0 + 2**-23], 1, 1),
        ([1.0 - 2**-24], [1.0 + 2**-23], 1, 2),
        ([0.0], [-0.0], 1, 1),
        ([2**-149], [-(2**-149)], 1, 3),  # across both zeros
        ([NAN], [NAN], 0, 0),
        ([NAN], [1.0], 1, 2**31),
        ([float("inf")], [3.4028234663852886e38], 1, 1),
    ],
)
def test_ulp_distance_is_exact(y, expected, differing, max_ulp):
    assert compare(torch.tensor(y), torch.tensor(expected)) == Difference(equal=differing == 0, differing=differing, max_ulp=max_ulp, elements=len(y))


def test_ordered_bits_follow_the_number_line():
    x = torch.tensor([-float("inf"), -1.0, -(2.0**-149), -0.0, 0.0, 2.0**-149, 1.0, float("inf")])
    assert (ordered(x).diff() > 0).all()


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape and dtype"):
        compare(torch.zeros(2), torch.zeros(3))


def test_bfloat16_travels_as_bits():
    x = torch.randn(7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(from_bits(to_bits(x)), x)


def test_the_manifest_lists_every_exact_cell_of_the_presets():
    """A cell that is gone fails here: rewrite the file with `python -m studies.determinism.manifest` and say why in the commit."""
    assert json.loads(MANIFEST.read_text()) == {"exact cells": exact_cells()}


def test_the_manifest_holds_both_families_both_devices_and_whole_texts():
    labels = exact_cells()
    for start in (
        "fma cpu",
        "fma cuda",
        "integer cpu",
        "integer cuda",
        "integer-b9 cuda",
        "texts fma cpu",
        "texts fma cuda",
        "texts integer cpu",
        "texts integer cuda",
    ):
        assert any(label.startswith(start) for label in labels), start
    assert any("ranks=2" in label for label in labels)


@pytest.mark.parametrize("preset", sorted(STUDY.presets))
def test_presets_give_cells_with_unique_points_and_labels(preset):
    planned = questions(STUDY.presets[preset]())
    assert len({c.point for c in planned}) == len({(c.label, c.replicate) for c in planned}) == len(planned)


def test_every_text_that_a_gpu_writes_has_a_plain_cpu_answer_in_golden():
    """Otherwise there is nothing to be equal to: the same family, prompts, tokens and sampling."""
    asked = lambda p, device: {
        tuple(c.params[k] for k in ("family", "prompts", "new_tokens", "sampled"))
        for c in questions(p)
        if c.measure.endswith(":generation") and c.params["device"] == device
    }  # noqa: E731
    answers = asked(presets.golden(), "cpu")
    assert asked(presets.gpu(), "cuda") and asked(presets.gpu(), "cuda") | asked(presets.gpu2(), "cuda") <= answers


def test_every_operator_cell_reads_its_own_familys_oracle():
    for preset in (presets.cpu(), presets.gpu()):
        for c in questions(preset):
            if c.measure.endswith(":operators"):
                impl = c.params["impl"]
                assert c.inputs["oracle"].params["family"] == (impl if impl in ("integer", "integer-b9") else "fma")


def test_the_schedules_of_the_study_are_schedules_of_the_kernels():
    for impl, rows, kernel in kernel_choices():
        choice = {k: v for k, v in kernel.items() if k != "kind"}
        schedule = KINDS[kernel["kind"]](**choice)
        assert (
            rows and all(getattr(schedule, k) == v for k, v in choice.items()) and impl.startswith("integer") == kernel["kind"].startswith("integer")
        )
    assert {kernel["kind"] for _, _, kernel in kernel_choices()} == set(KINDS)


# ---------------------------------------------------------------- the cells on small operands


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> dict[str, Context]:
    """Inputs as the harness hands them over, by family: a capture of one small layer, and the family's oracle."""
    store = BundleStore(tmp_path_factory.mktemp("store"))
    g = torch.Generator().manual_seed(3)
    arrays = {}
    for name, (n, k) in {"layers.0.mlp.gate_proj": (48, 40), "layers.0.mlp.up_proj": (48, 40), "layers.0.mlp.down_proj": (40, 48)}.items():
        arrays[f"x.{name}"] = to_bits(torch.randn(64, k, generator=g).to(torch.bfloat16))
        arrays[f"w.{name}"] = to_bits(torch.randn(n, k, generator=g).to(torch.bfloat16))
    capture = store.write(draft(), measure.Result(arrays=arrays))
    context = Context(device="cpu", inputs={"capture": capture.path})
    oracles = {
        family: store.write(draft(), measure.oracle(context, family=family, engine="torch" if family == "fma" else "auto")).path
        for family in ("fma", "integer", "integer-b9")
    }
    return {family: Context(device="cpu", inputs={"capture": capture.path, "oracle": path}) for family, path in oracles.items()}


def draft() -> Draft:
    cell = {"study": "determinism", "measure": "a:b", "label": "x", "params": {}, "seed": 0, "replicate": 0, "needs": {}, "inputs": {}, "assets": {}}
    return Draft(
        cell=cell,
        point="0" * 64,
        key="1" * 64,
        code="2" * 64,
        environment={},
        commit="unknown",
        dirty=True,
        started_at="",
        duration_s=0.0,
        status="OK",
    )


def run(context, impl: str, **schedule):
    return measure.operators(
        context.get(impl, context["fma"]), impl=impl, device="cpu", **{"rows": 64, "chunk_rows": 0, "threads": 0, "kernel": {}, **schedule}
    )


SCHEDULES = [{"rows": 64}, {"rows": 1}, {"rows": 16}, {"chunk_rows": 16}, {"threads": 1}]


@pytest.mark.parametrize("impl", ["fma", "integer", "integer-b9"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_exact_family_has_its_oracles_bits_under_every_schedule(context, impl, schedule):
    result = run(context, impl, **schedule)
    operators = len(load_operators(context["fma"].input_arrays("capture"))) + 3 * (impl == "fma")
    assert result.metrics["equal_operators"] == result.metrics["operators"] == operators and result.metrics["differing"] == 0


@pytest.mark.parametrize("impl", ["fma", "integer"])
def test_digests_of_a_smaller_batch_are_the_oracles_prefix_digests(context, impl):
    prefixes = {r["operator"]: r["digests"] for r in context[impl].input_record("oracle", "oracle")}
    assert all(prefixes[r["operator"]]["4"] == r["digest"] for r in run(context, impl, rows=4).records["operators"])


def test_the_families_are_different_arithmetic(context):
    """b6, b9 and fma round differently: an oracle of one is no oracle of another."""
    found = {family: run(context, family).facts["digest"] for family in ("integer", "integer-b9")}
    assert found["integer"] != found["integer-b9"]
    wrong = measure.operators(context["fma"], impl="integer", device="cpu", rows=64, chunk_rows=0, threads=0, kernel={})
    assert wrong.metrics["equal_operators"] < wrong.metrics["operators"]


@pytest.mark.parametrize("impl", ["layercast", "sgemm", "bf16"])
def test_the_controls_compute_the_same_product_but_not_the_same_bits(context, impl):
    result = run(context, impl)
    assert result.metrics["differing"] > 0
    for name, op in load_operators(context["fma"].input_arrays("capture")).items():
        y = implementations.run(impl, op.x_MK, op.w_NK, Schedule())
        scale = op.x_MK.double().abs() @ op.w_NK.double().abs().T
        error = (y.double() - op.x_MK.double() @ op.w_NK.double().T).abs()
        assert bool((error <= scale * error_bound(impl, op)).all()), name


def error_bound(impl: str, op) -> float:
    """Relative to |x||w|: an fp32 sum of K terms in any order errs by K * 2^-24, a product by 2^-8 for each operand that is rounded to bf16, a bf16 result by 2^-8."""
    rounded = {
        "sgemm": 0,
        "layercast": op.w_NK.dtype != torch.bfloat16,
        "bf16": (op.x_MK.dtype != torch.bfloat16) + (op.w_NK.dtype != torch.bfloat16),
    }[impl]
    return op.x_MK.shape[1] * 2.0**-24 + rounded * 2.0**-8 + (2.0**-8 if impl == "bf16" else 0.0)


def wrong_order(x_MK, w_NK):
    """The right product in another order: what the study exists to find."""
    return linear_fma_ref(x_MK.flip(1), w_NK.flip(1))


def wrong_by_batch(x_MK, w_NK):
    return linear_fma_ref(x_MK, w_NK) if x_MK.shape[0] > 1 else wrong_order(x_MK, w_NK)


@pytest.mark.parametrize("broken, schedule", [(wrong_order, {"rows": 64}), (wrong_by_batch, {"rows": 1})])
def test_a_kernel_with_another_order_is_found(context, monkeypatch, broken, schedule):
    monkeypatch.setattr(measure, "run", lambda name, x_MK, w_NK, s: broken(x_MK[: s.rows], w_NK))
    result = run(context, "fma", **schedule)
    assert result.metrics["equal_operators"] < result.metrics["operators"] and result.metrics["max_ulp"] > 0


def test_ragged_operands_are_the_same_bits_everywhere():
    from kernels.exact.digests import digest

    seen = [digest(op.x_MK) for op in ragged_operators()]
    assert seen == RAGGED_DIGESTS


RAGGED_DIGESTS = [
    "335951a0c6e7860268eb961f1f151cfd0a6d477aacc46e06552b822be53fea75",
    "d1d9b0019f3d90f46eddd2d2f30d6001ab7ab135df83309c88a40c5969a4ac3c",
    "a56039af7a499427446b41259730e046c77b7f723b3f78f020fb9bfe76674691",
    "0291027ef2327218de9806c44647cc6926f6e0816be6ece258c92a7c0afe1fdc",
    "9fd9586f56eb6f157a66d97283aad71084720f50b0ad1230b78f7cb91873364b",
    "f48c6dff177553f1cb312afeec24523d8b2bcf6b878f479745708b386e01d2a8",
    "d545d6134b8a9c651e6143b86cd8dd1070d3e3a03781b593d5d5ef15a78491ea",
]


def test_operand_arrays_hold_no_objects(context):
    assert all(np.asarray(a).dtype != object for a in context["fma"].input_arrays("capture").values())


def test_texts_of_the_fma_family_on_a_cpu_ask_for_the_compiler_that_they_would_take_hours_without():
    texts = [c for c in STUDY.cells(presets.cpu()) if c.measure.endswith(":generation")]
    assert {c.params["family"]: c.needs.programs for c in texts} == {"fma": ("cc",), "integer": ()}
