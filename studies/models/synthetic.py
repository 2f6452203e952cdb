"""Weights that nobody trained: for tests that need equal bits on every machine, and for measuring speed at a shape.

    weights = philox_weights(config, seed=1)                # CPU, the same bits everywhere
    weights = random_weights(LLAMA2_7B, seed=1, device="cuda")

`philox_weights` maps integers to floats without libm and takes about a second for 10 million weights. `random_weights` is torch's
generator: seconds for 7 billion weights on a GPU, bits that differ by device; for speed only. Neither says anything about language.
"""

from __future__ import annotations

import torch

from kernels.exact.philox import philox_bell, philox_uniform
from studies.models.config import LlamaConfig
from studies.models.llama import LlamaWeights

__all__ = ["philox_weights", "random_weights", "tensor_shapes"]


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of `LlamaWeights`: matrices have two dimensions, norms and biases one."""
    hidden, wide = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocabulary, hidden), "norm.weight": (hidden,)}
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    for layer in range(config.layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        for part, rows in zip("qkv", config.qkv_rows, strict=True):
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, config.qkv_rows[0])
        shapes |= {f"{at}.mlp.gate_proj.weight": (wide, hidden), f"{at}.mlp.up_proj.weight": (wide, hidden), f"{at}.mlp.down_proj.weight": (hidden, wide)}
    return shapes


def philox_weights(config: LlamaConfig, *, seed: int) -> LlamaWeights:
    """Matrices bell-shaped with a deviation near K^-0.5, norms in (0.5, 1.5), biases in (-0.5, 0.5); one Philox stream a tensor."""
    tensors = {}
    for stream, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 2:  # a bell has variance 4^s / 3
            tensors[name] = philox_bell(shape, seed, torch.bfloat16, stream, scale_log2=-_half_log2_third(shape[1]))
        else:
            tensors[name] = 0.5 * philox_uniform(shape, seed, torch.float32, stream) + (0.0 if name.endswith("bias") else 1.0)
    return LlamaWeights(config=config, tensors=tensors)


def _half_log2_third(k: int) -> int:
    """log2(k / 3) / 2 rounded to an integer, ties to even, from integers alone: k = 3 * 4^s * 2 lies halfway between s and s + 1."""
    s = -1
    while 3 << (2 * s + 2) < 2 * k:
        s += 1
    return s + 1 if 3 << (2 * s + 2) == 2 * k and s % 2 else s


def random_weights(config: LlamaConfig, *, seed: int, device: str | torch.device) -> LlamaWeights:
    """Normal matrices with deviation K^-0.5, norms of one, normal biases. For speed only: the bits depend on the device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2:
            w_NK = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            tensors[name] = w_NK.mul_(shape[1] ** -0.5)
        else:
            tensors[name] = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) if name.endswith("bias") else torch.ones(shape, dtype=torch.float32, device=device)
    return LlamaWeights(config=config, tensors=tensors)
