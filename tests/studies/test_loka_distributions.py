"""Inputs of a label have the shape that the label says, and are the same numbers everywhere."""

import hashlib
import math

import pytest
import torch

from studies.loka.probing.distributions import DECADES, DISTRIBUTIONS, LOG_SPREAD, OUTLIER, OUTLIERS_IN, draw, normals

R, C = 512, 1024
N = R * C
# standard errors of n numbers, four of them
MEAN, VARIANCE = 4 / N**0.5, 4 * (2 / N) ** 0.5


def test_normals_have_the_moments_of_a_normal():
    z = normals((R, C), seed=1)
    assert abs(z.mean()) < MEAN and abs(z.var() - 1) < VARIANCE
    assert abs((z**4).mean() - 3) < 4 * (96 / N) ** 0.5  # Var(z^4) = 105 - 9
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < MEAN and 4.5 < abs(z).max() < 6.7


def test_each_label_keeps_its_word():
    x = {name: draw(name, R, C, seed=2).double() for name in DISTRIBUTIONS}
    assert float(x["student-t3"].abs().median()) == pytest.approx(0.7649, rel=0.01)  # the third quartile of t with 3 degrees
    logs = x["log-normal"].abs().log()
    assert float(logs.std()) == pytest.approx(LOG_SPREAD, rel=0.01) and abs(float(x["log-normal"].sign().mean())) < MEAN
    rms = x["row-scaled"].square().mean(1).sqrt().log10()
    assert -DECADES - 0.1 < float(rms.min()) < -DECADES + 0.2 and -0.2 < float(rms.max()) < 0.1
    large = x["outliers"].abs() > 100
    assert float(large.sum()) == pytest.approx(N / OUTLIERS_IN, rel=0.05) and float(x["outliers"].abs().max()) > OUTLIER
    assert float((x["post-relu"] == 0).double().mean()) == pytest.approx(0.5, abs=MEAN) and float(x["post-relu"].min()) == 0
    assert [name for name, d in DISTRIBUTIONS.items() if d.stress] == ["row-scaled", "outliers"]


def test_the_numbers_are_those_of_every_machine():
    """Rounded to bfloat16, in which two libms agree: see the module's docstring."""
    digest = hashlib.sha256()
    for name in DISTRIBUTIONS:
        digest.update(draw(name, 32, 48, seed=3).bfloat16().view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == "1b968c4c771d5bb17fff3ce228540862d3794aa2e106fdda9832b876580f800e"


def test_another_seed_gives_other_numbers_and_small_sizes_work():
    for name in DISTRIBUTIONS:
        assert not torch.equal(draw(name, 4, 8, seed=1), draw(name, 4, 8, seed=2))
        assert draw(name, 0, 8, seed=1).shape == (0, 8) and math.isfinite(float(draw(name, 1, 1, seed=1)))


def test_unknown_labels_and_sizes_are_refused():
    with pytest.raises(ValueError, match="a distribution is one of"):
        draw("cauchy", 2, 2, seed=1)
    with pytest.raises(ValueError, match="rows and columns >= 0"):
        draw("gaussian", -1, 2, seed=1)
