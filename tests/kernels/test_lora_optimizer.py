"""Claims: a slot's step is torch's AdamW with its own rate, decay, clip and divisor, and nothing of another slot reaches it.

    U        2^-24, one rounding of float32 relative to what is rounded
    BOUND    of p after n steps against torch in float64, from the same numbers: p itself is rounded three times a step (p keep, rate u, their difference),
             3 n U |p|. u = (m / c1) / (sqrt(v / c2) + eps): every g carries 4 U (sum of squares, norm, ratio, product), m adds up to 4 roundings of terms
             at most max|g|, v relative 6 U, the quotient 4 U. As v holds the largest g with a weight of at least 1 / n, max|g| / sqrt(v / c2) <= sqrt(n),
             so u is off by at most 32 sqrt(n) U, and n steps of rate lr by 32 n sqrt(n) lr U
"""

import math

import pytest
import torch

from kernels.exact.philox import philox_bell
from kernels.lora.optimizer import BETAS, EPS, AdamState, SlotStep, adamw_step_ref

U = 2.0**-24
RANKS, WIDTHS = (3, 8, 5), (13, 1500, 32)


def bound(p: torch.Tensor, steps: int, lr: float) -> torch.Tensor:
    return U * (3 * steps * p.abs() + 32 * steps * math.sqrt(steps) * lr)


def filled(ranks: tuple[int, ...] = RANKS, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> AdamState:
    state = AdamState.zeros(widths=WIDTHS, ranks=ranks, device="cpu", compute_dtype=dtype)
    for slot, rank in enumerate(ranks):
        state.write(slot, "master", numbers(rank, seed + 10 * slot))
    return state


def numbers(rank: int, seed: int) -> torch.Tensor:
    return philox_bell((rank * sum(WIDTHS),), seed)


def everything(state: AdamState, slot: int) -> list[torch.Tensor]:
    return [state.read(slot, name) for name in ("master", "grad", "m", "v", "compute")] + [state.norms[slot]]


def test_five_steps_follow_torch_with_each_slot_s_own_rate_decay_clip_and_divisor() -> None:
    state = filled()
    rates, decays, clips, divisors = (1e-2, 2e-3, 3e-4), (0.0, 0.1, 0.5), (math.inf, 0.5, 1e6), (1.0, 7.0, 113.0)
    params = [[torch.nn.Parameter(x.double()) for x in state.split(s, state.read(s, "master"))] for s in range(3)]
    optimizers = [torch.optim.AdamW(p, lr=lr, weight_decay=wd, betas=BETAS, eps=EPS) for p, lr, wd in zip(params, rates, decays, strict=True)]
    for step in range(1, 6):
        for s in range(3):
            flat = numbers(RANKS[s], 100 * step + s)
            state.write(s, "grad", flat)
            for p, g in zip(params[s], state.split(s, flat), strict=True):
                p.grad = g.double() / divisors[s]
            norm = torch.nn.utils.clip_grad_norm_(params[s], clips[s])
            optimizers[s].step()
            assert clips[s] != 0.5 or norm > 0.5, "the clip must bite"
        state.prepare({s: SlotStep(learning_rate=rates[s], step=step, divisor=divisors[s], weight_decay=decays[s], clip=clips[s]) for s in range(3)})
        adamw_step_ref(state)
        assert abs(state.norms[2] - norm) <= 8 * U * norm
    for s in range(3):
        for p, want in zip(state.slot_views(s, "master"), params[s], strict=True):
            assert ((p - want).abs() <= bound(want.detach(), 5, rates[s])).all()
        assert torch.equal(state.read(s, "compute"), state.read(s, "master").bfloat16()) and not state.read(s, "grad").any()


def test_a_slot_that_is_not_due_keeps_every_bit_and_its_gradients() -> None:
    state = filled()
    for s in range(3):
        state.write(s, "grad", numbers(RANKS[s], s))
    before = [everything(state, s) for s in (0, 2)]
    state.prepare({1: SlotStep(learning_rate=1e-2, step=1)})
    adamw_step_ref(state)
    assert all(torch.equal(a, b) for s, old in zip((0, 2), before, strict=True) for a, b in zip(everything(state, s), old, strict=True))
    assert not state.read(1, "grad").any() and state.read(1, "m").any()


def test_a_slot_s_bits_are_those_it_has_alone_whatever_its_neighbours_hold() -> None:
    pack, alone = filled(), filled(ranks=(8,), seed=10)
    for step in range(1, 4):
        for s, poison in ((0, math.nan), (2, math.inf)):
            pack.write(s, "grad", torch.full((RANKS[s] * sum(WIDTHS),), poison))
        for state, slot in ((pack, 1), (alone, 0)):
            state.write(slot, "grad", numbers(8, 50 + step))
            state.prepare({s: SlotStep(learning_rate=1e-2, step=step, clip=0.5, weight_decay=0.1) for s in range(len(state.ranks))})
            adamw_step_ref(state)
    assert all(torch.equal(a, b) for a, b in zip(everything(pack, 1), everything(alone, 0), strict=True))
    assert pack.read(0, "master").isnan().all() and not pack.read(1, "master").isnan().any()


@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_gradients_that_are_not_finite_end_as_in_torch(clip: float) -> None:
    for poison in (math.nan, math.inf):
        state = filled(ranks=(2,))
        flat = numbers(2, 3)
        flat[7] = poison
        params = [torch.nn.Parameter(x.clone()) for x in state.split(0, state.read(0, "master"))]
        for p, g in zip(params, state.split(0, flat), strict=True):
            p.grad = g.clone()
        if clip < math.inf:  # torch's own would make inf / inf of "no clip"
            torch.nn.utils.clip_grad_norm_(params, clip)
        torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, betas=BETAS, eps=EPS).step()
        state.write(0, "grad", flat)
        state.prepare({0: SlotStep(learning_rate=1e-2, step=1, clip=clip)})
        adamw_step_ref(state)
        for p, want in zip(state.slot_views(0, "master"), params, strict=True):
            assert torch.equal(p.isnan(), want.isnan())


def test_rank_rows_beyond_an_adapter_s_rank_stay_zero() -> None:
    state = filled(ranks=(8,))
    for name in ("master", "grad"):
        pieces = [torch.cat([x[:3], torch.zeros_like(x[3:])]) for x in state.split(0, numbers(8, 5))]
        state.write(0, name, torch.cat([x.reshape(-1) for x in pieces]))
    state.prepare({0: SlotStep(learning_rate=1e-2, step=1, weight_decay=0.1)})
    adamw_step_ref(state)
    for name in ("master", "m", "v", "compute"):
        assert all(not x[3:].any() and x[:3].any() for x in state.slot_views(0, name))


def test_reading_writing_and_clearing_touch_one_slot_and_matrices_begin_aligned() -> None:
    state = filled()
    flat = numbers(8, 77)
    others = [everything(state, s) for s in (0, 2)]
    state.write(1, "master", flat)
    assert torch.equal(state.read(1, "master"), flat) and torch.equal(state.read(1, "compute"), flat.bfloat16())
    assert all(torch.equal(view, piece) for view, piece in zip(state.slot_views(1, "master"), state.split(1, flat), strict=True))
    state.clear(1)
    assert all(not x.any() for x in everything(state, 1))
    assert all(torch.equal(a, b) for s, old in zip((0, 2), others, strict=True) for a, b in zip(everything(state, s), old, strict=True))
    assert [tuple(x.shape) for x in state.views("compute")] == [(16, w) for w in WIDTHS]
    assert all(x.storage_offset() * x.element_size() % 256 == 0 for x in state.views("compute"))
    assert filled(dtype=torch.float32).views("compute")[1].data_ptr() != filled(dtype=torch.float32).views("grad")[1].data_ptr()


def test_float32_models_compute_with_the_master_itself() -> None:
    state = filled(dtype=torch.float32)
    assert state.compute is state.master
    wide, thin = filled(), filled(dtype=torch.float32)
    assert wide.nbytes - thin.nbytes == 2 * wide.master.numel()


def test_what_does_not_fit_is_refused() -> None:
    state = filled()
    with pytest.raises(ValueError, match="steps count from 1"):
        SlotStep(learning_rate=1e-3, step=0)
    for wrong in (dict(divisor=0.0), dict(clip=0.0), dict(divisor=math.nan)):
        with pytest.raises(ValueError, match="divisor and clip are positive"):
            SlotStep(learning_rate=1e-3, step=1, **wrong)
    with pytest.raises(ValueError, match="not negative"):
        SlotStep(learning_rate=-1e-3, step=1)
    with pytest.raises(ValueError, match="slots are 0 to 2"):
        state.prepare({3: SlotStep(learning_rate=1e-3, step=1)})
    with pytest.raises(ValueError, match="at least one column and rank row"):
        AdamState.zeros(widths=(), ranks=(1,), device="cpu")
    with pytest.raises(ValueError, match="computes in bf16"):
        AdamState.zeros(widths=(4,), ranks=(1,), device="cpu", compute_dtype=torch.float64)
    with pytest.raises(ValueError, match="a buffer is one of"):
        state.views("momentum")
    with pytest.raises(ValueError, match="compute copies follow master"):
        state.write(0, "compute", numbers(3, 0))
    with pytest.raises(ValueError, match="slot 0 has 3 x 1545 parameters"):
        state.write(0, "m", numbers(8, 0))
