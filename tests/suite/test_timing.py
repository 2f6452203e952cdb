"""The contest on this host: real programs, poisoned outputs, telemetry, the .npz round trip, and every refusal.

    python -m pytest tests/suite/test_timing.py

Statistical behaviour is tested on a simulated machine (test_timing_simulated.py), CUDA's own path in test_timing_cuda.py.
"""

import gc
import io

import numpy as np
import pytest

from suite.stats import Difference, compare
from suite.telemetry import _parse_smi, open_sensor, throttle_names
from suite.timing import Variant, WrongOutput, cache_bytes, contest, copy_bandwidth_gbps, copy_variant, rotations_needed

# A shared two-core machine: the program with twice the work is 2x as slow up to what neighbours do to the one and not the
# other within a round. Interleaving leaves far less than the 1.5 to 2.7 that this band allows.
TOLERANCE = {"twice_the_work": (1.5, 2.7)}
QUICK = {"device": "cpu", "rounds": 2, "launches_per_round": 2, "warmup_s": 0.0}


class Doubling:
    """A program y = 2 x into its own buffer, which can be told to go wrong after some calls."""

    def __init__(self, wrong_after: int | None = None):
        self.x, self.y = np.arange(1.0, 1001.0), np.zeros(1000)
        self.num_calls, self.num_poisons, self.num_checks = 0, 0, 0
        self.wrong_after = wrong_after
        self.seen_by_call = []

    def call(self) -> None:
        self.num_calls += 1
        self.seen_by_call.append(bool(np.isnan(self.y).all()))
        np.multiply(self.x, 2.0, out=self.y)
        if self.wrong_after is not None and self.num_calls > self.wrong_after:
            self.y[17] = 0.0

    def poison(self) -> None:
        self.num_poisons += 1
        self.y.fill(np.nan)

    def check(self) -> None:
        self.num_checks += 1
        assert np.array_equal(self.y, 2.0 * self.x), "y is not 2 x"

    def variant(self, name: str = "double", **fields: object) -> Variant:
        return Variant(**{"name": name, "calls": (self.call,), "check": self.check, "poison": self.poison} | fields)


def test_a_real_program_with_twice_the_work_is_found_slower():
    x, out = np.linspace(1.0, 2.0, 20_000), np.empty(20_000)

    def once() -> None:
        np.exp(x, out=out)

    def twice() -> None:
        np.exp(x, out=out)
        np.exp(x, out=out)

    variants = [Variant(name="once", calls=(once,)), Variant(name="twice", calls=(twice,))]
    result = contest(variants, device="cpu", rounds=15, launches_per_round=20, warmup_s=0.1)
    comparison = compare(result, "twice", "once")
    low, high = TOLERANCE["twice_the_work"]
    assert comparison.verdict is Difference.SLOWER
    assert low < comparison.ratio.value < high


def test_a_copy_reports_its_bandwidth():
    num_bytes = 2**20
    assert copy_bandwidth_gbps("cpu", num_bytes, rounds=2, launches_per_round=2, warmup_s=0.0) > 0
    variant = copy_variant("cpu", num_bytes)
    assert variant.bytes_moved == 2 * num_bytes
    assert len(variant.calls) * variant.bytes_moved > 3 * cache_bytes("cpu")


def test_rotated_sets_exceed_three_caches():
    for num_bytes in (1, 1000, cache_bytes("cpu"), 10 * cache_bytes("cpu")):
        sets = rotations_needed(num_bytes, device="cpu")
        assert sets >= 2 and sets * num_bytes > 3 * cache_bytes("cpu")


# ---------------------------------------------------------------------------------------------- correctness


def test_outputs_are_poisoned_and_recomputed_before_each_check():
    program = Doubling()
    result = contest([program.variant()], **QUICK | {"rounds": 5})
    assert result.conditions["checked_rounds"] == [0, 2, 4], "first, middle, last"
    assert result.conditions["unchecked"] == []
    num_checked_passes = 2 * (1 + 3)  # variant and control; before the first round and after three
    assert program.num_poisons == num_checked_passes
    assert program.seen_by_call.count(True) == num_checked_passes, "each checked pass began on poison"


@pytest.mark.parametrize("wrong_after", [0, 8], ids=["from the start", "in mid-contest"])
def test_a_wrong_output_fails_the_contest(wrong_after):
    with pytest.raises(WrongOutput, match="'double' are wrong .*y is not 2 x"):
        contest([Doubling(wrong_after).variant()], **QUICK)


def test_wrong_outputs_after_the_last_round_are_caught():
    """The program errs only from its last timed launch on: all checks but the last one pass."""
    probe = Doubling()
    contest([probe.variant()], **QUICK)
    with pytest.raises(WrongOutput, match="after round 1"):
        contest([Doubling(wrong_after=probe.num_calls - 4).variant()], **QUICK)


def test_a_program_that_computes_nothing_is_caught_by_the_poison():
    program = Doubling()
    program.call()
    with pytest.raises(WrongOutput):
        contest([program.variant(calls=(lambda: None,))], **QUICK)


def test_a_check_that_passes_on_poison_is_refused():
    with pytest.raises(ValueError, match="needs to fail on poisoned outputs"):
        contest([Doubling().variant(check=lambda: None)], **QUICK)


def test_a_poison_that_overwrites_nothing_is_refused():
    program = Doubling()
    program.call()
    with pytest.raises(ValueError, match="needs to fail on poisoned outputs"):
        contest([program.variant(poison=lambda: None)], **QUICK)


def test_an_error_of_a_call_passes_through_and_the_collector_is_on_again():
    calls = iter([None] * 3)
    with pytest.raises(StopIteration):
        contest([Variant(name="a", calls=(lambda: next(calls),))], **QUICK)
    assert gc.isenabled()


def test_unchecked_entries_are_named():
    result = contest([Variant(name="a", calls=(lambda: None,)), Doubling().variant()], **QUICK)
    assert result.conditions["unchecked"] == ["a", "a [A/A]"]


# ---------------------------------------------------------------------------------------------- result


def test_the_control_is_the_chosen_variant_entered_twice():
    a, b = Doubling(), Doubling()
    result = contest([a.variant("a"), b.variant("b")], **QUICK, control="b")
    assert result.names == ("a", "b", "b [A/A]")
    assert result.control == ("b", "b [A/A]")
    assert all(samples.shape == (2, 2) and samples.dtype == np.float64 for samples in result.samples.values())


def test_a_result_survives_an_npz_without_pickle():
    result = contest([Doubling().variant("a", bytes_moved=16_000), Doubling().variant("name with / and \u00b5")], **QUICK)
    file = io.BytesIO()
    np.savez(file, **result.to_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        again = type(result).from_arrays(arrays)
    assert again.names == result.names
    for name in result.names:
        np.testing.assert_array_equal(again.samples[name], result.samples[name])
    for field in ("control", "device", "mode", "calls_per_launch", "bytes_moved", "flops", "telemetry", "conditions"):
        assert getattr(again, field) == getattr(result, field), field
    assert again.noise_floor == result.noise_floor


def test_arrays_of_something_else_are_refused():
    with pytest.raises(ValueError, match="contest_json"):
        type(contest([Doubling().variant()], **QUICK)).from_arrays({"x": np.zeros(3)})
    arrays = contest([Doubling().variant()], **QUICK).to_arrays()
    del arrays["samples_1"]
    with pytest.raises(ValueError, match="samples_1"):
        type(contest([Doubling().variant()], **QUICK)).from_arrays(arrays)


def test_telemetry_stands_beside_every_round():
    result = contest([Doubling().variant()], **QUICK)
    assert [(reading["round"], reading["when"]) for reading in result.telemetry] == [
        (0, "before"), (0, "after"), (1, "before"), (1, "after"),
    ]  # fmt: skip
    assert all(reading["load_1m"] >= 0 for reading in result.telemetry)
    assert result.throttle_reasons == ()


def test_a_rate_without_its_count_and_an_unknown_name_are_refused():
    result = contest([Doubling().variant()], **QUICK)
    with pytest.raises(ValueError, match="bytes_moved"):
        result.gbps("double")
    with pytest.raises(ValueError, match="name='triple'"):
        result.median_s("triple")


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"launches_per_round": 0}, "launches_per_round=0"),
        ({"warmup_s": -1.0}, "warmup_s"),
        ({"warmup_s": float("nan")}, "warmup_s"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"mode": "graph"}, "mode='graph'"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"also_eager": True}, "also_eager"),
        ({"control": "nobody"}, "control='nobody'"),
    ],
    ids=lambda value: str(value),
)
def test_an_argument_that_breaks_a_rule_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        contest([Doubling().variant()], **QUICK | changes)


def test_no_variants_and_names_used_twice_are_refused():
    with pytest.raises(ValueError, match="at least one variant"):
        contest([], **QUICK)
    with pytest.raises(ValueError, match="'double'.* more than once"):
        contest([Doubling().variant(), Doubling().variant()], **QUICK)
    with pytest.raises(ValueError, match="A/A.* more than once"):
        contest([Doubling().variant(), Doubling().variant("double [A/A]")], **QUICK)


def test_cuda_without_a_device_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="visible CUDA device, got device='cuda'"):
        contest([Doubling().variant()], **QUICK | {"device": "cuda"})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": " "}, "name"),
        ({"calls": ()}, "non-empty tuple"),
        ({"calls": (None,)}, "callables"),
        ({"poison": None}, "together"),
        ({"check": None}, "together"),
        ({"bytes_moved": 0}, "bytes_moved"),
        ({"flops": -1}, "flops"),
    ],
    ids=lambda value: str(value),
)
def test_a_variant_that_breaks_a_rule_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        Doubling().variant(**fields)


# ---------------------------------------------------------------------------------------------- sensors


def test_throttle_bits_have_nvml_s_names():
    assert throttle_names(0) == []
    assert throttle_names(0x1 | 0x4 | 0x40) == ["gpu_idle", "sw_power_cap", "hw_thermal_slowdown"]
    assert throttle_names(0x1000) == ["bit_0x1000"]


def test_nvidia_smi_lines_are_read_and_unknown_fields_are_none():
    assert _parse_smi("1980, 2619, 41, 0x0000000000000004, 412.53\n") == {
        "sm_clock_mhz": 1980.0, "mem_clock_mhz": 2619.0, "temperature_c": 41.0, "throttle_mask": 4, "power_w": 412.53,
        "energy_j": None,
    }  # fmt: skip
    assert _parse_smi("1980, [N/A], 41, [Not Supported], 412.53")["throttle_mask"] is None
    with pytest.raises(ValueError, match="5 fields"):
        _parse_smi("Unable to determine the device handle")


def test_a_sensor_of_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device='tpu'"):
        open_sensor("tpu")
