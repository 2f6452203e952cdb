"""Claims about argmax and Gumbel sampling on the CPU."""

import math

import numpy as np
import pytest
import torch

from kernels.exact import philox_bell, philox_integers, philox_ref
from kernels.exact.sampling import argmax, argmax_ref, gumbel_ref, sample, sample_ref

INF, NAN = math.inf, math.nan

# Pearson's statistic of d = V - 1 degrees of freedom exceeds d + 2 sqrt(d t) + 2 t with probability below e^-t (Laurent and Massart
# 2000, lemma 1, which covers its chi-square limit). t = ln(10^6): one in a million, and the draws are fixed by the seed.
# The grid of u moves a probability by at most 2^-23: nothing beside 1/sqrt(draws).
LOG_ODDS = math.log(1e6)


def bound(freedom: int) -> float:
    return freedom + 2 * math.sqrt(freedom * LOG_ODDS) + 2 * LOG_ODDS


@pytest.mark.parametrize("row, want", [
    ([1.0, 3.0, 3.0, 2.0], 1), ([-0.0, 0.0], 0), ([0.0, -0.0], 0), ([-1.0, -0.0, 0.0], 1), ([-2.0**-149, -1.0], 0), ([-INF, -INF], 0),
    ([INF, NAN, NAN], 1), ([1.0, INF, INF], 1), ([-INF, -3e38], 1), ([5.0], 0), ([-1.0, -2.0, -0.5], 2), ([0.0, 2.0**-149], 1),
])  # fmt: skip
def test_argmax_takes_the_lowest_index_of_the_largest_and_nan_above_all(row: list[float], want: int) -> None:
    assert argmax_ref(torch.tensor([row, row])).tolist() == [want, want]


def test_negative_nan_counts_as_nan_and_other_dtypes_agree() -> None:
    x = torch.tensor([[1, 0x7F800000, -1, 0x7FC00000]], dtype=torch.int64).to(torch.int32).view(torch.float32)  # -1: a NaN with its sign set
    assert argmax_ref(x).tolist() == [2]
    y = philox_bell((6, 999), 3, torch.bfloat16)
    assert argmax_ref(y).tolist() == argmax_ref(y.float()).tolist() == np.argmax(y.float().numpy(), axis=1).tolist()
    assert argmax_ref(y.T.contiguous().T).tolist() == argmax_ref(y).tolist() and argmax_ref(y[:0]).shape == (0,)


def tokens(count: int, *, request: int = 1, first: int = 0, **options: object) -> dict:
    where = dict(request_M=torch.full((count,), request), position_M=torch.arange(first, first + count))
    return {**dict(seed=5, temperature=1.0), **where, **options}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax_of_logits_over_temperature(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])
    draws = 100_000
    seen = torch.bincount(sample_ref(logits.expand(draws, 8), **tokens(draws, temperature=temperature)), minlength=8).double()

    def pearson(t: float) -> float:
        want = torch.softmax(logits.double() / t, 0) * draws
        return float(((seen - want) ** 2 / want).sum())

    assert pearson(temperature) <= bound(7) < pearson(temperature * 1.1), "the test must see a temperature that is 10% off"


def test_the_noise_is_what_the_module_says_word_for_word() -> None:
    request, position, seed = 3 * 2**32 + 9, 77, 2**40 + 6
    g = gumbel_ref(10, seed=seed, request_M=torch.tensor([request]), position_M=torch.tensor([position]))[0]
    for v in range(10):
        words = philox_ref(np.array([v // 4, position, 9, 3 + 2**31], dtype=np.uint32), (6, 256))
        u = (int(words[v % 4] >> 9) + 0.5) * 2.0**-23
        # two logarithms of 1 ulp each; the inner one's relative error is the outer one's absolute error
        assert abs(float(g[v]) + math.log(-math.log(u))) <= 2.0**-23 * (1 + abs(float(g[v])))


def test_every_u_is_exact_and_inside_the_open_interval() -> None:
    n = torch.tensor([0, 1, 2**22, 2**23 - 2, 2**23 - 1])
    u = (2 * n + 1).float() * 2.0**-24
    assert u.double().tolist() == [(int(i) + 0.5) * 2.0**-23 for i in n] and float(u.min()) == 2.0**-24 and float(u.max()) == 1 - 2.0**-24
    by_bits = (n.int() | 0x3F800000).view(torch.float32) - 1.0 + 2.0**-24  # how the kernel makes it
    assert torch.equal(by_bits, u)


def test_a_token_depends_on_its_request_and_position_and_not_on_the_batch() -> None:
    logits = philox_bell((40, 500), 9)
    where = dict(request_M=torch.arange(40) * 2**33 + 5, position_M=(torch.arange(40) * 7) % 13)
    want = sample_ref(logits, seed=1, temperature=0.7, **where)
    order = torch.from_numpy(philox_integers(40, 2).argsort().copy())
    shuffled = sample_ref(logits[order], seed=1, temperature=0.7, **{name: part[order] for name, part in where.items()})
    assert torch.equal(shuffled, want[order])
    alone = [int(sample_ref(logits[i : i + 1], seed=1, temperature=0.7, **{n: p[i : i + 1].int() if n == "position_M" else p[i : i + 1] for n, p in where.items()})) for i in range(40)]
    assert alone == want.tolist()


def test_no_two_requests_positions_or_seeds_share_a_stream() -> None:
    places = [(s, r, p) for s in (0, 1, 2**32, 2**64 - 1) for r in (0, 1, 2, 2**32, 2**63 - 1, -1, -(2**63)) for p in (0, 1, 2, 2**31, 2**32 - 1)]
    seen = {gumbel_ref(16, seed=s, request_M=torch.tensor([r]), position_M=torch.tensor([p])).numpy().tobytes() for s, r, p in places}
    assert len(seen) == len(places)


def test_extreme_logits_are_drawn_or_never_drawn() -> None:
    rows = torch.tensor([[0.0, 19.6, 0.0], [-INF, -3e38, -INF], [0.0, NAN, INF], [-INF, -INF, -INF]])
    for first in range(200):
        assert sample_ref(rows, **tokens(4, first=first)).tolist() == [1, 1, 1, 0]
    assert sample_ref(rows[:0], **tokens(0)).shape == (0,)


@pytest.mark.parametrize("change, message", [
    (dict(temperature=0.0), "call argmax"), (dict(temperature=-1.0), "positive"), (dict(temperature=NAN), "positive"), (dict(temperature=1e-60), "positive"),
    (dict(temperature=INF), "finite"), (dict(seed=2**64), "64 bits"), (dict(seed=-1), "64 bits"), (dict(request_M=torch.zeros(3, dtype=torch.int64)), "request_M"),
    (dict(position_M=torch.zeros(2)), "position_M"), (dict(logits_MV=torch.zeros(2, 0)), "0 < V"), (dict(logits_MV=torch.zeros(2)), "one row"),
    (dict(logits_MV=torch.zeros(2, 4, dtype=torch.float64)), "float32, bfloat16"),
])  # fmt: skip
def test_wrong_operands_are_named(change: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.device._launches_nothing", lambda: True)  # so the operands stay on the CPU
    for op in (sample_ref, sample):  # the checks come before anything touches a device
        with pytest.raises(ValueError, match=message):
            op(**{**dict(logits_MV=torch.zeros(2, 4)), **tokens(2), **change})


def test_argmax_names_wrong_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.device._launches_nothing", lambda: True)  # so the operands stay on the CPU
    for op in (argmax_ref, argmax):
        with pytest.raises(ValueError, match="0 < V"):
            op(torch.zeros(2, 0))
        with pytest.raises(ValueError, match="convert them"):
            op(torch.zeros(2, 3, dtype=torch.int64))
