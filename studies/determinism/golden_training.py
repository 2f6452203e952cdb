"""Golden questions on a training step: gradients of the decoder's operators, and AdamW.

    TRAINING[0].name        # "linear, backward"

Legend: M tokens, N outputs, K inputs, B batch rows, T tokens, H query heads, G key heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.exact import attention_backward, backward, optimizer
from studies.determinism.golden_entry import DTYPES, Operator, Tensors
from studies.determinism.golden_forward import logits_and_target, rope_inputs, rows_and_weight
from studies.determinism.golden_values import integers, values

_LINEAR = {
    "20 tokens, bf16": {"m": 20, "n": 48, "k": 72, "x": "bf16"},
    "264 tokens, fp32 gradients": {"m": 264, "n": 33, "k": 40, "x": "fp32"},
}
_NORM = {"rows of 576, bf16": {"m": 9, "k": 576, "x": "bf16"}, "300 rows, fp32": {"m": 300, "k": 96, "x": "fp32"}}
_GATE = {"bell, bf16": {"x": "bf16", "kind": "bell"}, "fp32 in [-100, 100]": {"x": "fp32", "kind": "wide"}}
_ROPE = {"fp32": {"b": 2, "t": 5, "h": 3, "d": 64, "x": "fp32"}}
_LOGITS = {"rows of 1000, fp32": {"m": 5, "k": 1000, "x": "fp32"}, "a long row, bf16": {"m": 2, "k": 4097, "x": "bf16"}}
_TOKENS = {"40 tokens, 10 of 16 ids, fp32": {"m": 40, "k": 72, "v": 16, "x": "fp32"}, "no tokens": {"m": 0, "k": 72, "v": 3, "x": "bf16"}}
_ATTENTION = {"70 tokens, grouped heads, bf16": {"b": 1, "t": 70, "h": 4, "g": 2, "d": 64}}
_ADAMW = {"step 1": {"step": 1}, "step 1000, no decay": {"step": 1000, "decay": False}}


def _linear_inputs(seed: int, *, m: int, n: int, k: int, x: str) -> Tensors:
    """dy_MN, x_MK, w_NK."""
    kinds = (((m, n), DTYPES[x]), ((m, k), torch.bfloat16), ((n, k), torch.bfloat16))
    return tuple(values("bell", shape, seed=seed, dtype=dtype, stream=i) for i, (shape, dtype) in enumerate(kinds))


def _norm_inputs(seed: int, *, m: int, k: int, x: str) -> Tensors:
    return values("bell", (m, k), seed=seed, dtype=DTYPES[x], stream=2), *rows_and_weight(seed, m=m, k=k, x=x)


def _gate_inputs(seed: int, *, x: str, kind: str) -> Tensors:
    """dy, gate, up."""
    return tuple(values("bell" if i != 1 else kind, (4096,), seed=seed, dtype=DTYPES[x], stream=i, scale=100.0) for i in range(3))


def _token_inputs(seed: int, *, m: int, k: int, v: int, x: str) -> Tensors:
    """dh_MK and ids: some appear often, some never."""
    return values("bell", (m, k), seed=seed, dtype=DTYPES[x]), integers((m,), max(1, v - 6), seed=seed, stream=1)


def _embedding(function: Callable) -> Callable[..., torch.Tensor]:
    return lambda dh, ids, *, v: function(dh, ids, v)


def _attention_inputs(seed: int, *, b: int, t: int, h: int, g: int, d: int) -> Tensors:
    """do, o, q, k, v. o is any tensor here: its use in the gradient is what is asked about, not its origin."""
    shapes = ((b, t, h, d),) * 3 + ((b, t, g, d),) * 2
    return tuple(values("bell", shape, seed=seed, dtype=torch.float32 if i < 2 else torch.bfloat16, stream=i) for i, shape in enumerate(shapes))


def _adamw_inputs(seed: int, *, step: int, decay: bool = True) -> Tensors:
    """param, grad, m, v >= 0; the gradient holds hard values."""
    param, m, v = (values("bell", (16, 264), seed=seed, stream=i) for i in (0, 2, 3))
    return param, values("hard", (16, 264), seed=seed, stream=1), m, v.abs()


def _adamw(function: Callable) -> Callable[..., Tensors]:
    return lambda p, g, m, v, *, step, decay=True: function(p, g, m, v, step=step, config=optimizer.AdamW(), decay=decay)


TRAINING = (
    Operator(name="linear, backward", family="fma", cases=_LINEAR, inputs=_linear_inputs, cpu=backward.linear_backward_ref, gpu=backward.linear_backward),
    Operator(name="attention, backward", family="fma", cases=_ATTENTION, inputs=_attention_inputs,
             cpu=attention_backward.attention_backward_ref, gpu=attention_backward.attention_backward),
    Operator(name="rmsnorm, backward", family="ieee", cases=_NORM, inputs=_norm_inputs, cpu=backward.rmsnorm_backward_ref, gpu=backward.rmsnorm_backward),
    Operator(name="swiglu, backward", family="ieee", cases=_GATE, inputs=_gate_inputs, cpu=backward.swiglu_backward_ref, gpu=backward.swiglu_backward),
    Operator(name="rope, backward", family="ieee", cases=_ROPE, inputs=rope_inputs, cpu=backward.rope_backward_ref, gpu=backward.rope_backward),
    Operator(name="cross_entropy, backward", family="ieee", cases=_LOGITS, inputs=logits_and_target,
             cpu=backward.cross_entropy_backward_ref, gpu=backward.cross_entropy_backward),
    Operator(name="embedding, backward", family="ieee", cases=_TOKENS, inputs=_token_inputs, options=("v",),
             cpu=_embedding(backward.embedding_backward_ref), gpu=_embedding(backward.embedding_backward)),
    Operator(name="adamw", family="ieee", cases=_ADAMW, inputs=_adamw_inputs, options=("step", "decay"),
             cpu=_adamw(optimizer.adamw_step_ref), gpu=_adamw(optimizer.adamw_step)),
)
