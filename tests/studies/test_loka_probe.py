"""The probe sees the operands of every site, changes nothing, and reads every n-th step only."""

import pytest
import torch
from torch import nn

from kernels.fp8.emulate import product_ref
from kernels.fp8.recipes import gemm
from studies.loka.probing.predict import predict
from studies.loka.probing.probe import Probe, bytes_read, probe
from studies.loka.probing.readings import read_readings, write_readings
from studies.loka.site import Site
from studies.models.recommenders import MODELS, PUBLISHED

BATCH = 32


class Tiny(nn.Module):
    """A layer, a product of two activations, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(24, 16, generator=generator) / 4)
        self.head = nn.Linear(9, 1)

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        y_BTN = torch.relu(x_BTK @ self.w.T)
        return self.head((y_BTN @ y_BTN.mT).flatten(1)).flatten()


def bce(logit: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logit, target)


def batches(count: int) -> list:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(BATCH, 3, 16, generator=generator), torch.randint(0, 2, (BATCH,), generator=generator).float()) for _ in range(count)]


def test_the_operands_are_those_of_the_model():
    model = Tiny()
    (x, target), = batches(1)  # fmt: skip
    found = probe(model, [(x, target)], loss=bce, rows=BATCH * 3).sites
    assert [(s.site.op, s.site.m, s.site.n, s.site.k) for s in found.values()] == [("linear", 96, 24, 16), ("bmm", 3, 3, 24), ("linear", 32, 1, 9)]
    layer, product, _ = found.values()
    hidden = (x.reshape(-1, 16) @ model.w.T).detach().requires_grad_()
    y = torch.relu(hidden).view(BATCH, 3, 24)
    bce(model.head((y @ y.mT).flatten(1)).flatten(), target).backward()
    for kept, rows in ((layer.x, x.reshape(-1, 16)), (layer.w, model.w.detach()), (layer.dy, hidden.grad)):
        assert torch.equal(kept.reservoir.items[:, 0], rows[kept.reservoir.index]) and len(kept.reservoir) == len(rows)
    assert torch.equal(product.x.reservoir.items, y.detach()[product.x.reservoir.index])
    assert float(product.w.amax) == float(y.detach().max()) and product.dy.rows == BATCH * 3


def test_probing_leaves_results_gradients_and_parameters_as_they_were():
    model, (x, target) = Tiny(), batches(1)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    watch = Probe(model, x, every=1)
    output = watch(x)
    assert torch.equal(output, model(x))
    bce(output, target).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    bce(model(x), target).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    probe(model, batches(2), loss=bce)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_every_nth_step_is_read_and_the_plain_model_runs_in_between():
    model, calls = Tiny(), []

    def plain(x):
        calls.append(1)
        return model(x)

    watch = Probe(model, batches(1)[0][0], every=4, plain=plain)
    for x, target in batches(10):
        bce(watch(x), target).backward()
    assert len(calls) == 7
    assert all(r.x.steps.tolist() == r.dy.steps.tolist() == [0, 4, 8] for r in watch.readings.sites.values())
    assert watch.readings.sites[":linear"].x.rows == 3 * BATCH * 3


def test_both_graphs_may_be_compiled():
    model, (x, target) = Tiny(), batches(1)[0]
    eager, compiled = Probe(model, x, every=2), Probe(model, x, every=2, plain=torch.compile(model, backend="eager"))
    compiled.watched = torch.compile(compiled.watched, backend="eager")
    for _ in range(3):
        for watch in (eager, compiled):
            bce(watch(x), target).backward()
    for name, reading in eager.readings.sites.items():
        again = compiled.readings.sites[name]
        assert again.dy.steps.tolist() == [0, 2] and all(torch.equal(getattr(reading, o).exponents, getattr(again, o).exponents) for o in ("x", "w", "dy"))


def test_a_step_without_its_backward_is_not_kept():
    watch = Probe(Tiny(), batches(1)[0][0], every=1)
    for i, (x, target) in enumerate(batches(3)):
        loss = bce(watch(x), target)
        if i != 1:
            loss.backward()
    assert watch.readings.sites[":linear"].x.steps.tolist() == [0, 2]


def test_without_a_loss_the_forward_pass_alone_is_seen():
    readings = probe(Tiny(), [x for x, _ in batches(6)], every=2)
    assert all(r.dy is None and r.passes == ("forward",) and r.x.steps.tolist() == [0, 2, 4] for r in readings.sites.values())


def test_the_rows_of_a_weight_are_those_of_now_and_its_amax_that_of_each_step():
    model = Tiny()
    watch, optimizer = Probe(model, batches(1)[0][0], every=2), torch.optim.SGD(model.parameters(), lr=0.5)
    amax = []
    for x, target in batches(5):
        optimizer.zero_grad()
        bce(watch(x), target).backward()
        amax.append(float(model.w.detach().abs().max()))
        optimizer.step()
    found = watch.readings.sites[":linear"].w
    assert found.amax.tolist() == amax[::2] and len(set(amax)) == 5
    assert len(found.reservoir) == 24 and torch.equal(found.reservoir.items[:, 0], model.w.detach()[found.reservoir.index])


@pytest.mark.parametrize("name", MODELS)  # bare parameters, crosses, factorisation machines, attention: whatever trace finds
def test_every_site_of_the_recommenders_is_read_and_predicted(name, tmp_path):
    model = MODELS[name](PUBLISHED[name], "small", seed=1)
    data = [(model.example(batch=BATCH, seed=i), torch.full((BATCH,), 0.3)) for i in range(2)]
    readings = probe(model, data, loss=bce, rows=64)
    watch = Probe(model, *data[0][0])
    assert set(readings.sites) == {s.name for s in watch.registry.sites} and readings.unsupported == dict(watch.registry.unsupported)
    for reading in readings.sites.values():
        for which in reading.passes:
            assert torch.isfinite(predict(reading, which, gemm("rowwise-p2")).expected_db).all()
    write_readings(readings, tmp_path / "r.npz")
    assert read_readings(tmp_path / "r.npz").sites.keys() == readings.sites.keys()


def test_a_prediction_from_readings_is_that_of_the_layers_own_product():
    """The median over rows of one layer, 0.5 dB: 96 rows of a product with 24 outputs vary by 1.3 dB each, their median by 0.2."""
    (x, target), model = batches(1)[0], Tiny()
    reading = probe(model, [(x, target)], loss=bce).sites[":linear"]
    a, w = x.reshape(-1, 16), model.w.detach()
    exact, found = a.double() @ w.double().T, product_ref(a, w, gemm("rowwise"))
    true = 10 * torch.log10(exact.square().sum(1) / (found - exact).square().sum(1))
    assert float(predict(reading, "forward", gemm("rowwise")).row_db.median()) == pytest.approx(float(true.median()), abs=0.5)


def test_the_bytes_of_a_probed_step_by_hand():
    layer = Site(name="a", op="linear", batch=1, m=100, n=20, k=30)
    product = Site(name="b", op="bmm", batch=10, m=4, n=5, k=6)
    assert bytes_read([layer, product]) == 2 * 3 * (100 * 30 + 20 * 30 + 100 * 20) + 2 * 10 * (24 + 30 + 20)
    long = Site(name="c", op="linear", batch=1, m=2**17, n=20, k=30)
    assert bytes_read([long], backward=False) == 2 * (2 * 2**17 * 30 + 3 * 20 * 30)
    assert bytes_read([layer], backward=False) == 2 * 3 * (100 * 30 + 20 * 30)


def test_what_is_no_probe_is_refused():
    for call, rule in (
        (lambda: Probe(Tiny(), batches(1)[0][0], every=0), "every n-th step"),
        (lambda: Probe(Tiny(), batches(1)[0][0], rows=0), "rows >= 1"),
        (lambda: probe(Tiny(), []), "at least one batch"),
    ):
        with pytest.raises(ValueError, match=rule):
            call()
