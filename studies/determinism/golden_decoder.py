"""Golden questions on whole generations: a tiny decoder with weights from the Philox, greedy and sampled, in both exact families.

    DECODER[0].cases["greedy, fma"]

Two layers, so that what one layer leaves in the cache is read by the next; two prompts of different lengths in one batch. Every logit of
every step is part of the answer. Real weights are another matter: see the cells on SmolLM2.
"""

from __future__ import annotations

import torch

from studies.determinism.golden_entry import Operator, Tensors
from studies.determinism.golden_values import integers
from studies.models.config import LlamaConfig
from studies.models.decoder import Sampling
from studies.models.generation import Schedule, generate
from studies.models.llama import LlamaWeights
from studies.models.prepared import prepare
from studies.models.synthetic import philox_weights, tensor_shapes

TINY = LlamaConfig(layers=2, hidden=256, intermediate=384, heads=4, kv_heads=2, vocabulary=520, context_tokens=128, rope_base=1e5, rms_eps=1e-5)
PROMPT_TOKENS = (21, 5)
_CASES = {
    "greedy, fma": {"family": "fma", "new_tokens": 6},
    "greedy, integer": {"family": "integer", "new_tokens": 6},
    "sampled, fma": {"family": "fma", "new_tokens": 6, "temperature": 0.8},
}


def _inputs(seed: int, *, family: str, new_tokens: int, temperature: float = 0.0) -> Tensors:
    """The prompts in one row, then every weight in the order of its name's definition."""
    prompts = integers((sum(PROMPT_TOKENS),), TINY.vocabulary, seed=seed)
    tensors = philox_weights(TINY, seed=seed).tensors
    return prompts, *(tensors[name] for name in tensor_shapes(TINY))


def _generate(prompts: torch.Tensor, *tensors: torch.Tensor, family: str, new_tokens: int, temperature: float = 0.0) -> Tensors:
    """Tokens [prompt, step] and logits [step, prompt, vocabulary]."""
    weights = LlamaWeights(config=TINY, tensors=dict(zip(tensor_shapes(TINY), tensors, strict=True)))
    model = prepare(weights, family=family, device=prompts.device)
    seen: list[torch.Tensor] = []
    made = generate(model, [part.tolist() for part in prompts.split(PROMPT_TOKENS)], new_tokens=new_tokens, schedule=Schedule(batch=len(PROMPT_TOKENS)),
                    sampling=Sampling(seed=3, temperature=temperature) if temperature else None, observe=lambda step, rows, logits: seen.append(logits.clone()))
    return torch.tensor(made.tokens), torch.stack(seen)


DECODER = (Operator(name="decoder", family="fma", cases=_CASES, inputs=_inputs, cpu=_generate, gpu=_generate, options=("family", "new_tokens", "temperature")),)
