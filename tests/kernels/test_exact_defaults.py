"""Claim: a reference's bits do not depend on torch's default dtype or device, which belong to the program around it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
import torch
DEFAULT
from kernels.exact import activations, attention, attention_backward, backward, integer, linear, norm, optimizer, rope, sampling, softmax
from kernels.exact.digests import digest
from kernels.exact.philox import philox_bell, philox_uniform
from studies.models.config import LlamaConfig
from studies.models.decoder import Decoder, Sampling
from studies.models.llama import forward
from studies.models.prepared import prepare
from studies.models.synthetic import philox_weights
from studies.models.training import SMALL, cpu_operators, initial_state, token_batch, train_step

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
def ints(*values, dtype=torch.int64): return torch.tensor(values, dtype=dtype, device="cpu")
x, w, b = philox_bell((9, 2064), 1, scale_log2=3), philox_bell((40, 2064), 2, BF16), philox_bell((2064,), 3)
x[0, :4] = ints(0, 1, 2, 3).float() * 2.0**-149
heads, targets = [philox_bell((2, 70, h, 16), 4 + h) for h in (4, 2, 3)], ints(1, -100, 5, 2000, 7, 7, 3, 0, 2063)
found = {}
for engine in ("torch", "auto"):
    found["linear " + engine] = linear.linear_fma_ref(x, w, engine=engine)
for engine in integer.ENGINES:
    found["integer " + engine] = integer.linear_integer_ref(x, w, engine=engine, products="b9")
cache = attention.make_cache(2, 128, 2, 16)
attention.append(cache, heads[1], heads[1], ints(0, 0, dtype=I32), ints(70, 70, dtype=I32))
for engine in ("torch", "auto"):
    found["attention " + engine] = attention.attention_ref(heads[0], cache, ints(0, 0, dtype=I32), ints(70, 66, dtype=I32), engine=engine)
found["causal attention"] = attention.causal_attention_ref(heads[0][0].transpose(0, 1), heads[1][0].transpose(0, 1), heads[1][0].transpose(0, 1))
found["attention backward"] = attention_backward.attention_backward_ref(heads[0], heads[0], heads[0], heads[1], heads[1])
found |= {name: getattr(activations, name + "_ref")(x) for name in ("exp", "log", "tanh", "erf", "silu", "gelu", "gelu_erf")}
found["log, rare"] = activations.log_ref(philox_bell((64,), 1) * 2.0**-130)
found["swiglu"], found["norm"], found["add norm"] = activations.swiglu_ref(x, x), norm.rmsnorm_ref(x, b), norm.add_rmsnorm_ref(x, x, b)
found["layernorm"], found["softmax"], found["log softmax"] = norm.layernorm_ref(x, b, b), softmax.softmax_ref(x), softmax.log_softmax_ref(x)
found["loss"], found["argmax"] = softmax.cross_entropy_ref(x, targets), sampling.argmax_ref(x)
found["sample"] = sampling.sample_ref(x, seed=1, request_M=targets, position_M=targets, temperature=0.7)
found["rope"] = rope.rope_ref(heads[0], ints(*range(70)).expand(2, 70), *rope.rope_tables(tokens=70, head_dim=16, base=1e4))
found["linear backward"], found["norm backward"] = backward.linear_backward_ref(x[:, :40], x, w), backward.rmsnorm_backward_ref(x, x, b)
found["swiglu backward"], found["loss backward"] = backward.swiglu_backward_ref(x, x, x), backward.cross_entropy_backward_ref(x, targets)
found["embedding backward"] = backward.embedding_backward_ref(x, targets.clamp(min=0), 3000)
found["adamw"] = optimizer.adamw_step_ref(x, x, x, x.abs(), step=3, config=optimizer.AdamW())
tiny = LlamaConfig(layers=1, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=80, context_tokens=64, rope_base=1e4, rms_eps=1e-5)
weights = philox_weights(tiny, seed=1)
found["forward"] = forward(weights, [[1, 2, 3], [4] * 5])
for family in ("fma", "integer"):
    decoder = Decoder(prepare(weights, family=family), batch=3, capacity_tokens=16, sampling=Sampling(seed=1, temperature=1.0))
    found["decoder " + family] = decoder.prefill([[1, 2, 3], [4] * 5], chunk=2).clone(), decoder.step(), decoder.ids_B
result = train_step(initial_state(tiny, seed=1), token_batch(tiny, batch=2, tokens=8, seed=2), cpu_operators())
found["training"] = (result.loss, *result.gradients.values(), *result.state.parameters.values())
print(json.dumps({name: [digest(part) for part in (y if isinstance(y, tuple) else (y,))] for name, y in found.items()}))
"""


def _digests(default: str) -> dict[str, list[str]]:
    code = CODE.replace("DEFAULT", default)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain() -> dict[str, list[str]]:
    return _digests("")


@pytest.mark.parametrize("default", ["torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.bfloat16)", 'torch.set_default_device("meta")'])
def test_every_reference_has_the_same_bits_under_another_default(default: str, plain: dict[str, list[str]]) -> None:
    other = _digests(default)
    assert len(plain) > 35 and {name for name in plain if other[name] != plain[name]} == set()
