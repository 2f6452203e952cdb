"""One training step of a small Llama decoder, forward, backward and AdamW, with the same bits on a CPU and on a GPU.

    from studies.models.training import SMALL, cpu_operators, initial_state, token_batch, train_step
    state = initial_state(SMALL, seed=1)
    result = train_step(state, token_batch(SMALL, batch=2, tokens=64, seed=2), cpu_operators())
    result.loss, result.state.step                          # a fp32 tensor with one element, 1

Legend: B sequences, T tokens, M = B * T tokens in sequence order, H query heads, G key heads, D head_dim, K hidden, N outputs, V vocabulary.

One code path: `Operators` holds either the references (`cpu_operators`) or the kernels (`gpu_operators`, with any schedule). Weights,
activations, gradients and optimizer states are fp32. What is kept for the backward pass is the input of every operator. Sums of two
gradients are one addition each, in the order written below; a tied embedding gets the head's gradient plus the lookup's. Ids and weights
come from integer Philox, equal everywhere. It has no dropout, bias, padding, gradient clipping, accumulation or 16-bit master weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.exact import attention as exact_attention
from kernels.exact import attention_backward as exact_attention_backward
from kernels.exact import backward, softmax
from kernels.exact.activations import swiglu, swiglu_ref
from kernels.exact.attention_decode import AttentionDecodeSchedule
from kernels.exact.attention_prefill import AttentionPrefillSchedule
from kernels.exact.digests import digest
from kernels.exact.linear import Schedule, linear_fma, linear_fma_ref
from kernels.exact.norm import rmsnorm, rmsnorm_ref
from kernels.exact.optimizer import AdamW, adamw_step, adamw_step_ref
from kernels.exact.philox import philox_bell, philox_integers
from kernels.exact.rope import rope, rope_ref, rope_tables
from studies.models.config import LlamaConfig

__all__ = [
    "GOLDEN_TRAINING_SHA256", "SMALL", "Operators", "StepResult", "TrainingState", "cpu_operators", "evidence_digest", "gpu_operators",
    "initial_state", "parameter_shapes", "step_digests", "token_batch", "train_step", "training_digests",
]  # fmt: skip

SMALL = LlamaConfig(
    layers=2, hidden=128, intermediate=352, heads=4, kv_heads=2, vocabulary=512, context_tokens=256, rope_base=10000.0, rms_eps=1e-5
)
# three steps of SMALL on two sequences of 64 tokens, seeds 1 and 2 (`evidence_digest`), in the order version of `kernels.exact.order`
GOLDEN_TRAINING_SHA256 = "78c2e8124a6774469570faa005dda62ea6946b76b8d2a5a394e6e5fa6fcaef56"
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What a step calls, all for one device. Signatures are those of `kernels.exact`, with any schedule already bound."""

    linear: Callable
    rmsnorm: Callable
    swiglu: Callable
    rope: Callable
    attention: Callable
    cross_entropy: Callable
    linear_backward: Callable
    rmsnorm_backward: Callable
    swiglu_backward: Callable
    rope_backward: Callable
    attention_backward: Callable
    cross_entropy_backward: Callable
    embedding_backward: Callable
    adamw: Callable


def cpu_operators(*, engine: str = "auto") -> Operators:
    """The references; `engine` of `linear_fma_ref` changes time, never bits."""
    return Operators(
        linear=partial(linear_fma_ref, engine=engine),
        rmsnorm=rmsnorm_ref,
        swiglu=swiglu_ref,
        rope=rope_ref,
        attention=exact_attention.attention_ref,
        cross_entropy=softmax.cross_entropy_ref,
        linear_backward=partial(backward.linear_backward_ref, engine=engine),
        rmsnorm_backward=backward.rmsnorm_backward_ref,
        swiglu_backward=backward.swiglu_backward_ref,
        rope_backward=backward.rope_backward_ref,
        attention_backward=exact_attention_backward.attention_backward_ref,
        cross_entropy_backward=backward.cross_entropy_backward_ref,
        embedding_backward=backward.embedding_backward_ref,
        adamw=adamw_step_ref,
    )


def gpu_operators(
    *, num_warps: int = 4, block: int = 256, attention_block: int = 32, schedule: Schedule | None = None,
    attention_schedule: AttentionDecodeSchedule | AttentionPrefillSchedule | None = None,
) -> Operators:  # fmt: skip
    """The kernels under one schedule: `num_warps`, elements a program (`block`), tokens a program of attention's gradients
    (`attention_block`), and those of `linear_fma` and of `attention`."""
    wide = dict(block=block, num_warps=num_warps)
    return Operators(
        linear=partial(linear_fma, schedule=schedule),
        rmsnorm=partial(rmsnorm, num_warps=num_warps),
        swiglu=partial(swiglu, **wide),
        rope=partial(rope, num_warps=num_warps),
        attention=partial(exact_attention.attention, schedule=attention_schedule),
        cross_entropy=partial(softmax.cross_entropy, num_warps=num_warps),
        linear_backward=partial(backward.linear_backward, schedule=schedule),
        rmsnorm_backward=partial(backward.rmsnorm_backward, num_warps=num_warps),
        swiglu_backward=partial(backward.swiglu_backward, **wide),
        rope_backward=partial(backward.rope_backward, num_warps=num_warps),
        attention_backward=partial(exact_attention_backward.attention_backward, block=attention_block, num_warps=num_warps),
        cross_entropy_backward=partial(backward.cross_entropy_backward, **wide),
        embedding_backward=partial(backward.embedding_backward, **wide),
        adamw=partial(adamw_step, **wide),
    )


# ---- state and data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Parameters and both moments by transformers name (w_NK and norms, fp32, one device); `step` updates were made."""

    config: LlamaConfig
    optimizer: AdamW
    parameters: dict[str, torch.Tensor]
    m: dict[str, torch.Tensor]
    v: dict[str, torch.Tensor]
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`loss`: the mean before the update, fp32 [1]; `gradients` by parameter; `state` after the update."""

    loss: torch.Tensor
    gradients: Gradients
    state: TrainingState


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape, in the order of the forward pass. Raises ValueError for biases, which this module does not train."""
    if config.qkv_bias:
        raise ValueError(f"training has no biases, got {config.qkv_bias=}; use a shape without them")
    k, inner, q_rows, kv_rows = config.hidden, config.intermediate, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocabulary, k)}
    for layer in range(config.layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        shapes |= {f"layers.{layer}.input_layernorm": (k,), f"{attention}.q_proj": (q_rows, k), f"{attention}.k_proj": (kv_rows, k)}
        shapes |= {f"{attention}.v_proj": (kv_rows, k), f"{attention}.o_proj": (k, q_rows), f"layers.{layer}.post_attention_layernorm": (k,)}
        shapes |= {f"{mlp}.gate_proj": (inner, k), f"{mlp}.up_proj": (inner, k), f"{mlp}.down_proj": (k, inner)}
    return shapes | {"norm": (k,)} | ({} if config.tied_head else {"lm_head": (config.vocabulary, k)})


def initial_state(config: LlamaConfig, *, seed: int, optimizer: AdamW | None = None, device: torch.device | str = "cpu") -> TrainingState:
    """Matrices from `philox_bell`, scaled by the power of two next to 1 / sqrt(inputs); norms 1; moments 0."""
    parameters = {}
    for stream, (name, shape) in enumerate(parameter_shapes(config).items()):
        w = torch.ones(shape, dtype=torch.float32, device="cpu") if len(shape) == 1 else philox_bell(shape, seed, stream=stream, scale_log2=-(shape[1].bit_length() // 2))
        parameters[name] = w.to(device)
    m, v = ({name: torch.zeros_like(w) for name, w in parameters.items()} for _ in range(2))
    return TrainingState(config=config, optimizer=optimizer or AdamW(), parameters=parameters, m=m, v=v)


def token_batch(config: LlamaConfig, *, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Ids int64 [B, T + 1] on the CPU: each token's target is the next one."""
    ids = philox_integers(batch * (tokens + 1), seed).astype("int64") % config.vocabulary
    return torch.from_numpy(ids).view(batch, tokens + 1)


# ---- the step ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What one layer's backward pass needs; norms are recomputed from `h` and `middle`, the residual stream before each half."""

    h_MK: torch.Tensor
    x_MK: torch.Tensor
    q_BTHD: torch.Tensor
    k_BTGD: torch.Tensor
    v_BTGD: torch.Tensor
    o_BTHD: torch.Tensor
    middle_MK: torch.Tensor
    y_MK: torch.Tensor
    gate_MN: torch.Tensor
    up_MN: torch.Tensor
    act_MN: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every layer of one step shares."""

    ops: Operators
    state: TrainingState
    position_BT: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]

    def weight(self, name: str) -> torch.Tensor:
        return self.state.parameters[name]

    def norm(self, name: str, h_MK: torch.Tensor) -> torch.Tensor:
        return self.ops.rmsnorm(h_MK, self.weight(name), eps=self.state.config.rms_eps)

    def heads(self, x_MN: torch.Tensor) -> torch.Tensor:
        return x_MN.view(*self.position_BT.shape, -1, self.state.config.head_dim)

    def norm_backward(self, name: str, dy_MK: torch.Tensor, h_MK: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        dh_MK, gradients[name] = self.ops.rmsnorm_backward(dy_MK, h_MK, self.weight(name), eps=self.state.config.rms_eps)
        return dh_MK

    def linear_backward(self, name: str, dy_MN: torch.Tensor, x_MK: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        dx_MK, gradients[name] = self.ops.linear_backward(dy_MN, x_MK, self.weight(name))
        return dx_MK


def train_step(state: TrainingState, ids_BT: torch.Tensor, ops: Operators) -> StepResult:
    """One update on ids int64 [B, T + 1]: token t predicts token t + 1; the loss is the mean over all M tokens.

    `ops` must fit the device of `state`. Raises ValueError for ids that are no such batch.
    """
    _check_ids(state.config, ids_BT)
    device = state.parameters["embed_tokens"].device
    inputs_M, targets_M = (part.reshape(-1).to(device) for part in (ids_BT[:, :-1], ids_BT[:, 1:]))
    batch, tokens = ids_BT.shape[0], ids_BT.shape[1] - 1
    tables = rope_tables(tokens=tokens, head_dim=state.config.head_dim, base=state.config.rope_base)
    position_BT = torch.arange(tokens, device=device).expand(batch, tokens).contiguous()
    run = _Run(ops=ops, state=state, position_BT=position_BT, rope=tuple(table.to(device) for table in tables))  # type: ignore[arg-type]
    with torch.no_grad():
        logits_MV, h_MK, layers = _forward(run, inputs_M)
        loss = ops.cross_entropy(logits_MV, targets_M)
        gradients = _backward(run, inputs_M, targets_M, logits_MV, h_MK, layers)
        return StepResult(loss=loss.reshape(1), gradients=gradients, state=_update(state, gradients, ops))


def _forward(run: _Run, ids_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[_Kept]]:
    """Logits, the residual stream before the last norm, and what each layer keeps."""
    h_MK, layers = run.weight("embed_tokens")[ids_M], []
    for layer in range(run.state.config.layers):
        h_MK, kept = _layer_forward(run, f"layers.{layer}", h_MK)
        layers.append(kept)
    return run.ops.linear(run.norm("norm", h_MK), _head(run)), h_MK, layers


def _head(run: _Run) -> torch.Tensor:
    return run.weight("embed_tokens" if run.state.config.tied_head else "lm_head")


def _layer_forward(run: _Run, layer: str, h_MK: torch.Tensor) -> tuple[torch.Tensor, _Kept]:
    ops = run.ops
    x_MK = run.norm(f"{layer}.input_layernorm", h_MK)
    q, k, v_BTGD = (run.heads(ops.linear(x_MK, run.weight(f"{layer}.self_attn.{part}_proj"))) for part in "qkv")
    q_BTHD, k_BTGD = (ops.rope(part, run.position_BT, *run.rope) for part in (q, k))
    o_BTHD = _attend(run, q_BTHD, k_BTGD, v_BTGD)
    middle_MK = h_MK + ops.linear(o_BTHD.reshape(len(h_MK), -1), run.weight(f"{layer}.self_attn.o_proj"))
    y_MK = run.norm(f"{layer}.post_attention_layernorm", middle_MK)
    gate_MN, up_MN = (ops.linear(y_MK, run.weight(f"{layer}.mlp.{part}_proj")) for part in ("gate", "up"))
    act_MN = ops.swiglu(gate_MN, up_MN)
    kept = _Kept(h_MK=h_MK, x_MK=x_MK, q_BTHD=q_BTHD, k_BTGD=k_BTGD, v_BTGD=v_BTGD, o_BTHD=o_BTHD, middle_MK=middle_MK, y_MK=y_MK,
                 gate_MN=gate_MN, up_MN=up_MN, act_MN=act_MN)  # fmt: skip
    return middle_MK + ops.linear(act_MN, run.weight(f"{layer}.mlp.down_proj")), kept


def _attend(run: _Run, q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor) -> torch.Tensor:
    """Whole sequences: a fp32 cache that is filled once and read once."""
    batch, tokens, kv_heads, head_dim = k_BTGD.shape
    cache = exact_attention.make_cache(batch, tokens, kv_heads, head_dim, dtype=torch.float32, device=q_BTHD.device)
    start_B = torch.zeros(batch, dtype=torch.int32, device=q_BTHD.device)
    count_B = torch.full_like(start_B, tokens)
    exact_attention.append(cache, k_BTGD, v_BTGD, start_B, count_B)
    return run.ops.attention(q_BTHD, cache, start_B, count_B, out_dtype=torch.float32)


def _backward(
    run: _Run, ids_M: torch.Tensor, targets_M: torch.Tensor, logits_MV: torch.Tensor, h_MK: torch.Tensor, layers: list[_Kept]
) -> Gradients:
    """Gradient of every parameter, in the order of `parameter_shapes`."""
    config, ops, found = run.state.config, run.ops, {}
    dlogits_MV = ops.cross_entropy_backward(logits_MV, targets_M)
    dx_MK, dhead_VK = ops.linear_backward(dlogits_MV, run.norm("norm", h_MK), _head(run))
    dh_MK = run.norm_backward("norm", dx_MK, h_MK, found)
    for layer in reversed(range(config.layers)):
        dh_MK = _layer_backward(run, f"layers.{layer}", dh_MK, layers[layer], found)
    dembed_VK = ops.embedding_backward(dh_MK, ids_M, config.vocabulary)
    found |= {"embed_tokens": dhead_VK + dembed_VK} if config.tied_head else {"embed_tokens": dembed_VK, "lm_head": dhead_VK}
    return {name: found[name] for name in parameter_shapes(config)}


def _layer_backward(run: _Run, layer: str, dh_MK: torch.Tensor, kept: _Kept, found: Gradients) -> torch.Tensor:
    ops, attention, mlp = run.ops, f"{layer}.self_attn", f"{layer}.mlp"
    dact_MN = run.linear_backward(f"{mlp}.down_proj", dh_MK, kept.act_MN, found)
    dgate_MN, dup_MN = ops.swiglu_backward(dact_MN, kept.gate_MN, kept.up_MN)
    dy_MK = run.linear_backward(f"{mlp}.gate_proj", dgate_MN, kept.y_MK, found) + run.linear_backward(f"{mlp}.up_proj", dup_MN, kept.y_MK, found)
    dh_MK = dh_MK + run.norm_backward(f"{layer}.post_attention_layernorm", dy_MK, kept.middle_MK, found)

    do_MN = run.linear_backward(f"{attention}.o_proj", dh_MK, kept.o_BTHD.reshape(len(dh_MK), -1), found)
    dq, dk, dv = ops.attention_backward(run.heads(do_MN), kept.o_BTHD, kept.q_BTHD, kept.k_BTGD, kept.v_BTGD)
    dq, dk = (ops.rope_backward(part, run.position_BT, *run.rope) for part in (dq, dk))
    parts = {"q": dq, "k": dk, "v": dv}
    dx = [run.linear_backward(f"{attention}.{part}_proj", dy.reshape(len(dh_MK), -1), kept.x_MK, found) for part, dy in parts.items()]
    return dh_MK + run.norm_backward(f"{layer}.input_layernorm", (dx[0] + dx[1]) + dx[2], kept.h_MK, found)


def _update(state: TrainingState, gradients: Gradients, ops: Operators) -> TrainingState:
    """AdamW on every parameter; norms have no weight decay."""
    step, new = state.step + 1, {}
    for name, p in state.parameters.items():
        new[name] = ops.adamw(p, gradients[name], state.m[name], state.v[name], step=step, config=state.optimizer, decay=p.ndim == 2)
    parameters, m, v = ({name: parts[i] for name, parts in new.items()} for i in range(3))
    return TrainingState(config=state.config, optimizer=state.optimizer, parameters=parameters, m=m, v=v, step=step)


def _check_ids(config: LlamaConfig, ids_BT: torch.Tensor) -> None:
    if ids_BT.ndim != 2 or ids_BT.dtype != torch.int64 or not ids_BT.shape[0] or not 2 <= ids_BT.shape[1] <= config.context_tokens + 1:
        raise ValueError(f"ids are int64 [B, T + 1] with B >= 1 and 1 <= T <= {config.context_tokens}, got {tuple(ids_BT.shape)} {ids_BT.dtype}; "
                         "each token needs its target")  # fmt: skip
    if not 0 <= int(ids_BT.min()) <= int(ids_BT.max()) < config.vocabulary:
        raise ValueError(f"ids must be 0 to {config.vocabulary - 1}, got {int(ids_BT.min())} to {int(ids_BT.max())}; use the model's own tokenizer")


# ---- evidence ------------------------------------------------------------------------------------------------------------------


def step_digests(result: StepResult) -> dict[str, str]:
    """"loss", and for each parameter its gradient, new value and both new moments -> sha256 (`kernels.exact.digests`)."""
    groups = {"gradient": result.gradients, "parameter": result.state.parameters, "m": result.state.m, "v": result.state.v}
    named = {f"{group}.{name}": digest(x) for group, tensors in groups.items() for name, x in tensors.items()}
    return {"loss": digest(result.loss)} | named


def training_digests(state: TrainingState, ids_BT: torch.Tensor, ops: Operators, *, steps: int = 3) -> dict[str, str]:
    """`step_digests` of each of `steps` updates on one batch, under "step.1.loss" and so on."""
    found = {}
    for _ in range(steps):
        result = train_step(state, ids_BT, ops)
        state = result.state
        found |= {f"step.{state.step}.{name}": value for name, value in step_digests(result).items()}
    return found


def evidence_digest(found: dict[str, str]) -> str:
    """One sha256 over the names, in order, and their digests."""
    return hashlib.sha256("".join(f"{name} {found[name]}\n" for name in sorted(found)).encode()).hexdigest()
