"""What the machine was doing around a timed round: clocks, temperature, throttle reasons, power, energy, load.

    from suite.telemetry import open_sensor
    with open_sensor("cuda:0") as sensor:
        print(sensor.source, sensor.read())

A CUDA device is read through pynvml where it imports, else through nvidia-smi, else not at all, and `source` and
`problems` say which and why. What one driver cannot report is None in the reading, never a made-up zero.
It does not sample in the background (a thread would disturb the timing) and never changes a clock or a power limit.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable

__all__ = ["GPU_FIELDS", "Sensor", "open_sensor", "throttle_names"]

GPU_FIELDS = ("sm_clock_mhz", "mem_clock_mhz", "temperature_c", "throttle_mask", "power_w", "energy_j")

# NVML API reference, nvmlClocksEventReasons. gpu_idle is no throttling, it is kept so that the mask stays readable.
_THROTTLE_BITS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_SMI_TIMEOUT_S = 10.0


def throttle_names(mask: int) -> list[str]:
    """Names of the set bits of NVML's clocks-event mask; an unknown bit is named `bit_0x...`."""
    bits = [1 << position for position in range(int(mask).bit_length()) if mask >> position & 1]
    return [_THROTTLE_BITS.get(bit, f"bit_{bit:#x}") for bit in bits]


class Sensor:
    """One device's readings. `source`: "pynvml", "nvidia-smi", "none" or "os" (a CPU); `problems`: why not a better one."""

    def __init__(self, source: str, read_raw: Callable[[], dict], close: Callable[[], None], problems: tuple[str, ...] = ()):
        self.source = source
        self.problems = problems
        self._read_raw = read_raw
        self._close = close

    def __enter__(self) -> Sensor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def read(self) -> dict:
        """One reading: plain numbers, strings, lists and None, ready for JSON."""
        reading = self._read_raw()
        mask = reading.get("throttle_mask")
        if mask is not None:
            reading["throttle_reasons"] = throttle_names(mask)
        return reading

    def sm_clock_mhz(self) -> float | None:
        """The SM clock now, None where it cannot be read (and on a CPU)."""
        return self._read_raw().get("sm_clock_mhz")


def open_sensor(device: str) -> Sensor:
    """The best sensor for `device` ("cpu", "cuda" or "cuda:N"); it is to be closed, so use it in a `with`.

    Raises ValueError for another kind of device. A card whose sensors cannot be read gives source "none", no error:
    the timing stands, only what is known beside it is less.
    """
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return Sensor("os", _read_os, _nothing)
    if kind != "cuda":
        raise ValueError(f"a sensor needs a device 'cpu', 'cuda' or 'cuda:N', got {device=}; name one of these")
    uuid, problem = _uuid(str(device))
    if uuid is None:
        return Sensor("none", dict, _nothing, (problem,))
    problems: list[str] = []
    sensor = _open_nvml(uuid, problems) or _open_smi(uuid, problems)
    return sensor or Sensor("none", dict, _nothing, tuple(problems))


def _nothing() -> None:
    """Nothing to close."""


def _read_os() -> dict:
    """Load and scheduling pressure: on a shared CPU these explain an odd round better than a frequency does."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"load_1m": os.getloadavg()[0], "involuntary_switches": usage.ru_nivcsw, "cpu_s": usage.ru_utime + usage.ru_stime}


def _uuid(device: str) -> tuple[str | None, str]:
    """NVML's name of a CUDA device ("GPU-..."). By UUID, because NVML's order ignores CUDA_VISIBLE_DEVICES."""
    import torch

    index = torch.device(device).index
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None, "this torch does not tell a device's UUID"
    text = str(uuid)
    return (text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"), ""


def _open_nvml(uuid: str, problems: list[str]) -> Sensor | None:
    try:
        import pynvml
    except ImportError as error:
        problems.append(f"pynvml: {error}")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        problems.append(f"pynvml: nvmlInit: {error}")
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        problems.append(f"pynvml: {uuid}: {error}")
        pynvml.nvmlShutdown()
        return None

    def ask(names: tuple[str, ...], *args: int) -> float | None:
        """The first of `names` that this driver and binding know; None where none does."""
        for name in names:
            function = getattr(pynvml, name, None)
            if function is None:
                continue
            try:
                return function(handle, *args)
            except pynvml.NVMLError:
                continue
        return None

    def read() -> dict:
        power_mw, energy_mj = ask(("nvmlDeviceGetPowerUsage",)), ask(("nvmlDeviceGetTotalEnergyConsumption",))
        return {
            "sm_clock_mhz": ask(("nvmlDeviceGetClockInfo",), pynvml.NVML_CLOCK_SM),
            "mem_clock_mhz": ask(("nvmlDeviceGetClockInfo",), pynvml.NVML_CLOCK_MEM),
            "temperature_c": ask(("nvmlDeviceGetTemperature",), pynvml.NVML_TEMPERATURE_GPU),
            "throttle_mask": ask(("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "energy_j": None if energy_mj is None else energy_mj / 1e3,
        }

    return Sensor("pynvml", read, pynvml.nvmlShutdown, tuple(problems))


def _open_smi(uuid: str, problems: list[str]) -> Sensor | None:
    """nvidia-smi as a sensor: tens of milliseconds a reading and no energy counter. The mask's field was renamed once."""
    for mask_field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        command = ["nvidia-smi", "-i", uuid, "--format=csv,noheader,nounits",
                   f"--query-gpu=clocks.sm,clocks.mem,temperature.gpu,{mask_field},power.draw"]  # fmt: skip

        def read(command: list[str] = command) -> dict:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
            return _parse_smi(done.stdout)

        try:
            read()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"nvidia-smi: {error}")
            continue
        return Sensor("nvidia-smi", _or_unknown(read), _nothing, tuple(problems))
    return None


def _or_unknown(read: Callable[[], dict]) -> Callable[[], dict]:
    """A reading that fails in mid-contest (a slow nvidia-smi) is an unknown one that says so, it does not cost the cell."""

    def guarded() -> dict:
        try:
            return read()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {field: None for field in GPU_FIELDS} | {"problem": str(error)}

    return guarded


def _parse_smi(line: str) -> dict:
    """One csv line of the query above. Raises ValueError where it has not its five fields."""
    fields = [field.strip() for field in line.strip().split(",")]
    if len(fields) != len(GPU_FIELDS) - 1:
        raise ValueError(f"nvidia-smi's answer needs {len(GPU_FIELDS) - 1} fields, got {line=}")

    def number(text: str) -> float | None:
        try:
            return float(int(text, 16)) if text.startswith("0x") else float(text)
        except ValueError:  # "[N/A]", "[Not Supported]"
            return None

    values = dict(zip(GPU_FIELDS, map(number, fields)))
    mask = values["throttle_mask"]
    return values | {"throttle_mask": None if mask is None else int(mask), "energy_j": None}
