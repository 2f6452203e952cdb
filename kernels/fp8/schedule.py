"""Which tile, how many warps and how many splits of C a scaled product runs with: a small time model over a few tiles, no tuning at run time.

    schedule(8192, 512, 3456, precise=False)            # GemmSchedule(block_r=128, block_s=128, ...)
    max(schedules(8192, 512, 3456), key=...)            # or time them yourself (kernels.fp8.bench --sweep)

The model, for one SM of a device of `sms`: with n programs in all, the busiest SM has ceil(n / sms); each takes its tile's FLOPs at `share` of
the SM's peak, and a start of 1.5 us for every round of resident programs; a split adds its float32 sums, written and read, and a launch. The
shares are assumptions until kernels.fp8.bench has measured them (NOTES.md): they rank tiles, and are no prediction of a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["H200_SMS", "STEP", "GemmSchedule", "c_each", "schedule", "schedules"]

STEP = 128  # of C
H200_SMS = 132
_PEAK_FLOPS = 1979e12 / H200_SMS  # of an SM, fp8, by datasheet
_BYTES = 4.19e12  # a second, copy measured on an H200
_START_US, _LAUNCH_US = 1.5, 2.0


@dataclass(frozen=True, kw_only=True)
class GemmSchedule:
    """A tile of outputs, its warps and stages of 128 of C; `resident` programs fit an SM; `share` of peak that the model takes for it."""

    block_r: int
    block_s: int
    num_warps: int
    stages: int
    resident: int
    share: float
    split: int = 1
    group: int = 8


def _tile(block_r: int, block_s: int, num_warps: int, stages: int, resident: int, share: float) -> GemmSchedule:
    return GemmSchedule(block_r=block_r, block_s=block_s, num_warps=num_warps, stages=stages, resident=resident, share=share)


# What fits: registers and shared memory of every one are in NOTES.md, and a test asserts that none spills.
TILES = {
    "fast": (_tile(128, 256, 8, 4, 1, 0.70), _tile(128, 128, 8, 3, 2, 0.65), _tile(64, 128, 4, 3, 2, 0.50), _tile(64, 64, 4, 4, 3, 0.35)),
    "precise": (_tile(128, 128, 8, 4, 1, 0.58), _tile(64, 128, 4, 3, 2, 0.45), _tile(64, 64, 4, 4, 3, 0.30)),
    "square": (_tile(128, 128, 8, 4, 1, 0.54), _tile(64, 128, 4, 3, 2, 0.42)),  # inner scales, one of them a number a tile
    "block": (_tile(64, 128, 4, 3, 2, 0.42),),  # inner scales of every row: wider tiles have no registers for them
}
WHOLE_BLOCKS = {  # 256 outputs of a row in one tile
    "fast": (_tile(128, 256, 8, 3, 1, 0.65), _tile(64, 256, 8, 3, 1, 0.50)),
    "precise": (_tile(64, 256, 8, 4, 1, 0.48),),
    "square": (_tile(64, 256, 8, 4, 1, 0.44),),
    "block": (_tile(64, 256, 8, 4, 1, 0.42),),
}


def _model_us(s: GemmSchedule, r: int, s_out: int, c: int, batch: int, sms: int) -> float:
    tiles = -(-r // s.block_r) * -(-s_out // s.block_s) * batch * s.split
    busiest = -(-tiles // sms)
    each = 2 * s.block_r * s.block_s * c_each(c, s.split)
    us = busiest * each / (_PEAK_FLOPS * s.share) * 1e6 + -(-busiest // s.resident) * _START_US
    return us if s.split == 1 else us + _LAUNCH_US + 8 * s.split * batch * r * s_out / _BYTES * 1e6


def c_each(c: int, split: int) -> int:
    """How much of C each split takes, a multiple of 128."""
    return -(-c // (split * STEP)) * STEP


def schedules(r: int, s: int, c: int, *, batch: int = 1, kind: str = "fast", whole_blocks: bool = False, sms: int = H200_SMS) -> list[GemmSchedule]:
    """All that may run out [r, s] with c contracted, fastest by the model first. Splits leave no program less than 512 of C, and none idle."""
    if kind not in TILES:
        raise ValueError(f"a kind of product is one of {sorted(TILES)}, got {kind=}")
    return list(_ranked(r, s, c, batch, kind, whole_blocks, sms))


@functools.lru_cache(maxsize=4096)  # a launch that is not captured asks each time
def _ranked(r: int, s: int, c: int, batch: int, kind: str, whole_blocks: bool, sms: int) -> tuple[GemmSchedule, ...]:
    found = []
    for tile in (WHOLE_BLOCKS if whole_blocks else TILES)[kind]:
        for split in (1,) if whole_blocks else (1, 2, 4, 8, 16, 32):
            if split == 1 or (c_each(c, split) >= 4 * STEP and (split - 1) * c_each(c, split) < c):
                found.append(GemmSchedule(**{**tile.__dict__, "split": split}))
    return tuple(sorted(found, key=lambda f: _model_us(f, r, s, c, batch, sms)))


def schedule(r: int, s: int, c: int, *, batch: int = 1, kind: str = "fast", whole_blocks: bool = False, sms: int = H200_SMS) -> GemmSchedule:
    """The first of `schedules`."""
    return schedules(r, s, c, batch=batch, kind=kind, whole_blocks=whole_blocks, sms=sms)[0]
