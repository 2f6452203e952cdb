"""The order of sums: what each output must be, as an expression, and what is wrong where the compiled kernel computes another.

    problems = compare(stores, {("y", 0): chunked_sum(products)})

The specified sum of family A (`kernels/exact/order.py`) is built here from products, once for every output, and the kernel's PTX is run on
symbols (`machine.py`): the two expressions must be one object. That proves, for the shape that was run, every operand, every operation and
their order, for all values of the data; a second shape would run the same instructions. It says nothing about what ptxas makes of `.rn`
operations, which it may move but neither fuse nor reassociate.
"""

from kernels.exact.audit.expression import Bits, Node, element, expression, float_op, fma
from kernels.exact.order import CHUNK

__all__ = ["chunked_sum", "compare", "neighbour_tree", "widened"]

CHUNKS_ARE = f"one FMA chain in ascending k per chunk of {CHUNK}, finished by + 0, chunks added left to right, spans in a balanced tree"


def widened(name: str, index: int, bits: int) -> Node:
    """Element of a buffer as float32; 16-bit ones are widened exactly."""
    return element(name, index) if bits == 32 else expression("widen", element(name, index, bits))


def chunked_sum(products: list[tuple[Node, Node]], chunk: int = CHUNK) -> object:
    """total = total + (chain + 0) over chunks, from +0; a chain is fma(a, b, chain) from +0."""
    total: object = 0
    for start in range(0, len(products), chunk):
        chain: object = 0
        for a, b in products[start : start + chunk]:
            chain = fma(a, b, chain)
        total = float_op("add", total, float_op("add", chain, 0))
    return total


def neighbour_tree(values: list) -> object:
    """((0+1)+(2+3))+((4+5)+(6+7)): neighbours first."""
    while len(values) > 1:
        values = [float_op("add", a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _positive(node: object) -> bool:
    """Known never to be -0: +0, or a sum in which +0 took part."""
    return isinstance(node, int) and node == 0 or isinstance(node, Node) and node.op == "add+"


def _sum(a: object, b: object) -> object:
    """a + b in normal form. "add+" is a + b, but +0 where both are -0: what (a + 0) + b, a + (b + 0) and (a + 0) + (b + 0) all are."""
    if not _positive(a) and not _positive(b):
        return float_op("add", a, b)
    if any(isinstance(x, int) and x == 0 and _positive(y) for x, y in ((a, b), (b, a))):
        return b if isinstance(a, int) and a == 0 else a
    bare = [next(x for x in side.args if x != 0) if isinstance(side, Node) and side.op == "add+" and 0 in side.args else side for side in (a, b)]
    return expression("add+", *sorted(bare, key=lambda x: (isinstance(x, int), id(x))))


def without_zeros(root: object) -> object:
    """The same value for all data, with the additions of +0 in one normal form: fma(0, 0, c) is c + 0 (padding); see `_sum`."""
    done: dict[object, object] = {}
    for node in reversed(_after_operands(root)):
        args = [done.get(a, a) if isinstance(a, Node) else a for a in node.args]
        if node.op == "fma" and args[0] == 0 and args[1] == 0:
            done[node] = _sum(args[2], 0)
        elif node.op == "add":
            done[node] = _sum(*args)
        else:
            done[node] = node if list(node.args) == args else (float_op(node.op, *args) if node.op in ("fma", "mul") else expression(node.op, *args, width=node.width))
    return done.get(root, root)


def _after_operands(root: object) -> list:
    """Every node below, each before its operands in at least its last place (reverse: operands first)."""
    order: dict = {}
    stack = [(root, False)]
    while stack:
        node, left = stack.pop()
        if not isinstance(node, Node) or node in order:
            continue
        if left:
            order[node] = None
        else:
            stack.append((node, True))
            stack += [(a, False) for a in node.args]
    return list(order)[::-1]


def compare(stores: dict, expected: dict, least: int = 1) -> list[str]:
    """Problems of the first output that differs, and of outputs nobody wrote."""
    missing = [key for key in expected if key not in stores]
    if missing or len(expected) < least:
        return [f"order: every output is written; got none for {missing[:3]} ({len(missing)} of {len(expected)})"]
    for key, wanted in expected.items():
        if stores[key] is not wanted and without_zeros(stores[key]) is not without_zeros(wanted):
            return [f"order: {key[0]}[{key[1]}] {explain(without_zeros(wanted), without_zeros(stores[key]))}"]
    return []


def _operations(node: object, found: dict | None = None) -> dict:
    """Every operation below a node once: {node: None}, iteratively (a chain of 256 is 256 deep)."""
    found, stack = {}, [node]
    while stack:
        if isinstance(at := stack.pop(), Node) and at not in found:
            found[at] = None
            stack += at.args
    return found


def _chain(node: object) -> list[tuple]:
    """The factors of an FMA chain, first product first."""
    factors = []
    while isinstance(node, Node) and node.op == "fma":
        factors.append(frozenset(node.args[:2]))
        node = node.args[2]
    return factors[::-1]


def _first_difference(wanted: object, got: object) -> tuple:
    """Descends as long as exactly one operand differs; chains are compared as a whole."""
    while isinstance(wanted, Node) and isinstance(got, Node) and wanted.op == got.op != "fma" and len(wanted.args) == len(got.args):
        differing = [(a, b) for a, b in zip(wanted.args, got.args, strict=True) if a is not b]
        if len(differing) > 1 and wanted.op in ("add", "add+"):  # the two addends may stand the other way round
            common = set(wanted.args) & set(got.args)
            if common:
                differing = [(next(a for a in wanted.args if a not in common), next(b for b in got.args if b not in common))]
        if not differing or not isinstance(differing[0][0], Bits):
            break
        wanted, got = differing[0]
    return wanted, got


def explain(wanted: object, got: object) -> str:
    """The broken rule in words."""
    names = [{n.op for n in _operations(side)} for side in (wanted, got)]
    if "fma" in names[0] and "mul" in names[1] - names[0]:
        return f"products by fma: got mul and add where fma is specified; {got}"
    if "fma" in names[1] - names[0]:
        return f"mul and add: got fma where they are specified; {got}"
    at_wanted, at_got = _first_difference(wanted, got)
    if isinstance(at_wanted, Node) and at_wanted.op in ("add", "add+") and 0 in at_wanted.args and at_got in at_wanted.args:
        return f"finished by + 0: a chunk is never -0; got the chain alone, {at_got}"
    chain, other = _chain(at_wanted), _chain(at_got)
    if chain and other and chain != other:
        if chain == other[::-1]:
            return "ascending k: got the chain in descending order"
        if set(chain) == set(other):
            place = next(i for i, (a, b) in enumerate(zip(chain, other, strict=True)) if a != b)
            return f"ascending k: got the products permuted, first at product {place} of {len(chain)}"
        if set(other) < set(chain):
            return f"one accumulator: {CHUNKS_ARE}; got a chain over {len(other)} of {len(chain)} products"
    if chain and not other and "fma" in names[1]:
        return f"one accumulator: {CHUNKS_ARE}; got {at_got}"
    return f"is another expression: specified {at_wanted}; got {at_got}"
