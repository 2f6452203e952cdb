"""Kernel schedules that the study runs on a GPU, as plain data: planning must not import kernels or torch.

A test holds each to what the kernels accept. Decode axes: rows of W a thread, lanes along N, token groups that share W, groups of 8 k in
flight, CTAs that share the eight spans, x read ahead, chunks spread over CTAs. Prefill axes: rows of W and tokens a thread, warps along the
tokens; tiles, warps and registers of the tiled kernel; tiles, splits and stages of the integer kernels.
"""

DECODE = (
    {"rows": 1, "lanes": 32, "unroll": 1, "split": 1},
    {"rows": 2, "lanes": 32, "unroll": 2, "split": 2, "x_ahead": True},
    {"rows": 1, "lanes": 64, "unroll": 4, "split": 4},
    {"rows": 1, "lanes": 32, "unroll": 4, "split": 8, "by_chunk": True},
    {"rows": 4, "lanes": 32, "unroll": 2, "split": 4, "by_chunk": True, "folds": 4, "x_ahead": True},
    {"rows": 1, "lanes": 128, "unroll": 2, "split": 4, "by_chunk": True, "folds": 2},
)
PREFILL = (
    {"rows": 2, "block_m": 8, "warps_m": 8},
    {"rows": 8, "block_m": 4, "warps_m": 4, "group_m": 2},
)
TILED = (
    {"block_m": 64, "by_span": True},
    {"block_m": 128, "warps": 8, "warps_m": 4, "registers": 128},
    {"block_m": 128, "block_k": 8, "warps_m": 2, "registers": 0},
    {"block_m": 64, "block_k": 32, "lanes_m": 8, "group_m": 1},
    {"block_m": 64, "wave": 3},
)
INTEGER_DECODE = ({"block_n": 32, "block_k": 64, "split": 1}, {"block_n": 64, "block_k": 128, "split": 8, "wide": False}, {"block_n": 16, "block_k": 256, "split": 3, "num_warps": 2, "assembly": False})
INTEGER_PREFILL = ({"block_m": 64, "block_n": 64, "num_stages": 2}, {"block_m": 128, "block_n": 32, "block_k": 32, "num_warps": 8}, {"block_m": 32, "block_n": 128, "block_k": 64, "group_m": 1, "tma": True})


def kernel_choices() -> list[tuple[str, int, dict]]:
    """(implementation, rows, kernel): every schedule, decode ones at one and at sixteen tokens."""
    out = [("fma", rows, {"kind": "decode", "block_m": block_m, **choice}) for choice in DECODE for rows, block_m in ((1, 1), (16, 4))]
    out += [("fma", 64, {"kind": "prefill", **choice}) for choice in PREFILL] + [("fma", 64, {"kind": "tiled", **choice}) for choice in TILED]
    out += [("integer", rows, {"kind": "integer_decode", **choice}) for choice in INTEGER_DECODE for rows in (1, 16)]
    return out + [(impl, 64, {"kind": "integer_prefill", **choice}) for impl in ("integer", "integer-b9") for choice in INTEGER_PREFILL]
