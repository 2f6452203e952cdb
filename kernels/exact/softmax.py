"""softmax, log-softmax and cross-entropy from IEEE-754 operations only, with an explicit order for every sum.

    >>> import torch
    >>> from kernels.exact.softmax import cross_entropy_ref, softmax_ref
    >>> softmax_ref(torch.zeros(1, 4)).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    >>> cross_entropy_ref(torch.zeros(2, 4), torch.tensor([1, -100])).item()      # log 4 of the one token that counts
    1.3862943649291992

Legend: M rows (tokens), V columns (the vocabulary). `op` runs on a GPU, `op_ref` on the CPU.

    m = max of the row (order-free), p_v = exp(x_v - m), l = sum of p in the order of `norm.py`, a function of V alone:
    lane j of 1024 is a chain from +0 over v = j, j + 1024, ..., the lanes are added in a balanced tree of neighbours
    softmax = div_rn(p_v, l); log_softmax = (x_v - m) - log(l); loss of a token = log(l) - (x_target - m)
    cross_entropy = div_rn(chain of the losses in token order from +0, number of tokens counted)

Each operation is rounded to float32, the result once to `out_dtype`. -inf is a probability of 0; a row with a NaN or +inf, or of -inf alone,
is NaN throughout, as in torch. A token whose target is `ignore_index` is skipped and not counted; with no token left the mean is NaN (0/0);
a target outside the vocabulary makes its loss NaN (a GPU cannot raise without waiting). No gradient (see `backward.py`), no label smoothing.
"""

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.elementary import exp_f32, exp_host, log_f32, log_host
from kernels.exact.ieee import assert_subnormals_kept
from kernels.exact.norm import LANES, lane_sum_ref, tree_sum

__all__ = [
    "cross_entropy", "cross_entropy_ref", "log_softmax", "log_softmax_ref", "softmax", "softmax_ref", "token_losses", "token_losses_ref",
]  # fmt: skip

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_AHEAD = 4  # steps whose loads are in flight together; one more row of lanes past the end adds +0 to sums that are not negative
_LANES, AHEAD = tl.constexpr(LANES), tl.constexpr(_AHEAD)


def _check(x_MV: torch.Tensor, out_dtype: torch.dtype | None = None) -> None:
    if x_MV.ndim != 2 or not 0 < x_MV.shape[1] < 2**31 - LANES * _AHEAD:
        raise ValueError(f"need x [M, V] with 0 < V < 2^31 - 4096; got {tuple(x_MV.shape)=}; flatten the tokens")
    if x_MV.dtype not in _FLOATS or (out_dtype or x_MV.dtype) not in _FLOATS:
        raise ValueError(f"operands and results are float32, bfloat16 or float16; got {x_MV.dtype=} {out_dtype=}; convert them first")


def _check_target(logits_MV: torch.Tensor, target_M: torch.Tensor) -> None:
    _check(logits_MV)
    if target_M.shape != logits_MV.shape[:1] or target_M.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"need one int32 or int64 target for each row; got {tuple(target_M.shape)=} {target_M.dtype=} {tuple(logits_MV.shape)=}")


# ---- references ----------------------------------------------------------------------------------------------------------------


def _shifted(x_MV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x - m, exp of it, l as [M, 1])."""
    assert_subnormals_kept()
    x = x_MV.detach().cpu().float()
    shifted = x - x.amax(1, keepdim=True)
    p = exp_host(shifted)
    return shifted, p, lane_sum_ref(p)[:, None]


def softmax_ref(x_MV: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Exact oracle on the CPU -> [M, V] in `out_dtype` (default x's).

    Measured: 1.7, 17 and 66 ulp where x - m reaches -3, -26 and -92 (rounding x - m costs half an ulp of it), V from 5 to 152,064.
    """
    _check(x_MV, out_dtype)
    _, p, total = _shifted(x_MV)
    return (p / total).to(out_dtype or x_MV.dtype)


def log_softmax_ref(x_MV: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Exact oracle on the CPU -> [M, V] in `out_dtype` (default x's). Near 0 the error is that of log(l): absolute, not relative."""
    _check(x_MV, out_dtype)
    shifted, _, total = _shifted(x_MV)
    return (shifted - log_host(total)).to(out_dtype or x_MV.dtype)


def token_losses_ref(logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """float32 [M] on the CPU: each token's loss, +0 where it is ignored."""
    _check_target(logits_MV, target_M)
    target = target_M.detach().cpu().long()
    known = (target >= 0) & (target < logits_MV.shape[1])
    shifted, _, total = _shifted(logits_MV)
    at_target = shifted.gather(1, torch.where(known, target, 0)[:, None])
    loss = torch.where(known, (log_host(total) - at_target)[:, 0], torch.nan)
    return torch.where(target == ignore_index, 0.0, loss)


def cross_entropy_ref(logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """float32 scalar on the CPU: the mean loss over the tokens that are not ignored."""
    total = torch.tensor(0.0, dtype=torch.float32, device="cpu")
    for loss in token_losses_ref(logits_MV, target_M, ignore_index=ignore_index):
        total = total + loss  # an ignored token's +0 changes nothing: no loss is negative
    return total / (target_M.detach().cpu() != ignore_index).sum().float()


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x_ptr, target_ptr, y_ptr, V, stride, ignore_index, OP: tl.constexpr):
    """One program a row; y is contiguous. OP: softmax, log_softmax or loss (y is [M]). Must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _LANES)
    x_ptr += row * stride
    highest = tl.full((_LANES,), float("-inf"), tl.float32)
    for first in range(0, V, AHEAD * _LANES):
        for s in tl.static_range(AHEAD):
            v = first + s * _LANES + lane
            highest = tl.maximum(highest, tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32))
    m = tl.max(highest, 0)
    acc = tl.zeros((_LANES,), tl.float32)
    for first in range(0, V, AHEAD * _LANES):
        for s in tl.static_range(AHEAD):
            v = first + s * _LANES + lane
            p = exp_f32(tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32) - m)
            acc = acc + tl.where(v < V, p, 0.0)
    total = tl.reshape(tree_sum(acc, _LANES), (1,))
    if OP == "loss":
        target = tl.load(target_ptr + row + tl.arange(0, 1)).to(tl.int64)
        x = tl.load(x_ptr + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
        loss = log_f32(total) - (x - m)
        tl.store(y_ptr + row + tl.arange(0, 1), tl.where(target == ignore_index, 0.0, loss))
    else:
        log_total = log_f32(total)
        for first in range(0, V, AHEAD * _LANES):
            for s in tl.static_range(AHEAD):
                v = first + s * _LANES + lane
                x = tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32) - m
                y = tl.div_rn(exp_f32(x), tl.zeros((_LANES,), tl.float32) + total) if OP == "softmax" else x - log_total
                tl.store(y_ptr + row * V + v, y.to(y_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def mean_kernel(loss_ptr, target_ptr, y_ptr, M, ignore_index, BLOCK: tl.constexpr):
    """One program: the chain of M losses in order, over the number of targets counted. Must be compiled with enable_fp_fusion=False."""
    one = tl.arange(0, 1)
    total = tl.zeros((1,), tl.float32)
    count = tl.zeros((1,), tl.int32)
    for first in range(0, M, BLOCK):
        for j in tl.static_range(BLOCK):  # the loads do not wait for the chain
            i = first + j + one
            total = total + tl.load(loss_ptr + i, mask=i < M, other=0.0)
            target = tl.load(target_ptr + i, mask=i < M, other=0).to(tl.int64)
            count += ((i < M) & (target != ignore_index)).to(tl.int32)
    tl.store(y_ptr + one, tl.div_rn(total, count.to(tl.float32)))


def _rows(op: str, x: torch.Tensor, target: torch.Tensor, y: torch.Tensor, ignore_index: int, num_warps: int) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0]:
        softmax_kernel[(x.shape[0],)](x, target, y, x.shape[1], x.stride(0), ignore_index, OP=op, num_warps=num_warps, enable_fp_fusion=False)
    return y


@on_gpu("softmax")
def softmax(x_MV: torch.Tensor, *, out_dtype: torch.dtype | None = None, num_warps: int = 8) -> torch.Tensor:
    """`softmax_ref` on a GPU; any `num_warps` gives the same bits."""
    _check(x_MV, out_dtype)
    return _rows("softmax", x_MV, x_MV, torch.empty(x_MV.shape, dtype=out_dtype or x_MV.dtype, device=x_MV.device), 0, num_warps)


@on_gpu("log_softmax")
def log_softmax(x_MV: torch.Tensor, *, out_dtype: torch.dtype | None = None, num_warps: int = 8) -> torch.Tensor:
    """`log_softmax_ref` on a GPU; any `num_warps` gives the same bits."""
    _check(x_MV, out_dtype)
    return _rows("log_softmax", x_MV, x_MV, torch.empty(x_MV.shape, dtype=out_dtype or x_MV.dtype, device=x_MV.device), 0, num_warps)


@on_gpu("token_losses")
def token_losses(logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100, num_warps: int = 8) -> torch.Tensor:
    """`token_losses_ref` on a GPU; any `num_warps` gives the same bits."""
    _check_target(logits_MV, target_M)
    losses = torch.empty(logits_MV.shape[0], dtype=torch.float32, device=logits_MV.device)
    return _rows("loss", logits_MV, target_M.contiguous(), losses, ignore_index, num_warps)


@on_gpu("cross_entropy")
def cross_entropy(logits_MV: torch.Tensor, target_M: torch.Tensor, *, ignore_index: int = -100, num_warps: int = 8) -> torch.Tensor:
    """`cross_entropy_ref` on a GPU -> a scalar there; waits for nothing."""
    losses = token_losses(logits_MV, target_M, ignore_index=ignore_index, num_warps=num_warps)
    mean = torch.empty((), dtype=torch.float32, device=losses.device)
    mean_kernel[(1,)](losses, target_M.contiguous(), mean, len(losses), ignore_index, BLOCK=32, num_warps=1, enable_fp_fusion=False)
    return mean
