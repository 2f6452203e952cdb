"""Cell: one question of a study, and what a machine needs to answer it.

    cell = Cell(study="demo", measure="studies.demo.cells:answer", params={"n": 3}, label="n=3")
    cell.point          # sha256 of what is asked; conditions are not in it (see suite.identity)

A cell is data. It holds no code: `measure` names a function that a worker imports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from suite.identity import canonical_json, sha256_json

_MEASURE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a machine must offer. A machine that cannot is told so by `suite.machine.refusal`."""

    device: str = "cpu"  # "cpu" or "cuda"
    gpus: int = 0  # number of GPUs; a cuda cell needs at least one
    gpu_model: str | None = None  # whole words of the device's name, e.g. "H200"
    ranks: int = 1  # processes; above 1 the worker starts them with torchrun
    memory_gib: float = 0.0  # host memory
    gpu_memory_gib: float = 0.0
    exclusive: bool = False  # nothing else of ours may run: every timing cell
    fresh_process: bool = False
    packages: tuple[str, ...] = ()  # beyond the standard library, numpy, torch, triton
    programs: tuple[str, ...] = ()  # on the path, e.g. "ncu"
    time_limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise ValueError(f"a cell's device is one of {_DEVICES}, got device={self.device!r}")
        if self.device == "cuda" and self.gpus < 1:
            object.__setattr__(self, "gpus", 1)
        if self.device == "cpu" and self.gpus:
            raise ValueError(f"a cpu cell has no GPUs, got gpus={self.gpus}; set device='cuda'")
        if self.ranks < 1:
            raise ValueError(f"a cell has at least one rank, got ranks={self.ranks}")
        if not self.time_limit_s > 0:
            raise ValueError(f"a time limit is positive seconds, got time_limit_s={self.time_limit_s}")

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "packages": list(self.packages), "programs": list(self.programs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Needs:
        return cls(**{**data, "packages": tuple(data.get("packages", ())), "programs": tuple(data.get("programs", ()))})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One question: a measure function by name, its frozen parameters, seed and replicate.

    `inputs` are cells whose bundles this one reads, by role. `assets` are names known to
    `suite.assets`; their sha256s enter the key. `label` is for people and enters no digest.
    """

    study: str
    measure: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    replicate: int = 0
    inputs: Mapping[str, Cell] = field(default_factory=dict)
    assets: tuple[str, ...] = ()
    needs: Needs = field(default_factory=Needs)
    label: str = ""

    def __post_init__(self) -> None:
        if not _MEASURE.match(self.measure):
            raise ValueError(f"measure names a function as 'package.module:function', got measure={self.measure!r}")
        canonical_json(dict(self.params))  # raises ValueError on what has no canonical form
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        if not self.label:
            object.__setattr__(self, "label", " ".join(f"{k}={v}" for k, v in self.params.items()) or self.measure)

    @cached_property
    def point(self) -> str:
        """sha256 over (study, measure, params, seed, replicate, points of the inputs): what is asked, and about what."""
        asked = [self.study, self.measure, dict(self.params), self.seed, self.replicate, {role: c.point for role, c in self.inputs.items()}]
        return sha256_json(asked)

    @property
    def module(self) -> str:
        return self.measure.partition(":")[0]

    def __reduce__(self):  # MappingProxyType does not pickle; executors may need to
        return _rebuild, ({**self.__dict__, "params": dict(self.params), "inputs": dict(self.inputs)},)


def is_model(wanted: str, name: str) -> bool:
    """Whether a device's name has `wanted` in it as whole words, whatever their case: "H200" is in "NVIDIA H200", not in "NVIDIA GH200"."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9])", name, re.IGNORECASE) is not None


def _rebuild(fields: dict[str, Any]) -> Cell:
    fields.pop("point", None)
    return Cell(**fields)
