"""The implementations that the study compares, each behind one signature.

    y_MN = IMPLEMENTATIONS["layercast"].run(x_MK, w_NK, Schedule())

`claims` says in which columns the authors of an implementation promise equal bits: it is judged there
and nowhere else. Ours are the exact family; the others are negative controls, written as their users
run them. Nothing here is timed: see contests.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from kernels.exact.linear import linear_fma_ref


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a result is computed, never what: batch rows, row chunks, threads, and a kernel's own choices."""

    rows: int = 64
    chunk_rows: int = 0  # 0: all rows at once
    threads: int = 0  # CPU threads; 0: the worker's
    kernel: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """`output` is the dtype in which results are compared; fp32 results are compared as they are."""

    name: str
    title: str
    claims: tuple[str, ...]  # of "batch", "gpu", "cpu": across what its authors promise equal bits
    run: Callable[[torch.Tensor, torch.Tensor, Schedule], torch.Tensor]
    output: torch.dtype = torch.float32


def _fma(x_MK: torch.Tensor, w_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    if x_MK.device.type == "cpu":
        return linear_fma_ref(x_MK, w_NK, engine=schedule.kernel.get("engine", "auto"))
    from kernels.exact.decode import DecodeSchedule
    from kernels.exact.linear import linear_fma
    from kernels.exact.prefill import PrefillSchedule

    kinds = {"decode": DecodeSchedule, "prefill": PrefillSchedule}
    chosen = dict(schedule.kernel)
    kind = chosen.pop("kind", None)
    return linear_fma(x_MK, w_NK, schedule=kinds[kind](**chosen) if kind else None)


def _layercast(x_MK: torch.Tensor, w_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """As the authors' patch does it (arXiv 2506.09501): the weight is upcast in memory at each call, then SGEMM."""
    return F.linear(x_MK.float(), w_NK.to(torch.float32))


def _bf16(x_MK: torch.Tensor, w_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    dtype = torch.float16 if w_NK.dtype == torch.float16 else torch.bfloat16
    return F.linear(x_MK.to(dtype), w_NK.to(dtype)).to(torch.bfloat16)


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        Implementation(name="fma", title="fma (ours)", claims=("batch", "gpu", "cpu"), run=_fma),
        Implementation(name="layercast", title="LayerCast", claims=("batch", "gpu"), run=_layercast),
        Implementation(name="sgemm", title="fp32 SGEMM", claims=(), run=_layercast),
        Implementation(name="bf16", title="bf16 GEMM", claims=(), run=_bf16, output=torch.bfloat16),
    )
}


def run(implementation: Implementation, x_MK: torch.Tensor, w_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The first `schedule.rows` rows of x through the implementation, in pieces of `chunk_rows` where asked."""
    x_MK = x_MK[: schedule.rows]
    step = schedule.chunk_rows or x_MK.shape[0]
    parts = [implementation.run(part, w_NK, schedule) for part in x_MK.split(step)]
    return torch.cat(parts)
