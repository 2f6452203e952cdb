"""The next token from logits: argmax, and sampling that any machine repeats bit for bit, whatever the batch.

    >>> import torch
    >>> from kernels.exact.sampling import argmax_ref, sample_ref
    >>> logits_MV, where = torch.tensor([[0.0, 3.0, 3.0]]), dict(request_M=torch.tensor([7]), position_M=torch.tensor([12]))
    >>> argmax_ref(logits_MV).tolist(), sample_ref(logits_MV, seed=1, temperature=1.0, **where).tolist()
    ([1], [2])

Legend: M rows (one a request), V tokens of the vocabulary. `op` runs on a GPU (nothing is awaited: capturable), `op_ref` on the CPU.

    argmax: the largest logit, the lowest index among equals. -0 equals +0; NaN is above +inf, and every NaN equals every other.
    sample: argmax of score_v = div_rn(logit_v, temperature) + g_v (the Gumbel-max trick: softmax(logits / temperature) exactly distributed
            but for the grid of u), g_v = -log(-log(u_v)) with `elementary.log`, u_v = (n_v + 1/2) 2^-23 for the upper 23 bits n_v of a word
            of Philox4x32-10: an odd multiple of 2^-24, so exact and never 0 or 1. Key: the 64 bits of `seed`. Counter: v // 4, position
            (32 bits), request (64 bits, the top one flipped: apart from the streams of `philox_integers`); word v % 4.

So a draw depends on (seed, request, position) and the row's logits alone, and no two of these triples share a counter. |g| is below 16.7:
a token whose logit is more than 19.5 temperatures below the largest is never drawn. No top-k or top-p, no penalties, no log-probabilities.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact.elementary import log_f32, log_host
from kernels.exact.ieee import assert_subnormals_kept
from kernels.exact.philox import philox_ref, philox_u32

__all__ = ["argmax", "argmax_ref", "gumbel_ref", "sample", "sample_ref"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_PROGRAMS = 512  # of the first launch, about: a few for every multiprocessor
_ELEMENTS = 1 << 20  # of the oracle at a time
_LOW = np.uint64(0xFFFFFFFF)
_LAST = 0x7FFFFFFF
LAST, HALF_STEP = tl.constexpr(_LAST), tl.constexpr(2.0**-24)


def _check(logits_MV: torch.Tensor) -> None:
    if logits_MV.ndim != 2 or not 0 < logits_MV.shape[1] < _LAST:
        raise ValueError(f"need logits [M, V] with 0 < V < 2^31; got {tuple(logits_MV.shape)=}; one row is logits[None]")
    if logits_MV.dtype not in _FLOATS:
        raise ValueError(f"logits are float32, bfloat16 or float16; got {logits_MV.dtype=}; convert them first")


def _check_draw(logits_MV: torch.Tensor, seed: int, request_M: torch.Tensor, position_M: torch.Tensor, temperature: float) -> None:
    _check(logits_MV)
    if not 0 <= seed < 2**64:
        raise ValueError(f"the seed is the key, 64 bits; got {seed=}; fold it yourself")
    for name, part in (("request_M", request_M), ("position_M", position_M)):
        if part.shape != logits_MV.shape[:1] or part.dtype not in _INTEGERS:
            raise ValueError(f"{name} has one int32 or int64 for each row of logits; got {tuple(part.shape)=} {part.dtype=} {tuple(logits_MV.shape)=}")
    if not 0 < float(np.float32(temperature)) < float("inf"):
        raise ValueError(f"the temperature is positive and finite in float32; got {temperature=}; for 0 call argmax")


# ---- references ----------------------------------------------------------------------------------------------------------------


def argmax_ref(logits_MV: torch.Tensor) -> torch.Tensor:
    """int64 [M] on the CPU, by comparison of integers: order-free."""
    _check(logits_MV)
    x = logits_MV.detach().cpu().float().contiguous()
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    key = torch.where(torch.isnan(x), _LAST, bits ^ ((bits >> 31) & _LAST))
    packed = (key.long() << 32) | (_LAST - torch.arange(x.shape[1], device="cpu"))
    return _LAST - (packed.amax(1) & _LAST)


def gumbel_ref(vocabulary: int, *, seed: int, request_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    """g_MV, float32: the noise of each row."""
    request_M, position_M = (part.cpu().long().numpy().view(np.uint64)[:, None] for part in (request_M, position_M))
    counter = np.empty((len(request_M), -(-vocabulary // 4), 4), dtype=np.uint32)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1], counter[..., 2] = position_M & _LOW, request_M & _LOW
    counter[..., 3] = (request_M >> np.uint64(32)) ^ np.uint64(1 << 31)
    n = philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(len(request_M), 4 * counter.shape[1])[:, :vocabulary] >> np.uint32(9)
    u = torch.from_numpy((2 * n.astype(np.int64) + 1).astype(np.float32)) * 2.0**-24
    return -log_host(-log_host(u))


def sample_ref(logits_MV: torch.Tensor, *, seed: int, request_M: torch.Tensor, position_M: torch.Tensor, temperature: float) -> torch.Tensor:
    """int64 [M] on the CPU: one token a row, as stated above. The temperature is rounded to float32; positions count modulo 2^32.

    A NaN logit wins as in argmax; -inf never wins beside a finite one. Raises ValueError for temperature 0: that is argmax.
    """
    _check_draw(logits_MV, seed, request_M, position_M, temperature)
    assert_subnormals_kept()
    x, tokens = logits_MV.detach().cpu().float(), []
    for some in torch.arange(len(x), device="cpu").split(max(1, _ELEMENTS // x.shape[1])):  # bounds the memory, changes nothing
        noise = gumbel_ref(x.shape[1], seed=seed, request_M=request_M.cpu()[some], position_M=position_M.cpu()[some])
        tokens.append(argmax_ref(x[some] / torch.full_like(x[some], temperature) + noise))
    return torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64, device="cpu")


# ---- kernels -------------------------------------------------------------------------------------------------------------------


@triton.jit
def gumbel_f32(first, position, request, seed_low, seed_high, BLOCK: tl.constexpr):
    """g_v for v = first, ..., first + BLOCK - 1; `first` is a multiple of 4."""
    i = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = i ^ i
    c1, c2, c3 = zero + position.to(tl.uint32), zero + request.to(tl.uint32), zero + ((request >> 32).to(tl.uint32) ^ 0x80000000)
    r0, r1, r2, r3 = philox_u32(i, c1, c2, c3, zero + seed_low.to(tl.uint32), zero + seed_high.to(tl.uint32))
    word = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK,))
    u = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0 + HALF_STEP  # 1 + n 2^-23 by its bits: every step is exact
    return -log_f32(-log_f32(u))


@triton.jit(do_not_specialize=["steps", "temperature", "seed_low", "seed_high"])
def best_kernel(
    logits_ptr, request_ptr, position_ptr, best_ptr, V, stride, steps, temperature, seed_low, seed_high,
    DRAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest (score, lowest index) of `steps` blocks of one row, as one int64. Must be compiled with enable_fp_fusion=False."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for step in range(split * steps, (split + 1) * steps):
        v = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + v, mask=v < V, other=0.0).to(tl.float32)
        if DRAW:
            request, position = tl.load(request_ptr + row).to(tl.int64), tl.load(position_ptr + row)
            x = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature) + gumbel_f32(step * BLOCK, position, request, seed_low, seed_high, BLOCK)
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        key = tl.where(x != x, LAST, bits ^ ((bits >> 31) & LAST))
        packed = (key.to(tl.int64) << 32) | (v ^ LAST).to(tl.int64)
        best = tl.maximum(best, tl.where(v < V, packed, -0x8000000000000000))
    tl.store(best_ptr + row * tl.num_programs(1) + split, tl.max(best, 0))


@triton.jit
def index_kernel(best_ptr, index_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The index behind the greatest of a row's SPLITS values."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.max(tl.load(best_ptr + row * SPLITS + i, mask=i < SPLITS, other=-0x8000000000000000), 0)
    tl.store(index_ptr + row, (best & LAST) ^ LAST)


def _signed32(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _pick(logits: torch.Tensor, request: torch.Tensor, position: torch.Tensor, seed: int, temperature: float, draw: bool, block: int, num_warps: int):
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (m, v), device = logits.shape, logits.device
    index = torch.empty(m, dtype=torch.int64, device=device)
    if not m:
        return index
    blocks = triton.cdiv(v, block)
    steps = triton.cdiv(blocks, max(1, _PROGRAMS // m))
    splits = triton.cdiv(blocks, steps)
    best = torch.empty(m, splits, dtype=torch.int64, device=device)
    best_kernel[(m, splits)](
        logits, request, position, best, v, logits.stride(0), steps, temperature, _signed32(seed & 0xFFFFFFFF), _signed32(seed >> 32),
        DRAW=draw, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    index_kernel[(m,)](best, index, SPLITS=splits, BLOCK=triton.next_power_of_2(splits), num_warps=1)
    return index


@on_gpu("argmax")
def argmax(logits_MV: torch.Tensor, *, block: int = 1024, num_warps: int = 4) -> torch.Tensor:
    """`argmax_ref` on a GPU, two launches. Rows may lie apart (a view of a padded vocabulary); `block` changes time, never the result."""
    _check(logits_MV)
    return _pick(logits_MV, logits_MV, logits_MV, 0, 1.0, False, block, num_warps)


@on_gpu("sample")
def sample(
    logits_MV: torch.Tensor, *, seed: int, request_M: torch.Tensor, position_M: torch.Tensor, temperature: float, block: int = 1024, num_warps: int = 4
) -> torch.Tensor:
    """`sample_ref` on a GPU, two launches; request_M and position_M lie on the device of the logits."""
    _check_draw(logits_MV, seed, request_M, position_M, temperature)
    return _pick(logits_MV, request_M.contiguous(), position_M.contiguous(), seed, float(np.float32(temperature)), True, block, num_warps)
