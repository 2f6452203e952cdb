"""Claims about AdamW on the CPU: the scalars are the decimals rounded once, the step is torch's within roundings, bad input is refused."""

from decimal import Decimal
from fractions import Fraction

import pytest
import torch

from kernels.exact.digests import digest
from kernels.exact.optimizer import AdamW, adamw_step_ref, round_to_f32
from kernels.exact.philox import philox_bell

FP32 = torch.float32
U = 2.0**-24
# Roundings of one step, in units of U times the magnitudes added up. m': beta1, 1 - beta1, the product, the fma: 2 on either addend.
# v': 4 likewise. u: m' / c1 2 more and c1 1, v' / c2 2 more, all of v halved by the root (3), the root, eps, their sum, the quotient 4: 12
# on |u| plus what m' carries. p': 1 - lr decay and its product 2, lr 1, the fma 1.
UNITS = {"m": 3, "v": 4, "u": 16, "p": 4}


def moments(steps: int, **kw: float) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, AdamW]:
    config = AdamW(**kw)
    p, m, v = philox_bell((500,), 1), torch.zeros(500), torch.zeros(500)
    grads = [philox_bell((500,), 2 + i, scale_log2=-3) for i in range(steps)]
    for i, g in enumerate(grads):
        p, m, v = adamw_step_ref(p, g, m, v, step=i + 1, config=config)
    return grads, p, m, v, config


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_are_torch_s_in_float64_within_the_roundings(steps: int) -> None:
    grads, p, m, v, config = moments(steps, lr=1e-2, weight_decay=0.1)
    want = philox_bell((500,), 1).double().requires_grad_()
    peer = torch.optim.AdamW([want], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay)
    size_m, size_p = torch.zeros(500, dtype=torch.float64), want.detach().abs()
    for g in grads:
        want.grad = g.double()
        peer.step()
        size_m = 0.9 * size_m + 0.1 * g.double().abs()
        size_p = size_p.maximum(want.detach().abs())
    state = peer.state[want]
    # |m| may cancel, so its error is measured by the size of what was added; as is u's, whose denominator is no smaller than size_m / 10
    assert bool(((m.double() - state["exp_avg"]).abs() <= steps * UNITS["m"] * U * size_m).all())
    assert bool(((v.double() - state["exp_avg_sq"]).abs() <= steps * UNITS["v"] * U * state["exp_avg_sq"]).all())
    root = (state["exp_avg_sq"] / (1 - 0.999**steps)).sqrt()
    size_u = (size_m / (1 - 0.9**steps) / root).clamp_min(1)
    bound = steps * U * (UNITS["p"] * size_p + config.lr * (UNITS["u"] + steps * UNITS["m"]) * size_u)
    assert bool(((p.double() - want.detach()).abs() <= bound).all())


def test_scalars_are_the_written_decimals_rounded_once() -> None:
    config = AdamW(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3, 100, 10_000):
        c = config.constants(step)
        exact = {"beta1": Fraction(9, 10), "rest1": Fraction(1, 10), "correction1": 1 - Fraction(9, 10) ** step, "beta2": Fraction(95, 100),
                 "rest2": Fraction(5, 100), "correction2": 1 - Fraction(95, 100) ** step, "lr": Fraction(3, 10_000), "eps": Fraction(1, 10**8),
                 "keep": 1 - Fraction(3, 100_000)}  # fmt: skip
        for name, value in exact.items():
            got = torch.tensor(getattr(c, name), dtype=torch.float64)
            assert float(got.float()) == float(got), f"{name} is no float32"
            gaps = [abs(Fraction(float(torch.nextafter(got.float(), torch.tensor(end)))) - value) for end in (-torch.inf, torch.inf)]
            assert abs(Fraction(float(got)) - value) <= min(gaps), (name, step)
    assert config.constants(10**6).correction2 == 1.0
    assert config.constants(1, decay=False).keep == 1.0


def test_rounding_to_float32_does_not_pass_through_float64() -> None:
    middle = Decimal(1) + Decimal(2) ** -24  # a tie of float32: to even, which is 1
    assert round_to_f32(middle) == 1.0
    assert round_to_f32(middle + Decimal(2) ** -80) == 1.0 + 2.0**-23  # float64 would lose the last bit and round to 1
    assert round_to_f32(Decimal(1) + 3 * Decimal(2) ** -24) == 1.0 + 2.0**-22
    assert round_to_f32(Decimal(0)) == 0.0


def test_the_first_step_moves_by_lr_whatever_the_gradient_s_size() -> None:
    g = torch.tensor([1e-3, 1.0, 1e10, -1e-3])
    p, _, _ = adamw_step_ref(torch.zeros(4), g, torch.zeros(4), torch.zeros(4), step=1, config=AdamW(lr=0.125, weight_decay=0.0))
    # u = 1 up to UNITS, and eps is 1e-5 of the smallest gradient
    assert bool(((p + 0.125 * g.sign()).abs() <= 0.125 * (1e-5 + UNITS["u"] * U)).all())


def test_subnormals_zeros_and_what_is_not_finite() -> None:
    g = torch.tensor([0.0, -0.0, 2.0**-140, torch.inf, torch.nan])
    p, m, v = adamw_step_ref(torch.full((5,), 2.0**-130), g, torch.zeros(5), torch.zeros(5), step=1, config=AdamW(weight_decay=0.0))
    assert p[:2].tolist() == [2.0**-130] * 2 and float(m[2]) > 0 and float(v[2]) == 0
    assert torch.isnan(p[3:]).all() and float(m[3]) == torch.inf


def test_empty_strided_and_16_bit_gradients_are_what_their_values_say() -> None:
    config, (p, m, v) = AdamW(), (philox_bell((6, 4), s) for s in (1, 2, 3))
    v = v.abs()
    g = philox_bell((6, 4), 4, torch.bfloat16)
    want = [digest(x) for x in adamw_step_ref(p, g.float(), m, v, step=3, config=config)]
    assert [digest(x) for x in adamw_step_ref(p, g, m, v, step=3, config=config)] == want
    assert [digest(x) for x in adamw_step_ref(p.T.contiguous().T, g, m, v, step=3, config=config)] == want
    assert [x.numel() for x in adamw_step_ref(*(torch.zeros(0) for _ in range(4)), step=1, config=config)] == [0, 0, 0]


@pytest.mark.parametrize("wrong, text", [
    (dict(beta1=1.0), "betas lie"), (dict(beta2=-0.1), "betas lie"), (dict(lr=0.0), "lr is positive"), (dict(lr=float("nan")), "lr is positive"),
    (dict(lr=10.0, weight_decay=1.0), "lr is positive"), (dict(eps=0.0), "eps keeps"), (dict(eps=1e-60), "eps keeps"),
])  # fmt: skip
def test_hyperparameters_without_a_meaning_are_refused(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AdamW(**wrong)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    p = torch.zeros(3)
    for args, text in (((p, torch.zeros(4), p, p), "one shape"), ((p.bfloat16(), p, p, p), "float32"), ((p, p.double(), p, p), "float32"), ((p, p.int(), p, p), "float32")):
        with pytest.raises(ValueError, match=text):
            adamw_step_ref(*args, step=1, config=AdamW())
    with pytest.raises(ValueError, match="count from 1"):
        adamw_step_ref(p, p, p, p, step=0, config=AdamW())
