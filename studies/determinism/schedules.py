"""Kernel schedules that the study runs on a GPU, as plain data: planning must not import kernels or torch.

A test holds each to what the kernels accept. Axes: rows of W a thread, lanes along N, tokens a thread,
unrolling, and how many CTAs share the eight spans (decode); tile and warps (prefill).
"""

DECODE = (
    {"rows": 1, "lanes": 32, "unroll": 1, "split": 1},
    {"rows": 2, "lanes": 32, "unroll": 2, "split": 2},
    {"rows": 1, "lanes": 64, "unroll": 4, "split": 4},
    {"rows": 1, "lanes": 32, "unroll": 4, "split": 8},
    {"rows": 4, "lanes": 32, "unroll": 2, "split": 1},
    {"rows": 1, "lanes": 128, "unroll": 2, "split": 2},
)
PREFILL = ()


def decode_choices() -> list[tuple[int, dict]]:
    """(rows, kernel) pairs: every schedule at one and at sixteen tokens."""
    return [(rows, {"kind": "decode", "block_m": block_m, **choice}) for choice in DECODE for rows, block_m in ((1, 1), (16, 4))]


def prefill_choices() -> list[tuple[int, dict]]:
    return [(64, {"kind": "prefill", **choice}) for choice in PREFILL]
