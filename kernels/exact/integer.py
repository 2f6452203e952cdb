"""y = x W^T on integer tensor cores: exact sums of int8 digit products, so no order, tile, engine or number of GPUs can change a bit.

    >>> import torch
    >>> from kernels.exact.integer import linear_integer_ref
    >>> from kernels.exact.philox import philox_bell
    >>> x_MK, w_NK = philox_bell((2, 512), 1), philox_bell((16, 512), 2, torch.bfloat16)
    >>> y_MN = linear_integer_ref(x_MK, w_NK)                 # float32; linear_integer(x, prepare_integer(w)) on a GPU: the same bits

Legend: M tokens, N outputs, K inputs. x and w are sliced by rows (slices.py): x = q_x 2^(ex_M - 23), q = d0 2^16 + d1 2^8 + d2.
- `b9`: T = sum_k q_x q_w, all nine digit products. y = T 2^(ex_M + ex_N - 46), rounded once.
- `b6`: only the products with i + j <= 2: T = sum_k (d0 e0) 2^16 + (d0 e1 + d1 e0) 2^8 + (d0 e2 + d1 e1 + d2 e0). y = T 2^(ex_M + ex_N - 30).
**Rounding.** T is an integer below 2^62; y is the float32 nearest to the real number T 2^e, ties to even, subnormals kept, an infinity from
2^128 - 2^103 on; T = 0 gives +0, a negative T that rounds to zero gives -0. **Non-finite.** A row of x with an infinity or a NaN gives a row of
NaN (canonical bits are hashed); other rows do not see it. A weight with one is refused by `prepare_integer`. **K <= 43,690**: three digit
products of at most 2^14 per k stay below 2^31 in an int32 accumulator. Accumulators of several shards of K add up to T < 2^62 for a total K of at
most 66,572 (b9: |q_x q_w| <= (127 * 2^16)^2 a k) or 4,261,479,413 (b6).
**Error.** Operands: each is off by at most 2^-22.98 of its row's maximum (bf16 and fp16 elements within 2^-16 and 2^-13 of the maximum are
exact). b6 drops at most 2 * 2^14 2^-8 + 2^14 2^-16 units of T per k. Normwise: a row whose maximum is far above its median loses the ratio.
Measured on the CPU at K = 4096 (fp32 tokens, sums of three uniforms), mean |error| / (|x| |w|) in 2-norms: b6 4.5e-9 with bf16 and 6.3e-9 with fp32
weights, b9 1.9e-9 and 2.5e-9, a sequential float32 chain 1.3e-8; with one element of 2000 times the median in each token b6 1.1e-7, b9 4.0e-8.
It adds no bias and rounds to no 16-bit output.
"""

from dataclasses import dataclass

import torch

from kernels.device import on_gpu
from kernels.exact import _integer_c
from kernels.exact.ieee import assert_subnormals_kept
from kernels.exact.slices import DTYPES, EX_NONFINITE, EX_ZERO, Sliced, digits_ref, padded, quantise_ref, row_exponents_ref, slice_rows

__all__ = ["ENGINES", "IntegerWeight", "MAX_K", "PRODUCTS", "integer_accumulate", "integer_accumulate_ref", "integer_finish",
           "integer_finish_ref", "linear_integer", "linear_integer_ref", "prepare_integer", "row_exponents", "row_exponents_ref"]  # fmt: skip

PRODUCTS = ("b6", "b9")
ENGINES = ("auto", "c", "float64", "groups", "int64")
MAX_K = (2**31 - 1) // (3 * 2**14)  # 43,690
# K of all shards together: T stays below 2^62. A row's own exponent, or a larger one, keeps |q| <= 127 * 2^16; digits reach 2^7 each
MAX_TOTAL_K = {"b6": (2**62 - 1) // (2**30 + 2 * 2**22 + 3 * 2**14), "b9": (2**62 - 1) // (127 << 16) ** 2}
SCALE = {"b6": 30, "b9": 46}  # y = T 2^(ex_M + ex_N - SCALE)
DECODE_TOKENS = 16  # up to here the decode kernel, above it the prefill kernel: a function of shape only
_TOKEN_BYTES, _WEIGHT_BYTES = 32 << 20, 4 << 20  # float64 operands of one block of the oracle; more was slower (fresh pages)
_PREPARE_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class IntegerWeight:
    """A weight made ready by `prepare_integer`, on one device.

    ex_N: int32 exponents. digits: int8 [3, N, KP], top digit first (3 bytes a weight, for prefill and the CPU), or None. code: bf16 [N, KP],
    or None: q_w itself, which has at most 8 significant bits where w is bf16, so it is a bf16 number: the weight times its row's power of
    two, elements below half a unit rounded as the rule says (2 bytes a weight, for decode). Columns from K to KP are zero. tickets: zeros that
    every launch leaves as zeros, from which the decode kernel's programs draw who adds the parts of K: one weight serves one stream at a time.
    """

    n: int
    k: int
    products: str
    dtype: torch.dtype
    ex_N: torch.Tensor
    digits: torch.Tensor | None
    code: torch.Tensor | None
    tickets: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.ex_N.device


def check_k(k: int) -> None:
    if k > MAX_K:
        raise ValueError(f"int32 sums of three digit products are exact for K <= {MAX_K}; got K={k}; split K and add the parts' accumulators")


def check_products(products: str) -> None:
    if products not in PRODUCTS:
        raise ValueError(f"products is one of {PRODUCTS}; got {products=}; b6 is the default, b9 the exact product")


def prepare_integer(
    w_NK: torch.Tensor, *, products: str = "b6", prefill: bool = True, exponents: torch.Tensor | None = None, total_k: int | None = None
) -> IntegerWeight:  # fmt: skip
    """Slices w_NK (bf16, fp16 or fp32; any strides) once, on its device.

    prefill=False keeps no digit planes of a bf16 weight: 2 bytes a weight, any number of tokens by the decode kernel. exponents: int32 [N] over
    the whole rows where w_NK is a tensor-parallel shard along K (the maximum over the ranks of `row_exponents(w_shard)`); total_k: their
    length, the K of all shards whose accumulators will be added (default: this K alone). ValueError: K > 43,690, total_k below K or above
    MAX_TOTAL_K, a non-finite element, a wrong dtype or shape, exponents below the rows' own. Waits for the device.
    """
    check_products(products)
    own_N = row_exponents_ref(w_NK)
    n, k = w_NK.shape
    check_k(k)
    total_k = k if total_k is None else total_k
    if not k <= total_k <= MAX_TOTAL_K[products]:
        raise ValueError(f"the total K is at least the shard's {k} and at most {MAX_TOTAL_K[products]}, or int64 sums leave 2^62; got {total_k=} {products=}; "
                         "take fewer inputs, or b6")  # fmt: skip
    if bool((own_N == EX_NONFINITE).any()):
        raise ValueError(f"a weight has finite elements; got {int((own_N == EX_NONFINITE).sum())} rows of {tuple(w_NK.shape)} with infinity or NaN; mend it")
    ex_N = own_N if exponents is None else _check_exponents(exponents, own_N)
    kp, is_bf16 = padded(k), w_NK.dtype == torch.bfloat16
    digits = torch.empty((3, n, kp), dtype=torch.int8, device=w_NK.device) if prefill or not is_bf16 else None
    code = torch.empty((n, kp), dtype=torch.bfloat16, device=w_NK.device) if is_bf16 and (w_NK.is_cuda or not prefill) else None
    tickets = torch.zeros(-(-n // 16), dtype=torch.int32, device=w_NK.device)
    step = max(1, _PREPARE_ELEMENTS // max(kp, 1))
    for n0 in range(0, n, step):
        rows = slice(n0, n0 + step)
        q = torch.nn.functional.pad(quantise_ref(w_NK[rows], ex_N[rows]), (0, kp - k))
        if digits is not None:
            digits[:, rows] = digits_ref(q)
        if code is not None:
            code[rows] = q.to(torch.bfloat16)
    return IntegerWeight(n=n, k=k, products=products, dtype=w_NK.dtype, ex_N=ex_N, digits=digits, code=code, tickets=tickets)


def _check_exponents(given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    if given.shape != own.shape or given.dtype != torch.int32 or bool((given < own).any()):
        raise ValueError(f"exponents are int32, one a row, none below the row's own; got {tuple(given.shape)=} {given.dtype=} for {tuple(own.shape)=}; "
                         "take the maximum of row_exponents over all parts")  # fmt: skip
    return given.to(own.device).contiguous()


def check_tokens(x_MK: torch.Tensor | Sliced, weight: IntegerWeight) -> None:
    """Raises ValueError where x_MK does not fit the weight."""
    if isinstance(x_MK, Sliced):
        if x_MK.k != weight.k:
            raise ValueError(f"need sliced rows with K = {weight.k}; got {x_MK.shape=}; take the linear's own input")
    elif x_MK.ndim != 2 or x_MK.shape[1] != weight.k or x_MK.dtype not in DTYPES:
        raise ValueError(f"need x_MK with K = {weight.k} in bf16, fp16 or fp32; got {tuple(x_MK.shape)=} {x_MK.dtype=}; flatten or cast it")
    if x_MK.device != weight.device:
        raise ValueError(f"x_MK and the weight are on one device; got {x_MK.device=} {weight.device=}; move one")


# On the CPU ---------------------------------------------------------------------------------------------------------------------------


def linear_integer_ref(x_MK: torch.Tensor, w_NK: torch.Tensor | IntegerWeight, *, products: str = "b6", engine: str = "auto") -> torch.Tensor:
    """Exact oracle on the CPU -> y_MN float32, for any strides and mixed dtypes; a prepared weight (its own `products` count) saves slicing.

    engine: "c" (compiled integer sums), "float64" (one matrix product per block, all partial sums below 2^53), "auto" (c where a compiler is
    at hand), "groups" (one float64 product per digit weight), "int64" (integer matrix products; slow). The same bits for any number of threads.
    """
    weight = w_NK if isinstance(w_NK, IntegerWeight) else prepare_integer(w_NK.detach().cpu(), products=products)
    x_MK = x_MK.detach().cpu()
    ex_M = row_exponents_ref(x_MK)
    return integer_finish_ref(integer_accumulate_ref(x_MK, weight, ex_M, engine=engine), ex_M, weight)


def integer_accumulate_ref(x_MK: torch.Tensor, weight: IntegerWeight, ex_M: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """T_MN int64 on the CPU; see `integer_accumulate`. Memory beside T stays below about 100 MB."""
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {ENGINES}; got {engine=}; leave it at auto")
    check_tokens(x_MK, weight)
    if x_MK.device.type != "cpu":
        raise ValueError(f"the oracle reads tensors on the CPU; got {x_MK.device=} {weight.device=}; move both, or call integer_accumulate")
    ex_M = _check_exponents(ex_M, row_exponents_ref(x_MK))
    if engine == "auto":
        engine = "c" if _integer_c.available() else "float64"
    if engine == "c" and not _integer_c.available():
        raise ValueError(f"engine c needs a C compiler named cc; got {engine=}; use engine='auto'")
    multiply = {"c": _integer_c.totals, "float64": _block_float64, "groups": _block_groups, "int64": _block_int64}[engine]
    (m, k), n = x_MK.shape, weight.n
    total_MN = torch.zeros((m, n), dtype=torch.int64, device="cpu")
    step_m, step_n = max(64, _TOKEN_BYTES // (24 * max(k, 1))), max(16, _WEIGHT_BYTES // (24 * max(k, 1)))
    if engine == "c" and weight.digits is not None:
        step_n = max(n, 1)  # it reads the planes where they are
    for m0 in range(0, m, step_m) if k else ():
        rows = slice(m0, m0 + step_m)
        x_PMK = digits_ref(quantise_ref(x_MK[rows], ex_M[rows]))
        for n0 in range(0, n, step_n):
            total_MN[rows, n0 : n0 + step_n] = multiply(x_PMK, _weight_digits(weight, slice(n0, n0 + step_n)), weight.products)
    return total_MN


def _weight_digits(weight: IntegerWeight, rows: slice) -> torch.Tensor:
    """int8 [3, rows, K] from the planes, or from the code where no planes are kept."""
    if weight.digits is not None:
        return weight.digits[:, rows, : weight.k]
    return digits_ref(weight.code[rows, : weight.k].to(torch.int32))


def _block_float64(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """b6: [d0|d1|d2] [e|e>>8|e>>16]^T, where e>>8 = e0 2^8 + e1: sums below 43,690 * 2^7 * 2^23 * 1.01 < 2^46. b9: three products with e."""
    (m, k), n = x_PMK.shape[1:], w_PNK.shape[1]
    e_N3K = torch.empty((n, 3, k), dtype=torch.float64, device="cpu")  # e0 2^16 + e1 2^8 + e2, e0 2^8 + e1, e0
    e_N3K[:, 2].copy_(w_PNK[0])
    torch.add(w_PNK[1], e_N3K[:, 2], alpha=256, out=e_N3K[:, 1])
    torch.add(w_PNK[2], e_N3K[:, 1], alpha=256, out=e_N3K[:, 0])
    if products == "b6":
        return (x_PMK.permute(1, 0, 2).double().reshape(m, 3 * k) @ e_N3K.view(n, 3 * k).T).to(torch.int64)
    t = (x_PMK.double().reshape(3 * m, k) @ e_N3K[:, 0].T).to(torch.int64).view(3, m, n)
    return (t[0] << 16) + (t[1] << 8) + t[2]


def groups_of(products: str) -> list[list[tuple[int, int]]]:
    """Digit pairs (i of x, j of w) of equal weight, the heaviest first."""
    last = 2 if products == "b6" else 4
    return [[(i, g - i) for i in range(3) if 0 <= g - i < 3] for g in range(last + 1)]


def _block_groups(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """One float64 product per digit weight, its pairs side by side along K; sums below 2^31."""
    total = torch.zeros((x_PMK.shape[1], w_PNK.shape[1]), dtype=torch.int64, device="cpu")
    for pairs in groups_of(products):
        x = torch.cat([x_PMK[i] for i, _ in pairs], 1).double()
        w = torch.cat([w_PNK[j] for _, j in pairs], 1).double()
        total = (total << 8) + (x @ w.T).to(torch.int64)
    return total


def _block_int64(x_PMK: torch.Tensor, w_PNK: torch.Tensor, products: str) -> torch.Tensor:
    """Integer matrix products, one per digit pair."""
    total = torch.zeros((x_PMK.shape[1], w_PNK.shape[1]), dtype=torch.int64, device="cpu")
    for pairs in groups_of(products):
        total = (total << 8) + sum(x_PMK[i].long() @ w_PNK[j].long().T for i, j in pairs)
    return total


def integer_finish_ref(total_MN: torch.Tensor, ex_M: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """y_MN float32 on the CPU: T 2^e rounded once; rows with EX_NONFINITE are NaN.

    Above 2^52 the low ten bits of T are folded into one odd bit first ("round to odd"), so T 2^e is exact in float64 and the step to float32
    rounds alone.
    """
    assert_subnormals_kept()
    if total_MN.numel() and not -(1 << 62) < int(total_MN.min()) <= int(total_MN.max()) < 1 << 62:
        raise ValueError(f"totals lie within +-2^62; got {int(total_MN.min())} to {int(total_MN.max())}; add the shards of one K, of at most MAX_TOTAL_K")
    big = total_MN.abs() >= 1 << 52
    odd = (total_MN >> 10) | (total_MN & 1023 != 0)
    e_MN = (ex_M[:, None] + weight.ex_N[None, :] - SCALE[weight.products]).long() + 10 * big
    y_MN = (torch.where(big, odd, total_MN).double() * ((e_MN + 1023) << 52).view(torch.float64)).float()
    return y_MN.masked_fill(ex_M[:, None] == EX_NONFINITE, float("nan"))


# On a GPU -----------------------------------------------------------------------------------------------------------------------------


@on_gpu("linear_integer")
def linear_integer(x_MK: torch.Tensor | Sliced, weight: IntegerWeight, *, out: torch.Tensor | None = None, schedule: object = None) -> torch.Tensor:
    """On a GPU -> y_MN float32, equal to `linear_integer_ref` bit for bit for every schedule.

    x_MK bf16, fp16 or fp32, or rows that were sliced where they arose (sliced.py), which spares a launch; `out`, fp32 and contiguous, receives the result. Up to 16 tokens (or where the weight keeps no planes) the decode
    kernel, else the prefill kernel, unless `schedule` names one. No wait for the device: it can be captured in a CUDA graph.
    """
    check_tokens(x_MK, weight)
    planes, ex_M = (x_MK.planes, x_MK.ex_R) if isinstance(x_MK, Sliced) else slice_rows(x_MK)
    return _multiply(planes, ex_M, weight, schedule, out, torch.float32)


def row_exponents(x_MK: torch.Tensor) -> torch.Tensor:
    """On a GPU -> ex_M int32 (slices.py); of a row cut over ranks, the maximum of the parts' is the whole row's."""
    return slice_rows(x_MK, write=False)[1]


@on_gpu("integer_accumulate")
def integer_accumulate(x_MK: torch.Tensor, weight: IntegerWeight, ex_M: torch.Tensor, *, schedule: object = None) -> torch.Tensor:
    """On a GPU -> T_MN int64, the exact sum over this K; T of several shards of K add up to the whole's in any order (`prepare_integer`'s total_k checks their number).

    ex_M int32 must be at least x's own row exponents (not checked here: it would cost a wait; `integer_accumulate_ref` checks).
    """
    check_tokens(x_MK, weight)
    planes, ex_M = slice_rows(x_MK, ex_R=ex_M)
    return _multiply(planes, ex_M, weight, schedule, None, torch.int64)


@on_gpu("integer_finish")
def integer_finish(total_MN: torch.Tensor, ex_M: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """On a GPU -> y_MN float32: the sum of all shards' T, rounded once."""
    from kernels.exact.integer_decode import finish_parts

    if total_MN.shape != (ex_M.shape[0], weight.n) or total_MN.dtype != torch.int64:
        raise ValueError(f"totals are int64 {(ex_M.shape[0], weight.n)}; got {tuple(total_MN.shape)=} {total_MN.dtype=}; take integer_accumulate's")
    return finish_parts(total_MN.contiguous()[None], ex_M, weight, None, torch.float32)


def _multiply(planes: torch.Tensor, ex_M: torch.Tensor, weight: IntegerWeight, schedule: object, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    from kernels.exact.decode import output_buffer
    from kernels.exact.integer_decode import IntegerDecodeSchedule, decode_integer
    from kernels.exact.integer_prefill import IntegerPrefillSchedule, prefill_integer

    if schedule is not None and not isinstance(schedule, (IntegerDecodeSchedule, IntegerPrefillSchedule)):
        raise ValueError(f"the integer family takes an IntegerDecodeSchedule or IntegerPrefillSchedule; got {schedule=}; leave it out")
    m, n, k = ex_M.shape[0], weight.n, weight.k
    if dtype == torch.float32:
        out = output_buffer(out, m, n, ex_M.device)
    else:
        out = torch.empty((m, n), dtype=dtype, device=ex_M.device)
    if m * n * k == 0:
        return out.zero_()
    small = m <= DECODE_TOKENS or weight.digits is None
    if isinstance(schedule, IntegerDecodeSchedule) or (schedule is None and small):
        return decode_integer(planes, ex_M, weight, schedule, out)
    return prefill_integer(planes, ex_M, weight, schedule, out)
