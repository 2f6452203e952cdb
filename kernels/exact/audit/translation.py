"""Translates PTX into Python: the source of one generator per thread, which `machine.run` executes on symbols.

    source = translate(ptx)           # "def thread(tid, cta, grid, memory, params): ..."

A line of the source is an instruction. The functions that the lines call (`fma`, `select`, `compare`, ...) are machine.py's; a generator
stops (`yield`) where a thread needs others: at a barrier, a shuffle, a matrix load or store of a warp. An opcode without a meaning here
raises `NotTraced`; nothing is executed.
"""

import re

from kernels.exact.audit.expression import NotTraced

__all__ = ["translate"]

_LINE = re.compile(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_SPECIAL = {"%tid.x": "tid", "%ctaid.x": "cta[0]", "%ctaid.y": "cta[1]", "%ctaid.z": "cta[2]", "%laneid": "(tid & 31)", "global_smem": "0"}
_SPECIAL |= {"%tid.y": "0", "%tid.z": "0", "%nctaid.x": "grid[0]", "%nctaid.y": "grid[1]", "%nctaid.z": "grid[2]"}


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
