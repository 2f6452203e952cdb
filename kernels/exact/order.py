"""The canonical FP32 order of family A: which additions, in which sequence, as a function of K alone.

    >>> from kernels.exact.order import chunks
    >>> chunks(4096)[0]                       # the first of 8 spans
    ((0, 256), (256, 512))

If 8 divides K the sum has 8 equal spans, otherwise one. A span is cut into chunks of 256 (the last one shorter). A chunk is one FMA
chain from +0 in ascending k, finished by adding +0 (so a chunk is never -0 and appended zeros cannot change bits). Chunks are
added left to right inside a span; the 8 spans are added as ((0+1)+(2+3))+((4+5)+(6+7)).

It holds no arithmetic on values: `linear.py` (reference) and `decode.py`, `prefill.py` (GPU) follow it.
"""

ORDER_VERSION = 1
CHUNK = 256
SPANS = 8

__all__ = ["CHUNK", "ORDER_VERSION", "SPANS", "chunks", "span_count", "span_length", "spans"]


def span_count(k: int, shard: int | None = None) -> int:
    """Number of spans: 8 if 8 | K, else 1 (such a K cannot be split over devices). K = 0 has 8 empty spans.

    `shard`: K is one device's part of a longer sum and holds this many (1, 2, 4 or 8) of its whole spans.
    """
    if k < 0:
        raise ValueError(f"K is a number of products and cannot be negative; got {k=}; pass the inner dimension")
    if shard is None:
        return SPANS if k % SPANS == 0 else 1
    if shard not in (1, 2, 4, 8) or k % shard:
        raise ValueError(f"a shard holds 1, 2, 4 or 8 whole spans of equal length; got {k=} {shard=}; split K by spans")
    return shard


def span_length(k: int, shard: int | None = None) -> int:
    """Number of products in one span."""
    return k // span_count(k, shard)


def spans(k: int, shard: int | None = None) -> tuple[tuple[int, int], ...]:
    """Half-open [start, stop) of each span, in ascending order."""
    length = span_length(k, shard)
    return tuple((i * length, (i + 1) * length) for i in range(span_count(k, shard)))


def chunks(k: int, shard: int | None = None) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each span its chunks as half-open [start, stop), left to right; an empty span has no chunk and the value +0."""
    return tuple(
        tuple((start, min(start + CHUNK, stop)) for start in range(first, stop, CHUNK)) for first, stop in spans(k, shard)
    )
