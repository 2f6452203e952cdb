"""Claims: on Llama and Qwen2 models the engine computes and trains what PEFT does, and its adapters load in PEFT with equal logits.

Both sides are float32 on the CPU, so they differ by the order of sums alone. EPS bounds that of one logit or gradient, relative to the largest: about
ten sums in a row (2 layers), each over at most 160 terms, sqrt(160) * 2^-24 apiece, times 10 for what softmax and norms may amplify. TRAINED is for
weights after STEPS steps of AdamW, which divides by sqrt(v): where a gradient is near zero its sign may turn, and an element then moves by 2 rates a
step; those are few, so the distance is taken over all weights, relative to how far they moved.
"""

import json

import numpy as np
import pytest
import torch

from studies.plora.adapter import MODULES, AdapterConfig, PackShape, SlotShape
from studies.plora.data import synthetic
from studies.plora.engine import Base, EnginePack, export_adapter, import_adapter
from studies.plora.engine.decoder import hidden
from studies.plora.engine.reference import SlotBySlot

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

EPS = 10 * 10 * 160**0.5 * 2**-24  # 7.5e-5
TRAINED, STEPS = 1e-3, 6
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128}
ADAPTER = AdapterConfig(rank=6, alpha=9.0, learning_rate=5e-3, batch=4, budget_tokens=400, seed=3, weight_decay=0.1, clip=0.02, schedule="cosine", warmup=0.3)
TASK = synthetic(vocabulary=300, classes=0, seed=1, rows=(40, 8, 8), tokens=(6, 20))
SHAPE = PackShape(tokens=20, slots=(SlotShape(rank=4), SlotShape(rank=16, rows=3)))
SLOT = 1


def model_of(family: str):
    torch.manual_seed(0)
    made = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM), "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}[family]
    model = made[1](made[0](**SIZES, tie_word_embeddings=family == "qwen2", initializer_range=0.1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # zeros and ones show nothing
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture(params=["llama", "qwen2"])
def pair(request, tmp_path):
    """(transformers model, pack with a trained adapter in SLOT beside another)."""
    model = model_of(request.param)
    pack = EnginePack(Base.from_hf(model), SHAPE, TASK)
    pack.admit(0, AdapterConfig(rank=4, alpha=4.0, learning_rate=1e-2, batch=1, budget_tokens=10**6))
    pack.admit(SLOT, ADAPTER)
    return model, pack


def logits_of(pack: EnginePack, ids: list[int]) -> torch.Tensor:
    """All of SLOT's logits of one text, by the engine's own decoder."""
    ids_BT = torch.zeros(4, SHAPE.tokens, dtype=torch.int64)
    ids_BT[1, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([0, len(ids), 0, 0], dtype=torch.int32)
    with torch.no_grad():
        h = hidden(pack.base, pack.adapters.factors, SlotBySlot(), ids_BT, lengths, pack.frame)[SHAPE.tokens :][: len(ids)]
        h = torch.nn.functional.rms_norm(h, (h.shape[1],), pack.base.norm_K, pack.base.config.rms_eps)
        return h @ pack.base.head_VK.T


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def test_an_exported_adapter_loads_in_peft_with_equal_logits_and_comes_back(pair, tmp_path):
    model, pack = pair
    pack.advance(12)
    weights = pack.weights(SLOT)
    export_adapter(tmp_path, ADAPTER, weights, base_name=pack.base.name)
    ids = [5, 290, 17, 17, 0, 121, 44]
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
        tuned = peft.PeftModel.from_pretrained(model, tmp_path).eval()(torch.tensor([ids])).logits[0]
    assert close(logits_of(pack, ids), tuned, EPS)
    assert not close(plain, tuned, 100 * EPS), "the adapter does nothing: equal logits would show nothing"
    found = import_adapter(tmp_path)
    assert (found.rank, found.alpha) == (6, 9.0) and all(np.array_equal(found.weights[n], w) for n, w in weights.items())
    look = pack.evaluate()[0][SLOT]
    pack.release(SLOT)
    pack.admit(SLOT, ADAPTER)
    pack.load(SLOT, found.weights)
    again = pack.evaluate()[0][SLOT]
    assert (again.loss, again.tokens_seen) == (look.loss, 0)


def test_what_peft_saves_loads_into_a_slot(pair, tmp_path):
    model, pack = pair
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=6, lora_alpha=9, target_modules=list(MODULES), init_lora_weights=False, task_type="CAUSAL_LM"))
    tuned.save_pretrained(tmp_path)
    pack.load(SLOT, import_adapter(tmp_path).weights)
    ids = [9, 8, 299, 3]
    with torch.no_grad():
        assert close(logits_of(pack, ids), tuned.eval()(torch.tensor([ids])).logits[0], EPS)


def test_training_is_what_peft_and_torch_s_adamw_do(pair, tmp_path):
    """The same starting A, rows in the engine's order, summed loss over the batch's answer tokens, clip, decay and schedule."""
    model, pack = pair
    start = pack.weights(SLOT)
    export_adapter(tmp_path, ADAPTER, start, base_name="")
    tuned = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in tuned.named_parameters() if p.requires_grad}
    assert set(trained) == set(start)
    optimizer = torch.optim.AdamW(trained.values(), lr=1.0, weight_decay=ADAPTER.weight_decay)
    course, seen, losses = pack._courses[SLOT], 0, []
    order = np.array(type(course)(adapter=ADAPTER, rows=course.rows).next_rows(STEPS * ADAPTER.batch)).reshape(STEPS, -1)
    for rows in order:
        optimizer.zero_grad()
        total, answers = 0.0, int(TASK.train.answer_tokens[rows].sum())
        for row in rows:
            ids = torch.from_numpy(TASK.train.ids[row]).long()
            first = int(TASK.train.answer_from[row])
            logits = tuned(ids[None]).logits[0, first - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[first:], reduction="sum")
        (total / answers).backward()
        losses.append(total.item() / answers)
        seen += int(TASK.train.lengths[rows].sum())
        optimizer.param_groups[0]["lr"] = ADAPTER.rate_at(seen)
        torch.nn.utils.clip_grad_norm_(list(trained.values()), ADAPTER.clip)
        optimizer.step()
    found = []
    while pack._courses[SLOT].optimizer_steps < STEPS:
        pack.advance(1)
        if not course.filled:
            found.append(pack.live()[SLOT].loss)
    assert np.allclose(found, losses, rtol=10 * EPS, atol=0)
    ours = pack.weights(SLOT)
    moved = np.sqrt(sum(np.square(ours[n] - start[n]).sum() for n in ours))
    apart = np.sqrt(sum(np.square(ours[n] - trained[n].detach().numpy()).sum() for n in ours))
    assert apart <= TRAINED * moved and moved > 0.1


def test_gradients_of_every_site_are_peft_s(pair, tmp_path):
    model, pack = pair
    pack.advance(4)  # B is no longer zero: A's gradients are not either
    export_adapter(tmp_path, ADAPTER, pack.weights(SLOT), base_name="")
    tuned = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    assert not pack._courses[SLOT].filled
    rows = type(pack._courses[SLOT])(adapter=ADAPTER, rows=40, passed=pack._courses[SLOT].passed).next_rows(3)
    pack.advance(1)
    for row in rows:
        ids, first = torch.from_numpy(TASK.train.ids[row]).long(), int(TASK.train.answer_from[row])
        torch.nn.functional.cross_entropy(tuned(ids[None]).logits[0, first - 1 : -1], ids[first:], reduction="sum").backward()
    wanted = {n.replace(".default", ""): p.grad for n, p in tuned.named_parameters() if p.requires_grad}
    grads = pack.adapters.state.slot_views(SLOT, "grad")
    for site, a, b in zip(pack.adapters.sites, grads[::2], grads[1::2], strict=True):
        for mine, theirs in ((a[:6], wanted[site.names[0]]), (b[:6].T, wanted[site.names[1]])):
            assert close(mine, theirs, 10 * EPS) and theirs.abs().max() > 0, site
        assert not a[6:].any() and not b[6:].any()


def test_an_adapter_starts_as_peft_s_do(pair):
    """A uniform in +-1/sqrt(K), B zero. 384 or more draws reach within 5% of the bound but for a chance of 0.95^384."""
    model, pack = pair
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=6, target_modules=list(MODULES)))
    theirs = {n.replace(".default", ""): p.detach() for n, p in tuned.named_parameters() if p.requires_grad}
    for name, mine in pack.weights(SLOT).items():
        assert mine.shape == tuple(theirs[name].shape)
        if "lora_B" in name:
            assert not mine.any() and not theirs[name].any()
        else:
            bound = mine.shape[1] ** -0.5
            assert all(0.95 * bound < float(abs(a).max()) <= bound * (1 + 2**-23) for a in (mine, theirs[name]))


def test_other_adapters_and_other_models_are_refused(pair, tmp_path):
    model, pack = pair
    export_adapter(tmp_path, ADAPTER, pack.weights(SLOT), base_name="")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, reason in (({"use_dora": True}, "plain LoRA, got {'use_dora': True}"), ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"), ({"target_modules": ["q_proj"]}, "on all of")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=reason):
            import_adapter(tmp_path)
    with pytest.raises(ValueError, match="adapter of rank 4"):
        pack.load(0, pack.weights(SLOT))
    with pytest.raises(ValueError, match="at all 14 sites"):
        pack.load(SLOT, {n: w for n, w in pack.weights(SLOT).items() if "layers.1" not in n})
    with pytest.raises(ValueError, match="weights are of the adapter's rank"):
        export_adapter(tmp_path, AdapterConfig(rank=7, alpha=1.0, learning_rate=1.0, batch=1, budget_tokens=1), pack.weights(SLOT), base_name="")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="families .*'gpt2'"):
        Base.from_hf(gpt2)
    headless = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="causal language model"):
        Base.from_hf(headless)
    scaled = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="plain RoPE"):
        Base.from_hf(transformers.LlamaForCausalLM(scaled))
