"""y = x W^T in the canonical FP32 order: `linear_fma` on a GPU and its exact CPU oracle `linear_fma_ref`, equal bit for bit.

    >>> import torch
    >>> from kernels.exact.linear import linear_fma_ref
    >>> from kernels.exact.philox import philox_uniform
    >>> x_MK, w_NK = philox_uniform((2, 512), 1), philox_uniform((16, 512), 2, torch.bfloat16)
    >>> y_MN = linear_fma_ref(x_MK, w_NK)          # float32

Legend: M tokens, N output features, K input features, C chunks. Activations bf16, fp16 or fp32; weights bf16, fp16 or fp32; y fp32.
The order (order.py) is a function of K alone, so tile, warps, batch and device cannot change bits. It adds no bias and rounds to no
16-bit output: cast the result yourself (`.to(torch.bfloat16)` is one IEEE rounding).
"""

import torch

from kernels.exact import _oracle_c
from kernels.exact.decode import DecodeSchedule, PackedWeight, decode_fma, pack_weight
from kernels.exact.ieee import assert_subnormals_kept, fma_f32
from kernels.exact.order import CHUNK, chunks, span_count
from kernels.exact.prefill import PrefillSchedule, prefill_fma
from kernels.exact.prefill_tiled import TiledSchedule, prefill_tiled

__all__ = ["DECODE_TOKENS", "Schedule", "check_operands", "combine", "linear_fma", "linear_fma_ref", "products_are_exact"]

Schedule = DecodeSchedule | PrefillSchedule | TiledSchedule
DECODE_TOKENS = 16  # up to here the decode kernel, above it a prefill kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
_TILE_ELEMENTS = 1 << 16  # float32 accumulators of one torch-engine tile: 256 KiB, the share of one core's L2


def check_operands(x_MK: torch.Tensor, w_NK: torch.Tensor) -> None:
    """Raises ValueError where x_MK and w_NK cannot be multiplied by this family."""
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(f"need x_MK and w_NK with one K; got {tuple(x_MK.shape)=} {tuple(w_NK.shape)=}; flatten or transpose them")
    if x_MK.dtype not in DTYPES or w_NK.dtype not in DTYPES:
        raise ValueError(f"operands are bf16, fp16 or fp32; got {x_MK.dtype=} {w_NK.dtype=}; cast them")


def linear_fma(x_MK: torch.Tensor, w: PackedWeight | torch.Tensor, *, schedule: Schedule | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """On a GPU -> y_MN float32, equal to `linear_fma_ref` bit for bit for every schedule.

    w: `pack_weight(w_NK)`, made once; a plain w_NK is packed again at each call. The kernel follows from the number of tokens alone
    unless `schedule` names one (a DecodeSchedule, PrefillSchedule or, on NVIDIA, TiledSchedule). `out`, fp32 and contiguous, receives the result.
    One packed weight serves one stream at a time: launches that overlap would share its tickets. Raises ValueError for operands that do not fit.
    """
    if isinstance(w, torch.Tensor):
        check_operands(x_MK, w)
        w = pack_weight(w)
    if x_MK.ndim != 2 or x_MK.shape[1] != w.k or x_MK.dtype not in DTYPES or w.dtype not in DTYPES:
        raise ValueError(f"need x_MK with K = {w.k}, operands bf16, fp16 or fp32; got {tuple(x_MK.shape)=} {x_MK.dtype=} {w.dtype=}; flatten or cast")
    fitting = (DecodeSchedule, PrefillSchedule) if torch.version.hip is not None else (DecodeSchedule, PrefillSchedule, TiledSchedule)
    if schedule is not None and not isinstance(schedule, fitting):
        raise ValueError(f"linear_fma takes a schedule of kernels.exact: {', '.join(kind.__name__ for kind in fitting)}; got {schedule=}; leave it out")
    if isinstance(schedule, DecodeSchedule) or (schedule is None and x_MK.shape[0] <= DECODE_TOKENS):
        return decode_fma(x_MK, w, schedule, out)
    if isinstance(schedule, PrefillSchedule) or torch.version.hip is not None:
        return prefill_fma(x_MK, w, schedule, out)
    return prefill_tiled(x_MK, w, schedule, out)


def linear_fma_ref(x_MK: torch.Tensor, w_NK: torch.Tensor, *, engine: str = "auto", spans: int | None = None) -> torch.Tensor:
    """Exact oracle on the CPU -> y_MN float32.

    engine: "c" (compiled, vectorised FMA), "torch" (no compiler needed), "auto" (c where a compiler is at hand and the work is worth
    it). All engines give the same bits for any number of threads. `spans`: as in `pack_weight`, for a shard of K.
    """
    check_operands(x_MK, w_NK)
    if engine not in ("auto", "torch", "c"):
        raise ValueError(f"engine is auto, torch or c; got {engine=}; leave it at auto")
    if engine == "c" and not _oracle_c.available():
        raise ValueError(f"engine c needs a C compiler; got {_oracle_c.why()!r}; use engine='auto'")
    assert_subnormals_kept()
    x_MK, w_NK = x_MK.detach().cpu(), w_NK.detach().cpu()
    (m, k), n = x_MK.shape, w_NK.shape[0]
    if m * n * k == 0:
        return torch.zeros((m, n), dtype=torch.float32, device="cpu")
    if engine == "c" or (engine == "auto" and _oracle_c.available()):
        w_NK = w_NK if w_NK.dtype == torch.bfloat16 else w_NK.float()
        return _oracle_c.linear(x_MK.float().contiguous(), w_NK.contiguous(), chunks(k, spans))
    return _linear_torch(x_MK, w_NK, span_count(k, spans))


def products_are_exact(x_MK: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """True where every product of two 16-bit operands is a float32: then mul and add, each rounded, equal FMA.

    A product of p-bit and q-bit mantissas needs p+q+2 <= 24 bits, so only its exponent can fail: below 2^-149 (lost bits) or above
    2^127 (an infinity where the FMA's sum might still be finite).
    """
    if x_MK.dtype not in _MANTISSA_BITS or w_NK.dtype not in _MANTISSA_BITS:
        return False
    low, high = 0, 0
    for operand in (x_MK, w_NK):
        size = operand.float().abs()
        size = size[torch.isfinite(size) & (size > 0)]
        if size.numel() == 0:
            return True
        exponents = torch.frexp(torch.stack([size.min(), size.max()])).exponent  # size = f * 2^e, 0.5 <= f < 1
        low += int(exponents[0]) - 1 - _MANTISSA_BITS[operand.dtype]
        high += int(exponents[1])
    return low >= -149 and high <= 127


def _linear_torch(x_MK: torch.Tensor, w_NK: torch.Tensor, count: int) -> torch.Tensor:
    """All chunks at once: acc_CMN, one step per position inside a chunk; shorter chunks are padded with zeros (see order.py)."""
    (m, k), n = x_MK.shape, w_NK.shape[0]
    exact = products_are_exact(x_MK, w_NK)
    x_LCM = _by_chunk(x_MK, count)
    chains = x_LCM.shape[1]
    step_m = min(m, max(1, _TILE_ELEMENTS // (chains * 256)))
    step_n = min(n, max(64, _TILE_ELEMENTS // (chains * step_m)))
    y_MN = torch.empty((m, n), dtype=torch.float32, device="cpu")
    for n0 in range(0, n, step_n):
        w_LCN = _by_chunk(w_NK[n0 : n0 + step_n], count)
        for m0 in range(0, m, step_m):
            acc_CMN = _chunk_sums(x_LCM[:, :, m0 : m0 + step_m, None], w_LCN[:, :, None, :], exact)
            y_MN[m0 : m0 + step_m, n0 : n0 + step_n] = combine(acc_CMN, chunks(k, count))
    return y_MN


def _by_chunk(a_RK: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, K] -> float32 [position in chunk, chunk, rows]; short chunks are padded with zeros, which cannot change bits (order.py)."""
    rows, k = a_RK.shape
    length = k // count
    per_span = -(-length // CHUNK)
    step = min(length, CHUNK)
    a = torch.nn.functional.pad(a_RK.float().reshape(rows, count, length), (0, per_span * step - length))
    return a.reshape(rows, count * per_span, step).permute(2, 1, 0).contiguous()


def _chunk_sums(x_LCM1: torch.Tensor, w_LC1N: torch.Tensor, exact: bool) -> torch.Tensor:
    """One chain per (chunk, m, n), finished by + 0."""
    acc_CMN = torch.zeros(torch.broadcast_shapes(x_LCM1.shape[1:], w_LC1N.shape[1:]), dtype=torch.float32, device="cpu")
    product = torch.empty_like(acc_CMN)
    for x, w in zip(x_LCM1, w_LC1N, strict=True):
        if exact:
            acc_CMN.add_(torch.mul(x, w, out=product))
        else:
            acc_CMN = fma_f32(x, w, acc_CMN)
    return acc_CMN + 0.0


def combine(acc_CMN: torch.Tensor, spans: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
    """Chunk sums -> y_MN: left to right inside a span, then the fixed tree over spans (as `chunks` gives them)."""
    parts, c = [], 0
    for span in spans:
        total = torch.zeros(acc_CMN.shape[1:], dtype=torch.float32, device="cpu")
        for _ in span:
            total = total + acc_CMN[c]
            c += 1
        parts.append(total)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


assert CHUNK == 256, "the C engine's panel holds 256 rows"
