"""CUDA's path of a contest: its order of operations on a stand-in for torch.cuda (any host), and the real thing on a GPU.

    python -m pytest tests/suite/test_timing_cuda.py

The stand-in has one in-order queue whose clock moves by what is enqueued, so it can show that a replay is not starved,
that graphs hold the rotation, and which calls reach torch with which arguments (bound against torch's own signatures).
It says nothing of real speed.
"""

import contextlib
import inspect
import sys
import types

import numpy as np
import pytest
import torch

from suite.telemetry import open_sensor
from suite.timing import Variant, WrongOutput, contest, copy_bandwidth_gbps, copy_variant
from suite.timing._cuda import _has_no_trend

KERNEL_S = {"short": 2e-6, "long": 4e-6}
HOST_LAUNCH_S = 20e-6  # what the host needs to enqueue one thing; far above a kernel, so a starved replay would show it
HAVE_CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_CUDA, reason="needs a CUDA device")]

TOLERANCE = {
    "simulated": 1e-9,  # relative; event times are sums of floats in one clock
    # A copy of twice the bytes takes twice the time but for a launch's few microseconds against at least 200.
    "twice_the_bytes": (1.8, 2.2),
    "control": 0.02,  # one program against itself on an exclusive card
    "copy_gbps": (100.0, 20_000.0),  # between the slowest card with CUDA graphs and twice the fastest today
}


class FakeCuda:
    """One device, one in-order queue. Times in seconds; `now` is the host's, `free_at` when the device has done all."""

    def __init__(self):
        self.now, self.free_at, self.log, self.capturing = 0.0, 0.0, [], None
        self.graph_signature = inspect.signature(torch.cuda.graph.__init__)
        outer = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing, "an event without timing measures nothing"

            def record(self):
                outer.work("event", 0.0)
                self.at = max(outer.free_at, outer.now)

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            def replay(self):
                for name, work_s, effect in self.nodes:
                    outer.log.append(name)
                    effect()
                outer.work("replay", sum(node[1] for node in self.nodes))

        class Stream:
            def __init__(self, device=None, priority=0):
                assert isinstance(device, int)

            def wait_stream(self, stream):
                assert isinstance(stream, Stream)

        self.Event, self.CUDAGraph, self.Stream = Event, CUDAGraph, Stream

    def work(self, name, work_s):
        """Enqueue: the host pays for a launch, the device works in order and never before it was asked to."""
        self.log.append(name)
        self.now += HOST_LAUNCH_S
        self.free_at = max(self.free_at, self.now) + work_s

    def kernel(self, name, work_s, effect=lambda: None):
        if self.capturing is not None:
            self.capturing.append((name, work_s, effect))
            return
        effect()
        self.work(name, work_s)

    @contextlib.contextmanager
    def graph(self, graph, **arguments):
        self.graph_signature.bind(None, graph, **arguments)
        self.capturing = []
        try:
            yield
        finally:
            graph.nodes, self.capturing = self.capturing, None

    def synchronize(self, device=None):
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.log.append("synchronize")
        self.now = max(self.now, self.free_at)

    def install(self, monkeypatch):
        properties = types.SimpleNamespace(uuid="0000-11", L2_cache_size=50 * 2**20)
        for name, value in {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
            "device": lambda index: contextlib.nullcontext(), "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.Stream(0), "get_device_properties": lambda index: properties,
            "synchronize": self.synchronize, "graph": self.graph, "CUDAGraph": self.CUDAGraph, "Event": self.Event,
            "Stream": self.Stream, "_sleep": lambda cycles: self.work("spin", cycles / 2.0e9),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr("suite.timing._cuda.time.perf_counter", lambda: self.now)
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())


class FakeNvml(types.ModuleType):
    """A binding of an older driver: no energy counter, the older name of the throttle mask, a clock that rises, then holds."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.num_reads, self.is_open = 0, False

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-0000-11"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self.num_reads += kind == self.NVML_CLOCK_SM
        return min(1980, 1000 + 100 * self.num_reads)

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 41

    def nvmlDeviceGetPowerUsage(self, handle):
        return 412_530

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x5


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    return cuda


def kernels(fake: FakeCuda, name: str, num_calls: int = 4, **fields: object) -> Variant:
    return Variant(name=name, calls=tuple(lambda: fake.kernel(name, KERNEL_S[name]) for _ in range(num_calls)), **fields)


def run(fake: FakeCuda, *variants: Variant, **changes: object):
    arguments = {"device": "cuda", "rounds": 3, "launches_per_round": 6, "warmup_s": 0.0} | changes
    return contest(variants or [kernels(fake, "short"), kernels(fake, "long")], **arguments)


def test_replays_give_the_kernels_time_per_call_and_not_the_host_s(fake):
    result = run(fake)
    assert result.mode == "graph"
    for name, kernel_s in KERNEL_S.items():
        # One event record's host time stands between replay and end event only if the host were behind: it must not be.
        assert result.samples[name] == pytest.approx(np.full((3, 6), kernel_s), rel=TOLERANCE["simulated"])


def test_the_rotation_is_captured_until_a_replay_lasts_long_enough(fake):
    result = run(fake, min_replay_s=200e-6)
    # 200 us over 4 calls of 2 us and of 4 us; the control's entries are one program.
    assert result.conditions["passes"] == {"short": 25, "long": 13, "short [A/A]": 25}
    assert result.calls_per_launch == {"short": 100, "long": 52, "short [A/A]": 100}
    assert set(run(fake, min_replay_s=0.0).calls_per_launch.values()) == {4}


def test_a_long_replay_is_not_repeated_because_another_is_short(fake):
    long = Variant(name="very long", calls=(lambda: fake.kernel("very long", 1e-3),))
    assert run(fake, kernels(fake, "short"), long).conditions["passes"]["very long"] == 1


def test_every_timed_replay_has_its_own_head_start_between_spin_and_events(fake):
    run(fake, rounds=1, launches_per_round=2)
    trace = [what for what in fake.log if what in ("spin", "event", "replay", "synchronize")]
    text = " ".join(trace)
    timed = text[text.rindex("spin event") :]
    assert timed.startswith("spin event replay event synchronize")
    assert text.count("spin event replay event spin event replay event") >= 2


def test_an_eager_entry_starts_on_an_idle_device_and_counts_the_host_s_launches(fake):
    result = run(fake, also_eager=True)
    assert result.names == ("short", "long", "short [A/A]", "short [eager]", "long [eager]")
    assert result.median_s("short [eager]") >= HOST_LAUNCH_S
    assert result.calls_per_launch["short [eager]"] == 4
    assert run(fake, mode="eager").median_s("short") >= HOST_LAUNCH_S


def test_the_clock_is_watched_until_it_has_no_trend(fake):
    result = run(fake, warmup_s=0.1)
    warmup = result.conditions["warmup"]
    assert warmup["steady"] is True and warmup["seconds"] >= 0.1
    assert _has_no_trend(warmup["sm_clocks_mhz"]) and not _has_no_trend(warmup["sm_clocks_mhz"][:-1])
    assert result.conditions["sensor"] == "pynvml" and not sys.modules["pynvml"].is_open


def test_a_clock_that_never_settles_ends_the_warm_up_with_a_warning(fake, monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetClockInfo", lambda self, handle, kind: next(self.rising))
    FakeNvml.rising = iter(range(1000, 10**9, 50))
    with pytest.warns(UserWarning, match="still had a trend"):
        result = run(fake, warmup_s=0.01)
    assert result.conditions["warmup"]["steady"] is False


def test_readings_of_an_older_driver_are_named_and_what_it_lacks_is_none(fake):
    result = run(fake)
    reading = result.telemetry[0]
    assert (reading["power_w"], reading["temperature_c"], reading["energy_j"]) == (412.53, 41, None)
    assert reading["throttle_reasons"] == ["gpu_idle", "sw_power_cap"]
    assert result.throttle_reasons == ("sw_power_cap",)


def test_without_any_sensor_the_contest_runs_and_says_so(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    result = run(fake, warmup_s=0.1)
    assert result.conditions["sensor"] == "none" and result.conditions["sensor_problems"]
    assert result.conditions["warmup"]["steady"] is None
    assert open_sensor("cuda").read() == {}


def test_checked_passes_go_through_the_graph(fake):
    state = {"y": 0, "poisoned": 0}

    def poison():
        state["y"], state["poisoned"] = -1, state["poisoned"] + 1

    def check():
        assert state["y"] == 7, "y is not 7"

    good = Variant(name="short", calls=(lambda: fake.kernel("short", 2e-6, lambda: state.update(y=7)),), check=check, poison=poison)
    result = run(fake, good)
    assert result.conditions["checked_rounds"] == [0, 1, 2] and state["poisoned"] == 2 * 4
    bad = Variant(name="short", calls=(lambda: fake.kernel("short", 2e-6, lambda: None),), check=check, poison=poison)
    with pytest.raises(WrongOutput, match="y is not 7"):
        run(fake, bad)


def test_a_call_that_synchronises_cannot_be_captured_and_is_named(fake):
    with pytest.raises(RuntimeError, match="'sync', whose capture failed"):
        run(fake, Variant(name="sync", calls=(torch.cuda.synchronize,)))


def test_a_rotation_that_stays_in_l2_warns(fake):
    with pytest.warns(UserWarning, match="3 x L2"):
        run(fake, kernels(fake, "short", bytes_moved=2**20))


def test_a_cuda_result_survives_its_arrays(fake):
    result = run(fake, warmup_s=0.1, also_eager=True)
    again = type(result).from_arrays(result.to_arrays())
    assert again.conditions == result.conditions and again.telemetry == result.telemetry


def test_a_device_that_is_not_there_is_refused(fake):
    with pytest.raises(ValueError, match="one of the 1 visible devices, got device='cuda:1'"):
        run(fake, device="cuda:1")


# ---------------------------------------------------------------------------------------------- a real GPU


class TestOnAGpu:
    pytestmark = gpu

    def test_twice_the_bytes_take_twice_the_time_and_the_control_agrees(self):
        variants = [copy_variant("cuda", 64 * 2**20, name="one"), copy_variant("cuda", 128 * 2**20, name="two")]
        result = contest(variants, device="cuda", rounds=6, launches_per_round=10, warmup_s=1.0, also_eager=True)
        low, high = TOLERANCE["twice_the_bytes"]
        assert low < np.exp(result.log_ratio("two", "one")) < high
        assert abs(result.control_log_ratio) < TOLERANCE["control"]
        assert result.conditions["unchecked"] == [] and result.conditions["rotation_over_cache"] > 3
        assert result.median_s("one [eager]") > 0

    def test_a_short_kernel_is_not_timed_with_the_host_s_launch(self):
        x = torch.ones(1024, device="cuda")
        calls = tuple((lambda y=y: torch.neg(x, out=y)) for y in [torch.empty_like(x) for _ in range(4)])
        result = contest([Variant(name="neg", calls=calls)], device="cuda", rounds=3, launches_per_round=10,
                         warmup_s=0.5, also_eager=True)  # fmt: skip
        assert result.conditions["passes"]["neg"] > 1
        assert result.median_s("neg") < result.median_s("neg [eager]")

    def test_a_wrong_kernel_is_caught_on_its_replay(self):
        variant = copy_variant("cuda", 2**20)
        broken = Variant(name="broken", calls=variant.calls[:-1], check=variant.check, poison=variant.poison)
        with pytest.raises(WrongOutput):
            contest([broken], device="cuda", rounds=1, launches_per_round=1, warmup_s=0.0)

    def test_the_copy_bandwidth_is_a_memory_s(self):
        low, high = TOLERANCE["copy_gbps"]
        assert low < copy_bandwidth_gbps("cuda", 256 * 2**20) < high
