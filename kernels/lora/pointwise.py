"""What stands between the products of a frozen decoder, forward and backward, one launch each: residual and RMSNorm, RoPE, SwiGLU.

    h_MK, x_MK = add_norm(h_MK, delta_MK, w_K, eps=1e-6)      # h + delta, and its norm; on the CPU add_norm_ref
    q_MN, k_MN = turn(q_MN, k_MN, cos_TD, sin_TD)             # row m is position m % T of its sequence
    y_MF = swiglu(gate_MF, up_MF)

Legend: M rows, K and F columns, T positions, H query heads, G key heads, D = head_dim / 2 frequencies (Zhang and Sennrich 2019; Su et al. 2021, half-split
order; Shazeer 2020). Weights are frozen: w has no gradient. Backwards, with r = 1 / rms(h) and g = dx w:

    dh += r (g - h r^2 mean(g h));   dq is turned back;   dgate = dy up sig(gate) (1 + gate (1 - sig(gate))),  dup = dy silu(gate)

Operands bf16, fp16 or fp32, contiguous; arithmetic float32, one rounding an output. A row's bits depend on the row alone: one program sums a row, in
one tree, and there are no atomics. Without these a decoder spends more launches on its norms than on its products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu

__all__ = ["add_norm", "add_norm_ref", "swiglu", "swiglu_ref", "turn", "turn_ref"]

_BLOCK = 1024  # elements of a program that looks at no row


def _check(op: str, *tensors: torch.Tensor) -> None:
    if len({(t.dtype, t.shape[0]) for t in tensors}) > 1 or any(t.ndim != 2 or not t.is_contiguous() for t in tensors):
        raise ValueError(f"{op} takes contiguous matrices of one type with as many rows, got {[(tuple(t.shape), t.dtype, t.is_contiguous()) for t in tensors]}; convert them")


# ---- references, differentiable -------------------------------------------------------------------------------------------------


def add_norm_ref(h_MK: torch.Tensor, delta_MK: torch.Tensor | None, w_K: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta in h's type, RMSNorm of that): in float32, or float64 where h is."""
    h = h_MK if delta_MK is None else h_MK + delta_MK
    wide = h if h.dtype == torch.float64 else h.float()
    return h, (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * w_K).to(h.dtype)


def turn_ref(q_MN: torch.Tensor, k_MN: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check("turn", q_MN, k_MN)
    tokens, half = cos_TD.shape

    def one(x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        low, high = wide.view(-1, tokens, x.shape[1] // (2 * half), 2 * half).chunk(2, dim=3)
        cos, sin = cos_TD[:, None], sin_TD[:, None]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=3).reshape(x.shape).to(x.dtype)

    return one(q_MN), one(k_MN)


def swiglu_ref(gate_MF: torch.Tensor, up_MF: torch.Tensor) -> torch.Tensor:
    gate, up = (x if x.dtype == torch.float64 else x.float() for x in (gate_MF, up_MF))
    return (torch.nn.functional.silu(gate) * up).to(gate_MF.dtype)


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def norm_kernel(h_ptr, delta_ptr, w_ptr, sum_ptr, x_ptr, r_ptr, K, eps, BLOCK: tl.constexpr):
    """Row program_id(0): sum = h + delta (where there is one), x = its norm, r = 1 / rms."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < K
    h = tl.load(h_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        h = (h + tl.load(delta_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * K + k, h, mask=inside)
        h = h.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(h * h) / K + eps)
    w = tl.load(w_ptr + k, mask=inside, other=0.0)
    tl.store(x_ptr + row * K + k, (h * r * w).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(r_ptr + row, r)


@triton.jit
def norm_backward_kernel(dx_ptr, dsum_ptr, h_ptr, r_ptr, w_ptr, dh_ptr, K, BLOCK: tl.constexpr):
    """Row program_id(0): dh = dsum (where there is one) + r (g - h r^2 mean(g h)), g = dx w."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < K
    h = tl.load(h_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dx_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32) * tl.load(w_ptr + k, mask=inside, other=0.0)
    r = tl.load(r_ptr + row)
    dh = r * (g - h * (r * r * (tl.sum(g * h) / K)))
    if dsum_ptr is not None:
        dh += tl.load(dsum_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(dh_ptr + row * K + k, dh.to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turn_heads(x_ptr, out_ptr, row, cos, sin, HEADS, D: tl.constexpr, BLOCK_H: tl.constexpr):
    head, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, D)[None, :]
    place = (row * HEADS + head) * (2 * D) + d
    low = tl.load(x_ptr + place, mask=head < HEADS, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + place + D, mask=head < HEADS, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (low * cos - high * sin).to(out_ptr.dtype.element_ty), mask=head < HEADS)
    tl.store(out_ptr + place + D, (high * cos + low * sin).to(out_ptr.dtype.element_ty), mask=head < HEADS)


@triton.jit
def turn_kernel(q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, T, H, G, sign, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr):
    """Row program_id(0): q and k turned by its position's angles (sign 1) or back (sign -1)."""
    row = tl.program_id(0).to(tl.int64)
    angle = (row % T) * D + tl.arange(0, D)
    cos, sin = tl.load(cos_ptr + angle)[None, :], tl.load(sin_ptr + angle)[None, :] * sign
    _turn_heads(q_ptr, q_out_ptr, row, cos, sin, H, D, BLOCK_H)
    _turn_heads(k_ptr, k_out_ptr, row, cos, sin, G, D, BLOCK_G)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, (gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    sig = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dgate_ptr + i, (dy * up * sig * (1.0 + gate * (1.0 - sig))).to(dgate_ptr.dtype.element_ty), mask=i < n)
    tl.store(dup_ptr + i, (dy * gate * sig).to(dup_ptr.dtype.element_ty), mask=i < n)


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


def _row_launch(columns: int) -> dict[str, int]:
    """By the length of a row alone."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@on_gpu("add_norm")
def _norm_forward(h: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("add_norm", *((h,) if delta is None else (h, delta)))
    if w.shape != h.shape[1:] or w.dtype != torch.float32:
        raise ValueError(f"add_norm takes a float32 weight a column, got {tuple(w.shape)} {w.dtype} for {tuple(h.shape)}; convert it")
    total, x, r = h if delta is None else torch.empty_like(h), torch.empty_like(h), torch.empty(len(h), dtype=torch.float32, device=h.device)
    if len(h):
        norm_kernel[(len(h),)](h, delta, w, total, x, r, h.shape[1], eps, **_row_launch(h.shape[1]))
    return total, x, r


@on_gpu("add_norm")
def _norm_backward(dx: torch.Tensor, dsum: torch.Tensor | None, h: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    dh = torch.empty_like(h)
    if len(h):
        norm_backward_kernel[(len(h),)](dx, dsum, h, r, w, dh, h.shape[1], **_row_launch(h.shape[1]))
    return dh


@on_gpu("turn")
def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> tuple[torch.Tensor, torch.Tensor]:
    _check("turn", q, k)
    tokens, half = cos.shape
    if half & (half - 1) or q.shape[1] % (2 * half) or k.shape[1] % (2 * half) or len(q) % tokens:
        raise ValueError(f"turn takes whole sequences of {tokens} rows and heads of {2 * half} columns, half of them a power of two, got {tuple(q.shape)} {tuple(k.shape)}; call turn_ref")
    heads, groups = q.shape[1] // (2 * half), k.shape[1] // (2 * half)
    out = torch.empty_like(q), torch.empty_like(k)
    if len(q):
        blocks = {"BLOCK_H": triton.next_power_of_2(heads), "BLOCK_G": triton.next_power_of_2(groups)}
        turn_kernel[(len(q),)](q, k, *out, cos, sin, tokens, heads, groups, sign, D=half, **blocks, num_warps=4)
    return out


@on_gpu("swiglu")
def _swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    _check("swiglu", gate, up)
    y = torch.empty_like(gate)
    if y.numel():
        swiglu_kernel[(triton.cdiv(y.numel(), _BLOCK),)](gate, up, y, y.numel(), BLOCK=_BLOCK, num_warps=4)
    return y


@on_gpu("swiglu")
def _swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dy.numel():
        swiglu_backward_kernel[(triton.cdiv(dy.numel(), _BLOCK),)](dy, gate, up, dgate, dup, dy.numel(), BLOCK=_BLOCK, num_warps=4)
    return dgate, dup


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, delta, w, eps):  # noqa: ANN001, ANN205
        total, x, r = _norm_forward(h, delta, w, eps)
        ctx.save_for_backward(total, r, w)
        ctx.set_materialize_grads(False)
        return total, x

    @staticmethod
    def backward(ctx, dsum, dx):  # noqa: ANN001, ANN205
        total, r, w = ctx.saved_tensors
        dx = torch.zeros_like(total) if dx is None else dx.contiguous()
        dh = _norm_backward(dx, None if dsum is None else dsum.contiguous(), total, r, w)
        return dh, dh, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, eps):  # noqa: ANN001, ANN205
        _, x, r = _norm_forward(h, None, w, eps)
        ctx.save_for_backward(h, r, w)
        return x

    @staticmethod
    def backward(ctx, dx):  # noqa: ANN001, ANN205
        return _norm_backward(dx.contiguous(), None, *ctx.saved_tensors), None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):  # noqa: ANN001, ANN205
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dq, dk):  # noqa: ANN001, ANN205
        return *_turned(dq.contiguous(), dk.contiguous(), *ctx.saved_tensors, -1.0), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):  # noqa: ANN001, ANN205
        ctx.save_for_backward(gate, up)
        return _swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx, dy):  # noqa: ANN001, ANN205
        return _swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


def add_norm(h_MK: torch.Tensor, delta_MK: torch.Tensor | None, w_K: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, its RMSNorm), both differentiable in h and delta. Keeps the sum and 4 bytes a row. Raises ValueError for types and shapes."""
    return (h_MK, _Norm.apply(h_MK, w_K, eps)) if delta_MK is None else _AddNorm.apply(h_MK, delta_MK, w_K, eps)


def turn(q_MN: torch.Tensor, k_MN: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of both, heads side by side in a row. Keeps nothing. Raises ValueError where rows are not whole sequences."""
    return _Turn.apply(q_MN, k_MN, cos_TD, sin_TD)


def swiglu(gate_MF: torch.Tensor, up_MF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. Keeps both."""
    return _SwiGlu.apply(gate_MF, up_MF)
