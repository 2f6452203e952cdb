"""Schedules measured on an H200, written by `python -m kernels.lora.bench --tune`; kernels.lora.schedules reads them.

Keys (product or pass, d, rank, rows, slots); values (block_m, block_d, block_r, warps, stages, split), of a pass twice, or () where two launches are
faster. Empty until tuned: the rules decide.
PDL: whether a kernel's start overlaps the end of the one before (programmatic dependent launch), as measured faster.
"""

PDL = False
TUNED: dict[tuple[str, int, int, int, int], tuple[int, ...]] = {}
