"""Training arms and their verdicts: runs repeat and resume, arms differ in their products alone, and neutrality is a test that can fail."""

import json
import math
import time

import numpy as np
import pytest
import torch

from kernels.fp8.recipes import RECIPES
from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted
from studies.loka.data.table import Table
from studies.loka.learning import quality as cells
from studies.loka.learning.tost import MARGIN, MOST_PAIRS, PAIRS_FACTOR, neutrality, pairs_needed, relative_changes
from studies.loka.learning.training import Learner, Training, in_order, mods_named, perturb, train
from studies.loka.pricing.metrics import losses
from studies.loka.site import Site
from studies.loka.sites.apply import apply
from studies.loka.sites.registry import trace
from studies.models.recommenders import LOKA_MODS, PUBLISHED, Mods
from suite.measure import Context, Pause
from suite.stats import Equivalence

# What is compared and how far it may differ.
# SIMULATIONS verdicts have a share with a standard error of at most sqrt(.25 / 1000) = 0.016 (0.0069 for a share of 0.05); four of them, and for
#   the power 0.03 more, since n is from the normal law and the test from Student's t with n - 1 = 34 degrees of freedom.
# FP32: a float32 expression of three operations against the same in float64.
# LEARNT: the share of what can be learnt (base rate's entropy less Bayes' loss) that 60 steps of 256 rows must reach at least; a model that sees
#   no feature has 0.
# COARSE: how many times noisier than the naive arm's logits the planted-bad arm's are. E5M2 rounds to 2 bits where E4M3 rounds to 3: twice the error of
#   one operand of two, so the root of (4 + 1) / (1 + 1). The noise of weights is common to all rows of one draw: a quarter either way.
SIMULATIONS = 1000
LEVEL_SLACK, POWER_SLACK = 4 * 0.0069, 4 * 0.016 + 0.03
FP32 = 4 * 2.0**-24
LEARNT = 0.1
COARSE, COARSE_SLACK = 2.5**0.5, 1.25

TINY = Training(steps=12, batch=64, table_rows=50)
DATA = Planted(seed=3, largest=500)
EQUAL = {seed: 0.5 for seed in range(8)}


def planted(i: int) -> Batch:
    return DATA.batch(i, 64)


def context(tmp_path, **more) -> Context:
    return Context(device="cpu", state_dir=tmp_path, **more)


def shifted(change: float, spread: float, pairs: int, seed: int = 0) -> dict[int, float]:
    rng = np.random.default_rng(seed)
    return {i: 0.5 * (1 + change + spread * z) for i, z in enumerate(rng.standard_normal(pairs))}


# ---- neutrality ------------------------------------------------------------------------------------------------------------------


def test_the_number_of_pairs_is_the_spread_over_the_margin_squared():
    assert pairs_needed(0.0) == pairs_needed(MARGIN / 2) == 5
    assert pairs_needed(MARGIN) == 9 and pairs_needed(2 * MARGIN) == math.ceil(4 * PAIRS_FACTOR)
    for wrong in ((math.nan, MARGIN), (-1.0, MARGIN), (0.1, 0.0)):
        with pytest.raises(ValueError, match="take it from a pilot"):
            pairs_needed(*wrong)


@pytest.mark.parametrize(("change", "low", "high"), [(0.0, 0.8 - POWER_SLACK, 0.8 + POWER_SLACK), (MARGIN, 0.0, 0.05 + LEVEL_SLACK)], ids=["equal", "at the margin"])
def test_an_equal_arm_passes_four_times_in_five_and_one_at_the_margin_once_in_twenty(change, low, high):
    spread = 2 * MARGIN
    n = pairs_needed(spread)
    base = {i: 0.5 for i in range(n)}
    bad, pilot = shifted(0.05, spread, n), {i: 0.5 * (1 + (-1) ** i * spread * (7 / 8) ** 0.5) for i in range(8)}  # a deviation of exactly `spread`
    passed = 0
    for seed in range(SIMULATIONS):
        found = neutrality(shifted(change, spread, n, seed), base, perturbed=pilot, planted_bad=bad)
        assert found.needed == n
        passed += found.verdict is Equivalence.EQUIVALENT
    assert low <= passed / SIMULATIONS <= high


def test_verdicts_need_a_pilot_enough_pairs_and_an_arm_that_is_rejected():
    base = {i: 0.5 for i in range(20)}
    calm, wild, hopeless = (shifted(0.0, s, 8) for s in (MARGIN / 2, 1.5 * MARGIN, 20 * MARGIN))
    bad, close, far = shifted(0.01, MARGIN / 2, 20), shifted(0.0, MARGIN / 2, 20, 1), shifted(0.002, MARGIN / 2, 20, 1)

    def verdict(arm, pilot, planted_bad=bad):
        found = neutrality(arm, base, perturbed=pilot, planted_bad=planted_bad)
        return found.verdict, found.why

    assert verdict(close, calm)[0] is Equivalence.EQUIVALENT
    assert verdict(far, calm)[0] is Equivalence.DIFFERENT
    assert verdict(shifted(0.0, 3 * MARGIN, 20), calm) == (Equivalence.UNDECIDED, "20 pairs, 5 needed; the arm's own spread asks for 59")
    assert verdict(close, {0: 0.5}) == (Equivalence.UNDECIDED, "the pilot has 1 of 8 pairs")
    assert verdict({i: close[i] for i in range(3)}, calm) == (Equivalence.UNDECIDED, "3 of 5 pairs were run")
    assert verdict({i: close[i] for i in range(5)}, wild)[1].startswith("5 of ")
    assert f"more than {MOST_PAIRS}" in verdict(close, hopeless)[1]
    assert "could not have failed" in verdict(close, calm, planted_bad=close)[1]
    assert verdict(far, calm, planted_bad=close)[0] is Equivalence.UNDECIDED  # a test that rejects nothing that is bad says nothing


def test_a_run_that_diverges_is_different_and_counted():
    bad = shifted(0.01, MARGIN / 2, 8)
    found = neutrality({**shifted(0.0, MARGIN / 2, 8), 3: math.nan}, EQUAL, perturbed=shifted(0.0, MARGIN / 2, 8, 1), planted_bad=bad)
    assert found.verdict is Equivalence.DIFFERENT and (found.diverged, found.pairs) == (1, 7) and "diverged" in found.why
    assert neutrality(bad, EQUAL, perturbed=EQUAL, planted_bad={i: math.inf for i in range(8)}).valid


def test_pairs_are_formed_by_seed():
    assert relative_changes({4: 0.51, 2: 0.5, 9: 1.0}, {2: 0.5, 4: 0.5}) == {2: 0.0, 4: pytest.approx(0.02)}
    with pytest.raises(ValueError, match="finite and positive"):
        relative_changes({1: 0.5}, {1: math.nan})


# ---- training --------------------------------------------------------------------------------------------------------------------


def trained(tmp_path, seed: int = 1, config: Training = TINY, **more) -> Learner:
    learner = Learner(config, seed=seed, device="cpu")
    train(learner, planted, context(tmp_path, **more))
    return learner


def values(learner: Learner) -> list[torch.Tensor]:
    return [*learner.model.state_dict().values(), learner.tables.table.detach(), learner.table_sums, torch.stack(learner.losses)]


def test_a_seed_gives_a_run_and_another_seed_another(tmp_path):
    a, b, other = (trained(tmp_path / str(i), seed=s) for i, s in enumerate((1, 1, 2)))
    assert all(map(torch.equal, values(a), values(b))) and not torch.equal(a.losses[0], other.losses[0])


def test_a_run_that_was_paused_goes_on_to_the_same_bits(tmp_path):
    whole, paused, pauses = trained(tmp_path / "whole"), None, 0
    (tmp_path / "pieces").mkdir()
    while paused is None:
        try:
            paused = trained(tmp_path / "pieces", deadline=time.monotonic() - 1 if pauses < 3 else None)  # each piece is one step, and then the rest
        except Pause:
            pauses += 1
    assert pauses == 3 and paused.step == TINY.steps and all(map(torch.equal, values(whole), values(paused)))


def test_tables_learn_by_rowwise_adagrad():
    learner = Learner(TINY, seed=1, device="cpu")
    before, batch = learner.tables.table.detach().clone(), planted(0)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(learner.logits(batch), batch.y)
    (grad,) = torch.autograd.grad(loss, [learner.tables.table])
    learner.update(batch)
    g = grad.double()
    rate = TINY.table_rate * TINY.rate(0)
    expected = before.double() - rate * g / (g.square().mean(1, keepdim=True).sqrt() + 1e-8)
    torch.testing.assert_close(learner.tables.table.double(), expected, rtol=FP32, atol=FP32)
    untouched = ~grad.any(1)
    assert untouched.any() and torch.equal(learner.tables.table[untouched], before[untouched])


def test_rates_rise_over_a_tenth_of_the_steps_and_fall_to_the_end():
    rates = [Training(steps=20, batch=2).rate(s) for s in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == pytest.approx(1 / 18) and rates[2:] == sorted(rates[2:], reverse=True)
    assert Training(steps=1, batch=2).rate(0) == 1.0


def test_a_small_model_learns_what_the_teacher_planted(tmp_path):
    config = Training(steps=60, batch=256, table_rows=50, table_rate=0.2)
    learner = Learner(config, seed=1, device="cpu")
    train(learner, lambda i: DATA.batch(i, 256), context(tmp_path))
    test = DATA.batch(0, 4096, part="test")
    with torch.no_grad():
        loss = float(losses(learner.logits(test), test.p).mean())
    rate, bayes = float(test.p.mean()), DATA.bayes_log_loss(4096)[0]
    ignorant = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert bayes < loss < ignorant - LEARNT * (ignorant - bayes)


def test_columns_repeat_the_fields_with_hashes_of_their_own():
    learner = Learner(Training(model="rankmixer", steps=1, batch=2), seed=1, device="cpu")
    ids = torch.arange(52).view(2, 26)
    columns = learner.columns(ids)
    assert columns.shape == (2, 27) and torch.equal(columns[:, :26], ids) and not torch.equal(columns[:, 26], ids[:, 0])
    with pytest.raises(ValueError, match="at least the data's fields"):
        learner.columns(torch.zeros(2, 28, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least the data's dense features"):
        learner.logits(Batch(dense=torch.zeros(2, 14), ids=ids, y=torch.zeros(2)))
    few = Batch(dense=torch.ones(2, 3), ids=ids[:, :5], y=torch.zeros(2))
    assert learner.logits(few).shape == (2,)


def test_batches_drawn_ahead_come_in_order():
    def late(i: int) -> int:
        time.sleep(0.002 * (3 - i % 4))
        return i

    assert list(in_order(late, range(5, 17), ahead=4)) == list(range(5, 17)) == list(in_order(late, range(5, 17)))
    assert list(in_order(late, range(2), ahead=4)) == [0, 1]


def test_a_perturbation_is_below_bf16s_rounding():
    a, b = (Learner(TINY, seed=1, device="cpu").model for _ in range(2))
    perturb(b, seed=5)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        moved = p != 0
        assert torch.allclose((q[moved] / p[moved] - 1).abs(), torch.tensor(2.0**-20), rtol=2**-3, atol=0) and torch.equal(p[~moved], q[~moved])


def test_mods_are_named_one_by_one():
    assert mods_named("", PUBLISHED["hstu"]) == PUBLISHED["hstu"] and mods_named("nobias+blocknorm+hardswish", Mods()) == LOKA_MODS
    assert mods_named("hardswish", Mods()) == Mods(activation="hardswish")
    for wrong in (dict(mods="batchnorm"), dict(model="hstu"), dict(steps=0), dict(table_rate=0.0)):
        with pytest.raises(ValueError, match="got"):
            Training(**{"steps": 1, "batch": 2, **wrong})


# ---- cells -----------------------------------------------------------------------------------------------------------------------

CELL = dict(model="wukong", size="small", mods="", data="planted", steps=10, batch=128, test_rows=5000, table_rows=50)
SITES = (Site(name="a:linear", op="linear", batch=1, m=8, n=4, k=4), Site(name="b:linear", op="linear", batch=1, m=8, n=1, k=4, head=True, trains_x=False))


def test_a_run_strays_further_in_fp8_than_by_chaos_alone(tmp_path):
    found = {arm: cells.quality(Context(device="cpu", seed=1, state_dir=tmp_path), arm=arm, **CELL) for arm in ("bf16", "bf16-perturbed", "naive")}
    assert all(r.kind == "emulated" and r.metrics["diverged"] == 0.0 for r in found.values())
    curve = {arm: r.arrays["train_loss"] for arm, r in found.items()}
    stray = {arm: float(np.sqrt(np.mean((x - curve["bf16"]) ** 2))) for arm, x in curve.items()}
    assert 0.0 < stray["bf16-perturbed"] < stray["naive"] / 10


def test_e5m2_in_the_forward_pass_is_as_much_coarser_as_its_bits_say():
    batch, logits = Planted(seed=cells.TEACHER).batch(0, 512), {}
    for arm in ("bf16", "naive", "planted-bad"):
        learner = Learner(TINY, seed=2, device="cpu")
        learner.transform(lambda m, example, arm=arm: apply(m, cells.arm_plan(arm, trace(m, *example).sites, Context(device="cpu")), *example))
        with torch.no_grad():
            logits[arm] = learner.logits(batch)
    naive, bad = ((logits[arm] - logits["bf16"]).std() for arm in ("naive", "planted-bad"))
    assert COARSE / COARSE_SLACK < bad / naive < COARSE * COARSE_SLACK


def test_a_cell_reports_losses_against_what_no_model_can_beat(tmp_path):
    result = cells.quality(Context(device="cpu", seed=2, state_dir=tmp_path), arm="bf16", **CELL)
    metrics, data = result.metrics, Planted(seed=cells.TEACHER)
    assert metrics["bayes_log_loss"] == pytest.approx(data.bayes_log_loss(CELL["test_rows"])[0], rel=1e-12)
    assert metrics["bayes_log_loss"] < metrics["log_loss"] and 0.5 < metrics["auc"] < 1.0 and metrics["normalised_entropy"] > 0.8
    assert result.arrays["train_loss"].shape == (CELL["steps"],)
    assert all(set(passes.values()) == {"bf16"} for passes in result.records["plan"]["recipes"].values())


def test_rates_that_are_given_replace_the_sizes_own(tmp_path):
    def curve(**rates) -> np.ndarray:
        return cells.quality(Context(device="cpu", seed=1, state_dir=tmp_path), arm="bf16", **{**CELL, "steps": 3, "test_rows": 64}, **rates).arrays["train_loss"]

    dense, table = cells.RATES["small"]
    own = curve()
    assert np.array_equal(own, curve(dense_rate=dense, table_rate=table))
    assert own[2] != curve(dense_rate=dense / 2)[2] != curve(table_rate=table / 2)[2] != own[2]


def test_arms_of_planners_are_read_from_the_input_and_named_whole(tmp_path):
    (tmp_path / "plans.json").write_text(json.dumps({"ours": {"recipes": {"a:linear": {"forward": "rowwise"}}, "made_by": "milp"}, "odd": {"recipes": {"c:linear": {}}}}))
    ctx = Context(device="cpu", inputs={"planners": tmp_path})
    plan = cells.arm_plan("ours", SITES, ctx)
    assert plan.recipes == {"a:linear": {"forward": "rowwise", "dgrad": "bf16", "wgrad": "bf16"}, "b:linear": {"forward": "bf16", "wgrad": "bf16"}} and plan.made_by == "milp"
    for arm, of, match in (("ours", Context(device="cpu"), "without that input"), ("fast", ctx, "the planners'"), ("odd", ctx, "names sites of the model")):
        with pytest.raises(ValueError, match=match):
            cells.arm_plan(arm, SITES, of)


def test_uniform_arms_leave_no_site_out():
    for arm, recipe in cells.UNIFORM.items():
        plan = cells.arm_plan(arm, SITES, Context(device="cpu"))
        assert plan.recipes == {s.name: {which: RECIPES[recipe].of(which).name for which in s.passes} for s in SITES}


def test_a_cells_seed_says_where_its_examples_begin(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cells, "source_named", lambda data, **kw: asked.append(kw) or cells.planted_source(DATA, **kw))
    for seed in (0, 3):
        cells.quality(Context(device="cpu", seed=seed, state_dir=tmp_path), arm="bf16", **{**CELL, "steps": 2, "test_rows": 64})
    assert [kw["first"] for kw in asked] == [0, 6]


def test_seeds_share_test_rows_and_no_training_example():
    a, b = (cells.source_named("planted", batch=16, first=seed * 10, test_rows=20) for seed in (0, 1))
    assert torch.equal(a.test(0).p, b.test(0).p) and torch.equal(a.train(10).p, b.train(0).p) and len(a.test(0)) == 20
    for wrong in (dict(data="criteo"), dict(test_rows=0)):
        with pytest.raises(ValueError, match="got"):
            cells.source_named(**{"data": "planted", "batch": 2, "first": 0, "test_rows": 1, **wrong})


def test_logs_end_with_their_test_part():
    rng = np.random.default_rng(1)
    part = lambda n: (rng.random((n, 2), dtype=np.float32), rng.integers(0, 9, (n, 5), dtype=np.int32), np.arange(n, dtype=np.float32) % 2)  # noqa: E731
    table = Table(name="toy", fields=tuple("abcde"), counts=("c", "d"), cardinalities=(9,) * 5, train=part(30), test=part(5000), source="")
    source = cells.table_source(table, batch=8, first=2, test_rows=10_000)
    assert [len(source.test(i)) for i in range(source.test_batches)] == [4096, 904] and source.test(0).p is None
    assert torch.equal(source.train(0).ids, table.batch(2, 8).ids)
    metrics = cells.evaluate(Learner(TINY, seed=1, device="cpu"), source)
    assert set(metrics) == {"diverged", "normalised_entropy", "auc", "log_loss"} and metrics["normalised_entropy"] == pytest.approx(metrics["log_loss"] / math.log(2))


def test_a_run_without_finite_logits_has_diverged():
    learner = Learner(TINY, seed=1, device="cpu")
    with torch.no_grad():
        learner.model.over[-1].bias.fill_(math.nan)
    assert cells.evaluate(learner, cells.source_named("planted", batch=16, first=0, test_rows=20)) == {"diverged": 1.0}
