"""Makes a Hugging Face decoder bitwise reproducible: every module that computes is replaced by an exact one, in place.

    from kernels.exact.exactify import exactify
    model = exactify(LlamaForCausalLM.from_pretrained(...))      # or Qwen2ForCausalLM; on a CPU or a GPU, in fp32, bf16 or fp16
    model(ids, attention_mask=mask).logits; model.generate(ids, attention_mask=mask, do_sample=False)

**What holds.** The logits of a row, and so its greedy continuation, are the same bits for any batch, padding, chunking of the prompt, with or
without cache, on a CPU and on every GPU.
**Dtypes.** The residual stream, and what passes between modules, is the model's dtype, as in transformers. Each module computes in float32
and rounds once to that dtype; the residual addition is one rounded addition; the cache holds the model's dtype. An fp32 model has the
least error; a bf16 model's logits are bf16.
**Padding.** A 2-dimensional attention_mask whose ones are contiguous in each row (left or right padding). Where no position_ids are given, they
count from each row's first real token, as `generate` counts them.
**Refused**, by module path and class, in one ValueError: other architectures, wrappers (LoRA), quantised or changed layers, sliding windows,
scaled RoPE, active dropout, hooks. At run time: other masks and caches, packed sequences, gradients, autocast, `labels` (the loss is
torch's), `output_attentions`. Not covered, because nothing of it is a module: sampling and beam search in `generate` (torch draws and sums).
Weights written through `.data` after the call are not seen where they are packed. transformers is imported inside `exactify` alone.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import nn

from kernels.exact.integer import MAX_K
from kernels.exact.modules import DTYPES, FAMILIES, ExactAttention, ExactLinear, ExactMLP, ExactRMSNorm, ExactRotaryEmbedding, attend

__all__ = ["ExactReport", "Replaced", "Unsupported", "exactify"]

ATTENTION_NAME = "bitbench_exact"  # what transformers calls the mask and the attention that are registered with it
MOST_HEAD_DIM = 256
_ROLES = re.compile(r"(Llama|Qwen2)(ForCausalLM|Model|DecoderLayer|Attention|MLP|RMSNorm|RotaryEmbedding)")
_CONTAINERS = ("ForCausalLM", "Model", "DecoderLayer")
_CHILDREN = {"Attention": {"q_proj", "k_proj", "v_proj", "o_proj"}, "MLP": {"gate_proj", "up_proj", "down_proj", "act_fn"}}
_SILU = ("SiLU", "SiLUActivation")
_CAPTURE = "transformers.utils.output_capturing"  # its hooks read hidden states and change nothing


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A module that is exact now."""

    path: str
    was: str
    now: str


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A module that is not exact, and why."""

    path: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or '(model)'} ({self.kind}): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ExactReport:
    """What `exactify` did; it stays on the model as `model.exact_report`. The model is exact where `unsupported` is empty."""

    family: str
    context_tokens: int
    replaced: tuple[Replaced, ...]
    kept: tuple[str, ...]
    unsupported: tuple[Unsupported, ...]

    @property
    def exact(self) -> bool:
        return not self.unsupported

    def __str__(self) -> str:
        counts = {(r.was, r.now): sum((r.was, r.now) == (o.was, o.now) for o in self.replaced) for r in self.replaced}
        lines = [f"family {self.family}, {self.context_tokens} positions: " + ("exact" if self.exact else "NOT exact")]
        lines += [f"  {count} x {was} -> {now}" for (was, now), count in counts.items()]
        return "\n".join(lines + [f"  left inexact: {item}" for item in self.unsupported])


@overload
def exactify(model: nn.Module, family: str = ..., *, strict: Literal[True] = ..., context_tokens: int | None = ...) -> nn.Module: ...
@overload
def exactify(model: nn.Module, family: str = ..., *, strict: Literal[False], context_tokens: int | None = ...) -> ExactReport: ...
def exactify(model: nn.Module, family: str = "fma", *, strict: bool = True, context_tokens: int | None = None) -> nn.Module | ExactReport:
    """Replaces the modules of a LlamaForCausalLM or Qwen2ForCausalLM in place -> the model, which carries `exact_report`.

    family: "fma", "integer" or "integer-b9" (linear layers; attention and norms are the same in all). context_tokens: positions of the rotary
    tables (default: the config's max_position_embeddings). Freezes all parameters. Its config is replaced by a copy, since another model
    may share it. A second call with the same family changes nothing.

    strict=False replaces what it can, leaves the rest, and returns the report, which names what was left. Raises ValueError, before anything
    is changed, for whatever cannot be made exact (strict), for an unknown family, and for a model that was exactified otherwise.
    """
    if family not in FAMILIES or (context_tokens is not None and context_tokens < 1):
        raise ValueError(f"family is one of {tuple(FAMILIES)} and context_tokens at least 1; got {family=} {context_tokens=}; choose others")
    if (before := getattr(model, "exact_report", None)) is not None:
        if before.family != family or (strict and not before.exact) or context_tokens not in (None, before.context_tokens):
            raise ValueError(f"a model is exactified once; got {family=} {context_tokens=} for one that is: {before}; load it again")
        return model if strict else before
    config = getattr(model, "config", None)
    tokens = context_tokens or getattr(config, "max_position_embeddings", None) or 1
    jobs, kept, unsupported = _survey(model, family)
    if strict and unsupported:
        raise ValueError("every module must be one that has an exact form; got\n  " + "\n  ".join(map(str, unsupported))
                         + "\nremove or merge them, or see what can be replaced with exactify(model, strict=False)")  # fmt: skip
    model.requires_grad_(False)
    replaced = _replace(model, jobs, family, tokens)
    if any(item.now == "ExactAttention" for item in replaced):
        _route_masks(model, config)
    report = ExactReport(family=family, context_tokens=tokens, replaced=replaced, kept=tuple(kept), unsupported=tuple(unsupported))
    model.exact_report = report
    return model if strict else report


# ---- what there is -------------------------------------------------------------------------------------------------------------


def _role(module: nn.Module) -> str | None:
    """"Attention", "MLP", ... of transformers' own Llama or Qwen2 classes; "Linear", "Embedding", "ModuleList"; None for any other class."""
    kind = type(module)
    if match := _ROLES.fullmatch(kind.__name__):
        return match[2] if kind.__module__.startswith(f"transformers.models.{match[1].lower()}.") else None
    return {nn.Linear: "Linear", nn.Embedding: "Embedding", nn.ModuleList: "ModuleList", nn.Identity: "Identity"}.get(kind)


def _survey(model: nn.Module, family: str) -> tuple[list[tuple[str, str]], list[str], list[Unsupported]]:
    """(path and role of what to replace, children before parents; paths of what is exact as it is; what is neither)."""
    jobs, kept, unsupported = [], [], []

    def visit(path: str, module: nn.Module) -> None:
        reasons = list(_reasons(module, family, model))
        unsupported.extend(Unsupported(path=path, kind=type(module).__name__, reason=reason) for reason in reasons)
        role = _role(module)
        if role is None and module is not model:
            return  # nothing is known of how it uses its children
        for name, child in module.named_children():
            if not (role == "MLP" and name == "act_fn"):
                visit(f"{path}.{name}" if path else name, child)
        if role in (None, *_CONTAINERS, "Embedding", "ModuleList", "Identity"):
            kept.append(path)
        elif not reasons:
            jobs.append((path, role))

    visit("", model)
    if _role(model) not in (None, "ForCausalLM"):
        unsupported.append(Unsupported(path="", kind=type(model).__name__, reason="not a whole decoder; pass the ...ForCausalLM"))
    return _paired(model, jobs, unsupported), kept, unsupported


def _paired(model: nn.Module, jobs: list[tuple[str, str]], unsupported: list[Unsupported]) -> list[tuple[str, str]]:
    """Attention and rotary embedding speak to each other: all of them are replaced, or none, and then each is named."""
    pair, ready = ("Attention", "RotaryEmbedding"), {path for path, _ in jobs}
    layers = [path for path, module in model.named_modules() if _role(module) == "DecoderLayer"]
    if all(f"{path}.self_attn" in ready for path in layers) and any(role == "RotaryEmbedding" for _, role in jobs):
        return jobs
    reason = "attention and rotary embedding are replaced together, and one of them cannot be"
    unsupported += [Unsupported(path=path, kind=type(model.get_submodule(path)).__name__, reason=reason) for path, role in jobs if role in pair]
    return [job for job in jobs if job[1] not in pair]


def _reasons(module: nn.Module, family: str, model: nn.Module) -> Iterator[str]:
    """Why this very module, its children aside, cannot be made exact."""
    role = _role(module)
    if role is None:
        yield "unknown module" if module is not model else "unknown architecture; LlamaForCausalLM and Qwen2ForCausalLM are known"
        return
    if "forward" in module.__dict__:
        yield "its forward was replaced"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(getattr(hook, "__module__", None) != _CAPTURE for hook in hooks):
        yield "it has forward hooks"
    own = {name: part for name, part in module._parameters.items() if part is not None}
    if set(own) - (set() if role in (*_CONTAINERS, *_CHILDREN, "ModuleList", "RotaryEmbedding") else {"weight", "bias"}):
        yield f"unknown parameters {sorted(own)}"
    wrong = [f"{name} {part.dtype} on {part.device}" for name, part in own.items() if part.dtype not in DTYPES or part.device.type not in ("cpu", "cuda")]
    if wrong:
        yield f"parameters are bf16, fp16 or fp32 on a CPU or a CUDA device, not {', '.join(wrong)}"
    elif role == "Linear":
        yield from _linear_reasons(module, family)
    if role in _CHILDREN and (extra := {name for name, _ in module.named_children()} - _CHILDREN[role]):
        yield f"unknown children {sorted(extra)}"
    if role == "Embedding" and module.max_norm is not None:
        yield "max_norm rewrites weights as they are read"
    special = {"Attention": _attention_reasons, "MLP": _mlp_reasons, "RotaryEmbedding": _rotary_reasons, "ForCausalLM": _config_reasons}
    if role in special:
        yield from special[role](module)


def _linear_reasons(module: nn.Linear, family: str) -> Iterator[str]:
    if family != "fma":
        if module.in_features > MAX_K:
            yield f"family {family} needs K <= {MAX_K}, not {module.in_features}"
        if not bool(torch.isfinite(module.weight).all()):
            yield f"family {family} needs finite weights"


def _attention_reasons(module: nn.Module) -> Iterator[str]:
    config, dim = module.config, module.head_dim
    if getattr(module, "sliding_window", None) is not None:
        yield f"sliding window of {module.sliding_window}"
    if getattr(module, "attention_dropout", 0.0) and module.training:
        yield f"active dropout of {module.attention_dropout}; call model.eval()"
    if dim % 8 or not 8 <= dim <= MOST_HEAD_DIM:
        yield f"head_dim is a multiple of 8 up to {MOST_HEAD_DIM}, not {dim}"
    if not math.isclose(module.scaling, dim**-0.5, rel_tol=1e-12) or not getattr(config, "is_causal", True) or not getattr(module, "is_causal", True):
        yield f"causal attention with scale head_dim ** -0.5, not scale {module.scaling}, is_causal {getattr(config, 'is_causal', True)}"


def _mlp_reasons(module: nn.Module) -> Iterator[str]:
    if type(module.act_fn).__name__ not in _SILU:
        yield f"activation {type(module.act_fn).__name__}; SiLU is known"


def _rotary_reasons(module: nn.Module) -> Iterator[str]:
    parameters = _rope_parameters(module.config)
    kind = getattr(module, "rope_type", None) or parameters.get("rope_type", "default")
    if kind != "default" or parameters.get("partial_rotary_factor") not in (None, 1, 1.0) or getattr(module, "attention_scaling", 1.0) != 1.0:
        yield f"RoPE of type {kind!r} with {parameters}; the unscaled default over whole heads is known"


def _config_reasons(module: nn.Module) -> Iterator[str]:
    config = module.config
    if getattr(config, "quantization_config", None) is not None or getattr(module, "hf_quantizer", None) is not None:
        yield "quantised model"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        yield f"layer types {sorted(set(config.layer_types))}; full_attention is known"


def _rope_parameters(config: Any) -> dict:
    return dict(getattr(config, "rope_parameters", None) or {})


# ---- replacing -----------------------------------------------------------------------------------------------------------------


def _replace(model: nn.Module, jobs: list[tuple[str, str]], family: str, tokens: int) -> tuple[Replaced, ...]:
    replaced = []
    for path, role in jobs:
        parent_path, _, name = path.rpartition(".")
        parent, old = model.get_submodule(parent_path), model.get_submodule(path)
        new = _exact(old, role, family, tokens).train(old.training)
        parent._modules[name] = new
        replaced.append(Replaced(path=path, was=type(old).__name__, now=type(new).__name__))
    return tuple(replaced)


def _exact(old: nn.Module, role: str, family: str, tokens: int) -> nn.Module:
    """The exact form of one module; its children are exact already, where they can be."""
    if role == "Linear":
        return ExactLinear(old.weight, old.bias, family)
    if role == "RMSNorm":
        return ExactRMSNorm(old.weight, old.variance_epsilon)
    if role == "MLP":
        return ExactMLP(gate_proj=old.gate_proj, up_proj=old.up_proj, down_proj=old.down_proj)
    if role == "RotaryEmbedding":
        config = old.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ExactRotaryEmbedding(head_dim=dim, base=float(_rope_parameters(config)["rope_theta"]), tokens=tokens, device=old.inv_freq.device)
    assert role == "Attention", f"no exact form of {role}"
    dropout = float(getattr(old, "attention_dropout", 0.0) or 0.0)
    return ExactAttention(projections=dict(old.named_children()), head_dim=old.head_dim, layer_idx=old.layer_idx, dropout=dropout)


def _route_masks(model: nn.Module, config: Any) -> None:
    """transformers then hands bounds_B2 to every layer as its mask; positions are counted and requests checked before each call."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionMaskInterface.register(ATTENTION_NAME, bounds_of_mask)
    AttentionInterface.register(ATTENTION_NAME, exact_attention)
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    for module in model.modules():
        if _role(module) == "ForCausalLM":
            module.register_forward_pre_hook(_check_request, with_kwargs=True)
        elif _role(module) == "Model":
            module.register_forward_pre_hook(_count_positions, with_kwargs=True)


# ---- what transformers calls ---------------------------------------------------------------------------------------------------


def bounds_of_mask(*, attention_mask: torch.Tensor | None = None, mask_function: Any = None, kv_length: int, **_: Any) -> torch.Tensor | None:
    """A 2-dimensional mask of S = kv_length positions -> int32 [B, 2], first real position and the one behind the last; None where all are real.

    Raises ValueError for a mask with holes, of another length, or over packed sequences. Waits for the device.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function not in (None, causal_mask_function):
        raise ValueError(f"exact attention is causal over one sequence a row; got {mask_function=}; do not pack sequences, pass no overlays")
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length:
        raise ValueError(f"attention_mask is [B, {kv_length}], past and new tokens; got {tuple(attention_mask.shape)=}; pass the whole mask")
    real_BS = attention_mask.bool().cpu()
    held_B = real_BS.sum(1)
    first_B = real_BS.int().argmax(1) if kv_length else held_B
    index_S = torch.arange(kv_length)
    whole = (index_S >= first_B[:, None]) & (index_S < (first_B + held_B)[:, None])
    if not torch.equal(whole, real_BS):
        rows = (whole != real_BS).any(1).nonzero().flatten().tolist()
        raise ValueError(f"the ones of a row are contiguous (left or right padding); got holes in rows {rows}; move the padding to one side")
    if bool(real_BS.all()):
        return None
    return torch.stack([first_B, first_B + held_B], dim=1).to(attention_mask.device, torch.int32)


def exact_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`attend` behind transformers' attention interface, for modules that were left as they are. query [B, H, T, D] -> [B, T, H, D]."""
    if dropout or sliding_window or (scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5, rel_tol=1e-12)):
        raise ValueError(f"exact attention has no dropout, window or scale of its own; got {dropout=} {sliding_window=} {scaling=}; set another attention")
    return attend(query.transpose(1, 2), key, value, attention_mask), None


def _check_request(module: nn.Module, args: tuple, kwargs: dict) -> None:
    if kwargs.get("labels") is not None:
        raise ValueError("the loss of transformers is not exact; got labels; take the logits and kernels.exact.softmax.cross_entropy")
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError("exact attention keeps no weights; got output_attentions; leave it out")


def _count_positions(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """position_ids from the mask where there are none."""
    named = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)) | kwargs
    mask_BS, ids = named.get("attention_mask"), named.get("input_ids")
    ids = named.get("inputs_embeds") if ids is None else ids
    if named.get("position_ids") is not None or ids is None or not isinstance(mask_BS, torch.Tensor) or mask_BS.ndim != 2 or len(args) > 2:
        return None
    position_BS = (mask_BS.long().cumsum(1) - 1).clamp(min=0)
    return args, {**kwargs, "position_ids": position_BS[:, position_BS.shape[1] - ids.shape[1] :].to(ids.device)}
