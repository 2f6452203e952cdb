"""Claims: the cells of exactness find equal bits where the engine keeps its word, and say so where it is broken.

Everything is equality of bits, float32 on the CPU, but the ratio of the noise floor, which is arithmetic.
"""

import math

import pytest
import torch

from studies.plora.measures import exactness
from studies.plora.study import STUDY
from suite.measure import Context

CPU = Context(device="cpu")
CELLS = {"packed_equals_separate": "equal_share", "isolation": "isolated_share", "noise_floor": "noise_ratio"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sizes here are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def leaking(monkeypatch):
    """Adapters of a pack of several slots see one another: after every stretch, the first B of slot 0 takes a trace of the last slot's."""
    advance = exactness.EnginePack.advance

    def leaks(pack, steps):
        spent = advance(pack, steps)
        if len(pack.shape.slots) > 1:
            last = pack.adapters.state.slot_views(1, "master")[1]
            pack.adapters.state.slot_views(0, "master")[1][0] += 1e-3 * last.sum()
        return spent

    monkeypatch.setattr(exactness.EnginePack, "advance", leaks)


@pytest.fixture(scope="module", params=CELLS)
def found(request):
    return request.param, getattr(exactness, request.param)(CPU, model="tiny")


def test_cells_hold_on_the_cpu_and_report_what_is_declared(found):
    name, result = found
    assert set(result.metrics) == {CELLS[name]} <= STUDY.metric_names()
    assert result.metrics[CELLS[name]] == (0.0 if name == "noise_floor" else 1.0)


def test_every_case_is_a_line_with_its_mode_and_gap(found):
    name, result = found
    cases = result.records["cases"]
    assert all(set(c) == {"case", "mode", "equal", "gap"} and c["mode"] == "float32" and math.isfinite(c["gap"]) for c in cases)
    assert len({c["case"] for c in cases}) == len(cases) == {"packed_equals_separate": 4, "isolation": 6, "noise_floor": 8}[name]
    assert {c["equal"] for c in cases} == ({None} if name == "noise_floor" else {True})
    assert name == "noise_floor" or all(c["gap"] == 0 for c in cases)


def test_an_adapter_that_sees_its_neighbour_is_found(leaking):
    cases = {c["case"]: c for c in exactness.packed_equals_separate(CPU, model="tiny").records["cases"]}
    wrong = [c for c in cases.values() if not c["equal"]]
    assert [c["case"] for c in wrong] == ["rank 5, batch 4, packed and alone"] and wrong[0]["gap"] > 0


def test_a_pack_that_is_not_isolated_is_found(leaking):
    result = exactness.isolation(CPU, model="tiny")
    assert result.metrics["isolated_share"] < 0.5
    assert not result.records["cases"][0]["equal"], "a NaN went through"


def test_a_case_in_which_nothing_happens_is_refused(monkeypatch):
    monkeypatch.setattr(exactness, "HAPPENINGS", {"nothing": lambda pack: pack.advance(exactness.STEPS)})
    with pytest.raises(AssertionError, match="proves nothing"):
        exactness.isolation(CPU, model="tiny")


@pytest.mark.parametrize("packed, padded, want", [([2.0, 4.0], [1.0, 2.0], 2.0), ([0.0], [0.0], 0.0), ([1.0], [0.0], math.inf), ([0.0], [1.0], 0.0)])
def test_the_ratio_of_the_noise_floor(packed, padded, want):
    assert exactness.ratio(packed, padded) == want


def test_every_batch_is_full_before_and_after_a_neighbour_changes():
    (setting,) = exactness.settings(CPU, "tiny")
    pack = setting.pack(exactness.SLOTS, dict(enumerate(exactness.ADAPTERS)), steps=exactness.CHANGED_AT)
    before = {s: p.optimizer_steps for s, p in pack.live().items()}
    pack.advance(exactness.STEPS - exactness.CHANGED_AT)
    assert all(1 <= before[s] < p.optimizer_steps for s, p in pack.live().items())


def test_a_model_without_a_shape_is_refused():
    with pytest.raises(ValueError, match="a model is one of"):
        exactness.isolation(CPU, model="70b")
