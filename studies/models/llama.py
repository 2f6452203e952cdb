"""A Llama decoder's forward pass on the CPU in which every sum has a stated order: the same bits on any IEEE-754 machine.

    from studies.models import forward, load_smollm2
    weights = load_smollm2()
    logits_MV = forward(weights, [[1, 4093, 198]])          # fp32; one row a token, sequences one after another

Each linear rounds its input to bf16 (nearest even) and runs in family A's order (`linear_fma_ref`); the residual stream is fp32; q, k
and v are rounded to bf16 after RoPE, as a bf16 cache would hold them. No BLAS, no libm, no thread count in the result. It is an
oracle and a source of activations, not a fast decoder: there is no KV cache, so a token costs what its whole prefix costs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.exact import linear_fma_ref, rmsnorm_ref, swiglu_ref
from kernels.exact.attention import causal_attention_ref
from kernels.exact.rope import apply_rope, rope_tables
from studies.models.config import LlamaConfig
from suite.assets import StoredModel, load_bf16

# The linears of one layer, in the order in which they run. q, k, v share an input, and so do gate and up.
LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip

Observer = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class LlamaWeights:
    """`tensors` by transformers name without the leading "model.": matrices w_NK in bf16, norms and biases in fp32."""

    config: LlamaConfig
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def from_stored(model: StoredModel) -> LlamaWeights:
        """From `suite.assets.load_bf16`. The bits are copied out of the read-only file."""
        tensors = {name.removeprefix("model."): _to_torch(array) for name, array in model.tensors.items()}
        return LlamaWeights(config=LlamaConfig.from_gguf(model.metadata), tensors=tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    @property
    def head(self) -> torch.Tensor:
        """w_VK of the logits: the embedding where they are tied."""
        return self["embed_tokens" if self.config.tied_head else "lm_head"]

    def bias(self, name: str) -> torch.Tensor | None:
        """The fp32 bias of a linear; None where it has none."""
        return self.tensors.get(f"{name}.bias")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every layer of one forward pass shares. `bounds`: [start, stop) rows of each sequence; `rope`: tables of the longest."""

    weights: LlamaWeights
    bounds: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    engine: str
    observe: Observer
    rope: tuple[torch.Tensor, torch.Tensor]

    def linear(self, name: str, x_MK: torch.Tensor) -> torch.Tensor:
        self.observe(name, x_MK)
        y_MN = linear_fma_ref(x_MK, self.weights[name], engine=self.engine)
        bias_N = self.weights.bias(name)
        return y_MN if bias_N is None else y_MN + bias_N

    def norm(self, name: str, h_MK: torch.Tensor) -> torch.Tensor:
        return rmsnorm_ref(h_MK, self.weights[name], eps=self.weights.config.rms_eps, out_dtype=self.dtype)


class StopForward(Exception):
    """Raised by an observer that has seen enough; `forward` then returns None."""


def load_smollm2(*, cache_dir: str | os.PathLike[str] | None = None) -> LlamaWeights:
    """SmolLM2-135M-Instruct with matrices rounded to bf16. Raises `suite.assets.AssetError`."""
    return LlamaWeights.from_stored(load_bf16(cache_dir=cache_dir))


def forward(
    weights: LlamaWeights,
    token_ids: Sequence[Sequence[int]],
    *,
    activation_dtype: torch.dtype = torch.bfloat16,
    engine: str = "auto",
    threads: int = 1,
    observe: Observer = lambda name, x_MK: None,
) -> torch.Tensor | None:
    """Logits fp32 [tokens of all sequences, vocabulary]; each sequence is independent of the others, bit for bit.

    `activation_dtype`: what linears and attention read; fp32 serves comparison with other implementations. `engine`: of
    `linear_fma_ref`; changes time, never bits. `threads`: torch's while this runs, likewise; one is fastest for a few dozen tokens, since
    most operations are small and threads that wait for each other spin. `observe(name, x_MK)` sees the input of each linear in the order
    of running, "layers.0.self_attn.q_proj" first; where it raises StopForward the result is None.
    Raises ValueError for empty sequences or ids outside the vocabulary.
    """
    config = weights.config
    check_tokens(config, token_ids)
    ends = np.cumsum([len(ids) for ids in token_ids]).tolist()
    rope = rope_tables(tokens=max(map(len, token_ids)), head_dim=config.head_dim, base=config.rope_base)
    run = _Run(weights=weights, bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)), dtype=activation_dtype, engine=engine, observe=observe, rope=rope)
    with torch.no_grad(), _torch_threads(threads), contextlib.suppress(StopForward):
        h_MK = weights["embed_tokens"][torch.tensor([i for ids in token_ids for i in ids], device="cpu")].float()
        for layer in range(config.layers):
            h_MK = h_MK + _attend(run, f"layers.{layer}", h_MK)
            h_MK = h_MK + _mlp(run, f"layers.{layer}", h_MK)
        return linear_fma_ref(run.norm("norm", h_MK), weights.head, engine=engine)
    return None


def _attend(run: _Run, layer: str, h_MK: torch.Tensor) -> torch.Tensor:
    config = run.weights.config
    x_MK = run.norm(f"{layer}.input_layernorm", h_MK)
    q, k, v = (run.linear(f"{layer}.self_attn.{part}_proj", x_MK) for part in "qkv")
    cos_PD, sin_PD = run.rope
    out_MK = torch.empty(h_MK.shape, dtype=torch.float32, device="cpu")
    for start, stop in run.bounds:
        cos_TD, sin_TD = cos_PD[: stop - start], sin_PD[: stop - start]
        q_HTD, k_GTD, v_GTD = (part[start:stop].unflatten(1, (-1, config.head_dim)).transpose(0, 1) for part in (q, k, v))
        q_HTD, k_GTD = apply_rope(q_HTD, cos_TD, sin_TD), apply_rope(k_GTD, cos_TD, sin_TD)
        o_HTD = causal_attention_ref(*(part.to(run.dtype) for part in (q_HTD, k_GTD, v_GTD)))
        out_MK[start:stop] = o_HTD.transpose(0, 1).flatten(1)
    return run.linear(f"{layer}.self_attn.o_proj", out_MK.to(run.dtype))


def _mlp(run: _Run, layer: str, h_MK: torch.Tensor) -> torch.Tensor:
    x_MK = run.norm(f"{layer}.post_attention_layernorm", h_MK)
    gate, up = (run.linear(f"{layer}.mlp.{part}_proj", x_MK) for part in ("gate", "up"))
    return run.linear(f"{layer}.mlp.down_proj", swiglu_ref(gate, up, out_dtype=run.dtype))


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """torch with `threads` threads inside, as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_tokens(config: LlamaConfig, token_ids: Sequence[Sequence[int]]) -> None:
    """Raises ValueError for empty or too long sequences and for ids outside the vocabulary."""
    if not token_ids or not all(len(ids) for ids in token_ids):
        raise ValueError(f"need sequences with at least one token each, got lengths={[len(ids) for ids in token_ids]}; drop empty ones")
    longest, highest, lowest = max(map(len, token_ids)), max(map(max, token_ids)), min(map(min, token_ids))
    if longest > config.context_tokens or highest >= config.vocabulary or lowest < 0:
        raise ValueError(f"ids must be 0 to {config.vocabulary - 1} and sequences at most {config.context_tokens} long, got {lowest=} "
                         f"{highest=} {longest=}; encode with the model's own tokenizer")


def _to_torch(array: np.ndarray) -> torch.Tensor:
    """A writable copy; uint16 are bf16 bit patterns."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
