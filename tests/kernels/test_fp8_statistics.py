"""Claims: the reference counts and sums what it says, statistics of parts merge to those of the whole, and the kernel compiles for sm_90.

Counts and amax are compared exactly. Sums are float64 of exact float32 numbers: n terms in any order are within n 2^-53 of the sum of their
magnitudes, and math.fsum, which rounds once, is the oracle.
"""

import math
import re
import subprocess
import tempfile
from dataclasses import fields

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.exact.philox import philox_bell, philox_integers
from kernels.fp8.statistics import EXPONENTS, MIN_EXPONENT, Statistics, statistics, statistics_kernel, statistics_ref

INF, NAN = float("inf"), float("nan")
POINTERS = {"x_ptr": "*bf16", "count_ptr": "*i64", "amax_ptr": "*fp32", "sum_ptr": "*fp64", "squares_ptr": "*fp64"}


def near(total: torch.Tensor, terms: list[float]) -> bool:
    return abs(total.item() - math.fsum(terms)) <= len(terms) * 2.0**-53 * math.fsum(map(abs, terms))


def any_bits(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random float32 bits: all exponents, subnormal numbers, NaN, infinities, and zeros of both signs."""
    bits = philox_integers(math.prod(shape), seed).copy()
    bits[:6] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 1]
    bits[6:14] &= 0x807FFFFF
    return torch.from_numpy(bits.view(np.float32).reshape(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_and_moments_are_those_of_a_loop(dtype: torch.dtype) -> None:
    x = (any_bits((3, 7, 61), 1) if dtype != torch.float16 else philox_bell((3, 7, 61), 1, scale_log2=-12)).to(dtype)
    s = statistics_ref(x)
    flat = x.double().reshape(-1).tolist()
    finite = [v for v in flat if math.isfinite(v)]
    bins = [0] * EXPONENTS
    for v in finite:
        if v:
            bins[max(math.frexp(v)[1] - 1, MIN_EXPONENT) - MIN_EXPONENT] += 1  # frexp: v = m 2^e with 1/2 <= |m| < 1
    assert s.exponents.tolist() == bins and sum(map(bool, bins)) > 8
    assert s.zeros.item() == finite.count(0.0) and s.nonfinite.item() == len(flat) - len(finite) and s.count.item() == len(flat)
    assert near(s.sum, finite) and near(s.sum_squares, [v * v for v in finite]) and s.amax.item() == max(map(abs, finite))
    for i, row in enumerate(x.double().reshape(21, 61).tolist()):
        row = [v for v in row if math.isfinite(v)]
        assert s.row_amax[i].item() == max(map(abs, row)) and near(s.row_sum_squares[i], [v * v for v in row])


def test_bins_begin_at_powers_of_two() -> None:
    for e in (-126, -1, 0, 3, 127):
        below, at = statistics_ref(torch.tensor([[math.nextafter(2.0**e, 0)]]).float().nextafter(torch.tensor(0.0))), statistics_ref(torch.tensor([[2.0**e]]))
        assert at.exponents[e - MIN_EXPONENT] == 1
        assert below.exponents[max(e - 1, MIN_EXPONENT) - MIN_EXPONENT] == 1


@pytest.mark.parametrize("sample", [1, 2, 3, 100])
def test_a_sample_is_every_nth_row_of_all_leading_axes(sample: int) -> None:
    x = any_bits((3, 7, 20), 2)
    equal(statistics_ref(x, sample=sample), statistics_ref(x.reshape(21, 20)[::sample]))
    assert len(statistics_ref(x, sample=sample).row_amax) == len(range(0, 21, sample))


def equal(a: Statistics, b: Statistics) -> None:
    """Same dtypes, exact counts and rows; sums to the float64 rounding of a few additions."""
    for name in (f.name for f in fields(Statistics)):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.shape == y.shape
        if name in ("sum", "sum_squares"):
            scale = math.sqrt(a.sum_squares.item() * a.count.item()) if name == "sum" else a.sum_squares.item()  # Cauchy-Schwarz: >= sum of |x|
            assert abs(x.item() - y.item()) <= (a.count.item() + 4) * 2.0**-53 * scale
        else:
            assert torch.equal(x, y), name


PARTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 1000)), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(PARTS)
def test_merging_is_associative_and_equals_one_pass(parts: list[tuple[int, int, int]]) -> None:
    tensors = [any_bits((rows + 2, 7 + columns), seed)[:rows] for rows, columns, seed in parts]
    a, b, c = map(statistics_ref, tensors)
    equal(a.merge(b).merge(c), a.merge(b.merge(c)))
    whole = any_bits((11, 13), parts[0][2])
    cut = parts[0][0]
    equal(statistics_ref(whole[:cut]).merge(statistics_ref(whole[cut:])), statistics_ref(whole))
    equal(a.merge(statistics_ref(torch.zeros(0, 4))), a)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3)])
def test_empty_tensors_have_empty_statistics(shape: tuple[int, ...]) -> None:
    s = statistics_ref(torch.zeros(shape))
    assert s.count == s.sum == s.sum_squares == s.amax == 0 and len(s.row_amax) == len(s.row_sum_squares) == math.prod(shape[:-1])


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"statistics are of \[..., R, C\]"):
        statistics_ref(torch.zeros(3))
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        statistics_ref(torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="sample >= 1, got sample=0"):
        statistics_ref(torch.zeros(3, 3), sample=0)
    with pytest.raises(ValueError, match="runs on a GPU"):
        statistics(torch.zeros(3, 3))


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("rows, columns", [(4, 1024), (1, 4096)])
def test_the_kernel_reads_16_bytes_at_a_time_and_counts_in_integers_without_spills(rows: int, columns: int) -> None:
    constants = dict(ROWS=rows, COLUMNS=columns, CODES=256)
    names = statistics_kernel.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS or n in ("C", "stride_row")}
    compiled = triton.compile(ASTSource(fn=statistics_kernel, signature=signature, constexprs=constants, attrs=aligned), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8))
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 2 and not re.search(r"ld\.global\S*\.b(8|16)\b", ptx), "16 elements a thread"
    atomics = re.findall(r"\b(?:atom|red)\.global\S*", ptx)
    assert atomics and all(name.endswith(".add.u64") for name in atomics), "sums of floats are never added by atomics"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    assert used["STACK"] == used["LOCAL"] == "0" and int(used["REG"]) <= 128, usage


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("ones, wide", [(["rows"], "i32"), (["C"], "i32"), (["rows", "C", "stride_row"], "i32"), ([], "i64")])
def test_the_kernel_compiles_where_sizes_are_one_or_beyond_32_bits(ones: list[str], wide: str) -> None:
    """Triton makes a constant of an argument that is 1 and an int64 of a large one; the interpreter does neither."""
    constants = dict(ROWS=1, COLUMNS=16, CODES=256, **dict.fromkeys(ones, 1))
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, wide) for n in statistics_kernel.arg_names}
    compiled = triton.compile(ASTSource(fn=statistics_kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert "ld.global" in compiled.asm["ptx"]
