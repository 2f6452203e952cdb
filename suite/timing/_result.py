"""What a contest measured: raw samples, the paired ratios between variants, and the noise floor that the A/A control sets.

    np.savez("samples.npz", **result.to_arrays())
    with np.load("samples.npz", allow_pickle=False) as arrays:
        same = ContestResult.from_arrays(arrays)

It holds no opinion: verdicts stand in `suite.stats`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["ContestResult"]

_NOISE_QUANTILE = 0.95
_META_KEY = "contest_json"


@dataclass(frozen=True, kw_only=True)
class ContestResult:
    """Samples of one contest.

    samples: per entry name a float64 array [rounds, launches] of seconds per call, in the order of entry.
    control: (name, second name) of the variant that was entered twice.
    device, mode: "cpu" or "cuda:N"; "graph" or "eager".
    calls_per_launch, bytes_moved, flops: per entry name; the last two per call and None where the variant told none.
    telemetry: one dict before and one after each round (`round`, `when`, then what `suite.telemetry` read).
    conditions: how the contest went: warm-up and whether clocks were steady, the rounds after which outputs were
        checked, which entries were not checked, passes of the rotation per launch, the head start of a replay.
    """

    samples: dict[str, np.ndarray]
    control: tuple[str, str]
    device: str
    mode: str
    calls_per_launch: dict[str, int]
    bytes_moved: dict[str, int | None]
    flops: dict[str, int | None]
    telemetry: list[dict]
    conditions: dict

    def __post_init__(self) -> None:
        shapes = {np.shape(samples) for samples in self.samples.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes)):
            raise ValueError(f"a contest needs samples [rounds, launches] of one shape for all entries, got {shapes=}")
        for name, samples in self.samples.items():
            if not np.all(np.isfinite(samples)) or not np.all(samples > 0):
                raise ValueError(
                    f"a time needs to be finite and above 0 s, got {float(np.min(samples))=} for {name!r}; "
                    "a launch shorter than the clock's tick needs more calls"
                )
        missing = [name for name in self.control if name not in self.samples]
        if missing:
            raise ValueError(f"a control needs both its entries among the samples, got {missing=} of {list(self.samples)}")

    @property
    def names(self) -> tuple[str, ...]:
        """All entries in the order of entry, the control's second entry and eager ones included."""
        return tuple(self.samples)

    @property
    def rounds(self) -> int:
        return self.samples[self.control[0]].shape[0]

    def round_medians_s(self, name: str) -> np.ndarray:
        """Median seconds per call of each round, [rounds]. Raises ValueError for an unknown name."""
        if name not in self.samples:
            raise ValueError(f"a name needs to be one of the entries, got {name=}; choose from {list(self.samples)}")
        return np.median(self.samples[name], axis=1)

    def median_s(self, name: str) -> float:
        """Median over rounds of the rounds' median seconds per call."""
        return float(np.median(self.round_medians_s(name)))

    def gbps(self, name: str) -> float:
        """GB/s (1e9 bytes, read plus written) at the median time. Raises ValueError where bytes_moved is unknown."""
        return self._per_call("bytes_moved", name) / self.median_s(name) / 1e9

    def tflops(self, name: str) -> float:
        """TFLOP/s at the median time. Raises ValueError where flops is unknown."""
        return self._per_call("flops", name) / self.median_s(name) / 1e12

    def round_ratios(self, a: str, b: str) -> np.ndarray:
        """Paired per-round log ratios ln(time of a / time of b), [rounds]; above 0 where `a` is slower.

        Pairing takes out what both shared in a round: clocks, heat, a neighbour on the machine.
        """
        return np.log(self.round_medians_s(a)) - np.log(self.round_medians_s(b))

    def log_ratio(self, a: str, b: str) -> float:
        """ln(time of a / time of b), the median over rounds: this process's one number for a claim."""
        return float(np.median(self.round_ratios(a, b)))

    @property
    def control_log_ratio(self) -> float:
        """ln(time of the second entry / time of the first) of one and the same variant; 0 in a perfect world."""
        return self.log_ratio(self.control[1], self.control[0])

    @property
    def noise_floor(self) -> float:
        """The 95% quantile of |log ratio| between the two entries of the control, over rounds (conservative at the
        upper neighbour): one program differs from itself by that much here, so a smaller difference is noise."""
        spread = np.abs(self.round_ratios(self.control[1], self.control[0]))
        return float(np.quantile(spread, _NOISE_QUANTILE, method="higher"))

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        """Names of all throttle reasons that any reading saw, sorted; gpu_idle left out, as it slows nothing."""
        seen = {reason for reading in self.telemetry for reason in reading.get("throttle_reasons", [])}
        return tuple(sorted(seen - {"gpu_idle"}))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for an .npz that needs no pickle: one float64 array per entry and one of JSON text (utf-8 bytes)."""
        meta = {field: getattr(self, field) for field in _META_FIELDS} | {"names": list(self.samples)}
        text = json.dumps(meta, allow_nan=False, sort_keys=True).encode()
        arrays = {f"samples_{index}": samples for index, samples in enumerate(self.samples.values())}
        return arrays | {_META_KEY: np.frombuffer(text, dtype=np.uint8)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ContestResult:
        """The inverse of `to_arrays`. Raises ValueError where the JSON array or one of the samples is missing."""
        if _META_KEY not in arrays:
            raise ValueError(f"a contest's arrays need the key {_META_KEY!r}, got {sorted(arrays)}; is this a contest's file?")
        meta = json.loads(np.asarray(arrays[_META_KEY]).tobytes().decode())
        names = meta.pop("names")
        missing = [f"samples_{index}" for index in range(len(names)) if f"samples_{index}" not in arrays]
        if missing:
            raise ValueError(f"a contest's arrays need samples for each name, got {missing=} of {names=}; is the file whole?")
        samples = {name: np.asarray(arrays[f"samples_{index}"], dtype=np.float64) for index, name in enumerate(names)}
        return cls(samples=samples, **meta | {"control": tuple(meta["control"])})

    def _per_call(self, field: str, name: str) -> int:
        count = getattr(self, field).get(name)
        if count is None:
            raise ValueError(f"a rate needs the variant's {field}, got none for {name=}; give it to Variant")
        return count


_META_FIELDS = ("control", "device", "mode", "calls_per_launch", "bytes_moved", "flops", "telemetry", "conditions")
