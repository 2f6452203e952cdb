"""A log's verdict is read from an interval, and says what its rows could have shown."""

import numpy as np
import pytest
import torch

from studies.loka.data.table import Table
from studies.loka.measures import real as real_cells
from studies.loka.pricing.metrics import relative_change
from suite.measure import Context

TRAINING = {"model": "wukong", "size": "small", "steps": 15, "batch": 256, "table_rows": 64, "dense_rate": 1e-2}

FLOAT32 = 16 * 2**-24  # the same products, summed in another order: a few roundings of a loss


def log(seed: int) -> Table:
    """A label that the first field decides half of the time."""
    rng = np.random.default_rng(seed)
    ids, dense = rng.integers(0, 10, (6000, 3)).astype(np.int32), rng.normal(size=(6000, 2)).astype(np.float32)
    y = (rng.random(6000) < np.where(ids[:, 0] > 6, 0.7, 0.1)).astype(np.float32)
    parts = [(dense[s], ids[s], y[s]) for s in (slice(0, 4000), slice(4000, 6000))]
    return Table(name="log", fields=("a", "b", "c"), counts=("d", "e"), cardinalities=(10, 10, 10), train=parts[0], test=parts[1], source="made here")


@pytest.fixture
def cell(monkeypatch, tmp_path):
    monkeypatch.setitem(real_cells.TABLES, "log", log)
    return lambda **changed: real_cells.real_change(
        Context(device="cpu", seed=3, state_dir=tmp_path / str(changed)),
        **{"data": "log", "training": TRAINING, "recipe": "rowwise", "heads": False, "rows": 2000, "chunk": 700, **changed},
    )


def test_a_small_log_learns_something_and_cannot_decide_0_02_percent(cell, tmp_path):
    (tmp_path / "{}").mkdir()
    found = cell()
    m = found.metrics
    assert m["normalised_entropy"] < 0.95 and m["auc"] > 0.7 and m["rows"] == 2000
    assert m["loss_low"] < m["loss_change"] < m["loss_high"]
    # the detectable change is 2.80 standard errors, an interval's half width 1.96 of them
    assert m["detectable"] == pytest.approx((m["loss_high"] - m["loss_low"]) / 2 * 2.8016 / 1.96, rel=0.01)
    assert found.facts == {"source": "made here", "verdict": "undecided"} and found.kind == "emulated" and m["detectable"] > 2e-4


def test_rows_of_one_user_are_one_unit():
    """Every user's rows repeated: the change is the same, and its interval, which counting rows would make too narrow."""
    generator = torch.Generator().manual_seed(0)
    b = torch.rand(200, generator=generator, dtype=torch.float64) + 1
    a, users = b * (1 + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)), np.arange(200)
    once = relative_change(a, b)
    by_row = relative_change(a.repeat_interleave(9), b.repeat_interleave(9))
    by_user = relative_change(*(real_cells._summed(x.repeat_interleave(9), users.repeat(9)) for x in (a, b)))
    assert (by_user.low, by_user.high) == pytest.approx((once.low, once.high), rel=1e-9)
    assert by_row.high - by_row.low < 0.4 * (once.high - once.low)


def test_no_recipe_changes_nothing_and_a_coarse_one_more_than_a_fine_one(cell, tmp_path):
    for recipe in ("fp32", "bf16", "planted-bad"):
        (tmp_path / str({"recipe": recipe})).mkdir()
    same, fine, coarse = (cell(recipe=r).metrics for r in ("fp32", "bf16", "planted-bad"))
    assert abs(same["loss_change"]) < FLOAT32 and same["detectable"] < FLOAT32
    assert FLOAT32 < fine["detectable"] < coarse["detectable"]


def test_other_logs_and_recipes_are_refused(cell):
    with pytest.raises(ValueError, match="a log is one of"):
        cell(data="netflix")
    with pytest.raises(ValueError, match="a recipe one of"):
        cell(recipe="int8")
