"""The implementations that the study compares: the families of linear layers, each in rows, in pieces, or under a kernel's own schedule.

    y_MN = run("layercast", x_MK, w_NK, Schedule(rows=16))

What each computes stands in studies.models.families; here is how it is asked. Nothing here is timed: see contests.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.exact.decode import DecodeSchedule
from kernels.exact.integer import linear_integer, prepare_integer
from kernels.exact.integer_decode import IntegerDecodeSchedule
from kernels.exact.integer_prefill import IntegerPrefillSchedule
from kernels.exact.linear import linear_fma
from kernels.exact.prefill import PrefillSchedule
from kernels.exact.prefill_tiled import TiledSchedule
from studies.models.families import FAMILIES, fp32_precision

KINDS = {"decode": DecodeSchedule, "prefill": PrefillSchedule, "tiled": TiledSchedule, "integer_decode": IntegerDecodeSchedule, "integer_prefill": IntegerPrefillSchedule}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a result is computed, never what: batch rows, row chunks, threads, and a kernel's own choices (`kind` and its fields)."""

    rows: int = 64
    chunk_rows: int = 0  # 0: all rows at once
    threads: int = 0  # CPU threads; 0: the worker's
    kernel: Mapping[str, Any] = field(default_factory=dict)


def output_dtype(name: str) -> torch.dtype:
    """The dtype in which an implementation's results are compared."""
    return torch.float32 if FAMILIES[name].exact or FAMILIES[name].activations == torch.float32 else torch.bfloat16


def run(name: str, x_MK: torch.Tensor, w_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The first `schedule.rows` rows of x through the implementation, in pieces of `chunk_rows` where asked."""
    x_MK = x_MK[: schedule.rows]
    call = _scheduled(name, w_NK, dict(schedule.kernel)) if schedule.kernel else _plain(name, w_NK)
    return torch.cat([call(part) for part in x_MK.split(schedule.chunk_rows or x_MK.shape[0])])


def _plain(name: str, w_NK: torch.Tensor):
    """As a model runs it: the exact families read x as it is, a baseline in its own dtype."""
    family = FAMILIES[name]
    handle = family.prepare(w_NK)

    def call(x_MK: torch.Tensor) -> torch.Tensor:
        with fp32_precision(family.precision):
            return family.linear(x_MK if family.exact else x_MK.to(family.activations), handle).to(output_dtype(name))

    return call


def _scheduled(name: str, w_NK: torch.Tensor, kernel: dict[str, Any]):
    schedule = KINDS[kernel.pop("kind")](**kernel)
    if name == "fma":
        return lambda x_MK: linear_fma(x_MK, w_NK, schedule=schedule)
    weight = prepare_integer(w_NK, products="b9" if name.endswith("b9") else "b6")
    return lambda x_MK: linear_integer(x_MK, weight, schedule=schedule)
