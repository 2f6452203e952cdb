"""The catalogue: launches of every kernel of `kernels/exact`, on small CPU tensors. Adding a kernel is adding one entry.

    for specimen in catalogue():
        print(specimen.name, specimen.kernel)

An entry calls the public operator (nothing is launched, see `specimen.captured`), says which family's rules hold, and names for each kernel
with a specified sum the function that checks it. Shapes are small but hold the special cases: a ragged edge, two chunks of which the last is
short. A test asserts that every kernel of the package that is launched anywhere appears here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.exact.activations import erf, exp, gelu, gelu_erf, log, silu, swiglu, tanh
from kernels.exact.attention import attention, make_cache
from kernels.exact.attention_backward import attention_backward
from kernels.exact.attention_decode import append_tokens
from kernels.exact.audit.specified import decode_order, parts_order, prefill_order, rmsnorm_order, tiled_order
from kernels.exact.audit.specimen import TARGETS, Specimen, captured
from kernels.exact.backward import cross_entropy_backward, embedding_backward, rmsnorm_backward, swiglu_backward, token_dot
from kernels.exact.decode import DecodeSchedule, decode_fma, pack_weight
from kernels.exact.integer import integer_accumulate, integer_finish, linear_integer, prepare_integer
from kernels.exact.integer_engines import dp4a_totals
from kernels.exact.norm import add_rmsnorm, layernorm, rmsnorm
from kernels.exact.optimizer import AdamW, adamw_step
from kernels.exact.prefill import PrefillSchedule, prefill_fma
from kernels.exact.prefill_tiled import TiledSchedule, prefill_tiled
from kernels.exact.rope import rope
from kernels.exact.sampling import argmax, sample
from kernels.exact.sliced import add_rmsnorm_sliced, rmsnorm_sliced, swiglu_sliced
from kernels.exact.softmax import cross_entropy, softmax

__all__ = ["ENTRIES", "Entry", "catalogue"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ORDERS = {"decode_kernel": decode_order, "parts_kernel": parts_order, "prefill_kernel": prefill_order, "rmsnorm_kernel": rmsnorm_order}
NVIDIA = tuple(t for t in TARGETS if t.startswith("sm_"))  # for layouts of 32 lanes
K = 8 * (256 + 16)  # 8 spans of two chunks, the second one short


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One call of an operator; as_gpu: with what it does on NVIDIA GPUs alone (assembly)."""

    name: str
    call: Callable[[], object]
    family: str
    targets: tuple[str, ...] = TARGETS
    orders: dict = field(default_factory=lambda: ORDERS)
    as_gpu: bool = False


def _ones(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _decode(m: int, n: int, x: torch.dtype, w: torch.dtype, schedule: DecodeSchedule | None = None) -> Callable[[], object]:
    return lambda: decode_fma(_ones(m, K, dtype=x), pack_weight(_ones(n, K, dtype=w)), schedule)


def _prefill(x: torch.dtype, w: torch.dtype, schedule: PrefillSchedule | None = None) -> Callable[[], object]:
    return lambda: prefill_fma(_ones(33, K, dtype=x), pack_weight(_ones(300, K, dtype=w)), schedule)


def _tiled_by_span() -> object:
    schedule = TiledSchedule(block_m=64, block_n=64, by_span=True)
    return prefill_tiled(_ones(5, K), pack_weight(_ones(70, K, dtype=BF16)), schedule)


def _attention(tokens: int, dim: int, out_dtype: torch.dtype = FP32) -> Callable[[], object]:
    """One token (decode kernels) or many (prefill kernels) over a cache of 130 positions."""
    cache, length = make_cache(2, 130, 2, dim), torch.full((2,), tokens, dtype=torch.int32)
    return lambda: attention(_ones(2, tokens, 6, dim, dtype=BF16), cache, length - tokens, length, out_dtype)


def _append() -> object:
    cache, new = make_cache(2, 130, 2, 64), _ones(2, 3, 2, 64)
    return append_tokens(cache.k, cache.v, 130, new, new, torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32))


def _attention_backward() -> object:
    q, k = _ones(1, 70, 4, 64), _ones(1, 70, 2, 64)
    return attention_backward(q, q, q, k, k)


def _integer(m: int, products: str, prefill: bool, totals: bool = False) -> Callable[[], object]:
    weight = prepare_integer(_ones(70, 300, dtype=BF16), products=products, prefill=prefill)
    x = _ones(m, 300, dtype=BF16)
    if totals:
        ex = torch.zeros(m, dtype=torch.int32)
        return lambda: integer_finish(integer_accumulate(x, weight, ex), ex, weight)
    return lambda: linear_integer(x, weight)


def _finish() -> object:
    weight, ex = prepare_integer(_ones(70, 300, dtype=BF16)), torch.zeros(3, dtype=torch.int32)
    return integer_finish(torch.ones((3, 70), dtype=torch.int64), ex, weight)


def _planes(rows: int) -> torch.Tensor:
    return torch.ones((3, rows, 320), dtype=torch.int8)


def _rows_of_one(operator: Callable[..., object]) -> Callable[[], object]:
    return lambda: operator(_ones(3, 140)[:, :70], _ones(3, 140)[:, 70:])


def _logits(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return _ones(rows, 1500), torch.zeros(rows, dtype=torch.int64)


_TABLE = _ones(40, 32)
_POSITIONS = torch.zeros((2, 3), dtype=torch.int64)
_IDS = torch.zeros(5, dtype=torch.int64)

ENTRIES = (
    # family A: matrix products
    Entry(name="decode, one token", family="fma", call=_decode(1, 70, BF16, BF16, DecodeSchedule(unroll=4))),
    Entry(name="decode, fp32 tokens", family="fma", call=_decode(2, 70, FP32, BF16, DecodeSchedule(block_m=2, unroll=2))),
    # the last CTA to arrive adds the chunks: an integer atomic decides who, which symbols do not follow; opcodes only
    Entry(name="decode by chunk", family="fma", orders={}, call=_decode(2, 70, BF16, FP16)),
    Entry(name="decode, split", family="fma", call=_decode(1, 70, FP32, FP32, DecodeSchedule(split=2, x_ahead=False))),
    Entry(name="prefill", family="fma", call=_prefill(FP32, BF16)),
    Entry(name="prefill, 16 bits", family="fma", call=_prefill(BF16, FP16, PrefillSchedule(rows=4, block_m=4, warps_m=8))),
    Entry(name="prefill in tiles", family="fma", targets=NVIDIA, call=lambda: prefill_tiled(_ones(33, K), pack_weight(_ones(140, K, dtype=BF16)))),
    Entry(name="tiles by span", family="fma", targets=NVIDIA, orders={"prefill_tiled_kernel": tiled_order}, call=_tiled_by_span),
    Entry(name="token dot", family="fma", call=lambda: token_dot(_ones(272, 70), _ones(272, 70))),
    # family B
    Entry(name="integer decode", family="integer", call=_integer(1, "b6", prefill=False)),
    Entry(name="integer decode b9", family="integer", call=_integer(1, "b9", prefill=False, totals=True)),
    Entry(name="integer finish", family="integer", call=_finish),
    Entry(name="integer prefill", family="integer", call=_integer(200, "b6", prefill=True)),
    Entry(name="integer prefill b9", family="integer", call=_integer(200, "b9", prefill=True)),
    Entry(name="integer decode, assembly", family="integer", targets=NVIDIA, as_gpu=True, call=_integer(1, "b6", prefill=False)),
    Entry(name="integer dp4a", family="integer", targets=NVIDIA, as_gpu=True, call=lambda: dp4a_totals(_planes(33), _planes(70), "b9")),
    Entry(name="integer dp4a by shifts", family="integer", call=lambda: dp4a_totals(_planes(33), _planes(70), "b9")),
    Entry(name="rmsnorm, sliced", family="integer", call=lambda: rmsnorm_sliced(_ones(2, 3000, dtype=BF16), _ones(3000, dtype=BF16))),
    Entry(name="rmsnorm of a sum, sliced", family="integer", call=lambda: add_rmsnorm_sliced(_ones(2, 300), _ones(2, 300), _ones(300), out_dtype=BF16)),
    Entry(name="swiglu, sliced", family="integer", call=lambda: swiglu_sliced(_ones(2, 5000), _ones(2, 5000), out_dtype=BF16)),
    # attention: chains over head_dim and over blocks of 64 keys
    Entry(name="cache", family="elementwise", call=_append),
    Entry(name="attention, one token", family="fma", call=_attention(1, 64)),
    Entry(name="attention, many tokens", family="fma", call=_attention(70, 64, BF16)),
    Entry(name="attention, wide heads", family="fma", call=_attention(1, 128)),
    Entry(name="attention backward", family="fma", call=_attention_backward),
    # around them
    Entry(name="rmsnorm", family="elementwise", call=lambda: rmsnorm(_ones(2, 3000, dtype=BF16), _ones(3000, dtype=BF16))),
    Entry(name="rmsnorm of a sum", family="elementwise", orders={}, call=lambda: add_rmsnorm(_ones(2, 300), _ones(2, 300), _ones(300))),
    Entry(name="layernorm", family="elementwise", call=lambda: layernorm(_ones(2, 300), _ones(300), _ones(300), out_dtype=BF16)),
    *(Entry(name=f.__name__, family="elementwise", call=lambda f=f: f(_ones(1500), out_dtype=BF16)) for f in (exp, log, tanh, erf, silu, gelu, gelu_erf)),
    Entry(name="swiglu", family="elementwise", call=lambda: swiglu(_ones(1500), _ones(1500), out_dtype=BF16)),
    Entry(name="swiglu of halves", family="elementwise", call=_rows_of_one(swiglu)),
    Entry(name="rope", family="elementwise", call=lambda: rope(_ones(2, 3, 4, 64, dtype=BF16), _POSITIONS, _TABLE, _TABLE)),
    Entry(name="softmax", family="elementwise", call=lambda: softmax(_logits()[0])),
    Entry(name="cross entropy", family="elementwise", call=lambda: cross_entropy(*_logits())),
    Entry(name="argmax", family="elementwise", call=lambda: argmax(_logits()[0])),
    Entry(name="sample", family="elementwise", call=lambda: sample(_logits()[0], seed=1, request_M=_logits()[1], position_M=_logits()[1], temperature=0.7)),
    # training
    Entry(name="rmsnorm backward", family="elementwise", call=lambda: rmsnorm_backward(_ones(8, 300), _ones(8, 300), _ones(300))),
    Entry(name="swiglu backward", family="elementwise", call=lambda: swiglu_backward(_ones(1500), _ones(1500), _ones(1500))),
    Entry(name="cross entropy backward", family="elementwise", call=lambda: cross_entropy_backward(*_logits())),
    Entry(name="embedding backward", family="elementwise", call=lambda: embedding_backward(_ones(5, 64), _IDS, 7)),
    Entry(name="adamw", family="elementwise", call=lambda: adamw_step(*(_ones(1500) for _ in range(4)), step=1, config=AdamW())),
)


@functools.cache
def catalogue() -> tuple[Specimen, ...]:
    """Every specimen; two launches of one entry that compile to one kernel are one."""
    found: dict[tuple, Specimen] = {}
    for entry in ENTRIES:
        for specimen in captured(entry.name, entry.call, family=entry.family, orders=entry.orders, targets=entry.targets, as_gpu=entry.as_gpu):
            found.setdefault((entry.name, specimen.name), specimen)
    return tuple(found.values())
