"""Claims: the reference follows the scale rule in every group, for every input; its kernels compile for sm_90 to what their docstring counts.

Bits are compared with an oracle that visits one group at a time in numpy's float32. The one tolerance is the error of x against data * scale:
r, x r, scale and the last product round once each, 2^-24 relative, and the cast by half a step: 2^-(mantissa bits + 1) relative, or half the
subnormal step, whichever is larger.
"""

import itertools
import math
import re
import subprocess
import tempfile

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.exact.philox import philox_bell, philox_integers
from kernels.fp8 import quantise as module
from kernels.fp8.formats import E4M3, E5M2, Format, cast
from kernels.fp8.quantise import Quantised, quantise, quantise_ref
from kernels.fp8.recipes import GRANULARITIES, OperandRecipe
from kernels.fp8.scaling import scale_rule_ref

INF, NAN = float("inf"), float("nan")
ROUNDINGS = 4 * 2.0**-24
RECIPES = [OperandRecipe(fmt=f, granularity=g, power_of_two=p) for f, g, p in itertools.product(("e4m3", "e5m2"), GRANULARITIES, (False, True))]
NAMES = [f"{o.fmt}-{o.granularity}{'-p2' * o.power_of_two}" for o in RECIPES]


def wild(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float32 with rows of very different sizes, and a zero row, NaN and infinities where they fit."""
    x = philox_bell(shape, seed) * torch.exp2(torch.from_numpy(philox_integers(math.prod(shape[:-1]), seed, 1).reshape(*shape[:-1], 1) % 60).float() - 30)
    if x.numel() > 400:
        x[..., 1, :] = 0.0
        x.view(-1)[[0, 7, 9]] = torch.tensor([NAN, INF, -INF])
    return x


def groups(shape: tuple[int, ...], granularity: str):
    """(index of the scale, index of the group's elements) of a matrix."""
    r, c = shape
    high, wide = {"tensor": (r, c), "row": (1, c), "block": (1, 128), "square": (128, 128)}[granularity]
    for i, j in itertools.product(range(-(-r // high)), range(-(-c // wide))):
        yield (() if granularity == "tensor" else (i, j)), (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))


def rule(amax: np.float32, fmt: Format, power_of_two: bool) -> tuple[np.float32, np.float32]:
    """The rule for one number, the power of two by trying exponents in exact arithmetic (float64 holds F 2^e)."""
    if amax == 0:
        return np.float32(1), np.float32(1)
    amax = max(amax, np.float32(2.0**-100))
    if not power_of_two:
        return amax / np.float32(fmt.max), np.float32(fmt.max) / amax
    e = next(e for e in range(-140, 141) if float(amax) <= fmt.max * 2.0**e)
    return np.float32(2.0**e), np.float32(2.0**-e)


def bits(q: Quantised) -> torch.Tensor:
    """Bytes, with one NaN."""
    return torch.where(q.data_RC.float().isnan(), 0x7F, q.data_RC.view(torch.uint8))


def same(a: Quantised, b: Quantised) -> bool:
    return torch.equal(bits(a), bits(b)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("operand", RECIPES, ids=NAMES)
def test_every_group_follows_the_rule(operand: OperandRecipe) -> None:
    x = wild((131, 150), 1)
    q = quantise_ref(x, operand)
    for place, group in groups(tuple(x.shape), operand.granularity):
        part = x[group]
        finite = part[part.isfinite()].abs().numpy()
        scale, r = rule(finite.max(initial=np.float32(0)), operand.format, operand.power_of_two)
        assert q.scale[place].item() == scale
        want = Quantised(cast(torch.from_numpy(part.numpy() * r), operand.format), torch.tensor(1.0), OperandRecipe(fmt=operand.fmt, granularity="tensor"))
        assert torch.equal(bits(q)[group], bits(want))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_a_power_of_two_scale_is_the_smallest_that_fits(fmt: Format) -> None:
    random = philox_integers(2000, 3).view(np.float32)
    random = np.abs(random[np.isfinite(random)])
    edges = np.ldexp(np.float32(1.75), np.arange(-100, 128)).astype(np.float32)
    amax = np.concatenate([random, edges, np.nextafter(edges, np.float32(INF)), np.nextafter(edges, np.float32(0)), np.array([2.0**-100, 3.4028235e38], np.float32)])
    amax = amax[(amax >= 2.0**-100) & np.isfinite(amax)]
    scale, r = scale_rule_ref(torch.from_numpy(amax), fmt, power_of_two=True)
    s, a = scale.double().numpy(), amax.astype(np.float64)
    assert np.array_equal(np.frexp(s)[0], np.full(len(s), 0.5)) and np.array_equal(s * r.double().numpy(), np.ones(len(s)))
    assert (a <= fmt.max * s).all() and (a > fmt.max * s / 2).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scale_and_reciprocal_are_one_division_each(fmt: Format) -> None:
    """r is not 1 / scale: for about a quarter of all amax that differs in the last bit."""
    amax = np.abs(philox_integers(4000, 6).view(np.float32))
    amax = np.concatenate([amax[np.isfinite(amax)], np.array([0.0, 2.0**-149, 2.0**-100, 3.4028235e38], np.float32)])
    scale, r = scale_rule_ref(torch.from_numpy(amax), fmt)
    want = [rule(a, fmt, False) for a in amax]
    assert scale.tolist() == [float(s) for s, _ in want] and r.tolist() == [float(r) for _, r in want]
    assert (1 / scale != r).float().mean() > 0.1


@pytest.mark.parametrize("operand", RECIPES, ids=NAMES)
def test_dequantised_numbers_are_within_half_a_step(operand: OperandRecipe) -> None:
    x = wild((2, 140, 260), 2)
    q = quantise_ref(x, operand)
    scale = torch.ones_like(x) * quantise_scale(q)
    half = torch.maximum(x.abs() * 2.0 ** -(operand.format.mantissa_bits + 1), scale * operand.format.step / 2)
    finite = x.isfinite()
    error = (q.dequantise() - x).abs()
    assert (error <= half + ROUNDINGS * (x.abs() + half))[finite].all()
    assert (error[finite] > half[finite] / 2).any(), "the bound is near: a format with one mantissa bit more would be within half of it"


def quantise_scale(q: Quantised) -> torch.Tensor:
    """q's scales at every element, by indexing."""
    r, c = (torch.arange(n) for n in q.data_RC.shape[-2:])
    return {
        "tensor": lambda: q.scale, "row": lambda: q.scale, "block": lambda: q.scale[..., c // 128], "square": lambda: q.scale[..., r[:, None] // 128, c // 128]
    }[q.operand.granularity]()  # fmt: skip


@pytest.mark.parametrize("operand", RECIPES, ids=NAMES)
def test_zeros_nan_and_infinities(operand: OperandRecipe) -> None:
    top = operand.format.max
    zero = quantise_ref(torch.zeros(3, 200), operand)
    assert (zero.scale == 1).all() and (zero.data_RC.view(torch.uint8) == 0).all()
    none_finite = quantise_ref(torch.tensor([[NAN, INF, -INF]]), operand)
    assert (none_finite.scale == 1).all()
    d = none_finite.dequantise()[0]
    assert d[0].isnan() and d[1:].tolist() == [top, -top]
    mixed = quantise_ref(torch.tensor([[2.0, NAN, INF, -1.0]]), operand)
    want = quantise_ref(torch.tensor([[2.0, 0.0, 0.0, -1.0]]), operand)
    assert torch.equal(mixed.scale, want.scale) and mixed.dequantise()[0, 2] == top * want.scale.reshape(-1)[0]
    assert torch.equal(mixed.dequantise()[0, [0, 3]], want.dequantise()[0, [0, 3]]), "neighbours of NaN and infinity keep their accuracy"


@pytest.mark.parametrize("operand", [o for o in RECIPES if o.granularity == "row"], ids=lambda o: f"{o.fmt}{o.power_of_two}")
def test_the_smallest_and_largest_rows_have_normal_scales(operand: OperandRecipe) -> None:
    amax = torch.tensor([2.0**-149, 2.0**-126, 2.0**-101, 2.0**-100, 2.0**-99, 3.4028234663852886e38])
    q = quantise_ref(amax[:, None], operand)
    assert ((q.scale >= 2.0**-126) & (q.scale < 2.0**127)).all()
    assert (q.scale[:4] == q.scale[3]).all() and q.scale[4] == 2 * q.scale[3]
    assert q.data_RC.float()[0] == 0 and (q.data_RC.float()[3:] > operand.format.max / 2 * (1 - 2.0**-3)).all()


@pytest.mark.parametrize("granularity, want", [("tensor", ()), ("row", (2, 3, 130, 1)), ("block", (2, 3, 130, 3)), ("square", (2, 3, 2, 3))])
def test_scales_have_the_documented_shape_for_a_batch(granularity: str, want: tuple[int, ...]) -> None:
    x = wild((2, 3, 130, 300), 3)
    o = OperandRecipe(fmt="e4m3", granularity=granularity)
    q = quantise_ref(x, o)
    assert tuple(q.scale.shape) == want and q.scale.dtype == torch.float32
    if granularity != "tensor":
        assert same(Quantised(q.data_RC[1, 2], q.scale[1, 2], o), quantise_ref(x[1, 2], o)), "each matrix of a batch is quantised alone"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3), (0, 4, 4)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_tensors_have_scales_of_one(shape: tuple[int, ...], granularity: str) -> None:
    q = quantise_ref(torch.zeros(shape), OperandRecipe(fmt="e4m3", granularity=granularity))
    assert q.dequantise().shape == shape and (q.scale == 1).all()


@pytest.mark.parametrize("operand", RECIPES, ids=NAMES)
def test_transposes_views_and_dtypes_are_the_same_numbers(operand: OperandRecipe) -> None:
    x = wild((2, 131, 140), 4)
    assert same(quantise_ref(x, operand, transpose=True), quantise_ref(x.mT.contiguous(), operand))
    wide = torch.stack([x, torch.full_like(x, 7.0)], dim=-1).reshape(2, 131, 280)
    assert same(quantise_ref(wide[..., ::2], operand), quantise_ref(x, operand))
    for dtype in (torch.bfloat16, torch.float16):
        assert same(quantise_ref(x.to(dtype), operand), quantise_ref(x.to(dtype).float(), operand))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_reference_compiles_to_one_graph_with_the_same_bits(granularity: str) -> None:
    """A contest times it as torch.compile makes it; numbers that are not finite are no branch there."""
    operand, x = OperandRecipe(fmt="e4m3", granularity=granularity), wild((33, 300), 8)

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantise_ref(x, operand)
        return q.data_RC.view(torch.uint8), q.scale

    for want, found in zip(parts(x), torch.compile(parts, backend="eager", fullgraph=True)(x), strict=True):
        assert torch.equal(want, found)


def test_power_of_two_scales_follow_a_shift_of_all_numbers() -> None:
    x = philox_bell((64, 300), 5)
    for operand in (o for o in RECIPES if o.power_of_two):
        a, b = quantise_ref(x, operand), quantise_ref(x * 2.0**-20, operand)
        assert torch.equal(bits(a), bits(b)) and torch.equal(a.scale * 2.0**-20, b.scale)


def test_bad_inputs_are_refused() -> None:
    o = OperandRecipe(fmt="e4m3", granularity="row")
    with pytest.raises(ValueError, match=r"an operand is \[..., R, C\]"):
        quantise_ref(torch.zeros(3), o)
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        quantise_ref(torch.zeros(3, 3, dtype=torch.float64), o)
    with pytest.raises(ValueError, match="an operand's recipe"):
        quantise_ref(torch.zeros(3, 3), None)
    with pytest.raises(ValueError, match="has torch.float8_e4m3fn and scales"):
        Quantised(torch.zeros(3, 3).to(torch.float8_e4m3fn), torch.ones(3), o)
    with pytest.raises(ValueError, match="runs on a GPU"):
        quantise(torch.zeros(3, 3), o)


# ---- what the compiler makes of the kernels --------------------------------------------------------------------------------------

COUNTS = ("partials", "splits", "tiles")  # 16 need not divide them
SIZES = ["R", "C", "stride_batch", "stride_row"]
TYPES = {"x_ptr": "*bf16", "q_ptr": "*u8", "scale_ptr": "*fp32", "partial_ptr": "*fp32", "partials": "i32", "splits": "i32", "tiles": "i32", **dict.fromkeys(SIZES, "i32")}
HOW = dict(FP8=tl.float8e4nv, MAX=448.0, POWER_OF_TWO=False)
# name: kernel, constants, warps, and registers a thread may use so that an SM of 65,536 holds at least 24 warps
KERNELS = {
    "rows": (module.quantise_rows_kernel, dict(**HOW, ROWS=8, HEAD=1024, TAIL=0), 8, 80),
    "rows in e5m2": (module.quantise_rows_kernel, dict(FP8=tl.float8e5, MAX=57344.0, POWER_OF_TWO=False, ROWS=8, HEAD=1024, TAIL=0), 8, 80),
    "rows of 2304": (module.quantise_rows_kernel, dict(**HOW, ROWS=2, HEAD=2048, TAIL=256), 4, 80),
    "rows of 18432": (module.quantise_rows_kernel, dict(**HOW, ROWS=1, HEAD=16384, TAIL=2048), 16, 80),
    "longest whole row": (module.quantise_rows_kernel, dict(**HOW, ROWS=1, HEAD=32768, TAIL=0), 32, 64),
    "blocks": (module.quantise_tiles_kernel, dict(**HOW, GROUP="row", TRANSPOSE=False, ROWS=64, COLUMNS=128), 8, 80),
    "blocks of x^T": (module.quantise_tiles_kernel, dict(**HOW, GROUP="column", TRANSPOSE=True, ROWS=128, COLUMNS=64), 8, 80),
    "squares of x^T": (module.quantise_tiles_kernel, dict(**HOW, GROUP="tile", TRANSPOSE=True, ROWS=128, COLUMNS=128), 16, 80),
    "long rows": (module.quantise_long_rows_kernel, dict(**HOW, COLUMNS=8192), 8, 80),
    "amax of a tensor": (module.tensor_amax_kernel, dict(ROWS=1, COLUMNS=8192), 8, 80),
    "amax of columns": (module.column_amax_kernel, dict(ROWS=128, COLUMNS=64), 8, 80),
    "cast of a tensor": (module.cast_kernel, dict(**HOW, COLUMN=False, TRANSPOSE=False, ROWS=1, COLUMNS=8192, PADDED=512, STEPS=4), 8, 80),
    "cast of columns": (module.cast_kernel, dict(**HOW, COLUMN=True, TRANSPOSE=True, ROWS=128, COLUMNS=64, PADDED=64, STEPS=4), 8, 80),
}


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_to_wide_accesses_and_saturating_casts_without_spills(name: str) -> None:
    kernel, constants, warps, registers = KERNELS[name]
    signature = {n: "constexpr" if n in constants else TYPES[n] for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in TYPES and n not in COUNTS}
    compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
    ptx = compiled.asm["ptx"]
    # per thread: 32 or more elements of x in 4 or more loads of 16 bytes, as many bytes of q in 2 or more stores of 16
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 4 and not re.search(r"ld\.global\S*\.b(8|16)\b", ptx)
    assert ".local" not in ptx and "st.local" not in ptx
    assert not re.search(r"(min|max)\.NaN", ptx), "triton#11111"
    assert ".ftz" not in ptx, "subnormal numbers are kept"
    assert not re.search(r"\b(atom|red)\.|div\.(full|approx)|fma\.rn.*approx", ptx)
    if "FP8" in constants:
        assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= 2 and not re.search(r"st\.global\S*\.b8\b", ptx)
        elements = constants.get("ROWS", 1) * (constants["HEAD"] + constants["TAIL"] if "HEAD" in constants else constants["COLUMNS"])
        casts = re.findall(r"cvt\S*e\dm\d\S*", ptx)
        assert set(casts) == {f"cvt.rn.satfinite.{'e4m3' if constants['FP8'] == tl.float8e4nv else 'e5m2'}x2.f32"} and 2 * len(casts) * warps * 32 == elements
        assert re.search(r"div\.rn\.f32", ptx)
    assert_no_spills(compiled, registers)


def test_programs_hold_whole_rows_with_few_lanes_idle() -> None:
    """At most a quarter from 64 columns on (the worst is just above 3/4 of a power of two), none at sizes of the models."""
    for columns in range(1, module.LONG + 1):
        rows = module._rows(10**6, columns)
        held = rows["HEAD"] + rows["TAIL"]
        assert held >= columns and rows["ROWS"] * held <= max(module._TILE, held) and (columns < 64 or columns / held > 0.75)
    assert all(sum(module._rows(10**6, c)[n] for n in ("HEAD", "TAIL")) == c for c in (160, 640, 1024, 1536, 2304, 3072, 4096, 18432))


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="needs triton's NVIDIA backend (compiler only)")
@pytest.mark.parametrize("name", ["rows", "squares of x^T", "long rows", "amax of a tensor", "amax of columns", "cast of a tensor", "cast of columns"])
def test_kernels_compile_where_sizes_are_one_or_beyond_32_bits(name: str) -> None:
    """Triton makes a constant of an argument that is 1 and an int64 of a large one; the interpreter does neither."""
    kernel, constants, _, _ = KERNELS[name]
    small = {**constants, **{n: 16 for n in ("ROWS", "COLUMNS", "HEAD", "TAIL") if n in constants}, **{n: 4 for n in ("PADDED",) if n in constants}}
    sizes = [n for n in kernel.arg_names if TYPES.get(n) == "i32"]
    for ones, wide in ((sizes, "i32"), (sizes[:1], "i32"), (["C"], "i32"), ([], "i64")):
        fixed = {**small, **dict.fromkeys(ones, 1)}
        signature = {n: "constexpr" if n in fixed else TYPES[n].replace("i32", wide) for n in kernel.arg_names}
        compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
        assert "ld.global" in compiled.asm["ptx"]


def assert_no_spills(compiled, registers: int) -> None:
    """By ptxas's own words: usage of the binary that would be launched."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    assert used["STACK"] == used["LOCAL"] == "0" and int(used["REG"]) <= registers, usage
