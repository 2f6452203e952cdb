"""What stands between the linears of a decoder, in three kinds: exact (kernels.exact), plain torch, and exact but for torch's attention.

    ops = operators("exact", torch.device("cpu"))
    h_MK, x_MK = ops.add_norm(h_MK, delta_MK, w_K, eps, torch.bfloat16)
    ops.append(cache, k_BTGD, v_BTGD, span)
    o_BTHD = ops.attention(q_BTHD, cache, span, torch.bfloat16)

Legend: M tokens of all rows, K features, B rows, T new tokens of a row, H query heads, G key heads, D head_dim, P positions of a cache.
"exact" runs an oracle on a CPU and its kernel on a GPU, with equal bits. "torch" is what a user of transformers runs, and so of LayerCast,
whose patch replaces linears only, of plain fp32 and of plain bf16: norms in fp32 rounded to the activations' dtype, cos and sin in that
dtype, made once a pass like the mask, `scaled_dot_product_attention` (SDPA) over the cache. "serving" is the leanest bf16 decoder that
can be made of these parts: exact's fused norms, rope and SwiGLU, and SDPA, which reads queries and writes outputs where they lie. Both
append to SDPA's cache by one kernel, as "exact" does to its own, so that no baseline pays for launches that its users could spare. No
operator waits for the GPU when T = 1, so that a step can be captured in a CUDA graph. On a GPU, exact norms and SwiGLU can slice their own
results for the linears of the integer family (`kernels.exact.sliced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.exact.slices import Sliced


@dataclass(frozen=True, kw_only=True)
class Span:
    """The new tokens of one pass: token t < count_B[b] of row b has position start_B[b] + t.

    Known without asking the device: `extent`, at least the keys that any row sees, bounds the work; `even`, true where all rows have the same
    start and T tokens each, and see `extent` keys in the end, spares plain attention its mask.
    """

    start_B: torch.Tensor
    count_B: torch.Tensor
    position_BT: torch.Tensor
    extent: int
    even: bool


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The functions of one kind on one device. `add_norm` takes delta None for "nothing to add"; the last argument is the result's dtype,
    of a `Sliced` result the one that it is rounded to before."""

    make_cache: Callable[..., Any]
    append: Callable[[Any, torch.Tensor, torch.Tensor, Span], None]
    attention: Callable[[torch.Tensor, Any, Span, torch.dtype], torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor | Sliced]]
    rope: Callable[..., torch.Tensor]
    swiglu: Callable[[torch.Tensor, torch.dtype], torch.Tensor | Sliced]


def operators(kind: str, device: torch.device, *, sliced_norm: bool = False, sliced_swiglu: bool = False) -> Operators:
    """kind: "exact", "torch" or "serving". `sliced_norm`, `sliced_swiglu`: what the linears read next is a `Sliced`.

    Raises ValueError for another kind, and where slicing is asked of any but the exact kind on a GPU.
    """
    if (sliced_norm or sliced_swiglu) and (kind != "exact" or device.type != "cuda"):
        raise ValueError(f"exact operators on a GPU slice their results, others do not, got {kind=} {device=}; leave it out")
    if kind == "torch":
        return _TORCH
    if kind not in ("exact", "serving"):
        raise ValueError(f"operators are exact, torch or serving, got {kind=}; name one of them")
    exact = _exact(gpu=device.type == "cuda", sliced_norm=sliced_norm, sliced_swiglu=sliced_swiglu)
    if kind == "exact":
        return exact
    return Operators(make_cache=_make_cache, append=_append, attention=_attention, add_norm=exact.add_norm, rope=exact.rope, swiglu=exact.swiglu)


# ---- exact ---------------------------------------------------------------------------------------------------------------------


def _exact(*, gpu: bool, sliced_norm: bool, sliced_swiglu: bool) -> Operators:
    from kernels.exact import activations, attention, norm, rope, sliced

    rotate, gate = (rope.rope, activations.swiglu) if gpu else (rope.rope_ref, activations.swiglu_ref)
    normalise, add_and_normalise = (norm.rmsnorm, norm.add_rmsnorm) if gpu else (norm.rmsnorm_ref, norm.add_rmsnorm_ref)
    normalise, add_and_normalise = (sliced.rmsnorm_sliced, sliced.add_rmsnorm_sliced) if sliced_norm else (normalise, add_and_normalise)
    gate = sliced.swiglu_sliced if sliced_swiglu else gate

    def attend(q_BTHD: torch.Tensor, cache: Any, span: Span, dtype: torch.dtype) -> torch.Tensor:
        if gpu:
            return attention.attention(q_BTHD, cache, span.start_B, span.count_B, out_dtype=dtype, max_tokens=span.extent)
        return attention.attention_ref(q_BTHD, cache, span.start_B, span.count_B, out_dtype=dtype)

    def add_norm(h_MK: torch.Tensor, delta_MK: torch.Tensor | None, w_K: torch.Tensor, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | Sliced]:
        if delta_MK is None:
            return h_MK, normalise(h_MK, w_K, eps=eps, out_dtype=dtype)
        return add_and_normalise(h_MK, delta_MK, w_K, eps=eps, out_dtype=dtype)

    def swiglu(gate_up_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | Sliced:
        return gate(*gate_up_MN.chunk(2, dim=1), out_dtype=dtype)

    return Operators(
        make_cache=attention.make_cache,
        append=lambda cache, k_BTGD, v_BTGD, span: attention.append(cache, k_BTGD, v_BTGD, span.start_B, span.count_B),
        attention=attend,
        add_norm=add_norm,
        rope=rotate,
        swiglu=swiglu,
    )


# ---- plain torch ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TorchCache:
    """Keys and values as SDPA reads them."""

    k_BGPD: torch.Tensor
    v_BGPD: torch.Tensor


def _make_cache(*, batch: int, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> TorchCache:
    shape = (batch, kv_heads, tokens, head_dim)
    return TorchCache(k_BGPD=torch.zeros(shape, dtype=dtype, device=device), v_BGPD=torch.zeros(shape, dtype=dtype, device=device))


@triton.jit(do_not_specialize=["T", "P"])
def append_rows_kernel(
    k_ptr, v_ptr, to_k_ptr, to_v_ptr, start_ptr, count_ptr, T, P, K_B, K_T, K_G, V_B, V_T, V_G, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one token of one row of k and v, to [B, G, P, D]; a token beyond its row's count or the cache is not written."""
    b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    position = tl.load(start_ptr + b) + t
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, d = i // D, i % D
    keep = (i < G * D) & (t < tl.load(count_ptr + b)) & (position >= 0) & (position < P)
    k = tl.load(k_ptr + b * K_B + t * K_T + g * K_G + d, mask=keep, other=0.0)
    v = tl.load(v_ptr + b * V_B + t * V_T + g * V_G + d, mask=keep, other=0.0)
    to = ((b * G + g) * P + position) * D + d
    tl.store(to_k_ptr + to, k.to(to_k_ptr.dtype.element_ty), mask=keep)
    tl.store(to_v_ptr + to, v.to(to_v_ptr.dtype.element_ty), mask=keep)


def _append(cache: TorchCache, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, span: Span) -> None:
    batch, tokens, groups, dim = k_BTGD.shape
    if not cache.k_BGPD.is_cuda:
        rows, places = (torch.arange(tokens) < span.count_B[:, None]).nonzero(as_tuple=True)
        where = span.position_BT[rows, places].long()
        cache.k_BGPD[rows, :, where] = k_BTGD[rows, places].to(cache.k_BGPD.dtype)
        cache.v_BGPD[rows, :, where] = v_BTGD[rows, places].to(cache.v_BGPD.dtype)
        return
    if k_BTGD.stride(3) != 1 or v_BTGD.stride(3) != 1:
        raise ValueError(f"the elements of a head lie side by side; got {k_BTGD.stride()=} {v_BTGD.stride()=}; make k and v contiguous")
    if not k_BTGD.numel():
        return
    block = min(1024, triton.next_power_of_2(groups * dim))
    with torch.cuda.device_of(k_BTGD):
        append_rows_kernel[(batch * tokens, triton.cdiv(groups * dim, block))](
            k_BTGD, v_BTGD, cache.k_BGPD, cache.v_BGPD, span.start_B, span.count_B, tokens, cache.k_BGPD.shape[2], *k_BTGD.stride()[:3], *v_BTGD.stride()[:3],
            G=groups, D=dim, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _once(position_BT: torch.Tensor, name: tuple, make: Callable[[], Any]) -> Any:
    """What transformers computes once a pass and hands to every layer: kept on the pass's own tensor of positions, gone with it."""
    kept = position_BT.__dict__.setdefault("_once", {})
    if name not in kept:
        kept[name] = make()
    return kept[name]


def _attention(q_BTHD: torch.Tensor, cache: TorchCache, span: Span, dtype: torch.dtype) -> torch.Tensor:
    tokens, heads = q_BTHD.shape[1:3]
    k, v = cache.k_BGPD[:, :, : span.extent], cache.v_BGPD[:, :, : span.extent]
    grouped = heads != k.shape[1]
    q = q_BTHD.transpose(1, 2).to(k.dtype)
    if span.even and tokens in (1, span.extent):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=grouped)
    else:
        mask_B1TK = _once(span.position_BT, ("mask", span.extent), lambda: torch.arange(span.extent, device=q.device) <= span.position_BT[:, None, :, None])
        if grouped:  # as transformers does where there is a mask: the fused kernels that take one know no groups
            k, v = (part.repeat_interleave(heads // k.shape[1], dim=1) for part in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TK)
    return o.transpose(1, 2).to(dtype)


def _add_norm(h_MK: torch.Tensor, delta_MK: torch.Tensor | None, w_K: torch.Tensor, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    h_MK = h_MK if delta_MK is None else h_MK + delta_MK
    x = h_MK.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return h_MK, w_K.to(dtype) * x.to(dtype)


def _rope(
    x_BTHD: torch.Tensor, position_BT: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    cos, sin = _once(position_BT, ("rotation", x_BTHD.dtype), lambda: [table[position_BT][:, :, None].to(x_BTHD.dtype) for table in (cos_PD, sin_PD)])
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(out_dtype or x_BTHD.dtype)


def _swiglu(gate_up_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    gate, up = gate_up_MN.chunk(2, dim=1)
    return (F.silu(gate) * up).to(dtype)


_TORCH = Operators(make_cache=_make_cache, append=_append, attention=_attention, add_norm=_add_norm, rope=_rope, swiglu=_swiglu)
