"""SmolLM2-135M-Instruct: weights by their transformers names, as fp32 or rounded to bf16, and the tokenizer.

    from suite.assets import load_fp32, load_bf16, load_tokenizer
    weights = load_bf16().tensors["model.layers.0.mlp.up_proj.weight"]      # (1536, 576), uint16: bf16 bit patterns

`load_fp32` gives what transformers' `from_pretrained(gguf_file=...)` gives, bit for bit. `load_bf16` rounds every matrix (embedding
included, tied to the head) to bf16, nearest even, and keeps the norms in fp32; the converted file is cached, has a pinned sha256 and
carries the tokenizer, so a host without network needs that one file. The rounding is a decision of the studies, not of the authors:
outputs differ from the fp32 model's. Source: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suite.assets._safetensors import read_safetensors, write_safetensors
from suite.assets._sources import AssetError
from suite.assets.bpe import ByteBpe
from suite.assets.gguf import GgufFile, read_gguf

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """`tensors`: matrices as uint16 bf16 bit patterns (or fp32 from `load_fp32`), norms as fp32. `metadata`: the GGUF's, as Python values."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, Any]


def load_fp32(*, cache_dir: str | os.PathLike[str] | None = None) -> StoredModel:
    """All tensors dequantised to fp32 (540 MB, computed in about a second, not cached). Raises AssetError."""
    from suite.assets._catalogue import fetch

    source = read_gguf(fetch("smollm2-135m-instruct", cache_dir=cache_dir))
    return StoredModel(tensors={_hf_name(name): _tensor(source, name) for name in source.tensors}, metadata=source.metadata)


def load_bf16(*, cache_dir: str | os.PathLike[str] | None = None) -> StoredModel:
    """Matrices as bf16 bit patterns (uint16), norms fp32, read-only; converted at the first call. Raises AssetError."""
    from suite.assets._catalogue import fetch

    tensors, metadata = read_safetensors(fetch("smollm2-135m-instruct-bf16", cache_dir=cache_dir))
    return StoredModel(tensors=tensors, metadata=json.loads(metadata["gguf"]))


def load_tokenizer(*, cache_dir: str | os.PathLike[str] | None = None) -> ByteBpe:
    """The model's tokenizer. Raises AssetError."""
    return ByteBpe.from_gguf(load_bf16(cache_dir=cache_dir).metadata)


def convert(target: Path, *, cache_dir: str | os.PathLike[str] | None = None) -> None:
    """Writes the bf16 file of `load_bf16`: same bytes on every machine. Raises AssetError."""
    model = load_fp32(cache_dir=cache_dir)
    matrices = {name for name, tensor in model.tensors.items() if tensor.ndim == 2}
    rounded = {name: to_bf16_bits(tensor) if name in matrices else tensor for name, tensor in model.tensors.items()}
    write_safetensors(target, rounded, metadata={"gguf": json.dumps(model.metadata, sort_keys=True)}, bf16=matrices)


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bit patterns (uint16), round to nearest even. Raises ValueError for a value that is not finite."""
    if not np.isfinite(values).all():
        raise ValueError(f"weights are finite, got {np.count_nonzero(~np.isfinite(values))} that are not; fetch the file again")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def chat_text(question: str) -> str:
    """The model's chat template for one user turn with its default system line, ready for `encode`."""
    return (f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def _hf_name(name: str) -> str:
    """GGUF name to transformers name. Raises AssetError for a tensor that is no part of a Llama model."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    stem = part.removesuffix(".weight")
    if head != "blk" or not layer.isdigit() or stem not in _LAYER_NAMES:
        raise AssetError(f"gguf: {name!r} is no tensor of a Llama model with a tied head; use the pinned SmolLM2 file")
    return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.weight"


def _tensor(source: GgufFile, name: str) -> np.ndarray:
    """One tensor in fp32; rows of q and k come back from llama.cpp's interleaved RoPE order to the half-split order."""
    tensor = source.tensor(name)
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    count = source.metadata[heads]
    return np.ascontiguousarray(tensor.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2)).reshape(rows, columns)
