"""The golden table calls each GPU operator as its CPU reference: same arguments, shapes and dtypes. Logic only, never bits.

Not here: what the interpreter cannot run (Gluon's prefill, which the linear layer's gradient calls too), what takes it half a minute
(attention's gradient), and the decoder, which chooses by device.
"""

import math
import os

import pytest
import torch

from studies.determinism.golden_operators import OPERATORS
from studies.determinism.golden_values import seed_of

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]
LEFT_OUT = {"linear, backward", "attention, backward", "decoder"}
CHEAPEST = {"linear": "K of one step, fp32 weights", "linear, integer": "hard values, fp32 activations, b6", "attention": "decode, ragged batch, bf16"}


def cheapest(name: str) -> str:
    """A case with work to do, of few elements."""
    operator = OPERATORS[name]
    sizes = {case: sum(t.numel() for t in operator.inputs(0, **params)) for case, params in operator.cases.items()}
    return CHEAPEST.get(name) or min((c for c in sizes if not c.startswith("no ")), key=lambda c: sizes[c] or math.inf)


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - LEFT_OUT))
def test_the_gpu_operator_takes_and_gives_what_its_reference_does(name):
    operator, case = OPERATORS[name], cheapest(name)
    params = dict(operator.cases[case])
    inputs = operator.inputs(seed_of(name, case), **params)
    options = {k: params[k] for k in operator.options if k in params}
    found, expected = ([y] if isinstance(y, torch.Tensor) else list(y) for y in (operator.gpu(*inputs, **options), operator.cpu(*inputs, **options)))
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
