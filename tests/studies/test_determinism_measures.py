"""What the measure functions of the determinism study leave, on small stand-ins: whole texts, flips, labels, evidence, the 7B summary."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.exact import foreign as foreign_code
from kernels.exact.activations import silu
from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.exact.integer import linear_integer_ref
from kernels.exact.linear import linear_fma_ref
from studies.determinism import end_to_end, evidence, flips, whole_model, witness
from studies.determinism.golden_manifest import Manifest, read
from studies.models.config import LlamaConfig
from studies.models.prepared import prepare
from studies.models.synthetic import philox_weights
from suite.measure import Context

# ---------------------------------------------------------------- whole texts and flips on a small model

TINY = LlamaConfig(layers=1, hidden=32, intermediate=48, heads=2, kv_heads=1, vocabulary=128, context_tokens=256, rope_base=10000.0, rms_eps=1e-5)


class Characters:
    """A tokenizer that needs no file: one token a character, and an end that texts rarely meet."""

    def encode(self, text: str) -> list[int]:
        return [127] if text == "<|im_end|>" else [ord(c) % 127 for c in text.strip()]


class Texts:
    texts = ("a cat", "seven green bottles", "b", "what is it", "no")


@pytest.fixture
def tiny(monkeypatch):
    """The measure functions over a model of 1 layer with made-up weights, and prompts of a few letters."""
    weights = philox_weights(TINY, seed=3)
    for module in (whole_model, flips):
        monkeypatch.setattr(module, "load_smollm2", lambda: weights)
        monkeypatch.setattr(module, "load_tokenizer", Characters)
        monkeypatch.setattr(module, "chat_text", str)
        monkeypatch.setattr(module, "asset_prompts", lambda count, source: type("Some", (), {"texts": Texts.texts[:count]}))
    monkeypatch.setattr(flips, "load", lambda name: (("fine", 1), ("dull", 0), ("long and good", 1)))


def written(**schedule) -> list[dict]:
    params = {
        "family": "fma",
        "device": "cpu",
        "prompts": 5,
        "new_tokens": 4,
        "batch": 1,
        "chunk": 0,
        "pad_to": 0,
        "cache": True,
        "graph": False,
        "sampled": False,
        "ranks": 1,
        **schedule,
    }
    return whole_model.generation(Context(device="cpu"), **params).records["texts"]


@pytest.mark.parametrize("family", ["fma", "integer"])
def test_whole_texts_have_one_digest_a_prompt_under_every_schedule(tiny, family):
    plain = written(family=family)
    assert [t["prompt"] for t in plain] == [0, 1, 2, 3, 4] and all(len(t["tokens"]) == 4 for t in plain) and len({t["digest"] for t in plain}) == 5
    for schedule in ({"batch": 5}, {"batch": 2, "chunk": 3}, {"batch": 3, "pad_to": 32}, {"batch": 2, "cache": False}):
        assert written(family=family, **schedule) == plain


def test_sampled_texts_are_other_texts_and_their_batch_does_not_matter(tiny):
    sampled = written(sampled=True)
    assert sampled == written(sampled=True, batch=4) and [t["tokens"] for t in sampled] != [t["tokens"] for t in written()]


def test_one_changed_weight_changes_every_digest(tiny, monkeypatch):
    before, weights = written(), philox_weights(TINY, seed=3)
    weights.tensors["embed_tokens.weight"].view(torch.int16)[0, 0] += 1  # one unit in the last place, in the logit of token 0 at every step
    monkeypatch.setattr(whole_model, "load_smollm2", lambda: weights)
    assert all(a["digest"] != b["digest"] for a, b in zip(before, written(), strict=True))


def test_the_flip_study_keeps_tokens_gaps_and_probabilities_that_no_batch_changes_in_an_exact_family(tiny):
    one, all_ = (flips.texts(Context(device="cpu"), impl="fma", batch=batch, prompts=5, new_tokens=4).arrays for batch in (1, 5))
    assert one["tokens"].shape == one["gap"].shape == one["top1"].shape == (5, 4) and one["tokens"].dtype == np.int32
    assert np.array_equal(one["tokens"], all_["tokens"]) and (one["gap"] >= 0).all() and ((one["top1"] > 0) & (one["top1"] <= 1)).all()
    assert [list(t) for t in one["tokens"]] == [t["tokens"] for t in written()]


def test_a_text_ends_at_its_end_token(tiny, monkeypatch):
    met = written()[0]["tokens"][1]
    monkeypatch.setattr(Characters, "encode", lambda self, text: [met] if text == "<|im_end|>" else [ord(c) % 127 for c in text.strip()])
    found = flips.texts(Context(device="cpu"), impl="fma", batch=2, prompts=1, new_tokens=4).arrays
    assert found["ends"].tolist() == [found["tokens"][0].tolist().index(met) + 1]


def test_labels_are_the_sign_of_a_margin_and_an_exact_familys_do_not_move(tiny):
    one, all_ = (flips.labels(Context(device="cpu"), impl="integer", batch=batch, sentences=3) for batch in (1, 3))
    assert np.array_equal(one.arrays["margin"], all_.arrays["margin"]) and one.arrays["margin"].shape == (3,)
    assert one.metrics["accuracy"] == pytest.approx(np.mean((one.arrays["margin"] > 0) == np.array([True, False, True])))


# ---------------------------------------------------------------- evidence


def test_cases_that_differ_are_counted():
    result = evidence.counted([{"equal": True}, {"equal": False}, {"equal": True}], target="sm_80")
    assert result.metrics == {"cases": 3.0, "equal_cases": 2.0} and result.facts == {"target": "sm_80"}


def few_questions() -> Manifest:
    """Two cheap operators of the golden manifest."""
    manifest = read()
    names = list(dict.fromkeys(q.operator for q in manifest.questions))
    cheap = [n for n in ("exp", "silu", "rope") if n in names]
    return Manifest(versions=manifest.versions, made_with=manifest.made_with, questions=tuple(q for q in manifest.questions if q.operator in cheap))


@pytest.fixture
def few(monkeypatch) -> Manifest:
    """Evidence over few questions, green contexts and their witness being stand-ins: 8 SMs ran, whatever was asked for."""
    manifest = few_questions()
    monkeypatch.setattr(evidence, "green_context", lambda count, device: count)
    monkeypatch.setattr(evidence, "few_sms", lambda context: nullcontext())
    monkeypatch.setattr(evidence, "distinct_sms", lambda device: 8)
    monkeypatch.setattr(evidence, "read", lambda: manifest)
    return manifest


def test_stress_asks_every_question_at_every_number_of_sms_and_a_wrong_answer_shows(few, monkeypatch):
    good = evidence.stress(Context(device="cpu"), sms=[8, 64])
    assert good.metrics["cases"] == good.metrics["equal_cases"] == 2 * len(few.questions) >= 6
    assert [c["sms"] for c in good.records["cases"]] == [8] * len(few.questions) + [64] * len(few.questions)
    assert good.records["limits"] == [{"sms": 8, "seen": 8}, {"sms": 64, "seen": 8}] and good.facts["seen"] == "8,8"
    assert {c["launches"] for c in good.records["cases"]} == {0}  # a CPU launches nothing
    first = replace(few.questions[0], output_digest="0" * 64)
    monkeypatch.setattr(evidence, "read", lambda: replace(few, questions=(first, *few.questions[1:])))
    assert evidence.stress(Context(device="cpu"), sms=[8]).metrics["equal_cases"] == len(few.questions) - 1


def test_stress_is_refused_where_the_witness_saw_more_sms_than_were_asked_for(few, monkeypatch):
    monkeypatch.setattr(evidence, "distinct_sms", lambda device: 132)
    with pytest.raises(AssertionError, match="132 SMs ran programs where 8 were asked for"):
        evidence.stress(Context(device="cpu"), sms=[8])


def test_launches_are_counted_question_by_question(few, monkeypatch):
    launched: list[str] = []
    answer = evidence.asked
    monkeypatch.setattr(evidence, "asked", lambda q, device: launched.extend(["kernel"] * (q.operator == "silu")) or answer(q, device))
    cases = evidence.golden_cases("cpu", launched, sms=8)
    assert {(c["operator"], c["launches"]) for c in cases} >= {("silu", 1), ("exp", 0)} and all(c["launches"] == (c["operator"] == "silu") for c in cases)


def test_the_witness_compiles_and_reads_the_sm_number():
    specimen = captured("witness", lambda: witness.sm_id_kernel[(8,)](torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), STEPS=4), family="elementwise")[0]
    assert "%smid" in compile_specimen(specimen, "sm_90").asm["ptx"] and witness.PROGRAMS >= 4096


def test_triton_launches_lists_kernels_by_name(monkeypatch):
    monkeypatch.setattr(witness.JITFunction, "run", lambda kernel, *args, grid, warmup, **options: None)  # nothing runs on a CPU
    with witness.triton_launches() as names:
        silu(torch.ones(4))
        silu(torch.ones(0))
    silu(torch.ones(4))
    assert names == ["elementwise_kernel"]


def test_foreign_code_is_compiled_once_a_launch_that_differs(monkeypatch):
    made = []
    compiling = foreign_code.compile_specimen
    monkeypatch.setattr(foreign_code, "_COMPILED", {})
    monkeypatch.setattr(foreign_code, "compile_specimen", lambda specimen, target: made.append(target) or compiling(specimen, target))
    for x, target in ((torch.ones(16), "sm_80"), (torch.zeros(64), "sm_80"), (torch.ones(16, dtype=torch.bfloat16), "sm_80"), (torch.ones(16), "sm_89")):
        specimen = captured("silu", lambda x=x: silu(x), family="elementwise")[0]
        compiled, signature, bound = foreign_code._compiled(specimen, target)
        assert f".target {target}" in compiled.asm["ptx"] and bound["count"] == x.numel() and set(signature) == set(bound)
    assert made == ["sm_80", "sm_80", "sm_89"]  # other values and another count of the same divisibility are the same code


def test_engines_are_compared_with_the_reference_which_is_no_case_and_the_wrong_and_absent_are_named(monkeypatch):
    from kernels.exact import integer_engines

    def absent(x, w, products):
        raise RuntimeError("no such unit")

    made = lambda function: type("Engine", (), {"device": "cpu", "run": staticmethod(function)})  # noqa: E731
    right, wrong = (lambda x, w, products: linear_integer_ref(x, w, products=products)), (lambda x, w, products: linear_fma_ref(x, w))
    monkeypatch.setattr(evidence, "ENGINE_SHAPES", ((4, 16, 64),))
    monkeypatch.setattr(integer_engines, "engines", lambda: {evidence.REFERENCE: made(right), "b": made(right), "c": made(wrong), "d": made(absent)})
    result = evidence.engines(Context(device="cpu"), products="b6")
    assert {r["engine"] for r in result.records["cases"] if not r["equal"]} == {"c", "d"} and result.metrics["cases"] == 6.0
    assert all(r["engine"] != evidence.REFERENCE == r["reference"] for r in result.records["cases"])
    assert result.facts["engines"] == "b,c" and set(result.facts["missing"].split(",")) == {*evidence.ENGINES, "d"}
    assert {r["error"] for r in result.records["cases"] if r["engine"] == "d"} == {"RuntimeError: no such unit"}


def test_the_named_engines_are_those_of_the_kernels():
    from kernels.exact import integer_engines

    assert {evidence.REFERENCE, *evidence.ENGINES} == {*integer_engines.engines(), "cpu_c"}


def test_a_training_cell_leaves_a_digest_of_every_tensor_and_a_later_step_has_others():
    result = evidence.training(Context(device="cpu"), device="cpu", steps=1)
    digests = result.records["digests"]
    assert (
        len(digests) > 50
        and any("loss" in name for name in digests)
        and all(len(d) == 64 for d in digests.values())
        and result.metrics["cases"] == len(digests)
    )


def test_the_audit_cell_marks_a_broken_rule_and_what_was_not_built(monkeypatch):
    from kernels.exact.audit import catalogue, check

    specimens = [
        type("Specimen", (), {"name": name, "targets": targets})
        for name, targets in (("good", ("sm_80",)), ("bad", ("sm_80",)), ("elsewhere", ("sm_90",)))
    ]
    monkeypatch.setattr(catalogue, "catalogue", lambda: specimens)
    monkeypatch.setattr(
        check,
        "audit",
        lambda s, target: check.AuditResult(
            name=s.name, target=target, problems=["rule"] * (s.name == "bad"), facts={"order": "proved", "sha256": "a" * 64}
        ),
    )
    result = evidence.audit(Context(device="cpu"), target="sm_80")
    assert [(r["kernel"], r["equal"], "skipped" in r) for r in result.records["cases"]] == [
        ("good", True, False),
        ("bad", False, False),
        ("elsewhere", True, True),
    ]
    assert result.records["cases"][1]["problems"] == ["rule"] and result.records["cases"][0]["order"] == "proved"


# ---------------------------------------------------------------- the 7B-shaped decoder's numbers


def test_the_serving_contest_times_every_phase_of_a_small_decoder(monkeypatch):
    """On a CPU, eagerly: each variant's logits are poisoned and found again, the exact families' bit for bit."""
    small = LlamaConfig(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=4, vocabulary=128, context_tokens=128, rope_base=1e4, rms_eps=1e-5, tied_head=False)
    timed = end_to_end.contest
    monkeypatch.setattr(end_to_end, "LLAMA2_7B", small)
    monkeypatch.setattr(end_to_end, "contest", lambda variants, **options: timed(variants, **{**options, "mode": "eager", "warmup_s": 0.01}))
    variants = ["fma", "integer", "layercast", "sgemm", "bf16"]
    result = end_to_end.serving(Context(device="cpu"), batches=[1, 2], context=32, prompts=[40], variants=variants, rounds=2)
    phases = result.records["phases"]
    assert [(p["phase"], p["batch"], p["tokens"]) for p in phases] == [("decode", 1, 32), ("decode", 2, 32), ("prefill", 1, 40)]
    assert set(phases[0]["ms"]) == set(variants) and set(phases[2]["ms"]) == set(variants) - {"sgemm"}
    assert all(v > 0 for p in phases for v in p["ms"].values()) and "integer" in phases[0]["log_ratio"]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 128 * 64
    cache = 2 * 2 * 2 * 32 * 64  # keys and values, layers, rows, tokens, features
    assert phases[1]["floor_bytes"] == {"fma": 2 * weights + 2 * cache, "integer": 2 * weights + 2 * cache, "layercast": 10 * weights + 4 * cache,
                                        "sgemm": 4 * weights + 4 * cache, "bf16": 2 * weights + 2 * cache}  # fmt: skip
    assert phases[2]["floor_flops"] == 2 * (weights - 128 * 64) * 40


def test_layercast_shares_bf16s_matrices_and_is_still_layercast(monkeypatch):
    weights = philox_weights(TINY, seed=3)
    monkeypatch.setattr(end_to_end, "random_weights", lambda config, seed, device: weights)
    shared = end_to_end.prepared(["layercast", "bf16"], Context(device="cpu"))
    alone, bf16 = prepare(weights, family="layercast"), shared["bf16"]
    assert list(shared) == ["layercast", "bf16"] and shared["layercast"].layers is bf16.layers and shared["layercast"].head is bf16.head
    decoded = [end_to_end.Decoder(m, batch=1, capacity_tokens=8).prefill([[5, 9, 2]]) for m in (shared["layercast"], alone, bf16)]
    assert torch.equal(decoded[0], decoded[1]) and not torch.equal(decoded[0], decoded[2])


def test_a_serving_variant_with_other_bits_is_refused():
    class Wrong:
        logits_BV = torch.tensor([[1.0, 2.0]])

    expected = torch.tensor([[1.0, math.nextafter(2.0, 3.0)]])
    end_to_end._same("bf16", Wrong, expected)
    with pytest.raises(AssertionError, match="other bits"):
        end_to_end._same("fma", Wrong, expected + 1e-3)
