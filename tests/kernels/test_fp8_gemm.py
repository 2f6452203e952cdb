"""Claims about scaled products that need no GPU: the reference, what is refused and why, schedules, torch's layouts, and the compiled kernels.

    MIN_SQNR_DB          hardware against float64. An accumulator that keeps 14 bits and cuts towards zero every 32 products loses between 0 and
                         2^-13 of a power of two below itself each time, in the mean 2^-14 ln 2 of itself; the losses have its sign, so over n = C / 32
                         steps, while it grows like sqrt(j / n), they add to (2 n / 3) 2^-14 ln 2: 87.5 - 20 log10(2 n / 3) dB, which is
                         48.9 at C = 4096 and 12 dB less for four times C. 45 leaves 4 dB for what the model leaves out
    MODEL_DB             how far the model of kernels.fp8.emulate may be from that: sums do not keep their sign all along, which gives 1 or 2 dB back
    CLOSE                float64 against float64 in another order: C = 300 roundings of 2^-53 of terms whose sum of magnitudes is below 1e4
    BF16_DB              one rounding to bf16, relative error at most 2^-8 and uniform where it is largest: 10 log10(3 2^16) = 52.9 dB
"""

import itertools
import math

import pytest
import torch

from kernels.exact.audit.specimen import captured, compile_specimen
from kernels.exact.philox import philox_bell
from kernels.fp8 import bench, cublas
from kernels.fp8._bench_cases import sqnr_db
from kernels.fp8.autograd import transposed
from kernels.fp8.emulate import multiply_ref
from kernels.fp8.epilogue import Epilogue
from kernels.fp8.gemm import MIN_SQNR_DB, MOST_BATCH, kind_of, scaled_gemm, scaled_gemm_ref, unsupported, unsupported_sizes
from kernels.fp8.quantise import Quantised, quantise_ref
from kernels.fp8.recipes import GEMMS, GemmRecipe, OperandRecipe, gemm
from kernels.fp8.scaling import scale_shape
from kernels.fp8.schedule import TILES, WHOLE_BLOCKS, GemmSchedule, c_each, schedule, schedules
from studies.loka.site import Gemm

CLOSE = 300 * 2.0**-53 * 1e4
BF16_DB = 52.9
MODEL_DB = 3.0
ROW, BLOCK = (OperandRecipe(fmt="e4m3", granularity=g) for g in ("row", "block"))
FP8 = [name for name, recipe in GEMMS.items() if recipe.is_fp8]


def operands(name: str, r: int, s: int, c: int, lead: tuple[int, ...] = (), seed: int = 1) -> tuple[Quantised, Quantised]:
    recipe = gemm(name)
    return quantise_ref(philox_bell((*lead, r, c), seed), recipe.a), quantise_ref(philox_bell((*lead, s, c), seed + 1), recipe.b)


@pytest.mark.parametrize("name", FP8)
def test_the_reference_is_the_product_of_dequantised_numbers_plus_bias(name: str) -> None:
    for lead in ((), (2, 3)):
        a, b = operands(name, 5, 140, 300, lead)
        bias = philox_bell((140,), 5)
        out = scaled_gemm_ref(a, b, gemm(name), out_dtype=torch.float32, bias=bias)
        want = torch.einsum("...rc,...sc->...rs", a.dequantise().double(), b.dequantise().double()) + bias.double()
        assert out.dtype == torch.float32 and sqnr_db(out, want) >= 120  # float32's one rounding, and dequantise's two, leave 138 dB
        assert sqnr_db(scaled_gemm_ref(a, b, gemm(name), bias=bias), want) >= BF16_DB


def test_the_epilogue_s_reference_is_blocknorm_hardswish_and_the_cast() -> None:
    a, b = operands("rowwise", 6, 512, 64)
    out = multiply_ref(a, b, gemm("rowwise"))
    n = torch.nn.functional.rms_norm(out.view(-1, 256), (256,), eps=1e-5).view(6, 512)
    want = torch.nn.functional.hardswish(n)
    both = dict(norm="blocknorm", activation="hardswish")
    assert ((scaled_gemm_ref(a, b, gemm("rowwise"), out_dtype=torch.float32, epilogue=Epilogue(**both)).double() - want).abs() <= 2.0**-23 * want.abs() + CLOSE).all()
    q = scaled_gemm_ref(a, b, gemm("rowwise"), epilogue=Epilogue(**both, requantise=BLOCK))
    again = quantise_ref(want.float(), BLOCK)
    assert q.scale.shape == (6, 4) and torch.equal(q.data_RC.view(torch.uint8), again.data_RC.view(torch.uint8)) and torch.equal(q.scale, again.scale)


@pytest.mark.parametrize("c", [256, 1024, 4096])
def test_hopper_s_accumulator_stays_above_the_bound_up_to_c_4096(c: int) -> None:
    a, b = operands("rowwise-fast", 64, 64, c)
    exact = scaled_gemm_ref(a, b, gemm("rowwise-fast"), out_dtype=torch.float32)
    found = sqnr_db(multiply_ref(a, b, gemm("rowwise-fast"), accumulate="hopper"), exact)
    assert found >= MIN_SQNR_DB and abs(found - (87.5 - 20 * math.log10(2 * c / 32 / 3))) <= MODEL_DB
    a, b = operands("rowwise", 64, 64, c)
    assert sqnr_db(multiply_ref(a, b, gemm("rowwise"), accumulate="hopper"), exact) >= found + MODEL_DB  # promoted every 128


# ---- what is refused -----------------------------------------------------------------------------------------------------------


def test_what_a_backend_cannot_run_is_said_in_words() -> None:
    one, three = Gemm(batch=1, r=8, s=8, c=8), Gemm(batch=3, r=8, s=8, c=8)
    assert unsupported(gemm("bf16"), three, "cpu") == "" and "not on cpu" in unsupported(gemm("rowwise"), one, "cpu")
    assert all(unsupported_sizes(gemm(n), g, "triton") == "" for n, g in itertools.product(FP8, (one, three)))
    assert all(unsupported_sizes(gemm(n), one, "torch") == "" for n in FP8) and "batch of 3" in unsupported_sizes(gemm("rowwise"), three, "torch")
    mixed = GemmRecipe(name="mixed", a=ROW, b=BLOCK)
    assert "not row by block" in unsupported_sizes(mixed, one, "triton")
    outer = GemmRecipe(name="outer", a=OperandRecipe(fmt="e4m3", granularity="tensor"), b=ROW)
    assert unsupported_sizes(outer, one, "triton") == "" and "tensor by row" in unsupported_sizes(outer, one, "torch")
    assert "nothing to multiply" in unsupported_sizes(gemm("rowwise"), Gemm(batch=1, r=0, s=8, c=8), "triton")
    assert "32 bits" in unsupported_sizes(gemm("rowwise"), Gemm(batch=1, r=2**31, s=8, c=8), "triton")
    many = [Gemm(batch=batch, r=8, s=8, c=8) for batch in (MOST_BATCH, MOST_BATCH + 1)]
    assert unsupported_sizes(gemm("rowwise"), many[0], "triton") == "" and "at most 65535, not 65536" in unsupported_sizes(gemm("rowwise"), many[1], "triton")
    with pytest.raises(ValueError, match=r"a backend is one of .* got 'cutlass'"):
        unsupported(gemm("rowwise"), one, "cpu", backend="cutlass")


def test_operands_that_do_not_fit_are_refused_with_the_rule() -> None:
    recipe, (a, b) = gemm("rowwise"), operands("rowwise", 4, 300, 64)
    for error, call in {
        "quantised as the recipe says": lambda: scaled_gemm_ref(a, b, gemm("blockwise")),
        "b is not transposed": lambda: scaled_gemm_ref(a, quantise_ref(philox_bell((300, 60), 1), ROW), recipe),
        "one C > 0": lambda: scaled_gemm_ref(quantise_ref(philox_bell((4, 0), 1), ROW), quantise_ref(philox_bell((3, 0), 1), ROW), recipe),
        "bf16, fp16 or fp32": lambda: scaled_gemm_ref(a, b, recipe, out_dtype=torch.float64),
        r"a bias is \[S\]": lambda: scaled_gemm_ref(a, b, recipe, bias=philox_bell((4,), 1)),
        "requantise by block": lambda: scaled_gemm_ref(a, b, recipe, epilogue=Epilogue(requantise=ROW)),
        "runs on a GPU; got cpu": lambda: scaled_gemm(a, b, recipe),
        "has no norm or blocknorm": lambda: Epilogue(norm="layernorm"),
        "requantises by block, or by row": lambda: Epilogue(requantise=OperandRecipe(fmt="e4m3", granularity="tensor")),
        "an activation one of": lambda: Epilogue(activation="gelu"),
        "eps is added": lambda: Epilogue(norm="blocknorm", eps=-1.0),
    }.items():
        with pytest.raises(ValueError, match=error):
            call()


# ---- schedules -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TILES)
def test_every_schedule_covers_c_once_and_leaves_no_split_idle(kind: str) -> None:
    for r, s, c, whole in itertools.product((1, 512, 8192), (7, 512), (13, 640, 4096, 123200), (False, True)):
        for found in schedules(r, s, c, kind=kind, whole_blocks=whole):
            each = c_each(c, found.split)
            assert each % 128 == 0 and found.split * each >= c and (found.split - 1) * each < c
            assert found.split == 1 or (each >= 512 and not whole)
            assert not whole or found.block_s == 256


def test_who_sorts_a_list_of_schedules_changes_nobody_else_s() -> None:
    first = schedules(512, 256, 8192)
    first.reverse()
    assert schedules(512, 256, 8192) == first[::-1] and schedule(512, 256, 8192) == first[-1]


def test_the_model_splits_long_sums_of_few_tiles_and_takes_large_tiles_for_large_products() -> None:
    assert schedule(256, 512, 65536).split >= 8 and schedule(512, 256, 8192).split > 1
    big = schedule(6144, 8192, 18432)
    assert (big.split, big.block_r, big.block_s) == (1, 128, 256) and schedule(2048, 64, 64).block_s == 64
    with pytest.raises(ValueError, match="a kind of product is one of"):
        schedule(1, 1, 1, kind="slow")


# ---- torch's layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "blockwise-both"])
@pytest.mark.parametrize("r, s, c", [(5, 13, 13), (32, 48, 256), (33, 200, 700), (16, 48, 512)])  # the last: one block of 128 rows, four of C, which needs no padding
def test_torch_s_operands_are_padded_to_16_in_the_layouts_it_asks_for_and_mean_the_same(name: str, r: int, s: int, c: int) -> None:
    a, b = operands(name, r, s, c)
    a_RC, b_CS, sa, sb = cublas.cublas_operands(a, b)
    assert a_RC.shape[1] % 16 == b_CS.shape[0] % 16 == b_CS.shape[1] % 16 == 0 and a_RC.stride(1) == 1 and b_CS.stride(0) == 1
    kinds, blocks, rows, columns = (a.operand.granularity, b.operand.granularity), -(-a_RC.shape[1] // 128), a_RC.shape[0], b_CS.shape[1]
    if kinds == ("tensor", "tensor"):
        assert sa.shape == sb.shape == ()
        wide_a, wide_b = sa, sb
    elif kinds == ("row", "row"):
        assert sa.shape == (rows, 1) and sb.shape == (1, columns) and sa.is_contiguous() and sb.is_contiguous()
        wide_a, wide_b = sa, sb
    else:
        assert sa.shape == (rows, blocks) and sa.stride() == (1, rows)
        wide_a = sa.repeat_interleave(128, 1)[:, : a_RC.shape[1]]
        if kinds[1] == "block":
            assert sb.shape == (columns, blocks) and sb.stride() == (1, columns)
            wide_b = sb.repeat_interleave(128, 1)[:, : a_RC.shape[1]].T
        else:
            assert sb.shape == (-(-blocks // 4) * 4, -(-columns // 128)) and sb.stride() == (1, sb.shape[0])
            wide_b = sb.repeat_interleave(128, 0)[: b_CS.shape[0]].repeat_interleave(128, 1)[:, :columns]
    out = (a_RC.double() * wide_a) @ (b_CS.double() * wide_b)
    assert torch.allclose(out[:r, :s], multiply_ref(a, b, gemm(name)), rtol=2.0**-22, atol=CLOSE) and (out[r:] == 0).all() and (out[:, s:] == 0).all()


def test_strides_of_torch_s_scales_do_not_follow_those_of_a_transpose() -> None:
    """Scales [4, 1] of w [512, 128], transposed for dgrad, are [1, 4] with strides (1, 1): contiguous, and no (4, 1)."""
    a, b = quantise_ref(philox_bell((16, 512), 1), gemm("blockwise").a), transposed(quantise_ref(philox_bell((512, 128), 2), gemm("blockwise").b))
    assert b.scale.shape == (1, 4) and cublas.cublas_operands(a, b)[3].stride() == (1, 4)


def test_torch_s_product_on_padded_operands_is_the_reference() -> None:
    for r, s, c in ((5, 13, 13), (32, 48, 64)):
        a, b = operands("tensorwise", r, s, c)
        bias = philox_bell((s,), 9)
        for out_dtype in (torch.bfloat16, torch.float32):
            out = cublas.cublas_scaled_mm(a, b, gemm("tensorwise"), out_dtype, bias)
            want = scaled_gemm_ref(a, b, gemm("tensorwise"), out_dtype=torch.float32, bias=bias)
            assert out.shape == (r, s) and out.dtype == out_dtype and sqnr_db(out, want) >= MIN_SQNR_DB


# ---- compiled for sm_90 --------------------------------------------------------------------------------------------------------


def usage(name: str, plan: GemmSchedule, epilogue: Epilogue | None, c: int = 4096, r: int = 1024, s: int = 1024) -> dict[str, int]:
    recipe = gemm(name)
    shapes = (((r, c), recipe.a), ((s, c), recipe.b))
    a, b = (Quantised(torch.empty(shape, dtype=o.format.dtype), torch.empty(scale_shape(shape, o.granularity)), o) for shape, o in shapes)
    launch = captured(name, lambda: scaled_gemm(a, b, recipe, epilogue=epilogue, schedule=plan), family="elementwise")[0]
    return bench.usage_of(compile_specimen(launch, "sm_90"))


REQUANTISED = Epilogue(norm="blocknorm", activation="hardswish", requantise=BLOCK)
RECIPE_OF = {"fast": "rowwise-fast", "precise": "rowwise", "square": "blockwise", "block": "blockwise-both"}
EVERY = [(kind, tile, None) for kind in TILES for tile in TILES[kind]] + [(kind, tile, REQUANTISED) for kind in TILES for tile in WHOLE_BLOCKS[kind]]
FEW = [("fast", TILES["fast"][0], None), ("precise", TILES["precise"][0], None), ("square", WHOLE_BLOCKS["square"][0], REQUANTISED)]
SHARED_BYTES = 227 * 1024  # of an SM, what a program may have


def runs_on_tensor_cores(kind: str, tile: GemmSchedule, epilogue: Epilogue | None) -> None:
    assert kind_of(gemm(RECIPE_OF[kind])) == kind
    u = usage(RECIPE_OF[kind], tile, epilogue)
    assert u["spills"] == u["stack"] == 0 and u["fp8_mma"] >= 4 and u["tma"] >= 2 * tile.stages and u["wide"] >= 4, u
    assert u["registers"] * 32 * u["warps"] * tile.resident <= 65536 and u["shared"] * tile.resident <= SHARED_BYTES, u
    if epilogue is None:  # partial sums leave the tensor core for a register each, in every step; fast ones never do
        outputs = tile.block_r * tile.block_s // (32 * tile.num_warps)
        assert u["adds"] >= outputs if kind != "fast" else u["adds"] < outputs // 4, u


@pytest.mark.parametrize("kind, tile, epilogue", FEW)
def test_products_compile_to_fp8_tensor_cores_and_bulk_copies_without_spills(kind: str, tile: GemmSchedule, epilogue: Epilogue | None) -> None:
    runs_on_tensor_cores(kind, tile, epilogue)


@pytest.mark.soak
@pytest.mark.parametrize("kind, tile, epilogue", EVERY)
def test_every_tile_fits_its_sm_without_spills(kind: str, tile: GemmSchedule, epilogue: Epilogue | None) -> None:
    runs_on_tensor_cores(kind, tile, epilogue)


def test_one_row_one_column_and_one_product_compile() -> None:
    assert usage("rowwise", TILES["precise"][2], None, c=1, r=1, s=1)["spills"] == 0


# ---- the bench -----------------------------------------------------------------------------------------------------------------


def test_the_bench_builds_every_case_and_runs_its_reference_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--dry-run", "--only", "gemm,layer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(bench.cases(only=("gemm", "layer"))) and sum("2048x1024x123200" in line for line in lines) == 13
    # 2 R S C / 1979 TFLOP/s at 6144 x 8192 x 18432, and half as fast in bf16
    assert any("gemm 6144x8192x18432" in line and "rowwise-fast triton" in line and "floor    937.6 us" in line for line in lines)
    assert any("gemm 6144x8192x18432" in line and " bf16 " in line and "floor   1876.1 us" in line for line in lines)


def test_the_bench_says_what_it_needs_and_finds_wrong_results() -> None:
    with pytest.raises(SystemExit):
        bench.main(["--only", "everything"])
    if not torch.cuda.is_available():
        assert bench.main([]) == 2
    case = next(c for c in bench.cases(only=("gemm",), shrink=32) if c.name == "rowwise triton")
    out = case.ref(*case.inputs("cpu", 0))
    assert bench.problem(case, out, out) == "" and "at least 45.0" in bench.problem(case, out * 1.01, out)
    lines = bench.table({case.group: {"bf16": 8.0, "rowwise triton": 4.0}}, 4.0)
    assert lines == []  # a shrunken group is no group of the table
    full = next(c for c in bench.cases(only=("gemm",)) if c.name == "rowwise triton")
    assert "2.00x" in bench.table({full.group: {"bf16": 8.0, "rowwise triton": 4.0}}, 4.0)[1]


def test_the_bench_keeps_the_outputs_of_all_sets_and_takes_the_median_behind_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device made up here: replays of "slow" take 30 us for its two calls, but for one disturbed round."""
    kept: list[object] = []
    calls = bench.keeping([lambda i=i: torch.full((2,), i) for i in range(3)], kept)
    for call in (*calls, calls[0]):
        call()
    assert [int(t[0]) for t in kept] == [0, 1, 2, 0] and len({t.data_ptr() for t in kept}) == 4

    clock, done = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: "Event") -> float:
            return (other.at - self.at) * 1e-3

    class Graph:
        def __init__(self, calls: list) -> None:
            self.us, self.replays = (10.0, 30.0)[len(calls) == 2], 0

        def replay(self) -> None:
            assert done[-1] == "spin"
            self.replays += 1
            clock[0] += self.us if self.replays != 5 else 900.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("spin"), raising=False)
    monkeypatch.setattr(bench, "graph_of", Graph)
    found = bench.interleaved_us({"slow": [lambda: None] * 2, "fast": [lambda: None]}, 5)
    assert found == pytest.approx({"slow": 15.0, "fast": 10.0})
