"""`python -m kernels.exact.audit [--targets sm_80 ...] [--kernels NAME ...] [--json FILE]`: the table kernel x target; exit code 1 on any FAIL.

    python -m kernels.exact.audit --executed compiles.json      # what a GPU recorded (`record_compiles`): compiled again, compared, audited
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import triton

from kernels.exact.audit.catalogue import catalogue
from kernels.exact.audit.check import AuditResult, audit, audit_compiled
from kernels.exact.audit.record import differences, recompile
from kernels.exact.audit.specimen import TARGETS, binary_of, kernel_name



def _line(result: AuditResult) -> str:
    facts, floats = result.facts, result.facts.get("opcodes", {})
    arithmetic = " ".join(f"{op.removesuffix('.f32')}:{n}" for op, n in floats.items() if op.split(".")[0] in ("fma", "add", "mul", "sub", "div", "sqrt") or op.startswith("v_"))
    numbers = f"regs {facts.get('registers', '-'):>3} spill {facts.get('spill_bytes', '-'):>4} smem {facts.get('shared_bytes', '-'):>6}"
    return f"{'FAIL' if result.problems else 'PASS'} {result.name:<28.28} {result.target:<7} {numbers} {str(facts.get('sha256', '-'))[:10]:<10} order {facts.get('order', '-'):<12} {arithmetic[:70]}"


def _executed(path: Path) -> int:
    """Audited = executed: every recorded kernel compiles to the recorded bytes here, and those bytes pass the rules on opcodes."""
    record = json.loads(path.read_text())
    entries = record["entries"] if isinstance(record, dict) else record
    families = {kernel_name(s.kernel): s for s in catalogue()}
    wrong = differences(entries)
    for entry in entries:
        specimen = families.get(entry["kernel"])
        if specimen is None:
            wrong.append(f"{entry['kernel']}: not in the catalogue")
            continue
        compiled, target = recompile(entry), f"sm_{entry['target'][1]}" if entry["target"][0] == "cuda" else entry["target"][1]
        result = audit_compiled(replace(specimen, order=None), target, compiled.asm, entry["shared_bytes"], binary_of(compiled))
        wrong += [f"{entry['kernel']}: {problem}" for problem in result.problems]
    print("\n".join([*wrong, f"{len(entries)} executed binaries, {len({e['kernel'] for e in entries})} kernels: {'FAIL' if wrong else 'each compiled here to the same bytes and passed'}"]))
    return 1 if wrong or not entries else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.exact.audit", description="Static audit of the exact kernels; no GPU is needed.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--kernels", nargs="+", default=None, metavar="NAME", help="only entries whose name starts so")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--executed", type=Path, help="a record of executed kernels: compile again, compare, audit")
    chosen = parser.parse_args(arguments)
    if chosen.executed:
        return _executed(chosen.executed)
    specimens = [s for s in catalogue() if chosen.kernels is None or s.name.startswith(tuple(chosen.kernels))]
    if not specimens:
        parser.error(f"no entry's name starts with {chosen.kernels}; the entries are {', '.join(sorted({s.name for s in catalogue()}))}")
    results, began = [], time.monotonic()
    for specimen in specimens:
        for target in chosen.targets:
            if target in specimen.targets:
                result = audit(specimen, target)
                results.append({"name": result.name, "kernel": kernel_name(specimen.kernel), "target": target, "problems": result.problems, **result.facts})
                print(_line(result), flush=True)
                print("".join(f"     {problem}\n" for problem in result.problems), end="", flush=True)
    failed = sum(bool(r["problems"]) for r in results)
    print(f"{len(results) - failed} of {len(results)} pass in {time.monotonic() - began:.0f} s (triton {triton.__version__})")
    if chosen.json:
        rows = ",\n".join(json.dumps(row, sort_keys=True) for row in results)
        chosen.json.write_text(f'{{"triton": "{triton.__version__}", "results": [\n{rows}\n]}}\n')
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
