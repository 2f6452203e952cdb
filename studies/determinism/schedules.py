"""Kernel schedules that the study runs on a GPU, as plain data: planning must not import kernels or torch.

A test holds each to what the kernels accept. Decode axes: rows of W a thread, lanes along N, groups of 8
k in flight, CTAs that share the eight spans, x read ahead, chunks spread over CTAs. Prefill axes: rows
of W and tokens a thread, warps along the tokens.
"""

DECODE = (
    {"rows": 1, "lanes": 32, "unroll": 1, "split": 1},
    {"rows": 2, "lanes": 32, "unroll": 2, "split": 2, "x_ahead": True},
    {"rows": 1, "lanes": 64, "unroll": 4, "split": 4},
    {"rows": 1, "lanes": 32, "unroll": 4, "split": 8, "by_chunk": True},
    {"rows": 4, "lanes": 32, "unroll": 2, "split": 1, "x_ahead": True},
    {"rows": 1, "lanes": 128, "unroll": 2, "split": 2, "by_chunk": True},
)
PREFILL = (
    {"rows": 1, "block_m": 4, "warps_m": 2},
    {"rows": 2, "block_m": 8, "warps_m": 8},
    {"rows": 4, "block_m": 8, "warps_m": 4},
    {"rows": 8, "block_m": 4, "warps_m": 4, "group_m": 2},
)


def decode_choices() -> list[tuple[int, dict]]:
    """(rows, kernel) pairs: every schedule at one and at sixteen tokens."""
    return [(rows, {"kind": "decode", "block_m": block_m, **choice}) for choice in DECODE for rows, block_m in ((1, 1), (16, 4))]


def prefill_choices() -> list[tuple[int, dict]]:
    return [(64, {"kind": "prefill", **choice}) for choice in PREFILL]
