"""The tasks of `suite warm determinism`: each launches what a cell launches, on operands that nobody looks at.

    operators("cuda", impl="fma", rows=16, chunk_rows=0, kernel={})

Where a cell's own function is cheap on a small model it is called; else the same calls are made once. Nothing is timed, checked or kept.
The compiled kernels are found in Triton's cache by the cells, because types, constants, options and the divisibility of sizes are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from studies.determinism.golden_manifest import Question, read
from studies.models.config import LLAMA2_7B, LlamaConfig
from studies.models.decoder import Decoder
from studies.models.prepared import Model, prepare
from studies.models.synthetic import random_weights, tensor_shapes

LAYERS = 2  # the first has no residual to add, the second is like all others
SMOLLM2 = LlamaConfig(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49152, context_tokens=8192, rope_base=100000.0, rms_eps=1e-5)
STEPS = 3  # decode steps: a graph is captured at the first


def small(config: LlamaConfig, family: str, device: str) -> Model:
    config = replace(config, layers=LAYERS)
    return prepare(random_weights(config, seed=1, device=device), family=family, device=device)


def normal(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


# ---- operators and golden questions --------------------------------------------------------------------------------------------


def operators(device: str, *, impl: str, rows: int, chunk_rows: int, kernel: Mapping[str, Any]) -> None:
    """cells:operators over the linears of one layer of SmolLM2's shape and the ragged ones."""
    from studies.determinism.cells import elementwise
    from studies.determinism.implementations import Schedule, run
    from studies.determinism.operators import MAX_ROWS

    ops = stand_ins()
    for op in ops.values():
        run(impl, op.x_MK.to(device), op.w_NK.to(device), Schedule(rows=rows, chunk_rows=chunk_rows, kernel=kernel))
    if impl == "fma":
        elementwise(ops, {name: normal((MAX_ROWS, len(op.w_NK)), device, torch.float32) for name, op in ops.items()}, torch.device(device))


def stand_ins() -> dict[str, Any]:
    """Operands of the shapes and types of `load_operators`."""
    from studies.determinism.operators import MAX_ROWS, Operator, ragged_operators
    from studies.models.llama import LINEARS

    shapes = tensor_shapes(replace(SMOLLM2, layers=1))
    found = []
    for linear in LINEARS:
        n, k = shapes[f"layers.0.{linear}.weight"]
        found.append(Operator(name=f"layers.0.{linear}", x_MK=normal((MAX_ROWS, k), "cpu"), w_NK=normal((n, k), "cpu")))
    return {op.name: op for op in [*found, *ragged_operators()]}


def golden(device: str, *, question: str) -> None:
    """One golden question, asked as the cell asks it. Raises RuntimeError where the operator does not run."""
    from studies.determinism.verify_cells import asked

    _ran(asked(_question(question), device))


def foreign(device: str, *, question: str, architecture: int) -> None:
    """The same as code of another architecture, which Triton's cache keeps like any other."""
    from kernels.exact.foreign import foreign as foreign_code
    from studies.determinism.verify_cells import asked

    with foreign_code(architecture):
        _ran(asked(_question(question), device))


def _question(name: str) -> Question:
    return next(q for q in read().questions if q.name == name)


def _ran(record: Mapping[str, Any]) -> None:
    if record["error"]:
        raise RuntimeError(record["error"])


def engines(device: str, *, products: str, shape: int) -> None:
    """Family B's engines on the device, at one shape, for both dtypes."""
    from kernels.exact.integer_engines import engines as all_engines
    from studies.determinism.evidence import ENGINE_SHAPES

    m, n, k = ENGINE_SHAPES[shape]
    for dtype in (torch.bfloat16, torch.float32):
        for engine in all_engines().values():
            if engine.device == device:
                engine.run(normal((m, k), "cpu", dtype), normal((n, k), "cpu"), products)


def training(device: str, *, steps: int) -> None:
    """All steps: the first one's number is a constant of its own to the compiler."""
    from studies.models import training as t

    state = t.initial_state(t.SMALL, seed=1, device=device)
    t.training_digests(state, t.token_batch(t.SMALL, batch=2, tokens=64, seed=2).to(device), t.gpu_operators() if device == "cuda" else t.cpu_operators(), steps=steps)


# ---- whole models --------------------------------------------------------------------------------------------------------------


def generation(device: str, *, family: str, prompts: int, new_tokens: int, sampled: bool, **schedule: Any) -> None:
    """whole_model:generation with its prompts, on SmolLM2's shape."""
    from studies.determinism.whole_model import SAMPLING, chat_prompts
    from studies.models.generation import Schedule, generate

    generate(small(SMOLLM2, family, device), chat_prompts(prompts), new_tokens=new_tokens, schedule=Schedule(**schedule), sampling=SAMPLING if sampled else None)


def texts(device: str, *, impl: str, batch: int, prompts: int, new_tokens: int) -> None:
    """flips:texts: every batch of questions is read, and a few tokens of each are written."""
    from suite.assets import chat_text, load_tokenizer, prompts as asset_prompts

    tokenizer = load_tokenizer()
    ids = [tokenizer.encode(chat_text(text)) for text in asset_prompts(prompts, source="gsm8k").texts]
    decoder = Decoder(small(SMOLLM2, impl, device), batch=min(batch, prompts), capacity_tokens=max(map(len, ids)) + new_tokens, graph=device.startswith("cuda"))
    for first in range(0, prompts, batch):
        decoder.prefill(ids[first : first + batch])
        for _ in range(min(STEPS, new_tokens - 1)):
            decoder.step()


def labels(device: str, *, impl: str, batch: int, sentences: int) -> None:
    """flips:labels: every batch of sentences is read."""
    from studies.determinism.flips import QUESTION
    from suite.assets import load, load_tokenizer

    tokenizer = load_tokenizer()
    ids = [tokenizer.encode(QUESTION.format(text)) for text, _ in load("sst2-dev")[:sentences]]
    decoder = Decoder(small(SMOLLM2, impl, device), batch=min(batch, len(ids)), capacity_tokens=max(map(len, ids)))
    for first in range(0, len(ids), batch):
        decoder.prefill(ids[first : first + batch])


def serving_decode(device: str, *, variant: str, batch: int, context: int) -> None:
    """end_to_end:serving: one step over a full cache, on Llama-2-7B's shape."""
    from studies.determinism.end_to_end import FAMILY

    decoder = Decoder(small(LLAMA2_7B, FAMILY[variant], device), batch=batch, capacity_tokens=context)
    decoder.pretend(context - 1, torch.Generator(device=device).manual_seed(1))
    decoder.repeat_step()


def serving_prefill(device: str, *, variant: str, tokens: int) -> None:
    """end_to_end:serving: one prompt."""
    from studies.determinism.end_to_end import FAMILY

    ids = torch.randint(LLAMA2_7B.vocabulary, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    Decoder(small(LLAMA2_7B, FAMILY[variant], device), batch=1, capacity_tokens=tokens).prefill([ids])


# ---- single layers -------------------------------------------------------------------------------------------------------------


def contest(device: str, *, variant: str, rows: int, n: int, k: int) -> None:
    """contests:linear: one call of one variant."""
    from studies.determinism.contests import prepare as prepared, program

    out = torch.empty((rows, n), dtype=torch.bfloat16 if variant.startswith("bf16") else torch.float32, device=device)
    program(variant, normal((rows, k), device, torch.float32))(prepared(variant, normal((n, k), device), rows), out)


def profiled(device: str, *, variant: str, rows: int, n: int, k: int) -> None:
    """traffic:weight_bytes: the call that is profiled."""
    from studies.models.families import FAMILIES

    family = FAMILIES[variant]
    family.linear(normal((rows, k), device).to(family.activations), family.prepare(normal((n, k), device)))
