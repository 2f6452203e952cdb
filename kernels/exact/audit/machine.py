"""Runs PTX on symbols: integers and control flow are computed, float data stay expressions; shared memory and barriers are real.

    stores = run(ptx, [Pointer("x", 4), Pointer("w", 2), Pointer("y", 4), 2, 64], ctas=[(0, 0, 0)])
    stores[("y", 0)]                  # the expression that the kernel wrote to y[0]

Every thread of the chosen CTAs is executed for one concrete shape, so what comes out is exact for that shape and says nothing about
other shapes beyond the code being the same. A branch on data, an opcode that is not in the tables or a read of memory that nobody wrote
raises `NotTraced`. The PTX becomes one Python generator per thread (`translation.py`) that stops at barriers and at exchanges inside a warp.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernels.exact.audit.expression import Bits, NotTraced, element, expression, fields_of, float_op, fma, joined, split, whole
from kernels.exact.audit.translation import translate

__all__ = ["Pointer", "run"]

@dataclass(frozen=True)
class Pointer:
    """An argument that points to elements of `bytes` bytes."""

    name: str
    bytes: int


@dataclass
class Memory:
    """Bytes as symbols: global buffers at (index + 1) << 40, shared memory from 0."""

    buffers: list = field(default_factory=list)
    cells: dict = field(default_factory=dict)  # address -> (value, bytes)

    def read(self, address: int, count: int):
        if not isinstance(address, int):
            raise NotTraced("an address depends on data")
        cell = self.cells.get(address)
        if cell is not None and cell[1] == count:
            return cell[0]
        fields, at = [], address
        while at < address + count:
            value, size = self.cells.get(at) or self._fresh(at)
            if size > address + count - at:
                value, size = split(value, 2, 4 * size)[0], size // 2
            fields += [(8 * (at - address) + offset, node) for offset, node in fields_of(value, 8 * size)]
            at += size
        return joined([Bits(tuple(fields))], 8 * count) if fields else 0

    def _fresh(self, address: int):
        if address < 1 << 40:
            raise NotTraced(f"shared memory is read at {address} before it is written")
        pointer = self.buffers[(address >> 40) - 1]
        index, inside = divmod(address & ((1 << 40) - 1), pointer.bytes)
        if inside:
            raise NotTraced(f"part of an element of {pointer.name} is read")
        return element(pointer.name, index, 8 * pointer.bytes), pointer.bytes

    def write(self, address: int, count: int, value) -> None:
        if not isinstance(address, int):
            raise NotTraced("an address depends on data")
        size = self.buffers[(address >> 40) - 1].bytes if address >= 1 << 40 else min(count, 4)
        for i, part in enumerate(split(value, count // size, 8 * size) if size < count else [value]):
            self.cells[address + i * size] = (part, max(size, 1))


def s32(x):
    return (x ^ 0x80000000) - 0x80000000 if isinstance(x, int) else x


def s64(x):
    return (x ^ (1 << 63)) - (1 << 63) if isinstance(x, int) else x


def compare(name, a, b):
    if isinstance(a, int) and isinstance(b, int):
        return {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b, "lo": a < b, "ls": a <= b, "hi": a > b, "hs": a >= b}[name]
    return expression(name, whole(a), whole(b), width=1)


def compare_floats(name, a, b):
    if isinstance(a, int) and isinstance(b, int):
        x, y = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (a, b))
        return {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[name]
    return expression(name, whole(a), whole(b), width=1)


def select(predicate, a, b):
    if isinstance(predicate, (bool, int)):
        return a if predicate else b
    return a if a is b else expression("select", predicate, whole(a), whole(b))


def extreme(function, a, b):
    return function(a, b) if isinstance(a, int) and isinstance(b, int) else expression(function.__name__, whole(a), whole(b))


def divide(a, b, what):
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient if what == "div" else a - quotient * b


def invert(p):
    return not p if isinstance(p, (bool, int)) else expression("not", p, width=1)


def logic(name, a, b):
    if isinstance(a, (bool, int)) and isinstance(b, (bool, int)):
        return bool(a & b if name == "and" else a | b if name == "or" else a ^ b)
    known, other = (a, b) if isinstance(a, (bool, int)) else (b, a)
    if name != "xor" and isinstance(known, (bool, int)):
        return (other if known else False) if name == "and" else (True if known else other)
    return expression(name, a, b, width=1)


def widen(value):
    return expression("widen", value) if value != 0 else 0


def fma2(a, b, c):
    (a0, a1), (b0, b1), (c0, c1) = split(a, 2, 32), split(b, 2, 32), split(c, 2, 32)
    return joined([fma(a0, b0, c0), fma(a1, b1, c1)], 32)


def rounded(kind, *values):
    return joined([expression(kind, *float_op("id", v).args, width=16) for v in reversed(values)], 16)


def shifted(name, value, count, bits):
    if count >= bits:
        return 0
    return (value << count) & ((1 << bits) - 1) if name == "shl" else value >> count


# ---- the scheduler ----------------------------------------------------------------------------------------------------------------------


def _matrix_rows(addresses: list[int], matrix: int) -> list[int]:
    """Addresses of the 8 rows of one 8x8 matrix of 16-bit elements: given by lanes 8 * matrix to 8 * matrix + 7."""
    return addresses[8 * matrix : 8 * matrix + 8]


def _places(rows: list[int], lane: int, transposed: bool) -> list[int]:
    """Addresses of the two elements that a lane holds: row lane / 4, columns 2 * (lane % 4) and the next, or the transpose of that."""
    i, j = lane // 4, 2 * (lane % 4)
    return [rows[j] + 2 * i, rows[j + 1] + 2 * i] if transposed else [rows[i] + 2 * j, rows[i] + 2 * j + 2]


def _serve(requests: list[tuple], memory: Memory) -> list:
    """Answers of one warp's equal requests."""
    kind = requests[0][0]
    if any(r[0] != kind for r in requests):
        raise NotTraced("the lanes of a warp stop at different exchanges")
    if kind == "bar":
        return [None] * len(requests)
    if len(requests) != 32:
        raise NotTraced(f"{kind} needs all 32 lanes")
    if kind == "shfl":
        partner = (lambda i, r: i ^ r[3]) if requests[0][1] == "bfly" else (lambda i, r: r[3] & 31)
        return [requests[partner(i, r)][2] for i, r in enumerate(requests)]
    addresses = [r[2] for r in requests]
    if kind == "stmatrix":
        for lane, (_, transposed, _, values) in enumerate(requests):
            for matrix, value in enumerate(values):
                for place, half in zip(_places(_matrix_rows(addresses, matrix), lane, transposed), split(value, 2, 16), strict=True):
                    memory.write(place, 2, half)
        return [None] * len(requests)
    transposed, count = requests[0][1], requests[0][3]
    return [
        [joined([memory.read(place, 2) for place in _places(_matrix_rows(addresses, m), lane, transposed)], 16) for m in range(count)]
        for lane in range(len(requests))
    ]


def _run_block(threads: list[Iterator], lanes: int, memory: Memory) -> None:
    """All threads of a CTA: a warp runs to its next stop; barriers wait for every warp."""
    warps = [threads[i : i + lanes] for i in range(0, len(threads), lanes)]
    answers: list = [[None] * lanes for _ in warps]
    at_barrier = [False] * len(warps)
    running = set(range(len(warps)))
    while running:
        for w in sorted(running):
            while not at_barrier[w]:
                requests = []
                for thread, answer in zip(warps[w], answers[w], strict=True):
                    try:
                        requests.append(thread.send(answer))
                    except StopIteration:
                        pass
                if not requests:
                    running.discard(w)
                    break
                if len(requests) != len(warps[w]):
                    raise NotTraced("some lanes of a warp have ended while others exchange")
                answers[w] = _serve(requests, memory)
                at_barrier[w] = requests[0][0] == "bar"
        at_barrier = [False] * len(warps)


def run(ptx: str, params: list, ctas: list[tuple[int, int, int]], grid: tuple[int, int, int] = (1, 1, 1), lanes: range = range(32)) -> dict:
    """What the given CTAs wrote, in the order given: (pointer name, element index) -> expression.

    params: Pointer, int, or the name of a float argument. lanes: those of every warp that run; fewer suffice where lanes exchange nothing
    (one that reads what an absent lane should have written raises NotTraced).
    """
    namespace = dict(
        split=split, joined=joined, whole=whole, expression=expression, float_op=float_op, s32=s32, s64=s64, compare=compare, compare_floats=compare_floats, select=select,
        extreme=extreme, divide=divide, invert=invert, logic=logic, rounded=rounded, undefined=expression("undefined"), fma=fma, fma2=fma2, widen=widen, shifted=shifted,
    )  # fmt: skip
    exec(compile(translate(ptx), "<ptx>", "exec"), namespace)
    count = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    pointers = [p for p in params if isinstance(p, Pointer)]
    values = [(pointers.index(p) + 1) << 40 if isinstance(p, Pointer) else element(p, 0) if isinstance(p, str) else p for p in params] + [0, 0]
    memory = Memory(buffers=pointers)
    for cta in ctas:
        memory.cells = {a: c for a, c in memory.cells.items() if a >= 1 << 40}
        _run_block([namespace["thread"](tid, cta, grid, memory, values) for tid in range(count) if tid % 32 in lanes], len(lanes), memory)
    mask = (1 << 40) - 1
    written = {a: value for a, (value, _) in memory.cells.items() if a >= 1 << 40}
    return {(pointers[(a >> 40) - 1].name, (a & mask) // pointers[(a >> 40) - 1].bytes): value for a, value in written.items()}
