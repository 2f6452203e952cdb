"""Claim: the compiled kernels contain IEEE-754 float instructions only and add in the specified order; no GPU is needed to see it.

Each launch of the catalogue is compiled offline for NVIDIA and AMD; opcodes are compared with an allow-list, sums are run on symbols.
Deliberately wrong kernels must fail, each with the name of its rule.
"""

import ast
import hashlib
import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from kernels.exact.activations import elementwise_kernel
from kernels.exact.audit import __main__ as command
from kernels.exact.audit.catalogue import catalogue
from kernels.exact.audit.check import audit
from kernels.exact.audit.expression import element
from kernels.exact.audit.machine import run
from kernels.exact.audit.order import chunked_sum, compare
from kernels.exact.audit.record import entry_of, recompile
from kernels.exact.audit.specimen import TARGETS, Specimen, binary_of, captured, compile_specimen, target_of
from kernels.exact.foreign import foreign, parameters, run_foreign

BACKENDS = {"nvidia", "amd"} <= set(triton.backends.backends)
pytestmark = pytest.mark.skipif(not BACKENDS, reason="needs triton's NVIDIA and AMD backends (compilers only)")
ROOT = Path(__file__).resolve().parents[2]
ELEMENTWISE = next(s for s in catalogue() if s.family == "elementwise")
# sums are run on symbols (seconds a kernel): here on one target and one kernel of each sum, on all of them under soak and by the command
PROVED, PROVED_HERE = "sm_90", ("decode, one token", "decode, split: parts", "prefill, 16 bits", "rmsnorm")


def ids(specimens) -> list[str]:
    return [s.name for s in specimens]


def audited_here() -> list[tuple[Specimen, str]]:
    """Every kernel on sm_90 and on one other target in turn, so that each target meets a seventh of them; all of all under soak."""
    found = []
    for place, specimen in enumerate(catalogue()):
        others = [t for t in specimen.targets if t != PROVED]
        found += [(specimen, target) for target in (PROVED, others[place % len(others)])]
    return found


@pytest.mark.parametrize("specimen, target", audited_here(), ids=[f"{s.name}-{t}" for s, t in audited_here()])
def test_a_kernel_has_only_ieee_instructions_and_the_specified_order(specimen: Specimen, target: str) -> None:
    proved = target == PROVED and specimen.name in PROVED_HERE
    result = audit(specimen, target, order=proved)
    assert result.problems == []
    assert result.facts["order"] == "proved" or not proved


def test_every_target_is_met_by_every_kind_of_kernel_that_can_be_made_for_it() -> None:
    met = {target: {s.family for s, t in audited_here() if t == target} for target in TARGETS}
    assert all(families == {s.family for s in catalogue()} for families in met.values()), met


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_kernel_passes_on_every_target() -> None:
    results = [audit(s, target) for s in catalogue() for target in s.targets]
    assert len(results) >= 7 * len({s.kernel for s in catalogue()}) * 0.9
    assert {(r.name, r.target): r.problems for r in results if r.problems} == {}


def _decorated(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in n.decorator_list)}


def test_every_kernel_that_is_launched_stands_in_the_catalogue() -> None:
    """Launched: named before a `[grid]` call, or jitted and called by no other jitted function."""
    launched = set()
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "kernels/exact").rglob("*.py"))}
    jitted = {name: path for path, tree in trees.items() for name in _decorated(tree)}
    called = {n.id for tree in trees.values() for f in _decorated(tree).values() for n in ast.walk(f) if isinstance(n, ast.Name)}
    for tree in trees.values():
        calls = [n.func.value.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript) and isinstance(n.func.value, ast.Name)]
        launched |= set(calls) & set(jitted)
    launched |= set(jitted) - called
    assert launched - {s.kernel.fn.__name__ for s in catalogue()} == set()


# ---- wrong kernels: each fails with the name of its rule ------------------------------------------------------------------------------


@triton.jit
def wrong_exp(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


@triton.jit
def wrong_division(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, 1.0 / tl.load(x_ptr + i))


@triton.jit
def wrong_flush(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, libdevice.div_rn(tl.load(x_ptr + i), 3.0))


@triton.jit
def wrong_atomic(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.atomic_add(y_ptr + i % 2, tl.load(x_ptr + i))


@triton.jit
def wrong_dot(x_ptr, y_ptr, PRECISION: tl.constexpr):
    i = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + i).to(tl.float32)
    tl.store(y_ptr + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :], tl.dot(x, tl.trans(x), input_precision=PRECISION))


@triton.jit
def byte_dot(x_ptr, y_ptr):
    i = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :], tl.dot(x, tl.trans(x), out_dtype=tl.int32))


def one(call, family: str = "elementwise", orders: dict | None = None) -> Specimen:
    return captured("wrong", call, family=family, orders=orders)[0]


X, Y, HALF, BYTE = torch.ones(128 * 64), torch.ones(128 * 128), torch.ones(128 * 64, dtype=torch.bfloat16), torch.ones(128 * 64, dtype=torch.int8)
PLAIN = dict(enable_fp_fusion=False)
WRONG_OPCODES = {
    "exp": (lambda: wrong_exp[(1,)](X, Y, **PLAIN), "elementwise", "sm_80", "approx: "),
    "exp on AMD": (lambda: wrong_exp[(1,)](X, Y, **PLAIN), "elementwise", "gfx942", "v_exp_f32"),
    "a / b": (lambda: wrong_division[(1,)](X, Y, **PLAIN), "elementwise", "sm_90", "allow-list: "),
    "libdevice flushes": (lambda: wrong_flush[(1,)](X, Y, **PLAIN), "elementwise", "sm_90", "ftz: "),
    "atomic": (lambda: wrong_atomic[(1,)](X, Y, **PLAIN), "fma", "sm_90", "atomic: "),
    "tf32": (lambda: wrong_dot[(1,)](X, Y, PRECISION="tf32", **PLAIN), "fma", "sm_80", "matrix instruction: family fma allows none"),
    "ieee dot of upcast operands": (lambda: wrong_dot[(1,)](HALF, Y, PRECISION="ieee", **PLAIN), "fma", "sm_100", "matrix instruction: family fma allows none"),
    "ieee dot on AMD": (lambda: wrong_dot[(1,)](X, Y, PRECISION="ieee", **PLAIN), "fma", "gfx942", "v_mfma_f32"),
    "float matrix in the integer family": (lambda: wrong_dot[(1,)](HALF, Y, PRECISION="tf32", **PLAIN), "integer", "sm_90", "matrix instruction: family integer allows s8 x s8 -> s32 only"),
    "fusion": (lambda: elementwise_kernel[(1,)](X, X, Y, 100, OP="silu", BLOCK=128), "elementwise", "sm_90", "contraction: "),
}


@pytest.mark.parametrize("name", WRONG_OPCODES)
def test_a_wrong_kernel_fails_with_the_name_of_its_rule(name: str) -> None:
    call, family, target, rule = WRONG_OPCODES[name]
    assert any(rule in problem for problem in audit(one(call, family), target).problems)


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_on_integer_tensor_cores_pass_in_the_integer_family_only(target: str) -> None:
    def call() -> object:
        return byte_dot[(1,)](BYTE, Y.int(), **PLAIN)

    assert audit(one(call, "integer"), target).problems == []
    assert any("matrix instruction" in problem for problem in audit(one(call, "fma"), target).problems)


def test_too_much_shared_memory_fails_where_it_does_not_fit() -> None:
    def call() -> object:
        return wrong_dot[(1,)](HALF, Y, PRECISION="bf16x3", num_stages=1, **PLAIN)

    results = {target: audit(one(call, "fma"), target) for target in ("sm_80", "sm_89")}
    shared = results["sm_89"].facts["shared_bytes"]
    assert any("shared memory: sm_89 has 101376 bytes" in p for p in results["sm_89"].problems) == (shared > 101376)


# ---- order ----------------------------------------------------------------------------------------------------------------------------


@triton.jit
def chain_kernel(x_ptr, w_ptr, y_ptr, LENGTH: tl.constexpr, MODE: tl.constexpr):
    lane = tl.arange(0, 32)
    acc = tl.zeros((32,), tl.float32)
    other = tl.zeros((32,), tl.float32)
    for i in range(0, LENGTH, 2):
        k = LENGTH - 2 - i if MODE == "descending" else i
        x0, w0 = tl.load(x_ptr + k), tl.load(w_ptr + lane * LENGTH + k)
        x1, w1 = tl.load(x_ptr + k + 1), tl.load(w_ptr + lane * LENGTH + k + 1)
        if MODE == "two accumulators":
            acc = tl.fma(x0, w0, acc)
            other = tl.fma(x1, w1, other)
        elif MODE == "permuted" or MODE == "descending":
            acc = tl.fma(x0, w0, tl.fma(x1, w1, acc))
        elif MODE == "mul and add":
            acc = acc + x0 * w0
            acc = acc + x1 * w1
        else:
            acc = tl.fma(x1, w1, tl.fma(x0, w0, acc))
    if MODE == "two accumulators":
        acc = acc + other
    tl.store(y_ptr + lane, acc if MODE == "without + 0" else acc + 0.0)


@triton.jit
def sum_kernel(x_ptr, w_ptr, y_ptr, LENGTH: tl.constexpr):
    lane, k = tl.arange(0, 32)[:, None], tl.arange(0, LENGTH)[None, :]
    tl.store(y_ptr + tl.arange(0, 32), tl.sum(tl.load(x_ptr + k) * tl.load(w_ptr + lane * LENGTH + k), 1))


def chain_order(ptx: str, specimen: Specimen) -> list[str]:
    length = specimen.value("LENGTH")
    products = [[(element("x_ptr", k), element("w_ptr", lane * length + k)) for k in range(length)] for lane in range(32)]
    expected = {("y_ptr", lane): chunked_sum(pairs) for lane, pairs in enumerate(products)}
    # a chunk alone: no total before it
    expected = {key: total.args[1] if total.args[0] == 0 else total.args[0] for key, total in expected.items()}
    return compare(run(ptx, specimen.params(), ctas=[(0, 0, 0)]), expected)


def chain(mode: str) -> Specimen:
    def call() -> object:
        if mode == "tl.sum":
            return sum_kernel[(1,)](X, Y, torch.ones(32), LENGTH=32, num_warps=1, **PLAIN)
        return chain_kernel[(1,)](X, Y, torch.ones(32), LENGTH=32, MODE=mode, num_warps=1, **PLAIN)

    return one(call, "fma", dict.fromkeys(("chain_kernel", "sum_kernel"), chain_order))


WRONG_ORDERS = {
    "descending": "ascending k: got the chain in descending order",
    "permuted": "ascending k: got the products permuted, first at product 0",
    "two accumulators": "one accumulator: ",
    "mul and add": "products by fma: ",
    "tl.sum": "products by fma: ",
    "without + 0": "finished by + 0: ",
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_one_ascending_chain_is_proved(target: str) -> None:
    assert audit(chain("good"), target).facts["order"] == "proved"


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
@pytest.mark.parametrize("mode", WRONG_ORDERS)
def test_a_wrong_order_fails_with_the_name_of_its_rule(mode: str, target: str) -> None:
    problems = audit(chain(mode), target).problems
    assert len(problems) == 1 and problems[0].startswith("order: ") and WRONG_ORDERS[mode] in problems[0]


# ---- audited = executed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_recorded_kernel_compiles_to_the_same_bytes_again(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_specimen(ELEMENTWISE, target)
    entry = json.loads(json.dumps(entry_of(compiled)))
    assert not entry["line_info"]
    monkeypatch.chdir(tmp_path)  # no path may enter the binary
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    again = recompile(entry)
    kind = "cubin" if target == "sm_90" else "hsaco"
    assert hashlib.sha256(binary_of(again)).hexdigest() == entry[f"{kind}_sha256"]


def test_a_record_is_compared_and_audited_and_a_changed_digest_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    entry = entry_of(compile_specimen(ELEMENTWISE, "sm_90"))
    record = tmp_path / "compiles.json"
    record.write_text(json.dumps({"entries": [entry]}))
    assert command.main(["--executed", str(record)]) == 0
    record.write_text(json.dumps({"entries": [entry | {"cubin_sha256": "0" * 64}]}))
    assert command.main(["--executed", str(record)]) == 1
    assert "executed 000000000000, compiled here" in capsys.readouterr().out


def test_a_record_of_another_triton_or_of_a_foreign_module_is_refused() -> None:
    entry = entry_of(compile_specimen(ELEMENTWISE, "sm_90"))
    with pytest.raises(ValueError, match="needs its own triton"):
        recompile(entry | {"triton": "0.0"})
    with pytest.raises(ValueError, match="only kernels of this project"):
        recompile(entry | {"kernel": "os:system"})


def test_foreign_code_of_new_architectures_is_refused() -> None:
    """Triton makes sm_90a of 90, which a driver accepts on Hopper alone: that would be native code under another name."""
    with pytest.raises(ValueError, match="PTX of an architecture"), foreign(90):
        pass
    with pytest.raises(ValueError, match="PTX of an architecture"):
        run_foreign(wrong_exp, (1,), (X, Y), {}, architecture=100)


def test_foreign_parameters_are_the_arguments_without_constants_and_two_scratch_pointers() -> None:
    count = 1500
    specimen = one(lambda: elementwise_kernel[(2,)](X, X, Y, count, OP="silu", BLOCK=1024, **PLAIN))
    _, signature, _, _, bound = specimen.packed(target_of("sm_80"))
    values = parameters(specimen, signature, bound)
    assert [v.value for v in values] == [X.data_ptr(), X.data_ptr(), Y.data_ptr(), count, 0, 0]
    ptx = compile_specimen(specimen, "sm_80").asm["ptx"]
    assert ptx.count(".param .") == len(values), "the kernel takes as many parameters as are passed"


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "audit.json"
    assert command.main(["--targets", "sm_80", "gfx942", "--kernels", "silu", "--json", str(out)]) == 0
    text, results = capsys.readouterr().out, json.loads(out.read_text())["results"]
    assert text.count("PASS silu") == 2 and "2 of 2 pass" in text
    assert {r["target"] for r in results} == {"sm_80", "gfx942"} and all(len(r["sha256"]) == 64 and r["problems"] == [] for r in results)


def test_an_unknown_kernel_name_is_one_clear_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(["--kernels", "no such kernel"])
    assert "no entry's name starts with" in capsys.readouterr().err
