"""Prices of gradients: the formula against a simulated run, errors and bias against gradients computed by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels.fp8.autograd import product
from kernels.fp8.recipes import gemm
from studies.loka.pricing.gradient_price import adam_preconditioner, gradient_errors
from studies.loka.sites.registry import trace

# The stationary law holds to first order in rate x the largest eigenvalue of P H (0.02 here); 300 chains of 16 coordinates, 20 looks far apart
# (relative error 1 / sqrt(300 x 20 x 8) = 0.5%), with a factor of 4.
STATIONARY = 0.02 + 4 * 0.005
ROUNDING = 2**-18  # float32 gradients, summed over 64 rows


def test_the_stationary_loss_of_noisy_updates_is_a_quarter_of_rate_times_weighted_noise():
    """The formula behind every price here, on a quadratic with a diagonal preconditioner that does not commute with H."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    hessian, p, s = a @ a.mT / 16 + 0.5 * torch.eye(16), torch.linspace(0.5, 1.5, 16), torch.linspace(0.2, 2.0, 16)
    rate = 0.02 / float(torch.linalg.eigvals(torch.diag(p.double()) @ hessian).abs().max())
    t, total, looks = torch.zeros(300, 16, dtype=torch.float64), 0.0, 0
    for step in range(3000):
        noise = torch.randn(300, 16, generator=generator, dtype=torch.float64) * s.sqrt()
        t = t - rate * p * (t @ hessian + noise)
        if step >= 1000 and step % 100 == 0:
            total, looks = total + float((0.5 * (t @ hessian) * t).sum(1).mean()), looks + 1
    assert total / looks == pytest.approx(rate / 4 * float((p * s).sum()), rel=STATIONARY)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 24, bias=False), nn.Linear(24, 1, bias=False)
        generator = torch.Generator().manual_seed(1)
        for q in self.parameters():
            nn.init.normal_(q, std=q.shape[-1] ** -0.5, generator=generator)

    def forward(self, x):
        return self.second(F.silu(self.first(x))).flatten()


def loss(logits, batch):
    return F.binary_cross_entropy_with_logits(logits, batch[1])


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(64, 32, generator=generator), torch.randint(2, (64,), generator=generator).float()) for _ in range(4)]
    model = Two()
    return model, trace(model, batches[0][0]), batches


def by_hand(model, batch, which, recipe):
    """((dw first, dw second) in float32, the same with one product of the first layer in `recipe`): the chain rule written out."""
    x, y = batch
    hidden = x @ model.first.weight.mT
    active = F.silu(hidden)
    dz = (torch.sigmoid((active @ model.second.weight.mT).flatten()) - y) / len(y)
    d_active = dz[:, None] @ model.second.weight
    s = torch.sigmoid(hidden)
    d_hidden = d_active * s * (1 + hidden * (1 - s))
    plain = (d_hidden.mT @ x, dz[None] @ active)
    if which == "wgrad":
        return plain, (product(d_hidden.mT.contiguous(), x.mT.contiguous(), gemm(recipe)), plain[1])
    d_active = product(dz[:, None], model.second.weight.mT.contiguous(), gemm(recipe))  # of the second layer
    return plain, ((d_active * s * (1 + hidden * (1 - s))).mT @ x, plain[1])


@pytest.mark.parametrize(("site", "which"), [("first:linear", "wgrad"), ("second:linear", "dgrad")])
def test_errors_and_bias_are_those_of_gradients_by_hand(case, site, which):
    model, registry, batches = case
    recipe = "e5m2-tensorwise"
    (found,) = gradient_errors(registry, loss, batches, [(site, which, recipe)])
    with torch.no_grad():
        pairs = [by_hand(model, b, which, recipe) for b in batches]
    flat = [(torch.cat([g.flatten() for g in plain]).double(), torch.cat([g.flatten() for g in rounded]).double()) for plain, rounded in pairs]
    size = sum(float(g @ g) for g, _ in flat) / 4
    noise = sum(float((r - g) @ (r - g)) for g, r in flat) / 4
    assert found.noise == pytest.approx(noise, rel=ROUNDING * 32) and found.relative == pytest.approx(math.sqrt(noise / size), rel=ROUNDING * 32)
    assert found.bias == pytest.approx(sum(float((r - g) @ g) for g, r in flat) / 4 / size, abs=ROUNDING)
    assert found.spread == pytest.approx(float(torch.stack([g for g, _ in flat]).var(dim=0).sum()), rel=ROUNDING * 32)


def test_a_coarser_format_costs_more_and_the_price_is_linear_in_the_rate(case):
    _, registry, batches = case
    fine, coarse = gradient_errors(registry, loss, batches, [("first:linear", "wgrad", r) for r in ("rowwise", "rowwise-grad")])
    assert 0 < fine.relative < coarse.relative < 0.1
    assert coarse.price(2e-3) == pytest.approx(2 * coarse.price(1e-3)) and fine.noise < coarse.noise
    assert fine.price(1e-3) == pytest.approx(1e-3 / 4 * (fine.noise + abs(fine.bias) * fine.spread))


def test_gradients_that_are_flushed_are_biased_by_what_is_lost(case):
    """Row 0 has a gradient 10^9 times the others' and an input of zeros: it sets the tensor's scale and gives nothing, so all of dw is lost."""
    _, registry, batches = case
    zeroed = [(x.index_fill(0, torch.tensor(0), 0.0), y) for x, y in batches]

    def skewed(logits, batch):
        return (logits * torch.full((64,), 1e-9).index_fill(0, torch.tensor(0), 1.0)).sum()

    found, kept = gradient_errors(registry, skewed, zeroed, [("first:linear", "wgrad", "tensorwise"), ("first:linear", "wgrad", "rowwise-p2")])
    first, both = 0.0, 0.0
    for batch in zeroed:
        one, two = torch.autograd.grad(skewed(registry.root(batch[0]), batch), list(registry.root.parameters()))
        first, both = first + float(one.double().square().sum()), both + float(one.double().square().sum() + two.double().square().sum())
    assert found.bias == pytest.approx(-first / both, rel=ROUNDING) and found.relative == pytest.approx(math.sqrt(first / both), rel=ROUNDING)
    assert found.bias < -0.1 and kept.bias == pytest.approx(found.bias, rel=ROUNDING)  # wgrad's rows are features, so a row's scale does not help


def test_the_preconditioner_is_adam_s_and_weighs_each_parameter(case):
    model, registry, batches = case
    adam = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-8)
    with pytest.raises(ValueError, match="train first"):
        adam_preconditioner(adam)
    loss(model(batches[0][0]), batches[0]).backward()
    adam.step()
    for p, weight in adam_preconditioner(adam).items():
        assert torch.allclose(weight, 1 / (p.grad.abs() + 1e-8), rtol=1e-5)  # after one step v is g^2
    (plain,) = gradient_errors(registry, loss, batches, [("first:linear", "wgrad", "rowwise")])
    (weighed,) = gradient_errors(registry, loss, batches, [("first:linear", "wgrad", "rowwise")], {p: 3.0 * torch.ones_like(p) for p in registry.root.parameters()})
    assert weighed.noise == pytest.approx(3 * plain.noise, rel=1e-9) and weighed.spread == pytest.approx(3 * plain.spread, rel=1e-9)
    assert weighed.relative == plain.relative and set(model.parameters()) == set(registry.root.parameters())


@pytest.mark.parametrize(
    ("product_", "count", "rule"),
    [(("first:linear", "forward", "rowwise"), 4, "studies.loka.pricing.price"), (("third:linear", "wgrad", "rowwise"), 4, "a site is one of"), (("first:linear", "wgrad", "rowwise"), 1, "two batches")],
)
def test_what_has_no_gradient_error_is_refused(case, product_, count, rule):
    _, registry, batches = case
    with pytest.raises(ValueError, match=rule):
        gradient_errors(registry, loss, batches[:count], [product_])
