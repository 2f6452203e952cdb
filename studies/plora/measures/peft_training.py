"""The same adapter trained as a user of PEFT does: a transformers model, LoraConfig, torch's AdamW, one adapter, eager.

    lm = causal_lm(setting.base)                                       # a transformers model with the base's weights
    found = train_by_peft(lm, setting.task, config, tokens=64, start=pack.weights(0))
    found.score, found.weights                                         # on the test rows; by PEFT's names

It is for comparing what is learnt, not how fast. The adapter starts from `start` and sees the rows in the order of the engine's course, so that both
trainers are asked the same; dropout alone is drawn by each in its own way. Rate over tokens seen, batch, clip and decay are the AdapterConfig's;
the loss is the mean over the answer tokens of a batch, and the last batch runs to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from studies.plora.adapter import MODULES, AdapterConfig
from studies.plora.data.task import Examples, Task
from studies.plora.engine.base import Base
from studies.plora.engine.courses import Course

__all__ = ["Trained", "causal_lm", "train_by_peft"]

EVALUATED_ROWS = 64
IGNORED = -100


def causal_lm(base: Base) -> Any:
    """A transformers Llama with the weights of a base without q, k, v biases; on its device, in its type. Raises ValueError for others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = base.config
    if c.qkv_bias:
        raise ValueError(f"a Llama has no biases, got a base with some, {base.name}; compare on a Llama")
    config = LlamaConfig(vocab_size=c.vocabulary, hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
                         head_dim=c.head_dim, max_position_embeddings=c.context_tokens, rms_norm_eps=c.rms_eps, rope_theta=c.rope_base, tie_word_embeddings=c.tied_head, attention_bias=False)  # fmt: skip
    tensors = {"model.embed_tokens.weight": base.embed_VK, "model.norm.weight": base.norm_K, "lm_head.weight": base.head_VK}
    for i, layer in enumerate(base.layers):
        tensors |= {f"model.layers.{i}.input_layernorm.weight": layer.input_norm_K, f"model.layers.{i}.post_attention_layernorm.weight": layer.post_norm_K}
        tensors |= {f"model.layers.{i}.{'self_attn' if m in MODULES[:4] else 'mlp'}.{m}.weight": frozen.w_NK for m, frozen in layer.linears.items()}
    with torch.random.fork_rng(devices=[]):  # it starts from random weights
        lm = LlamaForCausalLM(config)
    lm.load_state_dict(tensors, strict=True)
    for parameter in lm.parameters():  # not lm.to(dtype): the angles of RoPE stay float32
        parameter.data = parameter.data.to(base.dtype)
    return lm.to(base.device)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """score: on the test rows. weights: float32 arrays by PEFT's names."""

    score: float
    weights: Mapping[str, np.ndarray] = field(repr=False)


def train_by_peft(lm: Any, task: Task, config: AdapterConfig, tokens: int, start: Mapping[str, np.ndarray]) -> Trained:
    """`lm` is as it was afterwards; torch's random state is restored."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    devices = [lm.device.index] if lm.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(config.seed)  # PEFT draws dropout from torch's global generator
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=list(MODULES), bias="none", task_type="CAUSAL_LM")
        model = get_peft_model(lm, lora)
        try:
            unknown = set_peft_model_state_dict(model, {name: torch.from_numpy(array).to(lm.device) for name, array in start.items()}).unexpected_keys
            assert not unknown, f"PEFT knows every weight of a start, got {unknown[:3]}"
            _train(model, task.train, config, tokens)
            weights = {name: w.detach().float().cpu().numpy().copy() for name, w in get_peft_model_state_dict(model).items()}
            return Trained(score=_score(model, task.test, tokens), weights=weights)
        finally:
            model.unload()


def _train(model: Any, rows: Examples, config: AdapterConfig, tokens: int) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=config.weight_decay)
    model.train()
    seen, course = 0, Course(adapter=config, rows=len(rows))
    while seen < config.budget_tokens:
        batch = course.next_rows(config.batch)
        seen += int(rows.lengths[batch].sum())
        loss = _answer_loss(model, rows, batch, tokens).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.rate_at(seen)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _padded(model: Any, rows: Examples, batch: np.ndarray, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [B, T]; padding at the end, prompt and padding ignored."""
    ids = np.zeros((len(batch), tokens), np.int64)
    labels = np.full((len(batch), tokens), IGNORED, np.int64)
    for i, row in enumerate(batch):
        tokens_of = rows.ids[int(row)]
        ids[i, : len(tokens_of)] = tokens_of
        at = int(rows.answer_from[int(row)])
        labels[i, at : len(tokens_of)] = tokens_of[at:]
    return torch.from_numpy(ids).to(model.device), torch.from_numpy(labels).to(model.device)


def _answer_loss(model: Any, rows: Examples, batch: np.ndarray, tokens: int) -> torch.Tensor:
    """Of every answer token of the batch."""
    ids, labels = _padded(model, rows, batch, tokens)
    kept = (labels[:, 1:] != IGNORED).flatten()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)[kept].float()
    return F.cross_entropy(logits, labels[:, 1:].flatten()[kept], reduction="none")


@torch.no_grad()
def _score(model: Any, rows: Examples, tokens: int) -> float:
    model.eval()
    losses, right = [], 0
    for start in range(0, len(rows), EVALUATED_ROWS):
        batch = np.arange(start, min(start + EVALUATED_ROWS, len(rows)))
        if rows.choices is None:
            losses.append(_answer_loss(model, rows, batch, tokens))
            continue
        ids, _ = _padded(model, rows, batch, tokens)
        at = torch.from_numpy(rows.answer_from[batch].astype(np.int64) - 1).to(ids.device)
        logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(batch), device=ids.device), at]
        picked = logits[:, torch.from_numpy(rows.choices.astype(np.int64)).to(ids.device)].argmax(-1).cpu().numpy()
        right += int((picked == rows.labels[batch]).sum())
    return right / len(rows) if rows.choices is not None else -float(torch.cat(losses).mean())
