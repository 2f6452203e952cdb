"""Claims about the modules that `exactify` puts in: each is its operator and one rounding, keeps its state, and refuses the rest."""

import pytest
import torch
from torch import nn

from kernels.exact import digest, linear_fma_ref, pack_weight, philox_bell
from kernels.exact.integer import linear_integer_ref
from kernels.exact.modules import ExactLinear, ExactRMSNorm, ExactRotaryEmbedding, attend
from kernels.exact.rope import rope_tables

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAMILIES = {"fma": linear_fma_ref, "integer": linear_integer_ref, "integer-b9": lambda x, w: linear_integer_ref(x, w, products="b9")}


def same(a, b):
    return digest(a) == digest(b)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("x_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("w_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("k", [64, 300, 37])  # spans of 8, of 37.5 groups (padded when packed), one span
def test_exact_linear_is_the_family_s_sum_a_bias_and_one_rounding(family, x_dtype, w_dtype, k):
    x, w, b = philox_bell((2, 3, k), 1, x_dtype), philox_bell((10, k), 2, w_dtype), philox_bell((10,), 3, w_dtype)
    layer = ExactLinear(w, b, family)
    want = (FAMILIES[family](x.view(6, k), w) + b.float()).view(2, 3, 10)
    assert same(layer(x), want.to(x_dtype)) and same(ExactLinear(w, b, family, out_dtype=FP32)(x), want)
    assert same(layer(x[0, 1]), want[0, 1].to(x_dtype)) and same(layer(x.transpose(0, 1)), want.transpose(0, 1).to(x_dtype))
    assert layer(x[:0]).shape == (0, 3, 10)
    assert f"in_features={k}, out_features=10, bias=True, family='{family}', {w_dtype}" in repr(layer)


@pytest.mark.parametrize("k", [64, 300, 37, 520])
def test_a_packed_weight_unpacks_to_the_same_bits_and_stands_in_the_state(k):
    w = philox_bell((10, k), 2, BF16)
    layer = ExactLinear(w, torch.zeros(10))
    layer._packed, layer.weight = pack_weight(w), None  # as it is on a GPU
    assert same(layer.plain_weight(), w) and same(layer.state_dict()["weight"], w) and str(BF16) in repr(layer)
    layer.load_state_dict({"weight": w * 2, "bias": torch.ones(10)})
    assert same(layer.plain_weight(), w * 2) and layer.bias[0] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_written_in_place_or_replaced_is_read_anew(family):
    x, w = philox_bell((2, 64), 1), philox_bell((8, 64), 2)
    layer = ExactLinear(w.clone(), None, family)
    layer(x)
    layer.weight.mul_(3)
    assert same(layer(x), FAMILIES[family](x, w * 3))
    layer.weight = nn.Parameter(w * 5, requires_grad=False)
    assert same(layer(x), FAMILIES[family](x, w * 5))


def test_exact_linear_refuses_what_it_cannot_do():
    w = torch.ones(8, 64)
    layer = ExactLinear(w)
    calls = {
        r"x is \[\.\.\., 64\]": lambda: layer(torch.ones(2, 63)), "bf16, fp16 or fp32 on a CPU": lambda: layer(torch.ones(2, 64, dtype=torch.float64)),
        "no gradient": lambda: layer(torch.ones(2, 64, requires_grad=True)), "family is one of": lambda: ExactLinear(w, None, "bf16"),
        r"need weight \[N, K\]": lambda: ExactLinear(w, torch.ones(7)), "weight, bias and output": lambda: ExactLinear(w.double()),
        "43690": lambda: ExactLinear(torch.ones(1, 43691), None, "integer"), "finite": lambda: ExactLinear(w / 0, None, "integer"),
    }  # fmt: skip
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="no gradient"):
        ExactLinear(w).requires_grad_()(torch.ones(2, 64))
    with torch.no_grad():
        assert layer(torch.ones(2, 64, requires_grad=True)).shape == (2, 8)


def test_non_finite_activations_stay_in_their_row():
    x = torch.ones(3, 64)
    x[1, 5] = float("nan")
    y = ExactLinear(torch.ones(8, 64))(x)
    assert torch.isnan(y[1]).all() and torch.isfinite(y[[0, 2]]).all()
    y = ExactRMSNorm(torch.ones(64), 1e-6)(x[None])
    assert y.shape == (1, 3, 64) and torch.isnan(y[0, 1]).all() and torch.isfinite(y[0, [0, 2]]).all()


@pytest.mark.parametrize("tokens", [1, 5, 70])  # a step; a chunk that holds padding of some rows; everything
def test_attend_gives_each_row_what_it_gets_alone_and_zeros_to_padding(tokens):
    keys, bounds = 70, [(0, 70), (67, 70), (3, 40), (66, 69), (70, 70)]
    q, k, v = philox_bell((5, keys, 4, 16), 1)[:, -tokens:], philox_bell((5, 2, keys, 16), 2), philox_bell((5, 2, keys, 16), 3)
    o = attend(q, k, v, torch.tensor(bounds, dtype=torch.int32))
    for b, (first, end) in enumerate(bounds):
        inside = [t for t in range(tokens) if first <= keys - tokens + t < end]
        outside = [t for t in range(tokens) if t not in inside]
        assert not o[b, outside].any()
        if inside:
            want = attend(q[b : b + 1, inside], k[b : b + 1, :, first:end], v[b : b + 1, :, first:end])
            assert same(o[b, inside], want[0])


def test_attend_refuses_bounds_of_another_shape():
    q, k = torch.zeros(2, 3, 2, 8), torch.zeros(2, 2, 3, 8)
    with pytest.raises(ValueError, match="bounds int32"):
        attend(q, k, k, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="T <= S"):
        attend(q, k[:, :, :2], k[:, :, :2])
    assert attend(q[:0], k[:0], k[:0]).shape == (0, 3, 2, 8)


def test_tables_keep_their_bits_when_the_module_is_cast():
    rotary = ExactRotaryEmbedding(head_dim=16, base=1e4, tokens=50).half().float()
    assert same(rotary.cos_PD, rope_tables(tokens=50, head_dim=16, base=1e4)[0]) and not rotary.state_dict()
