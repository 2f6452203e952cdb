"""What a measure function sees: its context, and the result it returns.

    def answer(ctx: Context, *, n: int) -> Result:
        return Result(metrics={"square": float(n * n)})

This is the only part of the harness, with `suite.timing`, that measure functions import: a change
here is a change of what they compute with, and so of their keys.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Strongest first: a derived number takes the weakest kind of its inputs.
KINDS = ("measured", "emulated", "interpreted", "replayed", "simulated", "extrapolated")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,119}\Z")


def weakest(kinds: list[str]) -> str:
    """The label of a number derived from numbers of these kinds."""
    return max(kinds, key=KINDS.index)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a measure function found.

    metrics: numbers by declared name (may be infinite or NaN: stored with a flag).
    facts:   short strings (digests, verdicts); they become tags.
    arrays:  numpy arrays, stored without pickle (bfloat16 travels as uint16).
    records: JSON values, each a file of its own (per-operator tables, plans).
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    records: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "measured"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a result's kind is one of {KINDS}, got kind={self.kind!r}")
        for group in (self.metrics, self.facts, self.arrays, self.records):
            for name in group:
                if not _NAME.match(name):
                    raise ValueError(f"a result's names are letters, digits, '_', '.', '-', got {name!r}")
        for name, array in self.arrays.items():
            if np.asarray(array).dtype.hasobject:
                raise ValueError(f"arrays hold numbers, got an object array {name!r}")


class Pause(Exception):
    """Raised by a measure function that saved its state in `ctx.state_dir` before `ctx.deadline`."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a cell runs, handed to its measure function by the worker."""

    device: str  # "cpu", "cuda", or "cuda:1" for the rank of that GPU
    seed: int = 0
    replicate: int = 0
    inputs: Mapping[str, Path] = field(default_factory=dict)  # role -> bundle folder
    state_dir: Path = Path(".")  # survives a pause and a kill
    deadline: float | None = None  # time.monotonic() value to pause by, or None
    rank: int = 0
    world_size: int = 1

    def input_arrays(self, role: str) -> dict[str, np.ndarray]:
        """The arrays that the input cell `role` left."""
        with np.load(self._input(role) / "arrays.npz", allow_pickle=False) as data:
            return {name: data[name] for name in data.files}

    def input_record(self, role: str, name: str) -> Any:
        """A JSON value that the input cell `role` left."""
        return json.loads((self._input(role) / f"{name}.json").read_text())

    def time_is_up(self) -> bool:
        """True once a long cell should save its state and raise Pause."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _input(self, role: str) -> Path:
        if role not in self.inputs:
            raise ValueError(f"a measure function reads declared inputs {sorted(self.inputs)}, got role={role!r}")
        return self.inputs[role]
