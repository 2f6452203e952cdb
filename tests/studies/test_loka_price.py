"""Prices are the second order of the loss, exactly where the model is linear behind a site, and flips do what a plan of one product does."""

import math

import pytest
import torch
from torch import nn

from kernels.fp8.quantise import quantise_ref
from kernels.fp8.recipes import gemm
from studies.loka.pricing.flip import Change, flips, in_recipe, measured_change
from studies.loka.pricing.metrics import losses
from studies.loka.pricing.price import Tap, backward_product, noise_to_signal, price, relative_errors, tap
from studies.loka.site import Plan
from studies.loka.sites.apply import apply, replacement, rewrite
from studies.loka.sites.registry import trace

B = 512
# float32 sums of at most 64 products on either side, in other orders: 64 roundings of 2^-24, as a share of errors that are 2^-5 of the outputs.
ROUNDING = 64 * 2**-24 * 2**5
# Logits move by about 1% of their spread, so that third-order terms are about 1% of the second-order ones; a factor of 5 for tails.
THIRD_ORDER = 0.05
DRAWS, SIGMAS = 1500, 4.5
# A squared rounding error varies by sqrt(0.8) about its mean, and the smallest weight here has 384 elements, half the noise: 5% / 2. Few of them carry
# most of it, three times as much; three of those.
VARIANCE = 0.25


class Small(nn.Module):
    """A linear layer with two rows an example, a product of two activations, a linear layer of its own for each of two tokens, a nonlinearity and a head."""

    def __init__(self, linear: bool = False) -> None:
        super().__init__()
        self.rows, self.hidden, self.head = nn.Linear(24, 16), nn.Linear(16 * 2, 32), nn.Linear(32, 1)
        self.tokens = nn.Parameter(torch.empty(2, 16, 16))
        self.act = nn.Identity() if linear else nn.SiLU()
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)

    def forward(self, x_BRK: torch.Tensor) -> torch.Tensor:
        y_BRN = self.rows(x_BRK)
        mixed = torch.matmul(x_BRK[:, :, :2].transpose(1, 2), y_BRN) + y_BRN  # [B, 2, N]
        tokens_TBN = torch.matmul(mixed.transpose(0, 1), self.tokens)  # examples are not the first axis
        return self.head(self.act(self.hidden(tokens_TBN.transpose(0, 1).flatten(1)))).flatten()


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(B, 2, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[False, True], ids=["nonlinear", "linear"])
def case(request, inputs):
    registry = trace(Small(linear=request.param), inputs)
    return request.param, registry, tap(registry, (inputs,))


SITES = ("rows:linear", ":bmm", ":linear", "hidden:linear", "head:linear")


def test_a_tap_sees_every_site_and_the_logits_of_the_model(case, inputs):
    _, registry, taps = case
    assert set(taps.sites) == set(SITES)
    assert torch.equal(taps.logits, registry.root(inputs))
    assert torch.equal(taps.sites["head:linear"].jacobian, torch.ones(B, 1))
    assert taps.sites["rows:linear"].jacobian.shape == taps.sites["rows:linear"].y.shape == (B, 2, 16)


@pytest.mark.parametrize("site", SITES)
def test_a_jacobian_foretells_a_small_change_of_an_output(case, inputs, site):
    """Along a random direction of y, by finite differences in float64."""
    linear, _, _ = case
    x = inputs[:8].double()
    registry = trace(Small(linear).double(), x)
    found = tap(registry, (x,)).sites[site]
    direction = torch.randn(found.y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def moved(size):
        def multiply(a, w, bias):
            y = a @ w.mT + size * direction
            return y if bias is None else y + bias

        return rewrite(registry, [replacement(registry, site, multiply)])(x)

    slope = (moved(1e-4) - moved(-1e-4)) / 2e-4
    assert torch.allclose(slope, (found.jacobian * direction).movedim(1 if site == ":linear" else 0, 0).reshape(8, -1).sum(1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("site", SITES)
def test_a_price_is_the_second_order_of_what_a_flip_does(case, inputs, site):
    """Exactly where all behind the site is linear; there the logit moves by J e. Else up to the next order."""
    linear, registry, taps = case
    (_, _, base), (_, _, flipped) = flips(registry, (inputs,), {site: ["e5m2-tensorwise"]})
    shift, p = (flipped - base).double(), torch.sigmoid(base.double())
    second = float((0.5 * p * (1 - p) * shift.square()).mean())
    found = price(taps.sites[site], gemm("e5m2-tensorwise"), taps.logits)
    exact = linear or site == "head:linear"
    assert found.loss == pytest.approx(second, rel=ROUNDING if exact else THIRD_ORDER)
    assert found.error == pytest.approx(float((0.5 * p * (1 - p) * shift.square()).std()) / math.sqrt(B), rel=ROUNDING if exact else 2 * THIRD_ORDER)


@pytest.mark.parametrize("site", SITES)
def test_a_price_is_the_loss_that_a_calibrated_model_loses(case, inputs, site):
    _, registry, taps = case
    (_, _, base), (_, _, flipped) = flips(registry, (inputs,), {site: ["tensorwise"]})
    truth = torch.sigmoid(base.double())
    measured = measured_change(losses(flipped, truth), losses(base, truth))
    assert price(taps.sites[site], gemm("tensorwise"), taps.logits).loss == pytest.approx(measured.value, rel=THIRD_ORDER)


@pytest.mark.parametrize("site", SITES)
def test_the_price_by_operands_is_the_mean_over_roundings_that_are_independent(case, site):
    """Each element's error gets a coin's sign, dx and dw to first order: the mean over draws of s^2 is what is reckoned from variances."""
    _, _, taps = case
    whole = taps.sites[site]
    examples = 6
    cut = [t[:, :examples] if site == ":linear" else t[:examples] for t in (whole.x, whole.y, whole.jacobian)]
    few = Tap(x=cut[0], w=whole.w[:examples] if site == ":bmm" else whole.w, y=cut[1], jacobian=cut[2])
    recipe = gemm("blockwise")

    x, w, j = few.x.double(), few.w.double(), few.jacobian.double()
    flat = few.x if w.ndim > 2 else few.x.reshape(-1, x.shape[-1])
    dx = (quantise_ref(flat, recipe.a).dequantise().double().reshape(x.shape) - x).abs()
    dw = (quantise_ref(few.w, recipe.b).dequantise().double() - w).abs()
    generator = torch.Generator().manual_seed(3)

    def coins(t):
        return t * (torch.randint(2, (DRAWS, *t.shape), generator=generator) * 2 - 1)

    axis = 1 if site == ":linear" else 0
    dws = coins(dw).reshape(DRAWS, *([1] * (x.ndim - w.ndim)), *w.shape)
    moved = j * (coins(dx) @ w.mT + x @ dws.mT)
    draws = moved.movedim(axis + 1, 1).reshape(DRAWS, examples, -1).sum(2).square()
    p = torch.sigmoid(taps.logits[:examples].double())
    each = (0.5 * p * (1 - p) * draws).mean(1)
    found = price(few, recipe, taps.logits[:examples], "operands").loss
    assert abs(found - float(each.mean())) < SIGMAS * float(each.std()) / math.sqrt(DRAWS)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise-p2", "blockwise", "e5m2-tensorwise"])
@pytest.mark.parametrize("site", SITES[:4])  # the head's 32 weights are one draw for all examples: no mean to compare with
def test_expected_squares_of_outputs_stand_for_measured_ones(case, site, recipe):
    """A mean over 512 examples and their outputs; within VARIANCE of what the emulated errors give, and no cast made."""
    _, _, taps = case
    expected, found = (price(taps.sites[site], gemm(recipe), taps.logits, how).loss for how in ("outputs", "variances"))
    assert found == pytest.approx(expected, rel=VARIANCE)


def test_outputs_taken_as_independent_miss_what_they_share():
    """y_j = x w_j, w_j = 1, with K = 1: every output has the same relative error, so s is N times one of them and s^2 N times the sum."""
    x = torch.linspace(1.0, 1.9, 64)[:, None]
    site = Tap(x=x, w=torch.ones(16, 1), y=x.expand(64, 16), jacobian=torch.ones(64, 16))
    shared, apart = (price(site, gemm("tensorwise"), torch.zeros(64), how).loss for how in ("error", "outputs"))
    assert shared == pytest.approx(16 * apart, rel=1e-6)
    assert price(site, gemm("tensorwise"), torch.zeros(64), "operands").loss == pytest.approx(shared, rel=1e-6)


def test_the_rounding_of_a_weight_adds_up_over_an_example_s_rows():
    """w = (17, 448) at scale 1: 17 becomes 16. Two rows of 1 read it, so the logit moves by 2 and its square is 4; x = 1 is exact."""
    w, x = torch.tensor([[17.0], [448.0]]), torch.ones(8, 2, 1)
    site = Tap(x=x, w=w, y=x @ w.mT, jacobian=torch.tensor([1.0, 0.0]).expand(8, 2, 2))
    for how in ("error", "operands"):
        assert price(site, gemm("tensorwise"), torch.zeros(8), how).loss == pytest.approx(0.5 * 0.25 * 4, rel=1e-6)


def test_noise_and_relative_errors_by_hand():
    site = Tap(x=torch.tensor([[448.0, 0.0], [17.0, 0.0]]), w=torch.tensor([[448.0, 0.0]]), y=torch.tensor([[448.0**2], [17.0 * 448]]), jacobian=torch.ones(2, 1))
    # in tensorwise E4M3 at scale 1, 448 is exact and 17 becomes 16 (steps of 2, ties to even)
    assert noise_to_signal(site, gemm("tensorwise")) == pytest.approx(448.0**2 / (448.0**4 + (17 * 448.0) ** 2), rel=1e-6)
    mean_of_ratios, ratio_of_sums = relative_errors(site, gemm("tensorwise"))
    assert mean_of_ratios == pytest.approx((1 / 17) / 2, rel=1e-6) and ratio_of_sums == pytest.approx(1 / (448 + 17), rel=1e-6)


def test_a_flip_gives_the_bits_of_a_plan_of_that_product_alone(case, inputs):
    linear, registry, _ = case
    for site, recipe, logits in flips(registry, (inputs,), {s: ["rowwise", "blockwise"] for s in SITES}):
        if site:
            planned = apply(Small(linear), Plan(recipes={site: {"forward": recipe}}), inputs)
            with torch.no_grad():
                assert torch.equal(logits, planned(inputs)), (site, recipe)


def test_a_change_below_two_standard_errors_is_excluded():
    base = torch.zeros(4)
    found = measured_change(torch.tensor([1.0, 3.0, 1.0, 3.0]), base)
    assert found.value == 2.0 and found.error == pytest.approx(math.sqrt(4 / 3) / 2) and not found.excluded
    assert Change(value=1.0, error=0.51).excluded and Change(value=-1.0, error=0.49).excluded is False


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda r, t: price(t.sites[":bmm"], gemm("rowwise"), t.logits, "guess"), "a price is reckoned by"),
        (lambda r, t: price(t.sites[":bmm"], gemm("tf32"), t.logits, "operands"), "use how='error'"),
        (lambda r, t: price(t.sites[":bmm"], gemm("rowwise"), t.logits[:7]), "an axis of the examples"),
        (lambda r, t: list(flips(r, (torch.zeros(4, 2, 24),), {"heads:linear": ["rowwise"]})), "a site is one of"),
        (lambda r, t: list(flips(r, (torch.zeros(4, 2, 24),), {"head:linear": ["int8"]})), "recipe is one of"),
        (lambda r, t: measured_change(torch.zeros(3), torch.zeros(4)), "same two examples"),
    ],
)
def test_what_cannot_be_priced_is_refused(inputs, call, rule):
    registry = trace(Small(), inputs)
    with pytest.raises(ValueError, match=rule):
        call(registry, tap(registry, (inputs,)))


def test_a_model_without_one_logit_an_example_is_refused():
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    with pytest.raises(ValueError, match="one logit an example"):
        tap(trace(model, x), (x,))


def test_an_unquantised_recipe_has_a_price_too(case):
    """bf16 rounds operands at 2^-9: far below FP8, not zero."""
    _, _, taps = case
    fine, coarse = (price(taps.sites["hidden:linear"], gemm(r), taps.logits).loss for r in ("bf16", "rowwise"))
    assert 0 < fine < coarse / 100
    assert in_recipe(gemm("fp32"))(torch.ones(2, 3), torch.ones(4, 3), None).tolist() == [[3.0] * 4] * 2


@pytest.mark.parametrize("site", SITES)
def test_backward_products_give_the_gradients_of_autograd(case, inputs, site):
    """dgrad and wgrad of a mean log-loss: of parameters where the site has one, of the second activation's transpose where not."""
    _, registry, taps = case
    y = torch.randint(2, (B,), generator=torch.Generator().manual_seed(5)).float()
    dlogits = (torch.sigmoid(taps.logits) - y) / B
    at = taps.sites[site]
    wgrad, dgrad = (backward_product(at, dlogits, which).y for which in ("wgrad", "dgrad"))
    if site in (":bmm", ":linear"):
        assert wgrad.shape == at.w.shape and dgrad.shape == at.x.shape
        if site == ":linear":
            loss = torch.nn.functional.binary_cross_entropy_with_logits(registry.root(inputs), y)
            (expected,) = torch.autograd.grad(loss, [registry.root.tokens])
            assert torch.allclose(wgrad, expected.mT, rtol=1e-4, atol=1e-7)
        return
    loss = torch.nn.functional.binary_cross_entropy_with_logits(registry.root(inputs), y)
    (expected,) = torch.autograd.grad(loss, [registry.root.get_submodule(site.split(":")[0]).weight])
    assert torch.allclose(wgrad, expected, rtol=1e-4, atol=1e-7)  # float32 sums over 1,024 rows
    dy = at.jacobian.reshape(B, -1) * dlogits[:, None]
    assert torch.allclose(dgrad, dy.reshape(-1, at.w.shape[0]) @ at.w, rtol=1e-5, atol=1e-8)
