"""Quantise: numbers to FP8 with a scale for the tensor, each row, each 128 of a row, or each 128 x 128.

    q = quantise_ref(torch.randn(4, 256), OperandRecipe(fmt="e4m3", granularity="row"))
    q.data_RC.dtype, q.scale.shape                     # torch.float8_e4m3fn, [4, 1]
    q.dequantise()                                     # float32 [4, 256], within 2^-4 of x in every element that is not tiny

R rows, C elements of a row, the axis that a product contracts; axes in front of them are a batch. The scale rule is kernels.fp8.scaling's,
and `scale` is the one to multiply with: x ~ data * scale. `transpose=True` quantises x^T: groups run along the columns of x.
No gradient: kernels.fp8.autograd has it.

On a GPU, bytes of memory per element of a 16-bit x, beside 4 B a scale; a copy to 16 bits moves 4 B:

    groups                                 launches   read     written
    row, block, square; block, square of x^T      1    2 B       1 B     a tile holds whole groups
    row of x^T, R <= 256                          1    2 B       1 B
    row, C > 32768                                1    2 + 2 B   1 B     the second read comes from L2 while 2 C B a resident row fit
    tensor; row of x^T, R > 256                   2    2 + 2 B   1 B     amax, then cast; the cast starts where the amax ended, in L2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import on_gpu
from kernels.fp8.formats import E4M3, cast
from kernels.fp8.recipes import BLOCK, OperandRecipe
from kernels.fp8.scaling import amax_ref, expand_scale, finite_abs, fp8_bits, scale_rule, scale_rule_ref, scale_shape

__all__ = ["LARGEST", "LONG", "SHORT", "Quantised", "quantise", "quantise_ref"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LONG = 32768  # the longest row of x that one program holds
LARGEST = 2**30  # rows or columns, so that 32 bits hold their numbers
SHORT = 256  # the longest column of x that one program holds
_TILE = 8192  # elements of a program: 32 in each of 256 threads, so that 4 16-byte loads of a 16-bit x are in flight in each
_PARTIALS = 512  # partial amax of a tensor, reduced again by every program of the cast
_SPLITS = 64  # the same for each column
_STEPS = 4  # tiles that a program of the cast takes, so that it reduces the partials once for all of them


@dataclass(frozen=True, eq=False)
class Quantised:
    """An operand in FP8: data_RC [..., R, C] in the recipe's format, float32 `scale` of `scale_shape` (tensor [], row [..., R, 1], ...)."""

    data_RC: torch.Tensor
    scale: torch.Tensor
    operand: OperandRecipe

    def __post_init__(self) -> None:
        want = scale_shape(tuple(self.data_RC.shape), self.operand.granularity)
        if tuple(self.scale.shape) != want or self.data_RC.dtype != self.operand.format.dtype:
            raise ValueError(
                f"{self.operand} of {tuple(self.data_RC.shape)} has {self.operand.format.dtype} and scales {want}, "
                f"got {self.data_RC.dtype} and {tuple(self.scale.shape)}; make it with quantise or quantise_ref"
            )

    @property
    def device(self) -> torch.device:
        return self.data_RC.device

    def dequantise(self) -> torch.Tensor:
        """float32 [..., R, C]: data times scale, one rounding each."""
        return self.data_RC.float() * expand_scale(self.scale, tuple(self.data_RC.shape), self.operand.granularity)


def _check(x_RC: torch.Tensor, operand: OperandRecipe) -> None:
    if x_RC.ndim < 2:
        raise ValueError(f"an operand is [..., R, C], got {tuple(x_RC.shape)=}; add the missing axis")
    if x_RC.dtype not in _FLOATS:
        raise ValueError(f"an operand is bfloat16, float16 or float32, got {x_RC.dtype}; convert it first")
    if not isinstance(operand, OperandRecipe):
        raise ValueError(f"an operand's recipe is an OperandRecipe, got {operand!r}; products in bf16 or tf32 have none: multiply without quantising")


def quantise_ref(x_RC: torch.Tensor, operand: OperandRecipe, *, transpose: bool = False) -> Quantised:
    """x [..., R, C] (bf16, fp16, fp32; any strides; any device) in FP8 by the rule, in float32 operations of torch.

    transpose: quantise x^T instead, [..., C, R]. Raises ValueError for fewer than two axes and for another dtype.
    """
    _check(x_RC, operand)
    x = (x_RC.mT if transpose else x_RC).detach().float().contiguous()
    scale, r = scale_rule_ref(amax_ref(x, operand.granularity), operand.format, operand.power_of_two)
    return Quantised(cast(x * expand_scale(r, tuple(x.shape), operand.granularity), operand.format), scale, operand)


# ---- kernels: x is [batch, R, C] with columns side by side, q the bytes of [batch, R, C], or of [batch, C, R] where TRANSPOSE ---------


@triton.jit
def _tile(tile, R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(batch [int64], tile_r, tile_c, row [int64, ROWS x 1], column [1 x COLUMNS]) of a tile: columns first, then rows, then the batch."""
    tiles_c = tl.cdiv(C, COLUMNS)
    tile_c, rest, tiles_r = tile % tiles_c, tile // tiles_c, tl.cdiv(R, ROWS)
    tile_r, batch = rest % tiles_r, (rest // tiles_r).to(tl.int64)
    row = tile_r.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return batch, tile_r, tile_c, row, tile_c * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _load(x_ptr, batch, row, column, R, C, stride_batch, stride_row):
    """float32 [rows, columns], 0 outside of the matrix."""
    return tl.load(x_ptr + batch * stride_batch + row * stride_row + column, mask=(row < R) & (column < C), other=0.0).to(tl.float32)


@triton.jit
def _store(q_ptr, v, batch, row, column, R, C, FP8: tl.constexpr, TRANSPOSE: tl.constexpr):
    q = fp8_bits(v, FP8)
    if TRANSPOSE:
        row, column = tl.trans(row), tl.trans(column)
        tl.store(q_ptr + (batch * C + column) * R + row, tl.trans(q), mask=(row < R) & (column < C))
    else:
        tl.store(q_ptr + (batch * R + row) * C + column, q, mask=(row < R) & (column < C))


@triton.jit
def quantise_tiles_kernel(
    x_ptr, q_ptr, scale_ptr, R, C, stride_batch, stride_row, GROUP: tl.constexpr,
    FP8: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One read: a program takes a tile that holds whole groups: each of its rows (GROUP "row"), its columns ("column"), or all of it ("tile").

    scale_ptr: [batch, R, tiles across], [batch, C, tiles down], or [batch, tiles down, tiles across], the last transposed with q.
    """
    batch, tile_r, tile_c, row, column = _tile(tl.program_id(0), R, C, ROWS, COLUMNS)
    down, across = tl.cdiv(R, ROWS), tl.cdiv(C, COLUMNS)
    x = _load(x_ptr, batch, row, column, R, C, stride_batch, stride_row)
    if GROUP == "row":
        amax = tl.max(finite_abs(x), 1, keep_dims=True)
        place, inside = (batch * R + row) * across + tile_c, row < R
    elif GROUP == "column":
        amax = tl.max(finite_abs(x), 0, keep_dims=True)
        place, inside = (batch * C + column) * down + tile_r, column < C
    else:
        amax = tl.max(tl.max(finite_abs(x), 1, keep_dims=True), 0, keep_dims=True)
        place = batch * down * across + (tile_c * down + tile_r if TRANSPOSE else tile_r * across + tile_c) + tl.zeros_like(amax).to(tl.int64)
        inside = amax >= 0
    scale, r = scale_rule(amax, MAX, POWER_OF_TWO)
    tl.store(scale_ptr + place, scale, mask=inside)
    _store(q_ptr, x * r, batch, row, column, R, C, FP8, TRANSPOSE)


@triton.jit
def quantise_rows_kernel(
    x_ptr, q_ptr, scale_ptr, R, C, stride_batch, stride_row,
    FP8: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One read: a program holds ROWS whole rows, their first HEAD columns and the TAIL behind: two powers of two fit C closer than one."""
    batch, _, _, row, column = _tile(tl.program_id(0), R, 1, ROWS, HEAD)
    x = _load(x_ptr, batch, row, column, R, C, stride_batch, stride_row)
    amax = tl.max(finite_abs(x), 1, keep_dims=True)
    if TAIL:
        behind = HEAD + tl.arange(0, TAIL)[None, :]
        y = _load(x_ptr, batch, row, behind, R, C, stride_batch, stride_row)
        amax = tl.maximum(amax, tl.max(finite_abs(y), 1, keep_dims=True))
    scale, r = scale_rule(amax, MAX, POWER_OF_TWO)
    tl.store(scale_ptr + batch * R + row, scale, mask=row < R)
    _store(q_ptr, x * r, batch, row, column, R, C, FP8, False)
    if TAIL:
        _store(q_ptr, y * r, batch, row, behind, R, C, FP8, False)


@triton.jit
def quantise_long_rows_kernel(
    x_ptr, q_ptr, scale_ptr, R, C, stride_batch, stride_row, FP8: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMNS: tl.constexpr
):
    """A row by a program in two passes. The cast runs from the end of the row to its start, so that it first reads what was read last."""
    batch, row = (tl.program_id(0) // R).to(tl.int64), tl.program_id(0) % R
    x_ptr += batch * stride_batch + row.to(tl.int64) * stride_row
    q_ptr += (batch * R + row) * C
    steps = tl.cdiv(C, COLUMNS)
    top = tl.zeros((COLUMNS,), tl.float32)
    for step in range(steps):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        top = tl.maximum(top, finite_abs(tl.load(x_ptr + column, mask=column < C, other=0.0).to(tl.float32)))
    scale, r = scale_rule(tl.max(top, 0, keep_dims=True), MAX, POWER_OF_TWO)
    tl.store(scale_ptr + batch * R + row + tl.arange(0, 1), scale)
    for step in range(steps):
        column = (steps - 1 - step) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column, mask=column < C, other=0.0).to(tl.float32)
        tl.store(q_ptr + column, fp8_bits(x * r, FP8), mask=column < C)


@triton.jit
def tensor_amax_kernel(x_ptr, partial_ptr, tiles, R, C, stride_batch, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """partial_ptr [programs]: program i takes tiles i, i + programs, ..."""
    top = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, _, _, row, column = _tile(tile, R, C, ROWS, COLUMNS)
        top = tl.maximum(top, finite_abs(_load(x_ptr, batch, row, column, R, C, stride_batch, stride_row)))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(top, 1), 0))


@triton.jit
def column_amax_kernel(x_ptr, partial_ptr, splits, R, C, stride_batch, stride_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """partial_ptr [batch, splits, C]: the i-th of splits programs of a tile of columns takes its row tiles i, i + splits, ..."""
    batch, split, _, _, column = _tile(tl.program_id(0), splits, C, 1, COLUMNS)
    top = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(split, tl.cdiv(R, ROWS), splits):
        row = (step * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        top = tl.maximum(top, finite_abs(_load(x_ptr, batch, row, column, R, C, stride_batch, stride_row)))
    tl.store(partial_ptr + (batch * splits + split) * C + column, tl.max(top, 0, keep_dims=True), mask=column < C)


@triton.jit
def cast_kernel(
    x_ptr, q_ptr, scale_ptr, partial_ptr, partials, tiles, R, C, stride_batch, stride_row, COLUMN: tl.constexpr, PADDED: tl.constexpr,
    FP8: tl.constexpr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Quantises with the partial amax of a tensor, [partials], or of columns (COLUMN), [batch, partials, C]; PADDED: a power of two.

    A program takes STEPS tiles of one column of tiles (tensor: of any), the last ones first, so that it reads what the amax read last.
    """
    i = tl.arange(0, PADDED)[:, None]
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if COLUMN:
        tiles = tl.cdiv(R, ROWS)
        batch, group, _, _, column = _tile(program, tl.cdiv(tiles, STEPS), C, 1, COLUMNS)
        partial = tl.load(partial_ptr + (batch * partials + i) * C + column, mask=(i < partials) & (column < C), other=0.0)
        scale, r = scale_rule(tl.max(partial, 0, keep_dims=True), MAX, POWER_OF_TWO)
        tl.store(scale_ptr + batch * C + column, scale, mask=(column < C) & (group == 0))
    else:
        group = program
        scale, r = scale_rule(tl.max(tl.load(partial_ptr + i, mask=i < partials, other=0.0), 0, keep_dims=True), MAX, POWER_OF_TWO)
        tl.store(scale_ptr + tl.zeros_like(scale).to(tl.int32), scale, mask=(scale > 0) & (group == 0))
    for step in range(group * STEPS, tl.minimum(group * STEPS + STEPS, tiles)):
        if COLUMN:
            row = (step * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        else:
            batch, _, _, row, column = _tile(step, R, C, ROWS, COLUMNS)
        x = _load(x_ptr, batch, row, column, R, C, stride_batch, stride_row)
        _store(q_ptr, x * r, batch, row, column, R, C, FP8, TRANSPOSE)


# ---- launches ------------------------------------------------------------------------------------------------------------------


def _matrices(x_RC: torch.Tensor, merge: bool) -> torch.Tensor:
    """x as [batch, R, C] with columns side by side: a view where strides allow one. merge: rows of all matrices as one, where they do."""
    r, c = x_RC.shape[-2:]
    x = x_RC.detach().reshape(x_RC.shape[:-2].numel(), r, c)
    if x.stride(2) != 1 and c > 1:
        x = x.contiguous()
    return x.view(1, len(x) * r, c) if merge and len(x) > 1 and x.stride(0) == r * x.stride(1) else x


def _wide(rows: int, columns: int, most: int) -> dict[str, int]:
    """A tile of about _TILE elements for a matrix of rows x columns: up to `most` columns, then rows."""
    wide = min(triton.next_power_of_2(columns), most)
    return dict(ROWS=max(1, min(_TILE // wide, triton.next_power_of_2(rows))), COLUMNS=wide)


def _high(rows: int, columns: int, most: int) -> dict[str, int]:
    """The same for whole columns: up to `most` rows, then columns."""
    tile = _wide(columns, rows, most)
    return dict(ROWS=tile["COLUMNS"], COLUMNS=tile["ROWS"])


def _rows(rows: int, columns: int) -> dict[str, int]:
    """Whole rows of about _TILE elements together, each cut into two powers of two where that leaves fewer lanes idle than one."""
    head = triton.next_power_of_2(columns)
    half, behind = head // 2, max(16, triton.next_power_of_2(columns - head // 2))
    head, tail = (half, behind) if behind < half else (head, 0)
    fit = triton.next_power_of_2(_TILE // (head + tail) + 1) // 2  # the largest power of two of rows that fit
    return dict(ROWS=max(1, min(fit, triton.next_power_of_2(rows))), HEAD=head, TAIL=tail)


def _warps(elements: int) -> int:
    """32 elements a thread or up to twice that, 4 to 32 warps."""
    return min(32, max(4, triton.next_power_of_2(elements // 1024 + 1) // 2))


def _tiles(x_BRC: torch.Tensor, tile: dict[str, int]) -> int:
    batch, r, c = x_BRC.shape
    return batch * triton.cdiv(r, tile["ROWS"]) * triton.cdiv(c, tile["COLUMNS"])


def _one_read(x: torch.Tensor, granularity: str, transpose: bool) -> tuple[str, dict[str, int]] | None:
    """(GROUP, tile) where a tile can hold whole groups of x [batch, R, C], else None."""
    _, r, c = x.shape
    if granularity == "square":
        return "tile", dict(ROWS=BLOCK, COLUMNS=BLOCK)
    if granularity == "block":
        return ("column", _high(BLOCK, c, BLOCK)) if transpose else ("row", _wide(r, BLOCK, BLOCK))
    if granularity == "row" and transpose and r <= SHORT:
        return "column", _high(r, c, SHORT)
    return None


@on_gpu("quantise")
def quantise(x_RC: torch.Tensor, operand: OperandRecipe, *, transpose: bool = False) -> Quantised:
    """`quantise_ref` on a GPU, bit for bit (the sign of NaN apart): x [..., R, C] in bf16, fp16 or fp32; transpose: x^T, [..., C, R].

    Takes any strides: columns of x side by side, or rows (it is then the transpose of the other case), are read in place, others copied first.
    R and C are at most LARGEST, the number of elements is free. No host synchronisation, so it can be captured in a graph. Raises ValueError
    as quantise_ref does, for a larger R or C, and for a CPU tensor.
    """
    _check(x_RC, operand)
    if max(x_RC.shape[-2:]) > LARGEST:
        raise ValueError(f"a matrix has at most 2^30 rows and columns, got {tuple(x_RC.shape)=}; cut it along its batch")
    if x_RC.stride(-1) != 1 and x_RC.stride(-2) == 1:
        x_RC, transpose = x_RC.mT, not transpose
    fmt, granularity = operand.format, operand.granularity
    shape = tuple(x_RC.mT.shape if transpose else x_RC.shape)
    data = torch.empty(shape, dtype=fmt.dtype, device=x_RC.device)
    scale = torch.empty(scale_shape(shape, granularity), dtype=torch.float32, device=x_RC.device)
    result = Quantised(data, scale, operand)
    if x_RC.numel() == 0:
        scale.fill_(1.0)
        return result
    x = _matrices(x_RC, merge=not transpose and granularity != "square")
    sizes = (x.shape[1], x.shape[2], x.stride(0), x.stride(1))
    how = dict(FP8=tl.float8e4nv if fmt is E4M3 else tl.float8e5, MAX=fmt.max, POWER_OF_TWO=operand.power_of_two)
    q = data.view(torch.uint8)
    if one_read := _one_read(x, granularity, transpose):
        group, tile = one_read
        warps = _warps(tile["ROWS"] * tile["COLUMNS"])
        quantise_tiles_kernel[(_tiles(x, tile),)](x, q, scale, *sizes, GROUP=group, **how, TRANSPOSE=transpose, **tile, num_warps=warps)
    elif granularity == "row" and not transpose and x.shape[2] <= LONG:
        rows = _rows(x.shape[1], x.shape[2])
        programs = len(x) * triton.cdiv(x.shape[1], rows["ROWS"])
        quantise_rows_kernel[(programs,)](x, q, scale, *sizes, **how, **rows, num_warps=_warps(rows["ROWS"] * (rows["HEAD"] + rows["TAIL"])))
    elif granularity == "row" and not transpose:
        quantise_long_rows_kernel[(len(x) * x.shape[1],)](x, q, scale, *sizes, **how, COLUMNS=_TILE, num_warps=8)
    else:
        _two_reads(x, q, scale, sizes, dict(**how, TRANSPOSE=transpose), columns=granularity == "row")
    return result


def _two_reads(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, sizes: tuple[int, ...], how: dict, columns: bool) -> None:
    """Partial amax of the tensor, or of its columns, then the cast."""
    batch, r, c = x.shape
    if not how["TRANSPOSE"] and x.is_contiguous() and x.numel() < LARGEST:
        x, sizes = x.view(1, 1, -1), (1, x.numel(), 0, 0)  # one long row: wide loads for any number of columns
    tile = _high(BLOCK, c, BLOCK) if how["TRANSPOSE"] else _wide(x.shape[1], x.shape[2], _TILE)
    tiles, warps = _tiles(x, tile), _warps(tile["ROWS"] * tile["COLUMNS"])
    steps = 1 if tiles <= _PARTIALS else _STEPS
    if columns:
        across = batch * triton.cdiv(c, tile["COLUMNS"])
        down = triton.cdiv(r, tile["ROWS"])
        partials = max(1, min(_SPLITS, down, 2 * _PARTIALS // across))
        partial = torch.empty((batch, partials, c), dtype=torch.float32, device=x.device)
        column_amax_kernel[(across * partials,)](x, partial, partials, *sizes, **tile, num_warps=warps)
        programs = across * triton.cdiv(down, steps)
    else:
        partials = min(tiles, _PARTIALS)
        partial = torch.empty((partials,), dtype=torch.float32, device=x.device)
        tensor_amax_kernel[(partials,)](x, partial, tiles, *sizes, **tile, num_warps=warps)
        programs = triton.cdiv(tiles, steps)
    padded = triton.next_power_of_2(partials)
    cast_kernel[(programs,)](x, q, scale, partial, partials, tiles, *sizes, COLUMN=columns, PADDED=padded, **how, **tile, STEPS=steps, num_warps=warps)
