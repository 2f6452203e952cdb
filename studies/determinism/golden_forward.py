"""Golden questions on the operators of a forward pass: linear layers of both families, elementwise functions, norms, attention, sampling.

    FORWARD[0].cases["decode, 1 token, bf16"]                 # {"m": 1, "n": 96, "k": 4096}

Sizes are small and distinct shapes few: a CPU answers all of them in seconds, and a GPU compiles each specialisation once.
Legend: M rows or tokens, N outputs, K inputs, B batch rows, T new tokens, S tokens in the cache, H query heads, G key heads, D head_dim,
P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.exact import activations, attention, integer, linear, norm, prefill, rope, sampling, softmax
from studies.determinism import golden_values
from studies.determinism.golden_entry import DTYPES, Operator, Tensors
from studies.determinism.golden_values import integers

# ---------------------------------------------------------------- linear layers

_LINEAR = {
    "decode, 1 token, bf16": {"m": 1, "n": 96, "k": 4096},
    "decode, 4 tokens, bf16": {"m": 4, "n": 130, "k": 2056},
    "decode, 16 tokens, fp16": {"m": 16, "n": 64, "k": 1000, "x": "fp16", "w": "fp16"},
    "decode, fp32 activations": {"m": 2, "n": 48, "k": 1288, "x": "fp32"},
    "prefill, 64 tokens, bf16": {"m": 64, "n": 96, "k": 1024},
    "prefill, 130 tokens, bf16": {"m": 130, "n": 136, "k": 544},
    "prefill, 64 tokens, the plain kernel": {"m": 64, "n": 96, "k": 1024, "kernel": "plain"},
    "prefill, fp32 activations": {"m": 70, "n": 33, "k": 520, "x": "fp32"},
    "K not a multiple of 8": {"m": 7, "n": 33, "k": 333},
    "K of one step, fp32 weights": {"m": 2, "n": 5, "k": 13, "x": "fp32", "w": "fp32"},
    "hard values, bf16": {"m": 16, "n": 40, "k": 264, "values": "hard"},
    "hard values, fp32 activations": {"m": 16, "n": 40, "k": 264, "x": "fp32", "values": "hard"},
    "no tokens": {"m": 0, "n": 8, "k": 64},
    "no inputs": {"m": 3, "n": 8, "k": 0},
}
_INTEGER = {
    "decode, 1 token, bf16, b6": {"m": 1, "n": 96, "k": 4096, "products": "b6"},
    "decode, 16 tokens, fp32 activations, b6": {"m": 16, "n": 64, "k": 1000, "x": "fp32", "products": "b6"},
    "decode, 4 tokens, b9": {"m": 4, "n": 130, "k": 2056, "x": "fp32", "products": "b9"},
    "prefill, 70 tokens, b6": {"m": 70, "n": 96, "k": 1024, "x": "fp32", "products": "b6"},
    "prefill, 70 tokens, b9": {"m": 70, "n": 96, "k": 1024, "x": "fp32", "products": "b9"},
    "prefill, fp16, K not a multiple of 8": {"m": 33, "n": 33, "k": 333, "x": "fp16", "w": "fp16", "products": "b6"},
    "hard values, fp32 activations, b6": {"m": 16, "n": 40, "k": 264, "x": "fp32", "products": "b6", "values": "hard"},
    "hard values, prefill, b9": {"m": 24, "n": 40, "k": 264, "x": "fp32", "products": "b9", "values": "hard"},
    "no tokens": {"m": 0, "n": 8, "k": 64, "products": "b6"},
}


def _linear_inputs(seed: int, *, m: int, n: int, k: int, x: str = "bf16", w: str = "bf16", values: str = "bell", products: str = "", kernel: str = "") -> Tensors:
    return golden_values.values(values, (m, k), seed=seed, dtype=DTYPES[x]), golden_values.values("bell", (n, k), seed=seed, dtype=DTYPES[w], stream=1)


def _linear_gpu(x_MK: torch.Tensor, w_NK: torch.Tensor, *, kernel: str = "") -> torch.Tensor:
    """The kernel of the default policy, or the one that serves where that one cannot."""
    return linear.linear_fma(x_MK, w_NK, schedule=prefill.PrefillSchedule() if kernel == "plain" else None)


def _linear_cpu(x_MK: torch.Tensor, w_NK: torch.Tensor, *, kernel: str = "", engine: str = "auto") -> torch.Tensor:
    return linear.linear_fma_ref(x_MK, w_NK, engine=engine)


def _integer_gpu(x_MK: torch.Tensor, w_NK: torch.Tensor, *, products: str) -> torch.Tensor:
    return integer.linear_integer(x_MK, integer.prepare_integer(w_NK, products=products))


# ---------------------------------------------------------------- elementwise functions and norms

_EVERY = {
    "every bf16 value": {"values": "every", "x": "bf16"},
    "fp32 bit patterns": {"values": "bits", "x": "fp32"},
    "fp32 in [-100, 100]": {"values": "wide", "x": "fp32", "scale": 100.0},
}
_ROWS = {
    "one row of 576, bf16": {"m": 1, "k": 576, "x": "bf16"},
    "rows of 4096, fp32": {"m": 3, "k": 4096, "x": "fp32"},
    "ragged rows, fp16": {"m": 5, "k": 333, "x": "fp16"},
    "hard values, fp32": {"m": 16, "k": 264, "x": "fp32", "values": "hard"},
    "no rows": {"m": 0, "k": 576, "x": "bf16"},
}
_FEW_ROWS = {case: _ROWS[case] for case in ("one row of 576, bf16", "rows of 4096, fp32", "hard values, fp32")}


def _vector(seed: int, *, values: str, x: str, scale: float = 1.0) -> Tensors:
    return (golden_values.values(values, (1 << 16,), seed=seed, dtype=DTYPES[x], scale=scale),)


def _gate_and_up(seed: int, *, values: str, x: str, scale: float = 1.0) -> Tensors:
    gate, = _vector(seed, values=values, x=x, scale=scale)
    return gate, golden_values.values("bell", tuple(gate.shape), seed=seed, dtype=gate.dtype, stream=1)


def elementwise(name: str, cpu: Callable, gpu: Callable, inputs: Callable[..., Tensors] = _vector) -> Operator:
    """An operator without parameters over every bf16 value, fp32 bit patterns and a range of fp32 values."""
    return Operator(name=name, family="ieee", cases=_EVERY, inputs=inputs, cpu=cpu, gpu=gpu)


def rows(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    return (golden_values.values(values, (m, k), seed=seed, dtype=DTYPES[x]),)


def rows_and_weight(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    return *rows(seed, m=m, k=k, x=x, values=values), golden_values.values("bell", (k,), seed=seed, dtype=DTYPES[x], stream=1)


def _sum_and_weight(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    """h, delta and the weight."""
    h, weight = rows_and_weight(seed, m=m, k=k, x=x, values=values)
    return h, golden_values.values("bell", (m, k), seed=seed, dtype=DTYPES[x], stream=2), weight


def _rows_weight_bias(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    return *rows_and_weight(seed, m=m, k=k, x=x, values=values), golden_values.values("bell", (k,), seed=seed, dtype=DTYPES[x], stream=2)


# ---------------------------------------------------------------- positions and attention

_ROPE = {
    "bf16": {"b": 2, "t": 5, "h": 3, "d": 64, "x": "bf16"},
    "fp32, hard values": {"b": 4, "t": 4, "h": 2, "d": 128, "x": "fp32", "values": "hard"},
}
# total: tokens in the cache after this step, count: how many of them are new, by batch row
_ATTENTION = {
    "decode, ragged batch, bf16": {"total": [200, 65, 1], "count": [1, 1, 1], "h": 4, "g": 2, "d": 64},
    "prefill, bf16": {"total": [80, 33, 0], "count": [80, 33, 0], "h": 4, "g": 2, "d": 64},
    "a later chunk of a prompt": {"total": [150], "count": [40], "h": 6, "g": 2, "d": 64},
    "hard values, fp32 queries": {"total": [70, 16], "count": [16, 16], "h": 8, "g": 1, "d": 64, "x": "fp32", "values": "hard"},
}


def rope_inputs(seed: int, *, b: int, t: int, h: int, d: int, x: str, values: str = "bell") -> Tensors:
    """x_BTHD, positions and the tables: a wrong table shows as wrong inputs."""
    cos_PD, sin_PD = rope.rope_tables(tokens=512, head_dim=d, base=1e5)
    return golden_values.values(values, (b, t, h, d), seed=seed, dtype=DTYPES[x]), integers((b, t), 512, seed=seed, stream=1), cos_PD, sin_PD


def _attention_inputs(seed: int, *, total: list[int], count: list[int], h: int, g: int, d: int, x: str = "bf16", values: str = "bell") -> Tensors:
    """q_BTHD, k_BSGD, v_BSGD and both lengths."""
    b, longest = len(total), max(total)
    q = golden_values.values(values, (b, max(count), h, d), seed=seed, dtype=DTYPES[x])
    k, v = (golden_values.values("bell", (b, longest, g, d), seed=seed, dtype=torch.bfloat16, stream=stream) for stream in (1, 2))
    return q, k, v, torch.tensor(total, dtype=torch.int32), torch.tensor(count, dtype=torch.int32)


def _with_cache(function: str, **options: str) -> Callable[..., torch.Tensor]:
    def run(q_BTHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, total_B: torch.Tensor, count_B: torch.Tensor) -> torch.Tensor:
        cache = attention.make_cache(k_BSGD.shape[0], k_BSGD.shape[1], k_BSGD.shape[2], k_BSGD.shape[3], dtype=k_BSGD.dtype, device=k_BSGD.device)
        attention.append(cache, k_BSGD, v_BSGD, torch.zeros_like(total_B), total_B)
        return getattr(attention, function)(q_BTHD, cache, total_B - count_B, count_B, **options)

    return run


# ---------------------------------------------------------------- logits and tokens

_IGNORED = 3  # of the rows' targets, one in so many is ignored
_LOGITS = {
    "one row of 49152, fp32": {"m": 1, "k": 49152, "x": "fp32"},
    "rows of 1000, bf16": {"m": 5, "k": 1000, "x": "bf16"},
    "hard values, fp32": {"m": 16, "k": 264, "x": "fp32", "values": "hard"},
    "no rows": {"m": 0, "k": 300, "x": "fp32"},
}
_DRAWS = {
    "temperature 1": {"m": 3, "k": 49152, "x": "fp32", "temperature": 1.0, "seed": 11},
    "temperature 0.3, bf16": {"m": 8, "k": 1000, "x": "bf16", "temperature": 0.3, "seed": 2**64 - 3},
    "hard values": {"m": 16, "k": 264, "x": "fp32", "values": "hard", "temperature": 0.7, "seed": 5},
}


def logits_and_target(seed: int, *, m: int, k: int, x: str, values: str = "bell") -> Tensors:
    return *rows(seed, m=m, k=k, x=x, values=values), integers((m,), k, seed=seed, stream=1)


def _logits_and_some_ignored(seed: int, **params: Any) -> Tensors:
    logits, target = logits_and_target(seed, **params)
    target[::_IGNORED] = -100
    return logits, target


def _losses(losses: Callable, mean: Callable) -> Callable[..., Tensors]:
    return lambda logits, target: (losses(logits, target), mean(logits, target))


def _draw_inputs(question: int, *, m: int, k: int, x: str, temperature: float, seed: int, values: str = "bell") -> Tensors:
    """logits_MV, requests and positions."""
    logits, = rows(question, m=m, k=k, x=x, values=values)
    return logits * 8, integers((m,), 1 << 31, seed=question, stream=1), integers((m,), 1 << 20, seed=question, stream=2)


def _drawing(function: Callable) -> Callable[..., torch.Tensor]:
    return lambda logits, request, position, *, temperature, seed: function(logits, seed=seed, request_M=request, position_M=position, temperature=temperature)


FORWARD = (
    Operator(name="linear", family="fma", cases=_LINEAR, inputs=_linear_inputs, cpu=_linear_cpu, gpu=_linear_gpu, options=("kernel",),
             second=partial(_linear_cpu, engine="torch")),
    Operator(name="linear, integer", family="integer", cases=_INTEGER, inputs=_linear_inputs, cpu=integer.linear_integer_ref, gpu=_integer_gpu,
             options=("products",), second=partial(integer.linear_integer_ref, engine="int64")),
    Operator(name="attention", family="fma", cases=_ATTENTION, inputs=_attention_inputs, cpu=_with_cache("attention_ref"), gpu=_with_cache("attention"),
             second=_with_cache("attention_ref", engine="torch")),
    Operator(name="rmsnorm", family="ieee", cases=_ROWS, inputs=rows_and_weight, cpu=norm.rmsnorm_ref, gpu=norm.rmsnorm),
    Operator(name="add_rmsnorm", family="ieee", cases=_FEW_ROWS, inputs=_sum_and_weight, cpu=norm.add_rmsnorm_ref, gpu=norm.add_rmsnorm),
    Operator(name="layernorm", family="ieee", cases=_FEW_ROWS, inputs=_rows_weight_bias, cpu=norm.layernorm_ref, gpu=norm.layernorm),
    Operator(name="rope", family="ieee", cases=_ROPE, inputs=rope_inputs, cpu=rope.rope_ref, gpu=rope.rope),
    elementwise("exp", activations.exp_ref, activations.exp),
    elementwise("log", activations.log_ref, activations.log),
    elementwise("tanh", activations.tanh_ref, activations.tanh),
    elementwise("erf", activations.erf_ref, activations.erf),
    elementwise("silu", activations.silu_ref, activations.silu),
    elementwise("swiglu", activations.swiglu_ref, activations.swiglu, _gate_and_up),
    elementwise("gelu", activations.gelu_ref, activations.gelu),
    elementwise("gelu_erf", activations.gelu_erf_ref, activations.gelu_erf),
    Operator(name="softmax", family="ieee", cases=_LOGITS, inputs=rows, cpu=softmax.softmax_ref, gpu=softmax.softmax),
    Operator(name="log_softmax", family="ieee", cases=_LOGITS, inputs=rows, cpu=softmax.log_softmax_ref, gpu=softmax.log_softmax),
    Operator(name="cross_entropy", family="ieee", cases=_LOGITS, inputs=_logits_and_some_ignored, cpu=_losses(softmax.token_losses_ref, softmax.cross_entropy_ref),
             gpu=_losses(softmax.token_losses, softmax.cross_entropy)),
    Operator(name="argmax", family="ieee", cases=_LOGITS, inputs=rows, cpu=sampling.argmax_ref, gpu=sampling.argmax),
    Operator(name="sample", family="ieee", cases=_DRAWS, inputs=_draw_inputs, cpu=_drawing(sampling.sample_ref), gpu=_drawing(sampling.sample),
             options=("temperature", "seed")),
)
