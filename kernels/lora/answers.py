"""Losses of answer tokens with their gradients, and what belongs to a slot added up: the end of a packed forward pass.

    loss_A, dx_AK = answer_losses(x_AK, head_VK, targets_A)            # -log softmax(x head^T)[target], and the gradient of the sum of all
    loss_S = slot_sums(loss_A, seg.offsets, tokens=128, answers=4)      # float32, each slot's own

Legend: A answer places of all slots (`answers` a sequence), K hidden, V vocabulary, S slots. A target of -1 is no answer: its loss and its row of dx are
zeros, whatever stands in x. Both are computed in one pass, so no logits outlive a call: rows go in pieces of at most `MOST_LOGITS`. Logits are rounded
to x's type, as a model's head gives them; the rest is float32. `linear` and `dgrad` are the head's products (y = x w^T and dx = dy w).

One program owns a row's losses and a slot's sum, in an order that is its own; no atomics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu

__all__ = ["MOST_LOGITS", "answer_losses", "answer_losses_ref", "logit_losses", "slot_sums", "slot_sums_ref"]

MOST_LOGITS = 2**28  # at a time: half a GiB in bf16
_COLUMNS, _SUMS = 4096, 1024

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


def _check(x_AK: torch.Tensor, head_VK: torch.Tensor, targets_A: torch.Tensor) -> None:
    if x_AK.ndim != 2 or head_VK.ndim != 2 or x_AK.shape[1] != head_VK.shape[1] or targets_A.shape != x_AK.shape[:1] or targets_A.dtype != torch.int64:
        raise ValueError(f"losses take x [A, K], the head [V, K] and int64 targets [A], got {tuple(x_AK.shape)} {tuple(head_VK.shape)} {tuple(targets_A.shape)} {targets_A.dtype}; mend them")


# ---- references ----------------------------------------------------------------------------------------------------------------


def answer_losses_ref(
    x_AK: torch.Tensor, head_VK: torch.Tensor, targets_A: torch.Tensor, *, learn: bool = True, choices_C: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(loss_A, dx_AK or None, index of the choice with the highest logit or None) on any device, all rows at once."""
    _check(x_AK, head_VK, targets_A)
    logits_AV = x_AK @ head_VK.T
    chosen = None if choices_C is None else logits_AV[:, choices_C].argmax(1)
    logits_AV = logits_AV if x_AK.dtype == torch.float64 else logits_AV.float()
    there, at = targets_A >= 0, targets_A.clamp(min=0)[:, None]
    loss = (logits_AV.logsumexp(1) - logits_AV.gather(1, at)[:, 0]).masked_fill(~there, 0.0)
    if not learn:
        return loss, None, chosen
    gradient = logits_AV.softmax(1).scatter_add_(1, at, torch.full_like(at, -1, dtype=logits_AV.dtype)).masked_fill(~there[:, None], 0.0)
    return loss, gradient.to(x_AK.dtype) @ head_VK, chosen


def slot_sums_ref(values_A: torch.Tensor, offsets_S1: torch.Tensor, *, tokens: int, answers: int) -> torch.Tensor:
    """On any device, slot by slot."""
    at = [m // tokens * answers for m in offsets_S1.tolist()]
    return torch.stack([values_A[a:b].sum() for a, b in zip(at, at[1:], strict=False)])


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def losses_kernel(logits_ptr, targets_ptr, loss_ptr, V, LEARN: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0): its loss, and (LEARN) softmax minus the target's one in the logits' place."""
    row = tl.program_id(0).to(tl.int64)
    target, v = tl.load(targets_ptr + row), tl.arange(0, BLOCK)
    at = logits_ptr + row * V
    chosen = tl.load(at + tl.maximum(target, 0)).to(tl.float32)  # here: behind the last barrier another warp may have written its gradient
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(at + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(high, x)
        safe = tl.where(new == float("-inf"), 0.0, new)  # a lane beyond V has seen nothing
        total = total * tl.exp(high - safe) + tl.exp(x - safe)
        high = new
    top = tl.max(high)
    log_sum = top + tl.log(tl.sum(total * tl.exp(high - top)))
    tl.store(loss_ptr + row, tl.where(target >= 0, log_sum - chosen, 0.0))
    if LEARN:
        for first in range(0, V, BLOCK):
            x = tl.load(at + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)
            d = tl.exp(x - log_sum) - tl.where(first + v == target, 1.0, 0.0)
            tl.store(at + first + v, tl.where(target >= 0, d, 0.0).to(logits_ptr.dtype.element_ty), mask=first + v < V)


@triton.jit
def sums_kernel(values_ptr, offsets_ptr, out_ptr, tokens, answers, BLOCK: tl.constexpr):
    """Slot program_id(0)."""
    slot = tl.program_id(0)
    begin = tl.load(offsets_ptr + slot) // tokens * answers
    end = tl.load(offsets_ptr + slot + 1) // tokens * answers
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        acc += tl.load(values_ptr + i, mask=i < end, other=0.0)
    tl.store(out_ptr + slot, tl.sum(acc))


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------


@on_gpu("logit_losses")
def logit_losses(logits_AV: torch.Tensor, targets_A: torch.Tensor, *, learn: bool) -> torch.Tensor:
    """loss_A float32; where `learn`, the logits become their gradient, in place."""
    if logits_AV.ndim != 2 or not logits_AV.is_contiguous() or targets_A.shape != logits_AV.shape[:1] or targets_A.dtype != torch.int64:
        raise ValueError(f"losses take contiguous logits [A, V] and int64 targets [A], got {tuple(logits_AV.shape)} {tuple(targets_A.shape)} {targets_A.dtype}; mend them")
    loss = torch.empty(len(logits_AV), dtype=torch.float32, device=logits_AV.device)
    if len(loss):
        losses_kernel[(len(loss),)](logits_AV, targets_A, loss, logits_AV.shape[1], LEARN=learn, BLOCK=_COLUMNS, num_warps=8)
    return loss


def answer_losses(
    x_AK: torch.Tensor, head_VK: torch.Tensor, targets_A: torch.Tensor, *, learn: bool = True, choices_C: torch.Tensor | None = None,
    linear: Product = _product, dgrad: Product = torch.mm,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """As the reference. Raises ValueError for shapes that do not fit."""
    _check(x_AK, head_VK, targets_A)
    each = max(1, MOST_LOGITS // len(head_VK))
    losses, gradients, chosen = [], [], []
    for x, targets in zip(x_AK.split(each), targets_A.split(each), strict=True):
        logits_AV = linear(x, head_VK)
        if choices_C is not None:
            chosen.append(logits_AV.index_select(1, choices_C).argmax(1))
        losses.append(logit_losses(logits_AV, targets, learn=learn))
        if learn:
            gradients.append(dgrad(logits_AV, head_VK))
    return _joined(losses), _joined(gradients) if learn else None, _joined(chosen) if chosen else None


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@on_gpu("slot_sums")
def slot_sums(values_A: torch.Tensor, offsets_S1: torch.Tensor, *, tokens: int, answers: int) -> torch.Tensor:
    """float32 [S] of float32 values: `answers` of every `tokens` rows that the offsets (Segments.offsets) count."""
    out = torch.empty(len(offsets_S1) - 1, dtype=torch.float32, device=values_A.device)
    sums_kernel[(len(out),)](values_A, offsets_S1, out, tokens, answers, BLOCK=_SUMS, num_warps=4)
    return out
