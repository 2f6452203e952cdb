"""An entry of the golden table: an operator, its cases, how inputs are made, what a CPU and a GPU compute.

    Operator(name="softmax", family="ieee", cases={"rows of 300, fp32": {"m": 4, "k": 300}}, inputs=rows, cpu=softmax_ref, gpu=softmax)

It is data with functions in it; the tables stand in golden_forward.py, golden_training.py and golden_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("fma", "integer", "ieee")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`inputs(seed, **params)` gives CPU tensors; `cpu` and `gpu` take them, on their device, and those params that `options` names.

    Both give one tensor or several.

    family: "fma" and "integer" are the two exact families; "ieee" is what stands around them, IEEE operations in an explicit order.
    second: another CPU engine where there is one; where `cpu` gives wrong bits it tells by how much, and which of them is right.
    """

    name: str
    family: str
    cases: Mapping[str, Mapping[str, Any]]
    inputs: Callable[..., Tensors]
    cpu: Callable[..., torch.Tensor | Tensors]
    gpu: Callable[..., torch.Tensor | Tensors]
    options: tuple[str, ...] = ()
    second: Callable[..., torch.Tensor | Tensors] | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or not self.cases:
            raise ValueError(f"an operator has a family of {FAMILIES} and at least one case, got {self.name=} {self.family=}, {len(self.cases)} cases")
