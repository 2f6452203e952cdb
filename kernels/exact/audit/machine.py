"""Runs PTX on symbols: integers and control flow are computed, float data stay expressions; shared memory and barriers are real.

    stores = run(ptx, [Pointer("x", 4), Pointer("w", 2), Pointer("y", 4), 2, 64], ctas=[(0, 0, 0)])
    stores[("y", 0)]                  # the expression that the kernel wrote to y[0]

Every thread of the chosen CTAs is executed for one concrete shape, so what comes out is exact for that shape and says nothing about
other shapes beyond the code being the same. A branch on data, an opcode that is not in the tables or a read of memory that nobody wrote
raises `NotTraced`. The PTX becomes one Python generator per thread that stops at barriers and at exchanges inside a warp.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernels.exact.audit.expression import Bits, NotTraced, element, expression, fields_of, float_op, fma, joined, split, whole

__all__ = ["Pointer", "run"]

_LINE = re.compile(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_SPECIAL = {"%tid.x": "tid", "%ctaid.x": "cta[0]", "%ctaid.y": "cta[1]", "%ctaid.z": "cta[2]", "%laneid": "(tid & 31)", "global_smem": "0"}
_SPECIAL |= {"%tid.y": "0", "%tid.z": "0", "%nctaid.x": "grid[0]", "%nctaid.y": "grid[1]", "%nctaid.z": "grid[2]"}


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


# ---- translation of one instruction into a line of Python ---------------------------------------------------------------------------------


def _operand(text: str) -> str:
    if not isinstance(text, str):
        raise NotTraced(f"an instruction takes {text} where a register is expected (an atomic, an asynchronous copy)")
    text = text.strip()
    if text in _SPECIAL or text == "_":
        return _SPECIAL.get(text, text)
    if text.startswith("%"):
        return text[1:].replace(".", "_")
    if found := re.fullmatch(r"0f([0-9A-Fa-f]{8})", text):
        return str(int(found[1], 16))
    if text in ("true", "false"):
        return text.capitalize()
    if text.startswith("-"):
        return f"({int(text, 0)})"
    return str(int(text, 0))


def _operands(text: str) -> list:
    """Comma-separated operands; a braced list stays a list, an address is ("at", base, offset)."""
    out = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        if part.startswith("{"):
            out.append([_operand(p) for p in part[1:-1].split(",")])
        elif part.startswith("["):
            base, _, offset = part[1:-1].partition("+")
            out.append(("at", base.strip(), offset.strip() or "0"))
        else:
            out.append(part.strip())
    return out


def _address(place: tuple) -> str:
    return f"{_operand(place[1])} + {_operand(place[2])}"


def _names(value) -> list[str]:
    return value if isinstance(value, list) else [_operand(value)]


def _bits_of(kind: str) -> int:
    return int(re.search(r"\d+", kind)[0])


def _load_store(op: str, args: list) -> str:
    parts = op.split(".")
    count = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
    size = _bits_of(parts[-1]) // 8
    if parts[0] == "ld":
        if "param" in parts:
            index, wide = int(args[1][1].rpartition("_")[2]), 64 if args[0].startswith("%rd") else 32
            return f"{_operand(args[0])} = params[{index}]" + (f" & {(1 << wide) - 1}" if parts[-1][0] == "s" else "")
        return "; ".join(f"{name} = memory.read({_address(args[1])} + {i * size}, {size})" for i, name in enumerate(_names(args[0])[:count]))
    return "; ".join(f"memory.write({_address(args[0])} + {i * size}, {size}, {name})" for i, name in enumerate(_names(args[1])[:count]))


def _convert(parts: list[str], d: str, values: list[str]) -> str:
    to, source = parts[-2:]
    if source in ("bf16", "f16") and to == "f32":
        return f"{d} = widen({values[0]})"
    if source == "f32" and to in ("bf16", "f16", "bf16x2", "f16x2") and parts[1] == "rn":
        return f"{d} = rounded('{to[:-2] if to.endswith('x2') else to}', {', '.join(values)})"
    if "f" in to + source or len(parts) > 3:
        return f"{d} = expression('{'.'.join(parts)}', {', '.join(f'whole({v})' for v in values)}, width={_bits_of(to)})"
    narrow = f"{values[0]} & {(1 << min(_bits_of(source), _bits_of(to))) - 1}"
    if source[0] == "s" and _bits_of(to) > _bits_of(source):
        return f"{d} = ({narrow} ^ {1 << (_bits_of(source) - 1)}) - {1 << (_bits_of(source) - 1)} & {(1 << _bits_of(to)) - 1}"
    return f"{d} = {narrow}"


def _integer(name: str, parts: list[str], d: str, v: list[str]) -> str:
    kind = parts[-1]
    if kind == "pred":
        return f"{d} = logic('{name}', {v[0]}, {v[1]})" if len(v) == 2 else f"{d} = invert({v[0]})"
    bits, signed = _bits_of(kind), kind[0] == "s"
    view = [f"s{bits}({x})" if signed and bits in (32, 64) else f"({x} & {(1 << bits) - 1})" if signed else x for x in v]
    mask = f"& {(1 << bits) - 1}"
    if name in ("add", "sub"):
        return f"{d} = {v[0]} {'+' if name == 'add' else '-'} {v[1]} {mask}"
    if name in ("mul", "mad"):
        wide = "wide" in parts
        tail = f" + {v[2]}" if name == "mad" else ""
        shift = f" >> {bits}" if "hi" in parts else ""
        return f"{d} = (({view[0]} * {view[1]}){shift}{tail}) & {(1 << (bits * 2 if wide else bits)) - 1}"
    if name in ("and", "or", "xor"):
        return f"{d} = {v[0]} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[name]} {v[1]}"
    if name in ("shl", "shr"):
        return f"{d} = shifted('{name}', {view[0] if name == 'shr' else v[0]}, {v[1]}, {bits}) {mask}"
    if name in ("min", "max"):
        return f"{d} = extreme({name}, {view[0]}, {view[1]}) {mask}"
    if name in ("div", "rem"):
        return f"{d} = divide({view[0]}, {view[1]}, '{name}') {mask}"
    if name == "bfe":
        return f"{d} = ({v[0]} >> {v[1]}) & ((1 << {v[2]}) - 1)" if not signed else f"{d} = unsupported('{kind}')"
    if name in ("neg", "not", "abs"):
        return f"{d} = " + {"neg": f"-{v[0]}", "not": f"~{v[0]}", "abs": f"abs({view[0]})"}[name] + f" {mask}"
    raise NotTraced(f"opcode {'.'.join(parts)} has no meaning here")


def _statement(op: str, args: list) -> str:
    """One Python line for one PTX instruction that neither branches nor exchanges."""
    parts = op.split(".")
    name, kind = parts[0], parts[-1]
    if name in ("ld", "st") and not op.startswith("ld.volatile"):
        return _load_store(op, args)
    if name == "mov":
        width = _bits_of(kind) if kind != "pred" else 1
        if isinstance(args[0], list):
            return f"{', '.join(args[0])} = split({_operand(args[1])}, {len(args[0])}, {width // len(args[0])})"
        if isinstance(args[1], list):
            return f"{_operand(args[0])} = joined([{', '.join(args[1])}], {width // len(args[1])})"
        mask = f" & {(1 << width) - 1}" if args[1].startswith("-") else ""
        return f"{_operand(args[0])} = {_operand(args[1])}{mask}"
    if name in ("createpolicy", "prefetch", "membar", "fence"):
        return f"{_operand(args[0])} = 0" if name == "createpolicy" else "pass"
    d, v = _operand(args[0]), [_operand(a) for a in args[1:]]
    if name == "setp":
        if len(parts) > 3:
            raise NotTraced(f"opcode {op} has no meaning here")
        view = [f"s{_bits_of(kind)}({x})" if kind in ("s32", "s64") else x for x in v]
        return f"{d} = {'compare_floats' if kind[0] == 'f' else 'compare'}('{parts[1]}', {view[0]}, {view[1]})"
    if name == "selp":
        return f"{d} = select({v[2]}, {v[0]}, {v[1]})"
    if name == "cvt":
        return _convert(parts, d, v)
    if kind == "f32x2":
        return f"{d} = joined([float_op('{'.'.join(p for p in parts[:-1] if p != 'rn')}', *z) for z in zip(*(split(x, 2, 32) for x in ({', '.join(v)},)))], 32)"
    if op == "fma.rn.f32":
        return f"{d} = fma({', '.join(v)})"
    if op == "fma.rn.f32x2":
        return f"{d} = fma2({', '.join(v)})"
    if kind == "f32" and name in ( "add", "sub", "mul", "div", "sqrt", "neg", "abs", "max", "min"):
        return f"{d} = float_op('{'.'.join(p for p in parts[:-1] if p != 'rn')}', {', '.join(v)})"
    if kind.startswith("f"):
        return f"{d} = expression('{op}', {', '.join(f'whole({x})' for x in v)})"
    return _integer(name, parts, d, v)


def _exchange(op: str, args: list) -> str:
    """A stop at which the scheduler acts: barrier, shuffle, matrix load or store of a warp."""
    if op.startswith(("bar.", "barrier.")):
        return "yield ('bar',)"
    if op.startswith("shfl.sync.bfly") or op.startswith("shfl.sync.idx"):
        return f"{_operand(args[0].split('|')[0])} = yield ('shfl', '{op.split('.')[2]}', {_operand(args[1])}, {_operand(args[2])})"
    if op.startswith("stmatrix"):
        return f"yield ('stmatrix', {'trans' in op}, {_address(args[0])}, [{', '.join(_names(args[1]))}])"
    if op.startswith("ldmatrix"):
        names = _names(args[0])
        return f"{', '.join(names)}, = yield ('ldmatrix', {'trans' in op}, {_address(args[1])}, {len(names)})"
    raise NotTraced(f"opcode {op} has no meaning here")


def translate(ptx: str) -> str:
    """PTX of one kernel -> source of `def thread(tid, cta, grid, memory, params)`, a generator."""
    body = re.sub(r"//[^\n]*", "", ptx.partition("\n{")[2].rpartition("}")[0])
    blocks: list[tuple[str, list[str]]] = [("$entry", [])]
    for raw in re.split(r";|(?<=:)\s*\n", body):
        text = raw.strip()
        if label := re.match(r"(\$\w+):", text):
            blocks.append((label[1], []))
            text = text[label.end() :].strip()
        if not text or text.startswith((".reg", ".local", ".pragma", ".loc", ".file")):
            continue
        negated, predicate, op, rest = _LINE.fullmatch(text).groups()
        args = _operands(rest)
        if op.startswith("bra"):
            code = f"pc = {args[0]!r}; continue"
        elif op in ("ret", "exit"):
            code = "return"
        elif op.startswith(("bar.", "barrier.", "shfl.", "stmatrix", "ldmatrix")):
            code = _exchange(op, args)
        else:
            code = _statement(op, args)
        blocks[-1][1].append(f"if {'not ' if negated else ''}{predicate}: {code}" if predicate else code)
    labels = {name: i for i, (name, _) in enumerate(blocks)}
    registers = sorted(set(re.findall(r"%([a-z]+\d+)", body)))
    lines = ["def thread(tid, cta, grid, memory, params):", f"    {' = '.join(registers)} = undefined", "    pc = 0", "    while True:"]
    for i, (_, code) in enumerate(blocks):
        code = [re.sub(r"pc = '([^']+)'", lambda m: f"pc = {labels[m[1]]}", line) for line in code]
        lines += [f"        if pc <= {i}:", *(f"            {line}" for line in code), f"            pc = {i + 1}"]
    return "\n".join([*lines, "        return", "    yield"])


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
