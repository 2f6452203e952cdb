"""Claim: the kernels of packed LoRA compute the references, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

Sums of at most 72 products of numbers below 8 in float32, kept or not: 72 roundings of 2^-24 of sums below 72 * 64 give `CLOSE`. Logic, not bits: the
interpreter's products are numpy's.
"""

import os

import pytest
import torch

pytestmark = [pytest.mark.interpreter, pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process")]

from kernels.exact.philox import philox_bell  # noqa: E402
from kernels.lora import backward, forward  # noqa: E402
from kernels.lora.dropout import Dropout  # noqa: E402
from kernels.lora.schedules import Schedule  # noqa: E402
from kernels.lora.segments import Segments  # noqa: E402

CLOSE = 72 * 64 * 72 * 2.0**-24
ROWS, RANKS, SCALES = (5, 0, 33, 17), (8, 16, 40, 3), (2.0, 1.0, 0.5, 1.5)
SEG = Segments.of(rows=ROWS, ranks=RANKS, scales=SCALES, device="cpu", most_rows=40)
M, T, R = sum(ROWS), sum(RANKS), max(RANKS)
DROPOUT = Dropout(p_S=torch.tensor([0.5, 0.1, 0.25, 0.0]), seed_S=torch.tensor([1, 2, 2**40 + 5, -3]), step_S=torch.tensor([0, 1, 2, 3]), site=7)
# rank tiles of 16 beside whole ranks; D cut in parts that join; tiles that do not divide D
SCHEDULES = {"parts": Schedule(16, 32, 16, split=2), "whole": Schedule(32, 64, 64)}


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return philox_bell(shape, seed)


def ill(w_MD: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """NaN in the rows of slot 0: no other slot may see it."""
    w_MD = w_MD.clone()
    w_MD[slices[0]] = float("nan")
    return w_MD


ROW_SLICES, RANK_SLICES = ([b[i] for b in SEG.bounds()] for i in (0, 1))


def same_rows(found: torch.Tensor, want: torch.Tensor, slices: list[slice], but_first: bool, columns: bool = False) -> None:
    for i in range(1 if but_first else 0, 4):
        width = RANKS[i] if columns else found.shape[1]
        torch.testing.assert_close(found[slices[i], :width].double(), want[slices[i], :width].double(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name, d, nan", [("parts", 72, False), ("parts", 72, True), ("parts", 128, False), ("whole", 72, True), ("whole", 128, False)])
def test_forward_and_single_gradients_equal_the_references(name: str, d: int, nan: bool) -> None:
    s = SCHEDULES[name]
    dropout = DROPOUT if d == 72 else None
    x, w = numbers((M, d), 1), numbers((T, d), 2)
    small = forward.shrink_ref(numbers((M, d), 5), w, SEG)
    if nan:
        x, w, small = ill(x, ROW_SLICES), ill(w, RANK_SLICES), ill(small, ROW_SLICES)
    same_rows(forward.shrink(x, w, SEG, dropout=dropout, schedule=s), forward.shrink_ref(x, w, SEG, dropout=dropout), ROW_SLICES, nan, columns=True)
    same_rows(backward.grad_s(x, w, SEG, schedule=s), backward.grad_s_ref(x, w, SEG), ROW_SLICES, nan, columns=True)
    found, want = x.clone(), x.clone()
    forward.expand(found, small, w, SEG, schedule=s)
    forward.expand_ref(want, small, w, SEG)
    same_rows(found, want, ROW_SLICES, nan)
    found, want = numbers((T, d), 3), numbers((T, d), 3)
    backward.grad_b(small, x, SEG, found, schedule=s)
    backward.grad_b_ref(small, x, SEG, want)
    same_rows(found, want, RANK_SLICES, nan)
    assert torch.equal(found[RANK_SLICES[1]], numbers((T, d), 3)[RANK_SLICES[1]])  # a slot without tokens


@pytest.mark.parametrize("name, d", [("parts", 72), ("whole", 128)])
def test_passes_of_two_products_equal_the_references(name: str, d: int) -> None:
    pair = (SCHEDULES[name],) * 2
    dropout = DROPOUT if d == 72 else None
    x, w = numbers((M, d), 1), numbers((T, d), 2)
    small = forward.shrink_ref(numbers((M, d), 5), w, SEG)
    found, want = numbers((T, d), 3), numbers((T, d), 3)
    ds = backward.grad_sb(x, small, w, SEG, found, schedules=pair)
    backward.grad_b_ref(small, x, SEG, want)
    same_rows(ds, backward.grad_s_ref(x, w, SEG), ROW_SLICES, False, columns=True)
    same_rows(found, want, RANK_SLICES, False)
    dx, dx_want, found, want = numbers((M, d), 6), numbers((M, d), 6), numbers((T, d), 3), numbers((T, d), 3)
    backward.grad_ax(dx, small, x, w, SEG, found, dropout=dropout, schedules=pair)
    backward.grad_a_ref(small, x, SEG, want, dropout=dropout)
    backward.grad_x_ref(dx_want, small, w, SEG, dropout=dropout)
    same_rows(dx, dx_want, ROW_SLICES, False)
    same_rows(found, want, RANK_SLICES, False)
