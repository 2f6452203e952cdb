"""Exact layers as `nn.Module`s: a linear that replaces `nn.Linear`, and the parts of a Llama-like decoder block.

    >>> import torch
    >>> from kernels.exact.modules import ExactLinear
    >>> layer = ExactLinear(torch.ones(8, 64, dtype=torch.bfloat16), torch.zeros(8))
    >>> layer(torch.ones(2, 3, 64)).shape, layer(torch.ones(64)).tolist()[:2]
    (torch.Size([2, 3, 8]), [64.0, 64.0])

Legend: M tokens, N outputs, K inputs, B rows, T new tokens of a row, S keys of a row, H query heads, G key heads, D head_dim, P positions.
On a CPU a module runs the oracle, on a GPU the kernel: the same bits. Each module computes in the order of its operator and rounds once, to
its input's dtype. Inference only: gradients and autocast are refused. torch.compile breaks its graph at each module and runs it as it is.
A module serves one CUDA stream at a time, as a packed weight does. `exactify` puts these into a model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from kernels.exact.activations import swiglu, swiglu_ref
from kernels.exact.attention import append, attention, attention_ref, make_cache
from kernels.exact.decode import PackedWeight, pack_weight
from kernels.exact.integer import linear_integer, linear_integer_ref, prepare_integer
from kernels.exact.linear import linear_fma, linear_fma_ref
from kernels.exact.norm import rmsnorm, rmsnorm_ref
from kernels.exact.rope import rope, rope_ref, rope_tables

__all__ = ["DTYPES", "ExactAttention", "ExactLinear", "ExactMLP", "ExactRMSNorm", "ExactRotaryEmbedding", "FAMILIES", "attend"]

FAMILIES = {"fma": None, "integer": "b6", "integer-b9": "b9"}  # name -> digit products of the integer family
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_as_written = torch.compiler.disable(reason="a compiler that fuses or traces an exact operator changes its roundings")


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter without gradient; the very object where it is one already, so that tied weights stay tied."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _check_input(module: nn.Module, x: torch.Tensor) -> None:
    """Raises ValueError where `module` could not give its exact bits for x, or would have to give a gradient."""
    name = type(module).__name__
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters(recurse=False))):
        raise ValueError(f"{name} is for inference and has no gradient; got an input or a parameter with requires_grad; use torch.no_grad()")
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name} fixes every rounding itself; got autocast around it; leave it out")
    if x.dtype not in DTYPES or x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} takes bf16, fp16 or fp32 on a CPU or a CUDA device; got {x.dtype=} {x.device=}; cast or move it")


class ExactLinear(nn.Module):
    """y = x W^T + b for x [..., K] -> [..., N]: `nn.Linear` in family "fma", "integer" (b6) or "integer-b9".

    The sum is float32 in the family's order, the bias one float32 addition, then one rounding to `out_dtype` (default: the input's dtype).
    weight [N, K] and bias [N] in bf16, fp16 or fp32. Memory: "fma" keeps the weight once, as it is on a CPU and packed on a GPU, where
    `weight` is None and `plain_weight()` unpacks a copy (so a tied embedding is a second copy there). The integer families keep their digits
    (and on a GPU the code of a bf16 weight) beside the plain weight, from which they cannot be told back: 3 to 5 bytes a weight more.
    `state_dict` holds the plain weight always, and what it loads is packed anew. Raises ValueError for an unknown family, other dtypes or
    shapes, K > 43,690 and non-finite weights in the integer families.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, family: str = "fma", *, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if family not in FAMILIES:
            raise ValueError(f"family is one of {tuple(FAMILIES)}; got {family=}; name one of them")
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(f"need weight [N, K] and bias [N]; got {tuple(weight.shape)=} {None if bias is None else tuple(bias.shape)}; reshape them")
        if any(part is not None and part.dtype not in DTYPES for part in (weight, bias)) or out_dtype not in (None, *DTYPES):
            raise ValueError(f"weight, bias and output are bf16, fp16 or fp32; got {weight.dtype=} {getattr(bias, 'dtype', None)} {out_dtype=}; cast them")
        self.out_features, self.in_features = weight.shape
        self.family, self.out_dtype = family, out_dtype
        self.weight = _frozen(weight)
        self.bias = None if bias is None else _frozen(bias)
        self._packed, self._packed_from = None, None
        self._prepare()

    @_as_written
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_input(self, x)
        handle = self._prepare()
        device = (handle.data if isinstance(handle, PackedWeight) else self.weight).device
        if x.ndim < 1 or x.shape[-1] != self.in_features or x.device != device:
            raise ValueError(f"x is [..., {self.in_features}] on {device}; got {tuple(x.shape)=} {x.device=}; reshape or move it")
        x_MK = x.detach().reshape(math.prod(x.shape[:-1]), self.in_features).contiguous()
        if self.family == "fma":
            y_MN = linear_fma(x_MK, handle) if x.is_cuda else linear_fma_ref(x_MK, handle)
        else:
            y_MN = (linear_integer if x.is_cuda else linear_integer_ref)(x_MK, handle)
        if self.bias is not None:
            y_MN = y_MN + self.bias.float()
        return y_MN.to(self.out_dtype or x.dtype).view(*x.shape[:-1], self.out_features)

    def plain_weight(self) -> torch.Tensor:
        """w_NK as it was given, on the module's device."""
        if self.weight is not None:
            return self.weight.detach()
        spans, groups, n, eight = self._packed.data.shape
        w_NSL = self._packed.data.permute(2, 0, 1, 3).reshape(n, spans, groups * eight)
        return w_NSL[:, :, : self.in_features // spans].reshape(n, self.in_features)

    def extra_repr(self) -> str:
        dtype = self._packed.dtype if self.weight is None else self.weight.dtype
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, family={self.family!r}, {dtype}"

    def _prepare(self) -> Any:
        """What the family's linear reads. Packs where the weight is new: just given, moved, loaded, tied again or written in place."""
        weight = self.weight
        if weight is None:
            return self._packed
        if weight.is_meta or self.family == "fma":
            if not weight.is_cuda:
                return weight.detach()
            self._packed, self.weight = pack_weight(weight.detach()), None
            return self._packed
        version = 0 if weight.is_inference() else weight._version
        stamp = (weight, weight.data_ptr(), weight.dtype, weight.device, version)
        if self._packed_from is None or self._packed_from[0] is not weight or self._packed_from[1:] != stamp[1:]:
            self._packed, self._packed_from = prepare_integer(weight.detach(), products=FAMILIES[self.family]), stamp
        return self._packed

    def _unpack(self) -> None:
        self.weight = self.weight if self.weight is not None else _frozen(self.plain_weight())
        self._packed, self._packed_from = None, None

    def _apply(self, fn: Any, recurse: bool = True) -> ExactLinear:
        self._unpack()
        super()._apply(fn, recurse)
        self._prepare()
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is None:
            destination[prefix + "weight"] = self.plain_weight()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._unpack()
        super()._load_from_state_dict(*args, **kwargs)
        self._prepare()


class ExactRMSNorm(nn.Module):
    """RMSNorm over the last axis with weight [K], rounded once to the input's dtype (transformers rounds before the weight, too)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = _frozen(weight), eps

    @_as_written
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_input(self, x)
        x_MK = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return (rmsnorm if x.is_cuda else rmsnorm_ref)(x_MK, self.weight, eps=self.variance_epsilon).view(x.shape)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class ExactRotaryEmbedding(nn.Module):
    """Holds the fp32 tables of `rope_tables` for P = `tokens` positions; no sine or cosine at run time.

    Called as transformers calls its own, it gives (cos_PD, sin_PD, position_BT), which `ExactAttention` takes as `position_embeddings`. The
    tables stay fp32 whatever dtype the module is cast to.
    """

    def __init__(self, *, head_dim: int, base: float, tokens: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.head_dim, self.base, self.tokens = head_dim, base, tokens
        self._place(torch.device(device))

    def _place(self, device: torch.device) -> None:
        """Buffers from the cached tables: a cast back to fp32 would not restore their bits."""
        cos_PD, sin_PD = rope_tables(tokens=self.tokens, head_dim=self.head_dim, base=self.base)
        self.register_buffer("cos_PD", cos_PD.to(device), persistent=False)
        self.register_buffer("sin_PD", sin_PD.to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> ExactRotaryEmbedding:
        self._place(fn(torch.empty(0, device=self.cos_PD.device)).device)
        return self

    @_as_written
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, x.shape[0]) or position_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"position_ids is int [1, T] or [B, T]; got {tuple(position_ids.shape)=} {position_ids.dtype=} for B = {x.shape[0]}; reshape it")
        return self.cos_PD, self.sin_PD, position_ids.expand(x.shape[0], -1)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}, tokens={self.tokens}"


def _rolled(x_BTXD: torch.Tensor, shift_B: torch.Tensor) -> torch.Tensor:
    """Row b starts at its element shift_B[b]; what was before it follows at the end."""
    tokens = x_BTXD.shape[1]
    index_BT = (torch.arange(tokens, device=x_BTXD.device) + shift_B[:, None]) % tokens
    return x_BTXD[torch.arange(x_BTXD.shape[0], device=x_BTXD.device)[:, None], index_BT]


def attend(q_BTHD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, bounds_B2: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of the last T of S positions over all keys of a sequence -> o_BTHD in q's dtype.

    bounds_B2: int32, row b's tokens are the positions bounds[b, 0] to bounds[b, 1] - 1 (None: all); its blocks of keys count from the first
    of them, so padding cannot change bits, and padded positions give zeros. Keys and values are copied into the kernels' layout at each call.
    """
    (batch, tokens, _, dim), keys = q_BTHD.shape, k_BGSD.shape[2]
    if tokens > keys or k_BGSD.shape != v_BGSD.shape or (bounds_B2 is not None and (bounds_B2.shape != (batch, 2) or bounds_B2.dtype != torch.int32)):
        raise ValueError(f"need T <= S, k and v alike, bounds int32 [B, 2]; got {tuple(q_BTHD.shape)=} {tuple(k_BGSD.shape)=} {tuple(v_BGSD.shape)=} "
                         f"{None if bounds_B2 is None else (tuple(bounds_B2.shape), bounds_B2.dtype)}; pass whole sequences")
    if q_BTHD.numel() == 0:
        return torch.zeros_like(q_BTHD)
    past, device = keys - tokens, q_BTHD.device
    k_BSGD, v_BSGD = k_BGSD.detach().transpose(1, 2), v_BGSD.detach().transpose(1, 2)
    if bounds_B2 is None:
        start_B, count_B, held_B = (torch.full((batch,), value, dtype=torch.int32, device=device) for value in (past, tokens, keys))
    else:
        first_B, end_B = bounds_B2.to(device).unbind(1)
        start_B, held_B = (past - first_B).clamp(min=0), end_B - first_B
        count_B, padded_B = (end_B - first_B.clamp(min=past)).clamp(min=0), (first_B - past).clamp(min=0)
        q_BTHD, k_BSGD, v_BSGD = _rolled(q_BTHD, padded_B), _rolled(k_BSGD, first_B), _rolled(v_BSGD, first_B)
    cache = make_cache(batch=batch, tokens=keys, kv_heads=k_BGSD.shape[1], head_dim=dim, dtype=k_BGSD.dtype, device=device)
    append(cache, k_BSGD, v_BSGD, torch.zeros_like(start_B), held_B)
    o_BTHD = (attention if q_BTHD.is_cuda else attention_ref)(q_BTHD.detach(), cache, start_B, count_B, out_dtype=q_BTHD.dtype)
    return o_BTHD if bounds_B2 is None else _rolled(o_BTHD, -padded_B)  # the rows behind count_B are zeros: they become the padding's


class ExactAttention(nn.Module):
    """A decoder's self-attention: projections, exact RoPE, the caller's cache, `attend`, output projection.

    Called as transformers calls its own; `position_embeddings` comes from `ExactRotaryEmbedding`, `attention_mask` is None or bounds_B2.
    cache (or past_key_values): a DynamicCache, which gives back all keys of the sequence. Raises ValueError for any other mask or cache,
    for a sequence longer than the tables and for active dropout.
    """

    def __init__(self, *, projections: dict[str, nn.Module], head_dim: int, layer_idx: int, dropout: float = 0.0) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, projections[name])
        self.head_dim, self.layer_idx, self.attention_dropout, self.is_causal = head_dim, layer_idx, dropout, True

    @_as_written
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None = None,
        cache: Any = None, past_key_values: Any = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        _check_input(self, hidden_states)
        if self.training and self.attention_dropout:
            raise ValueError(f"attention dropout is random; got dropout {self.attention_dropout} in training mode; call model.eval()")
        if len(position_embeddings) != 3:
            raise ValueError(f"exact attention reads the tables of ExactRotaryEmbedding; got {len(position_embeddings)} tensors; replace the rotary embedding")
        if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.dtype != torch.int32):
            raise ValueError(f"exact attention skips padding and adds no mask; got one of {tuple(attention_mask.shape)} {attention_mask.dtype}; "
                             "pass a 2-dimensional attention_mask of zeros and ones to the model")  # fmt: skip
        cos_PD, sin_PD, position_BT = position_embeddings
        q_BTHD, k_BTGD, v_BTGD = (project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        turn = rope if hidden_states.is_cuda else rope_ref
        q_BTHD, k_BTGD = (turn(part, position_BT, cos_PD, sin_PD) for part in (q_BTHD, k_BTGD))
        k_BGSD, v_BGSD = k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            k_BGSD, v_BGSD = self._extend(cache, k_BGSD, v_BGSD)
        if k_BGSD.shape[2] > cos_PD.shape[0]:
            raise ValueError(f"the rotary tables end at {cos_PD.shape[0]} positions; got {k_BGSD.shape[2]} keys; exactify with a larger context_tokens")
        return self.o_proj(attend(q_BTHD, k_BGSD, v_BGSD, attention_mask).flatten(2)), None

    def _extend(self, cache: Any, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of the sequence. A cache whose layers drop, quantise or preallocate keys is refused."""
        layers = getattr(cache, "layers", None)
        kinds = {type(cache).__name__} if layers is None else {type(layer).__name__ for layer in layers}
        made = k_BGTD, v_BGTD
        if layers is not None and kinds <= {"DynamicLayer"}:
            made = cache.update(k_BGTD, v_BGTD, self.layer_idx)
            kinds = {type(cache.layers[self.layer_idx]).__name__}
        if kinds != {"DynamicLayer"}:
            raise ValueError(f"exact attention reads every key of a sequence as it was; got a cache of {sorted(kinds)}; use DynamicCache")
        return made


class ExactMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the SwiGLU is float32 inside and rounds once."""

    def __init__(self, *, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    @_as_written
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_input(self, x)
        return self.down_proj((swiglu if x.is_cuda else swiglu_ref)(self.gate_proj(x), self.up_proj(x)))
