"""Planted truth has the marginals, the base rate and the loss it promises, and the same bits everywhere."""

import hashlib
import math

import numpy as np
import pytest
import torch

from studies.loka.data import Batch, Planted
from studies.loka.data.planted import PARTS, sigmoid

ROWS = 20_000
SIGMAS = 4.5  # of the estimate's own standard error: one false alarm in 10^5 seeds, and the seed is fixed
COUNT_ERROR = 16 * 2**-24  # log1p is below 16 and rounded to 24 bits: half an ulp of 16 at most, which expm1 makes a relative error of count + 1
SIGMOID_ULP = 4  # exp: reduction and Horner within 2 ulp, the sum and the quotient half an ulp each; the other two are slack


@pytest.fixture(scope="module")
def data() -> Planted:
    return Planted(seed=11, largest=1000)


@pytest.fixture(scope="module")
def sample(data) -> Batch:
    return data.batch(0, ROWS, part="test")


def digest(batch: Batch) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (batch.dense, batch.ids, batch.p, batch.y))).hexdigest()[:16]


def test_a_batch_has_the_same_bits_on_every_machine():
    assert digest(Planted(seed=3, largest=5000).batch(5, 257)) == "7947b620c3c14d12"
    assert digest(Planted(seed=2**40 + 1, fields=3, dense=2, rank=2, base_rate=0.037).batch(2**33, 64, part="test")) == "90453726df3b713a"


def test_examples_do_not_depend_on_how_the_stream_is_cut(data):
    whole, parts = data.batch(0, 300), [data.batch(i, 100) for i in range(3)]
    for name in ("dense", "ids", "p", "y"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_parts_share_no_examples_and_seeds_share_no_teacher(data):
    rows = torch.cat([data.batch(0, 2000, part=part).ids for part in PARTS])
    assert len(rows.unique(dim=0)) == len(rows)
    other = Planted(seed=12, largest=1000)
    assert not torch.equal(other.batch(0, 50).ids, data.batch(0, 50).ids)
    assert not np.array_equal(other._teacher[0], data._teacher[0])


@pytest.mark.parametrize("rate", [0.26, 0.037])
def test_the_base_rate_is_met(rate):
    p = Planted(seed=5, largest=500, base_rate=rate).batch(0, ROWS).p
    assert abs(p.mean() - rate) < SIGMAS * p.std() * math.sqrt(1 / ROWS + 1 / 2**14)  # these rows, and those it was calibrated on


def test_the_logit_has_its_spread(data, sample):
    z = torch.logit(sample.p)
    squares = (z - z.mean()) ** 2
    tolerance = SIGMAS * squares.std() * math.sqrt(1 / ROWS + 1 / 2**14)
    assert abs(squares.mean() - data.logit_sd**2) < tolerance


def test_labels_follow_their_probabilities(sample):
    for tenth in sample.p.argsort().chunk(10):
        p, y = sample.p[tenth], sample.y[tenth].double()
        assert abs((y - p).sum()) < SIGMAS * (p * (1 - p)).sum().sqrt()


def test_ids_follow_a_zipf_law_and_stay_below_their_cardinality(data, sample):
    assert data.cardinalities[0] == 4 and data.cardinalities[-1] == 1000 and len(data.cardinalities) == 26
    assert bool((sample.ids.amax(0) < torch.tensor(data.cardinalities)).all()) and int(sample.ids.min()) == 0
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.125
    expected = ROWS * weights / weights.sum()
    found = torch.bincount(sample.ids[:, -1], minlength=1000).double()
    assert float(((found - expected)[:50] / expected[:50].sqrt()).abs().max()) < SIGMAS


def test_counts_are_whole_skewed_numbers_in_log1p(sample):
    counts = torch.expm1(sample.dense.double())
    assert bool(((counts - counts.round()).abs() <= COUNT_ERROR * (counts + 1)).all())
    assert int(counts.min()) == 0
    heavy = counts[:, -1]
    assert float(heavy.mean()) > 2 * float(heavy.median())  # log-normal: mean / median = exp(sigma^2 / 2), sigma^2 > 1.4


def test_no_model_beats_the_bayes_log_loss(data, sample):
    bayes, error = data.bayes_log_loss(ROWS)
    p = sample.p
    assert bayes == pytest.approx(float(-(p * p.log() + (1 - p) * (1 - p).log()).mean()), rel=1e-12)
    assert error == pytest.approx(float((-(p * p.log() + (1 - p) * (1 - p).log())).std() / math.sqrt(ROWS)), rel=1e-12)
    generator = torch.Generator().manual_seed(0)
    z = torch.logit(p)
    for size in (0.01, 0.3):
        q = torch.sigmoid(z + size * torch.randn(ROWS, generator=generator, dtype=torch.float64))
        assert float(-(p * q.log() + (1 - p) * (1 - q).log()).mean()) > bayes


def test_the_teacher_s_interactions_cannot_be_had_by_a_sum_over_fields():
    """With all variance in the factorisation machine, changing two fields together is not the sum of changing each."""
    data = Planted(seed=1, fields=2, dense=1, largest=50, interaction=1.0)
    ids, levels = np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), np.zeros((4, 1), dtype=np.int64)
    a, b, c, d = data._logits(ids, levels)
    assert abs(a + d - b - c) > 1e-3
    linear = Planted(seed=1, fields=2, dense=1, largest=50, interaction=0.0)
    a, b, c, d = linear._logits(ids, levels)
    assert a + d - b - c == 0.0


def test_embeddings_have_heavy_tails():
    table = Planted(seed=4, fields=2, largest=40_000, dense=1).tables(width=64)[1]
    assert table.shape == (40_000, 64) and table.dtype == torch.float32
    k = (table.double().norm(dim=1) / math.sqrt(64 / 384)).log2()  # 64 columns: a norm is within 2^(1/2) of its row's scale
    for j in range(1, 7):
        expected = 40_000 * 2.0**-j
        assert abs(float((k > j - 0.5).sum()) - expected) < SIGMAS * math.sqrt(expected)


def test_the_sigmoid_is_right_to_a_few_units_in_the_last_place():
    z = np.concatenate([np.linspace(-40, 40, 4001), [-800.0, 800.0, 0.0]])
    exact = 1 / (1 + np.exp(-z.astype(np.longdouble)))
    inside = np.abs(z) < 700
    assert np.abs((sigmoid(z) - exact)[inside] / np.spacing(exact.astype(np.float64))[inside]).max() <= SIGMOID_ULP
    assert sigmoid(np.array([800.0]))[0] == 1.0 and 0 < sigmoid(np.array([-800.0]))[0] < 1e-300


@pytest.mark.parametrize("wrong", [{"fields": 0}, {"largest": 3}, {"base_rate": 0.0}, {"logit_sd": 0.0}, {"interaction": 1.5}, {"seed": -1}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        Planted(**{"seed": 1, **wrong})


def test_batches_that_do_not_exist_are_refused(data):
    with pytest.raises(ValueError, match="a part is one of"):
        data.batch(0, 4, part="valid")
    with pytest.raises(ValueError, match="index >= 0"):
        data.batch(-1, 4)
    with pytest.raises(ValueError, match="one row an example"):
        Batch(dense=torch.zeros(2, 1), ids=torch.zeros(3, 1, dtype=torch.int64), y=torch.zeros(2))
