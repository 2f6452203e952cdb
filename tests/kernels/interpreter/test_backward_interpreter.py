"""Claims about the logic of the gradient kernels, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

The interpreter's fma is mul + add. On small integers every operation is exact, so sums are compared bit for bit there; elsewhere a bound is.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.attention_backward import attention_backward, attention_backward_ref  # noqa: E402
from kernels.exact.backward import (  # noqa: E402
    cross_entropy_backward,
    cross_entropy_backward_ref,
    embedding_backward,
    embedding_backward_ref,
    linear_backward,
    linear_backward_ref,
    rmsnorm_backward,
    rmsnorm_backward_ref,
    swiglu_backward,
    swiglu_backward_ref,
    token_dot,
    token_dot_ref,
)
from kernels.exact.digests import digest  # noqa: E402
from kernels.exact.optimizer import AdamW, adamw_step, adamw_step_ref  # noqa: E402
from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.exact.prefill import PrefillSchedule  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
# Each of the n operations behind an element may be rounded once more than by fma: n * 2^-24 of the largest magnitude that it adds up.
# elementwise: at most 32 operations. norm: two lane sums of at most 4 + 10 beside them. attention over D = 3 and blocks of 64: score
# chains and delta (9), exp (16), l and two sums over tokens (64 each, 2 blocks): below 256.
U = 2.0**-24
OPERATIONS = {"elementwise": 32, "norm": 64, "attention": 256}


def bells(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [philox_bell(shape, 1, dtype, stream=i) for i, shape in enumerate(shapes)]


def integers(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Integers of -8 to 7: sums of products of them are exact."""
    return [torch.from_numpy(philox_integers(torch.Size(s).numel(), 5, i).astype("int64") % 16 - 8).float().view(s) for i, s in enumerate(shapes)]


def near(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], operations: int) -> None:
    for y, x in zip(got, want, strict=True):
        assert y.dtype == x.dtype and y.shape == x.shape
        assert float((y - x).abs().max()) <= operations * U * max(1.0, float(x.abs().max()))


@pytest.mark.parametrize("m", [0, 5, 40, 2064])  # none; one span; spans of 5; spans of 258: two chunks
def test_token_dot_covers_every_token_once(m: int) -> None:
    a, b = integers((m, 37), (m, 37))
    want = digest(token_dot_ref(a, b))
    for block, warps in ((16, 1), (64, 4)):
        assert digest(token_dot(a, b, block=block, num_warps=warps)) == want
    a, b = bells((m, 37), (m, 37), dtype=BF16)  # exact products: the order alone decides the bits
    assert digest(token_dot(a, b)) == digest(token_dot_ref(a, b))


def test_linear_gradients_cover_every_product_once() -> None:
    for m in (3, 40):
        operands = bells((m, 24), (m, 40), (24, 40), dtype=BF16)
        # the default kernel of many tokens is Gluon, which the interpreter does not run
        assert [digest(x) for x in linear_backward(*operands, schedule=PrefillSchedule())] == [digest(x) for x in linear_backward_ref(*operands)]


@pytest.mark.parametrize("m, k", [(3, 1500), (9, 33)])
def test_norm_gradients_follow_the_oracle(m: int, k: int) -> None:
    operands = bells((m, k), (m, k), (k,))
    near(rmsnorm_backward(*operands), rmsnorm_backward_ref(*operands), OPERATIONS["norm"])


def test_elementwise_gradients_and_adamw_follow_the_oracle() -> None:
    operands = bells((1500,), (1500,), (1500,))
    near(swiglu_backward(*operands), swiglu_backward_ref(*operands), OPERATIONS["elementwise"])
    p, g, m, v = (*operands, philox_bell((1500,), 9).abs())
    for decay in (True, False):
        config = AdamW(lr=0.125, weight_decay=0.5)
        want = adamw_step_ref(p, g, m, v, step=3, config=config, decay=decay)
        near(adamw_step(p, g, m, v, step=3, config=config, decay=decay), want, OPERATIONS["elementwise"] * int(want[0].abs().max() + 2))


def test_cross_entropy_gradient_follows_the_oracle() -> None:
    (logits,), target = bells((5, 300)), torch.tensor([0, 299, 7, 128, 1])
    for ids in (target, torch.where(target == 7, -100, target).int(), torch.where(target == 7, -1, target)):
        got, want = cross_entropy_backward(logits, ids, block=128), cross_entropy_backward_ref(logits, ids)
        assert bool((torch.isnan(got) == torch.isnan(want)).all())
        near((got.nan_to_num(),), (want.nan_to_num(),), OPERATIONS["elementwise"])


def test_embedding_gradient_adds_each_token_in_order() -> None:
    (dh,), ids = bells((60, 40)), torch.from_numpy(philox_integers(60, 3).astype("int64") % 7)
    for block in (16, 64):  # only additions: the order alone decides the bits
        assert digest(embedding_backward(dh, ids, 9, block=block)) == digest(embedding_backward_ref(dh, ids, 9))
        assert digest(embedding_backward(dh, ids.int(), 9, block=block)) == digest(embedding_backward_ref(dh, ids, 9))


# one token; two sequences, groups of 2 and a ragged block, one group at a time; two blocks of 64 keys, in tiles smaller and larger
@pytest.mark.parametrize("batch, tokens, heads, kv_heads, tiles", [(1, 1, 1, 1, ((16, 1),)), (2, 20, 4, 2, ((16, 1),)), (1, 66, 1, 1, ((32, 1), (128, 1 << 28)))])
def test_attention_gradients_follow_the_oracle_for_any_tiling(batch: int, tokens: int, heads: int, kv_heads: int, tiles: tuple) -> None:
    do, o, q, k, v = bells(*[(batch, tokens, heads, 3)] * 3, *[(batch, tokens, kv_heads, 3)] * 2)
    want = attention_backward_ref(do, o, q, k, v)
    for block, workspace_bytes in tiles:
        near(attention_backward(do, o, q, k, v, block=block, workspace_bytes=workspace_bytes), want, OPERATIONS["attention"])


def test_empty_batches_are_empty() -> None:
    for batch, tokens in ((0, 3), (2, 0)):
        operands = [torch.ones(batch, tokens, 2, 4)] * 3 + [torch.ones(batch, tokens, 1, 4)] * 2
        assert [x.shape for x in attention_backward(*operands)] == [x.shape for x in attention_backward_ref(*operands)]
    dx, dw = rmsnorm_backward(torch.ones(0, 5), torch.ones(0, 5), torch.ones(5))
    assert dx.shape == (0, 5) and dw.tolist() == [0.0] * 5
    assert embedding_backward(torch.ones(0, 5), torch.zeros(0, dtype=torch.int64), 2).tolist() == [[0.0] * 5] * 2
    assert cross_entropy_backward(torch.ones(0, 5), torch.zeros(0, dtype=torch.int64)).shape == (0, 5)
    assert swiglu_backward(*[torch.ones(0, 5)] * 3)[0].shape == (0, 5)
