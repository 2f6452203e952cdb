"""How a linear layer is prepared and run, by family: the two exact ones and the baselines that they are compared with.

    family = FAMILIES["fma"]
    handle = family.prepare(w_NK)                           # w on the device where it will be used
    y_MN = family.linear(x_MK, handle)

Legend: M tokens, N outputs, K inputs. An exact family runs its oracle on a CPU and its kernel on a GPU, with equal bits. Baselines
run as their users run them, with one library call; across ranks they add parts in the library's order. A family says nothing of
attention and norms beyond `operators`: "exact" (kernels.exact), "torch" (plain torch), "serving" (exact but for torch's attention).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.exact.decode import pack_weight
from kernels.exact.integer import (
    IntegerWeight, integer_accumulate, integer_accumulate_ref, integer_finish, integer_finish_ref, linear_integer, linear_integer_ref,
    prepare_integer, row_exponents, row_exponents_ref,
)  # fmt: skip
from kernels.exact.linear import linear_fma, linear_fma_ref
from kernels.exact.order import SPANS
from kernels.exact.slices import Sliced
from studies.models.parallel import Parallel, tree_add


@dataclass(frozen=True, kw_only=True)
class Family:
    """`activations`: what linears read; `kv`: what the cache holds; `residual`: the stream between layers; `precision`: of fp32 GEMMs.

    `prepare_columns(w_NK, parallel)` keeps this rank's inputs of the whole w; `reduce_columns(x_MK, handle, parallel)` is the whole y
    from this rank's columns of x. `sliced`: on a GPU `linear` also reads a `kernels.exact.slices.Sliced`, which the operator before it makes.
    """

    name: str
    title: str
    exact: bool
    activations: torch.dtype
    prepare: Callable[[torch.Tensor], Any]
    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    prepare_columns: Callable[[torch.Tensor, Parallel], Any]
    reduce_columns: Callable[[torch.Tensor, Any, Parallel], torch.Tensor]
    kv: torch.dtype = torch.bfloat16
    residual: torch.dtype = torch.float32
    operators: str = "exact"
    sliced: bool = False
    precision: str | None = None
    needs_gpu: bool = False


# ---- family A ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _FmaOracle:
    w_NK: torch.Tensor
    spans: int | None


def _prepare_fma(w_NK: torch.Tensor, spans: int | None = None) -> Any:
    return pack_weight(w_NK, spans=spans) if w_NK.is_cuda else _FmaOracle(w_NK=w_NK, spans=spans)


def _linear_fma(x_MK: torch.Tensor, handle: Any) -> torch.Tensor:
    return linear_fma_ref(x_MK, handle.w_NK, spans=handle.spans) if isinstance(handle, _FmaOracle) else linear_fma(x_MK, handle)


def _prepare_fma_columns(w_NK: torch.Tensor, parallel: Parallel) -> Any:
    return _prepare_fma(parallel.columns(w_NK), SPANS // parallel.size if parallel.size > 1 else None)


def _reduce_fma(x_MK: torch.Tensor, handle: Any, parallel: Parallel) -> torch.Tensor:
    return tree_add(parallel.gather(_linear_fma(x_MK, handle)))


# ---- family B ------------------------------------------------------------------------------------------------------------------


def _linear_integer(x_MK: torch.Tensor | Sliced, weight: IntegerWeight) -> torch.Tensor:
    return linear_integer(x_MK, weight) if isinstance(x_MK, Sliced) or x_MK.is_cuda else linear_integer_ref(x_MK, weight)


def _prepare_integer_columns(w_NK: torch.Tensor, parallel: Parallel, *, products: str) -> IntegerWeight:
    """A rank's columns are scaled by the exponents of the whole rows."""
    exponents = row_exponents_ref(w_NK) if parallel.size > 1 else None
    return prepare_integer(parallel.columns(w_NK), products=products, exponents=exponents, total_k=w_NK.shape[1])


def _reduce_integer(x_MK: torch.Tensor, weight: IntegerWeight, parallel: Parallel) -> torch.Tensor:
    """The largest row exponents of all ranks, then the sum of their integers: both free of order."""
    if parallel.size == 1:
        return _linear_integer(x_MK, weight)
    if x_MK.is_cuda:
        ex_M = parallel.max(row_exponents(x_MK))
        return integer_finish(parallel.sum(integer_accumulate(x_MK, weight, ex_M)), ex_M, weight)
    ex_M = parallel.max(row_exponents_ref(x_MK))
    return integer_finish_ref(parallel.sum(integer_accumulate_ref(x_MK, weight, ex_M)), ex_M, weight)


# ---- baselines -----------------------------------------------------------------------------------------------------------------


def _keep(w_NK: torch.Tensor, *, dtype: torch.dtype | None) -> torch.Tensor:
    """In `dtype`; None: as it is."""
    return w_NK if dtype is None else w_NK.to(dtype)


def _layercast(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """As the authors' patch does it (arXiv 2506.09501): the weight is upcast in memory at each call, then SGEMM."""
    return F.linear(x_MK.float(), w_NK.to(torch.float32))


def _invariant(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    from studies.models.invariant import linear_invariant

    return linear_invariant(x_MK, w_NK)


def _baseline(*, linear: Callable[..., torch.Tensor] = F.linear, stored: torch.dtype | None = torch.bfloat16, **fields: Any) -> Family:
    """A family whose handle is the matrix and whose sum over ranks is the library's."""
    return Family(
        exact=False, prepare=partial(_keep, dtype=stored), linear=linear,
        prepare_columns=lambda w_NK, parallel: _keep(parallel.columns(w_NK), dtype=stored),
        reduce_columns=lambda x_MK, w_NK, parallel: parallel.sum(linear(x_MK, w_NK)), **fields,
    )  # fmt: skip


def _wide(*, precision: str = "ieee", **fields: Any) -> Family:
    """fp32 activations, residual and cache."""
    wide = torch.float32
    return _baseline(activations=wide, kv=wide, residual=wide, operators="torch", precision=precision, **fields)


# ---- the table -----------------------------------------------------------------------------------------------------------------


def _fma() -> Family:
    return Family(
        name="fma", title="fma (ours)", exact=True, activations=torch.bfloat16, prepare=_prepare_fma, linear=_linear_fma,
        prepare_columns=_prepare_fma_columns, reduce_columns=_reduce_fma,
    )  # fmt: skip


def _integer(name: str, title: str, products: str) -> Family:
    return Family(
        name=name, title=title, exact=True, activations=torch.bfloat16, prepare=partial(prepare_integer, products=products),
        linear=_linear_integer, prepare_columns=partial(_prepare_integer_columns, products=products), reduce_columns=_reduce_integer, sliced=True,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _fma(),
        _integer("integer", "integer b6 (ours)", "b6"),
        _integer("integer-b9", "integer b9 (ours)", "b9"),
        _baseline(name="bf16", title="bf16 GEMM", activations=torch.bfloat16, residual=torch.bfloat16, operators="torch"),
        _baseline(name="bf16-serving", title="bf16 GEMM, our operators", activations=torch.bfloat16, operators="serving"),
        _baseline(name="batch-invariant", title="batch-invariant bf16", activations=torch.bfloat16, linear=_invariant, needs_gpu=True),
        _wide(name="sgemm", title="fp32 SGEMM", stored=torch.float32),
        _wide(name="tf32", title="TF32 GEMM", stored=torch.float32, precision="tf32"),
        _wide(name="layercast", title="LayerCast", linear=_layercast, stored=None),
        _wide(name="layercast-stored", title="LayerCast, stored in fp32", stored=torch.float32),
    )
}


@contextlib.contextmanager
def fp32_precision(precision: str | None) -> Iterator[None]:
    """fp32 matrix products on GPUs run as "ieee" or "tf32" inside, as before outside; None changes nothing."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision or before
    try:
        yield
    finally:
        settings.fp32_precision = before
