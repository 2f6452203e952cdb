"""Claim: the quantising kernels give the reference's bits, under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest -m interpreter.

Scales, products and bytes are compared, no tolerance; the interpreter's casts to FP8 are replaced by formats.cast (conftest.py).
"""

import itertools
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("fp8_casts"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start of the process"),
]

from kernels.exact.philox import philox_bell, philox_integers  # noqa: E402
from kernels.fp8 import quantise as module  # noqa: E402
from kernels.fp8.formats import E4M3, E5M2  # noqa: E402
from kernels.fp8.quantise import Quantised, quantise, quantise_ref  # noqa: E402
from kernels.fp8.recipes import GRANULARITIES, OperandRecipe  # noqa: E402
from kernels.fp8.scaling import scale_rule, scale_rule_ref  # noqa: E402

INF, NAN = float("inf"), float("nan")
WAYS = list(itertools.product(GRANULARITIES, (False, True)))


def wild(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different sizes, with a zero row, NaN and infinities where they fit."""
    x = philox_bell(shape, seed) * torch.exp2(torch.from_numpy(philox_integers(shape[-2], seed, 1) % 30).float() - 20)[:, None]
    if x.numel() > 400 and shape[-2] > 1:
        x[..., 1, :] = 0.0
        x.view(-1)[[0, 7, 9]] = torch.tensor([NAN, INF, -INF])
    return x.to(dtype)


def same(a: Quantised, b: Quantised) -> bool:
    bits = [torch.where(q.data_RC.float().isnan(), 0x7F, q.data_RC.view(torch.uint8)) for q in (a, b)]
    return torch.equal(*bits) and torch.equal(a.scale, b.scale) and a.operand == b.operand


@triton.jit
def rule_kernel(amax_ptr, scale_ptr, r_ptr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    scale, r = scale_rule(tl.load(amax_ptr + i), MAX, POWER_OF_TWO)
    tl.store(scale_ptr + i, scale)
    tl.store(r_ptr + i, r)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_rule_inside_a_kernel_is_the_reference_s(fmt, power_of_two: bool) -> None:
    bits = philox_integers(4096, 4) & 0x7FFFFFFF
    bits[:8] = [0, 1, 0x00800000, 0x0D800000, 0x0D7FFFFF, 0x7F7FFFFF, 0x43E00000, 0x43E00001]  # 0, subnormal, 2^-126, 2^-100 and below, max, 448 and above
    amax = torch.from_numpy(np.where(bits < 0x7F800000, bits, 0x3F800000).astype(np.int32)).view(torch.float32)
    scale, r = torch.empty_like(amax), torch.empty_like(amax)
    rule_kernel[(1,)](amax, scale, r, MAX=fmt.max, POWER_OF_TWO=power_of_two, COUNT=4096)
    want_scale, want_r = scale_rule_ref(amax, fmt, power_of_two)
    assert torch.equal(scale, want_scale) and torch.equal(r, want_r)


# batches and ragged tiles; one number; a column longer than SHORT (two reads transposed); a row longer than LONG (two passes)
@pytest.mark.parametrize("granularity, transpose", WAYS)
@pytest.mark.parametrize("shape", [(2, 130, 140), (1, 1), (2, 300, 40)])
def test_kernels_equal_the_reference(shape: tuple[int, ...], granularity: str, transpose: bool) -> None:
    for fmt, power_of_two, dtype in (("e4m3", False, torch.bfloat16), ("e5m2", True, torch.float32)):
        x = wild(shape, 1, dtype)
        operand = OperandRecipe(fmt=fmt, granularity=granularity, power_of_two=power_of_two)
        assert same(quantise(x, operand, transpose=transpose), quantise_ref(x, operand, transpose=transpose))


@pytest.mark.parametrize("columns", [module.LONG, module.LONG + 8])
def test_long_rows_equal_the_reference(columns: int) -> None:
    x = wild((2, columns), 5)
    x[0, columns - 1] = 3.0e5  # the amax is in the last chunk
    operand = OperandRecipe(fmt="e4m3", granularity="row")
    assert same(quantise(x, operand), quantise_ref(x, operand))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_many_tiles_for_few_programs_equal_the_reference(granularity: str, transpose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tensors of more than _PARTIALS tiles: programs loop over tiles, and over columns' partial amax."""
    monkeypatch.setattr(module, "_PARTIALS", 2)
    monkeypatch.setattr(module, "_TILE", 128 * 16)
    monkeypatch.setattr(module, "_SPLITS", 3)
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    for x in (wild((2, 400, 20), 6), wild((1, 700, 20), 7), wild((2, 300, 24), 8)[..., 1:21]):
        x[-1, -1, -1] = 3.0e5  # the amax is in the last tile
        assert same(quantise(x, operand, transpose=transpose), quantise_ref(x, operand, transpose=transpose))


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_any_strides_give_the_numbers_they_show(granularity: str, transpose: bool) -> None:
    base = wild((4, 10, 70), 8, torch.float16)
    views = [
        base[:, 2:, 3:], base[::2, ::3], base.mT, base[..., ::2], base.transpose(0, 1), base[1].expand(3, 10, 70), base[:, :, :1].expand(4, 10, 9), base[:, :1],
        base.unflatten(0, (2, 2)).transpose(0, 1),
    ]  # fmt: skip
    operand = OperandRecipe(fmt="e4m3", granularity=granularity)
    for x in views:
        assert same(quantise(x, operand, transpose=transpose), quantise_ref(x, operand, transpose=transpose)), x.stride()


@pytest.mark.parametrize("granularity, transpose", WAYS)
def test_empty_tensors_launch_nothing(granularity: str, transpose: bool) -> None:
    operand = OperandRecipe(fmt="e5m2", granularity=granularity)
    for shape in ((0, 5), (5, 0), (2, 0, 3), (0, 4, 4)):
        assert same(quantise(torch.zeros(shape), operand, transpose=transpose), quantise_ref(torch.zeros(shape), operand, transpose=transpose))


def test_groups_without_a_finite_number_have_scale_one() -> None:
    x = torch.full((130, 140), NAN)
    x[::2] = INF
    for granularity, transpose in WAYS:
        operand = OperandRecipe(fmt="e4m3", granularity=granularity)
        q = quantise(x, operand, transpose=transpose)
        assert (q.scale == 1).all() and same(q, quantise_ref(x, operand, transpose=transpose))


def test_a_matrix_too_large_for_32_bit_indices_is_refused() -> None:
    for shape in ((2, module.LARGEST + 1), (module.LARGEST + 1, 2)):
        with pytest.raises(ValueError, match="at most 2\\^30 rows and columns"):
            quantise(torch.zeros(1, 1).expand(shape), OperandRecipe(fmt="e4m3", granularity="row"))
