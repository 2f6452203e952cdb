"""Claims about `exactify`: one set of bits for any batch, padding, chunk and cache; the same function; nothing left silently."""

import contextlib
import copy
import inspect
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

from kernels.exact import digest, linear_fma_ref, philox_bell, rmsnorm_ref, swiglu_ref
from kernels.exact.attention import causal_attention_ref
from kernels.exact.exactify import ATTENTION_NAME, Unsupported, exactify
from kernels.exact.modules import FAMILIES, ExactLinear
from kernels.exact.rope import rope_ref, rope_tables

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=192, bos_token_id=None, eos_token_id=None, pad_token_id=0)  # fmt: skip
# groups of heads with a tied head; every bias; qkv bias alone with a head of its own; one key head, head_dim that is not hidden / heads
MODELS = {
    "llama-tied": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, **more)),
    "llama-biased": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, **more)),
    "llama-wide": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES | dict(num_key_value_heads=1, head_dim=24), **more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False, **more)),
}
# Roundings in series on the way to a logit: per layer two norms, q/k/v, RoPE, scores, weights, o, two sums, gate, SwiGLU and down (12), plus
# the last norm and the head. Each adds at most one unit roundoff of the model's dtype to the norm of what it makes, and inside it a sum of
# K <= 96 terms at most 96 units of float32: (12 L + 2) (u + 96 2^-24), L = 2. A wrong mask, position or weight is off by more than 0.1.
SERIES = 12 * SIZES["num_hidden_layers"] + 2
RELATIVE = {dtype: SERIES * (torch.finfo(dtype).eps / 2 + 96 * 2.0**-24) for dtype in (FP32, FP16, BF16)}
TOKENS = (70, 66, 5, 1)  # past a block of 64 keys with its tail, and short
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"  # transformers 5.24 renamed it


def build(name, dtype=FP32, **more):
    """A model whose weights are Philox's: the same on every machine and version."""
    model = MODELS[name](**more).to(dtype).eval()
    for stream, (key, weight) in enumerate(sorted(model.named_parameters())):
        value = philox_bell(tuple(weight.shape), seed=7, stream=stream, scale_log2=-2) + (1.0 if "norm" in key else 0.0)
        weight.data.copy_(value)
    return model


def prompts(lengths=TOKENS):
    return [torch.tensor([1 + (37 * i * i + 11 * row) % 96 for i in range(length)]) for row, length in enumerate(lengths)]


def padded(rows, side="left", width=None):
    """(ids, mask): rows side by side."""
    width = width or max(map(len, rows))
    fill = [(torch.zeros(width - len(row), dtype=torch.long), row) for row in rows]
    ids = torch.stack([torch.cat(pair if side == "left" else pair[::-1]) for pair in fill])
    mask = torch.stack([torch.cat([torch.zeros_like(a), torch.ones_like(b)] if side == "left" else [torch.ones_like(b), torch.zeros_like(a)]) for a, b in fill])
    return ids, mask


def same(a, b):
    return digest(a) == digest(b)


# ---- whole models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_batch_or_padding(name, dtype):
    model, rows = exactify(build(name, dtype)), prompts()
    alone = [model(row[None]).logits[0] for row in rows]
    assert alone[0].dtype == dtype and torch.isfinite(alone[0]).all()
    for side, width in (("left", None), ("left", 90), ("right", None)):
        ids, mask = padded(rows, side, width)
        logits = model(ids, attention_mask=mask).logits
        for row, want, got in zip(rows, alone, logits, strict=True):
            assert same(want, got[-len(row) :] if side == "left" else got[: len(row)]), (side, width, len(row))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama-biased", "qwen2"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_do_not_depend_on_the_pieces_in_which_a_padded_prompt_arrives(name, dtype, chunk):
    model, (ids, mask) = exactify(build(name, dtype)), padded(prompts((70, 66, 5)))
    whole, cache, pieces = model(ids, attention_mask=mask).logits, DynamicCache(config=model.config), []
    for first in range(0, ids.shape[1], chunk):
        last = min(first + chunk, ids.shape[1])
        pieces.append(model(ids[:, first:last], attention_mask=mask[:, :last], **{CACHE: cache}).logits)
    real = mask.bool()
    assert same(torch.cat(pieces, 1)[real], whole[real])


@pytest.mark.parametrize("name", MODELS)
def test_a_greedy_continuation_is_the_same_alone_in_a_batch_and_without_cache(name):
    model, rows = exactify(build(name)), prompts((60, 3))
    options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
    ids, mask = padded(rows)
    batch = model.generate(ids, attention_mask=mask, **options)
    for b, row in enumerate(rows):
        for use_cache in (True, False):
            alone = model.generate(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long), use_cache=use_cache, **options)
            assert alone.sequences[0, len(row) :].tolist() == batch.sequences[b, ids.shape[1] :].tolist()
            assert all(same(x[0], y[b]) for x, y in zip(alone.logits, batch.logits, strict=True))


@pytest.mark.parametrize("family", ["integer", "integer-b9"])
def test_the_integer_families_do_not_depend_on_batch_or_padding_either(family):
    model, rows = exactify(build("qwen2"), family), prompts((66, 5))
    ids, mask = padded(rows)
    logits = model(ids, attention_mask=mask).logits
    assert all(same(model(row[None]).logits[0], got[-len(row) :]) for row, got in zip(rows, logits, strict=True))
    assert not same(model(rows[0][None]).logits, exactify(build("qwen2"))(rows[0][None]).logits)


def test_the_plain_model_does_depend_on_padding_and_on_the_length_of_the_prompt():
    """The control: what exactify is for. Were it to pass, the tests above would say nothing."""
    model, rows = build("qwen2"), prompts()
    ids, mask = padded(rows)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        assert any(not same(model(row[None]).logits[0], got[-len(row) :]) for row, got in zip(rows, logits, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_same_function_as_the_model_in_float64(name, dtype, family):
    model, (ids, mask) = build(name, dtype), padded(prompts())
    with torch.no_grad():
        want = copy.deepcopy(model).double()(ids, attention_mask=mask).logits
    got = exactify(model, family)(ids, attention_mask=mask).logits
    for row in range(len(ids)):
        real = mask[row].bool()
        assert float((got[row, real] - want[row, real]).norm() / want[row, real].norm()) < RELATIVE[dtype]


def test_the_logits_are_the_operators_put_together():
    model, ids = build("llama-tied"), prompts((20,))[0]
    weights, (cos_PD, sin_PD) = model.state_dict(), rope_tables(tokens=192, head_dim=16, base=1e4)
    h_MK, position_BT = weights["model.embed_tokens.weight"][ids], torch.arange(20)[None]
    for layer in ("model.layers.0.", "model.layers.1."):
        w = {key.removeprefix(layer).removesuffix(".weight"): value for key, value in weights.items() if key.startswith(layer)}
        x_MK = rmsnorm_ref(h_MK, w["input_layernorm"], eps=1e-6)
        q, k, v = (linear_fma_ref(x_MK, w[f"self_attn.{part}_proj"]).view(1, 20, -1, 16) for part in "qkv")
        q, k = (rope_ref(part, position_BT, cos_PD, sin_PD) for part in (q, k))
        o_HTD = causal_attention_ref(*(part[0].transpose(0, 1) for part in (q, k, v)))
        h_MK = h_MK + linear_fma_ref(o_HTD.transpose(0, 1).flatten(1), w["self_attn.o_proj"])
        x_MK = rmsnorm_ref(h_MK, w["post_attention_layernorm"], eps=1e-6)
        gate_MF, up_MF = (linear_fma_ref(x_MK, w[f"mlp.{part}_proj"]) for part in ("gate", "up"))
        h_MK = h_MK + linear_fma_ref(swiglu_ref(gate_MF, up_MF), w["mlp.down_proj"])
    want_MV = linear_fma_ref(rmsnorm_ref(h_MK, weights["model.norm.weight"], eps=1e-6), weights["lm_head.weight"])
    assert same(exactify(model)(ids[None]).logits[0], want_MV)


# ---- what is refused -----------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.Linear(base_layer.in_features, 2)

    def forward(self, x):
        return self.base_layer(x)


class QuantLinear(nn.Linear):
    pass


def _wrap(model):
    layer = model.model.layers[1].self_attn
    layer.v_proj = LoraLinear(layer.v_proj)


def _quantise(model):
    model.model.layers[0].mlp.down_proj.__class__ = QuantLinear


def _hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 2)


def _patch(model):
    model.model.norm.forward = lambda x: x


def _float64(model):
    model.lm_head = nn.Linear(64, 97, bias=False, dtype=torch.float64)


def _extra(model):
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(16)


SLIDING = dict(use_sliding_window=True, sliding_window=16, max_window_layers=0)
LINEAR_ROPE = dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4))
# (model, its options, what is done to it, then the path, class and words that must be named)
UNSUPPORTED = [
    ("qwen2", SLIDING, None, "model.layers.1.self_attn (Qwen2Attention): sliding window of 16"),
    ("llama-tied", LINEAR_ROPE, None, "model.rotary_emb (LlamaRotaryEmbedding): RoPE of type 'linear'"),
    ("llama-tied", dict(attention_dropout=0.1), nn.Module.train, "model.layers.0.self_attn (LlamaAttention): active dropout of 0.1"),
    ("llama-tied", dict(hidden_act="gelu"), None, "model.layers.0.mlp (LlamaMLP): activation GELUActivation"),
    ("llama-tied", dict(head_dim=20), None, "model.layers.0.self_attn (LlamaAttention): head_dim is a multiple of 8"),
    ("qwen2", {}, _wrap, "model.layers.1.self_attn.v_proj (LoraLinear): unknown module"),
    ("qwen2", {}, _quantise, "model.layers.0.mlp.down_proj (QuantLinear): unknown module"),
    ("qwen2", {}, _hook, "model.layers.1.mlp.up_proj (Linear): it has forward hooks"),
    ("qwen2", {}, _patch, "model.norm (Qwen2RMSNorm): its forward was replaced"),
    ("qwen2", {}, _float64, "lm_head (Linear): parameters are bf16, fp16 or fp32"),
    ("qwen2", {}, _extra, "model.layers.0.self_attn.q_norm (LayerNorm): unknown module"),
]


@pytest.mark.parametrize("name, options, change, named", UNSUPPORTED, ids=[named for *_, named in UNSUPPORTED])
def test_what_cannot_be_made_exact_is_named_and_nothing_is_changed(name, options, change, named):
    model = build(name, **options)
    if change is not None:
        change(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as error:
        exactify(model)
    assert named in str(error.value)
    assert [type(module) for module in model.modules()] == classes and not hasattr(model, "exact_report")
    assert any(part.requires_grad for part in model.parameters()) and model.config._attn_implementation == "sdpa"


def test_every_unsupported_module_is_named_at_once():
    model = build("qwen2")
    _wrap(model), _quantise(model), _patch(model)
    with pytest.raises(ValueError, match="(?s)down_proj .*v_proj .*model.norm "):
        exactify(model)


def test_another_architecture_is_refused_by_name():
    model = MistralForCausalLM(MistralConfig(**SIZES))
    with pytest.raises(ValueError, match=r"\(model\) \(MistralForCausalLM\): unknown architecture"):
        exactify(model)
    with pytest.raises(ValueError, match="not a whole decoder"):
        exactify(build("qwen2").model)


def test_the_lenient_call_replaces_the_rest_and_says_what_is_left():
    model = build("qwen2")
    _wrap(model)
    report = exactify(model, strict=False)
    assert not report.exact and report is model.exact_report
    assert report.unsupported == (Unsupported(path="model.layers.1.self_attn.v_proj", kind="LoraLinear", reason="unknown module"),)
    assert "left inexact: model.layers.1.self_attn.v_proj (LoraLinear)" in str(report)
    assert type(model.model.layers[1].self_attn.v_proj) is LoraLinear and type(model.model.layers[1].self_attn.q_proj) is ExactLinear
    with torch.no_grad():
        assert torch.isfinite(model(prompts((9,))[0][None]).logits).all()
    with pytest.raises(ValueError, match="exactified once"):
        exactify(model)


def _wrap_attention(model):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model.model.layers[0].self_attn = Wrapper(model.model.layers[0].self_attn)


@pytest.mark.parametrize("name, options, change", [("qwen2", SLIDING, None), ("llama-tied", LINEAR_ROPE, None), ("qwen2", {}, _wrap_attention)])
def test_attention_and_rotary_embedding_are_left_together_and_the_model_still_runs(name, options, change):
    model, (ids, mask) = build(name, **options), padded(prompts((20, 9)))
    if change:
        change(model)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
    report = exactify(model, strict=False)
    left = {item.path for item in report.unsupported}
    assert {"model.rotary_emb", "model.layers.0.self_attn", "model.layers.1.self_attn"} <= left and type(model.lm_head) is ExactLinear
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert float((got[real] - want[real]).norm() / want[real].norm()) < 2 * RELATIVE[FP32]


def test_a_plain_model_can_take_the_attention_alone():
    exactify(build("qwen2"))  # registers it
    model, (ids, mask) = build("llama-tied"), padded(prompts((20, 9)))
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits[mask.bool()]
        model.set_attn_implementation(ATTENTION_NAME)
        got = model(ids, attention_mask=mask).logits[mask.bool()]
    assert float((got - want).norm() / want.norm()) < 2 * RELATIVE[FP32] and not same(got, want)


def test_integer_families_name_weights_that_they_cannot_hold():
    model = build("qwen2")
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("inf")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj \(Linear\): family integer needs finite weights"):
        exactify(model, "integer")
    exactify(model, "fma")


def test_a_second_call_changes_nothing_and_another_family_is_refused():
    model = exactify(build("qwen2"))
    modules = list(model.modules())
    assert exactify(model) is model and list(model.modules()) == modules and exactify(model, strict=False) is model.exact_report
    with pytest.raises(ValueError, match="exactified once"):
        exactify(model, "integer")
    with pytest.raises(ValueError, match="family is one of"):
        exactify(build("qwen2"), "bf16")


def test_requests_that_could_not_be_exact_are_refused():
    model, (ids, mask) = exactify(build("qwen2")), padded(prompts((9, 4)))
    holes = mask.clone()
    holes[0, 4] = 0
    static = StaticCache(config=model.config, max_cache_len=32)
    cases = {
        "contiguous": dict(attention_mask=holes), r"attention_mask is \[B, 9\]": dict(attention_mask=mask[:, :7]), "labels": dict(labels=ids),
        "output_attentions": dict(output_attentions=True), "use DynamicCache": {CACHE: static},
        "adds no mask": dict(attention_mask=torch.zeros(2, 1, 9, 9)),
        "do not pack": dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), use_cache=False),
    }  # fmt: skip
    for words, request in cases.items():
        with pytest.raises(ValueError, match=words):
            model(ids, **request)
    with pytest.raises(ValueError, match="larger context_tokens"):
        model(torch.ones(1, 193, dtype=torch.long))
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu"):
        model(ids)
    with pytest.raises(ValueError, match="no gradient"):
        model(inputs_embeds=torch.zeros(1, 3, 64, requires_grad=True))
    dropping = exactify(build("qwen2", attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match="dropout"):
        dropping(ids)


def test_a_compiler_runs_the_modules_as_they_are():
    """A compiler that traced into them took another engine's roundings: backend "eager" alone changed bits."""
    model, (ids, mask) = exactify(build("qwen2")), padded(prompts((20, 9)))
    assert same(torch.compile(model, backend="eager")(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_a_model_that_shares_the_config_keeps_its_own_attention():
    config = LlamaConfig(**SIZES)
    one, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    exactify(one)
    assert other.config._attn_implementation == "sdpa" and type(other.lm_head) is nn.Linear


# ---- state ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_state_copies_casts_and_saved_files_carry_the_plain_weights(family, tmp_path):
    plain = build("llama-tied")
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    ids = prompts((9,))[0][None]
    model = exactify(plain, family)
    want = model(ids).logits
    assert {key: digest(value) for key, value in model.state_dict().items()} == {key: digest(value) for key, value in state.items()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = exactify(build("llama-tied", BF16).float(), family)
    assert not same(other(ids).logits, want)
    other.load_state_dict(state)
    assert same(other(ids).logits, want) and same(copy.deepcopy(model)(ids).logits, want)
    model.save_pretrained(tmp_path)
    assert same(exactify(LlamaForCausalLM.from_pretrained(tmp_path), family)(ids).logits, want)
    narrow = model.to(BF16)
    assert narrow.model.rotary_emb.cos_PD.dtype == FP32 and same(narrow(ids).logits, exactify(build("llama-tied", BF16), family)(ids).logits)


# ---- the README ----------------------------------------------------------------------------------------------------------------


def test_the_readme_s_example_has_ten_lines_and_runs():
    text = (Path(__file__).resolve().parents[2] / "kernels" / "exact" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "README.md", "exec"), {})
    assert len([line for line in example.splitlines() if line]) <= 10
    assert out.getvalue().startswith("True family fma") and ": exact" in out.getvalue()
