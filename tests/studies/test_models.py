"""The shared decoder: right (against transformers), reproducible (digests, threads, engines, instruction sets) and strict about input.

The model comes through the asset store; tests that need it skip only where it cannot be had.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.exact import digest, philox_bell
from studies.models import (
    GOLDEN_CAPTURE_SHA256, LINEARS, LlamaConfig, apply_rope, capture_digest, capture_linear_inputs,
    capture_prompts, forward, golden_token_ids, load_smollm2, rope_tables,
)  # fmt: skip
from studies.models.synthetic import philox_weights
from suite.assets import AssetError

REPO = Path(__file__).parents[2]
SMOLLM2 = LlamaConfig(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49152, context_tokens=8192,
                      rope_base=100000.0, rms_eps=float(np.float32(1e-5)))
ROPE_512_SHA256 = (
    "aa85daf68f66b38b1014b4fd4cab826e703a20bbf8aaaf6de63ff5239c462e0a",
    "dc91aa7102694ab7e664cd67e467556581a52a7b4df1c9ca36051f4205c19167",
)
FEW_TOKENS = 8  # of the comparison in fp32, whose exact products are slow without a C compiler


def tolerance(layer: int, activation_dtype: torch.dtype) -> float:
    """Bound on |ours - theirs| / |theirs| (Frobenius) of a linear's input in `layer`.

    A layer has 7 places where an error enters: its linears in fp32 (a random walk of sqrt(K) u, K <= 1536, u = 2^-24), the roundings of
    four linear inputs and of q, k, v in bf16 (u = 2^-9). Inside a layer they may add up in full, for q and k act on the same scores and
    the rest follows in one chain; the errors of different layers are independent and add in quadrature.
    """
    one = {torch.float32: SMOLLM2.intermediate**0.5 * 2.0**-24, torch.bfloat16: 2.0**-9}[activation_dtype]
    return 7 * (layer + 1) ** 0.5 * one


@pytest.fixture(scope="module")
def weights():
    try:
        return load_smollm2()
    except AssetError as error:
        if "differs" in str(error):
            raise
        pytest.skip(f"the model file is on no source that this machine reaches: {error}")


@pytest.fixture(scope="module")
def tokens(weights):
    return golden_token_ids()


@pytest.fixture(scope="module")
def reference_model(weights):
    """transformers' Llama in fp32 with the same bf16-rounded weights."""
    transformers = pytest.importorskip("transformers", reason="the reference model is a test dependency")
    c = weights.config
    config = transformers.LlamaConfig(
        hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, vocab_size=c.vocabulary, max_position_embeddings=c.context_tokens, rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):  # no time for random weights
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float().eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not loaded
    model.tie_weights()
    left = model.load_state_dict({f"model.{name}": tensor.float() for name, tensor in weights.tensors.items()}, strict=False)
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys, "the head is tied to the embedding"
    return model


def reference_inputs(model, token_ids):
    seen = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name.removeprefix("model."), args[0].flatten(0, 1)))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        logits = model(torch.tensor(token_ids)).logits.flatten(0, 1)
    for hook in hooks:
        hook.remove()
    return seen, logits


def test_the_config_read_from_the_file_is_smollm2_135m(weights):
    assert weights.config == SMOLLM2 and weights.config.head_dim == 64


@pytest.mark.parametrize("activation_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_captured_inputs_and_logits_agree_with_transformers_within_the_derived_bound(weights, tokens, reference_model, activation_dtype):
    ids = [row[:FEW_TOKENS] for row in tokens[:2]]
    theirs, their_logits = reference_inputs(reference_model, ids)
    ours = {}
    logits = forward(weights, ids, activation_dtype=activation_dtype, observe=ours.__setitem__)
    assert len(ours) == SMOLLM2.layers * len(LINEARS)
    for name, x_MK in ours.items():
        assert x_MK.dtype == activation_dtype
        off = float((x_MK.float() - theirs[name]).norm() / theirs[name].norm())
        assert off <= tolerance(int(name.split(".")[1]), activation_dtype), name
    assert float((logits - their_logits).norm() / their_logits.norm()) <= tolerance(SMOLLM2.layers, activation_dtype)
    if activation_dtype == torch.float32:
        assert torch.equal(logits.argmax(1), their_logits.argmax(1))


def test_the_golden_capture_has_the_pinned_digest(weights, tokens):
    captured = capture_linear_inputs(weights, tokens)
    assert capture_digest(captured) == GOLDEN_CAPTURE_SHA256, "this machine, torch or a kernel computes other bits"
    assert sorted(captured) == sorted(f"layers.{layer}.{linear}" for layer in (0, 14, 29) for linear in LINEARS)
    for name, x_MK in captured.items():
        assert x_MK.dtype == torch.bfloat16 and x_MK.shape == (64, 1536 if name.endswith("down_proj") else 576)
    assert captured["layers.14.self_attn.q_proj"] is captured["layers.14.self_attn.v_proj"]


# All that a caller may vary. Two threads stay small: on a busy machine threads that wait for each other cost seconds.
@pytest.mark.parametrize("engine", ["auto", "torch"])
@pytest.mark.parametrize("threads", [1, 2])
def test_engine_and_threads_change_no_bit(weights, tokens, engine, threads):
    before = torch.get_num_threads()
    captured = capture_linear_inputs(weights, tokens[:1], layers=(0,), engine=engine, threads=threads)
    assert capture_digest(captured) == capture_digest(capture_linear_inputs(weights, tokens[:1], layers=(0,), engine="torch"))
    assert torch.get_num_threads() == before


def test_a_processor_without_vector_instructions_captures_the_same_bits(weights, tokens):
    """torch's plain code path stands for another processor: the same digest, or an operation's bits hang on the vector unit."""
    code = ("from studies.models import *; w = load_smollm2(); "
            "print(capture_digest(capture_linear_inputs(w, golden_token_ids()[:2], layers=(2,), engine='torch')))")
    plain = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True,
                           env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}).stdout.strip()
    assert plain == capture_digest(capture_linear_inputs(weights, tokens[:2], layers=(2,)))


def test_a_sequence_has_the_same_bits_alone_in_company_and_as_a_prefix(weights, tokens):
    together = capture_linear_inputs(weights, tokens[:3], layers=(1,))
    alone = capture_linear_inputs(weights, [tokens[1]], layers=(1,))
    prefix = capture_linear_inputs(weights, [tokens[1][:5]], layers=(1,))
    for name in together:
        assert torch.equal(together[name][16:32], alone[name]) and torch.equal(alone[name][:5], prefix[name]), name


def test_capture_prompts_gives_inputs_weights_and_the_prompt_sets_name(weights):
    captured = capture_prompts(layers=(0,), sequences=2, tokens=4)
    assert sorted(captured.inputs) == sorted(captured.weights) == sorted(f"layers.0.{linear}" for linear in LINEARS)
    assert captured.inputs["layers.0.mlp.down_proj"].shape == (8, 1536)
    assert captured.weights["layers.0.mlp.down_proj"].shape == (576, 1536) and captured.prompts.startswith("own-prompts ")


def test_wrong_input_is_a_value_error_that_says_what_was_given(weights, tokens):
    with pytest.raises(ValueError, match="got lengths=\\[1, 0\\]"):
        forward(weights, [[1], []])
    with pytest.raises(ValueError, match="highest=49152"):
        forward(weights, [[1, 49152]])
    with pytest.raises(ValueError, match="got layers=\\(30,\\)"):
        capture_linear_inputs(weights, tokens, layers=(30,))
    with pytest.raises(ValueError, match="got count=1000"):
        golden_token_ids(count=1000)


@pytest.mark.parametrize("change", [{"layers": 0}, {"kv_heads": 2}, {"hidden": 9}, {"rope_base": 1.0}, {"rms_eps": -1.0}], ids=str)
def test_a_config_that_does_not_fit_is_refused(change):
    with pytest.raises(ValueError, match="got "):
        replace(SMOLLM2, **change)
    with pytest.raises(ValueError, match="an even number of elements"):
        replace(SMOLLM2, head_size=63)
    assert replace(SMOLLM2, head_size=128).qkv_rows == (1152, 384, 384)
    with pytest.raises(ValueError, match="must be 'llama'"):
        LlamaConfig.from_gguf({"general.architecture": "gpt2"})


def test_biases_and_a_head_of_its_own_agree_with_transformers_qwen2():
    """Untrained weights at a Qwen2 shape: biases on q, k and v, a head that is not the embedding, fp32 activations."""
    transformers = pytest.importorskip("transformers", reason="the reference model is a test dependency")
    c = LlamaConfig(layers=2, hidden=48, intermediate=80, heads=4, kv_heads=2, vocabulary=90, context_tokens=64, rope_base=1e4, rms_eps=1e-6,
                    qkv_bias=True, tied_head=False)
    ours = philox_weights(c, seed=5)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        vocab_size=c.vocabulary, max_position_embeddings=c.context_tokens, rms_norm_eps=c.rms_eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, attn_implementation="eager",
    )).float().eval()  # fmt: skip
    named = {(name if name.startswith("lm_head") else f"model.{name}"): tensor.float() for name, tensor in ours.tensors.items()}
    model.load_state_dict(named, strict=True)
    ids = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]
    with torch.no_grad():
        want = model(torch.tensor(ids)).logits.flatten(0, 1)
    got = forward(ours, ids, activation_dtype=torch.float32)
    assert float((got - want).norm() / want.norm()) <= tolerance(c.layers, torch.float32) and torch.equal(got.argmax(1), want.argmax(1))
    without = replace(ours, tensors={name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in ours.tensors.items()})
    assert float((forward(without, ids, activation_dtype=torch.float32) - want).norm() / want.norm()) > 0.01, "the biases matter here"


def test_rope_tables_have_the_pinned_digest_and_are_within_an_ulp_of_fp64():
    tables = rope_tables(tokens=512, head_dim=64, base=1e5)
    assert tuple(map(digest, tables)) == ROPE_512_SHA256
    angles = np.arange(512)[:, None] * 1e5 ** (-np.arange(32) / 32)
    for table, want in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        # fp32 rounding (half an ulp, 2^-25 below 1) plus fp64 angles of up to 511, wrong by 2^-44
        assert np.abs(table.numpy().astype(np.float64) - want).max() <= 2.0**-25 + 2.0**-43
    shorter = rope_tables(tokens=7, head_dim=64, base=1e5)
    assert all(torch.equal(a[:7], b) for a, b in zip(tables, shorter, strict=True))
    with pytest.raises(ValueError, match="got tokens=0"):
        rope_tables(tokens=0, head_dim=64, base=1e5)


def test_rope_at_the_first_position_changes_nothing_and_scores_depend_on_distance_alone():
    cos_TD, sin_TD = rope_tables(tokens=9, head_dim=64, base=1e5)
    x = philox_bell((1, 64), 5).expand(9, 64)
    turned = apply_rope(x, cos_TD, sin_TD)
    assert torch.equal(turned[0], x[0])
    scores = turned.double() @ turned.double().T
    # 64 products of values rounded to fp32 three times each, |x|^2 in all
    assert float((scores.diagonal(3) - scores[0, 3]).abs().max()) <= 6 * 2.0**-24 * float(x[0].double().square().sum())
