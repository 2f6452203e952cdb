"""What the kernels of this package must compute, output by output: the specifications that `Specimen.order` checks.

    problems = decode_order(ptx, specimen)            # as entries of the catalogue name it

A new kernel with a sum adds its function here: it runs the PTX on one small shape with every special case of the kernel in it (a ragged
edge, two chunks, the last one short) and compares with the sum built from `kernels/exact/order.py`.
"""

from collections.abc import Callable

from kernels.exact.audit.expression import expression, float_op, fma
from kernels.exact.audit.machine import run
from kernels.exact.audit.order import chunked_sum, compare, neighbour_tree, widened
from kernels.exact.audit.specimen import Specimen
from kernels.exact.order import CHUNK

__all__ = ["decode_order", "parts_order", "prefill_order", "rmsnorm_order", "tiled_order"]

FLOAT_ONE = 0x3F800000


def _linear(m: int, n: int, groups: int, spans: int, x_bits: int, w_bits: int) -> Callable[[int, int, int], list]:
    """products(row, column, span) -> [(x_k, w_k)] in the packed layout [span, group, n, 8]."""

    def products(row: int, column: int, span: int) -> list:
        return [
            (widened("x_ptr", (row * spans + span) * groups * 8 + k, x_bits), widened("w_ptr", ((span * groups + k // 8) * n + column) * 8 + k % 8, w_bits))
            for k in range(groups * 8)
        ]

    return products


def _products(specimen: Specimen, spans: int) -> tuple:
    m, n, groups = (specimen.value(name) for name in ("M", "N", "G"))
    x, w = (8 * specimen.value(name).element_size() for name in ("x_ptr", "w_ptr"))
    return m, n, _linear(m, n, groups, spans, x, w)


def decode_order(ptx: str, specimen: Specimen) -> list[str]:
    """One CTA of the decode kernel: parts of the tree over spans, or with BY_CHUNK the sum of each span's last chunk."""
    s, split = specimen.value("S"), specimen.value("SPLIT")
    m, n, products = _products(specimen, s * split)
    by_chunk = specimen.value("BY_CHUNK")
    last = specimen.grid[1] // split - 1
    stores = run(ptx, specimen.params(), ctas=[(0, last * split, 0)], grid=specimen.grid)
    expected = {}
    for key in stores:
        part, row, column = key[1] // (m * n), key[1] // n % m, key[1] % n
        if by_chunk:
            expected[key] = chunked_sum(products(row, column, part % (s * split))[last * CHUNK :])
        else:
            expected[key] = neighbour_tree([chunked_sum(products(row, column, span)) for span in range(part * s, part * s + s)])
    return compare(stores, expected, least=32)


def prefill_order(ptx: str, specimen: Specimen) -> list[str]:
    """One CTA of the prefill kernel, one of its 32 lanes (lanes exchange nothing): y, the scratch being read back on the way."""
    spans = specimen.value("S")
    _, n, products = _products(specimen, spans)
    stores = run(ptx, specimen.params(), ctas=[(0, 0, 0)], grid=specimen.grid, lanes=range(7, 8))
    outputs = [key for key in stores if key[0] == "y_ptr"]
    expected = {key: neighbour_tree([chunked_sum(products(key[1] // n, key[1] % n, span)) for span in range(spans)]) for key in outputs}
    return compare(stores, expected, least=3)


def parts_order(ptx: str, specimen: Specimen) -> list[str]:
    """Rows left to right from +0, then the tree over parts."""
    rows, parts, count = (specimen.value(name) for name in ("ROWS", "PARTS", "count"))
    stores = run(ptx, specimen.params(), ctas=[(i, 0, 0) for i in range(specimen.grid[0])], grid=specimen.grid)
    expected = {}
    for i in range(count):
        sums: list = [0] * parts
        for row in range(rows):
            sums = [float_op("add", sums[p], widened("part_ptr", (row * parts + p) * count + i, 32)) for p in range(parts)]
        expected["y_ptr", i] = neighbour_tree(sums)
    return compare(stores, expected, least=count)


def rmsnorm_order(ptx: str, specimen: Specimen) -> list[str]:
    """1024 chains over x_k^2 with stride 1024, their balanced tree, then ((x * r) * w) rounded to bf16."""
    steps, k, x_bits, w_bits = specimen.value("STEPS"), specimen.value("K"), *(8 * specimen.value(name).element_size() for name in ("x_ptr", "w_ptr"))
    stores = run(ptx, specimen.params(), ctas=[(0, 0, 0)], grid=specimen.grid)
    x = [widened("x_ptr", i, x_bits) for i in range(k)] + [0] * (steps * 1024 - k)
    chains: list = [0] * 1024
    for step in range(steps):
        chains = [fma(v, v, chain) for v, chain in zip(x[step * 1024 : (step + 1) * 1024], chains, strict=True)]
    mean = float_op("div", neighbour_tree(chains), expression("element", "count", 0))
    r = float_op("div", FLOAT_ONE, float_op("sqrt", float_op("add", mean, expression("element", "eps", 0))))
    y = {("y_ptr", i): expression("bf16", float_op("mul", float_op("mul", x[i], r), widened("w_ptr", i, w_bits)), width=16) for i in range(k)}
    return compare(stores, y, least=k)


def tiled_order(ptx: str, specimen: Specimen) -> list[str]:
    """One CTA of the tiled prefill kernel, by span: the sums of its span for the tile's outputs inside M x N."""
    if specimen.value("S") != 1:
        raise ValueError(f"the tiled kernel is checked a span at a time; got S={specimen.value('S')}; give the entry by_span=True")
    m, n, products = _products(specimen, specimen.grid[1])
    stores = run(ptx, specimen.params(), ctas=[(0, 1, 0)], grid=specimen.grid)
    expected = {key: chunked_sum(products(key[1] // n % m, key[1] % n, key[1] // (m * n))) for key in stores}
    return compare(stores, expected, least=specimen.value("BN"))
