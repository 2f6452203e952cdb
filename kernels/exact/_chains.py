"""The device code that decode and prefill share: FMA chains over one span, held in registers from the first product to the span sum.

    total = span_sum(x_pointers, w_pointers, G, stride, ...)       # inside a Triton kernel

Tensors stand as [LANES, D, R, B] (lanes along n; D is spans in decode, warps along tokens in prefill; R rows of W and B tokens per
thread), because Triton hands out threads in that order: no value moves between threads here, and no order is left to the compiler.
It must be compiled with enable_fp_fusion=False.
"""

import triton
import triton.language as tl

from kernels.exact.order import CHUNK

GROUP = 8  # k values of one 16-byte load


@triton.jit
def split4(v, LANES: tl.constexpr, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """[LANES, D, R, B, 4] -> four tensors in ascending order; register moves only."""
    even, odd = tl.split(tl.reshape(v, (LANES, D, R, B, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def load8(pointers, valid, WIDE: tl.constexpr, STREAM: tl.constexpr):
    """Eight consecutive elements: one 16-byte load (16-bit types) or two (float32). STREAM: read once, keep out of the way in L1."""
    policy: tl.constexpr = "evict_first" if STREAM else ""
    if WIDE:
        four = tl.arange(0, 4)[None, None, None, None, :]
        return tl.load(pointers + four, mask=valid, eviction_policy=policy), tl.load(pointers + (four + 4), mask=valid, eviction_policy=policy)
    else:
        eight = tl.arange(0, 8)[None, None, None, None, :]
        return tl.load(pointers + eight, mask=valid, eviction_policy=policy), 0


@triton.jit
def unpack8(pair, WIDE: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """What `load8` returned -> eight float32 [LANES, D, R, B] in ascending k (16-bit types are upcast here, exactly)."""
    if WIDE:
        v0, v1, v2, v3 = split4(pair[0], LANES, D, R, B)
        v4, v5, v6, v7 = split4(pair[1], LANES, D, R, B)
    else:
        even, odd = tl.split(tl.reshape(pair[0], (LANES, D, R, B, 4, 2)))
        v0, v2, v4, v6 = split4(even, LANES, D, R, B)
        v1, v3, v5, v7 = split4(odd, LANES, D, R, B)
    return (
        v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32),
        v4.to(tl.float32), v5.to(tl.float32), v6.to(tl.float32), v7.to(tl.float32),
    )  # fmt: skip


@triton.jit
def span_sum(
    x_pointers, w_pointers, G, stride,
    LANES: tl.constexpr, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr, X_WIDE: tl.constexpr,
    W_WIDE: tl.constexpr, STREAM: tl.constexpr, X_AHEAD: tl.constexpr, CHUNK_GROUPS: tl.constexpr = CHUNK // GROUP,
):  # fmt: skip
    """[LANES, D, R, B]: acc = fma(x_k, w_k, acc) in ascending k from +0; at the end of a chunk total = total + (acc + 0), acc = +0.

    x_pointers [LANES, D, 1, B, 1] and w_pointers [LANES, D, R, 1, 1] stand on the first of G groups; the next group of W lies `stride`
    elements on. UNROLL divides G and 32: as many groups of W are in flight, each slot being loaded again right after its use; with
    X_AHEAD x is loaded one group ahead.
    """
    acc = tl.zeros((LANES, D, R, B), tl.float32)
    total = tl.zeros((LANES, D, R, B), tl.float32)
    slots = ()
    for u in tl.static_range(UNROLL):
        slots = slots + (load8(w_pointers + u * stride, True, W_WIDE, STREAM),)
    if X_AHEAD:
        x_next = load8(x_pointers, True, X_WIDE, False)
    w_ahead = w_pointers + UNROLL * stride
    for g in range(0, G, UNROLL):
        filled = ()
        for u in tl.static_range(UNROLL):
            x_now = x_next if X_AHEAD else load8(x_pointers + (g + u) * 8, True, X_WIDE, False)
            x8 = unpack8(x_now, X_WIDE, LANES, D, 1, B)
            w8 = unpack8(slots[u], W_WIDE, LANES, D, R, 1)
            filled = filled + (load8(w_ahead + u * stride, g + (UNROLL + u) < G, W_WIDE, STREAM),)
            if X_AHEAD:
                x_next = load8(x_pointers + (g + u + 1) * 8, g + (u + 1) < G, X_WIDE, False)
            for j in tl.static_range(8):
                x = tl.broadcast_to(x8[j], (LANES, D, R, B))
                acc = tl.fma(x, tl.broadcast_to(w8[j], (LANES, D, R, B)), acc)
        slots = filled
        w_ahead += UNROLL * stride
        if ((g + UNROLL) % CHUNK_GROUPS == 0) | (g + UNROLL >= G):
            total = total + (acc + 0.0)
            acc = tl.zeros((LANES, D, R, B), tl.float32)
    return total
