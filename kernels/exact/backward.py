"""Gradients of the operators of a decoder with an explicit order for every sum: the same bits on a GPU and on the CPU.

    >>> import torch
    >>> from kernels.exact.backward import linear_backward_ref
    >>> dx_MK, dw_NK = linear_backward_ref(torch.ones(4, 2), torch.ones(4, 3), torch.ones(2, 3))
    >>> dx_MK[0, 0].item(), dw_NK[0, 0].item()
    (2.0, 4.0)

Legend: M tokens in the order of their sequences, K inputs, N outputs, V vocabulary. Operands bf16, fp16 or fp32, gradients float32.

    linear         dx = dy W over N and dW = dy^T x over tokens: family A's order (order.py), so dW is one chain over tokens a chunk
    rmsnorm        x' = x r, r as in the forward pass; g = dy w; c = (sum of g x' in norm.py's lanes and tree) / K; dx = fma(-x', c, g) r,
                   where the minus flips the sign bit (of +0 too; Triton's minus is 0 - x);
                   dw = sum over tokens of dy x' in family A's order
    swiglu         e = exp(-|g|); s = (g < 0 ? e : 1) / (1 + e), 1 - s likewise; dup = dy silu(g); dgate = (dy up) (s fma(g, 1 - s, 1)), where
                   an infinite g counts as +-1: then s fma(...) is its limit, 0 or 1
    rope           the transpose: a rotation by the opposite angle
    cross_entropy  of the mean over the n tokens that are not ignored: (softmax(logits) - [v = target]) / n
    embedding      row v: from +0, the gradients of the tokens with that id added in ascending order of token

Attention is in attention_backward.py. No atomics, no bias, no double backward.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.activations import exp_ref
from kernels.exact.elementary import exp_f32
from kernels.exact.ieee import assert_subnormals_kept, fma_f32
from kernels.exact.linear import Schedule, combine, linear_fma, linear_fma_ref
from kernels.exact.norm import LANES, reciprocal_root, sum_of_squares_ref, tree_sum
from kernels.exact.order import CHUNK, chunks, span_count
from kernels.exact.rope import rope, rope_ref
from kernels.exact.softmax import softmax, softmax_ref

__all__ = [
    "cross_entropy_backward", "cross_entropy_backward_ref", "embedding_backward", "embedding_backward_ref", "linear_backward", "linear_backward_ref",
    "rmsnorm_backward", "rmsnorm_backward_ref", "rope_backward", "rope_backward_ref", "swiglu_backward", "swiglu_backward_ref", "token_dot",
    "token_dot_ref",
]  # fmt: skip

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LANES = tl.constexpr(LANES)
_MOST_ROWS, _MOST_COLUMNS = 2**31 - 2**16, 2**23  # sizes are int32 in the kernels (offsets int64); a grid has 65,535 blocks of columns


# ---- references ----------------------------------------------------------------------------------------------------------------


def linear_backward_ref(dy_MN: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor, *, engine: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """(dx_MK, dw_NK) of y = x W^T on the CPU; `engine` as in `linear_fma_ref`. Raises ValueError where shapes or dtypes do not fit."""
    _check_linear(dy_MN, x_MK, w_NK)
    return linear_fma_ref(dy_MN, w_NK.T, engine=engine), linear_fma_ref(dy_MN.T, x_MK.T, engine=engine)


def token_dot_ref(a_MK: torch.Tensor, b_MK: torch.Tensor) -> torch.Tensor:
    """s_K = sum over tokens of a b, each column one sum in family A's order with M products, on the CPU."""
    _check_rows(a_MK=a_MK, b_MK=b_MK)
    assert_subnormals_kept()
    a, b = (x.detach().cpu().float() for x in (a_MK, b_MK))
    order, sums = chunks(len(a)), []
    for start, stop in (chunk for span in order for chunk in span):
        acc = torch.zeros(a.shape[1], dtype=torch.float32, device="cpu")
        for token in range(start, stop):
            acc = fma_f32(a[token], b[token], acc)
        sums.append(acc + 0.0)
    return combine(torch.stack(sums) if sums else torch.zeros(0, a.shape[1], dtype=torch.float32, device="cpu"), order)


def rmsnorm_backward_ref(dy_MK: torch.Tensor, x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx_MK, dw_K) of `rmsnorm` on the CPU. Raises ValueError where shapes or dtypes do not fit."""
    _check_norm(dy_MK, x_MK, w_K, eps)
    assert_subnormals_kept()
    dy, x, w = (t.detach().cpu().float() for t in (dy_MK, x_MK, w_K))
    count = torch.tensor(float(x.shape[1]), dtype=torch.float32, device="cpu")
    root = torch.from_numpy(np.sqrt((sum_of_squares_ref(x) / count + torch.tensor(eps, dtype=torch.float32, device="cpu")).numpy()))
    r_M1 = (torch.ones_like(root) / root)[:, None]
    scaled, g = x * r_M1, dy * w
    c_M1 = (_lane_dot_ref(g, scaled) / count)[:, None]
    return fma_f32(-scaled, c_M1, g) * r_M1, token_dot_ref(dy, scaled)


def _lane_dot_ref(a_MK: torch.Tensor, b_MK: torch.Tensor) -> torch.Tensor:
    """Sum of a b of each row in norm.py's order: 1024 lanes, then the tree of neighbours."""
    (m, k), steps = a_MK.shape, -(-a_MK.shape[1] // LANES)
    a, b = (torch.nn.functional.pad(x, (0, steps * LANES - k)).view(m, steps, LANES) for x in (a_MK, b_MK))
    acc = torch.zeros(m, LANES, dtype=torch.float32, device="cpu")
    for s in range(steps):
        acc = fma_f32(a[:, s], b[:, s], acc)
    while acc.shape[1] > 1:
        acc = acc[:, 0::2] + acc[:, 1::2]
    return acc[:, 0]


def swiglu_backward_ref(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) of silu(gate) * up on the CPU; shapes equal. Raises ValueError otherwise."""
    _check_alike(dy=dy, gate=gate, up=up)
    assert_subnormals_kept()
    dy, g, u = (t.detach().cpu().float() for t in (dy, gate, up))
    e = exp_ref(-g.abs())
    one, d = torch.ones_like(e), 1.0 + e
    s, rest = torch.where(g < 0, e, one) / d, torch.where(g < 0, one, e) / d
    near = torch.where(torch.isinf(g), torch.sign(g), g)
    silu = torch.where(g < 0, near * e, g) / d
    return (dy * u) * (s * fma_f32(near, rest, 1.0)), dy * silu


def rope_backward_ref(dy_BTHD: torch.Tensor, position_BT: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor) -> torch.Tensor:
    """dx_BTHD in float32 of `rope` on the CPU. Raises as `rope_ref`."""
    return rope_ref(dy_BTHD, position_BT, cos_PD, -sin_PD, torch.float32)


def cross_entropy_backward_ref(logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """dlogits_MV of `cross_entropy` on the CPU: a row of +0 for an ignored token, of NaN for a target outside the vocabulary."""
    _check_target(logits_MV, target_M)
    p, target = softmax_ref(logits_MV, out_dtype=torch.float32), target_M.detach().cpu().long()
    kept, known = target != ignore_index, (target >= 0) & (target < p.shape[1])
    hit = torch.arange(p.shape[1], device="cpu") == target[:, None]
    d = (p - hit.float()) / kept.sum().float()
    return torch.where(kept[:, None], torch.where(known[:, None], d, torch.nan), 0.0)


def embedding_backward_ref(dh_MK: torch.Tensor, ids_M: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """dw_VK of h = w[ids] on the CPU: tokens ascending. Raises ValueError for ids outside the vocabulary."""
    _check_ids(dh_MK, ids_M, vocabulary)
    assert_subnormals_kept()
    dh, out = dh_MK.detach().cpu().float(), torch.zeros(vocabulary, dh_MK.shape[1], dtype=torch.float32, device="cpu")
    for token, row in enumerate(ids_M.tolist()):
        out[row] = out[row] + dh[token]
    return out


# ---- what may be asked for -----------------------------------------------------------------------------------------------------


def _check_alike(**operands: torch.Tensor) -> None:
    shapes, dtypes = ({name: get(x) for name, x in operands.items()} for get in (lambda x: tuple(x.shape), lambda x: x.dtype))
    if len(set(shapes.values())) != 1:
        raise ValueError(f"operands have one shape; got {shapes}; broadcast them yourself")
    if not set(dtypes.values()) <= set(_FLOATS):
        raise ValueError(f"operands are bf16, fp16 or fp32; got {dtypes}; cast them")


def _check_rows(**operands: torch.Tensor) -> None:
    _check_alike(**operands)
    first = next(iter(operands.values()))
    if first.ndim != 2 or first.shape[0] > _MOST_ROWS or first.shape[1] > _MOST_COLUMNS:
        raise ValueError(f"operands are matrices of at most {_MOST_ROWS} x {_MOST_COLUMNS}; got {tuple(first.shape)} for {list(operands)}; flatten or split them")


def _check_linear(dy_MN: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor) -> None:
    if not dy_MN.ndim == x_MK.ndim == w_NK.ndim == 2 or (dy_MN.shape[0], *w_NK.shape) != (x_MK.shape[0], dy_MN.shape[1], x_MK.shape[1]):
        raise ValueError(f"need dy_MN, x_MK and w_NK; got {tuple(dy_MN.shape)=} {tuple(x_MK.shape)=} {tuple(w_NK.shape)=}; flatten the tokens")


def _check_norm(dy_MK: torch.Tensor, x_MK: torch.Tensor, w_K: torch.Tensor, eps: float) -> None:
    _check_rows(dy_MK=dy_MK, x_MK=x_MK)
    if w_K.shape != x_MK.shape[1:] or x_MK.shape[1] == 0 or w_K.dtype not in _FLOATS:
        raise ValueError(f"need x_MK and w_K with one K > 0, w bf16, fp16 or fp32; got {tuple(x_MK.shape)=} {tuple(w_K.shape)=} {w_K.dtype=}; flatten or cast")
    if not eps >= 0:
        raise ValueError(f"eps is added to a mean square and cannot be negative; got {eps=}; use that of the forward pass")


def _check_index(name: str, index_M: torch.Tensor, count: int) -> None:
    if index_M.shape != (count,) or index_M.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is int32 or int64 [{count}]; got {tuple(index_M.shape)} {index_M.dtype}; one id a token")


def _check_target(logits_MV: torch.Tensor, target_M: torch.Tensor) -> None:
    _check_rows(logits_MV=logits_MV)
    _check_index("target_M", target_M, len(logits_MV))


def _check_ids(dh_MK: torch.Tensor, ids_M: torch.Tensor, vocabulary: int) -> None:
    _check_rows(dh_MK=dh_MK)
    if not 0 < vocabulary <= _MOST_ROWS:
        raise ValueError(f"a vocabulary has 1 to {_MOST_ROWS} entries; got {vocabulary=}; pass the rows of the embedding")
    _check_index("ids_M", ids_M, len(dh_MK))
    if len(ids_M) and not 0 <= int(ids_M.min()) <= int(ids_M.max()) < vocabulary:
        raise ValueError(f"ids_M holds ids 0 to {vocabulary - 1}; got {int(ids_M.min())} to {int(ids_M.max())}; use the model's own tokenizer")


# ---- kernels: all must be compiled with enable_fp_fusion=False -----------------------------------------------------------------


@triton.jit
def token_dot_kernel(a_ptr, b_ptr, out_ptr, K, LENGTH, S: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr = CHUNK):
    """BLOCK columns, S spans side by side; a span has LENGTH tokens."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    span = tl.arange(0, S)[None, :].to(tl.int64)
    acc = tl.zeros((BLOCK, S), tl.float32)
    total = tl.zeros((BLOCK, S), tl.float32)
    for i in range(LENGTH):
        place = (span * LENGTH + i) * K + k
        a = tl.load(a_ptr + place, mask=k + span * 0 < K, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + place, mask=k + span * 0 < K, other=0.0).to(tl.float32)
        acc = tl.fma(a, b, acc)
        if ((i + 1) % PER_CHUNK == 0) | (i + 1 == LENGTH):
            total = total + (acc + 0.0)
            acc = tl.zeros((BLOCK, S), tl.float32)
    if S == 8:
        left, right = tl.split(tl.reshape(total, (BLOCK, 4, 2)))
        left, right = tl.split(tl.reshape(left + right, (BLOCK, 2, 2)))
        left, right = tl.split(left + right)
        out = left + right
    else:
        out = tl.reshape(total, (BLOCK,))
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + k, out, mask=k < K)


@triton.jit
def rmsnorm_backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, scaled_ptr, K, count, eps, STEPS: tl.constexpr):
    """One program a row; `count` is K as float32. `scaled` receives x r, which dw needs."""
    row = tl.program_id(0).to(tl.int64) * K
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((_LANES,), tl.float32)
    for s in range(STEPS):
        k = s * _LANES + lane
        x = tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32)
        acc = tl.fma(x, x, acc)
    r = reciprocal_root(acc, count, eps)
    acc = tl.zeros((_LANES,), tl.float32)
    for s in range(STEPS):
        k = s * _LANES + lane
        # where r is infinite a missing element must still count as +0
        scaled = tl.where(k < K, tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32) * r, 0.0)
        g = tl.load(dy_ptr + row + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        acc = tl.fma(g, scaled, acc)
        tl.store(scaled_ptr + row + k, scaled, mask=k < K)
    c = tl.div_rn(tl.reshape(tree_sum(acc, _LANES), (1,)), tl.full((1,), count, tl.float32))
    for s in range(STEPS):
        k = s * _LANES + lane
        scaled = tl.load(x_ptr + row + k, mask=k < K, other=0.0).to(tl.float32) * r
        g = tl.load(dy_ptr + row + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + k, tl.fma(scaled * -1.0, tl.broadcast_to(c, (_LANES,)), g) * r, mask=k < K)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, count, BLOCK: tl.constexpr):
    """One element a lane."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    dy = tl.load(dy_ptr + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + i, mask=inside, other=0.0).to(tl.float32)
    e = exp_f32(-tl.abs(g))
    d = 1.0 + e
    one = tl.full((BLOCK,), 1.0, tl.float32)
    s, rest = tl.div_rn(tl.where(g < 0.0, e, one), d), tl.div_rn(tl.where(g < 0.0, one, e), d)
    near = tl.where(g == float("-inf"), -1.0, tl.where(g == float("inf"), 1.0, g))
    tl.store(dgate_ptr + i, (dy * u) * (s * tl.fma(near, rest, one)), mask=inside)
    tl.store(dup_ptr + i, dy * tl.div_rn(tl.where(g < 0.0, near * e, g), d), mask=inside)


@triton.jit
def cross_entropy_backward_kernel(p_ptr, target_ptr, count_ptr, out_ptr, V, ignore_index, BLOCK: tl.constexpr):
    """One program a row and BLOCK entries; count: the number of tokens that are not ignored, as float32."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + row * V + v, mask=v < V, other=0.0)
    target = tl.load(target_ptr + row + tl.zeros((BLOCK,), tl.int64)).to(tl.int64)
    count = tl.load(count_ptr + tl.zeros((BLOCK,), tl.int64))
    d = tl.div_rn(p - tl.where(v == target, 1.0, 0.0), count)
    d = tl.where((target >= 0) & (target < V), d, float("nan"))
    tl.store(out_ptr + row * V + v, tl.where(target == ignore_index, 0.0, d), mask=v < V)


@triton.jit
def embedding_backward_kernel(dh_ptr, token_ptr, start_ptr, out_ptr, K, BLOCK: tl.constexpr):
    """BLOCK columns of one vocabulary row: its tokens are token[start[v]:start[v + 1]], ascending."""
    v = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(start_ptr + v), tl.load(start_ptr + v + 1)):
        acc = acc + tl.load(dh_ptr + tl.load(token_ptr + i) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + v * K + k, acc, mask=k < K)


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


@on_gpu("linear_backward")
def linear_backward(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor, *, schedule: Schedule | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_backward_ref` on a GPU; any `schedule` of `linear_fma` gives the same bits."""
    _check_linear(dy_MN, x_MK, w_NK)
    return linear_fma(dy_MN, w_NK.T, schedule=schedule), linear_fma(dy_MN.T, x_MK.T, schedule=schedule)


@on_gpu("token_dot")
def token_dot(a_MK: torch.Tensor, b_MK: torch.Tensor, *, block: int = 32, num_warps: int = 4) -> torch.Tensor:
    """`token_dot_ref` on a GPU; any `block` (columns a program) and `num_warps` give the same bits."""
    _check_rows(a_MK=a_MK, b_MK=b_MK)
    a, b, (m, k) = a_MK.detach().contiguous(), b_MK.detach().contiguous(), a_MK.shape
    out, s = torch.empty(k, dtype=torch.float32, device=a.device), span_count(m)
    if k:
        token_dot_kernel[(triton.cdiv(k, block),)](a, b, out, k, m // s, S=s, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False)
    return out


@on_gpu("rmsnorm_backward")
def rmsnorm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, w_K: torch.Tensor, *, eps: float = 1e-6, num_warps: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rmsnorm_backward_ref` on a GPU; any `num_warps` gives the same bits."""
    _check_norm(dy_MK, x_MK, w_K, eps)
    dy, x, w = (t.detach().contiguous() for t in (dy_MK, x_MK, w_K))
    dx, scaled = (torch.empty_like(x, dtype=torch.float32) for _ in range(2))
    if len(x):
        steps, k = triton.cdiv(x.shape[1], LANES), x.shape[1]
        rmsnorm_backward_kernel[(len(x),)](dy, x, w, dx, scaled, k, float(k), eps, STEPS=steps, num_warps=num_warps, enable_fp_fusion=False)
    return dx, token_dot(dy, scaled, num_warps=num_warps)


@on_gpu("swiglu_backward")
def swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, block: int = 1024, num_warps: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_backward_ref` on a GPU; any `block` and `num_warps` give the same bits."""
    _check_alike(dy=dy, gate=gate, up=up)
    dy, gate, up = (t.detach().contiguous() for t in (dy, gate, up))
    dgate, dup = (torch.empty_like(gate, dtype=torch.float32) for _ in range(2))
    if n := dy.numel():
        swiglu_backward_kernel[(triton.cdiv(n, block),)](dy, gate, up, dgate, dup, n, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False)
    return dgate, dup


@on_gpu("rope_backward")
def rope_backward(dy_BTHD: torch.Tensor, position_BT: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor, *, num_warps: int = 2) -> torch.Tensor:
    """`rope_backward_ref` on a GPU; any `num_warps` gives the same bits."""
    return rope(dy_BTHD, position_BT, cos_PD, -sin_PD, torch.float32, num_warps=num_warps)


@on_gpu("cross_entropy_backward")
def cross_entropy_backward(
    logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100, block: int = 1024, num_warps: int = 4
) -> torch.Tensor:
    """`cross_entropy_backward_ref` on a GPU; any `block` and `num_warps` give the same bits. Waits for nothing."""
    _check_target(logits_MV, target_M)
    p, (m, v) = softmax(logits_MV, out_dtype=torch.float32), logits_MV.shape
    out, count = torch.empty_like(p), (target_M != ignore_index).sum().float()  # an integer sum, rounded once
    if m:
        grid = (m, triton.cdiv(v, block))
        options = dict(BLOCK=block, num_warps=num_warps, enable_fp_fusion=False)
        cross_entropy_backward_kernel[grid](p, target_M.contiguous(), count, out, v, ignore_index, **options)
    return out


@on_gpu("embedding_backward")
def embedding_backward(dh_MK: torch.Tensor, ids_M: torch.Tensor, vocabulary: int, *, block: int = 128, num_warps: int = 4) -> torch.Tensor:
    """`embedding_backward_ref` on a GPU; any `block` and `num_warps` give the same bits. Waits for the device to check the ids."""
    _check_ids(dh_MK, ids_M, vocabulary)
    dh, k = dh_MK.detach().contiguous(), dh_MK.shape[1]
    out = torch.empty((vocabulary, k), dtype=torch.float32, device=dh.device)
    ids, token = torch.sort(ids_M.long(), stable=True)  # integers: equal ids keep the order of their tokens
    start = torch.searchsorted(ids, torch.arange(vocabulary + 1, device=dh.device))
    if k:
        grid = (vocabulary, triton.cdiv(k, block))
        embedding_backward_kernel[grid](dh, token, start, out, k, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False)
    return out
