"""Family B by engines that share no instruction: the same digest from each is evidence that its bits belong to no machine.

    >>> import torch
    >>> from kernels.exact.integer_engines import engines
    >>> y = engines()["cpu_float64"].run(torch.ones(2, 8), torch.ones(4, 8), "b6")       # y_MN float32

Each engine slices on its own side, multiplies digit planes its own way and rounds; `device` says where it runs (x and w are moved there).
- cpu_float64, cpu_groups, cpu_int64, cpu_c: the oracle's engines (CPU BLAS in float64, one or several products; integer products; compiled).
- triton_prefill, triton_decode: this package's kernels (wgmma on sm_90, mma.sync before it).
- cublas_int8: `torch._int_mm` per digit pair. fp64_tensor_cores: float64 matrix products per digit weight on the GPU, exact below 2^53.
- dp4a: packed int32 dot products on the integer pipes, one thread per output, no tensor core.
Legend: M tokens, N outputs, K inputs, P planes, W words of four digits. Evidence, not speed: nothing here is tuned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.exact import _integer_c
from kernels.exact.integer import IntegerWeight, groups_of, integer_finish, linear_integer, linear_integer_ref, prepare_integer
from kernels.exact.integer_decode import IntegerDecodeSchedule
from kernels.exact.integer_prefill import IntegerPrefillSchedule
from kernels.exact.slices import slice_rows

__all__ = ["Engine", "dp4a_totals", "engines"]

_INT_MM = 8  # cuBLAS's int8 product wants K and N in multiples of 8 and more than 16 rows


@dataclass(frozen=True, kw_only=True)
class Engine:
    """run(x_MK, w_NK, products) -> y_MN float32 on the CPU; device: "cpu" or "cuda"."""

    device: str
    run: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def engines() -> dict[str, Engine]:
    """Every engine by name; those of device "cuda" need an NVIDIA GPU."""
    found = {f"cpu_{name}": Engine(device="cpu", run=_cpu(name)) for name in ("float64", "groups", "int64", "c") if name != "c" or _integer_c.available()}
    found["triton_prefill"] = Engine(device="cuda", run=_kernel(IntegerPrefillSchedule(block_m=64, block_n=64)))
    found["triton_decode"] = Engine(device="cuda", run=_kernel(IntegerDecodeSchedule()))
    found["cublas_int8"] = Engine(device="cuda", run=_by_totals(_cublas_totals))
    found["fp64_tensor_cores"] = Engine(device="cuda", run=_by_totals(_float64_totals))
    found["dp4a"] = Engine(device="cuda", run=_by_totals(dp4a_totals))
    return found


def _cpu(name: str) -> Callable:
    return lambda x, w, products: linear_integer_ref(x, w, products=products, engine=name)


def _kernel(schedule: object) -> Callable:
    return lambda x, w, products: linear_integer(x.cuda(), prepare_integer(w.cuda(), products=products), schedule=schedule).cpu()


def _by_totals(totals: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]) -> Callable:
    def run(x_MK: torch.Tensor, w_NK: torch.Tensor, products: str) -> torch.Tensor:
        weight: IntegerWeight = prepare_integer(w_NK.cuda(), products=products)
        x_PMK, ex_M = slice_rows(x_MK.cuda())
        return integer_finish(totals(x_PMK, weight.digits, products), ex_M, weight).cpu()

    return run


def _cublas_totals(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """T_MN int64: int8 x int8 -> int32 by cuBLAS for each digit pair; rows are padded with zeros to what it accepts."""
    m, n = x_PMK.shape[1], w_PNK.shape[1]
    x = torch.nn.functional.pad(x_PMK, (0, 0, 0, max(_INT_MM * 4, m + -m % _INT_MM) - m))
    w = torch.nn.functional.pad(w_PNK, (0, 0, 0, max(_INT_MM * 4, n + -n % _INT_MM) - n))
    total = torch.zeros((x.shape[1], w.shape[1]), dtype=torch.int64, device=x.device)
    for pairs in groups_of(products):
        total = (total << 8) + sum(torch._int_mm(x[i], w[j].t()) for i, j in pairs).long()
    return total[:m, :n].contiguous()


def _float64_totals(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """T_MN int64: one float64 product per digit weight, its pairs side by side along K; sums below 2^31 are exact in any order."""
    total = torch.zeros((x_PMK.shape[1], w_PNK.shape[1]), dtype=torch.int64, device=x_PMK.device)
    for pairs in groups_of(products):
        x = torch.cat([x_PMK[i] for i, _ in pairs], 1).double()
        w = torch.cat([w_PNK[j] for _, j in pairs], 1).double()
        total = (total << 8) + (x @ w.t()).long()
    return total


@triton.jit
def dot_of_bytes(a, b, acc, HARDWARE: tl.constexpr):
    """acc + the sum of four signed byte products: one dp4a, or the same by shifts."""
    if HARDWARE:
        return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return acc


@triton.jit(do_not_specialize=["M", "N", "W"])
def dp4a_kernel(x_ptr, w_ptr, out_ptr, M, N, W, x_plane, w_plane, BM: tl.constexpr, BN: tl.constexpr, B9: tl.constexpr, HARDWARE: tl.constexpr):
    """T int64 of a tile [BM, BN]; x and w are planes of W int32 words of four digits a row."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x_plane, w_plane = tl.cast(x_plane, tl.int64), tl.cast(w_plane, tl.int64)
    x_rows = x_ptr + (tl.minimum(m, M - 1).to(tl.int64) * W)[:, None]
    w_rows = w_ptr + (tl.minimum(n, N - 1).to(tl.int64) * W)[None, :]
    zero = tl.zeros((BM, BN), tl.int32)
    acc0, acc1, acc2, acc3, acc4 = zero, zero, zero, zero, zero
    for k in range(W):
        x0, x1, x2 = tl.load(x_rows + k) + zero, tl.load(x_rows + x_plane + k) + zero, tl.load(x_rows + 2 * x_plane + k) + zero
        w0, w1, w2 = tl.load(w_rows + k) + zero, tl.load(w_rows + w_plane + k) + zero, tl.load(w_rows + 2 * w_plane + k) + zero
        acc0 = dot_of_bytes(x0, w0, acc0, HARDWARE)
        acc1 = dot_of_bytes(x1, w0, dot_of_bytes(x0, w1, acc1, HARDWARE), HARDWARE)
        acc2 = dot_of_bytes(x2, w0, dot_of_bytes(x1, w1, dot_of_bytes(x0, w2, acc2, HARDWARE), HARDWARE), HARDWARE)
        if B9:
            acc3 = dot_of_bytes(x2, w1, dot_of_bytes(x1, w2, acc3, HARDWARE), HARDWARE)
            acc4 = dot_of_bytes(x2, w2, acc4, HARDWARE)
    total = acc0.to(tl.int64) * 65536 + (acc1.to(tl.int64) * 256 + acc2)
    if B9:
        total = total * 65536 + (acc3.to(tl.int64) * 256 + acc4)
    tl.store(out_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@on_gpu("linear_integer")
def dp4a_totals(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """T_MN int64 by packed byte products (planes with rows of a multiple of 4 digits, as slices.py makes them)."""
    m, n = x_PMK.shape[1], w_PNK.shape[1]
    total = torch.empty((m, n), dtype=torch.int64, device=x_PMK.device)
    x, w = x_PMK.contiguous().view(torch.int32), w_PNK.contiguous().view(torch.int32)
    words = x.shape[2]
    if m * n:
        dp4a_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 32))](
            x, w, total, m, n, words, m * words, n * words, BM=16, BN=32, B9=products == "b9", HARDWARE=x.is_cuda, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return total
