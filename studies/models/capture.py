"""Real activations: what the linears of SmolLM2 read on a few prompts, the same bits wherever they are captured.

    from studies.models import capture_linear_inputs, golden_token_ids, load_smollm2
    x_MK = capture_linear_inputs(load_smollm2(), golden_token_ids(), layers=(14,))["layers.14.mlp.down_proj"]     # bf16 [64, 1536]

`GOLDEN_CAPTURE_SHA256` pins the capture of the default tokens and layers: a processor, a torch or a kernel change that alters one bit
of it is found by comparing one string. The activations are those of the bf16-rounded model in family A's arithmetic (llama.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.exact import digest
from studies.models.llama import LINEARS, LlamaWeights, StopForward, forward, load_smollm2
from suite.assets import get_asset, load_tokenizer, prompts

GOLDEN_LAYERS = (0, 14, 29)
GOLDEN_PROMPTS = 4
GOLDEN_TOKENS = 16
GOLDEN_CAPTURE_SHA256 = "e60164bfc919cdf0805bf195af0997eccb8f9ac7c0be25b2a1f8148ca0a4e03f"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """`inputs`: linear -> x_MK bf16; `weights`: linear -> w_NK bf16; `prompts`: the prompt set and its sha256, for a result's labels."""

    inputs: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    prompts: str


def capture_prompts(
    *,
    layers: Sequence[int] = GOLDEN_LAYERS,
    sequences: int = GOLDEN_PROMPTS,
    tokens: int = GOLDEN_TOKENS,
    engine: str = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Captured:
    """Loads the model and captures `sequences` prompts of `tokens` tokens. Raises as `capture_linear_inputs` and `golden_token_ids`."""
    weights = load_smollm2(cache_dir=cache_dir)
    ids = golden_token_ids(count=sequences, tokens=tokens, cache_dir=cache_dir)
    inputs = capture_linear_inputs(weights, ids, layers=layers, engine=engine)
    label = f"own-prompts {get_asset('own-prompts').sha256}"
    return Captured(inputs=inputs, weights={name: weights[name] for name in inputs}, prompts=label)


def capture_linear_inputs(
    weights: LlamaWeights,
    token_ids: Sequence[Sequence[int]],
    *,
    layers: Sequence[int] = GOLDEN_LAYERS,
    activation_dtype: torch.dtype = torch.bfloat16,
    engine: str = "auto",
    threads: int = 1,
) -> dict[str, torch.Tensor]:
    """Name -> x_MK (`activation_dtype`, M = all tokens) for the 7 linears of each of `layers`; q, k, v and gate, up share one tensor.

    Stops after the last layer asked for. `engine` and `threads` change time, never bits.
    Raises ValueError for a layer that the model lacks and for tokens that `forward` refuses.
    """
    if not layers or min(layers) < 0 or max(layers) >= weights.config.layers:
        raise ValueError(f"layers must be some of 0 to {weights.config.layers - 1}, got {layers=}; count from 0")
    wanted = {f"layers.{layer}.{linear}" for layer in layers for linear in LINEARS}
    captured: dict[str, torch.Tensor] = {}

    def observe(name: str, x_MK: torch.Tensor) -> None:
        if name in wanted:
            captured[name] = x_MK
            if len(captured) == len(wanted):
                raise StopForward

    forward(weights, token_ids, activation_dtype=activation_dtype, engine=engine, threads=threads, observe=observe)
    assert captured.keys() == wanted, "every linear of every layer ran"
    return captured


def golden_token_ids(
    *, count: int = GOLDEN_PROMPTS, tokens: int = GOLDEN_TOKENS, cache_dir: str | os.PathLike[str] | None = None
) -> list[list[int]]:
    """The first `tokens` ids of the first `count` of our own prompts that are that long: at hand everywhere, so the golden digest is too.

    Raises ValueError where too few are that long, AssetError where the model is missing.
    """
    tokenizer = load_tokenizer(cache_dir=cache_dir)
    encoded = [tokenizer.encode(text) for text in prompts(source="own-prompts", cache_dir=cache_dir).texts]
    ids = [row[:tokens] for row in encoded if len(row) >= tokens][:count]
    if len(ids) < count:
        raise ValueError(f"only {len(ids)} prompts have {tokens} tokens, got {count=}; ask for fewer or shorter ones")
    return ids


def capture_digest(captured: Mapping[str, torch.Tensor]) -> str:
    """One sha256 over the names, in order, and each tensor's digest (`kernels.exact.digests`)."""
    lines = "".join(f"{name} {digest(captured[name])}\n" for name in sorted(captured))
    return hashlib.sha256(lines.encode()).hexdigest()
