"""Which tiles, warps and splits a packed LoRA product runs with: from the measured table, else by rules; fixed where bits must not depend on neighbours.

    schedule("narrow", d=3584, rank=64, rows=128, slots=32)                      # Schedule(block_m=64, ...)
    schedule("narrow", d=3584, rank=64, rows=4096, slots=1, deterministic=True)   # the same for every pack
    python -m kernels.lora.bench --tune                                          # on a GPU: measures and writes kernels/lora/tuned.py

Products (kernels/lora/_tiles.py): narrow (shrink, grad_s), wide (expand, grad_x), outer (grad_b, grad_a). d: the wide axis, so a linear layer of d_in and
d_out asks for narrow and outer at both, wide at both. rows: the most that a slot can have. The table's keys are (product, d, rank, rows, slots), the last three rounded up to
a power of two; `tuned.py` is code, so that what was tuned is part of a measurement's digest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from kernels.lora.segments import Segments
from kernels.lora.tuned import PDL, TUNED

__all__ = ["DETERMINISTIC", "H200_SMS", "PASSES", "PDL", "PRODUCTS", "Schedule", "candidates", "key", "pass_for", "pass_schedule", "rule", "schedule", "schedule_for"]

PRODUCTS = ("narrow", "wide", "outer")
PASSES = {"dy": ("narrow", "outer"), "x": ("wide", "outer")}  # backward in two launches: grad_s with grad_b, grad_x with grad_a
H200_SMS = 132
_LEAST_SPLIT = 512  # of d, for every part of a split
FLOAT32_BLOCK = 32  # of float32 operands, in each direction


@dataclass(frozen=True)
class Schedule:
    """block_m rows, block_d of the wide axis, block_r ranks a tile: powers of two from 16. split (narrow): parts of d, joined in order.

    block_r below a capacity: several programs share rows (narrow, outer: x is read again, from L2), or a loop over ranks (wide).
    """

    block_m: int
    block_d: int
    block_r: int
    warps: int = 4
    stages: int = 3
    split: int = 1

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_d, self.block_r)
        if any(b < 16 or b & (b - 1) for b in blocks) or self.warps not in (1, 2, 4, 8, 16) or self.stages < 1 or self.split < 1:
            raise ValueError(f"blocks are powers of two from 16, warps one of 1 to 16, stages and split at least 1, got {self}; mend it")


# One for every pack and size, so that a row's and a slot's bits depend on nothing but themselves: no split, tiles relative to the segment's start.
DETERMINISTIC = {
    "narrow": Schedule(block_m=32, block_d=128, block_r=64, warps=4, stages=4),
    "wide": Schedule(block_m=64, block_d=128, block_r=64, warps=4),
    "outer": Schedule(block_m=64, block_d=128, block_r=64, warps=4, stages=3),
}


def _up(n: int, least: int = 1) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (max(n, 1) - 1).bit_length())


def key(product: str, *, d: int, rank: int, rows: int, slots: int) -> tuple[str, int, int, int, int]:
    """Of the table: d as it is; rank, rows and slots rounded up to powers of two."""
    if product not in PRODUCTS and product not in PASSES:
        raise ValueError(f"a product is one of {PRODUCTS} and a pass one of {tuple(PASSES)}, got {product!r}")
    return product, d, _up(rank, 8), _up(rows), _up(slots)


def rule(product: str, *, d: int, rank: int, rows: int, slots: int) -> Schedule:
    """What runs where nothing was measured. Two programs an SM are wanted: first smaller tiles of rows, then parts of d."""
    wanted, block_r = 2 * H200_SMS - 8, _up(rank, 16)
    if product == "narrow":
        block_m = next((b for b in (128, 64) if slots * -(-rows // b) >= wanted), 32 if rows > 16 else 16)
        programs, split = slots * -(-rows // block_m), 1
        while programs * split * 2 <= wanted + 8 and d // (split * 2) >= _LEAST_SPLIT:
            split *= 2
        return Schedule(block_m=block_m, block_d=64 if block_m == 128 else 128, block_r=block_r, warps=8 if block_m == 128 else 4, stages=4 if block_m == 128 else 3, split=split)
    if product == "wide":
        return Schedule(block_m=min(64, _up(rows, 16)), block_d=128, block_r=block_r)
    return Schedule(block_m=min(64, _up(rows, 16)), block_d=128, block_r=min(block_r, 64), stages=3)


@functools.lru_cache(maxsize=4096)  # a launch that is not captured asks each time
def schedule(product: str, *, d: int, rank: int, rows: int, slots: int, deterministic: bool = False) -> Schedule:
    """The measured choice, else the rule's; deterministic: the product's only one. Raises ValueError for another product."""
    at = key(product, d=d, rank=rank, rows=rows, slots=slots)
    if deterministic:
        return DETERMINISTIC[product]
    measured = TUNED.get(at)
    return Schedule(*measured) if measured else rule(product, d=d, rank=rank, rows=rows, slots=slots)


@functools.lru_cache(maxsize=4096)
def pass_schedule(name: str, *, d: int, rank: int, rows: int, slots: int, deterministic: bool = False) -> tuple[Schedule, Schedule] | None:
    """Of both products of a pass, with as many warps; None where two launches were measured faster (an empty entry of the table)."""
    at = key(name, d=d, rank=rank, rows=rows, slots=slots)
    if deterministic:
        return tuple(DETERMINISTIC[product] for product in PASSES[name])
    measured = TUNED.get(at)
    if measured is not None:
        return (Schedule(*measured[:6]), Schedule(*measured[6:])) if measured else None
    first, second = (rule(product, d=d, rank=rank, rows=rows, slots=slots) for product in PASSES[name])
    return first, replace(second, warps=first.warps)


def pass_for(name: str, rows: torch.Tensor, seg: Segments, deterministic: bool) -> tuple[Schedule, Schedule] | None:
    """rows: [M, D]."""
    found = pass_schedule(name, d=rows.shape[1], rank=seg.widest, rows=seg.most_rows, slots=seg.slots, deterministic=deterministic)
    return found and (_of_type(found[0], rows.dtype), _of_type(found[1], rows.dtype))


def schedule_for(product: str, rows: torch.Tensor, seg: Segments, deterministic: bool) -> Schedule:
    """rows: [M, D]."""
    return _of_type(schedule(product, d=rows.shape[1], rank=seg.widest, rows=seg.most_rows, slots=seg.slots, deterministic=deterministic), rows.dtype)


@functools.cache
def _of_type(s: Schedule, dtype: torch.dtype) -> Schedule:
    """Rules and table are of 16-bit operands. Multiply-adds of float32 ones take whole tiles into registers, and spill those of tensor cores."""
    if dtype != torch.float32:
        return s
    return replace(s, block_m=min(s.block_m, FLOAT32_BLOCK), block_d=min(s.block_d, FLOAT32_BLOCK), block_r=min(s.block_r, FLOAT32_BLOCK), warps=4, stages=min(s.stages, 2))


def candidates(product: str, *, d: int, rank: int, rows: int, slots: int) -> list[Schedule]:
    """What `--tune` times: the rule's first, then tiles that fit registers and shared memory, none much larger than the slot's rows."""
    found = [rule(product, d=d, rank=rank, rows=rows, slots=slots)]
    whole = _up(rank, 16)
    heights = [b for b in (16, 32, 64, 128) if b <= _up(rows, 16)][-3:]
    for block_m in heights:
        for block_r in dict.fromkeys((whole, max(16, whole // 2), min(whole, 16))) if product == "narrow" else (whole,):
            for block_d in (64, 128) if product == "narrow" else (64, 128, 256):
                for warps in (4, 8):
                    for stages in (3, 5) if product == "narrow" else (2, 4) if product == "outer" else (1,):
                        for split in (1, 2, 4, 8) if product == "narrow" else (1,):
                            s = Schedule(block_m=block_m, block_d=block_d, block_r=block_r, warps=warps, stages=stages, split=split)
                            if _fits(product, s, d=d, rows=rows, slots=slots, rank=rank):
                                found.append(s)
    return list(dict.fromkeys(found))


def _fits(product: str, s: Schedule, *, d: int, rows: int, slots: int, rank: int) -> bool:
    """Shared memory of 227 KB, an accumulator of at most 128 registers a thread, work for every warp, and about one to four programs an SM."""
    shared = {"narrow": s.stages * s.block_d * (s.block_m + s.block_r) * 2, "wide": 4 * s.block_m * s.block_d, "outer": s.stages * s.block_m * (s.block_d + s.block_r) * 2}[product]
    tile = {"narrow": s.block_m * s.block_r, "wide": s.block_m * s.block_d, "outer": s.block_r * s.block_d}[product]
    if shared > 200_000 or not 4 <= tile / (32 * s.warps) <= 128:
        return False
    if product != "narrow":
        return True
    programs = slots * -(-rows // s.block_m) * -(-rank // s.block_r) * s.split
    return (s.split == 1 or d // s.split >= _LEAST_SPLIT) and (s.split == 1 or programs <= 5 * H200_SMS) and programs * 3 >= min(H200_SMS, slots * -(-rows // 16))
