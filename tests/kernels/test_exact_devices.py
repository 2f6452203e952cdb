"""Claim: an operator of the exact kernels runs on the GPU that holds its tensors, and says so where there is none or more than one."""

import ast
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.device import on_gpu
from kernels.exact import activations, attention, attention_backward, backward, integer, norm, optimizer, rope, sampling, sliced, softmax
from kernels.exact.decode import DecodeSchedule, pack_weight
from kernels.exact.ieee import fma_f32
from kernels.exact.linear import linear_fma
from kernels.exact.prefill import PrefillSchedule
from kernels.exact.prefill_tiled import TiledSchedule

ROOT = Path(__file__).resolve().parents[2]
X, W, IDS = torch.ones(4, 64), torch.ones(64), torch.zeros(4, dtype=torch.int64)
HEADS, TABLE, ONE = torch.ones(1, 4, 2, 32), torch.ones(4, 16), torch.ones(1, dtype=torch.int32)
CACHE, PREPARED = attention.make_cache(1, 64, 2, 32), integer.prepare_integer(X)
TOTAL, EX = torch.ones((4, 4), dtype=torch.int64), torch.ones(4, dtype=torch.int32)
CALLS = {
    "linear_fma": [lambda s=s: linear_fma(X, pack_weight(X), schedule=s) for s in (None, DecodeSchedule(), PrefillSchedule(), TiledSchedule())],
    "linear_integer": [lambda: integer.linear_integer(X, PREPARED)],
    "row_exponents": [lambda: integer.row_exponents(X)],
    "integer_accumulate": [lambda: integer.integer_accumulate(X, PREPARED, EX)],
    "integer_finish": [lambda: integer.integer_finish(TOTAL, EX, PREPARED)],
    "attention": [lambda: attention.attention(HEADS, CACHE, ONE, ONE), lambda: attention.attention(HEADS.expand(1, 4, 2, 32).repeat(1, 20, 1, 1), CACHE, ONE, ONE)],
    "attention_backward": [lambda: attention_backward.attention_backward(HEADS, HEADS, HEADS, HEADS, HEADS)],
    "rope": [lambda: rope.rope(HEADS, IDS[None], TABLE, TABLE)],
    "rope_backward": [lambda: backward.rope_backward(HEADS, IDS[None], TABLE, TABLE)],
    "linear_backward": [lambda: backward.linear_backward(X, X, torch.ones(64, 64))],
    "rmsnorm_backward": [lambda: backward.rmsnorm_backward(X, X, W)],
    "token_dot": [lambda: backward.token_dot(X, X)],
    "swiglu_backward": [lambda: backward.swiglu_backward(X, X, X)],
    "cross_entropy_backward": [lambda: backward.cross_entropy_backward(X, IDS)],
    "embedding_backward": [lambda: backward.embedding_backward(X, IDS, 5)],
    "rmsnorm": [lambda: norm.rmsnorm(X, W)],
    "add_rmsnorm": [lambda: norm.add_rmsnorm(X, X, W)],
    "rmsnorm_sliced": [lambda: sliced.rmsnorm_sliced(X, W)],
    "add_rmsnorm_sliced": [lambda: sliced.add_rmsnorm_sliced(X, X, W)],
    "swiglu_sliced": [lambda: sliced.swiglu_sliced(X, X)],
    "layernorm": [lambda: norm.layernorm(X, W)],
    "argmax": [lambda: sampling.argmax(X)],
    "sample": [lambda: sampling.sample(X, seed=1, request_M=IDS, position_M=IDS, temperature=1.0)],
    "adamw_step": [lambda: optimizer.adamw_step(X, X, X, X, step=1, config=optimizer.AdamW())],
    "cross_entropy": [lambda: softmax.cross_entropy(X, IDS)],
    "token_losses": [lambda: softmax.token_losses(X, IDS)],
    **{name: [lambda name=name: getattr(softmax, name)(X)] for name in ("softmax", "log_softmax")},
    **{name: [lambda name=name: getattr(activations, name)(X)] for name in ("exp", "log", "tanh", "erf", "silu", "gelu", "gelu_erf")},
    "swiglu": [lambda: activations.swiglu(X, X)],
}
# launched by a decorated function alone, with what it was given
INNER = {"_launch", "_pick", "_rows", "_run", "decode_integer", "finish_parts", "prefill_integer"}


@pytest.mark.parametrize("op", CALLS)
def test_tensors_of_the_cpu_are_sent_to_the_reference(op: str) -> None:
    for call in CALLS[op]:
        with pytest.raises(ValueError, match=f"^{op} runs on a GPU; got cpu; call {op}_ref$"):
            call()


def test_every_function_that_launches_a_kernel_chooses_the_device() -> None:
    found = set()
    for path in sorted((ROOT / "kernels/exact").glob("*.py")):
        if path.name in ("bench.py", "foreign.py"):
            continue
        for f in ast.walk(ast.parse(path.read_text())):
            if not isinstance(f, ast.FunctionDef) or any("jit" in ast.unparse(d) for d in f.decorator_list):
                continue
            calls = [n.func.value for n in ast.walk(f) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
            if any(isinstance(name, ast.Name) and name.id.endswith("_kernel") for name in calls):
                found.add(f.name)
                assert f.name in INNER or any("on_gpu" in ast.unparse(d) for d in f.decorator_list), f"{path.name}: {f.name}"
    assert found >= INNER - {"_launch"} and len(found) > 20


def _on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPU 0 is the current one; the devices that were made current are noted."""
    seen: list[str] = []

    @contextmanager
    def select(device: torch.device):
        seen.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", select)
    return seen


def test_the_device_of_the_operands_is_made_current_only_where_it_is_not(entered: list[str]) -> None:
    run = on_gpu("op")(lambda *operands, out=None: "ran")
    assert run(_on("cuda:0"), None, 3, out=_on("cuda:0")) == "ran" and entered == []
    assert run(3, out=_on("cuda:1")) == "ran" and entered == ["cuda:1"]


@pytest.mark.parametrize("other", ["cuda:1", "cpu"])
def test_operands_on_two_devices_are_named(other: str, entered: list[str]) -> None:
    run = on_gpu("op")(lambda *operands, out=None: "ran")
    for call in (lambda: run(_on("cuda:0"), _on(other)), lambda: run(_on("cuda:0"), out=_on(other))):
        with pytest.raises(ValueError, match=f"op takes operands on one device; got cuda:0 and {other}; move one"):
            call()


def test_a_packed_weight_counts_as_an_operand() -> None:
    with pytest.raises(ValueError, match="linear_fma takes operands on one device; got meta and cpu"):
        linear_fma(X.to("meta"), pack_weight(X))


def test_references_refuse_tensors_whose_memory_they_cannot_read() -> None:
    """A pointer of a GPU handed to compiled code would end the process."""
    for elements in (8, 4096):  # float64 arithmetic, and the compiled engine
        with pytest.raises(ValueError, match="runs on the CPU; got value.device"):
            fma_f32(torch.ones(elements), torch.ones(elements, device="meta"), 0.0)
    elsewhere = replace(PREPARED, ex_N=PREPARED.ex_N.to("meta"), digits=PREPARED.digits.to("meta"))
    with pytest.raises(ValueError, match="the oracle reads tensors on the CPU"):
        integer.integer_accumulate_ref(X.to("meta"), elsewhere, EX)
