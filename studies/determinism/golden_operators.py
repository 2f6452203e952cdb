"""The golden operators: one entry each, with how its inputs are made, what the CPU computes and what a GPU computes.

    OPERATORS["linear"].cases["decode, 1 token, bf16"]        # its parameters

Adding an operator is adding one entry to a table: a name, a family, cases (parameters, plain JSON), a function that makes the inputs
from parameters and a seed, and the CPU and GPU functions of the inputs. Then `python -m studies.determinism.golden --write`.
Sizes are small and shapes few: a CPU must answer all of them in half a minute, and a GPU compiles each specialisation.
Legend: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.exact import activations, linear, norm
from kernels.exact.order import ORDER_VERSION
from studies.determinism.golden_values import values

VERSIONS = {"order": ORDER_VERSION}  # of every order that a golden digest belongs to
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`inputs(seed, **params)` gives CPU tensors; `cpu` and `gpu` take them, on their device, and those params that `options` names; they give one tensor or several."""

    name: str
    family: str
    cases: Mapping[str, Mapping[str, Any]]
    inputs: Callable[..., Tensors]
    cpu: Callable[..., torch.Tensor | Tensors]
    gpu: Callable[..., torch.Tensor | Tensors]
    options: tuple[str, ...] = ()


# ---------------------------------------------------------------- linear layers

_LINEAR = {
    "decode, 1 token, bf16": {"m": 1, "n": 96, "k": 4096},
    "decode, 4 tokens, bf16": {"m": 4, "n": 130, "k": 2056},
    "decode, 16 tokens, fp16": {"m": 16, "n": 64, "k": 1000, "x": "fp16", "w": "fp16"},
    "decode, fp32 activations": {"m": 2, "n": 48, "k": 1288, "x": "fp32"},
    "prefill, 64 tokens, bf16": {"m": 64, "n": 96, "k": 1024},
    "prefill, fp32 activations": {"m": 70, "n": 33, "k": 520, "x": "fp32"},
    "K not a multiple of 8": {"m": 7, "n": 33, "k": 333},
    "K of one step, fp32 weights": {"m": 2, "n": 5, "k": 13, "x": "fp32", "w": "fp32"},
    "hard values, bf16": {"m": 16, "n": 40, "k": 264, "values": "hard"},
    "hard values, fp32 activations": {"m": 16, "n": 40, "k": 264, "x": "fp32", "values": "hard"},
    "no tokens": {"m": 0, "n": 8, "k": 64},
    "no inputs": {"m": 3, "n": 8, "k": 0},
}


def _linear_inputs(seed: int, *, m: int, n: int, k: int, x: str = "bf16", w: str = "bf16", values: str = "bell") -> Tensors:
    return _values(values, (m, k), seed=seed, dtype=DTYPES[x]), _values("bell", (n, k), seed=seed, dtype=DTYPES[w], stream=1)


_values = values  # `values` is a parameter's name above


# ---------------------------------------------------------------- elementwise

_EVERY = {"every bf16 value": {"values": "every", "x": "bf16"}, "fp32 bit patterns": {"values": "bits", "x": "fp32"}, "fp32 in [-100, 100]": {"values": "wide", "x": "fp32", "scale": 100.0}}


def _vector(seed: int, *, values: str, x: str, scale: float = 1.0) -> Tensors:
    return (_values(values, (1 << 16 if values == "every" else 1 << 13,), seed=seed, dtype=DTYPES[x], scale=scale),)


def _gate_and_up(seed: int, *, values: str, x: str, scale: float = 1.0) -> Tensors:
    gate = _vector(seed, values=values, x=x, scale=scale)[0]
    return gate, _values("bell", tuple(gate.shape), seed=seed, dtype=gate.dtype, stream=1)


def elementwise(name: str, cpu: Callable, gpu: Callable, inputs: Callable[..., Tensors] = _vector) -> Operator:
    """An operator without parameters over every bf16 value, fp32 bit patterns and a range of fp32 values."""
    return Operator(name=name, family="ieee", cases=_EVERY, inputs=inputs, cpu=cpu, gpu=gpu)


# ---------------------------------------------------------------- norms

_ROWS = {
    "one row of 576, bf16": {"m": 1, "k": 576, "x": "bf16"},
    "rows of 4096, fp32": {"m": 3, "k": 4096, "x": "fp32"},
    "ragged rows, fp16": {"m": 5, "k": 333, "x": "fp16"},
    "hard values, fp32": {"m": 16, "k": 264, "x": "fp32", "values": "hard"},
    "no rows": {"m": 0, "k": 576, "x": "bf16"},
}


def _rows_and_weight(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    return _values(values, (m, k), seed=seed, dtype=DTYPES[x]), _values("bell", (k,), seed=seed, dtype=DTYPES[x], stream=1)


# ---------------------------------------------------------------- the table

_TABLE = (
    Operator(name="linear", family="fma", cases=_LINEAR, inputs=_linear_inputs, cpu=linear.linear_fma_ref, gpu=linear.linear_fma),
    Operator(name="rmsnorm", family="ieee", cases=_ROWS, inputs=_rows_and_weight, cpu=norm.rmsnorm_ref, gpu=norm.rmsnorm),
    elementwise("exp", activations.exp_ref, activations.exp),
    elementwise("silu", activations.silu_ref, activations.silu),
    elementwise("swiglu", activations.swiglu_ref, activations.swiglu, _gate_and_up),
    elementwise("gelu", activations.gelu_ref, activations.gelu),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}
assert len(OPERATORS) == len(_TABLE), "an operator is listed once"
