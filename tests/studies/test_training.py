"""Claims about a training step on the CPU: its gradients are right, its bits are its own, and it learns."""

from dataclasses import replace

import pytest
import torch

from kernels.exact.digests import digest
from kernels.exact.optimizer import AdamW
from studies.models.config import LlamaConfig
from studies.models.training import (
    GOLDEN_TRAINING_SHA256,
    SMALL,
    cpu_operators,
    evidence_digest,
    initial_state,
    parameter_shapes,
    token_batch,
    train_step,
    training_digests,
)

TINY = LlamaConfig(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, vocabulary=64, context_tokens=128, rope_base=10000.0, rms_eps=1e-5)
# Our gradients and torch's float32 gradients of the same model are two float32 computations of one function, each backward stable
# operator by operator; only the order of sums differs. Their distances from float64 are then of one size: an order may cost up to the
# depth of its chains (here 64) against torch's pairwise sums, in the mean its square root: 8.
ORDER = 8.0


def torch_gradients(config: LlamaConfig, parameters: dict[str, torch.Tensor], ids_BT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, dict]:
    """The same decoder by torch's operators and autograd, written from the model's definition."""
    w = {name: p.to(dtype).requires_grad_() for name, p in parameters.items()}
    tokens, dim = ids_BT.shape[1] - 1, config.head_dim
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * config.rope_base ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    cos, sin = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(h, (config.hidden,), w[name], config.rms_eps)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    h = w["embed_tokens"][ids_BT[:, :-1]]
    for layer in range(config.layers):
        at = f"layers.{layer}"
        x = norm(h, f"{at}.input_layernorm")
        q, k, v = ((x @ w[f"{at}.self_attn.{part}_proj"].T).unflatten(2, (-1, dim)) for part in "qkv")
        q, k, v = (part.transpose(1, 2) for part in (turned(q), turned(k), v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + o.transpose(1, 2).flatten(2) @ w[f"{at}.self_attn.o_proj"].T
        y = norm(h, f"{at}.post_attention_layernorm")
        act = torch.nn.functional.silu(y @ w[f"{at}.mlp.gate_proj"].T) * (y @ w[f"{at}.mlp.up_proj"].T)
        h = h + act @ w[f"{at}.mlp.down_proj"].T
    logits = norm(h, "norm") @ w["embed_tokens" if config.tied_head else "lm_head"].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in w.items()}


def distance(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_is_as_near_to_float64_as_torch_s_float32(tied: bool) -> None:
    config = replace(TINY, tied_head=tied)
    state, ids = initial_state(config, seed=3), token_batch(config, batch=2, tokens=70, seed=4)
    result = train_step(state, ids, cpu_operators())
    exact_loss, exact = torch_gradients(config, state.parameters, ids, torch.float64)
    peer_loss, peer = torch_gradients(config, state.parameters, ids, torch.float32)
    assert list(result.gradients) == list(parameter_shapes(config)) == list(exact)
    # the loss is one number: the peer may hit it by luck, so one rounding of it is allowed beside
    assert abs(float(result.loss) - float(exact_loss)) <= ORDER * abs(float(peer_loss) - float(exact_loss)) + 2.0**-22 * float(exact_loss)
    for name, gradient in result.gradients.items():
        assert gradient.dtype == torch.float32
        assert distance(gradient, exact[name]) <= ORDER * distance(peer[name], exact[name]), name


def test_a_fixed_batch_is_learned() -> None:
    state, ids, losses = initial_state(TINY, seed=3, optimizer=AdamW(lr=1e-2)), token_batch(TINY, batch=2, tokens=16, seed=4), []
    for _ in range(12):
        result = train_step(state, ids, cpu_operators())
        state = result.state
        losses.append(float(result.loss))
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False)), losses
    assert losses[-1] < losses[0] / 2 and state.step == 12
    assert all(bool(torch.isfinite(x).all()) for group in (state.parameters, state.m, state.v) for x in group.values())


def test_threads_and_engines_change_no_bit_of_three_steps() -> None:
    state, ids, found = initial_state(TINY, seed=3), token_batch(TINY, batch=2, tokens=20, seed=4), []
    before = torch.get_num_threads()
    try:
        for threads, engine in ((1, "auto"), (2, "auto"), (1, "torch")):
            torch.set_num_threads(threads)
            found.append(training_digests(state, ids, cpu_operators(engine=engine), steps=3))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3 * (1 + 4 * len(parameter_shapes(TINY))) and len(set(found[0].values())) > len(found[0]) / 2


def test_one_changed_bit_shows_in_the_evidence() -> None:
    state, ids = initial_state(TINY, seed=3), token_batch(TINY, batch=1, tokens=8, seed=4)
    bumped = dict(state.parameters)
    bumped["norm"] = bumped["norm"].clone()
    bumped["norm"][5] = 1 + 2.0**-23
    a, b = (training_digests(s, ids, cpu_operators(), steps=1) for s in (state, replace(state, parameters=bumped)))
    assert a["step.1.parameter.norm"] != b["step.1.parameter.norm"] and a["step.1.gradient.embed_tokens"] != b["step.1.gradient.embed_tokens"]


def test_a_step_leaves_its_arguments_alone_and_can_be_repeated() -> None:
    state, ids = initial_state(TINY, seed=3), token_batch(TINY, batch=1, tokens=8, seed=4)
    before = {name: digest(p) for name, p in state.parameters.items()}
    first, second = (training_digests(state, ids, cpu_operators(), steps=2) for _ in range(2))
    assert first == second and before == {name: digest(p) for name, p in state.parameters.items()} and state.step == 0


def test_norms_do_not_decay() -> None:
    """A step with and one without weight decay differ in every matrix and in no norm."""
    strong = AdamW(lr=1e-2, weight_decay=0.5)
    state, ids = initial_state(TINY, seed=3, optimizer=strong), token_batch(TINY, batch=1, tokens=8, seed=4)
    decayed = train_step(state, ids, cpu_operators()).state.parameters
    plain = train_step(replace(state, optimizer=AdamW(lr=1e-2, weight_decay=0.0)), ids, cpu_operators()).state.parameters
    for name, p in state.parameters.items():
        assert (digest(decayed[name]) == digest(plain[name])) == (p.ndim == 1), name


@pytest.mark.parametrize("ids", [torch.zeros(0, 9), torch.zeros(2, 1), torch.zeros(2, 130), torch.zeros(9), torch.full((1, 4), 64), torch.full((1, 4), -1)])
def test_batches_that_cannot_be_trained_on_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="ids"):
        train_step(initial_state(TINY, seed=3), ids.long(), cpu_operators())
    with pytest.raises(ValueError, match="int64"):
        train_step(initial_state(TINY, seed=3), torch.zeros(1, 4), cpu_operators())


def test_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="no biases"):
        initial_state(replace(TINY, qkv_bias=True), seed=1)


def test_the_small_model_s_first_steps_are_these_bits() -> None:
    """A golden digest: a processor, a torch or an operator that changes one bit of three steps is found by one string."""
    found = training_digests(initial_state(SMALL, seed=1), token_batch(SMALL, batch=2, tokens=64, seed=2), cpu_operators(), steps=3)
    assert evidence_digest(found) == GOLDEN_TRAINING_SHA256
