"""Claims about the logic of a packed training step as a GPU runs it, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

The engine's GPU operators against its reference, float32 both. EPS, relative to the largest element: about twelve sums in a row, each over at most 64
terms in another order, sqrt(64) 2^-24 apiece, times 10 for what norms and softmax may amplify.
"""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell  # noqa: E402
from studies.models.config import LlamaConfig  # noqa: E402
from studies.plora.adapter import AdapterConfig, PackShape, SlotShape  # noqa: E402
from studies.plora.data import synthetic  # noqa: E402
from studies.plora.engine import Base, EnginePack  # noqa: E402
from studies.plora.engine.packed import AllAtOnce  # noqa: E402

EPS = 12 * 10 * 64**0.5 * 2**-24
CONFIG = LlamaConfig(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, vocabulary=32, context_tokens=64, rope_base=1e4, rms_eps=1e-6, qkv_bias=True, tied_head=False)
SLOTS = (SlotShape(rank=8, rows=2), SlotShape(rank=16), SlotShape(rank=16))
ADAPTERS = {
    0: AdapterConfig(rank=3, alpha=9.0, learning_rate=1e-2, batch=9, budget_tokens=1000, seed=1, warmup=0.0),
    2: AdapterConfig(rank=16, alpha=16.0, learning_rate=1e-2, batch=1, budget_tokens=1000, seed=2, warmup=0.0, dropout=0.5),
}  # slot 1 is empty


def pack_with(ops=None, slots=SLOTS, adapters=ADAPTERS) -> EnginePack:
    task = synthetic(vocabulary=32, classes=0, seed=0, rows=(12, 2, 2), tokens=(4, 8))
    pack = EnginePack(Base.random(CONFIG, seed=0), PackShape(tokens=8, slots=slots), task)
    for slot, adapter in adapters.items():
        pack.admit(slot, adapter)
        state = pack.adapters.state  # B as if trained: gradients of A are not zero
        for b in state.slot_views(slot, "master")[1::2]:  # float32: the copy that the model computes with is the same storage
            b[: adapter.rank].copy_(philox_bell((adapter.rank, b.shape[1]), adapter.seed, scale_log2=-3))
    if ops is not None:
        pack.ops = pack._judge.ops = ops
    return pack


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= EPS * b.abs().max()) and bool(b.abs().max() > 0)


def test_gradients_losses_and_evaluation_follow_the_reference() -> None:
    mine, reference = pack_with(AllAtOnce("triton")), pack_with()
    for pack in (mine, reference):
        pack.advance(1)  # slot 0 adds up, slot 2 takes its step
    got, want = (pack.adapters.state.slot_views(0, "grad") for pack in (mine, reference))
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
    got, want = (pack.adapters.state.slot_views(2, "m") for pack in (mine, reference))  # the first gradient of slot 2, clipped
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
    assert close(mine._open_loss_S, reference._open_loss_S) and close(mine._loss_S[2], reference._loss_S[2])
    assert not any(g.any() for g in mine.adapters.state.slot_views(1, "grad"))
    for pack in (mine, reference):  # what is judged is the same adapter
        pack.adapters.state.write(2, "master", reference.adapters.state.read(2, "master"))
    looks = [pack.evaluate()[0] for pack in (mine, reference)]
    assert all(abs(looks[0][slot].loss - looks[1][slot].loss) <= EPS * looks[1][slot].loss for slot in (0, 2))


def test_deterministic_bits_are_those_of_the_adapter_alone_and_follow_the_reference() -> None:
    """As far as an interpreter can say: every product of a slot's rows is one of its own tiles."""
    ops = AllAtOnce("triton", deterministic=True)
    pack, alone, reference = pack_with(ops), pack_with(ops, SLOTS[2:], {0: ADAPTERS[2]}), pack_with()
    for each in (pack, alone, reference):
        each.advance(1)
    a, b = pack.weights(2), alone.weights(0)
    assert all((a[n] == b[n]).all() for n in a) and pack.live()[2] == alone.live()[0]
    got, want = (p.adapters.state.slot_views(0, "grad") for p in (pack, reference))
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
