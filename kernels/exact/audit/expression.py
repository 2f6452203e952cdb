"""Expressions over float bits: what a register holds when a kernel runs on symbols instead of numbers.

    >>> from kernels.exact.audit.expression import element, fma
    >>> fma(element("x", 0), element("w", 0), 0) is fma(element("w", 0), element("x", 0), 0)
    True

Equal expressions are one object, so comparing two sums of thousands of products is one `is`. A register is a Python int while its bits are
known, a `Node` where it holds one symbol from bit 0 on, and a `Bits` where symbols sit side by side (two 16-bit weights in 32 bits).
Float operations are IEEE operations by name; no algebra is applied but the commutativity of the two factors and of the two addends.
"""

__all__ = ["Bits", "Node", "NotTraced", "element", "expression", "fields_of", "float_op", "fma", "forget", "joined", "split"]


class NotTraced(Exception):
    """The kernel does something on symbols that has no meaning here (a branch on data, half a symbol, an unknown opcode)."""


class Bits:
    """Symbols at bit offsets, zeros between them: ((offset, Node), ...) ascending."""

    __slots__ = ("fields",)

    def __init__(self, fields: tuple) -> None:
        self.fields = fields

    def __and__(self, mask):
        if not isinstance(mask, int):
            return expression("and", self, mask)
        kept = []
        for offset, node in self.fields:
            window = (mask >> offset) & ((1 << node.width) - 1)
            if window == (1 << node.width) - 1:
                kept.append((offset, node))
            elif window:
                return expression("and", whole(self), mask)
        return _simplest(tuple(kept))

    def __or__(self, other):
        if isinstance(other, int) and other:
            return expression("or", whole(self), other)
        fields = tuple(sorted(self.fields + fields_of(other), key=lambda f: f[0]))
        if any(a[0] + a[1].width > b[0] for a, b in zip(fields, fields[1:], strict=False)):
            return expression("or", whole(self), whole(other))
        return _simplest(fields)

    __ror__ = __or__
    __rand__ = __and__

    def __lshift__(self, count):
        if count and count % 16 == 0:
            return _simplest(tuple((offset + count, node) for offset, node in self.fields))
        return self if count == 0 else expression("shl", whole(self), count)

    def __rshift__(self, count):
        if count and count % 16 == 0:
            return _simplest(tuple((offset - count, node) for offset, node in self.fields if offset >= count))
        return self if count == 0 else expression("shr", whole(self), count)

    def _integer(name):  # noqa: N805  (a table of integer operations on bits, each an opaque node)
        return lambda self, other: expression(name, whole(self), other if isinstance(other, int) else whole(other))

    __add__, __sub__, __mul__, __xor__ = _integer("iadd"), _integer("isub"), _integer("imul"), _integer("xor")
    __radd__, __rmul__, __rxor__ = __add__, __mul__, __xor__
    __rsub__ = lambda self, other: expression("isub", other, whole(self))  # noqa: E731

    def __bool__(self):
        raise NotTraced("a branch or predicate depends on data")


class Node(Bits):
    """One operation on symbols or constants; interned by `expression`."""

    __slots__ = ("args", "op", "width")

    def __init__(self, op: str, args: tuple, width: int) -> None:
        self.op, self.args, self.width = op, args, width
        self.fields = ((0, self),)

    def __repr__(self) -> str:
        return self.text(5)

    def text(self, depth: int) -> str:
        """The upper levels; what lies deeper is an ellipsis."""
        if self.op == "element":
            return f"{self.args[0]}[{self.args[1]}]"
        return f"{self.op}({', '.join(a.text(depth - 1) if isinstance(a, Node) else str(a) for a in self.args)})" if depth else "..."


_TABLE: dict[tuple, Node] = {}


def expression(op: str, *args: object, width: int = 32) -> Node:
    """The one node of this operation and these operands."""
    key = (op, width, *args)
    node = _TABLE.get(key)
    if node is None:
        node = _TABLE[key] = Node(op, args, width)
    return node


def forget() -> None:
    """Frees every node; expressions made before and after are not comparable."""
    _TABLE.clear()


def element(buffer: str, index: int, width: int = 32) -> Node:
    return expression("element", buffer, index, width=width)


def _simplest(fields: tuple) -> "Bits | int":
    if not fields:
        return 0
    offset, node = fields[0]
    if len(fields) == 1 and offset == 0:
        return node.args[0] if node.op == "constant" else node
    return Bits(fields)


def whole(value: object) -> object:
    """A register as operand of an opaque integer operation."""
    if type(value) is Bits:
        return expression("packed", *(part for field in value.fields for part in field))
    return value


def fields_of(value: "Bits | int", width: int = 32) -> tuple:
    if isinstance(value, int):
        return ((0, expression("constant", value, width=width)),) if value else ()
    return value.fields


def joined(parts: list, width: int) -> "Bits | int":
    """Registers side by side, the first lowest: mov.b32 r, {a, b}."""
    if all(isinstance(part, int) for part in parts):
        return sum(part << (i * width) for i, part in enumerate(parts))
    fields = [(i * width + offset, node) for i, part in enumerate(parts) for offset, node in fields_of(part, width)]
    for i in range(len(fields) - 1, 0, -1):  # two halves that meet again are the whole
        (offset, low), (above, high) = fields[i - 1 : i + 1]
        if low.op == high.op == "half" and above == offset + 16 and (low.args, high.args) == ((low.args[0], 0), (low.args[0], 1)):
            fields[i - 1 : i + 1] = [(offset, low.args[0])]
    return _simplest(tuple(fields))


def split(value: "Bits | int", count: int, width: int) -> list:
    """The inverse of `joined`."""
    if isinstance(value, int):
        return [(value >> (i * width)) & ((1 << width) - 1) for i in range(count)]
    parts: list[list] = [[] for _ in range(count)]
    for offset, node in value.fields:
        i = offset // width
        if offset + node.width <= (i + 1) * width:
            parts[i].append((offset - i * width, node))
        elif width == 16 and node.width == 32 and offset == i * width:  # a matrix store moves floats as halves
            for j in (0, 1):
                parts[i + j].append((0, expression("half", node, j, width=16)))
        else:
            raise NotTraced(f"part of {node} is used")
    return [_simplest(tuple(part)) for part in parts]


def _float32(value: "Bits | int") -> "Node | int":
    """A 32-bit register read as float: a bf16 symbol in its upper half is that element widened."""
    if isinstance(value, int):
        return value
    if type(value) is Bits:
        if len(value.fields) == 1 and value.fields[0][0] == 16 and value.fields[0][1].width == 16:
            return expression("widen", value.fields[0][1])
        return whole(value)
    if value.width != 32:
        raise NotTraced(f"16 bits of {value} are read as a float")
    return value


def _rank(value: "Node | int") -> tuple:
    return (1, value) if isinstance(value, int) else (0, id(value))


def float_op(op: str, *values: "Bits | int") -> Node:
    """A correctly rounded operation on float32 registers; the two factors or addends are put in one order."""
    args = [value if value.__class__ is Node and value.width == 32 else _float32(value) for value in values]
    if op in ("fma", "mul", "add", "max", "min") and _rank(args[0]) > _rank(args[1]):
        args[:2] = args[1::-1]
    return expression(op, *args)


def fma(a: "Bits | int", b: "Bits | int", c: "Bits | int") -> Node:
    """`float_op("fma", a, b, c)`, fast for three symbols (nearly all instructions of a matrix product)."""
    if a.__class__ is Node and b.__class__ is Node and c.__class__ is Node and a.width == b.width == c.width == 32:
        key = ("fma", 32, a, b, c) if id(a) <= id(b) else ("fma", 32, b, a, c)
        node = _TABLE.get(key)
        if node is None:
            node = _TABLE[key] = Node("fma", key[2:], 32)
        return node
    return float_op("fma", a, b, c)
